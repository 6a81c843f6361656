/* PTX modules and kernel launches: cuModule*, cuLibrary*, cuKernel*, cuFunc*, cuLaunchKernel* and
 * cuOccupancy*. A kernel of a library and a function of a module are the same object. */
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
#define OPTIN_SHARED_BYTES (227 << 10)
#define MULTIPROCESSOR_SHARED_BYTES (228 << 10)
#define MULTIPROCESSOR_THREADS 2048
#define MULTIPROCESSOR_BLOCKS 32
#define MULTIPROCESSOR_REGISTERS 65536
#define WARP 32

struct CUfunc_st {
    const struct kernel *kernel;
    struct CUmod_st *module;
    int max_dynamic_shared_bytes;
    int shared_carveout;
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
    if (image->globals_bytes)
        memcpy(found->globals, image->globals, image->globals_bytes);
    found->functions = calloc(image->kernel_count + 1, sizeof *found->functions);
    for (uint32_t i = 0; i < image->kernel_count; i++) {
        found->functions[i].kernel = &image->kernels[i];
        found->functions[i].module = found;
        found->functions[i].max_dynamic_shared_bytes =
            SHARED_BYTES - (int)image->kernels[i].shared_bytes;
    }
    *module = found;
    return CUDA_SUCCESS;
}

