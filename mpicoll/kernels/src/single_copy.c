/* Moves between ranks of one node by a single copy, which the kernel makes from process to process.
 *
 * Every rank publishes in shared memory (shared.h) where the blocks are that it sends to each other
 * rank, and where those are to go that it receives. Then process_vm_readv and process_vm_writev copy
 * them; no byte passes through a slot.
 *
 * A block is copied by its receiver. Where its sender has less to receive itself, it takes a part of
 * that over (`written_part`): the root of a broadcast, or those who give to one rank.
 *
 * The kernel finds every page of the other process. That costs little where pages are huge, and more
 * than copying twice where they are not. So each rank tries how long it takes for its own memory, and
 * publishes that, too. Ranks that share a cache move large blocks faster through slots in it, past
 * the caches to where they go. As all see all boards, all choose the same (`by_slots`).
 *
 * No rank goes on with its program before all others have done their part, for they read and write
 * its memory. That holds for a rank that leaves, too, since another was lost (`leave`).
 *
 * (B. Goglin, S. Moreaud, KNEM: A generic and scalable kernel-assisted intra-node MPI communication
 * framework, J. Parallel and Distributed Computing 73(2), 2013, has either end of a message copy;
 * S. Chakraborty, H. Subramoni, D. K. Panda, Contention-aware kernel-assisted MPI collectives for
 * multi-/many-core systems, IEEE Cluster 2017, has collectives read or write so.) */

#define _GNU_SOURCE /* process_vm_readv */

#include "kernels.h"
#include "shared.h"

#include <errno.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>

#ifdef __linux__
#include <sys/types.h>
#include <sys/uio.h>
#endif

/* Bytes that a call of the kernel copies at most, between looks at whether the other rank is there;
 * bytes up to which a block is not worth two calls, nor a trial; bytes that memory is mapped by; and
 * bytes of a block that caches lose before anybody reads it. */
enum { PIECE = 4 << 20, SPLIT = 128 << 10, PAGE = 4096, LARGE = 16 << 20 };

/* Bytes of a trial; nanoseconds a page above which copying twice is faster; and bytes that a rank
 * sends or receives from which on it is, through a cache that all share. */
enum { TRIAL = 32 << 10, SLOW = 330, MUCH = 24 << 20 };

/* What a call comes to. */
enum { FAILED, DONE, UNABLE, UNFIT };

/* What a rank says of its blocks that do not have the size that the other end expects; other
 * troubles are numbers of the system's errors. */
enum { MISFIT = -1 };

/* A block: where it is, and its bytes. */
struct mpicoll_span {
    char *data;
    size_t size;
};

/* What the ranks of a group know of each other; mpicoll/routes/host/single_copy.py has the same. */
struct mpicoll_processes {
    struct mpicoll_shared *shared;
    const int64_t *pids;
    char *const *tokens; /* by rank, where 8 bytes can be read as long as the process lives */
    uint32_t n, me;
    uint32_t misfit;     /* after UNFIT: the rank whose block for this one was not as expected, or n */
    uint64_t found;      /* and the bytes of that block */
};

/* What all calls of one kind share; mpicoll/routes/host/single_copy.py has the same. */
struct mpicoll_copies {
    struct mpicoll_processes *processes;
    uint64_t what;  /* tells this kind of call from others */
    size_t size;    /* bytes of an element */
    int32_t blocks; /* as many blocks as ranks are given by each, instead of one */
    int32_t giver, taker; /* only the root gives, or takes */
};

/* What a rank publishes. */
struct board {
    atomic_uint left;    /* it has left the call */
    atomic_int trouble;  /* why it could not do its part; 0 if it could */
    uint32_t pace; /* nanoseconds in which the kernel copied a page of its memory; 0: not tried */
    int32_t far;   /* any rank is far from it */
    size_t sent, received; /* bytes that it sends to others, and receives from them */
    struct mpicoll_span spans[]; /* n blocks that it sends, by receiver; n received, by sender */
};

/* Bytes of a board for n ranks. */
EXPORT size_t mpicoll_single_copy_board(size_t n)
{
    return sizeof(struct board) + 2 * n * sizeof(struct mpicoll_span);
}

/* One copy between this process and another, in either direction; returns 0, or the error. */
static int copy(int64_t pid, int writes, char *here, char *there, size_t size)
{
#ifdef __linux__
    while (size) {
        struct iovec own = {here, size}, other = {there, size};
        const ssize_t done = writes ? process_vm_writev((pid_t)pid, &own, 1, &other, 1, 0)
                                    : process_vm_readv((pid_t)pid, &own, 1, &other, 1, 0);
        if (done <= 0)
            return done < 0 ? errno : EFAULT;
        here += done, there += done, size -= (size_t)done; /* up to a page that is not there */
    }
    return 0;
#else
    (void)pid, (void)writes, (void)here, (void)there, (void)size;
    return ENOSYS;
#endif
}

