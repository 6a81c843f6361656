/* The execution of a launch, in the calling thread.
 *
 * The threads of a block take turns: each runs until it waits or exits. Blocks run in sequence.
 * If the kernel waits for memory, they run by turns, because another block may write it. */
#include "modules.h"

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

/* ---- Warps ------------------------------------------------------------------------------------- */

/* Return the lane that a thread reads, and set its predicate: whether that lane is in range. */
static uint32_t shuffle_source(struct thread *thread)
{
    const uint32_t lane = thread->number % WARP, step = thread->lane & 31;
    const uint32_t clamp = thread->clamp & 31, segment = thread->clamp >> 8 & 31;
    const uint32_t last = (lane & segment) | (clamp & ~segment);
    uint32_t source;

    switch (thread->operation) {
    case SHFL_UP:
        thread->predicate = (int)lane - (int)step >= (int)last;
        source = lane - step;
        break;
    case SHFL_DOWN:
        source = lane + step;
        thread->predicate = source <= last;
        break;
    case SHFL_BFLY:
        source = lane ^ step;
        thread->predicate = source <= last;
        break;
    default:
        source = (lane & segment) | (step & ~segment);
        thread->predicate = source <= last;
    }
    return thread->predicate ? source : lane;
}

/* Set the result of one thread from the operands of its warp. */
static void finish_warp_operation(struct thread *thread, struct thread *const lanes[WARP])
{
    if (thread->operation == WARP_SYNC)
        return;
    const struct thread *const source = lanes[shuffle_source(thread)];
    thread->result = source ? source->operand : thread->operand;
}

/* Return the lanes that take part in a thread's operation if all of them have arrived, or 0. */
static uint32_t arrived_members(const struct thread *thread, struct thread *const lanes[WARP])
{
    uint32_t members = 0;

    for (uint32_t lane = 0; lane < WARP; lane++) {
        const struct thread *const other = lanes[lane];
        if (!(thread->mask >> lane & 1) || !other || other->state == EXITED)
            continue;
        if (other->state != AT_WARP || other->mask != thread->mask ||
            other->operation != thread->operation)
            return 0;
        members |= 1u << lane;
    }
    return members;
}

/* Finish the operations of a warp whose members have all arrived. Returns whether there are any. */
static int release_warp(const struct execution *run, struct active_block *active, uint32_t start)
{
    struct thread *lanes[WARP] = {NULL};
    int released = 0;

    for (uint32_t lane = 0; lane < WARP && start + lane < run->threads; lane++)
        lanes[lane] = thread_of(run, active, start + lane);
    for (uint32_t lane = 0; lane < WARP && lanes[lane]; lane++) {
        if (lanes[lane]->state != AT_WARP)
            continue;
        const uint32_t members = arrived_members(lanes[lane], lanes);
        for (uint32_t other = 0; other < WARP; other++)
            if (members >> other & 1)
                finish_warp_operation(lanes[other], lanes);
        for (uint32_t other = 0; other < WARP; other++)
            if (members >> other & 1)
                lanes[other]->state = YIELDED;
        released |= members != 0;
    }
    return released;
}

/* ---- Blocks ------------------------------------------------------------------------------------ */

enum progress { NO_PROGRESS, POLLED, ADVANCED };

/* Run a thread until it waits. Returns whether it did more than poll memory. */
static enum progress step(struct execution *run, struct active_block *active,
                          struct thread *thread)
{
    thread->state = run->kernel->step(thread, &active->block);
    switch (thread->state) {
    case EXITED:
        active->live--;
        return ADVANCED;
    case YIELDED:
        return POLLED;
    case FAULTED:
        report_fault(run, thread);
        return ADVANCED;
    default:
        return ADVANCED;
    }
}

/* Give each thread of a block a turn, then release those whose partners have all arrived. */
static enum progress run_turn(struct execution *run, struct active_block *active)
{
    enum progress progress = NO_PROGRESS;

    for (uint32_t i = 0; i < run->threads && !run->error; i++) {
        struct thread *const thread = thread_of(run, active, i);
        if (thread->state == YIELDED) {
            const enum progress made = step(run, active, thread);
            progress = made > progress ? made : progress;
        }
    }
    for (uint32_t start = 0; start < run->threads; start += WARP)
        if (release_warp(run, active, start))
            progress = ADVANCED;
    if (release_barrier(run, active))
        progress = ADVANCED;
    return progress;
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
        enum progress progress = NO_PROGRESS;
        live = 0;
        for (uint64_t i = 0; i < count && !run->error; i++) {
            if (!blocks[i].live)
                continue;
            const enum progress made = run_turn(run, &blocks[i]);
            progress = made > progress ? made : progress;
            live += blocks[i].live > 0;
        }
        if (live && progress == NO_PROGRESS) {
            fprintf(stderr, "emulated GPU: kernel %s: deadlock: its threads wait at a barrier "
                            "and in different warp operations\n", run->kernel->name);
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
    allow_access(accessible_from(current_device()));
    run_all(&run, blocks, active, count);
    free(memory);
    free(blocks);
    return run.error;
}
