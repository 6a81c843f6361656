/* PTX modules and kernel launches: cuModule*, cuFunc* and cuLaunchKernel. */
#include "modules.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Limits of compute capability 9.0. */
#define MAX_THREADS 1024
#define MAX_BLOCK_Z 64
#define MAX_GRID_X 0x7fffffff
#define MAX_GRID_YZ 65535
#define SHARED_BYTES (48 << 10)
struct CUfunc_st {
    const struct kernel *kernel;
    struct CUmod_st *module;
};

struct CUmod_st {
    const struct module_image *image;
    char *globals;
    int device;
    struct CUfunc_st *functions;
};

/* ---- Modules ----------------------------------------------------------------------------------- */

/* The code stays loaded: work that is queued may still use it. */
static CUresult load_module(struct CUmod_st **module, const char *text)
{
    if (!text || !strstr(text, ".version"))
        return CUDA_ERROR_NO_BINARY_FOR_GPU;
    char *const path = translate_ptx(text);
    if (!path)
        return CUDA_ERROR_INVALID_PTX;
    void *const library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    free(path);
    const struct module_image *const image =
        library ? dlsym(library, "emulated_module") : NULL;
    if (!image) {
        fprintf(stderr, "emulated GPU: %s\n", dlerror());
        return CUDA_ERROR_INVALID_IMAGE;
    }
    struct CUmod_st *const found = calloc(1, sizeof *found);
    found->image = image;
    found->device = current_device();
    found->globals = allocate_variables(image->globals_bytes);
    if (image->globals_bytes && !found->globals) {
        free(found);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    const unsigned before = allow_access(ALL_DEVICES);
    if (image->globals_bytes)
        memcpy(found->globals, image->globals, image->globals_bytes);
    allow_access(before);
    found->functions = calloc(image->kernel_count + 1, sizeof *found->functions);
    for (uint32_t i = 0; i < image->kernel_count; i++) {
        found->functions[i].kernel = &image->kernels[i];
        found->functions[i].module = found;
    }
    *module = found;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuModuleLoadData(CUmodule *module, const void *image)
{
    CUresult result = (CUresult)begin_call();

    if (!result)
        result = (CUresult)check_capture_safe();
    return result ? result : load_module(module, image);
}

EXPORT CUresult cuModuleUnload(CUmodule module)
{
    return module ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

EXPORT CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name)
{
    for (uint32_t i = 0; i < module->image->kernel_count; i++)
        if (!strcmp(module->image->kernels[i].name, name)) {
            *function = &module->functions[i];
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_NOT_FOUND;
}

EXPORT CUresult cuModuleGetGlobal_v2(CUdeviceptr *address, size_t *bytes, CUmodule module,
                                     const char *name)
{
    for (uint32_t i = 0; i < module->image->variable_count; i++) {
        const struct variable *const found = &module->image->variables[i];
        if (strcmp(found->name, name))
            continue;
        *address = (CUdeviceptr)(module->globals + found->offset);
        *bytes = found->bytes;
        return CUDA_SUCCESS;
    }
    return CUDA_ERROR_NOT_FOUND;
}

/* ---- Functions --------------------------------------------------------------------------------- */

EXPORT CUresult cuFuncLoad(CUfunction function)
{
    return function ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

EXPORT CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function)
{
    const struct kernel *const kernel = function ? function->kernel : NULL;

    if (!kernel)
        return CUDA_ERROR_INVALID_HANDLE;
    switch (attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
        *value = (int)kernel->max_threads;
        return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES:
        *value = (int)kernel->shared_bytes;
        return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_NUM_REGS:
        *value = (int)kernel->registers;
        return CUDA_SUCCESS;
    default:
        return CUDA_ERROR_NOT_SUPPORTED;
    }
}

/* ---- Launches ---------------------------------------------------------------------------------- */

static CUresult check_launch(const struct CUfunc_st *function, const uint32_t grid[3],
                             const uint32_t block[3], unsigned shared)
{
    const uint64_t threads = (uint64_t)block[0] * block[1] * block[2];

    if (function->module->device != current_device())
        return CUDA_ERROR_INVALID_HANDLE;
    if (!threads || !grid[0] || !grid[1] || !grid[2])
        return CUDA_ERROR_INVALID_VALUE;
    if (grid[0] > MAX_GRID_X || grid[1] > MAX_GRID_YZ || grid[2] > MAX_GRID_YZ)
        return CUDA_ERROR_INVALID_VALUE;
    if (threads > MAX_THREADS || block[0] > MAX_THREADS || block[1] > MAX_THREADS ||
        block[2] > MAX_BLOCK_Z || threads > function->kernel->max_threads)
        return CUDA_ERROR_INVALID_VALUE;
    if ((uint64_t)shared + function->kernel->shared_bytes > SHARED_BYTES)
        return CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y,
                               unsigned grid_z, unsigned block_x, unsigned block_y,
                               unsigned block_z, unsigned shared, CUstream stream,
                               void **parameters, void **extra)
{
    const uint32_t grid[] = {grid_x, grid_y, grid_z}, block[] = {block_x, block_y, block_z};
    CUresult result = (CUresult)ensure_context();

    if (result)
        return result;
    if (!function)
        return CUDA_ERROR_INVALID_HANDLE;
    if (extra)
        return CUDA_ERROR_NOT_SUPPORTED;
    result = check_launch(function, grid, block, shared);
    if (result)
        return result;
    const struct kernel *const kernel = function->kernel;
    const size_t bytes = sizeof(struct launch) + kernel->parameter_bytes;
    struct launch *const work = aligned_alloc(16, (bytes + 15) / 16 * 16);
    memset(work, 0, bytes);
    work->kernel = kernel;
    work->globals = function->module->globals;
    memcpy(work->grid_dim, grid, sizeof work->grid_dim);
    memcpy(work->block_dim, block, sizeof work->block_dim);
    work->dynamic_shared_bytes = shared;
    for (uint32_t i = 0; i < kernel->parameter_count; i++)
        memcpy(work->parameters + kernel->parameters[i].offset, parameters[i],
               kernel->parameters[i].bytes);
    const unsigned flags = SAME_DEVICE | (kernel->flags & POLLS_MEMORY ? SPINS : 0);
    result = (CUresult)enqueue(stream, execute_launch, work, bytes, flags);
    free(work);
    return result;
}
