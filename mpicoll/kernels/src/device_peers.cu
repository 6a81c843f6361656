/* Collectives of GPUs that can access each other's memory: each is one kernel on every rank's GPU.
 *
 * device_kernels.py puts this text after device.cu, and one line after it that defines a kernel,
 * such as ALL_REDUCE(...) at the end. tests/sanitize/device_peers_test.cpp compiles it for the host.
 *
 * Every rank has a workspace to which the kernels of all ranks write: a Header, and two areas for
 * each block. Block b of a rank communicates only with block b of the other ranks. It works in
 * steps. In each step it pushes data into the other ranks' areas, signals each of them, waits for a
 * signal from each, and reads the data in its own areas. Data and flags go in one direction, and a
 * block polls its GPU's own memory.
 *
 * Step numbers continue from call to call, and step s uses area s % 2. Two areas are enough: a rank
 * pushes step s + 2 after all other ranks have signaled step s + 1, which they do after they have
 * read the data of step s. For the same reason two flags per rank are enough. The number of the
 * latest step is kept on the device, where a kernel finds it when a graph is replayed.
 *
 * One shot: every rank pushes the whole array to all ranks, and combines it. Two shots: every rank
 * pushes to each rank that rank's share, combines its own share, and pushes the result to all
 * ranks; 2 (n - 1) / n of the message leave a GPU, which is the minimum (R. Rabenseifner,
 * Optimization of collective reduction operations, ICCS 2004). Similar kernels with flags: the
 * all-reduce of TensorRT-LLM and of vLLM, and the all-pairs algorithms 1PA and 2PA of MSCCL++ (A.
 * Shah et al., arXiv:2504.09014, 2025). All combine in rank order.
 *
 * Memory order: data that a block has written before a barrier of its threads is visible to a
 * thread that acquires, at system scope, a flag that one of them releases, and after a barrier to
 * that thread's block (D. Lustig et al., A formal analysis of the NVIDIA PTX memory consistency
 * model, ASPLOS 2019).
 *
 * Blocks wait for each other. There are no more blocks than a GPU can always run at once, and no
 * two ranks share a GPU. A block that waits longer than the limit aborts, and so do all ranks.
 *
 * A host can also abort all kernels, by a word in host memory that all hosts and GPUs can access: a
 * rank may fail before it has enqueued its kernel. For the host this is a store, which does not
 * involve the driver: the driver may itself wait for a kernel (cudaFree, module loading), and
 * streams may share a hardware queue with one. Reading the word takes a GPU as long as a few polls
 * of local memory, so a thread reads it once per millisecond of waiting. (Compare NCCL's
 * abortFlag.) */

/* Maximum number of ranks in a group, and of blocks in a kernel; peers.py has the same. */
#define RANKS 16
#define BLOCKS 32

/* The start of a workspace, initially zero. The flags of a block are in one cache line. */
struct alignas(128) Header {
    uint64_t signals[BLOCKS][2]
                    [RANKS];         /* signals, by block, step modulo 2 and rank: call and step */
    uint64_t steps[BLOCKS];          /* number of the latest step of each block of this rank */
    uint64_t failure;                /* reason that a rank has aborted, or 0 */
};

/* Parameters of a group as one rank's GPU sees it, and of a call. */
struct Peers {
    char *of[RANKS];   /* the ranks' workspaces */
    uint64_t *failure; /* on the host, for all GPUs: reason that a rank or host has aborted, or 0 */
    uint64_t limit;    /* nanoseconds to wait for a rank */
    int64_t room;      /* bytes of the area for the data that one rank pushes; a multiple of 16 */
    uint64_t call;     /* call record that must match on all ranks, above the bits of a step */
    int32_t n, me;
};

/* Index of the first element of each block of an array, and of the end. */
struct Starts {
    int64_t of[RANKS + 1];

    METHOD int64_t count(int rank) const
    {
        return of[rank + 1] - of[rank];
    }
};

/* Bits of a step number; the bits above hold the call record. */
#define STEP_BITS 48
#define STEP_MASK (((uint64_t)1 << STEP_BITS) - 1)

