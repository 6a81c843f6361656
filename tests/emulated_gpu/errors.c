/* Names of errors. The driver uses the same numbers as the runtime. */
#include "device.h"

static const struct {
    int error;
    const char *runtime, *driver;
} errors[] = {
    {0, "cudaSuccess", "CUDA_SUCCESS"},
    {1, "cudaErrorInvalidValue", "CUDA_ERROR_INVALID_VALUE"},
    {2, "cudaErrorMemoryAllocation", "CUDA_ERROR_OUT_OF_MEMORY"},
    {3, "cudaErrorInitializationError", "CUDA_ERROR_NOT_INITIALIZED"},
    {21, "cudaErrorInvalidMemcpyDirection", "CUDA_ERROR_UNKNOWN"},
    {100, "cudaErrorNoDevice", "CUDA_ERROR_NO_DEVICE"},
    {101, "cudaErrorInvalidDevice", "CUDA_ERROR_INVALID_DEVICE"},
    {200, "cudaErrorInvalidKernelImage", "CUDA_ERROR_INVALID_IMAGE"},
    {201, "cudaErrorDeviceUninitialized", "CUDA_ERROR_INVALID_CONTEXT"},
    {208, "cudaErrorAlreadyMapped", "CUDA_ERROR_ALREADY_MAPPED"},
    {209, "cudaErrorNoKernelImageForDevice", "CUDA_ERROR_NO_BINARY_FOR_GPU"},
    {218, "cudaErrorInvalidPtx", "CUDA_ERROR_INVALID_PTX"},
    {400, "cudaErrorInvalidResourceHandle", "CUDA_ERROR_INVALID_HANDLE"},
    {401, "cudaErrorIllegalState", "CUDA_ERROR_ILLEGAL_STATE"},
    {500, "cudaErrorSymbolNotFound", "CUDA_ERROR_NOT_FOUND"},
    {600, "cudaErrorNotReady", "CUDA_ERROR_NOT_READY"},
    {700, "cudaErrorIllegalAddress", "CUDA_ERROR_ILLEGAL_ADDRESS"},
    {702, "cudaErrorLaunchTimeout", "CUDA_ERROR_LAUNCH_TIMEOUT"},
    {704, "cudaErrorPeerAccessAlreadyEnabled", "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED"},
    {710, "cudaErrorAssert", "CUDA_ERROR_ASSERT"},
    {712, "cudaErrorHostMemoryAlreadyRegistered", "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"},
    {713, "cudaErrorHostMemoryNotRegistered", "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"},
    {716, "cudaErrorMisalignedAddress", "CUDA_ERROR_MISALIGNED_ADDRESS"},
    {719, "cudaErrorLaunchFailure", "CUDA_ERROR_LAUNCH_FAILED"},
    {801, "cudaErrorNotSupported", "CUDA_ERROR_NOT_SUPPORTED"},
    {900, "cudaErrorStreamCaptureUnsupported", "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"},
    {901, "cudaErrorStreamCaptureInvalidated", "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"},
    {905, "cudaErrorStreamCaptureIsolation", "CUDA_ERROR_STREAM_CAPTURE_ISOLATION"},
    {906, "cudaErrorStreamCaptureImplicit", "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT"},
    {908, "cudaErrorStreamCaptureWrongThread", "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD"},
};

/* Return the runtime's name, or the driver's. */
static const char *name_of(int error, int is_driver)
{
    for (size_t k = 0; k < sizeof errors / sizeof *errors; k++)
        if (errors[k].error == error)
            return is_driver ? errors[k].driver : errors[k].runtime;
    return is_driver ? NULL : "unrecognized error code";
}

EXPORT const char *cudaGetErrorName(cudaError_t error)
{
    return name_of((int)error, 0);
}

EXPORT const char *cudaGetErrorString(cudaError_t error)
    __attribute__((alias("cudaGetErrorName")));

EXPORT CUresult cuGetErrorName(CUresult error, const char **name)
{
    *name = name_of((int)error, 1);
    return *name ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuGetErrorString(CUresult error, const char **description)
    __attribute__((alias("cuGetErrorName")));
