/* Choices between ways of running a call that give the same bits, by timing real calls.
 *
 * Which way is fastest depends on the machine: on its caches, on the placement of the ranks, on the
 * kernel. So each plan times its candidates for each size class (powers of two of bytes) in series:
 * one after its first call, then one after a number of calls that grows from FIRST_INTERVAL to
 * LAST_INTERVAL, because virtual processors and unbound processes move. The number is FIRST_INTERVAL
 * again after a duration that differs from the median by a factor of 2. The candidate with the least
 * median of its last TRIAL_COUNT durations is used.
 *
 * A call leaves its slots or its result in the caches, or evicts them, and the first one waits for
 * new pages. So each candidate makes two calls in turn, and the second is timed. A candidate that was
 * timed twice and whose median is more than NEAR times the least takes part only in every
 * ALL_EVERY-th series, because it costs most.
 *
 * All ranks must choose the same way. So a choice depends only on the number of earlier calls, which
 * is the same on all ranks, and on durations that all ranks know: the signals of a call's first
 * round carry each rank's duration of the trial before, and every rank records the maximum. A call
 * that ends with a collective mismatch changes nothing.
 *
 * The clock of a rank stops while it waits in the first round, so that late ranks do not count. */

#include "choice.h"
#include "kernels.h"

enum { TRIAL_COUNT = 5, NEAR = 2, ALL_EVERY = 4 };
enum { FIRST_INTERVAL = 40, INTERVAL_GROWTH = 4, LAST_INTERVAL = 2560 };

/* Bytes from which the way is chosen. Smaller calls are shorter than the clock's resolution. */
enum { MIN_BYTES = 2048 };

#define NO_LIMIT SIZE_MAX

/* Bounds of the sizes for which MPI's own call is tried. Below, comparing the calls first takes as
 * long as the call. Above, MPI libraries may allocate as much memory as the arrays have, and copies
 * from and to memory determine the time of every way. */
enum { MPI_MIN_BYTES = 8 << 10, MPI_END_BYTES = 32 << 20 };

/* The candidates: a way, the bytes from which and below which it is tried, and the bytes from which
 * it is the default, instead of the candidates above it. Measurement overrides the defaults. */
static const struct candidate {
    int way;
    size_t min, end, default_from;
} candidates[] = {
    {0, 0, NO_LIMIT, 0},
    {ONE_SHOT, 0, 128 << 10, NO_LIMIT}, /* the default up to `one_shot` */
    {STREAM_SLOTS, 32 << 10, NO_LIMIT, NO_LIMIT},
    {STREAM_OUT, 8 << 20, NO_LIMIT, 32 << 20},
    {STREAM_SLOTS | STREAM_OUT, 8 << 20, NO_LIMIT, NO_LIMIT},
    {BY_KERNEL, 16 << 10, NO_LIMIT, 512 << 10},
    {PARALLEL, 256 << 10, NO_LIMIT, 1 << 20},
    {BY_MPI, MPI_MIN_BYTES, MPI_END_BYTES, NO_LIMIT},
};
enum { CANDIDATE_COUNT = sizeof candidates / sizeof *candidates, CLASS_COUNT = 40 };

struct mpicoll_choice {
    uint32_t ns[CANDIDATE_COUNT][TRIAL_COUNT]; /* durations of the last trials, in a ring */
    uint32_t trials[CANDIDATE_COUNT];          /* so far */
    uint32_t median[CANDIDATE_COUNT];
    uint32_t calls;      /* so far */
    uint32_t next;       /* the series begins after this call */
    uint32_t interval;   /* calls until the next series */
    uint32_t series;     /* so far */
    uint32_t done;       /* candidates, by bit, that the series has timed */
    uint32_t is_warm;    /* the call before the next one was made by the same candidate */
    uint32_t pending;    /* 1 + candidate of a trial whose duration the ranks have not exchanged */
    uint32_t pending_ns; /* its duration on this rank */
};

/* How a plan chooses: by measurement, and for tests at random or `FORCED + way`, where that way is
 * a candidate. */
enum { MEASURED, AT_RANDOM, FORCED };

