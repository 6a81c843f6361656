/* Collectives of ranks that share memory.
 *
 * A segment is mapped by all n ranks of a group. Each rank has a region in it: counters, with what they
 * say of its call, SLOTS slots for what it gives to the others, and as many for what it has combined for
 * them. A message goes through in rounds of at most one slot; in round k
 *
 *   1. every rank copies its elements into slot k, and signals that it has given them;
 *   2. when all have, it combines elements of all slots in the order of the ranks. Either all of
 *      them, straight into its array, or its own share of them, which it also puts into its second
 *      slot k, counting `combined` up;
 *   3. in the latter case it copies the others' shares, when they are there, into its array.
 *
 * The steps of neighbouring rounds are interleaved (1 of round k, 3 of k - 2, 2 of k - 1), so that
 * a rank seldom finds that another has not yet come as far. Combining everything on every rank
 * costs a copy and a wait less, and more arithmetic: best for little data.
 *
 * That all have given is learnt by few ranks from each other's signals, and by many from the signals of
 * log2 n of them (`meet`): then in step s = 0, 1, .. rank r signals to rank r + 2^s that 2^s ranks up to
 * and with r have given (`passed`; step 0 says so of r itself), and waits for the same from r - 2^s, all
 * modulo n: a dissemination barrier (D. Hensgen, R. Finkel, U. Manber, Two algorithms for barrier
 * synchronization, International J. of Parallel Programming 17(1), 1988). A rank passes a signal on
 * (release) after it has seen those before it (acquire): so it sees what all ranks wrote before they gave.
 *
 * The signals of a call's first round say what the call is about, and whether all calls that their rank
 * has heard of are alike. By induction, after step s rank r knows whether the calls of the ranks
 * r - 2^(s + 1) + 1 to r are all like its own: if they are, then so are r's and that of r - 2^s, to which
 * all before it are alike. Last, that is all of them, and the answer is the same on every rank.
 *
 * Why four slots are enough. A rank fills slot k once it knows that all have given k - 2, who by then had
 * ended step 2 of round k - 4, the last to read the slot. It combines into its second slot k once it
 * knows that all have given k, who by then had ended step 3 of round k - 3.
 *
 * Why two descriptions of calls are enough, in turn, on each line. A rank writes that of call c + 2 after
 * it has ended call c + 1: so it knows that all have given in c + 1, each of which had by then read all
 * that it reads in call c. Counters only grow: who waits for a value takes a later one as well, and the
 * description that came with the first is still there.
 *
 * Rounds are numbered on from call to call, so that a rank may begin a call while others still end
 * the one before. Counters are of 32 bits and wrap around; they are compared by their difference.
 *
 * This is plain C for ctypes: it does not include Python.h and defines no module.
 */

#include "kernels.h"
#include "shared.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#ifdef __SSE2__
#include <emmintrin.h>
#endif
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

enum { SLOTS = 4, LINE = 64, PAGE = 4096 };

/* The bits of a rank's number, of at most 256 ranks: see MOST in mpicoll/routes/host/shared.py. */
enum { MOST_BITS = 8 };

/* How often a rank yields the processor before it sleeps. Waking up takes several times as long as
 * getting a turn: with more ranks than processors, calls on little data take a quarter of the time. */
enum { YIELDS = 50 };

/* What mpicoll_board_publish returns for a rank that has left. */
enum { LEFT = -1 };

#define FOREVER UINT64_MAX

/* Bytes that are combined and copied on before the first-level cache loses them, and bytes of a
 * result that caches lose before it is there. */
enum { BLOCK = 8192, LARGE = 32 << 20 };

/* A number that its rank counts up and others wait for. */
struct counter {
    atomic_uint value;
    atomic_uint sleepers; /* a rank has gone to sleep since the last change */
};

/* What a call is about, and whether all calls that its rank has seen so far are alike. Atomic, because
 * a rank that is ahead may write what another still reads (see mpicoll_shared_ask); counters order all
 * other reads and writes, so relaxed access is enough. */
struct call {
    _Atomic uint64_t what, count;
    _Atomic uint32_t alike;
};

/* A counter, and what it says of the last two calls, in turn: all on one line. */
struct signal {
    _Alignas(LINE) struct counter counter;
    struct call calls[2];
};

/* For measuring how far another rank is, the one whose number differs in a certain bit. */
struct echo {
    _Alignas(LINE) atomic_uint number;
};

struct header {
    struct signal passed[MOST_BITS]; /* see `meet`; the first one is `given` */
    _Alignas(LINE) struct counter combined;
    _Alignas(LINE) struct counter returned; /* see all_reduce_by_clusters */
    struct signal asked; /* the number of the last call asked for, begun or not */
    struct echo echoes[MOST_BITS];
    _Alignas(LINE) atomic_uint closer; /* rank 0's: 1 + the rank that has closed the group first; or 0 */
    _Alignas(LINE) uint64_t what, count; /* of the call at hand, for its rank alone */
};

/* A rank's hold on a segment; mpicoll/routes/host/shared.py has the same. */
struct mpicoll_shared {
    char *base;     /* where the segment is mapped */
    size_t slot;    /* bytes of a slot, a multiple of LINE */
    uint32_t n, me; /* ranks, and this one */
    uint32_t round; /* rounds ended */
    uint32_t calls; /* calls begun */
    uint32_t looks; /* at a counter before the thread sleeps */
    atomic_uint left; /* this rank does not wait any more: calls return 0 */
    uint32_t measurements; /* of the ranks' distances */
    uint32_t latency; /* nanoseconds to the farthest rank that was measured last; 0: unknown */
    uint32_t far;   /* bit k: the rank whose number differs from this one's in bit k is far away */
    uint32_t few;   /* ranks up to which each waits for each other, see `meet` */
    uint64_t until; /* bytes of rounds until the next measurement */
    /* Clusters: neighbouring ranks that are near each other. The first rank of each, and n. */
    const uint32_t *firsts;
    uint32_t clusters, cluster; /* how many, and the one of this rank */
};

/* What all calls of one kind share; mpicoll/routes/host/shared.py has the same. */
struct mpicoll_kind {
    struct mpicoll_shared *shared;
    uint64_t what;   /* tells this kind of call from others */
    double divisor;  /* of what was combined */
    size_t size;     /* bytes of a number */
    size_t parts;    /* numbers that make up an element */
    size_t whole;    /* numbers of an array up to which every rank combines everything */
    int32_t format;  /* of the numbers that are combined; negative: they are copied */
    int32_t operation;
    int32_t blocks;  /* as many blocks as ranks are given by each, instead of one */
    int32_t giver, taker; /* only the root gives, or takes */
    int32_t prefix;  /* a rank takes from those before it, and, if 1, itself */
    int32_t in_place; /* all_reduce */
    size_t large;    /* numbers of an array from which on all_reduce goes by clusters */
    uint32_t misfit; /* after MISFIT: the rank whose block for this one was not as expected, or n */
    uint64_t found;  /* and the elements of that block */
    uint64_t most;   /* after UNMOVED: elements of the largest block of all ranks */
};

