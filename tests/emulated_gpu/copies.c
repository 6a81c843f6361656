/* Copies and fills.
 *
 * The host waits only where CUDA documents that it does ("API synchronization behavior").
 */
#include "device.h"

#include <stdlib.h>
#include <string.h>

enum place_kind { PAGEABLE_HOST, PINNED_HOST, ON_DEVICE, INVALID };

struct copy {
    char *into;
    const char *source; /* NULL: the bytes follow this structure */
    size_t bytes;
};

struct fill {
    char *into;
    int value;
    size_t bytes;
};

/* Return the kind of memory in which a range of bytes lies. */
static enum place_kind kind_of(const char *address, size_t bytes)
{
    enum place_kind kind = PAGEABLE_HOST;
    struct allocation *found;

    lock_device();
    found = find_allocation(address);
    if (found && address + bytes > found->address + found->bytes)
        kind = INVALID;
    else if (found)
        kind = found->kind == PINNED_MEMORY ? PINNED_HOST : ON_DEVICE;
    else if (nearest_allocation(address))
        kind = INVALID; /* freed, or between allocations */
    unlock_device();
    if (kind == INVALID)
        report_access("invalid range of a copy", address);
    return kind;
}

static cudaError_t run_copy(void *argument)
{
    const struct copy *copy = argument;

    describe_work("a copy");
    memmove(copy->into, copy->source ? copy->source : (const char *)(copy + 1), copy->bytes);
    return cudaSuccess;
}

static cudaError_t run_fill(void *argument)
{
    const struct fill *fill = argument;
    describe_work("a fill");
    memset(fill->into, fill->value, fill->bytes);
    return cudaSuccess;
}

static cudaError_t find_place(cudaStream_t handle, struct place *place, int *is_capturing)
{
    cudaError_t error = begin_call();
    struct stream *stream;

    if (error)
        return error;
    lock_device();
    stream = find_stream(handle);
    if (!stream)
        error = cudaErrorInvalidResourceHandle;
    else
        error = check_legacy_capture(stream);
    if (!error) {
        *place = (struct place){stream, stream->enqueued};
        *is_capturing = stream->capture != NULL;
    }
    unlock_device();
    return error;
}

/* Run the work of a stream up to now. */
static cudaError_t wait_for_stream(cudaStream_t handle)
{
    struct place place;
    int is_capturing;
    cudaError_t error = find_place(handle, &place, &is_capturing);

    if (error)
        return error;
    run_until(place);
    return device_error(place.stream->device);
}

/* Enqueue a copy with the present bytes of its source. */
static cudaError_t enqueue_staged(const struct copy *given, cudaStream_t stream)
{
    size_t bytes = sizeof *given + given->bytes;
    struct copy *copy = malloc(bytes);
    cudaError_t error;

    *copy = *given;
    copy->source = NULL;
    memcpy(copy + 1, given->source, given->bytes);
    error = enqueue(stream, run_copy, copy, bytes, 0);
    free(copy);
    return error;
}

static cudaError_t refuse_capture(cudaStream_t handle)
{
    struct stream *stream;
    cudaError_t error = cudaSuccess;

    lock_device();
    stream = find_stream(handle);
    if (stream)
        error = refuse_if_capturing(stream, cudaErrorStreamCaptureUnsupported);
    unlock_device();
    return error;
}

static int is_direction(enum cudaMemcpyKind direction, enum place_kind into, enum place_kind source)
{
    int from_device = direction == cudaMemcpyDeviceToHost || direction == cudaMemcpyDeviceToDevice;
    int to_device = direction == cudaMemcpyHostToDevice || direction == cudaMemcpyDeviceToDevice;

    return !(from_device && source == PAGEABLE_HOST) && !(to_device && into == PAGEABLE_HOST);
}

static cudaError_t copy_bytes(const struct copy *copy, enum cudaMemcpyKind direction,
                              cudaStream_t stream, int is_synchronous)
{
    enum place_kind into, source;
    struct place place;
    int is_capturing;
    cudaError_t error = find_place(stream, &place, &is_capturing);

    if (error || !copy->bytes)
        return error;
    into = kind_of(copy->into, copy->bytes);
    source = kind_of(copy->source, copy->bytes);
    if ((unsigned)direction > cudaMemcpyDefault)
        return cudaErrorInvalidMemcpyDirection;
    if (into == INVALID || source == INVALID || !is_direction(direction, into, source))
        return cudaErrorInvalidValue;
    if (is_capturing && (into == PAGEABLE_HOST || source == PAGEABLE_HOST))
        return refuse_capture(stream);
    if (source == PAGEABLE_HOST && into == ON_DEVICE) {
        error = is_synchronous ? wait_for_stream(stream) : cudaSuccess;
        return error ? error : enqueue_staged(copy, stream);
    }
    error = enqueue(stream, run_copy, copy, sizeof *copy, 0);
    if (error || is_capturing || (source == ON_DEVICE && into == ON_DEVICE))
        return error;
    if (is_synchronous || into == PAGEABLE_HOST || (source != ON_DEVICE && into != ON_DEVICE))
        return wait_for_stream(stream);
    return cudaSuccess;
}

/* ---- runtime ---- */

EXPORT cudaError_t cudaMemcpyAsync(void *into, const void *source, size_t bytes,
                                   enum cudaMemcpyKind direction, cudaStream_t stream)
{
    struct copy copy = {into, source, bytes};
    return failed(copy_bytes(&copy, direction, stream, 0));
}

EXPORT cudaError_t cudaMemcpy(void *into, const void *source, size_t bytes,
                              enum cudaMemcpyKind direction)
{
    struct copy copy = {into, source, bytes};
    return failed(copy_bytes(&copy, direction, cudaStreamLegacy, 1));
}

EXPORT cudaError_t cudaMemcpyPeerAsync(void *into, int into_device, const void *source,
                                       int source_device, size_t bytes, cudaStream_t stream)
{
    if (machine_device(into_device) < 0 || machine_device(source_device) < 0)
        return failed(cudaErrorInvalidDevice);
    return cudaMemcpyAsync(into, source, bytes, cudaMemcpyDeviceToDevice, stream);
}

/* The copy is ordered with all work of both devices. */
EXPORT cudaError_t cudaMemcpyPeer(void *into, int into_device, const void *source,
                                  int source_device, size_t bytes)
{
    if (machine_device(into_device) < 0 || machine_device(source_device) < 0)
        return failed(cudaErrorInvalidDevice);
    run_device(into_device);
    run_device(source_device);
    cudaError_t error = cudaMemcpy(into, source, bytes, cudaMemcpyDeviceToDevice);
    return error ? error : failed(wait_for_stream(cudaStreamLegacy));
}

EXPORT cudaError_t cudaMemsetAsync(void *into, int value, size_t bytes, cudaStream_t stream)
{
    struct fill fill = {into, value, bytes};
    enum place_kind kind = bytes ? kind_of(into, bytes) : ON_DEVICE;

    if (kind == INVALID || kind == PAGEABLE_HOST)
        return failed(cudaErrorInvalidValue);
    return failed(enqueue(stream, run_fill, &fill, sizeof fill, 0));
}
