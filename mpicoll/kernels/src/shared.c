/* Collectives through memory that the ranks of a node share.
 *
 * All n ranks of a group map one segment. Each rank has a region in it: counters with call records,
 * SLOTS slots for the data that it sends, and SLOTS second slots for the data that it has combined.
 * A message is split into rounds of at most one slot. In round k:
 *
 * 1. every rank copies its elements into slot k and signals that the slot is filled;
 * 2. once all slots k are filled, it combines elements of all slots in rank order: either all
 *    elements, straight into its array, or only its share, which it also writes to its second slot
 *    k, incrementing `combined`;
 * 3. in the second case it copies the other ranks' shares into its array once they are combined.
 *
 * The steps of neighboring rounds are interleaved (1 of round k, 3 of k - 2, 2 of k - 1), so a rank
 * seldom has to wait. If every rank combines everything, a call takes one copy and one wait less,
 * but more arithmetic: this is faster for small messages.
 *
 * To find out that all slots are filled, a rank of a small group polls every other rank. In a large
 * group ranks use a dissemination barrier (`wait_for_all`): in step s = 0, 1, ... rank r signals to
 * rank r + 2^s that the 2^s ranks up to and including r have filled their slots (`ready`; step 0
 * covers r alone), then waits for the same signal from r - 2^s, all modulo n (D. Hensgen, R.
 * Finkel, U. Manber, Two algorithms for barrier synchronization, International J. of Parallel
 * Programming 17(1), 1988). A rank sends a signal (release) after it has received the earlier ones
 * (acquire), so the receiver sees everything that all those ranks wrote.
 *
 * The signals of a call's first round carry the call record, and whether all records that the
 * sender has received match. By induction, after step s rank r knows whether the calls of the ranks
 * r - 2^(s + 1) + 1 to r all match its own. After the last step these are all ranks, and the result
 * is the same on every rank.
 *
 * Calls in which not every rank receives from all others (with a root, scan and exscan) are *lazy*:
 * a rank waits only for the ranks that it receives from, and compares its record with theirs. It
 * compares the remaining records up to MAX_LEAD calls later, when it waits for a slot. A record has
 * a hash of all earlier records, so comparing one of them compares all earlier ones. After a lazy
 * call that did not match, the ranks' rounds may differ, so the group is closed.
 *
 * A rank may write to slot k if all ranks have finished step 2 of round k - SLOTS, the last reader
 * of the slot. It knows that if all have filled slot k - 2, for which they had to finish that step;
 * else it waits for it (`wait_for_slot`). It writes to its second slot k after it knows that all
 * have filled slot k, for which they had to finish step 3 of round k - 3. Lazy calls of a few bytes
 * use a ring of small slots, so that a rank can be MAX_LEAD calls ahead of others.
 *
 * Of call records, a rank keeps RECORD_COUNT: another rank may read the record of call c until it
 * has finished call c + MAX_LEAD, and no rank is more than MAX_LEAD calls ahead of another.
 *
 * Large calls may run on several threads (parallel.c): each one runs a part of every block as a call
 * of its own in a *channel*, which has its own slots and counters. All ranks compare their calls
 * before, because a rank with another call would not use the channels.
 *
 * Round numbers continue from call to call, so a rank may begin a call while other ranks still
 * finish the previous one. Counters only grow; they have 32 bits, wrap around, and are compared by
 * their difference. */

#include "kernels.h"
#include "shared.h"

#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { SLOTS = 4, LINE = 64, PAGE = 4096 };

/* Number and size in bytes of the small slots; number of call records; and the number of calls by
 * which a rank may be ahead of others. */
enum { SMALL_SLOTS = 16, SMALL_SLOT_BYTES = 4096, RECORD_COUNT = 32, MAX_LEAD = SMALL_SLOTS - 2 };

/* Bits of a rank number; MAX_RANKS in mpicoll/routes/host/shared.py is 256. */
enum { MAX_RANK_BITS = 8 };

/* Number of times a waiting rank yields the processor before it sleeps. Waking up takes several
 * times as long as yielding: with more ranks than processors, small calls are four times faster
 * this way. */
enum { YIELD_COUNT = 50 };

/* Returned by mpicoll_round_publish if this rank has been aborted. */
enum { LEFT = -1 };

#define NO_TIMEOUT UINT64_MAX

/* The group was closed after a lazy call that did not match. */
enum { MISMATCH = 1 << 16 };

/* Size of the blocks in which data is combined, so that it stays in the first-level cache. */
enum { BLOCK_BYTES = 8192 };

/* A number that its rank increments and other ranks wait for. */
struct counter {
    atomic_uint value;
    atomic_uint sleepers; /* a rank has gone to sleep since the last change */
};

/* A call record: the call's number in this segment, its signature and element count, a hash of the
 * earlier records, whether all records that its rank has received so far match, whether the call is
 * lazy, and the maximum of the notes (choice.h). Atomic, because a rank that is ahead may write a
 * record that another rank still reads (see mpicoll_shared_all_entered). Counters order all other
 * reads and writes, so relaxed access is enough. */
struct record {
    _Alignas(LINE) struct counter number;
    _Atomic uint32_t matching, note, is_lazy;
    _Atomic uint64_t signature, count, earlier;
};

struct signal {
    _Alignas(LINE) struct counter counter;
};

struct header {
    /* Of call c: records[0][c % RECORD_COUNT]; further ones: see `wait_for_all`. */
    struct record records[MAX_RANK_BITS][RECORD_COUNT];
    struct signal ready[MAX_RANK_BITS];   /* the same for rounds after a call's first: round + 1 */
    struct signal combined;               /* rounds whose step 2 is finished */
    struct record announced[2];           /* the last calls announced, begun or not */
    /* Of rank 0: 1 + the rank that closed the group, and MISMATCH; or 0. */
    _Alignas(LINE) atomic_uint closed_by;
    _Alignas(LINE) uint64_t signature, count; /* of the current call; only its rank uses it */
    uint32_t note;                            /* the maximum of those received */
    uint32_t is_lazy;
};

/* A rank's handle of a channel of a segment. The handles of all channels are consecutive.
 * mpicoll/routes/host/shared.py mirrors it. */
struct mpicoll_shared {
    char *base;              /* address of rank 0's region */
    size_t stride;           /* bytes from a rank's region to the next one's */
    struct mpicoll_shared *first; /* the handle of the first channel */
    uint32_t channels;
    size_t slot;             /* size of a slot in bytes, a multiple of LINE */
    uint32_t n, me;          /* number of ranks, and this rank */
    uint32_t round;          /* rounds finished */
    uint32_t calls;          /* calls begun */
    uint32_t spin_count;     /* polls of a counter before the thread yields and sleeps */
    atomic_uint aborted;     /* this rank no longer waits: calls return 0 */
    uint32_t flat_max_ranks; /* up to this many ranks, every rank polls every other rank */
    uint32_t swapped;        /* with two ranks, a bit per slot: they have exchanged these slots */
    uint32_t returned;       /* rounds that all ranks are known to have finished */
    uint32_t compared;       /* the last call that is known to match on all ranks */
    uint64_t earlier;        /* hash of the records before the current call's */
};

EXPORT const struct mpicoll_field mpicoll_shared_fields[] = {
    FIELD(mpicoll_shared, base), FIELD(mpicoll_shared, stride), FIELD(mpicoll_shared, first),
    FIELD(mpicoll_shared, channels), FIELD(mpicoll_shared, slot), FIELD(mpicoll_shared, n),
    FIELD(mpicoll_shared, me), FIELD(mpicoll_shared, round), FIELD(mpicoll_shared, calls),
    FIELD(mpicoll_shared, spin_count), FIELD(mpicoll_shared, aborted),
    FIELD(mpicoll_shared, flat_max_ranks), FIELD(mpicoll_shared, swapped),
    FIELD(mpicoll_shared, returned), FIELD(mpicoll_shared, compared),
    FIELD(mpicoll_shared, earlier),
    END_OF_FIELDS,
};