static size_t rounded(size_t size, size_t unit)
{
    return (size + unit - 1) / unit * unit;
}

/* Bytes of a second slot: a share of a slot, of at most one line more than the n-th part. */
static size_t share_slot(size_t slot, size_t n)
{
    return rounded(slot / n, LINE) + LINE;
}

/* Bytes of one rank's region: a segment has n of them. */
EXPORT size_t mpicoll_shared_region(size_t slot, size_t n)
{
    return rounded(rounded(sizeof(struct header), PAGE) + SLOTS * (slot + share_slot(slot, n)),
                   PAGE);
}

static char *region(const struct mpicoll_shared *shared, uint32_t rank)
{
    return shared->base + rank * mpicoll_shared_region(shared->slot, shared->n);
}

static struct header *header(const struct mpicoll_shared *shared, uint32_t rank)
{
    return (struct header *)region(shared, rank);
}

static char *slot(const struct mpicoll_shared *shared, uint32_t rank, uint32_t round)
{
    return region(shared, rank) + rounded(sizeof(struct header), PAGE) +
           round % SLOTS * shared->slot;
}

static char *second_slot(const struct mpicoll_shared *shared, uint32_t rank, uint32_t round)
{
    return slot(shared, rank, 0) + SLOTS * shared->slot +
           round % SLOTS * share_slot(shared->slot, shared->n);
}

/* ---- Counting and waiting ---------------------------------------------------------------------- */

/* Sleeping is for long waits beside ranks or threads that want the core: it is left to them, and the
 * sleeper gets a core back as soon as it is woken. */
#ifdef __linux__
/* Returns whether the counter had the value and nobody has woken this thread. */
static int sleep_while(struct counter *counter, unsigned value, uint64_t nanoseconds)
{
    const struct timespec limit = {0, (long)nanoseconds};
    return syscall(SYS_futex, &counter->value, FUTEX_WAIT, value, &limit, NULL, 0) &&
           errno != EAGAIN;
}

static void wake(struct counter *counter)
{
    syscall(SYS_futex, &counter->value, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}
#else
static int sleep_while(struct counter *counter, unsigned value, uint64_t nanoseconds)
{
    (void)counter, (void)value, (void)nanoseconds;
    sched_yield();
    return 0;
}

static void wake(struct counter *counter)
{
    (void)counter;
}
#endif

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
    /* Either this sees that a rank is about to sleep, or that rank sees the new value. */
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

static uint64_t now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000 + (uint64_t)time.tv_nsec;
}

/* Whether this rank does not wait any more: it has left, or some rank has closed the group. Waits ask
 * when they have taken long, so that those that have not pay nothing. */
static int has_left(const struct mpicoll_shared *shared)
{
    return atomic_load(&shared->left) || atomic_load(&header(shared, 0)->closer);
}

/* Called where a wait takes long, on the thread that has set it: whether this rank is to leave. */
static int (*attend)(void);
static pthread_t attendant;

EXPORT void mpicoll_shared_attend(int (*function)(void))
{
    attendant = pthread_self();
    attend = function;
}

static int is_called_away(void)
{
    return attend && pthread_equal(attendant, pthread_self()) && attend();
}

/* Waits until another rank has counted to `target`, or, returning 0, until the time `end`, or until
 * this rank has left. */
static int wait_until(const struct mpicoll_shared *shared, struct counter *counter, uint32_t target,
                      uint64_t end)
{
    /* The rank that should wake this one may be lost: look again now and then. */
    const uint64_t nap = 50000000;

    for (uint32_t i = 0; i < shared->looks; i++) {
        if (reached(atomic_load_explicit(&counter->value, memory_order_acquire), target))
            return 1;
        relax();
    }
    for (int i = 0; i < YIELDS && (end == FOREVER || now() < end); i++) {
        sched_yield();
        if (reached(atomic_load_explicit(&counter->value, memory_order_acquire), target))
            return 1;
    }
    for (;;) {
        const unsigned value = atomic_load(&counter->value);
        if (reached(value, target))
            return 1;
        const uint64_t time = end == FOREVER ? 0 : now();
        if (time >= end || has_left(shared))
            return 0;
        atomic_store(&counter->sleepers, 1);
        if (atomic_load(&counter->value) == value &&
            sleep_while(counter, value, end - time < nap ? end - time : nap) && is_called_away()) {
            atomic_store((atomic_uint *)&shared->left, 1);
            return 0; /* though the other may have come: what the handler has raised goes first */
        }
    }
}

static int wait_for(const struct mpicoll_shared *shared, struct counter *counter, uint32_t target)
{
    return wait_until(shared, counter, target, FOREVER);
}

/* ---- Far and near ------------------------------------------------------------------------------ */

/* Between ranks that share a last-level cache a slot best stays in it. Between others every line of
 * a slot that is written anew costs a round of invalidations, which takes four times as long as
 * writing past the caches, and reading from memory. How a rank writes is its own affair.
 *
 * The distance is measured to the ranks whose numbers differ in one bit, all over again after so many
 * bytes: processors of virtual machines move, and so do processes that are not bound to one. Another
 * rank counts as far away if any bit does in which its number differs. (Where nodes, sockets and
 * caches are filled in the order of the ranks, and where they are filled in turn, that is so.) */

/* Bytes of rounds between measurements; bytes from which on a message is worth one; and those from
 * which on a copy for a far rank goes past the caches. */
enum { MEASURE_EVERY = 4 << 20, MEASURED = 4096, PAST = 2048 };

/* Nanoseconds that a rank waits for another one's answer, for each look at a counter that it takes
 * before it sleeps: not long where others want the processor. */
enum { PATIENCE = 10 };

/* Writes nanoseconds to each of them into `latencies`, unless that is NULL; 0: unknown. */
static void measure(struct mpicoll_shared *shared, uint32_t *latencies)
{
    const uint32_t number = shared->measurements++;
    uint32_t most = 0;
    for (uint32_t bit = 0; 1u << bit < shared->n; bit++) {
        const uint32_t partner = shared->me ^ 1u << bit;
        if (partner >= shared->n)
            continue;
        const uint32_t took =
            mpicoll_latency(&header(shared, shared->me)->echoes[bit].number,
                            &header(shared, partner)->echoes[bit].number, shared->me < partner,
                            number, (uint64_t)PATIENCE * shared->looks);
        if (took > most)
            most = took;
        if (latencies)
            latencies[bit] = took;
        if (took >= FAR)
            shared->far |= 1u << bit;
        else if (took)
            shared->far &= ~(1u << bit);
    }
    shared->latency = most;
}

