/* Queues of commands, which run only when something waits for them. */
#define _GNU_SOURCE
#include "device.h"

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#define STREAM_MAGIC 0x57EEA111u
/* Work that waits for other devices starts after this delay. */
#define START_DELAY_NS 3000000L
/* The queries of an incomplete place before its commands start. */
#define QUERY_COUNT 8

struct command {
    struct command *next;
    run_function *run;
    unsigned flags;
    size_t after_count;
    struct place *after; /* places in other streams that run first */
    _Alignas(16) char argument[];
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
/* All streams. Stream structures are never freed: events and old handles refer to them. */
static struct stream *streams;
static struct stream *legacy[MAX_DEVICES];
static _Thread_local struct stream *per_thread[MAX_DEVICES];

char lock_device(void)
{
    pthread_mutex_lock(&mutex);
    return 0;
}

void unlock_device(char *held)
{
    (void)held;
    pthread_mutex_unlock(&mutex);
}

void reset_device_lock(void)
{
    mutex = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
}

/* ---- streams ---- */

static struct stream *add_stream(int device, unsigned flags)
{
    struct stream *made = calloc(1, sizeof *made);

    made->magic = STREAM_MAGIC;
    made->device = device;
    made->flags = flags;
    made->next = streams;
    return streams = made;
}

static struct stream *find_stream(cudaStream_t handle)
{
    struct stream *found = (struct stream *)handle, **own = NULL;
    int device = current_device();

    if (handle == NULL || handle == cudaStreamLegacy)
        own = &legacy[device];
    else if (handle == cudaStreamPerThread)
        own = &per_thread[device];
    if (!own)
        return found->magic == STREAM_MAGIC && !found->is_destroyed ? found : NULL;
    if (!*own) {
        *own = add_stream(device, cudaStreamDefault);
        (*own)->is_legacy = own == &legacy[device];
    }
    return *own;
}

static int is_blocking(const struct stream *stream)
{
    return !(stream->flags & cudaStreamNonBlocking) && !stream->is_legacy;
}

cudaError_t begin_stream_call(cudaStream_t handle, struct stream **stream)
{
    cudaError_t error = begin_call();

    if (error)
        return error;
    *stream = find_stream(handle);
    if (!*stream)
        return cudaErrorInvalidResourceHandle;
    for (struct stream *other = streams; (*stream)->is_legacy && other; other = other->next)
        if (other->device == (*stream)->device && is_blocking(other)
            && refuse_if_capturing(other, cudaErrorStreamCaptureImplicit))
            error = cudaErrorStreamCaptureImplicit;
    return error;
}

/* Remove a destroyed stream from the list once its work is done. */
static void unlink_if_finished(struct stream *stream)
{
    struct stream **link = &streams;

    if (!stream->is_destroyed || stream->done < stream->enqueued)
        return;
    while (*link && *link != stream)
        link = &(*link)->next;
    if (*link)
        *link = stream->next;
}

/* ---- enqueue ---- */

struct place end_of(struct stream *stream)
{
    return (struct place){stream, stream->enqueued};
}

int is_done(struct place place)
{
    return place.stream->done >= place.number;
}

static void add_dependency(struct command *command, struct place place)
{
    if (is_done(place))
        return;
    command->after = realloc(command->after, (command->after_count + 1) * sizeof *command->after);
    command->after[command->after_count++] = place;
}

/* Return whether a stream has work that its device's legacy stream has to wait for. */
static int is_unseen(const struct stream *stream, int device)
{
    return stream->device == device && is_blocking(stream)
           && stream->seen_by_legacy != stream->enqueued;
}

/* Order a command of the legacy stream after the work of all blocking streams. */
static void order_after_blocking(struct stream *stream, struct command *command)
{
    for (struct stream *other = streams; other; other = other->next)
        if (is_unseen(other, stream->device)) {
            add_dependency(command, end_of(other));
            other->seen_by_legacy = other->enqueued;
        }
}

/* Order a command of a blocking stream after the work of the legacy stream. */
static void order_after_legacy(struct stream *stream, struct command *command)
{
    struct stream *other = legacy[stream->device];

    if (!other || other->enqueued == stream->legacy_seen)
        return;
    add_dependency(command, end_of(other));
    stream->legacy_seen = other->enqueued;
}

static struct command *add_command(struct stream *stream, struct work work)
{
    struct command *made = calloc(1, sizeof *made + work.bytes);