/* Parameters that all calls of one plan share; mpicoll/routes/host/shared.py mirrors it. */
struct mpicoll_plan {
    struct mpicoll_shared *shared;
    struct mpicoll_choices *choices; /* NULL: only default ways */
    const struct mpicoll_mpi_plan *mpi; /* plan of the same calls by MPI; NULL: not by MPI */
    const struct mpicoll_processes *processes; /* NULL: not by the kernel */
    uint64_t signature;         /* identifies operation, op, dtype and layout */
    double divisor;             /* of the combined result */
    size_t size;                /* bytes of a number */
    size_t numbers_per_element; /* 2 for complex numbers */
    size_t one_shot_max_bytes;  /* up to which all_reduce is run in one shot by default */
    int32_t format;             /* format of the numbers to combine; negative: copy only */
    int32_t operation;
    int32_t many_blocks;        /* each rank sends n blocks, one for each rank, instead of one */
    int32_t has_src, has_dst;   /* only the root sends; only the root receives */
    int32_t prefix;             /* scan: a rank combines the ranks before it, and itself if 1 */
    int32_t lazy;               /* with a root or `prefix`: wait for sources only, compare later */
    int32_t in_place;           /* all_reduce */
    /* Results. After WRONG_SIZE: the rank whose block for this one has another size, or n, and the
     * elements of that block. After NO_ROOM: elements of the largest block of all ranks. */
    uint32_t mismatch_rank;
    uint64_t mismatch_count;
    uint64_t max_count;
};

EXPORT const struct mpicoll_field mpicoll_plan_fields[] = {
    FIELD(mpicoll_plan, shared), FIELD(mpicoll_plan, choices), FIELD(mpicoll_plan, mpi),
    FIELD(mpicoll_plan, processes), FIELD(mpicoll_plan, signature), FIELD(mpicoll_plan, divisor),
    FIELD(mpicoll_plan, size), FIELD(mpicoll_plan, numbers_per_element),
    FIELD(mpicoll_plan, one_shot_max_bytes), FIELD(mpicoll_plan, format),
    FIELD(mpicoll_plan, operation), FIELD(mpicoll_plan, many_blocks), FIELD(mpicoll_plan, has_src),
    FIELD(mpicoll_plan, has_dst), FIELD(mpicoll_plan, prefix), FIELD(mpicoll_plan, lazy),
    FIELD(mpicoll_plan, in_place),
    FIELD(mpicoll_plan, mismatch_rank), FIELD(mpicoll_plan, mismatch_count),
    FIELD(mpicoll_plan, max_count),
    END_OF_FIELDS,
};

static size_t rounded(size_t size, size_t unit)
{
    return (size + unit - 1) / unit * unit;
}

/* Size of a second slot in bytes: the n-th part of a slot, rounded up, plus a cache line. Two ranks
 * have none: see `result_slot`. */
static size_t share_slot(size_t slot, size_t n)
{
    return n == 2 ? 0 : rounded(slot / n, LINE) + LINE;
}

/* Returns the size of one rank's region in bytes; a channel has n regions. */
EXPORT size_t mpicoll_shared_region(size_t slot, size_t n)
{
    return rounded(rounded(sizeof(struct header), PAGE) + SMALL_SLOTS * SMALL_SLOT_BYTES +
                       SLOTS * (slot + share_slot(slot, n)),
                   PAGE);
}

static char *region(const struct mpicoll_shared *shared, uint32_t rank)
{
    return shared->base + rank * shared->stride;
}

static struct header *header(const struct mpicoll_shared *shared, uint32_t rank)
{
    return (struct header *)region(shared, rank);
}

/* A ring of slots: of SMALL_SLOT_BYTES, or of the segment's slots. */
enum ring { SMALL, LARGE };

/* Returns the bit of a slot in `swapped`. */
static uint32_t slot_bit(enum ring ring, uint32_t round)
{
    return 1u << (ring == SMALL ? SLOTS + round % SMALL_SLOTS : round % SLOTS);
}

static char *slot(const struct mpicoll_shared *shared, enum ring ring, uint32_t rank,
                  uint32_t round)
{
    if (shared->n == 2 && shared->swapped & slot_bit(ring, round))
        rank ^= 1;
    char *first = region(shared, rank) + rounded(sizeof(struct header), PAGE);
    if (ring == SMALL)
        return first + round % SMALL_SLOTS * SMALL_SLOT_BYTES;
    return first + SMALL_SLOTS * SMALL_SLOT_BYTES + round % SLOTS * shared->slot;
}

/* A cache line moves to the processor that reads it last, and a write there is cheap. So after a
 * round in which two ranks have read each other's slots, they exchange these slots. */
static void swap_slots(struct mpicoll_shared *shared, enum ring ring, uint32_t round)
{
    shared->swapped ^= slot_bit(ring, round);
}

/* Returns where a rank writes its combined share for another rank, which begins at byte `start` of
 * the round: of two ranks, into the slot that it has read; of more, into its second slot. */
static char *result_slot(const struct mpicoll_shared *shared, uint32_t rank, uint32_t reader,
                         uint32_t round, size_t start)
{
    if (shared->n == 2)
        return slot(shared, LARGE, reader, round) + start;
    return slot(shared, LARGE, rank, 0) + SLOTS * shared->slot +
           round % SLOTS * share_slot(shared->slot, shared->n);
}

/* ---- Counting and waiting -------------------------------------------------------------------- */

/* Sleeping frees the processor for other ranks or threads during long waits; the kernel gives the
 * sleeper a processor again as soon as it is woken.
 *
 * Returns 1 if the counter still had the value and the sleep timed out or was interrupted. */
static int sleep_while(struct counter *counter, unsigned value, uint64_t timeout_ns)
{
    const struct timespec limit = {0, (long)timeout_ns};
    return syscall(SYS_futex, &counter->value, FUTEX_WAIT, value, &limit, NULL, 0) &&
           errno != EAGAIN;
}