/* Measures the ranks' distances if it is time to; all ranks call, in the same round. */
static void look_around(struct mpicoll_shared *shared, size_t bytes)
{
    if (bytes < MEASURED)
        return;
    if (shared->until <= bytes) {
        shared->until = MEASURE_EVERY;
        measure(shared, NULL);
    } else {
        shared->until -= bytes;
    }
}

/* Measures now: all ranks call, at about the same time. latencies: MOST_BITS numbers, at first 0. */
EXPORT void mpicoll_shared_measure(struct mpicoll_shared *shared, uint32_t *latencies)
{
    measure(shared, latencies);
}

static int any_far(const struct mpicoll_shared *shared)
{
    return shared->far != 0;
}

static int is_far(const struct mpicoll_shared *shared, uint32_t rank)
{
    return ((shared->me ^ rank) & shared->far) != 0;
}

/* Copies past the caches: lines that are only written need not be fetched. */
static void copy_past_caches(char *into, const char *from, size_t size)
{
#ifdef __SSE2__
    const size_t before = (size_t)(-(uintptr_t)into % sizeof(__m128i));
    if (size > before + LINE) {
        memcpy(into, from, before);
        for (into += before, from += before, size -= before; size >= LINE;
             into += LINE, from += LINE, size -= LINE) {
            const __m128i *line = (const __m128i *)from;
            const __m128i a = _mm_loadu_si128(line), b = _mm_loadu_si128(line + 1);
            const __m128i c = _mm_loadu_si128(line + 2), d = _mm_loadu_si128(line + 3);
            _mm_stream_si128((__m128i *)into, a);
            _mm_stream_si128((__m128i *)into + 1, b);
            _mm_stream_si128((__m128i *)into + 2, c);
            _mm_stream_si128((__m128i *)into + 3, d);
        }
        _mm_sfence(); /* these stores are not ordered among others by themselves */
    }
#endif
    memcpy(into, from, size);
}

/* Copies into a slot, for a rank that is far or not. */
static void put(char *into, const char *from, size_t size, int far)
{
    if (far && size >= PAST)
        copy_past_caches(into, from, size);
    else
        memcpy(into, from, size);
}

/* ---- Several arrays as one --------------------------------------------------------------------- */

/* The numbers of n arrays, one after another. */
struct list {
    char *const *arrays;
    const size_t *ends; /* in the list, of each array's numbers */
    size_t n;
};

/* The array that a number of a list is in. */
static size_t find(const struct list *list, size_t number)
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

/* Where a number of a list is that is in array k. */
static char *place_of(const struct list *list, size_t k, size_t size, size_t number)
{
    return list->arrays[k] + (number - (k ? list->ends[k - 1] : 0)) * size;
}

/* Copies a list's numbers from `start` to `end` into a slot, for a rank that is far or not. */
static void put_numbers(char *into, const struct list *list, size_t size, size_t start, size_t end,
                        int far)
{
    for (size_t k = find(list, start); start < end; k++) {
        const size_t until = list->ends[k] < end ? list->ends[k] : end;
        const size_t bytes = (until - start) * size;
        put(into, place_of(list, k, size, start), bytes, far);
        into += bytes;
        start = until;
    }
}

/* Copies numbers to their places in a list; past the caches, or not. */
static void get_numbers(const struct list *list, size_t size, size_t start, size_t end,
                        const char *from, int past_caches)
{
    for (size_t k = find(list, start); start < end; k++) {
        const size_t until = list->ends[k] < end ? list->ends[k] : end;
        const size_t bytes = (until - start) * size;
        char *into = place_of(list, k, size, start);
        if (into != from) {
            if (past_caches)
                copy_past_caches(into, from, bytes);
            else
                memcpy(into, from, bytes);
        }
        from += bytes;
        start = until;
    }
}

/* Bytes that are combined where they lie, though more could be if they were copied. */
enum { RUN = 1024 };

/* Returns where a list's numbers from `start` on lie side by side: up to `end` in their array, or up to
 * where that ends, which *end becomes, if they are many; else copied to `beside`. */
static char *gather_numbers(const struct list *list, size_t size, size_t start, size_t *end,
                            char *beside)
{
    const size_t k = find(list, start);
    const size_t until = list->ends[k] < *end ? list->ends[k] : *end;
    if (until < *end && (until - start) * size < RUN) {
        put_numbers(beside, list, size, start, *end, 0);
        return beside;
    }
    *end = until;
    return place_of(list, k, size, start);
}

/* ---- Calls ------------------------------------------------------------------------------------- */

static uint64_t load(const _Atomic uint64_t *value)
{
    return atomic_load_explicit(value, memory_order_relaxed);
}

static void describe(struct call *call, uint64_t what, uint64_t count, int alike)
{
    atomic_store_explicit(&call->what, what, memory_order_relaxed);
    atomic_store_explicit(&call->count, count, memory_order_relaxed);
    atomic_store_explicit(&call->alike, (uint32_t)alike, memory_order_relaxed);
}

/* A call, and all that its rank has seen, are about this. */
static int is_about(const struct call *call, uint64_t what, uint64_t count)
{
    return load(&call->what) == what && load(&call->count) == count &&
           atomic_load_explicit(&call->alike, memory_order_relaxed);
}

static void ask(struct header *mine, uint32_t number, uint64_t what, uint64_t count)
{
    describe(&mine->asked.calls[number % 2], what, count, 1);
    count_up(&mine->asked.counter, number);
}

/* Announces call `number` of the group's collectives. Returns 1 if the other ranks announce it, too,
 * with the same call, at once or in so many nanoseconds: a rank that then begins it will not have to
 * wait for them. (`number` is the group's, and not that of the calls here, so that an error between
 * this and the call, after which the ranks go on with the next number, leaves nothing behind. A rank
 * that is two numbers ahead has overwritten what is compared here, or is just writing it; but it has
 * call `number` behind it, so that either answer will do.) */
EXPORT int mpicoll_shared_ask(const struct mpicoll_shared *shared, uint32_t number, uint64_t what,
                              uint64_t count, uint64_t nanoseconds)
{
    const uint64_t end = now() + nanoseconds;
    struct header *mine = header(shared, shared->me);
    ask(mine, number, what, count);
    for (uint32_t i = 1; i < shared->n; i++) {
        struct signal *asked = &header(shared, (shared->me + i) % shared->n)->asked;
        if (!wait_until(shared, &asked->counter, number, end) ||
            !is_about(&asked->calls[number % 2], what, count))
            return 0;
    }
    return 1;
}

/* Says what this call is about: with its first signals. */
static void announce(struct mpicoll_shared *shared, uint32_t number, uint64_t what, uint64_t count)
{
    struct header *mine = header(shared, shared->me);
    shared->calls++;
    if (!reached(atomic_load(&mine->asked.counter.value), number))
        ask(mine, number, what, count);
    mine->what = what, mine->count = count;
}

/* Signals that this rank (k = 0), or 2^k ranks up to it, have given what round `target` - 1 needs; in a
 * call's first round with what the call is about, and whether all of theirs are alike. */
