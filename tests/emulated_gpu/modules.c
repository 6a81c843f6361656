/* PTX modules and kernel launches: cuModule*, cuFunc* and cuLaunchKernel. */
#define _GNU_SOURCE
#include "device.h"
#include "kernel.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Limits of compute capability 9.0. */
#define MAX_THREADS 1024
#define MAX_BLOCK_Z 64
#define MAX_GRID_X 0x7fffffff
#define MAX_GRID_YZ 65535
#define SHARED_BYTES (48 << 10)

struct CUfunc_st {
    const struct kernel *kernel;
    struct CUmod_st *module;
    CUfunctionLoadingState state;
};

struct CUmod_st {
    const struct module_image *image;
    char *globals;
    int device;
    struct CUfunc_st *functions;
};

/* ---- modules ---- */

/* FNV-1a. */
static uint64_t hash(const char *text, uint64_t state)
{
    for (; *text; text++)
        state = (state ^ (unsigned char)*text) * 0x100000001b3;
    return state;
}

/* Return the path of the shared library that ptx.py makes of PTX text, or NULL if the text is
 * invalid. All processes share these files. The caller frees the path. */
static char *translate(const char *text)
{
    const char *folder = getenv("EMULATED_GPU_CACHE");
    uint64_t version = hash(TRANSLATOR_VERSION, 0xcbf29ce484222325);
    char *path, *command;
    FILE *translator;

    if (asprintf(&path, "%s/%016lx%016lx.so", folder ? folder : "/tmp", hash(text, version),
                 hash(text, ~version)) < 0)
        abort();
    if (!access(path, R_OK))
        return path;
    /* Without the variables that make programs load the emulated device. */
    if (asprintf(&command, "env -u LD_LIBRARY_PATH -u LD_PRELOAD -u PYTHONPATH '%s' '%s' '%s'",
                 PYTHON, TRANSLATOR, path) < 0)
        abort();
    translator = popen(command, "we");
    free(command);
    if (translator && fputs(text, translator) >= 0 && !pclose(translator))
        return path;
    fprintf(stderr, "emulated GPU: a module cannot be translated\n");
    free(path);
    return NULL;
}

/* Find the description in a library. The code stays loaded: queued work may still use it. */
static const struct module_image *load_image(char *path)
{
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    const struct module_image *image = library ? dlsym(library, "emulated_module") : NULL;

    if (!image)
        fprintf(stderr, "emulated GPU: %s\n", dlerror());
    free(path);
    return image;
}

static CUresult check_load(void)
{
    HOLD_DEVICE;
    cudaError_t error = begin_call();
    return (CUresult)(error ? error : check_capture_safe());
}

EXPORT CUresult cuModuleLoadData(CUmodule *module, const void *text)
{
    CUresult result = check_load();
    const struct module_image *image;
    char *path;

    if (result)
        return result;
    if (!text || !strstr(text, ".version"))
        return CUDA_ERROR_NO_BINARY_FOR_GPU;
    path = translate(text); /* without the mutex, because it takes seconds */
    if (!path)
        return CUDA_ERROR_INVALID_PTX;
    image = load_image(path);
    if (!image)
        return CUDA_ERROR_INVALID_IMAGE;
    HOLD_DEVICE;
    struct CUmod_st made = {.image = image, .device = current_device()};
    made.globals = allocate_variables(image->globals_bytes);
    if (image->globals_bytes && !made.globals)
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (image->globals_bytes)
        memcpy(made.globals, image->globals, image->globals_bytes);
    made.functions = calloc(image->kernel_count + 1, sizeof *made.functions);
    *module = malloc(sizeof made);
    **module = made;
    for (uint32_t i = 0; i < image->kernel_count; i++)
        made.functions[i] = (struct CUfunc_st){&image->kernels[i], *module, 0};
    return CUDA_SUCCESS;
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

/* ---- functions ---- */

/* Kernels are loaded lazily: by this function or their first launch. */
EXPORT CUresult cuFuncLoad(CUfunction function)
{
    if (!function)
        return CUDA_ERROR_INVALID_HANDLE;
    function->state = CU_FUNCTION_LOADING_STATE_LOADED;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuFuncIsLoaded(CUfunctionLoadingState *state, CUfunction function)
{
    if (!function)
        return CUDA_ERROR_INVALID_HANDLE;
    *state = function->state;
    return CUDA_SUCCESS;
}

/* ---- launches ---- */

static CUresult check_launch(const struct CUfunc_st *function, const uint32_t grid[3],
                             const uint32_t block[3], unsigned shared)
{
    const uint64_t threads = (uint64_t)block[0] * block[1] * block[2];
    const int is_valid =
        threads && grid[0] && grid[1] && grid[2] && grid[0] <= MAX_GRID_X
        && grid[1] <= MAX_GRID_YZ && grid[2] <= MAX_GRID_YZ && threads <= MAX_THREADS
        && block[0] <= MAX_THREADS && block[1] <= MAX_THREADS && block[2] <= MAX_BLOCK_Z
        && threads <= function->kernel->max_threads
        && (uint64_t)shared + function->kernel->shared_bytes <= SHARED_BYTES;

    if (function->module->device != current_device())
        return CUDA_ERROR_INVALID_HANDLE;
    return is_valid ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y,
                               unsigned grid_z, unsigned block_x, unsigned block_y,
                               unsigned block_z, unsigned shared, CUstream handle,
                               void **parameters, void **extra)
{
    HOLD_DEVICE;
    const uint32_t grid[] = {grid_x, grid_y, grid_z}, block[] = {block_x, block_y, block_z};
    CUresult result = (CUresult)ensure_context();
    struct stream *stream;

    if (result)
        return result;
    if (!function || extra)
        return function ? CUDA_ERROR_NOT_SUPPORTED : CUDA_ERROR_INVALID_HANDLE;
    result = check_launch(function, grid, block, shared);
    if (!result)
        result = (CUresult)begin_stream_call(handle, &stream);
    if (result)
        return result;
    cuFuncLoad(function);
    const struct kernel *kernel = function->kernel;
    const size_t bytes = sizeof(struct launch) + kernel->parameter_bytes;
    struct launch *launch = aligned_alloc(16, (bytes + 15) / 16 * 16);
    memset(launch, 0, bytes);
    launch->kernel = kernel;
    launch->globals = function->module->globals;
    memcpy(launch->grid_dim, grid, sizeof launch->grid_dim);
    memcpy(launch->block_dim, block, sizeof launch->block_dim);
    launch->dynamic_shared_bytes = shared;
    for (uint32_t i = 0; i < kernel->parameter_count; i++)
        memcpy(launch->parameters + kernel->parameters[i].offset, parameters[i],
               kernel->parameters[i].bytes);
    const unsigned flags = SAME_DEVICE | (kernel->flags & POLLS_MEMORY ? SPINS : 0);
    result = (CUresult)enqueue(stream, (struct work){execute_launch, launch, bytes, flags});
    free(launch);
    return result;
}