/* Reads or writes a few bytes of another process, to see whether that is allowed. */
EXPORT int mpicoll_single_copy_try(int64_t pid, int writes, char *here, char *there, size_t size)
{
    return copy(pid, writes, here, there, size);
}

static struct board *board(const struct mpicoll_processes *all, uint32_t rank)
{
    return (struct board *)mpicoll_board(all->shared, rank);
}

static void nap(void)
{
    const struct timespec time = {0, 1000000};
    nanosleep(&time, NULL);
}

/* Leaves a call that cannot end: says so, and waits for those that still read or write this rank's
 * memory. Each of them ends its part, learns that it must leave, too, or is lost itself. (One that
 * comes later sees that this rank has left, for it shows its board before it looks.) */
static int leave(const struct mpicoll_processes *all)
{
    uint64_t word;

    atomic_store(&board(all, all->me)->left, 1);
    for (uint32_t rank = 0; rank < all->n; rank++)
        while (rank != all->me && mpicoll_board_is_shown(all->shared, rank) &&
               !mpicoll_board_is_ended(all->shared, rank) && !atomic_load(&board(all, rank)->left) &&
               copy(all->pids[rank], 0, (char *)&word, all->tokens[rank], sizeof word) != ESRCH)
            nap();
    return FAILED;
}

/* The other end's process is lost, or about to leave. Waits until this rank is told. */
static int lost(const struct mpicoll_processes *all)
{
    while (!mpicoll_has_left(all->shared))
        nap();
    return leave(all);
}

/* How often writing takes as long as reading: pages that the kernel has written for another process
 * it locks and marks. */
enum { WRITING = 2 };

/* Bytes of a block that its sender copies, the last ones; its receiver copies the others. Such that
 * both end at once, if the sender has as much to do with each of its blocks, and the receiver, too. */
static size_t written_part(size_t size, const struct board *sender, const struct board *receiver)
{
    if (size <= SPLIT || receiver->received <= sender->received)
        return 0;
    const double ahead = (double)(receiver->received - sender->received);
    const double part = ahead / (ahead + WRITING * (double)sender->sent);
    return (size_t)((double)size * part) / PAGE * PAGE;
}

static uint64_t now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000 + (uint64_t)time.tv_nsec;
}

/* The nanoseconds in which the kernel copies a page of this process, of the largest block that
 * another rank copies from or to; 0 if they are all small. */
static uint32_t try_pace(const struct mpicoll_processes *all, const struct board *mine)
{
    const struct mpicoll_span *largest = NULL;
    char into[TRIAL];

    for (uint32_t k = 0; k < 2 * all->n; k++)
        if (k % all->n != all->me && (!largest || mine->spans[k].size > largest->size))
            largest = &mine->spans[k];
    if (!largest || largest->size <= SPLIT)
        return 0;
    char *middle = largest->data + largest->size / 2;
    const uint64_t start = now();
    if (copy(all->pids[all->me], 0, into, middle, TRIAL))
        return UINT32_MAX; /* memory of a device, perhaps */
    const uint64_t took = (now() - start) / (TRIAL / PAGE) + 1;
    return took < UINT32_MAX ? (uint32_t)took : UINT32_MAX;
}

/* Whether the ranks' slots are the faster way; the same on all ranks. */
static int by_slots(struct mpicoll_processes *all)
{
    size_t most = 0;
    int slow = 0, far = 0;

    for (uint32_t rank = 0; rank < all->n; rank++) {
        const struct board *other = board(all, rank);
        most = other->sent > most ? other->sent : most;
        most = other->received > most ? other->received : most;
        slow |= other->pace > SLOW;
        far |= other->far;
    }
    mpicoll_look_around(all->shared, most);
    return slow || (!far && most >= MUCH);
}

/* Copies between this rank and another; returns 0 or the error, ESRCH if the other is not there. */
static int copy_pieces(const struct mpicoll_processes *all, uint32_t rank, int writes, char *here,
                       char *there, size_t size)
{
    for (size_t at = 0; at < size; at += PIECE) {
        const size_t some = size - at < PIECE ? size - at : PIECE;
        if (atomic_load(&board(all, rank)->left))
            return ESRCH;
        const int error = copy(all->pids[rank], writes, here + at, there + at, some);
        if (error)
            return error;
    }
    return 0;
}

