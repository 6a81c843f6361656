/* Devices, the context stack of each thread, peer access, and error state. */
#include "device.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MULTIPROCESSORS 4
#define MAX_DEPTH 64

struct context {
    int device;
    int is_active;
};

static struct context primary[MAX_DEVICES];
static _Atomic int sticky[MAX_DEVICES];
static unsigned char peer_enabled[MAX_DEVICES][MAX_DEVICES];
static int machine[MAX_DEVICES], visible_count; /* visible device -> device of the machine */
static pthread_once_t once = PTHREAD_ONCE_INIT;
static int is_forked;

static _Thread_local struct context *stack[MAX_DEPTH];
static _Thread_local int depth;
static _Thread_local int chosen; /* device of cudaSetDevice, before the thread has a context */
static _Thread_local cudaError_t last_error;

long read_variable(const char *name, long otherwise)
{
    const char *text = getenv(name);
    return text && *text ? strtol(text, NULL, 0) : otherwise;
}

static void note_fork(void)
{
    is_forked = 1;
    reset_device_lock();
}

static void read_devices(void)
{
    int count = (int)read_variable("EMULATED_GPU_DEVICES", 2);
    const char *list = getenv("CUDA_VISIBLE_DEVICES");
    long device;
    int length;

    count = count > MAX_DEVICES ? MAX_DEVICES : count;
    for (int k = 0; k < MAX_DEVICES; k++)
        primary[k].device = machine[k] = k;
    visible_count = list ? 0 : count;
    /* As in CUDA, the list ends at the first invalid number. */
    while (list && visible_count < count && sscanf(list, "%ld%n", &device, &length) == 1
           && device >= 0 && device < count) {
        machine[visible_count++] = (int)device;
        list += length + (list[length] == ',');
    }
    pthread_atfork(NULL, NULL, note_fork);
}

int visible_device_count(void)
{
    pthread_once(&once, read_devices);
    return visible_count;
}

static int is_device(int device)
{
    return device >= 0 && device < visible_device_count();
}

int machine_device(int device)
{
    return is_device(device) ? machine[device] : -1;
}

int visible_device(int number)
{
    for (int k = 0; k < visible_device_count(); k++)
        if (machine[k] == number)
            return k;
    return -1;
}

/* ---- context stack and errors ---- */

int current_device(void)
{
    return depth && stack[depth - 1] ? stack[depth - 1]->device : chosen;
}

static void set_current(struct context *context)
{
    depth += depth == 0;
    stack[depth - 1] = context;
    context->is_active = 1;
}

cudaError_t ensure_context(void)
{
    if (!visible_device_count())
        return cudaErrorNoDevice;
    if (is_forked)
        return cudaErrorInitializationError;
    if (!depth)
        set_current(&primary[chosen]);
    return cudaSuccess;
}

cudaError_t begin_call(void)
{
    cudaError_t error = ensure_context();
    return error ? error : device_error(current_device());
}

cudaError_t failed(cudaError_t error)
{
    if (error)
        last_error = error;
    return error;
}

cudaError_t device_error(int device)
{
    return (cudaError_t)sticky[device];
}

void set_device_error(int device, cudaError_t error)
{
    int none = cudaSuccess;

    if (atomic_compare_exchange_strong(&sticky[device], &none, (int)error))
        fprintf(stderr, "emulated GPU: process %d, device %d: all later calls return %s\n",
                getpid(), device, cudaGetErrorName(error));
}

void push_device(int device)
{
    if (depth == MAX_DEPTH)
        abort();
    stack[depth++] = &primary[device];
}

void pop_device(void)
{
    depth -= depth > 0;
}

EXPORT cudaError_t cudaGetLastError(void)
{
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

EXPORT cudaError_t cudaPeekAtLastError(void)
{
    return last_error;
}

/* ---- device attributes ---- */

EXPORT cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device)
{
    static const int values[] = {
        [cudaDevAttrMaxThreadsPerBlock] = 1024,
        [cudaDevAttrMaxSharedMemoryPerBlock] = 49152,
        [cudaDevAttrMaxSharedMemoryPerBlockOptin] = 49152,
        [cudaDevAttrMultiProcessorCount] = MULTIPROCESSORS,
        [cudaDevAttrWarpSize] = 32,
        [cudaDevAttrMaxThreadsPerMultiProcessor] = 2048,
        [cudaDevAttrUnifiedAddressing] = 1,
        [cudaDevAttrComputeCapabilityMajor] = 9,
        [cudaDevAttrManagedMemory] = 1,
        [cudaDevAttrConcurrentManagedAccess] = 1,
        [cudaDevAttrMemoryPoolsSupported] = 1,
        [cudaDevAttrIpcEventSupport] = 1,
        [cudaDevAttrMax] = 0,
    };

    if (!is_device(device))
        return failed(cudaErrorInvalidDevice);
    *value = (unsigned)attribute < cudaDevAttrMax ? values[attribute] : 0;
    return cudaSuccess;
}

