/* Events: records in streams of this process, and of other processes.
 *
 * A stream that waits for an event of another process sends that process a request. A thread of
 * the other process then runs its stream up to the event, even if its program is blocked.
 */
#define _GNU_SOURCE
#include "device.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define EVENT_MAGIC 0xE7E77000u
#define HANDLE_MAGIC 0x45564E54u
#define MAX_SHARED_EVENTS ((size_t)1 << 16)
#define TABLE_BYTES (MAX_SHARED_EVENTS * sizeof(struct event_counts))
#define POLL_INTERVAL_NS 20000L
/* Polls before a waiting stream checks that the other process lives. */
#define CHECK_COUNT 500

/* Counts in shared memory: records enqueued, and the latest record that is complete. */
struct event_counts {
    _Atomic uint64_t recorded, completed;
};

/* One record of an event, which its event and the queued command share. */
struct record {
    int references;
    struct place place;
    struct event_counts *counts; /* NULL: not shared */
    uint64_t number;             /* among the records of a shared event */
    struct record *next;         /* in `pending` */
};

/* An event for other processes. */
struct shared {
    int process; /* that created the event */
    uint64_t number;
    struct event_counts *counts; /* NULL: not an interprocess event */
};

struct event {
    uint32_t magic;
    int device;
    struct record *latest; /* NULL: never recorded */
    unsigned queries;
    struct shared shared;
};

/* The handle of an event for other processes. */
struct event_handle {
    uint32_t magic;
    struct shared event;
};

/* A record of another process's event. */
struct request {
    struct shared event;
    uint64_t record;
};

/* The table of another process's events. */
struct table {
    int process;
    struct event_counts *counts;
    struct table *next;
};

static struct event_counts *own_counts;
static uint64_t shared_count;
static struct record *pending; /* incomplete records of this process's shared events */
static struct table *tables;

/* ---- requests of other processes ---- */

static socklen_t write_address(struct sockaddr_un *address, int process)
{
    memset(address, 0, sizeof *address);
    address->sun_family = AF_UNIX;
    /* A name that begins with a zero byte is in the abstract namespace: no file remains. */
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1
                       + (size_t)sprintf(address->sun_path + 1, "emulated-gpu-%d", process));
}

static void *serve(void *argument)
{
    struct request request;
    ssize_t bytes;

    while ((bytes = recv((int)(intptr_t)argument, &request, sizeof request, 0)) >= 0
           || errno == EINTR) {
        HOLD_DEVICE;
        for (struct record *each = pending; bytes == sizeof request && each; each = each->next)
            if (each->counts == own_counts + request.event.number && each->number == request.record)
                start_later(each->place, 0);
    }
    return NULL;
}

static void start_server(void)
{
    int server = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    struct sockaddr_un address;
    socklen_t length = write_address(&address, getpid());

    if (server < 0 || bind(server, (struct sockaddr *)&address, length) != 0) {
        perror("emulated GPU: cannot serve the events of this process");
        abort();
    }
    start_thread(serve, (void *)(intptr_t)server);
}

/* Ask a process to run the stream that a record is in. Returns 0 if the process has ended. */
static int send_request(struct request request)
{
    struct sockaddr_un address;
    socklen_t length = write_address(&address, request.event.process);
    int client = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    ssize_t sent = sendto(client, &request, sizeof request, MSG_NOSIGNAL,
                          (struct sockaddr *)&address, length);
    int error = errno;

    close(client);
    return sent >= 0 || error != ECONNREFUSED;
}

static int is_complete(struct request request)
{
    return request.event.counts->completed >= request.record;
}

/* Wait for a record of another process's event, without the mutex. */
static cudaError_t run_shared_wait(void *argument)
{
    const struct timespec interval = {0, POLL_INTERVAL_NS};
    struct request request = *(struct request *)argument;

    for (long polls = 0; !is_complete(request); polls++) {
        /* The work of a process that has ended counts as complete. */
        if (polls % CHECK_COUNT == 0 && !send_request(request))
            break;
        nanosleep(&interval, NULL);
    }
    return cudaSuccess;
}

/* ---- create ---- */

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
    return event->shared.counts && event->shared.process != getpid();
}

static cudaEvent_t add_event(struct shared shared)
{
    struct event *made = calloc(1, sizeof *made);

    made->magic = EVENT_MAGIC;
    made->device = current_device();
    made->shared = shared;
    return (cudaEvent_t)made;
}

static struct shared create_shared(void)
{
    uint64_t number = shared_count++;

    if (!own_counts) {
        own_counts = create_object(EVENT_TABLE, TABLE_BYTES, NULL);
        start_server();
    }
    if (own_counts == MAP_FAILED || number >= MAX_SHARED_EVENTS) {
        fprintf(stderr, "emulated GPU: no memory for an interprocess event\n");
        abort();
    }
    return (struct shared){getpid(), number, own_counts + number};
}

static void release_record(struct record *record)
{
    if (record && --record->references == 0)
        free(record);
}

EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t *handle, unsigned flags)
{
    const unsigned known = cudaEventBlockingSync | cudaEventDisableTiming | cudaEventInterprocess;
    const int is_shared = flags & cudaEventInterprocess;

    BEGIN_CALL;
    if (flags & ~known || (is_shared && !(flags & cudaEventDisableTiming)))
        return failed(cudaErrorInvalidValue);
    *handle = add_event(is_shared ? create_shared() : (struct shared){0});
    return cudaSuccess;
}

