/* The execution of a launch, in the calling thread.
 *
 * The threads of a block take turns: each runs until it waits or exits. Blocks run in sequence.
 * If the kernel waits for memory, they run by turns, because another block may write it. */
#include "device.h"
#include "kernel.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define WARP 32
/* Number of turns without progress before the thread sleeps. */
#define BUSY_TURNS 64
#define SLEEP_US 50

/* A block whose threads wait for each other. */
struct active_block {
    struct block block;
    char *frames;
    uint32_t live; /* threads that have not exited */
};

struct execution {
    const struct launch *launch;
    const struct kernel *kernel;
    uint32_t threads;
    size_t frame_bytes;
    cudaError_t error;
};

/* Write the coordinates of a thread or block with a number. */
static void write_index(uint32_t index[3], uint64_t number, const uint32_t size[3])
{
    index[0] = (uint32_t)(number % size[0]);
    index[1] = (uint32_t)(number / size[0] % size[1]);
    index[2] = (uint32_t)(number / size[0] / size[1]);
}

static void init_thread(const struct execution *run, struct thread *thread, uint32_t number)
{
    *thread = (struct thread){.state = YIELDED, .number = number};
    write_index(thread->index, number, run->launch->block_dim);
}

static void init_block(const struct execution *run, struct block *block, uint64_t number)
{
    const struct launch *const launch = run->launch;

    memcpy(block->block_dim, launch->block_dim, sizeof block->block_dim);
    memcpy(block->grid_dim, launch->grid_dim, sizeof block->grid_dim);
    write_index(block->index, number, launch->grid_dim);
    block->parameters = (char *)launch->parameters;
    block->globals = launch->globals;
    block->shared_bytes = run->kernel->shared_bytes + launch->dynamic_shared_bytes;
    block->dynamic_shared_bytes = launch->dynamic_shared_bytes;
}

static void report_fault(struct execution *run, const struct thread *thread)
{
    run->error = (cudaError_t)thread->fault;
    fprintf(stderr, "emulated GPU: kernel %s, thread %u: %s at address %#lx: %s\n",
            run->kernel->name, thread->number, cudaGetErrorName(run->error),
            (unsigned long)thread->fault_address, thread->fault_instruction);
}

/* ---- barriers ---- */

static struct thread *thread_of(const struct execution *run, const struct active_block *active,
                                uint32_t number)
{
    return (struct thread *)(active->frames + number * run->frame_bytes);
}

/* Set the result of a thread's shuffle: the operand of another thread of the warp from `start` on. */
static void shuffle(const struct execution *run, struct active_block *active, uint32_t start,
                    struct thread *thread)
{
    const uint32_t lane = thread->number - start, step = thread->step & 31;
    const uint32_t clamp = thread->clamp & 31, segment = thread->clamp >> 8 & 31;
    const uint32_t last = (lane & segment) | (clamp & ~segment);
    uint32_t source = (lane & segment) | (step & ~segment);

    if (thread->shuffle == UP)
        source = lane - step;
    else if (thread->shuffle != IDX)
        source = thread->shuffle == DOWN ? lane + step : lane ^ step;
    thread->predicate = thread->shuffle == UP ? (int)source >= (int)last : source <= last;
    source = start + (thread->predicate ? source : lane);
    thread->result = (int)thread_of(run, active, source < run->threads ? source : thread->number)
                         ->operand;
    thread->shuffle = NONE;
}

/* Release some threads of a block, from `start` on, if all that have not exited wait for each other
 * in the same state. Returns whether they did. */
static int release(const struct execution *run, struct active_block *active, uint32_t start,
                   uint32_t count, int state)
{
    const uint32_t end = start + count < run->threads ? start + count : run->threads;
    int waiting = 0, set = 0;

    for (uint32_t i = start; i < end; i++) {
        const struct thread *const thread = thread_of(run, active, i);
        if (thread->state != state && thread->state != EXITED)
            return 0;
        waiting |= thread->state == state;
        set |= thread->state == state && thread->predicate;
    }
    for (uint32_t i = start; waiting && i < end; i++) {
        struct thread *const thread = thread_of(run, active, i);
        thread->result = set;
        if (thread->shuffle)
            shuffle(run, active, start, thread);
        thread->state = thread->state == state ? YIELDED : thread->state;
    }
    return waiting;
}

/* ---- blocks ---- */

enum progress { STUCK, POLLED, ADVANCED };

/* Give each thread of a block a turn. */
static enum progress run_turn(struct execution *run, struct active_block *active)
{
    enum progress progress = STUCK;

