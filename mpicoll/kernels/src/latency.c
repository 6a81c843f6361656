/* How far the processors of two ranks are apart: the time that a cache line takes from one to the
 * other. Within one last-level cache it is some 25 to 60 ns, between two of them 80 to 200. What the
 * system says of its caches need not be true, in virtual machines above all, whose processors also
 * move: so it is measured.
 *
 * This is plain C for ctypes: it does not include Python.h and defines no module.
 */

#include "kernels.h"

#include <time.h>

/* The fastest batch counts: others may have been interrupted. */
enum { BATCHES = 3, TURNS = 4 };

/* Values of a rank's number during a measurement: one for the meeting, one for each turn, and one
 * that says that the rank does not answer any more. */
enum { VALUES = BATCHES * TURNS + 2 };

static uint64_t now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000 + (uint64_t)time.tv_nsec;
}

/* Waits for a value for some nanoseconds. 0 if it does not come in time, or the rank gave up. */
static int comes(const atomic_uint *number, uint32_t value, uint64_t patience)
{
    uint64_t end = 0;
    for (uint32_t looks = 1;; looks++) {
        const uint32_t seen = atomic_load_explicit(number, memory_order_acquire);
        if (seen == value)
            return 1;
        if ((int32_t)(seen - value) > 0)
            return 0;
        if (looks % 64 == 0) {
            if (end == 0)
                end = now() + patience;
            else if (now() > end)
                return 0;
        }
    }
}

static int turn(atomic_uint *mine, const atomic_uint *other, int leads, uint32_t value,
                uint64_t patience)
{
    if (leads)
        atomic_store_explicit(mine, value, memory_order_release);
    if (!comes(other, value, patience))
        return 0;
    if (!leads)
        atomic_store_explicit(mine, value, memory_order_release);
    return 1;
}

/* Nanoseconds from one rank to the other, which calls at the same time; 0 if it does not within
 * `patience` nanoseconds, or is interrupted.
 *
 * mine, other: a number that each of both writes, on cache lines of their own, at first 0.
 * leads:       1 on one of both.
 * measurement: the number of this measurement between both, from 0 on. */
EXPORT uint32_t mpicoll_latency(atomic_uint *mine, const atomic_uint *other, int leads,
                                uint32_t measurement, uint64_t patience)
{
    uint64_t least = UINT64_MAX;
    uint32_t value = measurement * VALUES + 1;
    int answers = turn(mine, other, leads, value, patience);

    for (int batch = 0; answers && batch < BATCHES; batch++) {
        const uint64_t start = now();
        for (int i = 0; answers && i < TURNS; i++)
            answers = turn(mine, other, leads, ++value, patience);
        const uint64_t took = now() - start;
        least = took < least ? took : least;
    }
    if (!answers) {
        atomic_store_explicit(mine, (measurement + 1) * VALUES, memory_order_release);
        return 0;
    }
    return (uint32_t)(least / TURNS / 2);
}

/* What counts as far, for those who cannot read kernels.h. */
EXPORT uint32_t mpicoll_far(void)
{
    return FAR;
}