static void pass(const struct mpicoll_shared *shared, uint32_t k, uint32_t target, int alike)
{
    struct header *mine = header(shared, shared->me);
    struct signal *signal = &mine->passed[k];
    if (target == shared->round + 1)
        describe(&signal->calls[shared->calls % 2], mine->what, mine->count, alike);
    count_up(&signal->counter, target);
}

static void give(const struct mpicoll_shared *shared, uint32_t target)
{
    pass(shared, 0, target, 1);
}

/* The end of a call, which began in round `base`, that the ranks did not agree on. Some are in its
 * first round and some in its second: they end alike. */
static int differed(struct mpicoll_shared *shared, uint32_t base)
{
    struct header *mine = header(shared, shared->me);
    count_up(&mine->passed[0].counter, base + 2);
    count_up(&mine->combined, base + 2);
    shared->round = base + 2;
    return 0;
}

/* Waits for a rank's signal. Returns whether it came; in a call's first round *alike becomes 0 if the
 * rank has another call, or has heard of one. */
static int hear(const struct mpicoll_shared *shared, struct signal *signal, uint32_t target,
                int *alike)
{
    const struct header *mine = header(shared, shared->me);
    if (!wait_for(shared, &signal->counter, target))
        return 0;
    if (target == shared->round + 1 &&
        !is_about(&signal->calls[shared->calls % 2], mine->what, mine->count))
        *alike = 0;
    return 1;
}

/* Waits until all ranks have given what round `target` - 1 needs, and in a call's first round learns
 * whether all are in the same call; this rank has given its own. Returns 1; 0 if the calls differ, on
 * all ranks: then the call is over; and LEFT if this rank has left. */
static int meet(struct mpicoll_shared *shared, uint32_t target)
{
    const uint32_t n = shared->n, me = shared->me;
    int alike = 1;

    if (n <= shared->few) {
        for (uint32_t i = 1; i < n; i++)
            if (!hear(shared, &header(shared, (me + i) % n)->passed[0], target, &alike))
                return LEFT;
    } else {
        for (uint32_t k = 0, distance = 1; distance < n; k++, distance *= 2) {
            if (!hear(shared, &header(shared, (me + n - distance) % n)->passed[k], target, &alike))
                return LEFT;
            if (2 * distance < n) /* even after a difference: others wait for it */
                pass(shared, k + 1, target, alike);
        }
    }
    return alike ? 1 : differed(shared, target - 1);
}

/* A call that only compares what it is about: 1 where all ranks have it alike. */
EXPORT int mpicoll_shared_agree(struct mpicoll_shared *shared, uint32_t number, uint64_t what,
                                uint64_t count)
{
    struct header *mine = header(shared, shared->me);
    const uint32_t base = shared->round;

    announce(shared, number, what, count);
    give(shared, base + 1);
    if (meet(shared, base + 1) <= 0)
        return 0;
    count_up(&mine->combined, base + 1);
    shared->round = base + 1;
    return 1;
}

/* What rank's call is about, after one that was not agreed on. */
EXPORT void mpicoll_shared_call(const struct mpicoll_shared *shared, uint32_t rank, uint64_t *what,
                                uint64_t *count)
{
    const struct call *call = &header(shared, rank)->passed[0].calls[shared->calls % 2];
    *what = load(&call->what);
    *count = load(&call->count);
}

/* Closes the group for all ranks: those that wait leave, as this one does, and so does each that
 * will. What a rank's call has read and written until then is nobody's any more: no call comes after. */
EXPORT void mpicoll_shared_close(struct mpicoll_shared *shared)
{
    unsigned nobody = 0;
    atomic_compare_exchange_strong(&header(shared, 0)->closer, &nobody, shared->me + 1);
    atomic_store(&shared->left, 1);
}

/* The rank that has closed the group, or -1. */
EXPORT int mpicoll_shared_closer(const struct mpicoll_shared *shared)
{
    return (int)atomic_load(&header(shared, 0)->closer) - 1;
}

/* The number of the last call that a rank has come to, 0 for none, and what that is about: for people,
 * as the rank may go on meanwhile. */
EXPORT uint32_t mpicoll_shared_last_call(const struct mpicoll_shared *shared, uint32_t rank,
                                         uint64_t *what, uint64_t *count)
{
    const struct signal *asked = &header(shared, rank)->asked;
    const uint32_t number = atomic_load(&asked->counter.value);
    *what = load(&asked->calls[number % 2].what);
    *count = load(&asked->calls[number % 2].count);
    return number;
}

/* One piece of a message: the numbers that go through in a round. */
struct piece {
    size_t start, count;
};

static struct piece piece_of(size_t count, size_t step, size_t i)
{
    const size_t start = i * step;
    return (struct piece){start, count - start < step ? count - start : step};
}

/* Elements of a share of a piece, for n ranks: shares are whole lines. */
static size_t share_size(struct piece piece, size_t size, size_t n)
{
    return rounded(rounded(piece.count, n) / n * size, LINE) / size;
}

/* The first element of a rank's share. */
static size_t share_start(struct piece piece, size_t size, size_t n, size_t rank)
{
    const size_t share = share_size(piece, size, n);
    return rank * share < piece.count ? rank * share : piece.count;
}

/* The rank of a cluster in whose share an element is; and at most where that ends, in *end. */
static uint32_t owner(const struct mpicoll_shared *shared, uint32_t cluster, struct piece piece,
                      size_t size, size_t element, size_t *end)
{
    const uint32_t first = shared->firsts[cluster];
    const size_t share = share_size(piece, size, shared->firsts[cluster + 1] - first);
    const size_t rank = element / share;
    if (*end > (rank + 1) * share)
        *end = (rank + 1) * share;
    return first + (uint32_t)rank;
}

/* all_reduce where it is far from one cluster of ranks to another: each byte crosses once on the way to
 * the result, and once on the way back, where else each rank reads from each other.
 *
 * A rank combines a share of every piece as large as its cluster has ranks. A cluster begins with what
 * the one before it has combined, and goes on with its own ranks: so the order is that of the ranks,
 * and the result the same to the bit as that of the other way. (Not so for narrow formats, which are
 * rounded once, from a wider one.) In round k
 *
 *   1. every rank copies its elements into slot k, all but those of its share, and signals;
 *   2. it combines its share of its cluster's slots, and of the former cluster's shares, when these are
 *      there. The result goes into its own slot k, in the place of the share; `combined` counts up;
 *   3. it copies its share of the last cluster's result, when that is there, over its own, and into its
 *      array; `returned` counts up;
 *   4. it copies the shares of the others of its cluster into its array, when these have returned.
 *
 * The steps are interleaved: 4 of round k - 3, 1 of k, 2 of k - 1, 3 of k - 2. A rank waits only for
 * steps that come earlier in this order, or in the same place in a former cluster: so none waits for
 * ever.
 *
 * Why four slots are enough. A rank fills slot k once it knows that all have given k - 1, who by then
 * had ended step 4 of round k - 4, and steps 2 and 3 before. What step 3 overwrites, those have read who
 * combine it further: else the last cluster would not have its result. After the last round all meet
 * once more, for the next call may fill two slots before it knows more of the others. */
