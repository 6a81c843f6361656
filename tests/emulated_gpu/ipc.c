/* Memory and events of other processes.
 *
 * A stream that waits for an event of another process sends that process a request. A thread of
 * the other process then runs its stream up to the event, even if its program is blocked.
 */
#define _GNU_SOURCE
#include "device.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define MAX_SHARED_EVENTS ((size_t)1 << 16)
#define TABLE_BYTES (MAX_SHARED_EVENTS * sizeof(struct event_counts))
#define MEMORY_MAGIC 0x4D454D59u
#define POLL_INTERVAL_NS 20000L
/* Polls before a waiting stream checks that the other process lives. */
#define CHECK_COUNT 500

struct memory_handle {
    uint32_t magic;
    int machine_device, process;
    uint64_t object;
    size_t bytes, page_bytes;
    char *address;
};

/* An incomplete record of an event of this process. */
struct shared_record {
    uint64_t number, record;
    struct place place;
    struct shared_record *next;
};

struct request {
    uint64_t number, record;
};

/* The table of another process's events. */
struct table {
    int process;
    struct event_counts *counts;
    struct table *next;
};

static struct event_counts *own_counts;
static uint64_t event_count;
static struct shared_record *pending;
static struct table *tables;

/* ---- events of this process ---- */

static socklen_t write_address(struct sockaddr_un *address, int process)
{
    memset(address, 0, sizeof *address);
    address->sun_family = AF_UNIX;
    /* A name that begins with a zero byte is in the abstract namespace: no file remains. */
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1
                       + (size_t)sprintf(address->sun_path + 1, "emulated-gpu-%d", process));
}

static void start_record(struct request request)
{
    lock_device();
    for (struct shared_record *each = pending; each; each = each->next)
        if (each->number == request.number && each->record == request.record)
            start_later(each->place, 0);
    unlock_device();
}

static void *serve(void *argument)
{
    int server = (int)(intptr_t)argument;
    struct request request;

    for (;;) {
        ssize_t bytes = recv(server, &request, sizeof request, 0);
        if (bytes == (ssize_t)sizeof request)
            start_record(request);
        else if (bytes < 0 && errno != EINTR)
            return NULL;
    }
}

static void start_server(void)
{
    int server = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    struct sockaddr_un address;
    socklen_t length = write_address(&address, getpid());
    sigset_t mask, before;
    pthread_t thread;

    if (server < 0 || bind(server, (struct sockaddr *)&address, length) != 0) {
        perror("emulated GPU: cannot serve the events of this process");
        abort();
    }
    sigfillset(&mask);
    pthread_sigmask(SIG_BLOCK, &mask, &before);
    if (pthread_create(&thread, NULL, serve, (void *)(intptr_t)server) != 0)
        abort();
    pthread_detach(thread);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

struct event_counts *create_counts(uint64_t *number)
{
    if (!own_counts) {
        own_counts = create_object(EVENT_TABLE, TABLE_BYTES, NULL, PROT_READ | PROT_WRITE);
        if (own_counts == MAP_FAILED)
            abort();
        start_server();
    }
    if (event_count == MAX_SHARED_EVENTS) {
        fprintf(stderr, "emulated GPU: more than %zu interprocess events\n", MAX_SHARED_EVENTS);
        abort();
    }
    *number = event_count++;
    return own_counts + *number;
}

void add_shared_record(uint64_t number, uint64_t record, struct place place)
{
    struct shared_record *made = malloc(sizeof *made);
    *made = (struct shared_record){number, record, place, pending};
    pending = made;
}

void remove_shared_record(uint64_t number, uint64_t record)
{
    struct shared_record **link = &pending, *found;

    while (*link && ((*link)->number != number || (*link)->record != record))
        link = &(*link)->next;
    found = *link;
    if (found)
        *link = found->next;
    free(found);
}

/* ---- events of other processes ---- */

struct event_counts *open_counts(int process, uint64_t number)
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
    return number < MAX_SHARED_EVENTS ? found->counts + number : NULL;
}

