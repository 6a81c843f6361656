/* Moves between ranks of one node by a single copy, which the kernel makes from process to process.
 *
 * Every rank publishes in shared memory (shared.h) where the blocks are that it sends to each other
 * rank, and where those are to go that it receives. Then process_vm_readv and process_vm_writev copy
 * them; no byte passes through a slot.
 *
 * A block is copied by its receiver. Where its sender has less to receive itself, it takes a part of
 * that over (`written_part`): the root of a broadcast, or those who give to one rank.
 *
 * Two copies, through slots, may be faster: the kernel has to find every page of the other process,
 * which costs little where pages are huge and more than the copy where they are not; and ranks that
 * share a cache move blocks through slots in it, past the caches to where they go. So the ranks try
 * both, now and then again, and publish how long each took for calls like this one. As all see all
 * boards, all choose the same (`choose`).
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
 * bytes up to which a block is not worth two calls, nor a choice; bytes that memory is mapped by; and
 * bytes of a block that caches lose before anybody reads it. */
enum { PIECE = 4 << 20, SPLIT = 128 << 10, PAGE = 4096, LARGE = 16 << 20 };

/* The two ways. How often each is tried before the faster one is taken, and after how many calls the
 * other one is tried again. */
enum { BY_KERNEL, BY_SLOTS, WAYS };
enum { TRIES = 2, AGAIN = 64 };

/* What a call comes to. */
enum { FAILED, DONE, NOT_COPIED, UNFIT };

/* What a rank says of its blocks that do not have the size that the other end expects; other
 * troubles are numbers of the system's errors. */
enum { UNEQUAL = -1 };

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

/* Nanoseconds of a call that was not possible. */
#define NEVER ((uint64_t)1 << 60)

/* How long calls have taken. */
struct history {
    uint64_t took[WAYS];  /* nanoseconds, lately */
    uint32_t tries[WAYS]; /* so far, at most TRIES */
    uint32_t since[WAYS]; /* calls by the other way */
};

/* By whether a rank is far away, and by the logarithm of the bytes that this rank moves. */
struct mpicoll_histories {
    struct history of[2][64];
    struct history *last;
};

/* What all calls of one kind share; mpicoll/routes/host/single_copy.py has the same. */
struct mpicoll_copies {
    struct mpicoll_processes *processes;
    struct mpicoll_histories *histories;
    uint64_t what;  /* tells this kind of call from others */
    size_t size;    /* bytes of an element */
    int32_t blocks; /* as many blocks as ranks are given by each, instead of one */
    int32_t giver, taker; /* only the root gives, or takes */
    struct mpicoll_kind *slots; /* for such calls through them */
};

