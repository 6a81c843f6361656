/* Functions that programs with compiled kernels call, such as torch, and CuPy does not.
 *
 * These kernels have no PTX, so that launches fail. The exception is torch's kernel that only spends
 * time: work runs as late as possible anyway.
 */
#define _GNU_SOURCE
#include "device.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- code that nvcc adds to a library: registration of its kernels ---- */

/* The kernels, by the addresses of their host functions. */
static struct {
    const void *function;
    const char *name;
} *kernels;
static size_t kernel_count;
static _Thread_local cudaStream_t launch_stream;

EXPORT void **__cudaRegisterFatBinary(void *binary)
{
    static void *handle;
    (void)binary;
    return &handle;
}

EXPORT void __cudaRegisterFatBinaryEnd(void)
{
}

EXPORT void __cudaUnregisterFatBinary(void)
{
}

EXPORT void __cudaRegisterVar(void)
{
}

EXPORT char __cudaInitModule(void)
{
    return 1;
}

EXPORT void __cudaRegisterFunction(void **handle, const void *function, char *device_function,
                                   const char *name)
{
    HOLD_DEVICE;
    (void)handle, (void)device_function;
    if (kernel_count % 1024 == 0)
        kernels = realloc(kernels, (kernel_count + 1024) * sizeof *kernels);
    kernels[kernel_count].function = function;
    kernels[kernel_count++].name = name;
}

EXPORT cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function)
{
    *kernel = (cudaKernel_t)function;
    return cudaSuccess;
}

EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t bytes,
                                            cudaStream_t stream)
{
    (void)grid, (void)block, (void)bytes;
    launch_stream = stream;
    return 0;
}

EXPORT cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *bytes,
                                              cudaStream_t *stream)
{
    *grid = *block = (dim3){1, 1, 1}, *bytes = 0;
    *stream = launch_stream;
    return cudaSuccess;
}

EXPORT cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments,
                                    size_t bytes, cudaStream_t handle)
{
    HOLD_DEVICE;
    const char *name = "(unknown)";
    struct stream *stream;

    (void)grid, (void)block, (void)arguments, (void)bytes;
    CHECK(begin_stream_call(handle, &stream));
    for (size_t k = 0; k < kernel_count; k++)
        name = kernels[k].function == function ? kernels[k].name : name;
    if (strstr(name, "spin_kernel"))
        return failed(enqueue(stream, (struct work){.flags = SAME_DEVICE}));
    fprintf(stderr, "emulated GPU: the kernel %s has no PTX and cannot run\n", name);
    return failed(cudaErrorNoKernelImageForDevice);
}

EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments,
                                      size_t bytes, cudaStream_t stream)
{
    return cudaLaunchKernel(kernel, grid, block, arguments, bytes, stream);
}

/* ---- other functions ---- */

EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags)
{
    return flags ? failed(cudaErrorNotSupported) : cudaEventRecord(event, stream);
}

/* The times of the emulated device mean nothing. */
EXPORT cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end)
{
    cudaError_t error = cudaEventQuery(start);

    *milliseconds = 0;
    return error ? error : cudaEventQuery(end);
}

EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{
    *least = 0, *greatest = -5;
    return cudaSuccess;
}

static CUresult unsupported(void)
{
    return CUDA_ERROR_NOT_SUPPORTED;
}

EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function,
                                                    unsigned version, unsigned long long flags,
                                                    enum cudaDriverEntryPointQueryResult *status)
{
    void *found = dlsym(RTLD_DEFAULT, name);

    (void)version, (void)flags;
    *function = found ? found : (void *)unsupported;
    *status = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
