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
    cudaError_t (*run)(void *argument);
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

void lock_device(void)
{
    pthread_mutex_lock(&mutex);
}

void unlock_device(void)
{
    pthread_mutex_unlock(&mutex);
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

struct stream *first_stream(void)
{
    return streams;
}

static struct stream *legacy_stream(int device)
{
    if (!legacy[device]) {
        legacy[device] = add_stream(device, cudaStreamDefault);
        legacy[device]->is_legacy = 1;
    }
    return legacy[device];
}

struct stream *find_stream(cudaStream_t handle)
{
    struct stream *found = (struct stream *)handle;
    int device = current_device();

    if (handle == NULL || handle == cudaStreamLegacy)
        return legacy_stream(device);
    if (handle == cudaStreamPerThread) {
        if (!per_thread[device])
            per_thread[device] = add_stream(device, cudaStreamDefault);
        return per_thread[device];
    }
    return found->magic == STREAM_MAGIC && !found->is_destroyed ? found : NULL;
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

static struct place end_of(struct stream *stream)
{
    return (struct place){stream, stream->enqueued};
}

int is_done(struct place place)
{
    return place.stream->done >= place.number;
}

static int is_blocking(const struct stream *stream)
{
    return !(stream->flags & cudaStreamNonBlocking) && !stream->is_legacy;
}

static void add_dependency(struct command *command, struct place place)
{
    if (is_done(place))
        return;
    command->after = realloc(command->after, (command->after_count + 1) * sizeof *command->after);
    command->after[command->after_count++] = place;
}

/* Order a command of the legacy stream after the work of all blocking streams. */
static void order_after_blocking(struct stream *stream, struct command *command)
{
    for (struct stream *other = streams; other; other = other->next) {
        if (other->device != stream->device || !is_blocking(other)
            || other->seen_by_legacy == other->enqueued)
            continue;
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

static struct command *add_command(struct stream *stream, cudaError_t (*run)(void *),
                                   const void *argument, size_t bytes, unsigned flags)
{
    struct command *made = calloc(1, sizeof *made + bytes);

    made->run = run;
    made->flags = flags;
    if (bytes)
        memcpy(made->argument, argument, bytes);
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

struct place append(struct stream *stream, cudaError_t (*run)(void *), const void *argument,
                    size_t bytes, unsigned flags)
{
    add_command(stream, run, argument, bytes, flags);
    if (flags & SPINS)
        start_later(end_of(stream), START_DELAY_NS);
    return end_of(stream);
}

void append_wait(struct stream *stream, struct place place)
{
    if (place.stream != stream && !is_done(place))
        add_dependency(add_command(stream, NULL, NULL, 0, 0), place);
}

cudaError_t append_or_capture(struct stream *stream, cudaError_t (*run)(void *),
                              const void *argument, size_t bytes, unsigned flags)
{
    cudaError_t error = check_legacy_capture(stream);

    if (error)
        return error;
    if (stream->capture)
        return capture_work(stream, run, argument, bytes, flags);
    append(stream, run, argument, bytes, flags);
    return cudaSuccess;
}

cudaError_t enqueue(cudaStream_t handle, cudaError_t (*run)(void *argument), const void *argument,
                    size_t bytes, unsigned flags)
{
    cudaError_t error = begin_call();
    struct stream *stream;

    if (error)
        return error;
    lock_device();
    stream = find_stream(handle);
    if (!stream || ((flags & SAME_DEVICE) && stream->device != current_device()))
        error = cudaErrorInvalidResourceHandle;
    else
        error = append_or_capture(stream, run, argument, bytes, flags);
    unlock_device();
    return error;
}

/* ---- run ---- */

/* Run a command that this thread has claimed. */
static void run_command(int device, struct command *command)
{
    cudaError_t error = cudaSuccess;

    for (size_t k = 0; k < command->after_count; k++)
        run_until(command->after[k]);
    if (!command->run || (device_error(device) && !(command->flags & ALWAYS)))
        return;
    push_device(device);
    if (command->flags & UNGUARDED)
        error = command->run(command->argument);
    else
        error = run_guarded(command->run, command->argument);
    pop_device();
    if (error)
        set_device_error(device, error);
}

void run_until(struct place place)
{
    struct stream *stream = place.stream;

    lock_device();
    while (!is_done(place)) {
        struct command *command = stream->first;
        if (stream->is_running) {
            pthread_cond_wait(&changed, &mutex);
            continue;
        }
        stream->is_running = 1;
        unlock_device();
        run_command(stream->device, command);
        lock_device();
        stream->first = command->next;
        stream->done++;
        stream->is_running = 0;
        pthread_cond_broadcast(&changed);
        free(command->after);
        free(command);
    }
    unlink_if_finished(stream);
    unlock_device();
}

void run_device(int device)
{
    struct place *places = NULL;
    size_t count = 0;

    lock_device();
    for (struct stream *stream = streams; stream; stream = stream->next) {
        if (stream->device != device || is_done(end_of(stream)))
            continue;
        places = realloc(places, (count + 1) * sizeof *places);
        places[count++] = end_of(stream);
    }
    unlock_device();
    for (size_t k = 0; k < count; k++)
        run_until(places[k]);
    free(places);
}

struct start {
    struct stream *stream;
    struct timespec delay;
};

static void *run_starter(void *argument)
{
    struct start start = *(struct start *)argument;
    struct stream *stream = start.stream;

    free(argument);
    nanosleep(&start.delay, NULL);
    lock_device();
    while (stream->done < stream->start_place) {
        struct place place = {stream, stream->start_place};
        unlock_device();
        run_until(place);
        lock_device();
    }
    stream->has_starter = 0;
    unlock_device();
    return NULL;
}

/* Start a thread that leaves the program's signals to other threads. */
static void start_thread(void *(*run)(void *), void *argument)
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

void start_later(struct place place, long delay_ns)
{
    struct stream *stream = place.stream;
    struct start *start;

    if (place.number > stream->start_place)
        stream->start_place = place.number;
    if (stream->has_starter || is_done(place))
        return;
    stream->has_starter = 1;
    start = malloc(sizeof *start);
    *start = (struct start){stream, {0, delay_ns}};
    start_thread(run_starter, start);
}

void count_query(struct place place, unsigned *queries)
{
    if (++*queries >= QUERY_COUNT)
        start_later(place, 0);
}

/* ---- runtime ---- */

EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t *handle, unsigned flags, int priority)
{
    cudaError_t error = begin_call();

    (void)priority;
    if (!error && flags & ~(unsigned)cudaStreamNonBlocking)
        error = cudaErrorInvalidValue;
    if (error)
        return failed(error);
    lock_device();
    *handle = (cudaStream_t)add_stream(current_device(), flags);
    unlock_device();
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t *handle, unsigned flags)
{
    return cudaStreamCreateWithPriority(handle, flags, 0);
}

/* The queued work remains, and runs when an event or the device is waited for. */
EXPORT cudaError_t cudaStreamDestroy(cudaStream_t handle)
{
    cudaError_t error = ensure_context();
    struct stream *stream;

    if (error)
        return failed(error);
    lock_device();
    stream = find_stream(handle);
    if (!stream || stream->is_legacy || handle == cudaStreamPerThread)
        error = cudaErrorInvalidResourceHandle;
    if (!error) {
        abandon_capture(stream);
        stream->is_destroyed = 1;
        unlink_if_finished(stream);
    }
    unlock_device();
    return failed(error);
}

/* Make the legacy stream include the work of blocking streams up to now. */
static void join_blocking(struct stream *stream)
{
    for (struct stream *other = streams; other; other = other->next) {
        if (other->device != stream->device || !is_blocking(other)
            || other->seen_by_legacy == other->enqueued)
            continue;
        append(stream, NULL, NULL, 0, 0);
        return;
    }
}

/* Begin a call that asks for the state of a stream's work. Locks the mutex if it succeeds. */
static cudaError_t begin_status_call(cudaStream_t handle, struct stream **stream)
{
    cudaError_t error = begin_call();

    if (error)
        return error;
    lock_device();
    *stream = find_stream(handle);
    if (!*stream)
        error = cudaErrorInvalidResourceHandle;
    else
        error = refuse_if_capturing(*stream, cudaErrorStreamCaptureUnsupported);
    if (!error)
        error = check_legacy_capture(*stream);
    unlock_device();
    if (!error)
        error = check_capture_safe();
    if (error)
        return error;
    lock_device();
    if ((*stream)->is_legacy)
        join_blocking(*stream);
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t handle)
{
    struct stream *stream;
    struct place place;
    cudaError_t error = begin_status_call(handle, &stream);

    if (error)
        return failed(error);
    place = end_of(stream);
    unlock_device();
    run_until(place);
    return failed(device_error(stream->device));
}

EXPORT cudaError_t cudaStreamQuery(cudaStream_t handle)
{
    struct stream *stream;
    cudaError_t error = begin_status_call(handle, &stream);

    if (error)
        return failed(error);
    if (!is_done(end_of(stream))) {
        error = cudaErrorNotReady;
        count_query(end_of(stream), &stream->queries);
    }
    unlock_device();
    return failed(error ? error : device_error(stream->device));
}