    made->run = work.run;
    made->flags = work.flags;
    if (work.bytes)
        memcpy(made->argument, work.argument, work.bytes);
    if (stream->is_legacy)
        order_after_blocking(stream, made);
    else if (is_blocking(stream))
        order_after_legacy(stream, made);
    if (stream->first)
        stream->last->next = made;
    else
        stream->first = made;
    stream->last = made;
    stream->enqueued++;
    stream->queries = 0;
    return made;
}

struct place append(struct stream *stream, struct work work)
{
    add_command(stream, work);
    if (work.flags & SPINS)
        start_later(end_of(stream), START_DELAY_NS);
    return end_of(stream);
}

void append_wait(struct stream *stream, struct place place)
{
    if (place.stream != stream && !is_done(place))
        add_dependency(add_command(stream, (struct work){0}), place);
}

cudaError_t enqueue(struct stream *stream, struct work work)
{
    if (work.flags & SAME_DEVICE && stream->device != current_device())
        return cudaErrorInvalidResourceHandle;
    if (stream->capture)
        return capture_work(stream, work);
    append(stream, work);
    return cudaSuccess;
}

/* ---- run ---- */

cudaError_t run_work(int device, run_function *run, void *argument, unsigned flags)
{
    cudaError_t error;

    push_device(device);
    error = flags & UNGUARDED ? run(argument) : run_guarded(run, argument);
    pop_device();
    return error;
}

/* Run a command that this thread has claimed. */
static void run_command(int device, struct command *command)
{
    cudaError_t error;

    for (size_t k = 0; k < command->after_count; k++)
        run_until(command->after[k]);
    if (!command->run || (device_error(device) && !(command->flags & ALWAYS)))
        return;
    pthread_mutex_unlock(&mutex);
    error = run_work(device, command->run, command->argument, command->flags);
    pthread_mutex_lock(&mutex);
    if (error)
        set_device_error(device, error);
}

void run_until(struct place place)
{
    struct stream *stream = place.stream;

    while (!is_done(place)) {
        struct command *command = stream->first;
        if (stream->is_running) {
            pthread_cond_wait(&changed, &mutex);
            continue;
        }
        stream->is_running = 1;
        run_command(stream->device, command);
        stream->first = command->next;
        stream->done++;
        stream->is_running = 0;
        pthread_cond_broadcast(&changed);
        free(command->after);
        free(command);
    }
    unlink_if_finished(stream);
}

void run_device(int device)
{
    struct place *places = NULL;
    size_t count = 0;

    for (struct stream *stream = streams; stream; stream = stream->next) {
        if (stream->device != device || is_done(end_of(stream)))
            continue;
        places = realloc(places, (count + 1) * sizeof *places);
        places[count++] = end_of(stream);
    }
    for (size_t k = 0; k < count; k++)
        run_until(places[k]);
    free(places);
}

void run_all_devices(void)
{
    for (int device = 0; device < visible_device_count(); device++)
        run_device(device);
}

void start_thread(void *(*run)(void *), void *argument)
{
    static const int faults[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE};
    sigset_t mask, before;
    pthread_t thread;

    sigfillset(&mask);
    for (size_t k = 0; k < sizeof faults / sizeof *faults; k++)
        sigdelset(&mask, faults[k]);
    pthread_sigmask(SIG_BLOCK, &mask, &before);
    if (pthread_create(&thread, NULL, run, argument) != 0)
        abort();
    pthread_detach(thread);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static void *run_starter(void *argument)
{
    struct stream *stream = argument;
    struct timespec delay = {0, stream->start_delay_ns};

    nanosleep(&delay, NULL);
    HOLD_DEVICE;
    while (stream->done < stream->start_place)
        run_until((struct place){stream, stream->start_place});
    stream->has_starter = 0;
    return NULL;
}

void start_later(struct place place, long delay_ns)
{
    struct stream *stream = place.stream;

    if (place.number > stream->start_place)
        stream->start_place = place.number;
    if (stream->has_starter || is_done(place))
        return;
    stream->has_starter = 1;
    stream->start_delay_ns = delay_ns;
    start_thread(run_starter, stream);
}

void count_query(struct place place, unsigned *queries)
{
    if (++*queries >= QUERY_COUNT)
        start_later(place, 0);
}

/* ---- runtime ---- */

EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t *handle, unsigned flags)
{
    BEGIN_CALL;
    if (flags & ~(unsigned)cudaStreamNonBlocking)
        return failed(cudaErrorInvalidValue);
    *handle = (cudaStream_t)add_stream(current_device(), flags);
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t *handle, unsigned flags, int priority)
{
    (void)priority;
    return cudaStreamCreateWithFlags(handle, flags);
}

/* The queued work remains, and runs when an event or the device is waited for. */
EXPORT cudaError_t cudaStreamDestroy(cudaStream_t handle)
{
    HOLD_DEVICE;
    struct stream *stream;

    CHECK(ensure_context());
    stream = find_stream(handle);
    if (!stream || stream->is_legacy || handle == cudaStreamPerThread)
        return failed(cudaErrorInvalidResourceHandle);
    abandon_capture(stream);
    stream->is_destroyed = 1;
    unlink_if_finished(stream);
    return cudaSuccess;
}

/* Begin a call that asks for the state of a stream's work: find the place where it ends. */
static cudaError_t begin_status_call(cudaStream_t handle, struct place *end)
{
    struct stream *stream;

    CHECK(begin_stream_call(handle, &stream));
    CHECK(refuse_if_capturing(stream, cudaErrorStreamCaptureUnsupported));
    CHECK(check_capture_safe());
    /* The legacy stream includes the work of blocking streams up to now. */
    for (struct stream *other = streams; stream->is_legacy && other; other = other->next)
        if (is_unseen(other, stream->device))
            append(stream, (struct work){0});
    *end = end_of(stream);
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t handle)
{
    HOLD_DEVICE;
    struct place end;

    CHECK(begin_status_call(handle, &end));
    run_until(end);
    return failed(device_error(end.stream->device));
}

EXPORT cudaError_t cudaStreamQuery(cudaStream_t handle)
{
    HOLD_DEVICE;
    struct place end;

    CHECK(begin_status_call(handle, &end));
    if (is_done(end))
        return failed(device_error(end.stream->device));
    count_query(end, &end.stream->queries);
    return cudaErrorNotReady; /* see cudaEventQuery */
}
