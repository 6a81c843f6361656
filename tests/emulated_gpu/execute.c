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

/* Prepare the frames of a block's threads in order. `index` is the next thread's: fewer divisions
 * than computing it from its number. */
static void init_thread(const struct execution *run, struct thread *thread, uint32_t number,
                        uint32_t index[3])
{
    const uint32_t *const dim = run->launch->block_dim;

    thread->resume = 0;
    thread->state = YIELDED;
    thread->polls = 0;
    thread->number = number;
    memcpy(thread->index, index, sizeof thread->index);
    if (++index[0] < dim[0])
        return;
    index[0] = 0;
    if (++index[1] < dim[1])
        return;
    index[1] = 0;
    index[2]++;
}

static void init_block(const struct execution *run, struct block *block, uint64_t number,
                       char *shared)
{
    const struct launch *const launch = run->launch;
    const uint32_t *const grid = launch->grid_dim;

    memcpy(block->block_dim, launch->block_dim, sizeof block->block_dim);
    memcpy(block->grid_dim, grid, sizeof block->grid_dim);
    block->index[0] = (uint32_t)(number % grid[0]);
    block->index[1] = (uint32_t)(number / grid[0] % grid[1]);
    block->index[2] = (uint32_t)(number / grid[0] / grid[1]);
    block->parameters = (char *)launch->parameters;
    block->globals = launch->globals;
    block->shared = shared;
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

/* ---- Barriers ---------------------------------------------------------------------------------- */

static struct thread *thread_of(const struct execution *run, const struct active_block *active,
                                uint32_t number)
{
    return (struct thread *)(active->frames + number * run->frame_bytes);
}

/* Release the threads at the barrier if all have arrived. Returns whether they had. */
static int release_barrier(const struct execution *run, struct active_block *active)
{
    uint32_t waiting = 0, set = 0;

    for (uint32_t i = 0; i < run->threads; i++) {
        const struct thread *const thread = thread_of(run, active, i);
        if (thread->state == AT_BARRIER) {
            waiting++;
            set += thread->predicate != 0;
        }
    }
    if (!waiting || waiting < active->live)
        return 0;
    for (uint32_t i = 0; i < run->threads; i++) {
        struct thread *const thread = thread_of(run, active, i);
        if (thread->state == AT_BARRIER) {
            thread->result = set > 0;
            thread->state = YIELDED;
        }
    }
    return 1;
}

/* ---- Blocks ------------------------------------------------------------------------------------ */

/* Give each thread of a block a turn. Returns whether one did more than poll memory. */
static int run_turn(struct execution *run, struct active_block *active)
{
    int advanced = 0;

    for (uint32_t i = 0; i < run->threads && !run->error; i++) {
        struct thread *const thread = thread_of(run, active, i);
        if (thread->state != YIELDED)
            continue;
        thread->state = run->kernel->step(thread, &active->block);
        advanced |= thread->state != YIELDED;
        active->live -= thread->state == EXITED;
        if (thread->state == FAULTED)
            report_fault(run, thread);
    }
    return release_barrier(run, active) || advanced;
}

static void start_block(struct execution *run, struct active_block *active, uint64_t number)
{
    init_block(run, &active->block, number, active->block.shared);
    active->live = run->threads;
    uint32_t index[3] = {0};
    for (uint32_t i = 0; i < run->threads; i++)
        init_thread(run, thread_of(run, active, i), i, index);
}

/* Run blocks by turns until all their threads have exited. */
static void run_together(struct execution *run, struct active_block *blocks, uint64_t count)
{
    unsigned idle_turns = 0;

    for (uint64_t live = count; live && !run->error;) {
        int advanced = 0;
        live = 0;
        for (uint64_t i = 0; i < count && !run->error; i++) {
            if (blocks[i].live)
                advanced |= run_turn(run, &blocks[i]);
            live += blocks[i].live > 0;
        }
        idle_turns = advanced ? 0 : idle_turns + 1;
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
    uint32_t index[3] = {0};

    init_block(run, &active->block, number, active->block.shared);
    for (uint32_t i = 0; i < run->threads && !run->error; i++) {
        init_thread(run, thread, i, index);
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