static void wake(struct counter *counter)
{
    syscall(SYS_futex, &counter->value, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

static void relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void count_up(struct counter *counter, uint32_t value)
{
    /* Either this thread sees that a rank is about to sleep, or that rank sees the new value. */
    atomic_store(&counter->value, value);
    if (atomic_load(&counter->sleepers)) {
        atomic_store(&counter->sleepers, 0);
        wake(counter);
    }
}

static int reached(unsigned value, uint32_t target)
{
    return (int32_t)(value - target) >= 0;
}

int mpicoll_is_aborted(const struct mpicoll_shared *shared)
{
    return atomic_load(&shared->first->aborted) || atomic_load(&header(shared->first, 0)->closed_by);
}

/* Called during long waits, on the thread that has set it. Returns 1 if a signal handler has
 * raised, in which case the rank stops waiting. */
static int (*run_signal_handlers)(void);
static pthread_t handler_thread;

EXPORT void mpicoll_shared_set_signal_handler(int (*function)(void))
{
    handler_thread = pthread_self();
    run_signal_handlers = function;
}

static int signal_handler_raised(void)
{
    return run_signal_handlers && pthread_equal(handler_thread, pthread_self()) &&
           run_signal_handlers();
}

/* Waits for another rank's counter. Returns 0 at the time `end`, or if this rank must stop. */
static int wait_until(const struct mpicoll_shared *shared, struct counter *counter, uint32_t target,
                      uint64_t end)
{
    /* The rank that should wake this one may be lost, so sleep for a limited time. */
    const uint64_t sleep_limit_ns = 50000000;

    for (uint32_t i = 0; i < shared->spin_count; i++) {
        if (reached(atomic_load_explicit(&counter->value, memory_order_acquire), target))
            return 1;
        relax();
    }
    for (int i = 0; i < YIELD_COUNT && (end == NO_TIMEOUT || now_ns() < end); i++) {
        sched_yield();
        if (reached(atomic_load_explicit(&counter->value, memory_order_acquire), target))
            return 1;
    }
    for (;;) {
        const unsigned value = atomic_load(&counter->value);
        if (reached(value, target))
            return 1;
        const uint64_t time = end == NO_TIMEOUT ? 0 : now_ns();
        if (time >= end || mpicoll_is_aborted(shared))
            return 0;
        atomic_store(&counter->sleepers, 1);
        if (atomic_load(&counter->value) == value &&
            sleep_while(counter, value,
                        end - time < sleep_limit_ns ? end - time : sleep_limit_ns) &&
            signal_handler_raised()) {
            atomic_store(&shared->first->aborted, 1);
            return 0; /* the exception of the handler takes precedence */
        }
    }
}

static int wait_for(const struct mpicoll_shared *shared, struct counter *counter, uint32_t target)
{
    return wait_until(shared, counter, target, NO_TIMEOUT);
}

/* ---- Copies ---------------------------------------------------------------------------------- */

/* Minimum size of a copy that bypasses the caches. */
enum { STREAM_MIN_BYTES = 2048 };

static void copy(char *into, const char *from, size_t size, int past_caches)
{
    if (past_caches && size >= STREAM_MIN_BYTES)
        mpicoll_copy_past_caches(into, from, size);
    else
        mpicoll_copy(into, from, size);
}

/* ---- Several arrays as one ------------------------------------------------------------------- */

/* A list of n arrays, addressed as one sequence of numbers. */
struct list {
    char *const *arrays;
    const size_t *ends; /* each array's end, as an index of the sequence */
    size_t n;
};

/* Returns the array that contains a number of the sequence. */
static size_t find_array(const struct list *list, size_t number)
{
    size_t low = 0, high = list->n - 1;
    while (low < high) {
        const size_t middle = (low + high) / 2;
        if (list->ends[middle] > number)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

/* Returns the address of a number of the sequence that is in array k. */
static char *address_of(const struct list *list, size_t k, size_t size, size_t number)
{
    return list->arrays[k] + (number - (k ? list->ends[k - 1] : 0)) * size;
}

/* Copies the numbers `start` to `end` of a list into a slot, optionally past the caches. */
static void copy_to_slot(char *into, const struct list *list, size_t size, size_t start, size_t end,
                         int past_caches)
{
    for (size_t k = find_array(list, start); start < end; k++) {
        const size_t until = list->ends[k] < end ? list->ends[k] : end;
        const size_t bytes = (until - start) * size;
        copy(into, address_of(list, k, size, start), bytes, past_caches);
        into += bytes;
        start = until;
    }
}

/* Copies numbers to their places in a list, optionally past the caches. */
static void copy_from_slot(const struct list *list, size_t size, size_t start, size_t end,
                           const char *from, int past_caches)
{
    for (size_t k = find_array(list, start); start < end; k++) {
        const size_t until = list->ends[k] < end ? list->ends[k] : end;
        const size_t bytes = (until - start) * size;
        char *into = address_of(list, k, size, start);
        if (into != from)
            copy(into, from, bytes, past_caches);
        from += bytes;
        start = until;
    }
}

/* Minimum size of a contiguous run that is combined in place instead of being copied first. */
enum { MIN_RUN_BYTES = 1024 };

/* Returns the numbers of a list from `start` on, contiguous: in place up to the end of their array,
 * which reduces *end, if the run is long; else copied to `beside`. */
static char *gather_numbers(const struct list *list, size_t size, size_t start, size_t *end,
                            char *beside)
{
    const size_t k = find_array(list, start);
    const size_t until = list->ends[k] < *end ? list->ends[k] : *end;
    if (until < *end && (until - start) * size < MIN_RUN_BYTES) {
        copy_to_slot(beside, list, size, start, *end, 0);
        return beside;
    }
    *end = until;
    return address_of(list, k, size, start);
}

/* ---- Calls ----------------------------------------------------------------------------------- */

static uint64_t load(const _Atomic uint64_t *value)
{
    return atomic_load_explicit(value, memory_order_relaxed);
}

/* Writes a record and signals that it is written. */
static void publish_record(struct record *record, uint32_t number, uint64_t signature,
                           uint64_t count, uint64_t earlier, int matching, uint32_t note,
                           uint32_t is_lazy)
{
    atomic_store_explicit(&record->signature, signature, memory_order_relaxed);
    atomic_store_explicit(&record->count, count, memory_order_relaxed);
    atomic_store_explicit(&record->earlier, earlier, memory_order_relaxed);
    atomic_store_explicit(&record->matching, (uint32_t)matching, memory_order_relaxed);
    atomic_store_explicit(&record->note, note, memory_order_relaxed);
    atomic_store_explicit(&record->is_lazy, is_lazy, memory_order_relaxed);
    count_up(&record->number, number);
}

/* Returns 1 if a record, and all records that its rank has received, match this call. */
static int matches(const struct record *record, uint64_t signature, uint64_t count)
{
    return load(&record->signature) == signature && load(&record->count) == count &&
           atomic_load_explicit(&record->matching, memory_order_relaxed);
}

static void announce(struct header *mine, uint32_t number, uint64_t signature, uint64_t count)
{
    publish_record(&mine->announced[number % 2], number, signature, count, 0, 1, 0, 0);
}

/* Announces call `number` of the group's collectives. Returns 1 if all other ranks announce the
 * same call within `timeout_ns`: a rank that then begins the call will not have to wait for them.
 * (`number` is the group's call number, not this segment's, so an error between the announcement
 * and the call leaves nothing behind. A rank that is two calls ahead has overwritten the record
 * that is compared here; but it has finished call `number`, so either answer is correct.) */
EXPORT int mpicoll_shared_all_entered(const struct mpicoll_shared *shared, uint32_t number,
                                      uint64_t signature, uint64_t count, uint64_t timeout_ns)
{
    const uint64_t end = now_ns() + timeout_ns;
    announce(header(shared, shared->me), number, signature, count);
    for (uint32_t i = 1; i < shared->n; i++) {
        struct record *announced =
            &header(shared, (shared->me + i) % shared->n)->announced[number % 2];
        if (!wait_until(shared, &announced->number, number, end) ||
            !matches(announced, signature, count))
            return 0;
    }
    return 1;
}

static void close_group(struct mpicoll_shared *shared, unsigned reason)
{
    unsigned open = 0;
    atomic_compare_exchange_strong(&header(shared, 0)->closed_by, &open, (shared->me + 1) | reason);
    atomic_store(&shared->aborted, 1);
}

/* Closes the group for all ranks: every rank that waits, or that will wait, returns 0. No call may
 * follow, and the data of interrupted calls is undefined. */
EXPORT void mpicoll_shared_close(struct mpicoll_shared *shared)
{
    close_group(shared, 0);
}

/* Returns a record of a rank's call. */
static struct record *record_of(const struct mpicoll_shared *shared, uint32_t rank, uint32_t k,
                                uint32_t call)
{
    return &header(shared, rank)->records[k][call % RECORD_COUNT];
}

/* Returns 1 if the records of a call match on this rank and another. */
static int same_call(const struct mpicoll_shared *shared, uint32_t rank, uint32_t call)
{
    const struct record *mine = record_of(shared, shared->me, 0, call);
    const struct record *theirs = record_of(shared, rank, 0, call);
    return load(&mine->signature) == load(&theirs->signature) &&
           load(&mine->count) == load(&theirs->count) &&
           load(&mine->earlier) == load(&theirs->earlier);
}

/* Closes the group after calls that did not match. Returns 0. */
static int close_mismatched(struct mpicoll_shared *shared)
{
    close_group(shared->first, MISMATCH);
    return 0;
}

/* Compares this rank's and another's calls that both have published. Returns 1 if they match. */
static int compare_calls(const struct mpicoll_shared *shared, uint32_t rank)
{
    for (uint32_t call = shared->calls - 1; !reached(shared->compared, call); call--)
        if (reached(atomic_load(&record_of(shared, rank, 0, call)->number.value), call))
            return same_call(shared, rank, call);
    return 1;
}

/* Waits until all ranks have finished all but `lead` of the rounds before `round`, so that its slot
 * may be filled, and compares earlier lazy calls. Returns 0 if aborted. */
static int wait_for_slot(struct mpicoll_shared *shared, uint32_t round, uint32_t lead)
{
    uint32_t least = round;

    if (reached(shared->returned, round - lead))
        return 1;
    for (uint32_t i = 1; i < shared->n; i++) {
        const uint32_t rank = (shared->me + i) % shared->n;
        struct counter *combined = &header(shared, rank)->combined.counter;
        if (!wait_for(shared, combined, round - lead))
            return 0;
        if (!compare_calls(shared, rank))
            return close_mismatched(shared);
        const uint32_t value = atomic_load_explicit(&combined->value, memory_order_acquire);
        least = reached(value, least) ? least : value;
    }
    shared->returned = least;
    /* Each call has a round, so all ranks have published this one. */
    const uint32_t call = shared->calls - MAX_LEAD - 1;
    if (!reached(shared->compared, call))
        shared->compared = call;
    return 1;
}

/* As mpicoll_round_begin, in a call that uses the slots of a ring. */
static int begin(struct mpicoll_shared *shared, uint32_t number, uint64_t signature, uint64_t count,
                 uint32_t note, int lazy, enum ring ring)
{
    struct header *mine = header(shared, shared->me);
    shared->earlier = (shared->earlier ^ mine->signature) * 0x9e3779b97f4a7c15u + mine->count;
    shared->calls++;
    if (!reached(atomic_load(&mine->announced[number % 2].number.value), number))
        announce(mine, number, signature, count);
    mine->signature = signature, mine->count = count, mine->note = note;
    mine->is_lazy = (uint32_t)lazy;
    return wait_for_slot(shared, shared->round, ring == SMALL ? MAX_LEAD : SLOTS - 1);
}

int mpicoll_round_begin(struct mpicoll_shared *shared, uint32_t number, uint64_t signature,
                        uint64_t count, const struct mpicoll_trial *trial)
{
    return begin(shared, number, signature, count, trial ? trial->note : 0, 0, LARGE);
}

/* Signals that this rank (k = 0), or 2^k ranks up to it, are ready for round `target` - 1. In a
 * call's first round the signal is the call record, with whether all their records match, and the
 * maximum of their notes. */
static void signal_ready(const struct mpicoll_shared *shared, uint32_t k, uint32_t target,
                         int matching)
{
    struct header *mine = header(shared, shared->me);
    if (target == shared->round + 1)
        publish_record(record_of(shared, shared->me, k, shared->calls), shared->calls,
                       mine->signature, mine->count, shared->earlier, matching, mine->note,
                       mine->is_lazy);
    else
        count_up(&mine->ready[k].counter, target);
}

static void signal_filled(const struct mpicoll_shared *shared, uint32_t target)
{
    signal_ready(shared, 0, target, 1);
}

/* Ends a call with a collective mismatch. Some ranks are in its first round and some in its second;
 * all end it in the same state. */
static int end_mismatched(struct mpicoll_shared *shared, uint32_t base)
{
    struct header *mine = header(shared, shared->me);
    count_up(&mine->ready[0].counter, base + 2);
    count_up(&mine->combined.counter, base + 2);
    shared->round = base + 2;
    shared->compared = shared->calls;
    shared->earlier = mine->signature = mine->count = 0;
    return 0;
}

/* Waits for a rank's signal. Returns 0 if aborted. In a call's first round, clears *matching if the
 * rank has a different call, or has received a different one. */
static int wait_for_signal(struct mpicoll_shared *shared, uint32_t rank, uint32_t k,
                           uint32_t target, int *matching)
{
    struct header *mine = header(shared, shared->me);
    if (target != shared->round + 1)
        return wait_for(shared, &header(shared, rank)->ready[k].counter, target);

    struct record *record = record_of(shared, rank, k, shared->calls);
    if (!wait_for(shared, &record->number, shared->calls))
        return 0;
    if (load(&record->earlier) != shared->earlier)
        return close_mismatched(shared);
    if (!matches(record, mine->signature, mine->count)) {
        if (atomic_load_explicit(&record->is_lazy, memory_order_relaxed))
            return close_mismatched(shared); /* the rank may have continued */
        *matching = 0;
    }
    const uint32_t note = atomic_load_explicit(&record->note, memory_order_relaxed);
    mine->note = note > mine->note ? note : mine->note;
    return 1;
}

/* Waits until all ranks have filled their slots for round `target` - 1, and in a call's first round
 * compares the calls. This rank has filled its own slot. Returns 1; 0 after a collective mismatch,
 * on all ranks: then the call is over; LEFT if this rank was aborted. */
static int wait_for_all(struct mpicoll_shared *shared, uint32_t target)
{
    const uint32_t n = shared->n, me = shared->me;
    int matching = 1;

    if (n <= shared->flat_max_ranks) {
        for (uint32_t i = 1; i < n; i++)
            if (!wait_for_signal(shared, (me + i) % n, 0, target, &matching))
                return LEFT;
    } else {
        for (uint32_t k = 0, distance = 1; distance < n; k++, distance *= 2) {
            if (!wait_for_signal(shared, (me + n - distance) % n, k, target, &matching))
                return LEFT;
            if (2 * distance < n) /* even after a mismatch: other ranks wait for this signal */
                signal_ready(shared, k + 1, target, matching);
        }
    }
    if (!matching)
        return end_mismatched(shared, target - 1);
    if (target == shared->round + 1) { /* all ranks have finished the earlier calls */
        shared->returned = shared->round;
        shared->compared = shared->calls;
    } else {
        shared->returned = target - 2;
    }
    return 1;
}

/* As wait_for_all, in a call with a trial unless it is NULL. */
static int wait_in_trial(struct mpicoll_shared *shared, uint32_t target,
                         struct mpicoll_trial *trial)
{
    if (!trial || target != shared->round + 1)
        return wait_for_all(shared, target);
    mpicoll_trial_pause(trial);
    const int result = wait_for_all(shared, target);
    if (result > 0) {
        mpicoll_trial_agreed(trial, header(shared, shared->me)->note);
        mpicoll_trial_resume(trial);
    }
    return result;
}

/* Returns 1 if a rank that is ahead may be writing a later call's record over this one. */
static int may_overwrite(const struct mpicoll_shared *shared, uint32_t rank, uint32_t call)
{
    call += RECORD_COUNT - 1;
    return atomic_load(&record_of(shared, rank, 0, call)->number.value) == call;
}

/* Returns the number of the first call that does not match on all ranks, of the calls that were not
 * compared before; or of the last call. */
EXPORT uint32_t mpicoll_shared_mismatch(const struct mpicoll_shared *shared)
{
    for (uint32_t call = shared->compared + 1; !reached(call, shared->calls); call++)
        for (uint32_t rank = 0; rank < shared->n; rank++)
            if (atomic_load(&record_of(shared, rank, 0, call)->number.value) == call &&
                !same_call(shared, rank, call) && !may_overwrite(shared, rank, call))
                return call;
    return shared->calls;
}

/* Reads a rank's record of a call after a collective mismatch. Returns 0 if it has none (yet). */
EXPORT int mpicoll_shared_call(const struct mpicoll_shared *shared, uint32_t rank, uint32_t call,
                               uint64_t *signature, uint64_t *count)
{
    const struct record *record = record_of(shared, rank, 0, call);
    *signature = load(&record->signature);
    *count = load(&record->count);
    return atomic_load(&record->number.value) == call;
}

/* Returns 1 if the group was closed after a lazy call that did not match. */
EXPORT int mpicoll_shared_is_mismatched(const struct mpicoll_shared *shared)
{
    return (atomic_load(&header(shared, 0)->closed_by) & MISMATCH) != 0;
}

/* Returns the rank that has closed the group, or -1. */
EXPORT int mpicoll_shared_closed_by(const struct mpicoll_shared *shared)
{
    return (int)(atomic_load(&header(shared, 0)->closed_by) & ~(unsigned)MISMATCH) - 1;
}

/* The part of a message that is moved in one round. */
struct piece {
    size_t start, count;
};

static struct piece piece_of(size_t count, size_t step, size_t i)
{
    const size_t start = i * step;
    return (struct piece){start, count - start < step ? count - start : step};
}

/* Elements of one of n shares of a piece; shares are whole cache lines. */
static size_t share_size(struct piece piece, size_t size, size_t n)
{
    return rounded(rounded(piece.count, n) / n * size, LINE) / size;
}

/* Index of the first element of a rank's share. */
static size_t share_start(struct piece piece, size_t size, size_t n, size_t rank)
{
    const size_t share = share_size(piece, size, n);
    return rank * share < piece.count ? rank * share : piece.count;
}

/* list = (rank 0's list op rank 1's op ...) / divisor on every rank, of `count` numbers.
 *
 * number: the group's call number, the same on every rank.
 * trial:  with the call's way.
 * Returns 0 without a result on all ranks after a collective mismatch, and on this rank if it was
 * aborted, after which it must not use the segment. */
static int all_reduce(const struct mpicoll_plan *plan, const struct list *list, size_t count,
                      uint32_t number, struct mpicoll_trial *trial)
{
    struct mpicoll_shared *shared = plan->shared;
    const uint32_t n = shared->n, me = shared->me, base = shared->round;
    const size_t size = plan->size, step = shared->slot / size;
    const size_t rounds = count ? (count + step - 1) / step : 1;
    const int split = !(trial->way & ONE_SHOT); /* each rank combines its share only */
    const int past_caches = trial->way & STREAM_SLOTS, out_past_caches = trial->way & STREAM_OUT;
    struct header *mine = header(shared, me);
    _Alignas(LINE) char beside[BLOCK_BYTES];
    const uint32_t other = (me + 1) % n;
    const char *sources[n];

    if (!mpicoll_round_begin(shared, number, plan->signature, count, trial))
        return 0;
    for (size_t i = 0; i < rounds + (split ? 2 : 1); i++) {
        if (i < rounds) {
            const struct piece piece = piece_of(count, step, i);
            char *into = slot(shared, LARGE, me, base + (uint32_t)i);
            if (!wait_for_slot(shared, base + (uint32_t)i, SLOTS - 1))
                return 0;
            if (split) { /* all but this rank's share */
                for (uint32_t rank = 0; rank < n; rank++) {
                    const size_t start = share_start(piece, size, n, rank);
                    const size_t end = share_start(piece, size, n, rank + 1);
                    if (rank != me)
                        copy_to_slot(into + start * size, list, size, piece.start + start,
                                     piece.start + end, past_caches);
                }
            } else {
                copy_to_slot(into, list, size, piece.start, piece.start + piece.count,
                             past_caches);
            }
            signal_filled(shared, base + (uint32_t)i + 1);
        }
        if (split && i >= 2) {
            const struct piece piece = piece_of(count, step, i - 2);
            for (uint32_t k = 1; k < n; k++) {
                const uint32_t rank = (me + k) % n, round = base + (uint32_t)i - 2;
                const size_t start = share_start(piece, size, n, rank);
                const size_t end = share_start(piece, size, n, rank + 1);
                if (!wait_for(shared, &header(shared, rank)->combined.counter, round + 1))
                    return 0;
                copy_from_slot(list, size, piece.start + start, piece.start + end,
                               result_slot(shared, rank, me, round, start * size),
                               out_past_caches);
            }
        }
        if (i >= 1 && i <= rounds) {
            const struct piece piece = piece_of(count, step, i - 1);
            const uint32_t round = base + (uint32_t)i - 1;
            const size_t start = split ? share_start(piece, size, n, me) : 0;
            const size_t end = split ? share_start(piece, size, n, me + 1) : piece.count;
            if (wait_in_trial(shared, round + 1, trial) <= 0)
                return 0;
            for (size_t at = start, until; at < end; at = until) {
                const size_t from = piece.start + at;
                size_t to =
                    piece.start + (end - at < BLOCK_BYTES / size ? end : at + BLOCK_BYTES / size);
                char *out = gather_numbers(list, size, from, &to, beside);
                until = to - piece.start;
                for (uint32_t rank = 0; rank < n; rank++)
                    sources[rank] = rank == me ? out : slot(shared, LARGE, rank, round) + at * size;
                mpicoll_combine(plan->format, plan->operation, sources, n, out, until - at,
                                plan->divisor);
                if (split) /* with two ranks, `other` is the only one */
                    copy(result_slot(shared, me, other, round, start * size) + (at - start) * size,
                         out, (until - at) * size, past_caches);
                copy_from_slot(list, size, from, to, out, 0);
            }
            if (!split)
                swap_slots(shared, LARGE, round);
            count_up(&mine->combined.counter, round + 1);
        }
    }
    shared->round = base + (uint32_t)rounds;
    mpicoll_trial_end(trial, 0);
    return 1;
}

/* Returns the bytes by which the way of a call is chosen, of the larger array of a rank: the same on
 * all ranks. most: numbers of the largest block. */
static size_t call_bytes(const struct mpicoll_plan *plan, size_t most)
{
    const int many = plan->many_blocks || !(plan->has_src || plan->format >= 0);
    return most * plan->size * (many ? plan->shared->n : 1);
}

/* A block that a rank receives: source rank, block index at the source, and destination. */
struct get {
    size_t rank, place;
    struct list block;
};

/* The numbers of a block that are moved in round i. */
static struct piece part_of(const struct list *block, size_t step, size_t i)
{
    const size_t count = block->ends[block->n - 1];
    return count > i * step ? piece_of(count, step, i) : (struct piece){i * step, 0};
}

/* The length of a piece from number `at` on, at most `limit`. */
static size_t length_of(struct piece piece, size_t at, size_t most)
{
    return piece.count - at < most ? piece.count - at : most;
}

/* Returns the index in a rank's slot of its block k. If block k is for rank k, the slot has no place
 * for the block that is for the rank itself. */
static size_t place_of(size_t places, size_t n, size_t rank, size_t k)
{
    return places == n && k > rank ? k - 1 : k;
}

/* Returns the numbers of a piece of a rank's block, from number `at` of the piece on. This rank's
 * own block: see gather_numbers. */
static const char *source_of(const struct mpicoll_plan *plan, const struct get *get,
                             const struct list *puts, enum ring ring, uint32_t round,
                             size_t places, size_t room, struct piece piece, size_t at,
                             size_t *until, char *beside)
{
    const struct mpicoll_shared *shared = plan->shared;
    if (get->rank != shared->me)
        return slot(shared, ring, (uint32_t)get->rank, round) +
               place_of(places, shared->n, get->rank, get->place) * room + at * plan->size;
    size_t end = piece.start + *until;
    const char *found =
        gather_numbers(&puts[get->place], plan->size, piece.start + at, &end, beside);
    *until = end - piece.start;
    return found;
}

/* Waits in a lazy call until the ranks of the blocks that this rank receives have filled their slots
 * for round `target` - 1. Returns 0 if aborted, or if their calls do not match. */
static int wait_for_sources(struct mpicoll_shared *shared, const struct get *gets, size_t n_gets,
                            uint32_t target)
{
    int matching = 1;
    for (size_t k = 0; k < n_gets; k++)
        if (gets[k].rank != shared->me &&
            !wait_for_signal(shared, (uint32_t)gets[k].rank, 0, target, &matching))
            return 0;
    return matching ? 1 : close_mismatched(shared);
}

/* Any collective: ranks publish blocks in their slots, and receive blocks of other ranks. A round
 * moves a piece of every block. A combined result is written to the destination of the first block
 * received.
 *
 * places:    maximum number of blocks that any rank publishes. If it is n, block k is for rank k.
 * max_count: numbers in the largest block of all ranks.
 * puts:      blocks that this rank publishes, in consecutive parts of its slots.
 * signature, total: the call record, which must match on all ranks.
 * The rest is as in all_reduce; counts are in numbers. */
static int exchange(const struct mpicoll_plan *plan, size_t places, size_t most,
                    const struct list *puts, size_t n_puts, const struct get *gets, size_t n_gets,
                    uint32_t number, uint64_t signature, uint64_t total,
                    struct mpicoll_trial *trial)
{
    struct mpicoll_shared *shared = plan->shared;
    const uint32_t n = shared->n, me = shared->me, base = shared->round;
    const size_t size = plan->size, parts = places == n && n > 1 ? n - 1 : places;
    /* All ranks must receive the notes of a trial. */
    const int lazy =
        plan->lazy && (plan->has_src || plan->has_dst || plan->prefix) && !trial->has_note;
    const enum ring ring =
        lazy && rounded(most * size, LINE) * parts <= SMALL_SLOT_BYTES ? SMALL : LARGE;
    const uint32_t lead = ring == SMALL ? MAX_LEAD : SLOTS - 1;
    const size_t room = (ring == SMALL ? SMALL_SLOT_BYTES : shared->slot) / parts / LINE * LINE;
    const size_t step = room / size, rounds = most ? (most + step - 1) / step : 1;
    const int past_caches = trial->way & STREAM_SLOTS, out_past_caches = trial->way & STREAM_OUT;
    struct header *mine = header(shared, me);
    _Alignas(LINE) char beside[BLOCK_BYTES], result[BLOCK_BYTES];
    const char *sources[n_gets + 1];

    if (!begin(shared, number, signature, total, trial->note, lazy, ring))
        return 0;
    if (lazy)
        mpicoll_trial_agreed(trial, 0);
    for (size_t i = 0; i <= rounds; i++) {
        if (i < rounds) {
            char *into = slot(shared, ring, me, base + (uint32_t)i);
            if (!wait_for_slot(shared, base + (uint32_t)i, lead))
                return 0;
            for (size_t k = 0; k < n_puts; k++) {
                if (places == n && n > 1 && k == me)
                    continue; /* no other rank receives it */
                const struct piece piece = part_of(&puts[k], step, i);
                copy_to_slot(into + place_of(places, n, me, k) * room, &puts[k], size, piece.start,
                             piece.start + piece.count, past_caches);
            }
            signal_filled(shared, base + (uint32_t)i + 1);
        }
        if (i < 1)
            continue;
        const uint32_t round = base + (uint32_t)i - 1;
        if (lazy ? !wait_for_sources(shared, gets, n_gets, round + 1)
                 : wait_in_trial(shared, round + 1, trial) <= 0)
            return 0;
        if (plan->format >= 0 && n_gets) {
            const struct list *into = &gets[0].block;
            const struct piece piece = part_of(into, step, i - 1);
            for (size_t at = 0, until; at < piece.count; at = until) {
                const size_t from = piece.start + at;
                size_t to = from + length_of(piece, at, BLOCK_BYTES / size);
                char *out = gather_numbers(into, size, from, &to, result);
                until = to - piece.start;
                for (size_t k = 0; k < n_gets; k++) /* this rank's own arrays have the same sizes */
                    sources[k] =
                        source_of(plan, &gets[k], puts, ring, round, places, room, piece, at,
                                  &until, beside);
                mpicoll_combine(plan->format, plan->operation, sources, n_gets, out, until - at,
                                plan->divisor);
                copy_from_slot(into, size, from, piece.start + until, out, 0);
            }
        } else {
            for (size_t k = 0; k < n_gets; k++) {
                const struct list *into = &gets[k].block;
                const struct piece piece = part_of(into, step, i - 1);
                /* This rank's own block may have to be copied to `beside` first. */
                const size_t length_limit = gets[k].rank == me ? BLOCK_BYTES / size : piece.count;
                for (size_t at = 0, until; at < piece.count; at = until) {
                    until = at + length_of(piece, at, length_limit);
                    const char *from =
                        source_of(plan, &gets[k], puts, ring, round, places, room, piece, at,
                                  &until, beside);
                    copy_from_slot(into, size, piece.start + at, piece.start + until, from,
                                   out_past_caches);
                }
            }
        }
        swap_slots(shared, ring, round);
        count_up(&mine->combined.counter, round + 1);
    }
    shared->round = base + (uint32_t)rounds;
    mpicoll_trial_end(trial, 0);
    return 1;
}

/* Returns the ways of a plan's calls. in_one: each block is a single array, of the same size. */
static int allowed_ways(const struct mpicoll_plan *plan, int in_one)
{
    return (plan->in_place ? ONE_SHOT : 0) | STREAM_SLOTS | STREAM_OUT |
           (in_one && plan->processes ? BY_KERNEL : 0) |
           (in_one && plan->shared->channels > 1 ? PARALLEL : 0) |
           (in_one && plan->mpi ? BY_MPI : 0);
}

/* most: numbers of the largest block of all ranks. */
static struct mpicoll_trial choose_way(const struct mpicoll_plan *plan, size_t most, int allowed)
{
    return mpicoll_choose(plan->choices, call_bytes(plan, most), plan->one_shot_max_bytes, allowed);
}

/* The collectives whose blocks all have the same size: see exchange_blocks. */
static int run_blocks(const struct mpicoll_plan *plan, char *const *send, char *const *recv,
                      const size_t *ends, size_t n, uint32_t root, uint32_t number,
                      struct mpicoll_trial *trial)
{
    const uint32_t ranks = plan->shared->n, me = plan->shared->me;
    const size_t places = plan->many_blocks ? ranks : 1;
    const size_t combined = plan->prefix ? me + (plan->prefix == 1) : ranks;
    const int has_data = !plan->has_src || me == root;
    /* No other rank receives from the last rank of a scan, nor from a destination root. */
    const int publishes = has_data && !(plan->has_dst && me == root) &&
                          !(plan->prefix && me == ranks - 1);
    const size_t n_gets = plan->has_src ? 1 : plan->has_dst && me != root ? 0 : combined;
    struct list puts[ranks];
    struct get gets[ranks];

    if (plan->in_place) {
        const struct list list = {recv, ends, n};
        return all_reduce(plan, &list, ends[n - 1], number, trial);
    }
    for (size_t k = 0; has_data && k < places; k++)
        puts[k] = (struct list){send + k * n, ends, n};
    for (size_t k = 0; k < n_gets; k++) /* a combined result has one destination */
        gets[k] = (struct get){plan->has_src ? root : k,
                               plan->many_blocks ? me : 0,
                               {recv + (plan->format >= 0 ? 0 : k * n), ends, n}};
    return exchange(plan, places, ends[n - 1], puts, publishes ? places : 0, gets, n_gets, number,
                    plan->signature | (uint64_t)root << 24, ends[n - 1], trial);
}

/* Compares the ranks' calls without moving data. Returns 1 if all match. trial: or NULL. */
static int compare(struct mpicoll_shared *shared, uint32_t number, uint64_t signature,
                   uint64_t count, struct mpicoll_trial *trial)
{
    if (!mpicoll_round_begin(shared, number, signature, count, trial) ||
        mpicoll_round_publish(shared, trial) <= 0)
        return 0;
    mpicoll_round_close(shared);
    return 1;
}

/* A call whose blocks are divided between channels. */
struct divided {
    const struct mpicoll_plan *plan;
    char *const *send, *const *recv;
    size_t count;
    uint32_t root, number;
    atomic_uint failed;
};

/* Runs the part of a divided call in a channel. */
static void run_channel(void *argument, uint32_t channel)
{
    struct divided *call = argument;
    struct mpicoll_plan plan = *call->plan;
    const uint32_t n = plan.shared->n, channels = plan.shared->channels;
    const size_t share = rounded(rounded(call->count, channels) / channels, LINE);
    const size_t start = channel * share < call->count ? channel * share : call->count;
    const size_t count = call->count - start < share ? call->count - start : share;
    char *send[n], *recv[n];

    plan.shared += channel;
    for (uint32_t k = 0; k < n; k++) {
        send[k] = call->send[k] ? call->send[k] + start * plan.size : NULL;
        recv[k] = call->recv[k] ? call->recv[k] + start * plan.size : NULL;
    }
    struct mpicoll_trial trial =
        mpicoll_choose(NULL, call_bytes(&plan, count), 0, STREAM_SLOTS | STREAM_OUT);
    if (!run_blocks(&plan, send, recv, &count, 1, call->root, call->number, &trial))
        atomic_store(&call->failed, 1);
}

/* Runs pending signal handlers. */
static void check_signals(void *argument)
{
    const struct divided *call = argument;
    if (signal_handler_raised())
        atomic_store(&call->plan->shared->first->aborted, 1);
}

/* The numbers of blocks that a rank may send and receive. */
static size_t blocks_sent(const struct mpicoll_plan *plan)
{
    return plan->in_place ? 0 : plan->many_blocks ? plan->shared->n : 1;
}

static size_t blocks_received(const struct mpicoll_plan *plan)
{
    return plan->has_src || plan->format >= 0 ? 1 : plan->shared->n;
}

/* The same by MPI. */
static int run_by_mpi(const struct mpicoll_plan *plan, char *const *send, char *const *recv,
                      size_t count, uint32_t root, uint32_t number, struct mpicoll_trial *trial)
{
    const size_t n = plan->shared->n, elements = count / plan->numbers_per_element;
    struct mpicoll_block from[n], into[n];

    for (size_t k = 0; k < blocks_sent(plan); k++)
        from[k] = (struct mpicoll_block){send[k], elements};
    for (size_t k = 0; k < blocks_received(plan); k++)
        into[k] = (struct mpicoll_block){recv[k], elements};
    if (!compare(plan->shared, number, plan->signature | (uint64_t)root << 24, count, trial))
        return 0;
    const int result = mpicoll_mpi_call(plan->mpi, from, into, elements, root, number);
    mpicoll_trial_end(trial, 0);
    return result;
}

/* The same on several threads. */
static int run_divided(const struct mpicoll_plan *plan, char *const *send, char *const *recv,
                       size_t count, uint32_t root, uint32_t number, struct mpicoll_trial *trial)
{
    struct divided call = {plan, send, recv, count, root, number, 0};

    if (!compare(plan->shared, number, plan->signature | (uint64_t)root << 24, count, trial))
        return 0;
    mpicoll_run_parts(run_channel, &call, plan->shared->channels, check_signals);
    mpicoll_trial_end(trial, 0);
    return !atomic_load(&call.failed);
}

/* The same by the kernel; spans: see mpicoll_single_copy. */
static int run_by_kernel(const struct mpicoll_plan *plan, const struct mpicoll_span *spans,
                         size_t count, uint32_t root, uint32_t number, struct mpicoll_trial *trial)
{
    return mpicoll_round_begin(plan->shared, number, plan->signature | (uint64_t)root << 24, count,
                               trial)
               ? mpicoll_single_copy(plan->processes, spans, trial)
               : MISMATCHED;
}

/* Sets the spans of blocks of `bytes` bytes. */
static void set_spans(struct mpicoll_span *spans, const struct mpicoll_plan *plan,
                      char *const *send, char *const *recv, size_t bytes, uint32_t root)
{
    const uint32_t n = plan->shared->n, me = plan->shared->me;

    for (uint32_t rank = 0; rank < n; rank++) {
        spans[rank] = spans[n + rank] = (struct mpicoll_span){NULL, 0};
        if ((!plan->has_src || me == root) && (!plan->has_dst || rank == root))
            spans[rank] = (struct mpicoll_span){send[plan->many_blocks ? rank : 0], bytes};
        if ((!plan->has_src || rank == root) && (!plan->has_dst || me == root))
            spans[n + rank] = (struct mpicoll_span){recv[plan->has_src ? 0 : rank], bytes};
    }
}

/* The collectives whose blocks all have the same size.
 *
 * send, recv: blocks to publish and destinations, in rank order, of n arrays each. Not read
 *             if this rank does not send or does not receive. all_reduce uses `recv` only.
 * ends:       each array's end, as an index of the block's numbers.
 * root:       for operations with a root; the rest is as in all_reduce. */
static int exchange_blocks(const struct mpicoll_plan *plan, char *const *send, char *const *recv,
                           const size_t *ends, size_t n, uint32_t root, uint32_t number)
{
    const size_t count = ends[n - 1];
    struct mpicoll_trial trial = choose_way(plan, count, allowed_ways(plan, n == 1));

    if (trial.way == BY_KERNEL) {
        struct mpicoll_span spans[2 * plan->shared->n];
        set_spans(spans, plan, send, recv, count * plan->size, root);
        const int result = run_by_kernel(plan, spans, count, root, number, &trial);
        if (result != NOT_COPIED)
            return result;
        trial = choose_way(plan, count, allowed_ways(plan, n == 1) & ~BY_KERNEL);
    }
    if (trial.way == PARALLEL)
        return run_divided(plan, send, recv, count, root, number, &trial);
    if (trial.way == BY_MPI)
        return run_by_mpi(plan, send, recv, count, root, number, &trial);
    return run_blocks(plan, send, recv, ends, n, root, number, &trial);
}

/* The same for consecutive blocks of `count` elements; in place, `send` and `recv` are equal. */
EXPORT int mpicoll_shared_blocks(const struct mpicoll_plan *plan, char *send, char *recv,
                                 size_t count, uint32_t root, uint32_t number)
{
    const size_t numbers = count * plan->numbers_per_element, bytes = numbers * plan->size;
    char *from[plan->shared->n], *to[plan->shared->n];

    for (size_t k = 0; k < plan->shared->n; k++) {
        from[k] = send ? send + k * bytes : NULL;
        to[k] = recv ? recv + k * bytes : NULL;
    }
    return exchange_blocks(plan, from, to, &numbers, 1, root, number);
}

/* The same for blocks at any address: one for each rank, in rank order, or a single one. */
EXPORT int mpicoll_shared_lists(struct mpicoll_plan *plan, const struct mpicoll_block *send,
                                const struct mpicoll_block *recv, size_t count, uint32_t root,
                                uint32_t number)
{
    const size_t numbers = count * plan->numbers_per_element;
    const uint32_t n = plan->shared->n, me = plan->shared->me;
    const int gives = !plan->has_src || me == root;
    const int takes = !plan->has_dst || me == root;
    char *from[n], *to[n];

    for (size_t k = 0; k < n; k++) {
        from[k] = gives && k < blocks_sent(plan) ? send[k].data : NULL;
        to[k] = takes && k < blocks_received(plan) ? recv[k].data : NULL;
    }
    return exchange_blocks(plan, from, to, &numbers, 1, root, number);
}

/* A block that a rank receives: as struct get, with its address and numbers. */
struct mpicoll_get {
    size_t rank, place;
    char *data;
    size_t count;
};

/* The collectives whose blocks may differ in size: the blocks that this rank publishes and
 * receives. Counts are in numbers; the rest is as in exchange. */
EXPORT int mpicoll_shared_exchange(const struct mpicoll_plan *plan, size_t places, size_t most,
                                   const struct mpicoll_block *puts, size_t n_puts,
                                   const struct mpicoll_get *gets, size_t n_gets, uint32_t root,
                                   uint32_t number, uint64_t total)
{
    struct list from[n_puts + 1];
    struct get to[n_gets + 1];

    for (size_t k = 0; k < n_puts; k++)
        from[k] = (struct list){&puts[k].data, &puts[k].count, 1};
    for (size_t k = 0; k < n_gets; k++)
        to[k] = (struct get){
            gets[k].rank, gets[k].place, {&gets[k].data, &gets[k].count, 1}};
    struct mpicoll_trial trial = choose_way(plan, most, allowed_ways(plan, 0));
    return exchange(plan, places, most, from, n_puts, to, n_gets, number,
                    plan->signature | (uint64_t)root << 24, total, &trial);
}

/* ---- Rounds for data that does not go through slots, see shared.h ---------------------------- */

/* Bytes of a copy for which a rank polls `spin_count` times. */
enum { SPIN_BYTES = 512 << 10 };

char *mpicoll_descriptor(const struct mpicoll_shared *shared, uint32_t rank)
{
    return slot(shared, LARGE, rank, shared->round);
}

int mpicoll_round_publish(struct mpicoll_shared *shared, struct mpicoll_trial *trial)
{
    signal_filled(shared, shared->round + 1);
    return wait_in_trial(shared, shared->round + 1, trial);
}

void mpicoll_round_end(const struct mpicoll_shared *shared)
{
    count_up(&header(shared, shared->me)->ready[0].counter, shared->round + 2);
}

int mpicoll_has_same_call(const struct mpicoll_shared *shared, uint32_t rank)
{
    return reached(atomic_load(&record_of(shared, rank, 0, shared->calls)->number.value),
                   shared->calls) &&
           same_call(shared, rank, shared->calls);
}

int mpicoll_has_ended(const struct mpicoll_shared *shared, uint32_t rank)
{
    return reached(atomic_load(&header(shared, rank)->ready[0].counter.value), shared->round + 2);
}

int mpicoll_round_wait(const struct mpicoll_shared *shared, size_t bytes)
{
    /* Poll longer for longer copies: a sleeping rank wakes up too late. */
    const uint64_t spin_count = (uint64_t)shared->spin_count * (bytes / SPIN_BYTES);

    for (uint32_t i = 1; i < shared->n; i++) {
        const uint32_t rank = (shared->me + i) % shared->n;
        for (uint64_t k = 0; k < spin_count && !mpicoll_has_ended(shared, rank); k++)
            relax();
        if (!wait_for(shared, &header(shared, rank)->ready[0].counter, shared->round + 2))
            return 0;
    }
    return 1;
}

void mpicoll_round_close(struct mpicoll_shared *shared)
{
    swap_slots(shared, LARGE, shared->round);
    shared->round += 2;
    count_up(&header(shared, shared->me)->combined.counter, shared->round);
}

/* A call that only compares the call records. Returns 1 if all ranks match. */
EXPORT int mpicoll_shared_compare(struct mpicoll_shared *shared, uint32_t number,
                                  uint64_t signature, uint64_t count)
{
    return compare(shared, number, signature, count, NULL);
}

/* The root in the signature of a list of calls; mpicoll/core/signature.py mirrors it. */
#define LIST ((uint64_t)UINT32_MAX)

/* Moves the addresses of the arrays of at most `limit` numbers to the front of a table of blocks. */
static void remove_large(char **table, size_t blocks, const size_t *ends, size_t n, size_t limit)
{
    char **kept = table;
    for (size_t k = 0; k < n * blocks; k++) {
        const size_t i = k % n, start = i ? ends[i - 1] : 0;
        if (ends[i] - start <= limit)
            *kept++ = table[k];
    }
}

/* Several calls of one plan without a root, of `n` arrays per block. Each array that is larger than
 * a slot is moved by itself, in the fastest way for its size; then all smaller arrays as one call.
 *
 * send, recv: as in exchange_blocks; changed.
 * ends:  each array's end, as an index of the block's elements; changed.
 * sizes: hash of the sizes of the calls, which are then compared first, as call `number`; the data
 *        is moved in the next call. 0: they have been compared.
 * The rest is as in all_reduce. */
EXPORT int mpicoll_shared_fused(const struct mpicoll_plan *plan, char **send, char **recv,
                                size_t *ends, size_t n, uint64_t sizes, uint32_t number)
{
    const size_t limit = plan->shared->slot / plan->size;
    char *from[plan->shared->n], *to[plan->shared->n];
    size_t kept = 0, end = 0;

    if (sizes &&
        !mpicoll_shared_compare(plan->shared, number++, plan->signature | LIST << 24, sizes))
        return 0;
    for (size_t i = 0; i < n; i++)
        ends[i] *= plan->numbers_per_element;
    for (size_t i = 0, start = 0; i < n; start = ends[i++]) {
        const size_t count = ends[i] - start;
        if (count <= limit)
            continue;
        for (size_t k = 0; k < plan->shared->n; k++) {
            from[k] = k < blocks_sent(plan) ? send[k * n + i] : NULL;
            to[k] = k < blocks_received(plan) ? recv[k * n + i] : NULL;
        }
        const int result = exchange_blocks(plan, from, to, &count, 1, 0, number);
        if (result < 0) /* an error of MPI: the other ranks may go on with the next array */
            mpicoll_shared_close(plan->shared);
        if (result <= 0)
            return result;
    }
    remove_large(send, blocks_sent(plan), ends, n, limit);
    remove_large(recv, blocks_received(plan), ends, n, limit);
    for (size_t i = 0, start = 0; i < n; i++) {
        const size_t count = ends[i] - start;
        start = ends[i];
        if (count <= limit)
            ends[kept++] = end += count;
    }
    return kept ? exchange_blocks(plan, send, recv, ends, kept, 0, number) : 1;
}

/* all_to_all if each rank knows only its own block sizes, in one round: every rank publishes the
 * sizes of the n blocks that it sends, by receiver, and of the n that it expects, by sender; then,
 * if they fit, the blocks for other ranks.
 *
 * send, recv: n blocks each, of this rank.
 * Returns, on all ranks, MOVED; NO_ROOM if the blocks of some rank did not fit: nothing is moved,
 * and plan->max_count is set; WRONG_SIZE if a rank expects another size than it is sent; MISMATCHED
 * where other calls return 0. (`count` and `root` are unused; mpicoll_shared_lists has the same
 * type.) */
EXPORT int mpicoll_shared_small_all_to_all(struct mpicoll_plan *plan,
                                           const struct mpicoll_block *send,
                                           const struct mpicoll_block *recv, size_t count,
                                           uint32_t root, uint32_t number)
{
    struct mpicoll_shared *shared = plan->shared;
    const uint32_t n = shared->n, me = shared->me;
    const size_t head = rounded(2 * n * sizeof(uint64_t), LINE), size = plan->size;
    const size_t room = shared->slot > head ? shared->slot - head : 0;
    size_t bytes = 0;
    int result = MOVED;
    (void)count, (void)root;

    if (!mpicoll_round_begin(shared, number, plan->signature, 0, NULL))
        return MISMATCHED;
    char *board = mpicoll_descriptor(shared, me);
    for (uint32_t k = 0; k < n; k++) {
        ((uint64_t *)board)[k] = send[k].count;
        ((uint64_t *)board)[n + k] = recv[k].count;
        bytes += k == me ? 0 : send[k].count * size;
    }
    if (bytes <= room) {
        board += head;
        for (uint32_t k = 0; k < n; k++)
            if (k != me) {
                mpicoll_copy(board, send[k].data, send[k].count * size);
                board += send[k].count * size;
            }
    }
    if (mpicoll_round_publish(shared, NULL) <= 0)
        return MISMATCHED;

    const uint64_t *expected = (const uint64_t *)mpicoll_descriptor(shared, me) + n;
    plan->max_count = 0;
    plan->mismatch_rank = n;
    for (uint32_t from = 0; from < n; from++) {
        const uint64_t *sent = (const uint64_t *)mpicoll_descriptor(shared, from);
        bytes = 0;
        for (uint32_t to = 0; to < n; to++) {
            const uint64_t *theirs = (const uint64_t *)mpicoll_descriptor(shared, to) + n;
            if (theirs[from] != sent[to])
                result = WRONG_SIZE;
            if (sent[to] > plan->max_count)
                plan->max_count = sent[to];
            bytes += from == to ? 0 : sent[to] * size;
        }
        if (bytes > room && result == MOVED)
            result = NO_ROOM;
        if (expected[from] != sent[me] && plan->mismatch_rank == n) {
            plan->mismatch_rank = from;
            plan->mismatch_count = sent[me];
        }
    }
    if (result == MOVED) {
        for (uint32_t from = 0; from < n; from++) {
            const uint64_t *sent = (const uint64_t *)mpicoll_descriptor(shared, from);
            const char *data = (const char *)sent + head;
            for (uint32_t to = 0; to < me; to++)
                data += to == from ? 0 : sent[to] * size;
            if (from == me)
                data = send[me].data;
            if (data != recv[from].data && sent[me])
                mpicoll_copy(recv[from].data, data, sent[me] * size);
        }
    }
    mpicoll_round_close(shared);
    return result;
}

/* The same for blocks of any size. */
EXPORT int mpicoll_shared_all_to_all(struct mpicoll_plan *plan, const struct mpicoll_block *send,
                                     const struct mpicoll_block *recv, size_t count, uint32_t root,
                                     uint32_t number)
{
    const uint32_t n = plan->shared->n, me = plan->shared->me;
    int result = mpicoll_shared_small_all_to_all(plan, send, recv, count, root, number);
    struct list puts[n];
    struct get gets[n];
    struct mpicoll_span spans[2 * n];

    if (result != NO_ROOM)
        return result;
    const int ways = allowed_ways(plan, 0);
    struct mpicoll_trial trial =
        choose_way(plan, plan->max_count, ways | (plan->processes ? BY_KERNEL : 0));
    if (trial.way == BY_KERNEL) {
        for (uint32_t k = 0; k < n; k++) {
            spans[k] = (struct mpicoll_span){send[k].data, send[k].count * plan->size};
            spans[n + k] = (struct mpicoll_span){recv[k].data, recv[k].count * plan->size};
        }
        result = run_by_kernel(plan, spans, 0, 0, number, &trial);
        if (result != NOT_COPIED)
            return result;
        trial = choose_way(plan, plan->max_count, ways);
    }
    for (uint32_t k = 0; k < n; k++) {
        puts[k] = (struct list){&send[k].data, &send[k].count, 1};
        gets[k] = (struct get){k, me, {&recv[k].data, &recv[k].count, 1}};
    }
    return exchange(plan, n, plan->max_count, puts, n, gets, n, number, plan->signature, 0, &trial);
}