/* The choices of a plan, initially 0 but for `mode`; mpicoll/routes/host/ways.py has it. */
struct mpicoll_choices {
    uint32_t mode;
    struct mpicoll_choice of[CLASS_COUNT];
};

EXPORT size_t mpicoll_choices_size(void)
{
    return sizeof(struct mpicoll_choices);
}

static int is_candidate(uint32_t index, size_t bytes, int allowed)
{
    const struct candidate *candidate = &candidates[index];
    return !(candidate->way & ~allowed) && candidate->min <= bytes && bytes < candidate->end;
}

static uint32_t default_candidate(size_t bytes, size_t one_shot, int allowed)
{
    uint32_t found = 0;
    for (uint32_t k = 0; k < CANDIDATE_COUNT; k++)
        if (!(candidates[k].way & ~allowed) &&
            (candidates[k].way == ONE_SHOT ? bytes <= one_shot : bytes >= candidates[k].default_from))
            found = k;
    return found;
}

static uint32_t class_of(size_t bytes)
{
    uint32_t class = 0;
    while (bytes >> (class + 1) && class < CLASS_COUNT - 1)
        class++;
    return class;
}

/* Returns the candidate, by bit, with the least median; 0: none was timed. */
static uint32_t fastest(const struct mpicoll_choice *choice, uint32_t candidates_by_bit)
{
    uint32_t least = UINT32_MAX, found = 0;
    for (uint32_t k = 0; k < CANDIDATE_COUNT; k++)
        if (candidates_by_bit >> k & 1 && choice->trials[k] && choice->median[k] < least) {
            least = choice->median[k];
            found = 1u << k;
        }
    return found;
}

/* Returns the candidates, by bit, that take part in the current series. */
static uint32_t in_series(const struct mpicoll_choice *choice, uint32_t found)
{
    const uint32_t best = choice->series % ALL_EVERY ? fastest(choice, found) : 0;
    for (uint32_t k = 0; k < CANDIDATE_COUNT && best; k++)
        if (choice->trials[k] > 1 && choice->median[k] / NEAR > choice->median[__builtin_ctz(best)])
            found &= ~(1u << k);
    return found;
}

/* Chooses among candidates, by bit: the next one of a series of trials, or the fastest. */
static void choose(struct mpicoll_trial *trial, uint32_t found, uint32_t mode)
{
    const struct mpicoll_choice *choice = trial->choice;
    const int is_due = choice->calls > choice->next;
    uint32_t left = is_due && mode == MEASURED ? in_series(choice, found) & ~choice->done : 0;

    if (mode >= FORCED) {
        for (uint32_t k = 0; k < CANDIDATE_COUNT; k++)
            if (found >> k & 1 && candidates[k].way == (int)(mode - FORCED))
                left = 1u << k;
    } else if (mode == AT_RANDOM) {
        uint32_t skipped =
            (choice->calls * 2654435761u >> 16) % (uint32_t)__builtin_popcount(found);
        for (left = found; skipped; skipped--)
            left &= left - 1;
    } else if (left) {
        trial->in_series = 1;
        trial->is_timed = choice->is_warm;
        trial->is_last = trial->is_timed && !(left & (left - 1));
    } else {
        trial->is_last = is_due;
        left = fastest(choice, found);
    }
    if (left)
        trial->candidate = (uint32_t)__builtin_ctz(left);
}

struct mpicoll_trial mpicoll_choose(struct mpicoll_choices *choices, size_t bytes, size_t one_shot,
                                    int allowed)
{
    struct mpicoll_trial trial = {0};
    uint32_t found = 0;

    if (bytes < MIN_BYTES) { /* the default */
        trial.way = bytes <= one_shot ? allowed & ONE_SHOT : 0;
        return trial;
    }
    trial.candidate = default_candidate(bytes, one_shot, allowed);
    if (choices)
        for (uint32_t k = 0; k < CANDIDATE_COUNT; k++)
            if (is_candidate(k, bytes, allowed))
                found |= 1u << k;
    if (found & (found - 1)) {
        const uint32_t class = class_of(bytes);
        trial.choice = &choices->of[class];
        trial.note = trial.choice->pending_ns;
        trial.scale = (double)((size_t)1 << class) / (double)bytes;
        choose(&trial, found, choices->mode);
        trial.has_note = trial.is_timed || trial.choice->pending;
        trial.start = trial.is_timed ? now_ns() : 0;
    }
    trial.way = candidates[trial.candidate].way;
    return trial;
}

