/* Latency between the processors of two ranks: the time that a cache line takes between them. It is
 * about 25 to 60 ns within one last-level cache and 80 to 200 ns between two. It is measured
 * because the system's description of its caches may be wrong, especially in virtual machines,
 * whose processors also move. */

#include "kernels.h"

/* The fastest batch counts: slower batches may have been interrupted. */
enum { BATCH_COUNT = 3, TURN_COUNT = 4 };

/* Values of a rank's number during one measurement: one to start, one for each turn, and one that
 * says that the rank no longer answers. */
enum { VALUE_COUNT = BATCH_COUNT * TURN_COUNT + 2 };

/* Waits for a value. Returns 0 after a timeout, or if the rank no longer answers. */
static int wait_for_value(const atomic_uint *number, uint32_t value, uint64_t timeout_ns)
{
    uint64_t end = 0;
    for (uint32_t polls = 1;; polls++) {
        const uint32_t seen = atomic_load_explicit(number, memory_order_acquire);
        if (seen == value)
            return 1;
        if ((int32_t)(seen - value) > 0)
            return 0;
        if (polls % 64 == 0) {
            if (end == 0)
                end = now_ns() + timeout_ns;
            else if (now_ns() > end)
                return 0;
        }
    }
}

static int turn(atomic_uint *mine, const atomic_uint *other, int leads, uint32_t value,
                uint64_t timeout_ns)
{
    if (leads)
        atomic_store_explicit(mine, value, memory_order_release);
    if (!wait_for_value(other, value, timeout_ns))
        return 0;
    if (!leads)
        atomic_store_explicit(mine, value, memory_order_release);
    return 1;
}

/* Returns the latency in nanoseconds to another rank, which calls this function at the same time; 0
 * if it does not answer within `timeout_ns`, or if a rank is interrupted.
 *
 * mine, other: a number written by each rank, on separate cache lines, initially 0.
 * leads:       1 on one of the two ranks.
 * measurement: the number of this measurement between the two ranks, from 0 on. */
EXPORT uint32_t mpicoll_latency(atomic_uint *mine, const atomic_uint *other, int leads,
                                uint32_t measurement, uint64_t timeout_ns)
{
    uint64_t least = UINT64_MAX;
    uint32_t value = measurement * VALUE_COUNT + 1;
    int answering = turn(mine, other, leads, value, timeout_ns);

    for (int batch = 0; answering && batch < BATCH_COUNT; batch++) {
        const uint64_t start = now_ns();
        for (int i = 0; answering && i < TURN_COUNT; i++)
            answering = turn(mine, other, leads, ++value, timeout_ns);
        const uint64_t took = now_ns() - start;
        least = took < least ? took : least;
    }
    if (!answering) {
        atomic_store_explicit(mine, (measurement + 1) * VALUE_COUNT, memory_order_release);
        return 0;
    }
    return (uint32_t)(least / TURN_COUNT / 2);
}
