/* Data movement between ranks of one node by single copy: the kernel copies from process to
 * process.
 *
 * Every rank publishes a descriptor in shared memory (shared.h): the addresses of the blocks that it
 * sends to each other rank, and of the destinations of the blocks that it receives. Then
 * process_vm_readv and process_vm_writev copy the blocks. A block is copied by its receiver. If its
 * sender has less to receive itself, the sender copies a part of it (`written_part`): the root of a
 * broadcast, or the senders of a gather. (B. Goglin, S. Moreaud, KNEM, J. Parallel and Distributed
 * Computing 73(2), 2013, where either end of a message copies.)
 *
 * Copying twice, through slots, may be faster: the kernel must look up every page of the other
 * process, which costs more than the copy for small pages; and ranks that share a cache can move
 * blocks through slots in it. So shared.c measures both (choice.h).
 *
 * No rank returns from a call before all other ranks have finished their part, because they read
 * and write its memory. This also holds for a rank that aborts a call after another was lost
 * (`abort_call`). */

#define _GNU_SOURCE /* process_vm_readv */

#include "kernels.h"
#include "shared.h"

#include <errno.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>

/* Maximum size of a copy between two checks whether the other rank has aborted; minimum size of a
 * block that two ranks share; page size; and size of a block that exceeds the caches. In bytes. */
enum {
    PIECE_BYTES = 4 << 20,
    SPLIT_MIN_BYTES = 128 << 10,
    PAGE = 4096,
    STREAM_MIN_BYTES = 16 << 20
};

/* A group's processes as this rank sees them; mpicoll/routes/host/shared.py mirrors it. */
struct mpicoll_processes {
    struct mpicoll_shared *shared;
    const int64_t *pids;
    char *const *tokens; /* by rank, an address at which 8 bytes are readable while it lives */
    uint32_t n, me;
};

EXPORT const struct mpicoll_field mpicoll_processes_fields[] = {
    FIELD(mpicoll_processes, shared), FIELD(mpicoll_processes, pids),
    FIELD(mpicoll_processes, tokens), FIELD(mpicoll_processes, n), FIELD(mpicoll_processes, me),
    END_OF_FIELDS,
};

/* A rank's published descriptor. */
struct descriptor {
    atomic_uint aborted;    /* the rank has aborted the call */
    atomic_int error;       /* errno if the rank could not copy, or 0 */
    size_t sent, received;  /* bytes sent to and received from other ranks */
    struct mpicoll_span spans[]; /* n blocks that it sends, by receiver; n received, by sender */
};

/* Returns the size of a descriptor for n ranks in bytes. */
EXPORT size_t mpicoll_single_copy_descriptor_size(size_t n)
{
    return sizeof(struct descriptor) + 2 * n * sizeof(struct mpicoll_span);
}

/* Copies between this process and another, in either direction. Returns 0 or the error. */
EXPORT int mpicoll_single_copy_bytes(int64_t pid, int writes, char *here, char *there, size_t size)
{
    while (size) {
        struct iovec own = {here, size}, other = {there, size};
        const ssize_t done = writes ? process_vm_writev((pid_t)pid, &own, 1, &other, 1, 0)
                                    : process_vm_readv((pid_t)pid, &own, 1, &other, 1, 0);
        if (done <= 0)
            return done < 0 ? errno : EFAULT;
        here += done, there += done, size -= (size_t)done; /* a copy stops at an unmapped page */
    }
    return 0;
}

static struct descriptor *descriptor(const struct mpicoll_processes *processes, uint32_t rank)
{
    return (struct descriptor *)mpicoll_descriptor(processes->shared, rank);
}

static void sleep_ms(void)
{
    const struct timespec time = {0, 1000000};
    nanosleep(&time, NULL);
}

/* Aborts a call: publishes that, then waits for ranks that still access this rank's memory. Each of
 * them finishes its part, is aborted as well, or is lost. A rank that made another call never copies.
 * (A rank that comes later sees that this rank has aborted, because it publishes its descriptor
 * before it checks.) */
static int abort_call(const struct mpicoll_processes *processes)
{
    uint64_t word;

    atomic_store(&descriptor(processes, processes->me)->aborted, 1);
    for (uint32_t rank = 0; rank < processes->n; rank++)
        while (rank != processes->me && mpicoll_has_same_call(processes->shared, rank) &&
               !mpicoll_has_ended(processes->shared, rank) &&
               !atomic_load(&descriptor(processes, rank)->aborted) &&
               mpicoll_single_copy_bytes(processes->pids[rank], 0, (char *)&word,
                                         processes->tokens[rank], sizeof word) != ESRCH)
            sleep_ms();
    return MISMATCHED;
}