int request_record(int process, uint64_t number, uint64_t record)
{
    struct request request = {number, record};
    struct sockaddr_un address;
    socklen_t length = write_address(&address, process);
    int client = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    ssize_t sent = sendto(client, &request, sizeof request, MSG_NOSIGNAL,
                          (struct sockaddr *)&address, length);
    int error = errno;

    close(client);
    return sent >= 0 || error != ECONNREFUSED;
}

void await_record(int process, uint64_t number, struct event_counts *counts, uint64_t record)
{
    const struct timespec interval = {0, POLL_INTERVAL_NS};

    for (long polls = 0; counts->completed < record; polls++) {
        /* The work of a process that has ended counts as complete. */
        if (polls % CHECK_COUNT == 0 && !request_record(process, number, record))
            return;
        nanosleep(&interval, NULL);
    }
}

/* ---- memory ---- */

EXPORT cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *address)
{
    cudaError_t error = begin_call();
    struct memory_handle text = {.magic = MEMORY_MAGIC, .process = getpid()};
    struct allocation *found;

    if (error)
        return failed(error);
    lock_device();
    found = find_allocation(address);
    if (!found || found->kind != DEVICE_MEMORY)
        error = cudaErrorInvalidValue;
    if (!error) {
        text.machine_device = machine_device(found->device);
        text.object = found->object;
        text.bytes = found->bytes;
        text.page_bytes = found->page_bytes;
        text.address = found->address;
        memset(handle, 0, sizeof *handle);
        memcpy(handle, &text, sizeof text);
    }
    unlock_device();
    return failed(error);
}

/* Return an open import that has the same address in the exporting process, or NULL. */
static struct allocation *find_import(const struct memory_handle *text)
{
    for (struct allocation *each = first_allocation(); each < end_of_allocations(); each++)
        if (each->kind == IMPORTED_MEMORY && !each->freed && each->process == text->process
            && each->exported_address == text->address)
            return each;
    return NULL;
}

static cudaError_t open_memory(void **address, const struct memory_handle *text)
{
    struct allocation *found = find_import(text);
    struct allocation wanted = {
        .device = visible_device(text->machine_device), .process = text->process,
        .object = text->object, .bytes = text->bytes, .page_bytes = text->page_bytes,
        .exported_address = text->address,
    };

    if (wanted.device < 0)
        return cudaErrorInvalidDevice;
    if (!has_peer_access(current_device(), wanted.device))
        return cudaErrorPeerAccessUnsupported;
    if (found && found->object != text->object)
        return cudaErrorAlreadyMapped; /* memory that has the address of freed memory */
    if (found)
        found->references++;
    else
        found = import_allocation(&wanted);
    if (found) {
        *address = found->address;
        enable_peer(current_device(), wanted.device);
    }
    return found ? cudaSuccess : cudaErrorInvalidValue;
}

EXPORT cudaError_t cudaIpcOpenMemHandle(void **address, cudaIpcMemHandle_t handle, unsigned flags)
{
    cudaError_t error = begin_call();
    struct memory_handle text;

    memcpy(&text, &handle, sizeof text);
    if (!error && (text.magic != MEMORY_MAGIC || flags != cudaIpcMemLazyEnablePeerAccess))
        error = cudaErrorInvalidValue;
    if (!error && text.process == getpid())
        error = cudaErrorDeviceUninitialized;
    if (!error)
        error = check_capture_safe();
    if (error)
        return failed(error);
    lock_device();
    error = open_memory(address, &text);
    unlock_device();
    return failed(error);
}

/* As in CUDA, the device is not synchronized: later accesses fault. */
EXPORT cudaError_t cudaIpcCloseMemHandle(void *address)
{
    cudaError_t error = begin_call();
    struct allocation *found;

    if (error)
        return failed(error);
    lock_device();
    found = find_allocation(address);
    if (!found || found->kind != IMPORTED_MEMORY || found->address != address)
        error = cudaErrorInvalidValue;
    else if (--found->references == 0)
        unmap_allocation(found);
    unlock_device();
    return failed(error);
}
