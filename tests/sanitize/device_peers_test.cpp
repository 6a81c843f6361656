/* Kernels of route `peer` under sanitizers. Each GPU thread of each rank is a host thread.
 *
 * ThreadSanitizer checks that the flags order all accesses to the ranks' areas, in several calls
 * with one and two shots. It knows C++'s memory model, which is that of the flags on a GPU. */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <thread>
#include <time.h>
#include <vector>
#include <pthread.h>
#include <sched.h>

#define __global__
#define __grid_constant__
#define __launch_bounds__(...)

static thread_local struct Index {
    unsigned x;
} threadIdx, blockIdx, blockDim, gridDim;

struct Barrier {
    pthread_barrier_t all;
    int any = 0;
};
static thread_local Barrier *barrier;

static void __syncthreads()
{
    pthread_barrier_wait(&barrier->all);
}

static int __syncthreads_or(int mine)
{
    if (mine)
        __atomic_store_n(&barrier->any, 1, __ATOMIC_RELAXED);
    __syncthreads();
    return __atomic_load_n(&barrier->any, __ATOMIC_RELAXED);
}

static uint64_t nanoseconds()
{
    timespec now;

    sched_yield(); /* there are more threads than processors */
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

#include "formats.h"
#include "device.cu"
#include "device_peers.cu"
ALL_REDUCE(float32, 0)

enum { N = 3, TURNS = 12, ROOM = 96, GRID = 2, THREADS = N, COUNT = 500 };

int main()
{
    const size_t nbytes = (sizeof(Header) + 2 * N * GRID * ROOM + 127) / 128 * 128;
    uint64_t reports[N] = {0};
    char *of[N];
    float *arrays[N];
    Barrier blocks[N][GRID];
    pthread_barrier_t kernels[N];
    std::vector<std::thread> running;

    for (int r = 0; r < N; r++) {
        of[r] = (char *)aligned_alloc(128, nbytes);
        memset(of[r], 0, nbytes);
        arrays[r] = (float *)aligned_alloc(128, 2048);
        for (int i = 0; i < COUNT; i++)
            arrays[r][i] = 1;
        for (auto &each : blocks[r])
            pthread_barrier_init(&each.all, 0, THREADS);
        pthread_barrier_init(&kernels[r], 0, GRID * THREADS);
    }
    for (unsigned i = 0; i < N * GRID * THREADS; i++)
        running.emplace_back([&, i] {
            const int rank = i / (GRID * THREADS);
            const Peers peers = {{of[0], of[1], of[2]}, &reports[rank], 60000000000u, ROOM, 7, N,
                                 rank};
            gridDim.x = GRID, blockDim.x = THREADS;
            blockIdx.x = i / THREADS % GRID, threadIdx.x = i % THREADS;
            barrier = &blocks[rank][blockIdx.x];
            for (int turn = 0; turn < TURNS; turn++) {
                all_reduce(peers, arrays[rank], N, ALL, 1 + turn % 2, turn % 3 ? 24 : 8,
                           COUNT - turn);
                pthread_barrier_wait(&kernels[rank]); /* a kernel begins after the previous one */
            }
        });
    for (auto &each : running)
        each.join();
    for (int r = 0; r < N; r++)
        for (int i = 0; i < COUNT; i++)
            if (arrays[r][i] != 1 || reports[r])
                return puts("a wrong result"), 3;
    return 0;
}