static void write_uuid(void *uuid, int device)
{
    memset(uuid, 0xE0 + machine_device(device), 16);
}

EXPORT cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *found, int device)
{
    if (!is_device(device))
        return failed(cudaErrorInvalidDevice);
    *found = (struct cudaDeviceProp){
        .name = "Emulated GPU", .warpSize = 32, .maxThreadsPerBlock = 1024, .major = 9,
        .totalGlobalMem = MEMORY_BYTES,
        .multiProcessorCount = MULTIPROCESSORS,
        .maxThreadsPerMultiProcessor = 2048, .pciBusID = machine_device(device) + 1,
        .sharedMemPerBlock = 49152, .sharedMemPerBlockOptin = 49152,
    };
    write_uuid(&found->uuid, device);
    return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetPCIBusId(char *text, int length, int device)
{
    if (!is_device(device))
        return failed(cudaErrorInvalidDevice);
    snprintf(text, (size_t)length, "0000:%02X:00.0", machine_device(device) + 1);
    return cudaSuccess;
}

/* ---- devices, runtime ---- */

EXPORT cudaError_t cudaDriverGetVersion(int *version)
{
    *version = 13020;
    return cudaSuccess;
}

EXPORT cudaError_t cudaRuntimeGetVersion(int *version)
    __attribute__((alias("cudaDriverGetVersion")));

EXPORT cudaError_t cudaGetDeviceCount(int *count)
{
    *count = visible_device_count();
    return failed(*count ? cudaSuccess : cudaErrorNoDevice);
}

EXPORT cudaError_t cudaGetDevice(int *device)
{
    *device = current_device();
    return failed(visible_device_count() ? cudaSuccess : cudaErrorNoDevice);
}

EXPORT cudaError_t cudaSetDevice(int device)
{
    if (!is_device(device))
        return failed(cudaErrorInvalidDevice);
    chosen = device;
    set_current(&primary[device]);
    return failed(ensure_context());
}

EXPORT cudaError_t cudaDeviceSynchronize(void)
{
    BEGIN_CALL;
    CHECK(check_capture_safe());
    run_device(current_device());
    return failed(device_error(current_device()));
}

EXPORT cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer)
{
    if (!is_device(device) || !is_device(peer))
        return failed(cudaErrorInvalidDevice);
    *can = device != peer;
    return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags)
{
    BEGIN_CALL;
    int device = current_device();

    if (!is_device(peer) || peer == device)
        return failed(cudaErrorInvalidDevice);
    if (flags)
        return failed(cudaErrorInvalidValue);
    if (peer_enabled[device][peer])
        return failed(cudaErrorPeerAccessAlreadyEnabled);
    peer_enabled[device][peer] = 1;
    return cudaSuccess;
}

/* ---- devices and contexts, driver ---- */

EXPORT CUresult cuInit(unsigned flags)
{
    if (flags)
        return CUDA_ERROR_INVALID_VALUE;
    if (is_forked)
        return CUDA_ERROR_NOT_INITIALIZED;
    return visible_device_count() ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

EXPORT CUresult cuDeviceGetCount(int *count)
{
    *count = visible_device_count();
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
    *device = ordinal;
    return is_device(ordinal) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

EXPORT CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device)
{
    if (!is_device(device))
        return CUDA_ERROR_INVALID_DEVICE;
    write_uuid(uuid, device);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
    if (!is_device(device))
        return CUDA_ERROR_INVALID_DEVICE;
    *context = (CUcontext)&primary[device];
    primary[device].is_active = 1;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *is_active)
{
    if (!is_device(device))
        return CUDA_ERROR_INVALID_DEVICE;
    *flags = 0;
    *is_active = primary[device].is_active;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetCurrent(CUcontext *context)
{
    *context = depth ? (CUcontext)stack[depth - 1] : NULL;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxPushCurrent_v2(CUcontext context)
{
    if (!context)
        return CUDA_ERROR_INVALID_CONTEXT;
    push_device(((struct context *)context)->device);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxPopCurrent_v2(CUcontext *context)
{
    if (!depth)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (context)
        *context = (CUcontext)stack[depth - 1];
    pop_device();
    return CUDA_SUCCESS;
}

/* NVRTC asks for private tables of the driver, and works without them. */
EXPORT CUresult cuGetExportTable(const void **table, const CUuuid *id)
{
    (void)id;
    *table = NULL;
    return CUDA_ERROR_NOT_FOUND;
}