EXPORT cudaError_t cudaEventDestroy(cudaEvent_t handle)
{
    HOLD_DEVICE;
    struct event *event;

    CHECK(ensure_context());
    event = find_event(handle);
    if (!event)
        return failed(cudaErrorInvalidResourceHandle);
    release_record(event->latest);
    event->magic = 0;
    free(event);
    return cudaSuccess;
}

/* ---- record ---- */

static cudaError_t run_record(void *argument)
{
    HOLD_DEVICE;
    struct record *record = *(struct record **)argument, **link = &pending;

    if (record->counts) {
        if (record->counts->completed < record->number)
            record->counts->completed = record->number;
        while (*link != record)
            link = &(*link)->next;
        *link = record->next;
    }
    release_record(record);
    return cudaSuccess;
}

EXPORT cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream_handle)
{
    HOLD_DEVICE;
    struct event *event;
    struct stream *stream;
    struct record *made;

    CHECK(begin_stream_call(stream_handle, &stream));
    event = find_event(handle);
    if (!event || stream->device != event->device || is_imported(event))
        return failed(cudaErrorInvalidResourceHandle);
    if (stream->capture) {
        fprintf(stderr, "emulated GPU: events in captured streams are not implemented\n");
        return failed(refuse_if_capturing(stream, cudaErrorNotSupported));
    }
    release_record(event->latest);
    event->queries = 0;
    event->latest = made = calloc(1, sizeof *made);
    made->references = 2;
    made->place = append(stream, (struct work){run_record, &made, sizeof made, ALWAYS});
    if (event->shared.counts) {
        made->counts = event->shared.counts;
        made->number = made->counts->recorded + 1;
        made->next = pending, pending = made;
        made->counts->recorded = made->number;
    }
    return cudaSuccess;
}

/* ---- wait ---- */

static struct request latest_of(const struct event *event)
{
    return (struct request){event->shared, event->shared.counts->recorded};
}

/* Make a stream wait for the record that is the latest at the time of this call. */
EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t stream_handle, cudaEvent_t handle,
                                       unsigned flags)
{
    HOLD_DEVICE;
    struct event *event;
    struct stream *stream;

    CHECK(begin_stream_call(stream_handle, &stream));
    event = find_event(handle);
    if (!event || flags)
        return failed(event ? cudaErrorInvalidValue : cudaErrorInvalidResourceHandle);
    CHECK(refuse_if_capturing(stream, cudaErrorStreamCaptureIsolation));
    if (is_imported(event)) {
        struct request latest = latest_of(event);
        append(stream, (struct work){run_shared_wait, &latest, sizeof latest, 0});
    } else if (event->latest) {
        append_wait(stream, event->latest->place);
    }
    return cudaSuccess;
}

/* Begin a call that asks for an event's state. */
static cudaError_t begin_status_call(cudaEvent_t handle, struct event **event)
{
    CHECK(begin_call());
    *event = find_event(handle);
    if (!*event)
        return failed(cudaErrorInvalidResourceHandle);
    return failed(check_capture_safe());
}

EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t handle)
{
    struct event *event;
    struct request latest = {0};
    int device;

    {
        HOLD_DEVICE;
        CHECK(begin_status_call(handle, &event));
        device = event->device;
        if (is_imported(event))
            latest = latest_of(event);
        else if (event->latest)
            run_until(event->latest->place);
    }
    if (latest.event.counts)
        run_shared_wait(&latest);
    return failed(device_error(device));
}

/* CuPy leaves "not ready" as the last error of its static runtime, which torch's does not share. */
EXPORT cudaError_t cudaEventQuery(cudaEvent_t handle)
{
    HOLD_DEVICE;
    struct event *event;
    int done = 1;

    CHECK(begin_status_call(handle, &event));
    if (is_imported(event)) {
        done = is_complete(latest_of(event));
        if (!done)
            send_request(latest_of(event));
    } else if (event->latest && !is_done(event->latest->place)) {
        done = 0;
        count_query(event->latest->place, &event->queries);
    }
    return done ? failed(device_error(event->device)) : cudaErrorNotReady;
}

/* ---- handles for other processes ---- */

EXPORT cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t *handle, cudaEvent_t event_handle)
{
    BEGIN_CALL;
    struct event *event = find_event(event_handle);
    struct event_handle text = {.magic = HANDLE_MAGIC};

    if (!event || !event->shared.counts || is_imported(event))
        return failed(cudaErrorInvalidResourceHandle);
    text.event = event->shared;
    memset(handle, 0, sizeof *handle);
    memcpy(handle, &text, sizeof text);
    return cudaSuccess;
}

/* Return the counts of a process's events, or NULL if it has no such events. */
static struct event_counts *open_table(int process)
{
    struct table *found = tables;

    while (found && found->process != process)
        found = found->next;
    if (!found) {
        struct event_counts *counts = open_object(process, EVENT_TABLE, TABLE_BYTES, NULL);
        if (counts == MAP_FAILED)
            return NULL;
        found = malloc(sizeof *found);
        *found = (struct table){process, counts, tables};
        tables = found;
    }
    return found->counts;
}

EXPORT cudaError_t cudaIpcOpenEventHandle(cudaEvent_t *handle, cudaIpcEventHandle_t given)
{
    BEGIN_CALL;
    struct event_handle text;

    memcpy(&text, &given, sizeof text);
    if (text.magic != HANDLE_MAGIC)
        return failed(cudaErrorInvalidResourceHandle);
    if (text.event.process == getpid())
        return failed(cudaErrorDeviceUninitialized);
    text.event.counts = open_table(text.event.process);
    if (!text.event.counts)
        return failed(cudaErrorInvalidResourceHandle);
    text.event.counts += text.event.number;
    *handle = add_event(text.event);
    return cudaSuccess;
}
