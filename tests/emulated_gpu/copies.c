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
    struct allocation *found = find_allocation(address);

    if (found && address + bytes <= found->address + found->bytes)
        return found->kind == PINNED_MEMORY ? PINNED_HOST : ON_DEVICE;
    if (!found && !nearest_allocation(address))
        return PAGEABLE_HOST;
    report_access("invalid range of a copy", address); /* also freed, or between allocations */
    return INVALID;
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

/* Run the work of a stream up to now. */
static cudaError_t wait_for_stream(struct stream *stream)
{
    run_until(end_of(stream));
    return device_error(stream->device);
}

/* Enqueue a copy with the present bytes of its source. */
static cudaError_t enqueue_staged(const struct copy *given, struct stream *stream)
{
    size_t bytes = sizeof *given + given->bytes;
    struct copy *copy = malloc(bytes);
    cudaError_t error;

    *copy = *given;
    copy->source = NULL;
    memcpy(copy + 1, given->source, given->bytes);
    error = enqueue(stream, (struct work){run_copy, copy, bytes, 0});
    free(copy);
    return error;
}

static int is_direction(enum cudaMemcpyKind direction, enum place_kind into, enum place_kind source)
{
    int from_device = direction == cudaMemcpyDeviceToHost || direction == cudaMemcpyDeviceToDevice;
    int to_device = direction == cudaMemcpyHostToDevice || direction == cudaMemcpyDeviceToDevice;

    return !(from_device && source == PAGEABLE_HOST) && !(to_device && into == PAGEABLE_HOST);
}

static cudaError_t copy_bytes(struct copy copy, enum cudaMemcpyKind direction, cudaStream_t handle,
                              int is_synchronous)
{
    HOLD_DEVICE;
    enum place_kind into, source;
    struct stream *stream;

    CHECK(begin_stream_call(handle, &stream));
    if (!copy.bytes)
        return cudaSuccess;
    into = kind_of(copy.into, copy.bytes);
    source = kind_of(copy.source, copy.bytes);
    if ((unsigned)direction > cudaMemcpyDefault)
        return failed(cudaErrorInvalidMemcpyDirection);
    if (into == INVALID || source == INVALID || !is_direction(direction, into, source))
        return failed(cudaErrorInvalidValue);
    if (into == PAGEABLE_HOST || source == PAGEABLE_HOST)
        CHECK(refuse_if_capturing(stream, cudaErrorStreamCaptureUnsupported));
    if (source == PAGEABLE_HOST && into == ON_DEVICE) {
        if (is_synchronous)
            CHECK(wait_for_stream(stream));
        return failed(enqueue_staged(&copy, stream));
    }
    CHECK(enqueue(stream, (struct work){run_copy, &copy, sizeof copy, 0}));
    if (stream->capture || (source == ON_DEVICE && into == ON_DEVICE))
        return cudaSuccess;
    if (is_synchronous || into == PAGEABLE_HOST || (source != ON_DEVICE && into != ON_DEVICE))
        CHECK(wait_for_stream(stream));
    return cudaSuccess;
}

/* ---- runtime ---- */

EXPORT cudaError_t cudaMemcpyAsync(void *into, const void *source, size_t bytes,
                                   enum cudaMemcpyKind direction, cudaStream_t stream)
{
    return copy_bytes((struct copy){into, source, bytes}, direction, stream, 0);
}

EXPORT cudaError_t cudaMemcpy(void *into, const void *source, size_t bytes,
                              enum cudaMemcpyKind direction)
{
    return copy_bytes((struct copy){into, source, bytes}, direction, cudaStreamLegacy, 1);
}

EXPORT cudaError_t cudaMemsetAsync(void *into, int value, size_t bytes, cudaStream_t handle)
{
    BEGIN_CALL;
    struct fill fill = {into, value, bytes};
    enum place_kind kind = bytes ? kind_of(into, bytes) : ON_DEVICE;
    struct stream *stream;

    CHECK(begin_stream_call(handle, &stream));
    if (kind == INVALID || kind == PAGEABLE_HOST)
        return failed(cudaErrorInvalidValue);
    return failed(enqueue(stream, (struct work){run_fill, &fill, sizeof fill, 0}));
}