    for (uint32_t i = 0; i < run->threads && !run->error; i++) {
        struct thread *const thread = thread_of(run, active, i);
        if (thread->state != YIELDED)
            continue;
        thread->state = run->kernel->step(thread, &active->block);
        if (thread->state != YIELDED)
            progress = ADVANCED;
        else if (progress == STUCK)
            progress = POLLED;
        active->live -= thread->state == EXITED;
        if (thread->state == FAULTED)
            report_fault(run, thread);
    }
    for (uint32_t start = 0; start < run->threads; start += WARP)
        if (release(run, active, start, WARP, AT_WARP_BARRIER))
            progress = ADVANCED;
    return release(run, active, 0, run->threads, AT_BARRIER) ? ADVANCED : progress;
}

static void start_block(struct execution *run, struct active_block *active, uint64_t number)
{
    init_block(run, &active->block, number);
    active->live = run->threads;
    for (uint32_t i = 0; i < run->threads; i++)
        init_thread(run, thread_of(run, active, i), i);
}

/* Run blocks by turns until all their threads have exited. */
static void run_together(struct execution *run, struct active_block *blocks, uint64_t count)
{
    unsigned idle_turns = 0;

    for (uint64_t live = count; live && !run->error;) {
        enum progress progress = STUCK;
        live = 0;
        for (uint64_t i = 0; i < count && !run->error; i++) {
            const enum progress made = blocks[i].live ? run_turn(run, &blocks[i]) : STUCK;
            progress = made > progress ? made : progress;
            live += blocks[i].live > 0;
        }
        if (live && progress == STUCK) {
            fprintf(stderr, "emulated GPU: kernel %s: deadlock: its threads wait at different "
                            "barriers\n", run->kernel->name);
            run->error = cudaErrorLaunchTimeout;
        }
        idle_turns = progress == POLLED ? idle_turns + 1 : 0;
        if (idle_turns > BUSY_TURNS)
            usleep(SLEEP_US);
        else if (idle_turns)
            sched_yield();
    }
}

/* Run a block whose threads do not wait for each other. */
static void run_independent(struct execution *run, struct active_block *active, uint64_t number)
{
    struct thread *const thread = (struct thread *)active->frames;

    init_block(run, &active->block, number);
    for (uint32_t i = 0; i < run->threads && !run->error; i++) {
        init_thread(run, thread, i);
        if (run->kernel->step(thread, &active->block) == FAULTED)
            report_fault(run, thread);
    }
}

static void run_all(struct execution *run, struct active_block *blocks, uint64_t active_count,
                    uint64_t block_count)
{
    if (active_count == block_count && active_count > 1) {
        for (uint64_t i = 0; i < block_count; i++)
            start_block(run, &blocks[i], i);
        run_together(run, blocks, block_count);
        return;
    }
    for (uint64_t i = 0; i < block_count && !run->error; i++) {
        if (run->kernel->flags & SUSPENDS) {
            start_block(run, blocks, i);
            run_together(run, blocks, 1);
        } else
            run_independent(run, blocks, i);
    }
}

/* Return zeroed memory, aligned to a cache line. */
static char *allocate(size_t bytes)
{
    const size_t rounded = (bytes + 63) / 64 * 64 + 64;
    char *const found = aligned_alloc(64, rounded);

    if (!found)
        abort();
    return memset(found, 0, rounded);
}

cudaError_t execute_launch(void *argument)
{
    const struct launch *const launch = argument;
    const struct kernel *const kernel = launch->kernel;
    const uint32_t *const grid = launch->grid_dim, *const dim = launch->block_dim;
    const uint64_t count = (uint64_t)grid[0] * grid[1] * grid[2];
    const uint64_t active = kernel->flags & SUSPENDS && kernel->flags & POLLS_MEMORY ? count : 1;
    struct execution run = {.launch = launch, .kernel = kernel, .error = cudaSuccess};

    run.threads = dim[0] * dim[1] * dim[2];
    run.frame_bytes = (kernel->frame_bytes + 15) / 16 * 16;
    const size_t frames = run.frame_bytes * (kernel->flags & SUSPENDS ? run.threads : 1);
    const size_t shared = (kernel->shared_bytes + launch->dynamic_shared_bytes + 127) / 64 * 64;
    struct active_block *const blocks = (void *)allocate(active * sizeof *blocks);
    char *const memory = allocate(active * (frames + shared + 64));
    char *next = memory;
    for (uint64_t i = 0; i < active; i++, next += (frames + shared + 63) / 64 * 64) {
        blocks[i].block.shared = next;
        blocks[i].frames = next + shared;
    }
    describe_work(kernel->name);
    run_all(&run, blocks, active, count);
    free(memory);
    free(blocks);
    return run.error;
}
