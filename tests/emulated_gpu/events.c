/* Events: records in streams of this process, and of other processes through ipc.c. */
#include "device.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define EVENT_MAGIC 0xE7E77000u
#define HANDLE_MAGIC 0x45564E54u

/* One record of an event, which its event and the queued command share. */
struct record {
    int references;
    struct place place;
    uint64_t shared_number, number; /* the shared event and its record; 0: not shared */
    struct event_counts *counts;
};

struct event {
    uint32_t magic;
    unsigned flags;
    int device;
    struct record *latest; /* NULL: never recorded */
    struct captured_tips captured;
    unsigned queries;

    int process; /* that created the event */
    uint64_t shared_number;
    struct event_counts *counts; /* NULL: not an interprocess event */
};

/* The handle of an event for other processes. */
struct event_handle {
    uint32_t magic;
    int process, machine_device;
    uint64_t shared_number;
};

static struct event *find_event(cudaEvent_t handle)
{
    struct event *found = (struct event *)handle;

    if (found && found->magic == EVENT_MAGIC)
        return found;
    fprintf(stderr, "emulated GPU: %p is not an event, or was destroyed\n", (void *)handle);
    return NULL;
}

static int is_imported(const struct event *event)
{
    return event->counts && event->process != getpid();
}

static void release_record(struct record *record)
{
    if (record && --record->references == 0)
        free(record);
}

/* ---- create ---- */

static struct event *add_event(unsigned flags)
{
    struct event *made = calloc(1, sizeof *made);

    made->magic = EVENT_MAGIC;
    made->flags = flags;
    made->device = current_device();
    made->process = getpid();
    return made;
}

EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t *handle, unsigned flags)
{
    const unsigned known = cudaEventBlockingSync | cudaEventDisableTiming | cudaEventInterprocess;
    cudaError_t error = begin_call();
    struct event *made;

    if (!error && (flags & ~known
                   || (flags & cudaEventInterprocess && !(flags & cudaEventDisableTiming))))
        error = cudaErrorInvalidValue;
    if (error)
        return failed(error);
    lock_device();
    made = add_event(flags);
    if (flags & cudaEventInterprocess)
        made->counts = create_counts(&made->shared_number);
    unlock_device();
    *handle = (cudaEvent_t)made;
    return cudaSuccess;
}

EXPORT cudaError_t cudaEventDestroy(cudaEvent_t handle)
{
    struct event *event;
    cudaError_t error = ensure_context();

    if (error)
        return failed(error);
    lock_device();
    event = find_event(handle);
    if (event) {
        release_record(event->latest);
        release_tips(&event->captured);
        event->magic = 0;
        free(event);
    }
    unlock_device();
    return failed(event ? cudaSuccess : cudaErrorInvalidResourceHandle);
}

/* ---- record ---- */

static cudaError_t run_record(void *argument)
{
    struct record *record = *(struct record **)argument;

    lock_device();
    if (record->counts) {
        if (record->counts->completed < record->number)
            record->counts->completed = record->number;
        remove_shared_record(record->shared_number, record->number);
    }
    release_record(record);
    unlock_device();
    return cudaSuccess;
}

static void record_event(struct event *event, struct stream *stream)
{
    struct record *made = calloc(1, sizeof *made);

    release_record(event->latest);
    release_tips(&event->captured);
    event->latest = made;
    event->queries = 0;
    made->references = 2;
    made->place = append(stream, run_record, &made, sizeof made, ALWAYS);
    if (event->counts) {
        made->counts = event->counts;
        made->shared_number = event->shared_number;
        made->number = event->counts->recorded + 1;
        add_shared_record(made->shared_number, made->number, made->place);
        event->counts->recorded = made->number;
    }
}

EXPORT cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream_handle)
{
    cudaError_t error = begin_call();
    struct event *event;
    struct stream *stream;

    if (error)
        return failed(error);
    lock_device();
    event = find_event(handle);
    stream = find_stream(stream_handle);
    if (!event || !stream || stream->device != event->device || is_imported(event))
        error = cudaErrorInvalidResourceHandle;
    if (!error)
        error = check_legacy_capture(stream);
    if (!error && stream->capture)
        error = capture_record(stream, &event->captured);
    else if (!error)
        record_event(event, stream);
    unlock_device();
    return failed(error);
}

/* ---- wait ---- */

struct shared_wait {
    int process;
    uint64_t shared_number, record;
    struct event_counts *counts;
};

static cudaError_t run_shared_wait(void *argument)
{
    struct shared_wait *wait = argument;
    await_record(wait->process, wait->shared_number, wait->counts, wait->record);
    return cudaSuccess;
}

static struct shared_wait wait_for_latest(const struct event *event)
{
    return (struct shared_wait){event->process, event->shared_number, event->counts->recorded,
                                event->counts};
}