static int all_reduce_by_clusters(const struct mpicoll_kind *kind, const struct list *list,
                                  size_t count)
{
    struct mpicoll_shared *shared = kind->shared;
    const uint32_t me = shared->me, base = shared->round, mine = shared->cluster;
    const uint32_t first = shared->firsts[mine], q = shared->firsts[mine + 1] - first;
    const uint32_t last = shared->clusters - 1;
    const size_t size = kind->size, step = shared->slot / size;
    const size_t rounds = (count + step - 1) / step;
    struct header *own = header(shared, me);
    _Alignas(LINE) char block[BLOCK], beside[BLOCK];
    const char *sources[q + 1];

    /* Other calls leave this one where it is, and after 2^31 rounds it would seem to be ahead. Those who
     * wait for it have met this rank before, in a round of this call. */
    count_up(&own->returned, base);
    for (size_t i = 0; i < rounds + 3; i++) {
        const uint32_t round = base + (uint32_t)i;
        if (i >= 3) {
            const struct piece piece = piece_of(count, step, i - 3);
            for (uint32_t k = 1; k < q; k++) {
                const uint32_t member = (me - first + k) % q;
                const size_t start = share_start(piece, size, q, member);
                const size_t end = share_start(piece, size, q, member + 1);
                if (!wait_for(shared, &header(shared, first + member)->returned, round - 2))
                    return 0;
                get_numbers(list, size, piece.start + start, piece.start + end,
                            slot(shared, first + member, round - 3) + start * size, 0);
            }
        }
        if (i >= 1 && i <= rounds) {
            if (meet(shared, round) <= 0)
                return 0;
            look_around(shared, piece_of(count, step, i - 1).count * size);
        }
        if (i < rounds) {
            const struct piece piece = piece_of(count, step, i);
            for (uint32_t member = 0; member < q; member++) {
                const size_t start = share_start(piece, size, q, member);
                const size_t end = share_start(piece, size, q, member + 1);
                if (first + member != me)
                    put_numbers(slot(shared, me, round) + start * size, list, size,
                                piece.start + start, piece.start + end,
                                is_far(shared, first + member));
            }
            give(shared, round + 1);
        }
        if (i >= 1 && i <= rounds) {
            const struct piece piece = piece_of(count, step, i - 1);
            const size_t end = share_start(piece, size, q, me - first + 1);
            size_t at = share_start(piece, size, q, me - first);
            while (at < end) {
                size_t until = end - at < BLOCK / size ? end : at + BLOCK / size, n = 0;
                if (mine > 0) {
                    const uint32_t from = owner(shared, mine - 1, piece, size, at, &until);
                    if (!wait_for(shared, &header(shared, from)->combined, round))
                        return 0;
                    sources[n++] = slot(shared, from, round - 1) + at * size;
                }
                const size_t start = piece.start + at;
                size_t stop = piece.start + until;
                char *given = gather_numbers(list, size, start, &stop, beside);
                until = stop - piece.start;
                for (uint32_t rank = first; rank < first + q; rank++)
                    sources[n++] = rank == me ? given : slot(shared, rank, round - 1) + at * size;
                char *out = mine == last ? given : block;
                mpicoll_combine(kind->format, kind->operation, sources, n, out, until - at,
                                mine == last ? kind->divisor : 1);
                put(slot(shared, me, round - 1) + at * size, out, (until - at) * size,
                    any_far(shared));
                if (mine == last)
                    get_numbers(list, size, start, stop, out, 0);
                at = until;
            }
            count_up(&own->combined, round);
        }
        if (i >= 2 && i <= rounds + 1) {
            const struct piece piece = piece_of(count, step, i - 2);
            const size_t end = share_start(piece, size, q, me - first + 1);
            size_t at = share_start(piece, size, q, me - first);
            while (mine != last && at < end) {
                size_t until = end;
                const uint32_t from = owner(shared, last, piece, size, at, &until);
                if (!wait_for(shared, &header(shared, from)->combined, round - 1))
                    return 0;
                char *place = slot(shared, me, round - 2) + at * size;
                memcpy(place, slot(shared, from, round - 2) + at * size, (until - at) * size);
                get_numbers(list, size, piece.start + at, piece.start + until, place, 0);
                at = until;
            }
            count_up(&own->returned, round - 1);
        }
    }
    give(shared, base + (uint32_t)rounds + 1);
    if (meet(shared, base + (uint32_t)rounds + 1) <= 0)
        return 0;
    shared->round = base + (uint32_t)rounds + 1;
    return 1;
}

/* list = (rank 0's list op rank 1's op ...) / divisor on every rank, of `count` numbers; see
 * mpicoll_shared_all_reduce. */
static int all_reduce(const struct mpicoll_kind *kind, const struct list *list, size_t count,
                      uint32_t number)
{
    struct mpicoll_shared *shared = kind->shared;
    const uint32_t n = shared->n, me = shared->me, base = shared->round;
    const size_t size = kind->size, step = shared->slot / size;
    const size_t rounds = count ? (count + step - 1) / step : 1;
    const int split = count > kind->whole; /* each combines its share, instead of everything */
    struct header *mine = header(shared, me);
    _Alignas(LINE) char beside[BLOCK];
    const char *sources[n];

    announce(shared, number, kind->what, count);
    if (shared->clusters > 1 && count >= kind->large)
        return all_reduce_by_clusters(kind, list, count);
    for (size_t i = 0; i < rounds + (split ? 2 : 1); i++) {
        if (i < rounds) {
            const struct piece piece = piece_of(count, step, i);
            char *into = slot(shared, me, base + (uint32_t)i);
            if (split) { /* all but the own share */
                for (uint32_t rank = 0; rank < n; rank++) {
                    const size_t start = share_start(piece, size, n, rank);
                    const size_t end = share_start(piece, size, n, rank + 1);
                    if (rank != me)
                        put_numbers(into + start * size, list, size, piece.start + start,
                                    piece.start + end, is_far(shared, rank));
                }
            } else {
                put_numbers(into, list, size, piece.start, piece.start + piece.count,
                            any_far(shared));
            }
            give(shared, base + (uint32_t)i + 1);
        }
        if (split && i >= 2) {
            const struct piece piece = piece_of(count, step, i - 2);
            for (uint32_t k = 1; k < n; k++) {
                const uint32_t rank = (me + k) % n, round = base + (uint32_t)i - 2;
                const size_t start = share_start(piece, size, n, rank);
                const size_t end = share_start(piece, size, n, rank + 1);
                if (!wait_for(shared, &header(shared, rank)->combined, round + 1))
                    return 0;
                get_numbers(list, size, piece.start + start, piece.start + end,
                            second_slot(shared, rank, round), 0);
            }
        }
        if (i >= 1 && i <= rounds) {
            const struct piece piece = piece_of(count, step, i - 1);
            const uint32_t round = base + (uint32_t)i - 1;
            const size_t start = split ? share_start(piece, size, n, me) : 0;
            const size_t end = split ? share_start(piece, size, n, me + 1) : piece.count;
            if (meet(shared, round + 1) <= 0)
                return 0;
            look_around(shared, piece.count * size);
            for (size_t at = start, until; at < end; at = until) {
                const size_t from = piece.start + at;
                size_t to = piece.start + (end - at < BLOCK / size ? end : at + BLOCK / size);
                char *out = gather_numbers(list, size, from, &to, beside);
                until = to - piece.start;
                for (uint32_t rank = 0; rank < n; rank++)
                    sources[rank] = rank == me ? out : slot(shared, rank, round) + at * size;
                mpicoll_combine(kind->format, kind->operation, sources, n, out, until - at,
                                kind->divisor);
                if (split)
                    put(second_slot(shared, me, round) + (at - start) * size, out,
                        (until - at) * size, any_far(shared));
                get_numbers(list, size, from, to, out, 0);
            }
            count_up(&mine->combined, round + 1);
        }
    }
    shared->round = base + (uint32_t)rounds;
    return 1;
}