/* The other process is lost or about to abort. Waits until this rank is aborted as well. */
static int wait_for_abort(const struct mpicoll_processes *processes)
{
    while (!mpicoll_is_aborted(processes->shared))
        sleep_ms();
    return abort_call(processes);
}

/* Cost of writing relative to reading: the kernel locks and marks pages that it writes. */
enum { WRITE_COST = 2 };

/* Returns the size of the last part of a block that its sender copies; the receiver copies the
 * rest. Both finish at the same time if the sender and the receiver treat all their blocks alike.
 */
static size_t written_part(size_t size, const struct descriptor *sender,
                           const struct descriptor *receiver)
{
    if (size <= SPLIT_MIN_BYTES || receiver->received <= sender->received)
        return 0;
    const double ahead = (double)(receiver->received - sender->received);
    const double part = ahead / (ahead + WRITE_COST * (double)sender->sent);
    return (size_t)((double)size * part) / PAGE * PAGE;
}

static size_t moved(const struct descriptor *descriptor)
{
    return descriptor->sent > descriptor->received ? descriptor->sent : descriptor->received;
}

/* Copies between this rank and another. Returns 0 or the error; ESRCH if the other rank is lost. */
static int copy_pieces(const struct mpicoll_processes *processes, uint32_t rank, int writes,
                       char *here, char *there, size_t size)
{
    for (size_t at = 0; at < size; at += PIECE_BYTES) {
        const size_t length = size - at < PIECE_BYTES ? size - at : PIECE_BYTES;
        if (atomic_load(&descriptor(processes, rank)->aborted))
            return ESRCH;
        const int error = mpicoll_single_copy_bytes(processes->pids[rank], writes, here + at,
                                                    there + at, length);
        if (error)
            return error;
    }
    return 0;
}

/* Copies this rank's part of the data between it and another. Returns 0 or the error. */
static int copy_with(const struct mpicoll_processes *processes, uint32_t rank)
{
    const uint32_t n = processes->n, me = processes->me;
    const struct descriptor *mine = descriptor(processes, me), *other = descriptor(processes, rank);
    const struct mpicoll_span from = other->spans[me], into = mine->spans[n + rank];
    const struct mpicoll_span out = mine->spans[rank], to = other->spans[n + me];

    int error = copy_pieces(processes, rank, 0, into.data, from.data,
                            from.size - written_part(from.size, other, mine));
    if (!error) {
        const size_t part = written_part(out.size, mine, other), start = out.size - part;
        error = copy_pieces(processes, rank, 1, out.data + start, to.data + start, part);
    }
    return error;
}

static void copy_own(struct mpicoll_span into, struct mpicoll_span from)
{
    if (into.data == from.data || !from.size)
        return;
    if (from.size >= STREAM_MIN_BYTES)
        mpicoll_copy_past_caches(into.data, from.data, from.size);
    else
        mpicoll_copy(into.data, from.data, from.size);
}

int mpicoll_single_copy(const struct mpicoll_processes *processes,
                        const struct mpicoll_span *spans, struct mpicoll_trial *trial)
{
    struct mpicoll_shared *shared = processes->shared;
    const uint32_t n = processes->n, me = processes->me;
    struct descriptor *mine = descriptor(processes, me);
    int error = 0;

    memcpy(mine->spans, spans, 2 * n * sizeof *spans);
    mine->sent = mine->received = 0;
    for (uint32_t rank = 0; rank < n; rank++)
        if (rank != me) {
            mine->sent += spans[rank].size;
            mine->received += spans[n + rank].size;
        }
    atomic_store(&mine->aborted, 0);
    atomic_store(&mine->error, 0);
    const int published = mpicoll_round_publish(shared, trial);
    if (published <= 0)
        return published < 0 ? abort_call(processes) : MISMATCHED;
    for (uint32_t i = 1; i < n && !error; i++)
        error = copy_with(processes, (me + i) % n);
    if (error == ESRCH)
        return wait_for_abort(processes);
    if (!error)
        copy_own(spans[n + me], spans[me]);
    atomic_store(&mine->error, error);
    mpicoll_round_end(shared);
    if (!mpicoll_round_wait(shared, moved(mine)))
        return abort_call(processes);
    int result = MOVED;
    for (uint32_t rank = 0; rank < n; rank++)
        if (atomic_load(&descriptor(processes, rank)->error))
            result = NOT_COPIED;
    mpicoll_round_close(shared);
    mpicoll_trial_end(trial, result == NOT_COPIED);
    return result;
}