/* Records a duration and updates the candidate's median; of an even number, the smaller one. */
static void record(struct mpicoll_choice *choice, uint32_t k, uint32_t ns)
{
    const uint64_t before = choice->median[k];
    uint32_t sorted[TRIAL_COUNT];
    choice->ns[k][choice->trials[k]++ % TRIAL_COUNT] = ns;
    const uint32_t n = choice->trials[k] < TRIAL_COUNT ? choice->trials[k] : TRIAL_COUNT;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t at = i;
        for (; at && sorted[at - 1] > choice->ns[k][i]; at--)
            sorted[at] = sorted[at - 1];
        sorted[at] = choice->ns[k][i];
    }
    choice->median[k] = sorted[(n - 1) / 2];
    if (before && (ns > 2 * before || ns < before / 2)) {
        /* The machine may have changed: measure again soon. */
        choice->interval = FIRST_INTERVAL / INTERVAL_GROWTH;
        choice->series = ALL_EVERY - 1;
        if (choice->next > choice->calls + FIRST_INTERVAL)
            choice->next = choice->calls + FIRST_INTERVAL;
    }
}

/* Ends a series of trials and schedules the next one. */
static void end_series(struct mpicoll_choice *choice)
{
    choice->series++;
    choice->interval = choice->interval ? choice->interval * INTERVAL_GROWTH : FIRST_INTERVAL;
    if (choice->interval > LAST_INTERVAL)
        choice->interval = LAST_INTERVAL;
    choice->next = choice->calls + choice->interval;
    choice->done = 0;
}

void mpicoll_trial_agreed(const struct mpicoll_trial *trial, uint32_t note)
{
    struct mpicoll_choice *choice = trial->choice;
    if (!choice)
        return;
    if (choice->pending)
        record(choice, choice->pending - 1, note);
    choice->pending = choice->pending_ns = 0;
    choice->calls++;
    choice->is_warm = trial->in_series && !trial->is_timed;
    if (trial->is_timed)
        choice->done |= 1u << trial->candidate;
    if (trial->is_last)
        end_series(choice);
}

void mpicoll_trial_pause(struct mpicoll_trial *trial)
{
    if (trial->is_timed)
        trial->paused = now_ns();
}

void mpicoll_trial_resume(struct mpicoll_trial *trial)
{
    if (trial->is_timed)
        trial->start += now_ns() - trial->paused;
}

void mpicoll_trial_end(const struct mpicoll_trial *trial, int failed)
{
    if (!trial->choice || (!trial->is_timed && !failed))
        return;
    const double ns = (double)(now_ns() - trial->start) * trial->scale;
    trial->choice->pending = trial->candidate + 1;
    trial->choice->pending_ns = failed || ns > UINT32_MAX ? UINT32_MAX : 1 + (uint32_t)ns;
}

/* Reads the result for calls of `bytes` bytes: the way of a candidate and its median duration, 0 if
 * it was not measured. Returns 0 after the last candidate. */
EXPORT int mpicoll_choice_read(const struct mpicoll_choices *choices, size_t bytes,
                               uint32_t candidate, int32_t *way, uint32_t *ns)
{
    if (candidate >= CANDIDATE_COUNT)
        return 0;
    *way = candidates[candidate].way;
    *ns = choices->of[class_of(bytes)].median[candidate];
    return 1;
}

/* Sets the duration of a way that an earlier job has measured, before the first call of `bytes`
 * bytes. The first series of trials follows after some calls. */
EXPORT void mpicoll_choice_set(struct mpicoll_choices *choices, size_t bytes, int32_t way,
                               uint32_t ns)
{
    struct mpicoll_choice *choice = &choices->of[class_of(bytes)];
    for (uint32_t k = 0; k < CANDIDATE_COUNT; k++)
        if (candidates[k].way == way) {
            choice->ns[k][0] = choice->median[k] = ns;
            choice->trials[k] = 1;
            choice->next = choice->interval = FIRST_INTERVAL;
        }
}
