/* Functions of the runtime API that programs with kernels of their own call, such as torch.
 *
 * Their kernels have no PTX, so that a launch fails. The exception is torch's kernel that only
 * spends time: work runs as late as possible anyway.
 */
#define _GNU_SOURCE
#include "device.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- registration of kernels by the code that nvcc adds to a library ---- */

/* The kernels by the address of their host functions, in no order. */
static struct kernel_name {
    const void *function;
    const char *name;
} *names;
static size_t name_count, name_limit;

EXPORT void **__cudaRegisterFatBinary(void *binary)
{
    void **handle = malloc(sizeof *handle);
    *handle = binary;
    return handle;
}

EXPORT void __cudaRegisterFatBinaryEnd(void **handle)
{
    (void)handle;
}

EXPORT void __cudaUnregisterFatBinary(void **handle)
{
    free(handle);
}

EXPORT char __cudaInitModule(void **handle)
{
    (void)handle;
    return 1;
}

EXPORT void __cudaRegisterFunction(void **handle, const char *function, char *device_function,
                                   const char *name)
{
    (void)handle, (void)device_function;
    HOLD_DEVICE;
    if (name_count == name_limit) {
        name_limit = 2 * name_limit + 1024;
        names = realloc(names, name_limit * sizeof *names);
    }
    names[name_count++] = (struct kernel_name){function, name};
}

EXPORT void __cudaRegisterVar(void **handle)
{
    (void)handle;
}

EXPORT cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function)
{
    *kernel = (cudaKernel_t)function;
    return cudaSuccess;
}

/* ---- launches ---- */

static _Thread_local struct {
    dim3 grid, block;
    size_t shared;
    cudaStream_t stream;
} pushed;

EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared,
                                            cudaStream_t stream)
{
    pushed.grid = grid, pushed.block = block, pushed.shared = shared, pushed.stream = stream;
    return 0;
}

EXPORT cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared,
                                              cudaStream_t *stream)
{
    *grid = pushed.grid, *block = pushed.block, *shared = pushed.shared, *stream = pushed.stream;
    return cudaSuccess;
}

static const char *name_of(const void *function)
{
    for (size_t k = 0; k < name_count; k++)
        if (names[k].function == function)
            return names[k].name;
    return "(unknown)";
}

EXPORT cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments,
                                    size_t shared, cudaStream_t handle)
{
    HOLD_DEVICE;
    const char *name = name_of(function);
    struct stream *stream;

    (void)grid, (void)block, (void)arguments, (void)shared;
    CHECK(begin_stream_call(handle, &stream));
    if (strstr(name, "spin_kernel"))
        return failed(enqueue(stream, (struct work){.flags = SAME_DEVICE}));
    fprintf(stderr, "emulated GPU: the kernel %s has no PTX and cannot run\n", name);
    return failed(cudaErrorNoKernelImageForDevice);
}

EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments,
                                      size_t shared, cudaStream_t stream)
{
    return cudaLaunchKernel(kernel, grid, block, arguments, shared, stream);
}

EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *how, const void *function,
                                       void **arguments)
{
    return cudaLaunchKernel(function, how->gridDim, how->blockDim, arguments,
                            how->dynamicSmemBytes, how->stream);
}

/* ---- other names and forms of functions in the other files ---- */

EXPORT cudaError_t cudaEventCreate(cudaEvent_t *event)
{
    return cudaEventCreateWithFlags(event, cudaEventDefault);
}

EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags)
{
    return flags ? failed(cudaErrorNotSupported) : cudaEventRecord(event, stream);
}

EXPORT cudaError_t cudaStreamCreate(cudaStream_t *stream)
{
    return cudaStreamCreateWithFlags(stream, cudaStreamDefault);
}

EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{
    *least = 0, *greatest = -5;
    return cudaSuccess;
}

EXPORT cudaError_t cudaMemcpyPeerAsync(void *into, int device, const void *source,
                                       int source_device, size_t bytes, cudaStream_t stream)
{
    (void)device, (void)source_device;
    return cudaMemcpyAsync(into, source, bytes, cudaMemcpyDeviceToDevice, stream);
}

EXPORT cudaError_t cudaMemcpy2DAsync(void *into, size_t into_pitch, const void *source,
                                     size_t source_pitch, size_t width, size_t height,
                                     enum cudaMemcpyKind kind, cudaStream_t stream)
{
    cudaError_t error = cudaSuccess;

    for (size_t k = 0; k < height && !error; k++)
        error = cudaMemcpyAsync((char *)into + k * into_pitch,
                                (const char *)source + k * source_pitch, width, kind, stream);
    return error;
}

EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode)
{
    return failed((cudaError_t)cuThreadExchangeStreamCaptureMode((CUstreamCaptureMode *)mode));
}

EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream,
                                            enum cudaStreamCaptureStatus *status,
                                            unsigned long long *id, cudaGraph_t *graph,
                                            const cudaGraphNode_t **nodes,
                                            const cudaGraphEdgeData **edges, size_t *node_count)
{
    cudaError_t error = cudaStreamIsCapturing(stream, status);

    if (error || *status == cudaStreamCaptureStatusNone)
        return error;
    (void)id, (void)graph, (void)nodes, (void)edges, (void)node_count;
    return failed(cudaErrorNotSupported);
}

/* ---- host functions ---- */

struct host_call {
    cudaHostFn_t function;
    void *data;
};

static cudaError_t run_host_call(void *argument)
{
    const struct host_call *call = argument;
    call->function(call->data);
    return cudaSuccess;
}

EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void *data)
{
    HOLD_DEVICE;
    struct host_call call = {function, data};
    struct stream *stream;

    CHECK(begin_stream_call(handle, &stream));
    return failed(enqueue(stream, (struct work){run_host_call, &call, sizeof call, 0}));
}

/* ---- functions of the driver, by name ---- */

static CUresult unsupported(void)
{
    return CUDA_ERROR_NOT_SUPPORTED;
}

EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function,
                                                    unsigned version, unsigned long long flags,
                                                    enum cudaDriverEntryPointQueryResult *status)
{
    char newer[128];

    (void)version, (void)flags;
    snprintf(newer, sizeof newer, "%s_v2", name);
    *function = dlsym(RTLD_DEFAULT, newer);
    *function = *function ? *function : dlsym(RTLD_DEFAULT, name);
    *function = *function ? *function : (void *)unsupported;
    if (status)
        *status = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