/* Make a stream wait for the record that is the latest at the time of this call. */
static cudaError_t wait_in_stream(struct event *event, struct stream *stream)
{
    cudaError_t error = check_legacy_capture(stream);

    if (error)
        return error;
    if (event->captured.capture)
        return capture_wait(stream, &event->captured);
    if (stream->capture)
        return refuse_if_capturing(stream, cudaErrorStreamCaptureIsolation);
    if (is_imported(event)) {
        struct shared_wait wait = wait_for_latest(event);
        append(stream, run_shared_wait, &wait, sizeof wait, 0);
    } else if (event->latest) {
        append_wait(stream, event->latest->place);
    }
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t stream_handle, cudaEvent_t handle,
                                       unsigned flags)
{
    cudaError_t error = begin_call();
    struct event *event;
    struct stream *stream;

    if (!error && flags)
        error = cudaErrorInvalidValue;
    if (error)
        return failed(error);
    lock_device();
    event = find_event(handle);
    stream = find_stream(stream_handle);
    error = event && stream ? wait_in_stream(event, stream) : cudaErrorInvalidResourceHandle;
    unlock_device();
    return failed(error);
}

/* Begin a call that asks for an event's state. Locks the mutex if it succeeds. */
static cudaError_t begin_status_call(cudaEvent_t handle, struct event **event)
{
    cudaError_t error = begin_call();

    if (error)
        return error;
    lock_device();
    *event = find_event(handle);
    error = *event ? refuse_captured_event(&(*event)->captured) : cudaErrorInvalidResourceHandle;
    unlock_device();
    if (!error)
        error = check_capture_safe();
    if (!error)
        lock_device();
    return error;
}

EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t handle)
{
    struct event *event;
    cudaError_t error = begin_status_call(handle, &event);
    int device;

    if (error)
        return failed(error);
    device = event->device;
    if (is_imported(event)) {
        struct shared_wait wait = wait_for_latest(event);
        unlock_device();
        run_shared_wait(&wait);
    } else if (event->latest) {
        struct place place = event->latest->place;
        unlock_device();
        run_until(place);
    } else {
        unlock_device();
    }
    return failed(device_error(device));
}

static int is_shared_done(struct event *event)
{
    struct shared_wait wait = wait_for_latest(event);

    if (event->counts->completed < wait.record)
        request_record(wait.process, wait.shared_number, wait.record);
    return event->counts->completed >= wait.record;
}

EXPORT cudaError_t cudaEventQuery(cudaEvent_t handle)
{
    struct event *event;
    cudaError_t error = begin_status_call(handle, &event);
    int device, done = 1;

    if (error)
        return failed(error);
    device = event->device;
    if (is_imported(event)) {
        done = is_shared_done(event);
    } else if (event->latest && !is_done(event->latest->place)) {
        done = 0;
        count_query(event->latest->place, &event->queries);
    }
    unlock_device();
    return failed(done ? device_error(device) : cudaErrorNotReady);
}

/* ---- handles for other processes ---- */

EXPORT cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t *handle, cudaEvent_t event_handle)
{
    struct event_handle text = {.magic = HANDLE_MAGIC, .process = getpid()};
    cudaError_t error = begin_call();
    struct event *event;

    if (error)
        return failed(error);
    lock_device();
    event = find_event(event_handle);
    if (!event || !event->counts || is_imported(event)) {
        unlock_device();
        return failed(cudaErrorInvalidResourceHandle);
    }
    text.shared_number = event->shared_number;
    text.machine_device = machine_device(event->device);
    unlock_device();
    memset(handle, 0, sizeof *handle);
    memcpy(handle, &text, sizeof text);
    return cudaSuccess;
}

EXPORT cudaError_t cudaIpcOpenEventHandle(cudaEvent_t *handle, cudaIpcEventHandle_t given)
{
    struct event_handle text;
    struct event *made;
    struct event_counts *counts;
    cudaError_t error = begin_call();

    memcpy(&text, &given, sizeof text);
    if (!error && text.magic != HANDLE_MAGIC)
        error = cudaErrorInvalidResourceHandle;
    if (!error && text.process == getpid())
        error = cudaErrorDeviceUninitialized;
    if (error)
        return failed(error);
    lock_device();
    counts = open_counts(text.process, text.shared_number);
    if (!counts) {
        unlock_device();
        return failed(cudaErrorInvalidResourceHandle);
    }
    made = add_event(cudaEventDisableTiming | cudaEventInterprocess);
    made->process = text.process;
    made->shared_number = text.shared_number;
    made->counts = counts;
    unlock_device();
    *handle = (cudaEvent_t)made;
    return cudaSuccess;
}