/* array = (rank 0's array op rank 1's op ...) / divisor on every rank; count elements.
 *
 * number: of the call among the group's collectives, the same on every rank.
 * Returns 0 without doing so, on all ranks, if they do not have the same count and kind, and on this
 * one if it has left: then it cannot use the segment any more. */
EXPORT int mpicoll_shared_all_reduce(const struct mpicoll_kind *kind, char *array, size_t count,
                                     uint32_t number)
{
    const size_t numbers = count * kind->parts;
    const struct list list = {&array, &numbers, 1};
    return all_reduce(kind, &list, numbers, number);
}

/* A block that a rank gets: whose, from which place, where to. */
struct get {
    size_t rank, place;
    struct list block;
};

static size_t count_of(const struct list *list)
{
    return list->ends[list->n - 1];
}

/* The numbers of a block that go through in a round. */
static struct piece part_of(const struct list *block, size_t start, size_t step)
{
    const size_t count = count_of(block);
    return (struct piece){start, count <= start ? 0 : count - start < step ? count - start : step};
}

/* At most `most` numbers of a piece, from number `at` on. */
static size_t length_of(struct piece piece, size_t at, size_t most)
{
    return piece.count - at < most ? piece.count - at : most;
}

/* Where the numbers of a piece of a rank's block lie, from number `at` of the piece on: of the own in
 * its arrays, see gather_numbers. */
static const char *source_of(const struct mpicoll_kind *kind, const struct get *get,
                             const struct list *puts, uint32_t round, size_t room,
                             struct piece piece, size_t at, size_t *until, char *beside)
{
    const struct mpicoll_shared *shared = kind->shared;
    if (get->rank != shared->me)
        return slot(shared, (uint32_t)get->rank, round) + get->place * room + at * kind->size;
    size_t end = piece.start + *until;
    const char *found =
        gather_numbers(&puts[get->place], kind->size, piece.start + at, &end, beside);
    *until = end - piece.start;
    return found;
}

/* Any collective: ranks put blocks up, and take others'. A round carries a piece of every block.
 * What is combined goes into the place of the first block taken.
 *
 * places:    blocks of the rank that puts up most. Where they are as many as ranks, each is for the
 *            rank of its number.
 * most:      numbers in the largest block of all ranks.
 * puts:      the blocks that this rank puts up, at one place after another of its slots.
 * what, total: what all ranks must have alike.
 * The rest is as in all_reduce; counts are of numbers. */
static int exchange(const struct mpicoll_kind *kind, size_t places, size_t most,
                    const struct list *puts, size_t n_puts, const struct get *gets, size_t n_gets,
                    uint32_t number, uint64_t what, uint64_t total)
{
    struct mpicoll_shared *shared = kind->shared;
    const uint32_t n = shared->n, me = shared->me, base = shared->round;
    const size_t room = shared->slot / places / LINE * LINE, size = kind->size, step = room / size;
    const size_t rounds = most ? (most + step - 1) / step : 1;
    struct header *mine = header(shared, me);
    const int large = n_gets * most * size >= LARGE; /* caches lose the result before it is read */
    _Alignas(LINE) char beside[BLOCK], result[BLOCK];
    const char *sources[n_gets + 1];

    announce(shared, number, what, total);
    for (size_t i = 0; i <= rounds; i++) {
        if (i < rounds) {
            char *into = slot(shared, me, base + (uint32_t)i);
            for (size_t k = 0; k < n_puts; k++) {
                if (places == n && n > 1 && k == me)
                    continue; /* no other rank gets it */
                const struct piece piece = part_of(&puts[k], i * step, step);
                put_numbers(into + k * room, &puts[k], size, piece.start,
                            piece.start + piece.count,
                            places == n ? is_far(shared, (uint32_t)k) : any_far(shared));
            }
            give(shared, base + (uint32_t)i + 1);
        }
        if (i < 1)
            continue;
        const uint32_t round = base + (uint32_t)i - 1;
        const size_t start = (i - 1) * step;
        if (meet(shared, round + 1) <= 0)
            return 0;
        look_around(shared, places * (most - start < step ? most - start : step) * size);
        if (kind->format >= 0 && n_gets) {
            const struct list *into = &gets[0].block;
            const struct piece piece = part_of(into, start, step);
            for (size_t at = 0, until; at < piece.count; at = until) {
                const size_t from = piece.start + at;
                size_t to = from + length_of(piece, at, BLOCK / size);
                char *out = gather_numbers(into, size, from, &to, result);
                until = to - piece.start;
                for (size_t k = 0; k < n_gets; k++) /* the own, in arrays of the same sizes, too */
                    sources[k] =
                        source_of(kind, &gets[k], puts, round, room, piece, at, &until, beside);
                mpicoll_combine(kind->format, kind->operation, sources, n_gets, out, until - at,
                                kind->divisor);
                get_numbers(into, size, from, piece.start + until, out, 0);
            }
        } else {
            for (size_t k = 0; k < n_gets; k++) {
                const struct list *into = &gets[k].block;
                const struct piece piece = part_of(into, start, step);
                /* The own may have to be copied to `beside` on the way. */
                const size_t some = gets[k].rank == me ? BLOCK / size : piece.count;
                for (size_t at = 0, until; at < piece.count; at = until) {
                    until = at + length_of(piece, at, some);
                    const char *from =
                        source_of(kind, &gets[k], puts, round, room, piece, at, &until, beside);
                    get_numbers(into, size, piece.start + at, piece.start + until, from, large);
                }
            }
        }
        count_up(&mine->combined, round + 1);
    }
    shared->round = base + (uint32_t)rounds;
    return 1;
}