/* Reasons to abort; encoded with the call, the aborting rank and the rank that it waited for. Hosts
 * have further reasons, see peers.py. */
enum { LATE = 1, DIFFERS = 2 };
#define FAILURE(CALL, WHY, ME, RANK)                                                               \
    ((uint64_t)(CALL) << 48 | (uint64_t)(WHY) << 32 | (uint64_t)(ME) << 16 | (uint64_t)(RANK))

/* Nanoseconds of waiting between two reads of the hosts' abort word. */
#define HOST_POLL_NS 1000000

#ifdef __CUDA_ARCH__
METHOD void store_release(uint64_t *flag, uint64_t value)
{
    asm volatile("st.release.sys.u64 [%0], %1;" : : "l"(flag), "l"(value) : "memory");
}

METHOD uint64_t load_acquire(const uint64_t *flag)
{
    uint64_t value;
    asm volatile("ld.acquire.sys.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
    return value;
}

METHOD uint64_t nanoseconds()
{
    uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

#else
METHOD void store_release(uint64_t *flag, uint64_t value)
{
    __atomic_store_n(flag, value, __ATOMIC_RELEASE);
}

METHOD uint64_t load_acquire(const uint64_t *flag)
{
    return __atomic_load_n(flag, __ATOMIC_ACQUIRE);
}
#endif

/* ---- Steps ----------------------------------------------------------------------------------- */

/* Ranks, by bit. */
METHOD uint32_t bit(int rank)
{
    return (uint32_t)1 << rank;
}

/* The steps of a block. */
struct Steps {
    const Peers &peers;
    uint64_t step; /* the step in which this rank pushes next */

    METHOD explicit Steps(const Peers &peers)
        : peers(peers), step(header(peers.me)->steps[blockIdx.x] + 1)
    {
    }

    METHOD Header *header(int rank) const
    {
        return (Header *)peers.of[rank];
    }

    /* Offset in a workspace of the area for the data that `source` pushes in a step. */
    METHOD int64_t offset(int source, uint64_t in) const
    {
        const int64_t areas = blockIdx.x * 2 + in % 2;
        return (int64_t)sizeof(Header) + (areas * peers.n + source) * peers.room;
    }

    /* Address to which this rank pushes data for another rank. */
    template <class Element> METHOD Element *into(int rank) const
    {
        return (Element *)(peers.of[rank] + offset(peers.me, step));
    }

    /* Address of the data that another rank has pushed in the latest step. */
    template <class Element> METHOD const Element *from(int rank) const
    {
        return (const Element *)(peers.of[peers.me] + offset(rank, step - 1));
    }

    METHOD uint32_t others() const
    {
        return (bit(peers.n) - 1) & ~bit(peers.me);
    }

    /* Signals to all ranks that this rank has pushed, waits for their signals, and begins the next
     * step. Returns false if a rank has aborted. Thread i communicates with rank i. */
    METHOD bool exchange_signals()
    {
        const uint64_t value = peers.call << STEP_BITS | step;
        const int parity = (int)(step % 2), rank = threadIdx.x;
        bool failed = false;

        __syncthreads();
        if (rank < peers.n && rank != peers.me) {
            store_release(&header(rank)->signals[blockIdx.x][parity][peers.me], value);
            failed = !wait_for_signal(rank, &header(peers.me)->signals[blockIdx.x][parity][rank],
                                      value);
        }
        step++;
        return !__syncthreads_or(failed);
    }

    METHOD bool wait_for_signal(int rank, const uint64_t *flag, uint64_t value) const
    {
        const uint64_t start = nanoseconds();
        uint64_t last_poll = start;

        for (;;) {
            const uint64_t seen = load_acquire(flag),
                           other = load_acquire(&header(peers.me)->failure);
            if (other) {
                if (!load_acquire(peers.failure))
                    store_release(peers.failure, other);
                return false;
            }
            if (seen == value)
                return true;
            const uint64_t now = nanoseconds();
            const bool differs = (seen & STEP_MASK) == step;
            if (differs || now - start > peers.limit)
                abort_all(FAILURE(peers.call, differs ? DIFFERS : LATE, peers.me, rank));
            else if (now - last_poll > HOST_POLL_NS) {
                const uint64_t host_failure = load_acquire(peers.failure);
                if (host_failure)
                    store_release(&header(peers.me)->failure, host_failure);
                last_poll = now;
            }
        }
    }

    METHOD void abort_all(uint64_t why) const
    {
#pragma unroll 1
        for (int rank = 0; rank < peers.n; rank++)
            store_release(&header(rank)->failure, why);
    }

    /* Ends the call, after the last exchange of signals. */
    METHOD void end() const
    {
        __syncthreads();
        if (threadIdx.x == 0)
            header(peers.me)->steps[blockIdx.x] = step - 1;
    }
};

/* ---- Moves ----------------------------------------------------------------------------------- */

/* The operation of kernels that do not combine, and the root of calls without one: see peers.py. */
enum { COPY = -1, ALL = -1 };

/* Reads `count` elements and writes them to `out`, memory of this rank or null, and to the areas of
 * the ranks in `to`. If `combines`, the elements are combined with those that all other ranks have
 * pushed. */
template <class Element> struct Move {
    const Element *source;
    int count;
    Element *out = 0;
    uint32_t to = 0;
    bool combines = false;
};

template <int n, class Element> METHOD bool is_aligned(const Element *array)
{
    return (size_t)array % sizeof(Piece<Element, n>) == 0;
}

/* Moves the elements from `first` to `end` in pieces of n, by the threads of one block. Each thread
 * reads `batch` pieces before it writes them, to have more loads in flight.
 *
 * There is one place each that reads, widens, divides, narrows and writes, because compilers inline
 * all of it. The division is a round of the loop over the ranks: a test of the divisor in the outer
 * loop makes compilers copy that loop. */
template <class Format, int operation, int n, int batch>
METHOD void move_pieces(const Steps &steps, const Move<typename Format::element> &move,
                        double divisor, int first, int end)
{
    typedef typename Format::element element;
    const int stride = blockDim.x * n, ranks = steps.peers.n;
    const bool combines = operation != COPY && move.combines;
    const int rounds = !combines ? 1 : divisor == 1 ? ranks : ranks + 1;

#pragma unroll 1
    for (int begin = first + threadIdx.x * n; begin < end; begin += batch * stride) {
        Piece<element, n> got[batch];
        typename Format::number numbers[batch * n] = {};

#pragma unroll 1
        for (int rank = 0; rank < rounds; rank++) {
            if (rank == ranks) {
#pragma unroll
                for (int i = 0; i < batch * n; i++)
                    numbers[i] = Format::divided(numbers[i], divisor);
                break;
            }
            const bool own = !combines || rank == steps.peers.me;
            const element *from = own ? move.source : steps.from<element>(rank);
#pragma unroll
            for (int k = 0; k < batch; k++)
                if (begin + k * stride < end)
                    got[k] = *piece<n>(from, begin + k * stride);
            if constexpr (operation != COPY)
                if (combines) {
#pragma unroll
                    for (int i = 0; i < batch * n; i++) {
                        const auto next = Format::widen(got[i / n].get(i % n));
                        const auto folded = Format::template fold<operation>(numbers[i], next);
                        numbers[i] = rank ? folded : next;
                    }
                }
        }
        if (combines) {
#pragma unroll
            for (int i = 0; i < batch * n; i++)
                got[i / n].set(i % n, Format::narrow(numbers[i]));
        }
#pragma unroll 1
        for (int rank = -1; rank < ranks; rank++) {
            element *out = move.out;
            if (rank >= 0)
                out = move.to & bit(rank) ? steps.into<element>(rank) : 0;
            if (out) {
#pragma unroll
                for (int k = 0; k < batch; k++)
                    if (begin + k * stride < end)
                        *piece<n>(out, begin + k * stride) = got[k];
            }
        }
    }
}

/* Moves in pieces of 16 bytes if this rank's memory is aligned, else element by element. */
template <class Format, int operation>
METHOD void execute(const Steps &steps, const Move<typename Format::element> &move, double divisor)
{
    enum { n = LENGTH(sizeof(typename Format::element)) };
    enum { batch = operation == COPY || n < 4 ? 4 : 16 / n }; /* limited by the registers */

    if (!move.out && !move.to)
        return;
    const bool aligned = is_aligned<n>(move.source) && is_aligned<n>(move.out);
    const int inside = aligned ? move.count / n * n : 0;
    move_pieces<Format, operation, n, batch>(steps, move, divisor, 0, inside);
    move_pieces<Format, operation, 1, 4>(steps, move, divisor, inside, move.count);
}

/* ---- Collectives ------------------------------------------------------------------------------
 *
 * Block b processes the chunks b, b + blocks, ..., of `chunk` elements, which fit into an area.
 * With two shots it processes a chunk for each rank at once. All ranks have as many blocks.
 *
 * A chunk is processed in phases, with an exchange of signals before each except the first. In a
 * phase, a rank executes one move, for its own part, or one move for each other rank.
 *
 * A plan returns one move, and `run` is the only place that executes moves and exchanges signals:
 * the compiler inlines everything, and each further place makes a kernel larger by hundreds of
 * instructions.
 */

METHOD int part(int64_t left, int64_t before, int64_t chunk)
{
    left -= before;
    return (int)(left < 0 ? 0 : left < chunk ? left : chunk);
}

/* plan(phase, rank, first): the move for a rank in the chunk that begins at element `first`.
 * own: the phases, by bit, with one move for this rank. */
template <class Format, int operation, class Plan>
METHOD void run(Steps &steps, int phases, uint32_t own, int64_t stride, int64_t count,
                double divisor, const Plan &plan)
{
    const int me = steps.peers.me, n = steps.peers.n;

#pragma unroll 1
    for (int64_t first = blockIdx.x * stride; first < count; first += gridDim.x * stride)
#pragma unroll 1
        for (int phase = 0; phase < phases; phase++) {
            const int begin = own & bit(phase) ? 0 : 1, end = begin ? n : 1;

            if (phase && !steps.exchange_signals())
                return;
#pragma unroll 1
            for (int k = begin; k < end; k++) {
                const int rank = me + k < n ? me + k : me + k - n;
                execute<Format, operation>(steps, plan(phase, rank, first), divisor);
            }
        }
    steps.end();
}

/* Runs a collective on one array. plan(move, phase, rank): completes a move, whose source is the
 * rank's chunk of the array, or with one shot the only chunk. */
template <class Format, int operation, class Plan>
METHOD void run_in_place(Steps &steps, typename Format::element *array, double divisor, int shots,
                         int64_t chunk, int64_t count, const Plan &plan)
{
    const int64_t stride = shots == 1 ? chunk : steps.peers.n * chunk;
    const uint32_t own = shots == 1 ? bit(0) | bit(1) : bit(1);

    const auto complete = [&](int phase, int rank, int64_t first) {
        const int64_t before = shots == 1 ? 0 : rank * chunk;
        Move<typename Format::element> move = {array + first + before,
                                               part(count - first, before, chunk)};
        plan(move, phase, rank);
        return move;
    };
    run<Format, operation>(steps, shots + 1, own, stride, count, divisor, complete);
}

/* root: the rank that receives the result, or ALL. */
template <class Format, int operation>
METHOD void reduce_in_place(const Peers &peers, typename Format::element *array, double divisor,
                            int root, int shots, int64_t chunk, int64_t count)
{
    typedef typename Format::element element;
    Steps steps(peers);
    const bool keeps = root == ALL || root == peers.me;
    const uint32_t receivers = steps.others() & (root == ALL ? ~0u : bit(root));

    const auto plan = [&](Move<element> &move, int phase, int rank) {
        if (phase && keeps)
            move.out = (element *)move.source;
        if (phase == 0)
            move.to = shots == 1 ? receivers : bit(rank);
        else if (phase == 1) {
            move.combines = true;
            move.to = shots == 1 ? 0 : receivers;
        } else
            move.source = steps.from<element>(rank);
    };
    run_in_place<Format, operation>(steps, array, divisor, shots, chunk, count, plan);
}

/* With two shots, the root scatters a chunk for each rank, and each rank sends its chunk to all. */
template <class Element>
METHOD void spread_from(const Peers &peers, Element *array, int root, int shots, int64_t chunk,
                        int64_t count)
{
    Steps steps(peers);

    const auto plan = [&](Move<Element> &move, int phase, int rank) {
        if (phase && peers.me != root) {
            move.out = (Element *)move.source;
            move.source = steps.from<Element>(phase == 1 ? root : rank);
        }
        if (phase == 0 && peers.me == root)
            move.to = shots == 1 ? steps.others() : bit(rank);
        if (phase == 1 && shots == 2)
            move.to = steps.others() & ~bit(root);
    };
    run_in_place<Plain<Element>, COPY>(steps, array, 1, shots, chunk, count, plan);
}

template <class Format, int operation>
METHOD void scatter_reduced(const Peers &peers, const typename Format::element *send,
                            typename Format::element *recv, double divisor, const Starts &starts,
                            int64_t chunk, int64_t most)
{
    Steps steps(peers);

    const auto plan = [&](int phase, int rank, int64_t first) {
        Move<typename Format::element> move = {send + starts.of[rank] + first,
                                               part(starts.count(rank), first, chunk)};
        if (phase == 0)
            move.to = bit(rank);
        else {
            move.combines = true;
            move.out = recv + first;
        }
        return move;
    };
    run<Format, operation>(steps, 2, bit(1), chunk, most, divisor, plan);
}

template <class Element>
METHOD void gather_to_all(const Peers &peers, const Element *send, Element *recv,
                          const Starts &starts, int64_t chunk, int64_t most)
{
    Steps steps(peers);

    const auto plan = [&](int phase, int rank, int64_t first) {
        Move<Element> move = {send + first, part(starts.count(rank), first, chunk)};
        move.out = recv + starts.of[rank] + first;
        if (phase == 0)
            move.to = steps.others();
        else
            move.source = steps.from<Element>(rank);
        return move;
    };
    run<Plain<Element>, COPY>(steps, 2, bit(0), chunk, most, 1, plan);
}

/* ---- Kernels --------------------------------------------------------------------------------- */

#define PEER_KERNEL(NAME) extern "C" __global__ void __launch_bounds__(512, 1) NAME

#define ALL_REDUCE(NAME, OPERATION)                                                                \
    PEER_KERNEL(all_reduce)                                                                        \
    (const __grid_constant__ Peers peers, format_##NAME::element *array, double divisor, int root, \
     int shots, int64_t chunk, int64_t count)                                                      \
    {                                                                                              \
        reduce_in_place<format_##NAME, OPERATION>(peers, array, divisor, root, shots, chunk,       \
                                                  count);                                          \
    }

#define REDUCE_SCATTER(NAME, OPERATION)                                                            \
    PEER_KERNEL(reduce_scatter)                                                                    \
    (const __grid_constant__ Peers peers, const format_##NAME::element *send,                      \
     format_##NAME::element *recv, double divisor, const __grid_constant__ Starts starts,          \
     int64_t chunk, int64_t most)                                                                  \
    {                                                                                              \
        scatter_reduced<format_##NAME, OPERATION>(peers, send, recv, divisor, starts, chunk,       \
                                                  most);                                           \
    }

#define ALL_GATHER(TYPE)                                                                           \
    PEER_KERNEL(all_gather)                                                                        \
    (const __grid_constant__ Peers peers, const TYPE *send, TYPE *recv,                            \
     const __grid_constant__ Starts starts, int64_t chunk, int64_t most)                           \
    {                                                                                              \
        gather_to_all(peers, send, recv, starts, chunk, most);                                     \
    }

#define BROADCAST(TYPE)                                                                            \
    PEER_KERNEL(broadcast)                                                                         \
    (const __grid_constant__ Peers peers, TYPE *array, int root, int shots, int64_t chunk,         \
     int64_t count)                                                                                \
    {                                                                                              \
        spread_from(peers, array, root, shots, chunk, count);                                      \
    }