/* What a rank publishes. */
struct board {
    atomic_uint left;    /* it has left the call */
    atomic_int trouble;  /* why it could not do its part; 0 if it could */
    struct history history; /* of calls like this one */
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

static size_t moved(const struct board *board)
{
    return board->sent > board->received ? board->sent : board->received;
}

/* The history of calls like this one. */
static struct history *find_history(const struct mpicoll_copies *kind, const struct board *mine)
{
    const int far = mpicoll_is_any_far(kind->processes->shared) != 0;
    uint32_t class = 0;
    for (size_t bytes = moved(mine); bytes > 1; bytes /= 2)
        class++;
    return kind->histories->last = &kind->histories->of[far][class];
}

/* The way of this call, the same on all ranks. */
static int choose(const struct mpicoll_processes *all)
{
    struct history worst = {{0, 0}, {TRIES, TRIES}, {0, 0}};
    size_t most = 0;

    for (uint32_t rank = 0; rank < all->n; rank++) {
        const struct board *other = board(all, rank);
        const struct history *its = &other->history;
        most = moved(other) > most ? moved(other) : most;
        for (int way = 0; way < WAYS; way++) {
            if (its->took[way] > worst.took[way])
                worst.took[way] = its->took[way];
            if (its->tries[way] < worst.tries[way])
                worst.tries[way] = its->tries[way];
            if (its->since[way] > worst.since[way])
                worst.since[way] = its->since[way];
        }
    }
    mpicoll_look_around(all->shared, most);
    if (most <= SPLIT)
        return BY_KERNEL;
    if (worst.tries[BY_KERNEL] < TRIES || worst.tries[BY_SLOTS] < TRIES)
        return worst.tries[BY_KERNEL] <= worst.tries[BY_SLOTS] ? BY_KERNEL : BY_SLOTS;
    const int faster = worst.took[BY_KERNEL] <= worst.took[BY_SLOTS] ? BY_KERNEL : BY_SLOTS;
    return worst.since[!faster] >= AGAIN ? !faster : faster;
}

/* Records how long a call took. What took much longer than before was interrupted, perhaps: it counts
 * in part. Nothing takes half as long by accident. */
static void record(struct history *history, int way, uint64_t took)
{
    const uint64_t before = history->took[way];

    history->since[way] = 0;
    history->since[!way]++;
    if (took == NEVER || history->tries[way] == 0 || took < before / 2 ||
        (history->tries[way] < TRIES && took < before))
        history->took[way] = took;
    else if (history->tries[way] == TRIES)
        history->took[way] = (3 * before + (took < 2 * before ? took : 2 * before)) / 4;
    if (history->tries[way] < TRIES)
        history->tries[way]++;
}

/* Bytes of histories. */
EXPORT size_t mpicoll_single_copy_histories(void)
{
    return sizeof(struct mpicoll_histories);
}

/* Records the nanoseconds that the last call took by slots. */
EXPORT void mpicoll_single_copy_took(const struct mpicoll_copies *kind, uint64_t nanoseconds)
{
    record(kind->histories->last, BY_SLOTS, nanoseconds);
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
        return UNEQUAL;
    }
    if (out.size != to.size)
        return UNEQUAL;
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
static int carry_out(const struct mpicoll_copies *kind)
{
    struct mpicoll_processes *all = kind->processes;
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
    struct history *history = find_history(kind, mine);
    mine->history = *history;
    atomic_store(&mine->left, 0);
    atomic_store(&mine->trouble, 0);
    const int published = mpicoll_board_publish(shared);
    if (published <= 0)
        return published < 0 ? leave(all) : FAILED;
    const uint64_t start = now();
    if (choose(all) == BY_SLOTS) {
        mpicoll_board_end(shared);
        mpicoll_board_close(shared);
        return NOT_COPIED;
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
    if (!mpicoll_board_wait(shared, moved(mine)))
        return leave(all);
    int result = DONE;
    for (uint32_t rank = 0; rank < n; rank++) {
        const int theirs = atomic_load(&board(all, rank)->trouble);
        if (theirs && result != UNFIT)
            result = theirs == UNEQUAL ? UNFIT : NOT_COPIED;
    }
    mpicoll_board_close(shared);
    record(history, BY_KERNEL, result == NOT_COPIED ? NEVER : now() - start);
    return result;
}

/* The collectives whose blocks all have `count` elements; see mpicoll_shared_lists.
 *
 * Returns, on all ranks, DONE; NOT_COPIED if one could not copy, or if slots are the faster way: then
 * what is received is undefined, and has to be moved through them; FAILED as other calls return 0. */
static int copy_lists(const struct mpicoll_copies *kind, const struct mpicoll_block *send,
                      const struct mpicoll_block *recv, size_t count, uint32_t root,
                      uint32_t number)
{
    struct mpicoll_processes *all = kind->processes;
    const uint32_t n = all->n, me = all->me;
    const size_t bytes = count * kind->size;

    mpicoll_board_begin(all->shared, number, kind->what | (uint64_t)root << 24, count);
    struct mpicoll_span *spans = board(all, me)->spans;
    for (uint32_t rank = 0; rank < n; rank++) {
        const int gives = (!kind->giver || me == root) && (!kind->taker || rank == root);
        const int takes = (!kind->giver || rank == root) && (!kind->taker || me == root);
        spans[rank] = (struct mpicoll_span){
            gives ? send[kind->blocks ? rank : 0].data : NULL,
            gives ? bytes : 0,
        };
        spans[n + rank] = (struct mpicoll_span){
            takes ? recv[kind->giver ? 0 : rank].data : NULL,
            takes ? bytes : 0,
        };
    }
    return carry_out(kind);
}

/* The same for blocks that lie one after another. */
EXPORT int mpicoll_single_copy_blocks(const struct mpicoll_copies *kind, char *send, char *recv,
                                      size_t count, uint32_t root, uint32_t number)
{
    const uint32_t n = kind->processes->n;
    const size_t bytes = count * kind->size;
    struct mpicoll_block from[n], to[n];

    for (uint32_t rank = 0; rank < n; rank++) {
        from[rank] = (struct mpicoll_block){send ? send + rank * bytes : NULL, count};
        to[rank] = (struct mpicoll_block){recv ? recv + rank * bytes : NULL, count};
    }
    return copy_lists(kind, from, to, count, root, number);
}

/* The same for blocks that lie anywhere, one way or the other. Returns MOVED or DIFFERED. */
EXPORT int mpicoll_single_copy_lists(const struct mpicoll_copies *kind,
                                     const struct mpicoll_block *send,
                                     const struct mpicoll_block *recv, size_t count, uint32_t root,
                                     uint32_t number)
{
    const int result = copy_lists(kind, send, recv, count, root, number);
    if (result != NOT_COPIED)
        return result == DONE ? MOVED : DIFFERED;
    const uint64_t start = now();
    const int done = mpicoll_shared_lists(kind->slots, send, recv, count, root, number);
    record(kind->histories->last, BY_SLOTS, now() - start);
    return done;
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
    return carry_out(kind);
}

/* all_to_all, see mpicoll_shared_all_to_all, which small blocks go by; others one way or the other. */
EXPORT int mpicoll_single_copy_all_to_all(const struct mpicoll_copies *kind,
                                          const struct mpicoll_block *send,
                                          const struct mpicoll_block *recv, size_t count,
                                          uint32_t root, uint32_t number)
{
    const uint32_t n = kind->processes->n;
    struct mpicoll_span spans[2 * n];
    int result = mpicoll_shared_all_to_all(kind->slots, send, recv, count, root, number);

    if (result != UNMOVED)
        return result;
    for (uint32_t rank = 0; rank < n; rank++) {
        spans[rank] = (struct mpicoll_span){send[rank].data, send[rank].count * kind->size};
        spans[n + rank] = (struct mpicoll_span){recv[rank].data, recv[rank].count * kind->size};
    }
    result = mpicoll_single_copy_spans(kind, spans, root, 0, number);
    if (result != NOT_COPIED) /* the sizes were found to fit */
        return result == DONE ? MOVED : DIFFERED;
    const uint64_t start = now();
    result = mpicoll_shared_all_to_all_by_slots(kind->slots, send, recv, count, root, number);
    record(kind->histories->last, BY_SLOTS, now() - start);
    return result;
}