/* How many blocks a rank puts up at most, and how many this one puts up and gets, in a call whose
 * blocks all have the same size. */
struct sides {
    size_t places, n_puts, n_gets;
};

static struct sides sides_of(const struct mpicoll_kind *kind, uint32_t root)
{
    const uint32_t n = kind->shared->n, me = kind->shared->me;
    const size_t places = kind->blocks ? n : 1;
    const size_t combined = kind->prefix ? me + (kind->prefix == 1) : n;
    return (struct sides){
        places,
        kind->giver && me != root ? 0 : places,
        kind->giver ? 1 : kind->taker && me != root ? 0 : combined,
    };
}

/* The collectives whose blocks all have the same size.
 *
 * send, recv: the blocks that are put up, and where they go, in the order of the ranks: of each of them
 *             the n arrays it consists of. A side that this rank has not is not read.
 * ends:       of each array's numbers in a block.
 * root:       of a collective that has one; the rest is as in all_reduce. */
static int exchange_blocks(const struct mpicoll_kind *kind, char *const *send, char *const *recv,
                           const size_t *ends, size_t n, uint32_t root, uint32_t number)
{
    const struct sides sides = sides_of(kind, root);
    const size_t numbers = ends[n - 1];
    struct list puts[kind->shared->n];
    struct get gets[kind->shared->n];

    for (size_t k = 0; k < sides.n_puts; k++)
        puts[k] = (struct list){send + k * n, ends, n};
    for (size_t k = 0; k < sides.n_gets; k++) /* what is combined goes to one place */
        gets[k] = (struct get){kind->giver ? root : k,
                               kind->blocks ? kind->shared->me : 0,
                               {recv + (kind->format >= 0 ? 0 : k * n), ends, n}};
    return exchange(kind, sides.places, numbers, puts, sides.n_puts, gets, sides.n_gets, number,
                    kind->what | (uint64_t)root << 24, numbers);
}

/* The same for blocks of `count` elements that lie one after another: the same array for what happens
 * in place. */
EXPORT int mpicoll_shared_blocks(const struct mpicoll_kind *kind, char *send, char *recv,
                                 size_t count, uint32_t root, uint32_t number)
{
    const size_t numbers = count * kind->parts, bytes = numbers * kind->size;
    const struct sides sides = sides_of(kind, root);
    char *from[kind->shared->n], *to[kind->shared->n];

    for (size_t k = 0; k < sides.n_puts; k++)
        from[k] = send + k * bytes;
    for (size_t k = 0; k < sides.n_gets; k++)
        to[k] = recv + (kind->format >= 0 ? 0 : k * bytes);
    return exchange_blocks(kind, from, to, &numbers, 1, root, number);
}

/* The same for blocks that lie anywhere: in the order of the ranks where there is one for each, else
 * one. A side that this rank has not is not read. */
EXPORT int mpicoll_shared_lists(const struct mpicoll_kind *kind, const struct mpicoll_block *send,
                                const struct mpicoll_block *recv, size_t count, uint32_t root,
                                uint32_t number)
{
    const size_t numbers = count * kind->parts;
    const struct sides sides = sides_of(kind, root);
    char *from[kind->shared->n], *to[kind->shared->n];

    for (size_t k = 0; k < sides.n_puts; k++)
        from[k] = send[k].data;
    for (size_t k = 0; k < sides.n_gets; k++)
        to[k] = recv[kind->format >= 0 ? 0 : k].data;
    return exchange_blocks(kind, from, to, &numbers, 1, root, number);
}

/* The root, in a call's signature, of a list of calls; mpicoll/core/signature.py has the same. */
#define LIST ((uint64_t)UINT32_MAX)

/* Several calls of one kind that has no root, of `n` arrays a block, as one.
 *
 * send, recv: as in exchange_blocks; of all_reduce `recv` alone.
 * ends:  of each array's elements in a block, which become numbers.
 * sizes: what the sizes of the calls come to, which are then compared first, as call `number`, and the
 *        data is moved in the next; 0: they have been.
 * The rest is as in all_reduce. */
EXPORT int mpicoll_shared_fused(const struct mpicoll_kind *kind, char *const *send,
                                char *const *recv, size_t *ends, size_t n, uint64_t sizes,
                                uint32_t number)
{
    if (sizes &&
        !mpicoll_shared_agree(kind->shared, number++, kind->what | LIST << 24, sizes))
        return 0;
    for (size_t k = 0; k < n; k++)
        ends[k] *= kind->parts;
    if (kind->in_place) {
        const struct list list = {recv, ends, n};
        return all_reduce(kind, &list, ends[n - 1], number);
    }
    return exchange_blocks(kind, send, recv, ends, n, 0, number);
}

/* A block that a rank puts up for the others, or gets, of the collectives whose blocks may differ in
 * size. */
struct mpicoll_put {
    char *data;
    size_t count; /* numbers */
};

struct mpicoll_get {
    size_t rank, place;
    char *data;
    size_t count;
};

/* These collectives: what this rank puts, and what it gets. */
EXPORT int mpicoll_shared_exchange(const struct mpicoll_kind *kind, size_t places, size_t most,
                                   const struct mpicoll_put *puts, size_t n_puts,
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
    return exchange(kind, places, most, from, n_puts, to, n_gets, number,
                    kind->what | (uint64_t)root << 24, total);
}

/* ---- Rounds for what goes by other ways, see shared.h ------------------------------------------ */

/* Bytes of a copy during which a rank looks as often for another as it usually does. */
enum { LOOKS_FOR = 512 << 10 };

size_t mpicoll_board_size(const struct mpicoll_shared *shared)
{
    return shared->slot;
}

char *mpicoll_board(const struct mpicoll_shared *shared, uint32_t rank)
{
    return slot(shared, rank, shared->round);
}

void mpicoll_board_begin(struct mpicoll_shared *shared, uint32_t number, uint64_t what,
                         uint64_t total)
{
    announce(shared, number, what, total);
}

int mpicoll_board_publish(struct mpicoll_shared *shared)
{
    give(shared, shared->round + 1);
    return meet(shared, shared->round + 1);
}

void mpicoll_board_end(const struct mpicoll_shared *shared)
{
    count_up(&header(shared, shared->me)->combined, shared->round + 1);
}

int mpicoll_board_is_shown(const struct mpicoll_shared *shared, uint32_t rank)
{
    return reached(atomic_load(&header(shared, rank)->passed[0].counter.value),
                   shared->round + 1);
}

int mpicoll_board_is_ended(const struct mpicoll_shared *shared, uint32_t rank)
{
    return reached(atomic_load(&header(shared, rank)->combined.value), shared->round + 1);
}