static CUresult find_function(struct CUfunc_st **function, struct CUmod_st *module,
                              const char *name)
{
    for (uint32_t i = 0; i < module->image->kernel_count; i++)
        if (!strcmp(module->image->kernels[i].name, name)) {
            *function = &module->functions[i];
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_NOT_FOUND;
}

static CUresult find_global(CUdeviceptr *address, size_t *bytes, struct CUmod_st *module,
                            const char *name)
{
    for (uint32_t i = 0; i < module->image->variable_count; i++) {
        const struct variable *const found = &module->image->variables[i];
        if (strcmp(found->name, name))
            continue;
        if (address)
            *address = (CUdeviceptr)(module->globals + found->offset);
        if (bytes)
            *bytes = found->bytes;
        return CUDA_SUCCESS;
    }
    return CUDA_ERROR_NOT_FOUND;
}

static CUresult load_file(struct CUmod_st **module, const char *path)
{
    char *text = NULL;
    size_t bytes = 0;
    FILE *const file = fopen(path, "r");

    if (!file)
        return CUDA_ERROR_FILE_NOT_FOUND;
    const int failed = getdelim(&text, &bytes, 0, file) < 0;
    fclose(file);
    const CUresult result = failed ? CUDA_ERROR_INVALID_IMAGE : load_module(module, text);
    free(text);
    return result;
}

EXPORT CUresult cuModuleLoadData(CUmodule *module, const void *image)
{
    CUresult result = (CUresult)begin_call();

    if (!result)
        result = (CUresult)check_capture_safe();
    return result ? result : load_module(module, image);
}

EXPORT CUresult cuModuleLoad(CUmodule *module, const char *path)
{
    return load_file(module, path);
}

EXPORT CUresult cuModuleUnload(CUmodule module)
{
    return module ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

EXPORT CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name)
{
    return find_function(function, module, name);
}

EXPORT CUresult cuModuleGetGlobal_v2(CUdeviceptr *address, size_t *bytes, CUmodule module,
                                     const char *name)
{
    return find_global(address, bytes, module, name);
}

EXPORT CUresult cuModuleGetLoadingMode(CUmoduleLoadingMode *mode)
{
    *mode = CU_MODULE_LAZY_LOADING;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuLibraryLoadData(CUlibrary *library, const void *code, CUjit_option *options,
                                  void **values, unsigned count, CUlibraryOption *library_options,
                                  void **library_values, unsigned library_count)
{
    (void)options, (void)values, (void)count;
    (void)library_options, (void)library_values, (void)library_count;
    return cuModuleLoadData((CUmodule *)library, code);
}

EXPORT CUresult cuLibraryUnload(CUlibrary library)
{
    return cuModuleUnload((CUmodule)library);
}

EXPORT CUresult cuLibraryGetKernel(CUkernel *kernel, CUlibrary library, const char *name)
{
    return find_function((CUfunction *)kernel, (CUmodule)library, name);
}

EXPORT CUresult cuLibraryGetModule(CUmodule *module, CUlibrary library)
{
    *module = (CUmodule)library;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuLibraryGetGlobal(CUdeviceptr *address, size_t *bytes, CUlibrary library,
                                   const char *name)
{
    return find_global(address, bytes, (CUmodule)library, name);
}

EXPORT CUresult cuKernelGetFunction(CUfunction *function, CUkernel kernel)
{
    *function = (CUfunction)kernel;
    return CUDA_SUCCESS;
}

/* ---- Functions --------------------------------------------------------------------------------- */

EXPORT CUresult cuFuncLoad(CUfunction function)
{
    return function ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

EXPORT CUresult cuFuncGetName(const char **name, CUfunction function)
{
    *name = function->kernel->name;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function)
{
    const struct kernel *const kernel = function ? function->kernel : NULL;

    if (!kernel)
        return CUDA_ERROR_INVALID_HANDLE;
    switch (attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
        *value = (int)kernel->max_threads;
        break;
    case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES:
        *value = (int)kernel->shared_bytes;
        break;
    case CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES:
        *value = 0;
        break;
    case CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES:
        *value = (int)kernel->local_bytes;
        break;
    case CU_FUNC_ATTRIBUTE_NUM_REGS:
        *value = (int)kernel->registers;
        break;
    case CU_FUNC_ATTRIBUTE_PTX_VERSION:
    case CU_FUNC_ATTRIBUTE_BINARY_VERSION:
        *value = 90;
        break;
    case CU_FUNC_ATTRIBUTE_CACHE_MODE_CA:
        *value = 0;
        break;
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
        *value = function->max_dynamic_shared_bytes;
        break;
    case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
        *value = function->shared_carveout;
        break;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

EXPORT CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value)
{
    const int most = function ? OPTIN_SHARED_BYTES - (int)function->kernel->shared_bytes : 0;

    if (!function)
        return CUDA_ERROR_INVALID_HANDLE;
    switch (attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
        if (value < 0 || value > most)
            return CUDA_ERROR_INVALID_VALUE;
        function->max_dynamic_shared_bytes = value;
        return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
        function->shared_carveout = value;
        return CUDA_SUCCESS;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

/* ---- Occupancy --------------------------------------------------------------------------------- */

static int least(int a, int b)
{
    return a < b ? a : b;
}

static int blocks_per_multiprocessor(const struct CUfunc_st *function, int threads,
                                     size_t dynamic_shared_bytes)
{
    const struct kernel *const kernel = function->kernel;
    const int rounded = (threads + WARP - 1) / WARP * WARP;
    const int shared = (int)(kernel->shared_bytes + dynamic_shared_bytes) + 1024;

    if (threads < 1 || threads > (int)kernel->max_threads)
        return 0;
    const int by_registers = MULTIPROCESSOR_REGISTERS / ((int)kernel->registers * rounded);
    return least(least(MULTIPROCESSOR_BLOCKS, MULTIPROCESSOR_THREADS / rounded),
                 least(by_registers, MULTIPROCESSOR_SHARED_BYTES / shared));
}

EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction function,
                                                            int threads, size_t shared)
{
    if (!function || threads < 1)
        return CUDA_ERROR_INVALID_VALUE;
    *blocks = blocks_per_multiprocessor(function, threads, shared);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks,
                                                                     CUfunction function,
                                                                     int threads, size_t shared,
                                                                     unsigned flags)
{
    (void)flags;
    return cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, threads, shared);
}

static int multiprocessors(void)
{
    int count = 0;

    cuDeviceGetAttribute(&count, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, current_device());
    return count;
}

EXPORT CUresult cuOccupancyMaxPotentialBlockSize(int *min_grid, int *block, CUfunction function,
                                                 CUoccupancyB2DSize shared_of_block, size_t shared,
                                                 int limit)
{
    int best = 0;

    if (!function)
        return CUDA_ERROR_INVALID_VALUE;
    const int most = limit > 0 ? least(limit, (int)function->kernel->max_threads)
                               : (int)function->kernel->max_threads;
    for (int threads = most; threads > 0; threads = (threads - 1) / WARP * WARP) {
        const size_t bytes = shared_of_block ? shared_of_block(threads) : shared;
        const int blocks = blocks_per_multiprocessor(function, threads, bytes);
        if (blocks * threads <= best)
            continue;
        best = blocks * threads;
        *block = threads;
        *min_grid = blocks * multiprocessors();
    }
    return CUDA_SUCCESS;
}

/* ---- Launches ---------------------------------------------------------------------------------- */

static CUresult check_launch(const struct CUfunc_st *function, const uint32_t grid[3],
                             const uint32_t block[3], unsigned shared, int is_cooperative)
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
    if ((int64_t)shared > function->max_dynamic_shared_bytes)
        return CUDA_ERROR_INVALID_VALUE;
    const uint64_t most =
        (uint64_t)blocks_per_multiprocessor(function, (int)threads, shared) * multiprocessors();
    if (is_cooperative && (uint64_t)grid[0] * grid[1] * grid[2] > most)
        return CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE;
    return CUDA_SUCCESS;
}

/* Copy the parameters: each by its address, or all in one buffer. */
static CUresult pack_parameters(char *into, const struct kernel *kernel, void **parameters,
                                void **extra)
{
    if (parameters || !kernel->parameter_count) {
        for (uint32_t i = 0; i < kernel->parameter_count; i++)
            memcpy(into + kernel->parameters[i].offset, parameters[i],
                   kernel->parameters[i].bytes);
        return CUDA_SUCCESS;
    }
    const void *buffer = NULL;
    size_t bytes = 0;
    for (; extra && *extra != CU_LAUNCH_PARAM_END; extra += 2) {
        if (*extra == CU_LAUNCH_PARAM_BUFFER_POINTER)
            buffer = extra[1];
        else if (*extra == CU_LAUNCH_PARAM_BUFFER_SIZE)
            bytes = *(size_t *)extra[1];
    }
    if (!buffer || bytes > kernel->parameter_bytes)
        return CUDA_ERROR_INVALID_VALUE;
    memcpy(into, buffer, bytes);
    return CUDA_SUCCESS;
}

static CUresult launch(CUfunction function, const uint32_t grid[3], const uint32_t block[3],
                       unsigned shared, CUstream stream, void **parameters, void **extra,
                       int is_cooperative)
{
    CUresult result = (CUresult)ensure_context();

    if (result)
        return result;
    if (!function)
        return CUDA_ERROR_INVALID_HANDLE;
    result = check_launch(function, grid, block, shared, is_cooperative);
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
    work->is_cooperative = (uint32_t)is_cooperative;
    result = pack_parameters(work->parameters, kernel, parameters, extra);
    if (!result) {
        const int polls = kernel->flags & POLLS_MEMORY && !is_cooperative;
        const unsigned flags = SAME_DEVICE | (polls ? SPINS : 0);
        result = (CUresult)enqueue(stream, execute_launch, work, bytes, flags);
    }
    free(work);
    return result;
}

EXPORT CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y,
                               unsigned grid_z, unsigned block_x, unsigned block_y,
                               unsigned block_z, unsigned shared, CUstream stream,
                               void **parameters, void **extra)
{
    const uint32_t grid[] = {grid_x, grid_y, grid_z}, block[] = {block_x, block_y, block_z};

    return launch(function, grid, block, shared, stream, parameters, extra, 0);
}

EXPORT CUresult cuLaunchCooperativeKernel(CUfunction function, unsigned grid_x, unsigned grid_y,
                                          unsigned grid_z, unsigned block_x, unsigned block_y,
                                          unsigned block_z, unsigned shared, CUstream stream,
                                          void **parameters)
{
    const uint32_t grid[] = {grid_x, grid_y, grid_z}, block[] = {block_x, block_y, block_z};

    return launch(function, grid, block, shared, stream, parameters, NULL, 1);
}