/* This rank's part of what goes between it and another: 0 or the error. */
static int copy_with(struct mpicoll_processes *all, uint32_t rank)
{
    const uint32_t n = all->n, me = all->me;
    const struct board *mine = board(all, me), *other = board(all, rank);
    const struct mpicoll_span from = other->spans[me], into = mine->spans[n + rank];
    const struct mpicoll_span out = mine->spans[rank], to = other->spans[n + me];

    if (from.size != into.size) {
        all->misfit = rank, all->found = from.size;
        return MISFIT;
    }
    if (out.size != to.size)
        return MISFIT;
    int error = copy_pieces(all, rank, 0, into.data, from.data,
                            from.size - written_part(from.size, other, mine));
    if (!error) {
        const size_t part = written_part(out.size, mine, other), start = out.size - part;
        error = copy_pieces(all, rank, 1, out.data + start, to.data + start, part);
    }
    return error;
}

static void copy_own(struct mpicoll_span into, struct mpicoll_span from)
{
    if (into.data == from.data || !from.size)
        return;
    if (from.size >= LARGE)
        mpicoll_copy_past_caches(into.data, from.data, from.size);
    else
        memcpy(into.data, from.data, from.size);
}

/* Carries out a call whose blocks are on this rank's board. */
static int carry_out(struct mpicoll_processes *all)
{
    struct mpicoll_shared *shared = all->shared;
    const uint32_t n = all->n, me = all->me;
    struct board *mine = board(all, me);
    int trouble = 0;

    mine->sent = mine->received = 0;
    for (uint32_t rank = 0; rank < n; rank++)
        if (rank != me) {
            mine->sent += mine->spans[rank].size;
            mine->received += mine->spans[n + rank].size;
        }
    mine->pace = try_pace(all, mine);
    mine->far = mpicoll_is_any_far(shared);
    atomic_store(&mine->left, 0);
    atomic_store(&mine->trouble, 0);
    const int published = mpicoll_board_publish(shared);
    if (published <= 0)
        return published < 0 ? leave(all) : FAILED;
    if (by_slots(all)) {
        mpicoll_board_end(shared);
        mpicoll_board_close(shared);
        return UNABLE;
    }
    all->misfit = n;
    for (uint32_t i = 1; i < n && !trouble; i++)
        trouble = copy_with(all, (me + i) % n);
    if (trouble == ESRCH)
        return lost(all);
    if (!trouble)
        copy_own(mine->spans[n + me], mine->spans[me]);
    atomic_store(&mine->trouble, trouble);
    mpicoll_board_end(shared);
    if (!mpicoll_board_wait(shared, mine->sent > mine->received ? mine->sent : mine->received))
        return leave(all);
    int result = DONE;
    for (uint32_t rank = 0; rank < n; rank++) {
        const int theirs = atomic_load(&board(all, rank)->trouble);
        if (theirs && result != UNFIT)
            result = theirs == MISFIT ? UNFIT : UNABLE;
    }
    mpicoll_board_close(shared);
    return result;
}

/* The collectives whose blocks all have `count` elements; see mpicoll_shared_blocks.
 *
 * total: what all ranks must have alike of the sizes, as a number.
 * Returns, on all ranks, DONE; UNABLE if one could not copy, or if slots are the faster way: then what
 * is received is undefined, and has to be moved through them; FAILED as other calls return 0. */
EXPORT int mpicoll_single_copy_blocks(const struct mpicoll_copies *kind, char *send, char *recv,
                                      size_t count, uint32_t root, uint64_t total,
                                      uint32_t number)
{
    struct mpicoll_processes *all = kind->processes;
    const uint32_t n = all->n, me = all->me;
    const size_t bytes = count * kind->size;

    mpicoll_board_begin(all->shared, number, kind->what | (uint64_t)root << 24, total);
    struct mpicoll_span *spans = board(all, me)->spans;
    for (uint32_t rank = 0; rank < n; rank++) {
        const int gives = (!kind->giver || me == root) && (!kind->taker || rank == root);
        const int takes = (!kind->giver || rank == root) && (!kind->taker || me == root);
        spans[rank] = (struct mpicoll_span){
            gives ? send + (kind->blocks ? rank * bytes : 0) : NULL,
            gives ? bytes : 0,
        };
        spans[n + rank] = (struct mpicoll_span){
            takes ? recv + (kind->giver ? 0 : rank * bytes) : NULL,
            takes ? bytes : 0,
        };
    }
    return carry_out(all);
}

/* The collectives whose blocks may differ in size: n that this rank sends, by receiver, and n that
 * it receives, by sender. Returns UNFIT, on all ranks, if any block has not the size that its
 * receiver expects; the rest is as in mpicoll_single_copy_blocks. */
EXPORT int mpicoll_single_copy_spans(const struct mpicoll_copies *kind,
                                     const struct mpicoll_span *spans, uint32_t root,
                                     uint64_t total, uint32_t number)
{
    struct mpicoll_processes *all = kind->processes;

    mpicoll_board_begin(all->shared, number, kind->what | (uint64_t)root << 24, total);
    memcpy(board(all, all->me)->spans, spans, 2 * all->n * sizeof *spans);
    return carry_out(all);
}