int mpicoll_board_wait(const struct mpicoll_shared *shared, size_t bytes)
{
    /* What takes long is waited for longer: a rank that sleeps wakes up too late. */
    const uint64_t looks = (uint64_t)shared->looks * (bytes / LOOKS_FOR);

    for (uint32_t i = 1; i < shared->n; i++) {
        const uint32_t rank = (shared->me + i) % shared->n;
        for (uint64_t k = 0; k < looks && !mpicoll_board_is_ended(shared, rank); k++)
            relax();
        if (!wait_for(shared, &header(shared, rank)->combined, shared->round + 1))
            return 0;
    }
    return 1;
}

int mpicoll_is_any_far(const struct mpicoll_shared *shared)
{
    return any_far(shared);
}

void mpicoll_look_around(struct mpicoll_shared *shared, size_t bytes)
{
    look_around(shared, bytes);
}

void mpicoll_board_close(struct mpicoll_shared *shared)
{
    shared->round++;
}

int mpicoll_has_left(const struct mpicoll_shared *shared)
{
    return has_left(shared);
}

void mpicoll_copy_past_caches(char *into, const char *from, size_t size)
{
    copy_past_caches(into, from, size);
}

enum { FAILED = -1, UNFIT = -2 };

/* Sizes of blocks, where each rank knows its own alone: of the n that it sends, by receiver, and of
 * the n that it expects, by sender. Writes into `theirs` what each sends to this rank. Returns the
 * most that any sends to any, or, on all ranks, UNFIT if a rank expects anything else; FAILED as
 * other calls return 0. */
EXPORT int64_t mpicoll_shared_sizes(struct mpicoll_shared *shared, uint64_t what,
                                    const int64_t *sends, const int64_t *receives, int64_t *theirs,
                                    uint32_t number)
{
    const uint32_t n = shared->n, me = shared->me;
    const size_t bytes = n * sizeof(int64_t);
    int64_t most = 0;

    mpicoll_board_begin(shared, number, what, 0);
    memcpy(mpicoll_board(shared, me), sends, bytes);
    memcpy(mpicoll_board(shared, me) + bytes, receives, bytes);
    if (mpicoll_board_publish(shared) <= 0)
        return FAILED;
    for (uint32_t from = 0; from < n; from++) {
        const int64_t *sent = (const int64_t *)mpicoll_board(shared, from);
        theirs[from] = sent[me];
        for (uint32_t to = 0; to < n; to++) {
            const int64_t *expected = (const int64_t *)(mpicoll_board(shared, to) + bytes);
            if (most != UNFIT && sent[to] > most)
                most = sent[to];
            if (expected[from] != sent[to])
                most = UNFIT;
        }
    }
    mpicoll_board_end(shared);
    mpicoll_board_close(shared);
    return most;
}

/* all_to_all, where each rank knows the sizes of its own blocks alone, all in one round: every rank
 * shows the sizes of the n blocks that it sends, by receiver, and of the n that it expects, by
 * sender, and behind them, where there is room for them, the blocks for others.
 *
 * send, recv: n blocks each, of this rank.
 * Returns, on all ranks, MOVED; UNMOVED if the blocks of some rank found no room: nothing is moved
 * then, and kind->most is known; MISFIT if a rank expects another size than is sent; and DIFFERED as
 * other calls return 0. (The count and the root, which the call has not, are there because
 * mpicoll_shared_lists has them.) */
EXPORT int mpicoll_shared_all_to_all(struct mpicoll_kind *kind, const struct mpicoll_block *send,
                                     const struct mpicoll_block *recv, size_t count, uint32_t root,
                                     uint32_t number)
{
    struct mpicoll_shared *shared = kind->shared;
    const uint32_t n = shared->n, me = shared->me;
    const size_t head = rounded(2 * n * sizeof(uint64_t), LINE), size = kind->size;
    const size_t room = shared->slot > head ? shared->slot - head : 0;
    size_t bytes = 0, moved = 0;
    int result = MOVED;
    (void)count, (void)root;

    mpicoll_board_begin(shared, number, kind->what, 0);
    char *board = mpicoll_board(shared, me);
    for (uint32_t k = 0; k < n; k++) {
        ((uint64_t *)board)[k] = send[k].count;
        ((uint64_t *)board)[n + k] = recv[k].count;
        bytes += k == me ? 0 : send[k].count * size;
    }
    if (bytes <= room) {
        board += head;
        for (uint32_t k = 0; k < n; k++)
            if (k != me) {
                put(board, send[k].data, send[k].count * size, is_far(shared, k));
                board += send[k].count * size;
            }
    }
    if (mpicoll_board_publish(shared) <= 0)
        return DIFFERED;

    const uint64_t *expected = (const uint64_t *)mpicoll_board(shared, me) + n;
    kind->most = 0;
    kind->misfit = n;
    for (uint32_t from = 0; from < n; from++) {
        const uint64_t *sent = (const uint64_t *)mpicoll_board(shared, from);
        bytes = 0;
        for (uint32_t to = 0; to < n; to++) {
            const uint64_t *theirs = (const uint64_t *)mpicoll_board(shared, to) + n;
            if (theirs[from] != sent[to])
                result = MISFIT;
            if (sent[to] > kind->most)
                kind->most = sent[to];
            bytes += from == to ? 0 : sent[to] * size;
        }
        if (bytes > room && result == MOVED)
            result = UNMOVED;
        if (bytes > moved)
            moved = bytes;
        if (expected[from] != sent[me] && kind->misfit == n) {
            kind->misfit = from;
            kind->found = sent[me];
        }
    }
    if (result == MOVED) {
        look_around(shared, moved);
        for (uint32_t from = 0; from < n; from++) {
            const uint64_t *sent = (const uint64_t *)mpicoll_board(shared, from);
            const char *data = (const char *)sent + head;
            for (uint32_t to = 0; to < me; to++)
                data += to == from ? 0 : sent[to] * size;
            if (from == me)
                data = send[me].data;
            if (data != recv[from].data && sent[me])
                memcpy(recv[from].data, data, sent[me] * size);
        }
    }
    mpicoll_board_end(shared);
    mpicoll_board_close(shared);
    return result;
}

/* The same, in more rounds if the blocks find no room in one. */
EXPORT int mpicoll_shared_all_to_all_by_slots(struct mpicoll_kind *kind,
                                              const struct mpicoll_block *send,
                                              const struct mpicoll_block *recv, size_t count,
                                              uint32_t root, uint32_t number)
{
    const uint32_t n = kind->shared->n, me = kind->shared->me;
    struct list puts[n];
    struct get gets[n];
    const int result = mpicoll_shared_all_to_all(kind, send, recv, count, root, number);

    if (result != UNMOVED)
        return result;
    for (uint32_t k = 0; k < n; k++) {
        puts[k] = (struct list){&send[k].data, &send[k].count, 1};
        gets[k] = (struct get){k, me, {&recv[k].data, &recv[k].count, 1}};
    }
    return exchange(kind, n, kind->most, puts, n, gets, n, number, kind->what, 0);
}
