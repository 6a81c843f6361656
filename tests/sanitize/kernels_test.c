/* Drives the C library with threads as ranks, for sanitizers: `make sanitize` builds and runs it.
 *
 * The ranks of a group are processes, but ThreadSanitizer sees only the threads of one process.
 * Here each thread is a rank, with its own struct mpicoll_shared on one segment. Every array is
 * allocated with its exact size, so that AddressSanitizer detects a copy that is one element too
 * long.
 *
 * kernels_test            runs every check; exit code 1 at the first failure */

#include "choice.c" /* these also for their private structures */
#include "mpi_calls.c"
#include "shared.c"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

int mpicoll_format(const char *name);
void mpicoll_init_timeout(int begun, int cancel, long long timeout_ms, const char *before,
                   const char *after, const char *job, int size, int code);

enum { SUM = 0, ROUNDS = 12, LIMIT_SECONDS = 240 };

#define START ((uint32_t)-20) /* initial value of round and call numbers */

#define CHECK(CONDITION)                                                                           \
    do {                                                                                           \
        if (!(CONDITION)) {                                                                        \
            fprintf(stderr, "%s:%d: check failed: %s\n", __FILE__, __LINE__, #CONDITION);                \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

static void *allocate(size_t size)
{
    void *memory = malloc(size);
    CHECK(memory || !size);
    return memory;
}

/* Channels of a group. */
enum { CHANNELS = 3 };

/* ---- A group of threads ------------------------------------------------------------------------ */

struct group {
    uint32_t n, flat_max_ranks;
    size_t slot;
    char *base;
    pthread_barrier_t barrier;
};

struct rank {
    struct group *group;
    struct mpicoll_shared shared, channels[CHANNELS - 1];
    uint32_t number; /* of the last call */
    struct mpicoll_choices *choices; /* of all plans: the same calls on all ranks */
    uint32_t random;
};

/* Delays random ranks at random calls. */
static void delay(struct rank *rank)
{
    rank->random = rank->random * 1664525 + 1013904223;
    if (rank->random >> 30 == 0)
        usleep(rank->random >> 8 & 255);
}

static void set_up_channel(struct rank *rank, char *base, size_t stride, uint32_t me, uint32_t c)
{
    struct mpicoll_shared *channel = &rank->shared + c;
    /* Round and call numbers wrap around. */
    *channel = (struct mpicoll_shared){.base = base,
                                       .stride = stride,
                                       .first = &rank->shared,
                                       .channels = CHANNELS,
                                       .slot = rank->group->slot,
                                       .n = rank->group->n,
                                       .me = me,
                                       .round = START,
                                       .calls = START,
                                       .returned = START,
                                       .compared = START,
                                       .spin_count = me % 2 ? 50 : 0,
                                       .flat_max_ranks = rank->group->flat_max_ranks};
    struct header *mine = header(channel, me);
    for (int k = 0; k < MAX_RANK_BITS; k++) {
        atomic_store(&mine->ready[k].counter.value, START);
        for (int j = 0; j < RECORD_COUNT; j++)
            atomic_store(&mine->records[k][j].number.value, START);
    }
    atomic_store(&mine->combined.counter.value, START);
    for (int k = 0; k < 2; k++)
        atomic_store(&mine->announced[k].number.value, START);
}

static void run_ranks(uint32_t n, uint32_t flat_max_ranks, size_t slot, void *(*body)(void *))
{
    struct group group = {.n = n, .flat_max_ranks = flat_max_ranks, .slot = slot};
    const size_t channel_size = mpicoll_shared_region(slot, n);
    const size_t region_size = CHANNELS * channel_size;
    pthread_t threads[n];
    struct rank *ranks = allocate(n * sizeof *ranks);

    /* The page after the segment is inaccessible. */
    char *memory = mmap(NULL, n * region_size + PAGE, PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    CHECK(!mprotect(memory + n * region_size, PAGE, PROT_NONE));
    group.base = memory;
    CHECK(!pthread_barrier_init(&group.barrier, NULL, n));
    for (uint32_t me = 0; me < n; me++) {
        ranks[me] = (struct rank){.group = &group, .random = 7 * me + n};
        ranks[me].choices = calloc(1, sizeof *ranks[me].choices);
        CHECK(ranks[me].choices);
        ranks[me].choices->mode = flat_max_ranks == n ? AT_RANDOM : MEASURED;
        ranks[me].number = START;
        for (uint32_t c = 0; c < CHANNELS; c++)
            set_up_channel(&ranks[me], memory + c * channel_size, region_size, me, c);
    }
    for (uint32_t me = 0; me < n; me++)
        CHECK(!pthread_create(&threads[me], NULL, body, &ranks[me]));
    for (uint32_t me = 0; me < n; me++)
        CHECK(!pthread_join(threads[me], NULL));
    for (uint32_t me = 0; me < n; me++) { /* all ranks know the same durations */
        for (int k = 0; k < CLASS_COUNT; k++)
            CHECK(!memcmp(ranks[0].choices->of[k].ns, ranks[me].choices->of[k].ns,
                          offsetof(struct mpicoll_choice, pending_ns)) ||
                  ranks[me].shared.aborted);
    }
    for (uint32_t me = 0; me < n; me++)
        free(ranks[me].choices);
    pthread_barrier_destroy(&group.barrier);
    CHECK(!munmap(memory, n * region_size + PAGE));
    free(ranks);
}

/* ---- Collectives ------------------------------------------------------------------------------- */

/* Element of the block of rank `from` for rank `to`. */
static int32_t element(size_t from, size_t to, size_t i)
{
    return (int32_t)(1000 * from + to + 3 * i);
}

static struct mpicoll_plan plan_of(struct rank *rank, int combines)
{
    return (struct mpicoll_plan){
        .shared = &rank->shared,
        .choices = rank->number % 4 ? rank->choices : NULL,
        .signature = 7,
        .divisor = 1,
        .size = 4,
        .numbers_per_element = 1,
        .format = combines ? mpicoll_format("int32") : -1,
        .operation = SUM,
        .lazy = 1,
    };
}

enum layout { FROM_ROOT = 1, TO_ROOT = 2, MANY = 4, COMBINED = 8, IN_PLACE = 16, SCAN = 32 };

/* A collective of one layout, and its result. */
static void try_blocks(struct rank *rank, size_t count, int layout, size_t one_shot_max_bytes)
{
    const uint32_t n = rank->shared.n, me = rank->shared.me;
    const int has_src = layout & FROM_ROOT, has_dst = layout & TO_ROOT, many = layout & MANY;
    const int combines = layout & COMBINED, in_place = layout & IN_PLACE;
    const uint32_t root = has_src || has_dst ? (uint32_t)(count + 1) % n : 0;
    struct mpicoll_plan plan = plan_of(rank, combines);
    const size_t sent = many ? n : 1, got = has_src || combines ? 1 : n;
    const int gives = !has_src || me == root, takes = !has_dst || me == root;
    int32_t *send = gives ? allocate(sent * count * 4) : NULL;
    int32_t *recv = in_place ? send : takes ? allocate(got * count * 4) : NULL;

    plan.prefix = layout & SCAN ? 1 : 0;
    plan.many_blocks = many, plan.has_src = has_src, plan.has_dst = has_dst;
    plan.in_place = in_place, plan.one_shot_max_bytes = one_shot_max_bytes;
    for (size_t to = 0; gives && to < sent; to++)
        for (size_t i = 0; i < count; i++)
            send[to * count + i] = element(me, to, i);
    CHECK(mpicoll_shared_blocks(&plan, (char *)send, (char *)recv, count, root, ++rank->number));
    for (size_t from = 0; takes && from < got; from++)
        for (size_t i = 0; i < count; i++) {
            const size_t to = many ? me : 0;
            const size_t added = layout & SCAN ? me + 1 : n; /* ranks */
            const int32_t sum = (int32_t)(1000 * (added * (added - 1) / 2) + added * (to + 3 * i));
            const int32_t expected = combines ? sum : element(has_src ? root : from, to, i);
            CHECK(recv[from * count + i] == expected);
        }
    free(send);
    if (!in_place)
        free(recv);
}

/* all_to_all with different block sizes: rank r sends r + s + `count` elements to rank s. */
static void try_exchange(struct rank *rank, size_t count)
{
    const uint32_t n = rank->shared.n, me = rank->shared.me;
    struct mpicoll_plan plan = plan_of(rank, 0);
    struct mpicoll_block gives[n];
    struct mpicoll_get takes[n];
    int32_t *recv[n];

    for (uint32_t other = 0; other < n; other++) {
        const size_t length = me + other + count;
        int32_t *send = allocate(length * 4);
        for (size_t i = 0; i < length; i++)
            send[i] = element(me, other, i);
        recv[other] = allocate(length * 4);
        gives[other] = (struct mpicoll_block){(char *)send, length};
        takes[other] = (struct mpicoll_get){other, me, (char *)recv[other], length};
    }
    CHECK(mpicoll_shared_exchange(&plan, n, 2 * (n - 1) + count, gives, n, takes, n, 0,
                                  ++rank->number, count));
    for (uint32_t other = 0; other < n; other++) {
        for (size_t i = 0; i < me + other + count; i++)
            CHECK(recv[other][i] == element(other, me, i));
        free(gives[other].data);
        free(recv[other]);
    }
}

/* Several calls as one; each of `n_calls` has more elements than the previous one. */
static void try_fused(struct rank *rank, size_t n_calls, size_t more, int many_in, int combines,
                      int in_place)
{
    const uint32_t n = rank->shared.n, me = rank->shared.me;
    const size_t sent = many_in ? n : 1, got = many_in || in_place ? 1 : n;
    struct mpicoll_plan plan = plan_of(rank, combines);
    char *send[n * n_calls], *recv[n * n_calls], *from[n * n_calls], *to[n * n_calls];
    size_t ends[n_calls], before = 0;
    const uint64_t sizes = rank->number % 2 ? 0 : 77;

    plan.many_blocks = many_in, plan.in_place = in_place;
    plan.one_shot_max_bytes = rank->number % 3 ? 0 : SIZE_MAX;
    for (size_t k = 0; k < n_calls; before = ends[k++])
        ends[k] = before + k * more;
    for (size_t k = 0; k < n * n_calls; k++) {
        const size_t block = k / n_calls, call = k % n_calls, count = call * more;
        send[k] = allocate(count * 4 + 1);
        recv[k] = in_place && block == 0 ? send[k] : allocate(count * 4 + 1);
        for (size_t i = 0; i < count; i++)
            ((int32_t *)send[k])[i] = element(me + 7 * call, block, i);
    }
    memcpy(from, send, sizeof send), memcpy(to, recv, sizeof recv);
    CHECK(sent <= n && mpicoll_shared_fused(&plan, from, to, ends, n_calls, sizes, ++rank->number));
    rank->number += sizes != 0;
    for (size_t k = 0; k < got * n_calls; k++) {
        const size_t call = k % n_calls, to = many_in ? me : 0;
        for (size_t i = 0; i < call * more; i++) {
            const int32_t sum =
                (int32_t)(1000 * (n * (n - 1) / 2 + 7 * call * n) + n * (to + 3 * i));
            const int32_t moved = element(k / n_calls + 7 * call, to, i);
            CHECK(((int32_t *)recv[k])[i] == (combines ? sum : moved));
        }
    }
    for (size_t k = 0; k < n * n_calls; k++) {
        if (recv[k] != send[k])
            free(recv[k]);
        free(send[k]);
    }
}

/* A result that is written past the caches may begin at any address. */
static void copy_large(struct rank *rank, size_t offset)
{
    const uint32_t n = rank->shared.n, me = rank->shared.me;
    const size_t size = (32 << 20) / n + 100;
    struct mpicoll_plan plan = plan_of(rank, 0);
    char *send = allocate(size), *recv = allocate(n * size + offset);

    plan.size = 1;
    memset(send, (int)me + 1, size);
    CHECK(mpicoll_shared_blocks(&plan, send, recv + offset, size, 0, ++rank->number));
    for (uint32_t from = 0; from < n; from++)
        for (size_t i = 0; i < size; i += i + 997 < size ? 997 : 1)
            CHECK(recv[offset + from * size + i] == (char)(from + 1));
    free(send);
    free(recv);
}

/* A collective mismatch is detected on all ranks, and the next call succeeds. */
static void differ(struct rank *rank)
{
    const uint32_t n = rank->shared.n, me = rank->shared.me;
    struct mpicoll_plan plan = plan_of(rank, 1);
    int32_t array[6] = {0};
    uint64_t signature, count;

    plan.in_place = 1;
    rank->number++;
    if (n == 1)
        return;
    const uint32_t odd = rank->number % n; /* alternately */
    if (me == odd)
        CHECK(!mpicoll_shared_compare(&rank->shared, rank->number, 9, 11));
    else
        CHECK(!mpicoll_shared_blocks(&plan, NULL, (char *)array, 6, 0, rank->number));
    for (uint32_t other = 0; other < n; other++) {
        CHECK(mpicoll_shared_mismatch(&rank->shared) == rank->shared.calls);
        CHECK(mpicoll_shared_call(&rank->shared, other, rank->shared.calls, &signature, &count));
        CHECK(signature == (other == odd ? 9 : 7));
        CHECK(count == (other == odd ? 11 : 6));
    }
}

static void *run_collectives(void *argument)
{
    struct rank *rank = argument;
    const uint32_t n = rank->shared.n;
    const size_t slot = rank->group->slot;
    const size_t counts[] = {1, 7, slot / 4, slot / 4 + 1, 3 * slot + 5, 0, 2 * n + 1};

    for (size_t k = 0; k < sizeof counts / sizeof *counts; k++)
        for (size_t one_shot_max_bytes = 0; one_shot_max_bytes < 2; one_shot_max_bytes++) {
            delay(rank);
            try_blocks(rank, counts[k], COMBINED | IN_PLACE, one_shot_max_bytes << 40);
            try_fused(rank, k + 1, counts[k] / 2, 0, 1, 1);
        }
    if (slot / n < LINE) /* the slots are too small for a block of each rank */
        return NULL;
    for (size_t k = 0; k < 2 * ROUNDS; k++) {
        const size_t count = k % 4 == 3 ? slot / 8 + k : 5 * k;
        delay(rank);
        /* Calls that are announced before they begin, or not; the last calls never begin. */
        if (k % 3 == 0)
            mpicoll_shared_all_entered(&rank->shared, ++rank->number, 7, count, k % 2 ? 0 : 20000);
        CHECK(mpicoll_shared_compare(&rank->shared, ++rank->number, 3, k));
        try_blocks(rank, count, FROM_ROOT, 0); /* broadcast */
        try_blocks(rank, count, TO_ROOT | COMBINED, 0); /* reduce */
        try_blocks(rank, count, 0, 0); /* all_gather */
        delay(rank);
        try_blocks(rank, count, TO_ROOT, 0); /* gather */
        try_blocks(rank, count, FROM_ROOT | MANY, 0); /* scatter */
        try_blocks(rank, count, MANY | COMBINED, 0); /* reduce_scatter */
        try_blocks(rank, count, MANY, 0); /* all_to_all */
        try_exchange(rank, count);
        delay(rank);
        try_fused(rank, k % 6 + 1, count, 0, 1, 1); /* all_reduce */
        try_fused(rank, k % 5 + 1, count, 0, 0, 0); /* all_gather */
        try_fused(rank, k % 4 + 1, count, 1, 1, 0); /* reduce_scatter */
        differ(rank);
    }
    return NULL;
}

/* Calls that do not wait for all ranks, without any that does: small and large ones, in random
 * order. After one that does not match, no rank makes more than MAX_LEAD + 2 further calls. */
static void *run_lazy(void *argument)
{
    static const int layouts[] = {FROM_ROOT, TO_ROOT | COMBINED, TO_ROOT, FROM_ROOT | MANY,
                                  COMBINED | SCAN};
    struct rank *rank = argument;
    struct mpicoll_shared *shared = &rank->shared;
    uint32_t choice = 1, call, calls = 0;
    uint64_t signature, count;
    int32_t number = 5;

    for (size_t k = 0; k < 20 * ROUNDS; k++) {
        choice = choice * 1664525 + 1013904223; /* the same on all ranks */
        delay(rank);
        try_blocks(rank, choice >> 28 ? choice >> 22 & 63 : 3 * SMALL_SLOT_BYTES + 5,
                   layouts[(choice >> 16) % (sizeof layouts / sizeof *layouts)], 0);
    }
    const uint32_t last = shared->calls;
    struct mpicoll_plan plan = plan_of(rank, 0);
    plan.choices = NULL;
    plan.has_src = 1;
    plan.signature = shared->me == shared->n - 1 ? 8 : 7;
    for (; shared->n > 1 && calls < 100; calls++, plan.signature = 7) {
        if (!mpicoll_shared_blocks(&plan, (char *)&number, (char *)&number, 1, 0, ++rank->number))
            break;
    }
    if (shared->n == 1)
        return NULL;
    CHECK(calls <= MAX_LEAD + 2 && mpicoll_shared_is_mismatched(shared));
    call = mpicoll_shared_mismatch(shared);
    CHECK(call == last + 1);
    for (uint32_t other = 0; other < shared->n; other++)
        if (mpicoll_shared_call(shared, other, call, &signature, &count))
            CHECK(signature == (other == shared->n - 1 ? 8 : 7) && count == 1);
    return NULL;
}

static void *run_large(void *argument)
{
    static const int layouts[] = {COMBINED | IN_PLACE, FROM_ROOT, TO_ROOT | COMBINED, TO_ROOT, 0,
                                  FROM_ROOT | MANY,    MANY,      MANY | COMBINED, COMBINED | SCAN};
    struct rank *rank = argument;

    copy_large(rank, 0);
    copy_large(rank, 3);
    for (size_t k = 0; k < 4 * sizeof layouts / sizeof *layouts; k++) {
        delay(rank);
        try_blocks(rank, 100000 + k, layouts[k / 4], 0);
    }
    CHECK(rank->channels[0].calls - START > 3 && rank->channels[0].calls - START < 33);
    return NULL;
}

/* Ranks that announce calls without running them: nothing synchronizes them. */
static void *run_asks(void *argument)
{
    struct rank *rank = argument;
    int agreed_on = 0;

    for (uint64_t k = 0; k < 2000; k++)
        agreed_on += mpicoll_shared_all_entered(&rank->shared, ++rank->number, 7, k, 0);
    pthread_barrier_wait(&rank->group->barrier);
    CHECK(agreed_on <= 2000);
    CHECK(mpicoll_shared_all_entered(&rank->shared, ++rank->number, 7, 5, (uint64_t)60e9));
    pthread_barrier_wait(&rank->group->barrier);
    if (rank->shared.n > 1) /* rank 0 announces another call */
        CHECK(!mpicoll_shared_all_entered(&rank->shared, ++rank->number, 7, !rank->shared.me,
                                  (uint64_t)60e9));
    return NULL;
}

static void *abort_later(void *argument)
{
    usleep(20000);
    atomic_store(&((struct rank *)argument)->shared.aborted, 1);
    return NULL;
}

/* The last rank never calls; the other ranks are aborted. */
static void *run_left(void *argument)
{
    struct rank *rank = argument;
    pthread_t aborter;

    if (rank->shared.me == rank->shared.n - 1)
        return NULL;
    CHECK(!pthread_create(&aborter, NULL, abort_later, rank));
    CHECK(!mpicoll_shared_compare(&rank->shared, START + 1, 7, 7));
    CHECK(!pthread_join(aborter, NULL));
    return NULL;
}

/* ---- Choices of ways --------------------------------------------------------------------------- */

/* Makes a call of `bytes` bytes whose trial takes `ns[way]` on the slowest rank; returns its way. */
static int make_call(struct mpicoll_choices *choices, size_t bytes, int allowed, const uint32_t *ns)
{
    const struct mpicoll_trial trial = mpicoll_choose(choices, bytes, 0, allowed);
    mpicoll_trial_agreed(&trial, trial.note);
    mpicoll_trial_end(&trial, 0);
    if (trial.is_timed)
        trial.choice->pending_ns = ns[trial.way];
    return trial.way;
}

/* The fastest of three ways is used after 7 calls, is measured again ever more rarely, and is
 * replaced if it becomes slower than another one. One interrupted trial does not change the choice. */
static void choose_ways(void)
{
    enum { BYTES = 1 << 20, ALLOWED = STREAM_SLOTS | BY_KERNEL };
    struct mpicoll_choices *choices = calloc(1, sizeof *choices);
    uint32_t ns[16] = {[0] = 300, [STREAM_SLOTS] = 200, [BY_KERNEL] = 400};
    int counts[16] = {0};

    CHECK(choices);
    CHECK(mpicoll_choose(NULL, BYTES, 0, ALLOWED).way == BY_KERNEL); /* the default */
    CHECK(mpicoll_choose(NULL, BYTES / 4, 0, ALLOWED).way == 0);
    for (int k = 0; k < 7; k++)
        counts[make_call(choices, BYTES, ALLOWED, ns)]++;
    CHECK(counts[0] == 2 && counts[STREAM_SLOTS] == 2 && counts[BY_KERNEL] == 3);
    for (int k = 0; k < 40; k++)
        CHECK(make_call(choices, BYTES, ALLOWED, ns) == STREAM_SLOTS);
    ns[STREAM_SLOTS] = 10000; /* interrupted once */
    while (make_call(choices, BYTES, ALLOWED, ns) != BY_KERNEL)
        ;
    ns[STREAM_SLOTS] = 200;
    CHECK(make_call(choices, BYTES, ALLOWED, ns) == BY_KERNEL); /* timed after the one before */
    for (int k = 0; k < 40; k++)
        CHECK(make_call(choices, BYTES, ALLOWED, ns) == STREAM_SLOTS);
    memset(counts, 0, sizeof counts);
    for (int k = 0; k < 10000; k++)
        counts[make_call(choices, BYTES, ALLOWED, ns)]++;
    CHECK(counts[0] == counts[BY_KERNEL] && counts[0] >= 8 && counts[0] <= 16);
    ns[0] = 100; /* another way is now faster */
    for (int k = 0; k < 2560 + 3 * 40 + 160; k++)
        make_call(choices, BYTES, ALLOWED, ns);
    for (int k = 0; k < 40; k++)
        CHECK(make_call(choices, BYTES, ALLOWED, ns) == 0);
    memset(choices, 0, sizeof *choices);
    ns[BY_KERNEL] = 1000; /* slow: it takes part in one of four series after the first */
    memset(counts, 0, sizeof counts);
    for (int k = 0; k < 10000; k++)
        counts[make_call(choices, BYTES, ALLOWED, ns)]++;
    CHECK(counts[STREAM_SLOTS] >= 12 && counts[BY_KERNEL] == 7);
    choices->mode = AT_RANDOM;
    memset(counts, 0, sizeof counts);
    for (int k = 0; k < 300; k++)
        counts[make_call(choices, BYTES, ALLOWED, ns)]++;
    CHECK(counts[0] > 50 && counts[STREAM_SLOTS] > 50 && counts[BY_KERNEL] > 50);
    choices->mode = FORCED + BY_KERNEL;
    for (int k = 0; k < 300; k++)
        CHECK(make_call(choices, BYTES, ALLOWED, ns) == BY_KERNEL);
    free(choices);
}

/* ---- Calls of MPI ----------------------------------------------------------------------------- */

static int write_result(const void *send, void *recv, int count, void *type, void *op, void *comm)
{
    (void)type, (void)op, (void)comm;
    memcpy(recv, send, (size_t)count * sizeof(float));
    return 0;
}

/* An undefined result, as of the first rank's exscan, does not reach the output. */
static void discard_result(void)
{
    float given[] = {1, 2}, kept[] = {5, 6};
    const struct mpicoll_block send = {(char *)given, 2}, recv = {(char *)kept, 2};
    const struct mpicoll_mpi_plan plan = {
        .function = write_result, .type = COMBINE, .size = 4, .divisor = 4, .discards = 1};

    CHECK(mpicoll_mpi_call(&plan, &send, &recv, 2, 0, 0) == 1 && kept[0] == 5 && kept[1] == 6);
}

/* ---- The timeout of MPI_Init ------------------------------------------------------------------ */

/* Neither a long text nor a large number of ranks overflows the buffer. */
static void limit(void)
{
    static char text[1 << 16], before[6000];
    const size_t lengths[] = {8, 4000, 4008, 4016, sizeof before - 1};

    for (size_t k = 0; k < sizeof lengths / sizeof *lengths; k++) {
        int output[2], begun[2], cancel[2], status;
        size_t used = 0;

        memset(before, 'x', lengths[k]);
        CHECK(!pipe(output) && !pipe(begun) && !pipe(cancel));
        const pid_t child = fork();
        CHECK(child >= 0);
        if (!child) {
            dup2(output[1], STDERR_FILENO);
            mpicoll_init_timeout(begun[1], cancel[0], 1, before, "; the end\n", "mpicoll-sanitize",
                                 5000, 1);
            _exit(3);
        }
        close(output[1]);
        for (ssize_t got; (got = read(output[0], text + used, sizeof text - 1 - used)) > 0;)
            used += (size_t)got;
        text[used] = 0;
        CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status));
        CHECK(WEXITSTATUS(status) == 1 && used <= 4096 && strstr(text, "; the end\n"));
    }
}

int main(void)
{
    const uint32_t sizes[] = {1, 2, 3, 5, 8, 13};

    alarm(LIMIT_SECONDS); /* a deadlock */
    choose_ways();
    discard_result();
    limit();
    for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
        const uint32_t n = sizes[k];
        for (uint32_t flat_max_ranks = 0; flat_max_ranks <= n; flat_max_ranks += n) {
            run_ranks(n, flat_max_ranks, 64, run_collectives);
            run_ranks(n, flat_max_ranks, 640, run_collectives);
            run_ranks(n, flat_max_ranks, 4096, run_collectives);
        }
        run_ranks(n, n, 4096, run_asks);
        run_ranks(n, n, 4096, run_lazy);
    }
    run_ranks(2, 2, 65536, run_large);
    run_ranks(3, 3, 65536, run_large);
    run_ranks(3, 3, 4096, run_left);
    run_ranks(7, 0, 4096, run_left);
    puts("threads as ranks, calls of MPI, the time limit: passed");
    return 0;
}
