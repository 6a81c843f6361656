/* Copies and fills.
 *
 * The host waits only where CUDA documents that it does ("API synchronization behavior").
 */
#include "device.h"

#include <stdlib.h>
#include <string.h>

enum place_kind { PAGEABLE_HOST, PINNED_HOST, ON_DEVICE, INVALID };

/* Rows of bytes. A copy of one row has no use for the pitches. */
struct copy {
    char *into;
    const char *source; /* NULL: the bytes follow this structure, without gaps */
    size_t into_pitch, source_pitch, width, rows;
};

struct fill {
    char *into;
    int value;
    size_t bytes;
};

static size_t extent(size_t pitch, size_t width, size_t rows)
{
    return rows ? (rows - 1) * pitch + width : 0;
}

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
    const char *source = copy->source ? copy->source : (const char *)(copy + 1);

    describe_work("a copy");
    for (size_t row = 0; row < copy->rows; row++)
        memmove(copy->into + row * copy->into_pitch, source + row * copy->source_pitch,
                copy->width);
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
    size_t bytes = sizeof *given + given->width * given->rows;
    struct copy *copy = malloc(bytes);
    cudaError_t error;

    *copy = *given;
    copy->source = NULL;
    copy->source_pitch = given->width;
    for (size_t row = 0; row < given->rows; row++)
        memcpy((char *)(copy + 1) + row * given->width, given->source + row * given->source_pitch,
               given->width);
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

static cudaError_t copy_rows(const struct copy *copy, enum cudaMemcpyKind direction,
                             cudaStream_t stream, int is_synchronous)
{
    enum place_kind into, source;
    struct place place;
    int is_capturing;
    cudaError_t error = find_place(stream, &place, &is_capturing);

    if (error || !copy->width || !copy->rows)
        return error;
    into = kind_of(copy->into, extent(copy->into_pitch, copy->width, copy->rows));
    source = kind_of(copy->source, extent(copy->source_pitch, copy->width, copy->rows));
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
    struct copy copy = {into, source, bytes, bytes, bytes, 1};
    return failed(copy_rows(&copy, direction, stream, 0));
}

EXPORT cudaError_t cudaMemcpy(void *into, const void *source, size_t bytes,
                              enum cudaMemcpyKind direction)
{
    struct copy copy = {into, source, bytes, bytes, bytes, 1};
    return failed(copy_rows(&copy, direction, cudaStreamLegacy, 1));
}

EXPORT cudaError_t cudaMemcpy2DAsync(void *into, size_t into_pitch, const void *source,
                                     size_t source_pitch, size_t width, size_t rows,
                                     enum cudaMemcpyKind direction, cudaStream_t stream)
{
    struct copy copy = {into, source, into_pitch, source_pitch, width, rows};
    if (width > into_pitch || width > source_pitch)
        return failed(cudaErrorInvalidPitchValue);
    return failed(copy_rows(&copy, direction, stream, 0));
}

EXPORT cudaError_t cudaMemcpy2D(void *into, size_t into_pitch, const void *source,
                                size_t source_pitch, size_t width, size_t rows,
                                enum cudaMemcpyKind direction)
{
    struct copy copy = {into, source, into_pitch, source_pitch, width, rows};
    if (width > into_pitch || width > source_pitch)
        return failed(cudaErrorInvalidPitchValue);
    return failed(copy_rows(&copy, direction, cudaStreamLegacy, 1));
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

/* The host does not wait, except for host memory. */
EXPORT cudaError_t cudaMemset(void *into, int value, size_t bytes)
{
    cudaError_t error = cudaMemsetAsync(into, value, bytes, cudaStreamLegacy);

    if (!error && bytes && kind_of(into, bytes) == PINNED_HOST)
        error = failed(wait_for_stream(cudaStreamLegacy));
    return error;
}

EXPORT cudaError_t cudaMemPrefetchAsync(const void *address, size_t bytes,
                                        struct cudaMemLocation location, unsigned flags,
                                        cudaStream_t stream)
{
    (void)location, (void)flags, (void)stream;
    return failed(kind_of(address, bytes) == ON_DEVICE ? begin_call() : cudaErrorInvalidValue);
}

EXPORT cudaError_t cudaMemAdvise(const void *address, size_t bytes, enum cudaMemoryAdvise advice,
                                 struct cudaMemLocation location)
{
    (void)advice, (void)location;
    return failed(kind_of(address, bytes) == ON_DEVICE ? begin_call() : cudaErrorInvalidValue);
}
