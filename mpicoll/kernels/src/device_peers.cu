/* Collectives of GPUs that can access each other's memory: each is one kernel on every rank's GPU.
 *
 * device_kernels.py puts this text after device.cu, and one line after it that defines a kernel,
 * such as ALL_REDUCE(...) at the end. Any C++ compiler with definitions of CUDA's thread variables
 * and __syncthreads compiles it as well.
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

METHOD void relax()
{
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

/* ---- Unaligned memory ------------------------------------------------------------------------ */

template <int n, class Element> METHOD bool is_aligned(const Element *array)
{
    return n == 1 || (size_t)array % sizeof(Piece<Element, n>) == 0;
}

template <int n, class Element> METHOD Piece<Element, n> load(const Element *array)
{
    if (is_aligned<n>(array))
        return *piece<n>(array, 0);
    Piece<Element, n> loaded;
#pragma unroll
    for (int i = 0; i < n; i++)
        loaded.of[i] = array[i];
    return loaded;
}

template <int n, class Element> METHOD void store(Element *array, const Piece<Element, n> &stored)
{
    if (is_aligned<n>(array)) {
        *piece<n>(array, 0) = stored;
        return;
    }
#pragma unroll
    for (int i = 0; i < n; i++)
        array[i] = stored.of[i];
}

/* Moves `count` elements from work.get to work.put, by the threads of one block. Each thread gets
 * several pieces before it puts the first, to have more loads in flight. */
template <class Work> METHOD void in_block(const Work &work, int64_t count)
{
    enum { n = Work::length, batch = 4 };
    const int64_t pieces = count / n, threads = blockDim.x;
    int64_t i = threadIdx.x;

    for (; i + (batch - 1) * threads < pieces; i += batch * threads) {
        Piece<typename Work::element, n> got[batch];
#pragma unroll
        for (int k = 0; k < batch; k++)
            got[k] = work.template get<n>((i + k * threads) * n);
#pragma unroll
        for (int k = 0; k < batch; k++)
            work.put((i + k * threads) * n, got[k]);
    }
    for (; i < pieces; i += threads)
        work.put(i * n, work.template get<n>(i * n));
    for (i = pieces * n + threadIdx.x; i < count; i += threads)
        work.put(i, work.template get<1>(i));
}

/* ---- Steps ----------------------------------------------------------------------------------- */

/* The current step of a block. */
struct Steps {
    const Peers &peers;
    uint64_t step; /* current step number */

    METHOD explicit Steps(const Peers &peers)
        : peers(peers), step(header(peers.me)->steps[blockIdx.x] + 1)
    {
    }

    METHOD Header *header(int rank) const
    {
        return (Header *)peers.of[rank];
    }

    /* Offset in a workspace of the area for the data that `source` pushes in this step. */
    METHOD int64_t offset(int source) const
    {
        const int64_t areas = blockIdx.x * 2 + step % 2;
        return (int64_t)sizeof(Header) + (areas * peers.n + source) * peers.room;
    }

    /* Address at which this rank pushes data to another rank. */
    template <class Element> METHOD Element *into(int rank) const
    {
        return (Element *)(peers.of[rank] + offset(peers.me));
    }

    /* Address of the data that another rank has pushed. */
    template <class Element> METHOD const Element *from(int rank) const
    {
        return (const Element *)(peers.of[peers.me] + offset(rank));
    }

    /* Signals to all ranks that this rank has pushed, and waits for their signals. Returns false if
     * a rank has aborted. */
    METHOD bool exchange_signals() const
    {
        const uint64_t value = peers.call << STEP_BITS | step;
        const int parity = (int)(step % 2);
        bool failed = false;

        __syncthreads();
        for (int rank = threadIdx.x; rank < peers.n; rank += blockDim.x)
            if (rank != peers.me)
                store_release(&header(rank)->signals[blockIdx.x][parity][peers.me], value);
        for (int rank = threadIdx.x; rank < peers.n; rank += blockDim.x)
            if (rank != peers.me)
                failed |= !wait_for_signal(
                    rank, &header(peers.me)->signals[blockIdx.x][parity][rank], value);
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
            if ((seen & STEP_MASK) == step)
                abort_all(FAILURE(peers.call, DIFFERS, peers.me, rank));
            else if (now - start > peers.limit)
                abort_all(FAILURE(peers.call, LATE, peers.me, rank));
            else if (now - last_poll > HOST_POLL_NS) {
                const uint64_t host_failure = load_acquire(peers.failure);
                if (host_failure)
                    store_release(&header(peers.me)->failure, host_failure);
                last_poll = now;
            } else
                relax();
        }
    }

    METHOD void abort_all(uint64_t why) const
    {
        for (int rank = 0; rank < peers.n; rank++)
            store_release(&header(rank)->failure, why);
    }

    METHOD Steps after() const
    {
        Steps next = *this;

        next.step++;
        return next;
    }

    METHOD void next()
    {
        step++;
    }

    /* Ends the call; every step has been followed by `next`. */
    METHOD void end() const
    {
        __syncthreads();
        if (threadIdx.x == 0)
            header(peers.me)->steps[blockIdx.x] = step - 1;
    }
};

/* ---- Work of a block ------------------------------------------------------------------------- */

enum { NO_RANK = -2, ALL = -1 };

template <class Element> struct Copy {
    typedef Element element;
    enum { length = LENGTH(sizeof(element)) };

    const element *source;
    element *out;

    template <int n> METHOD Piece<element, n> get(int64_t place) const
    {
        return load<n>(source + place);
    }
    template <int n> METHOD void put(int64_t place, const Piece<element, n> &got) const
    {
        store<n>(out + place, got);
    }
};

/* Pushes the same data to all other ranks except `but`, which may be NO_RANK. */
template <class Element> struct Spread {
    typedef Element element;
    enum { length = LENGTH(sizeof(element)) };

    const Steps steps;
    const element *source;
    int but;

    template <int n> METHOD Piece<element, n> get(int64_t place) const
    {
        return load<n>(source + place);
    }
    template <int n> METHOD void put(int64_t place, const Piece<element, n> &got) const
    {
        for (int rank = 0; rank < steps.peers.n; rank++)
            if (rank != steps.peers.me && rank != but)
                *piece<n>(steps.into<element>(rank), place) = got;
    }
};

/* Combines this rank's elements with the data that the other ranks have pushed. Pushes the result,
 * as data of the next step, to a rank, to ALL other ranks, or to NO_RANK. */
template <class Format, int operation> struct Fold {
    typedef typename Format::element element;
    typedef typename Format::number number;
    enum { length = LENGTH(sizeof(element)) };

    const Steps steps;
    const element *own;
    element *out; /* may be `own`; null: this rank does not keep the result */
    double divisor;
    int to;

    template <int n> METHOD Piece<element, n> get(int64_t place) const
    {
        number numbers[n];

        for (int rank = 0; rank < steps.peers.n; rank++) {
            const Piece<element, n> next = rank == steps.peers.me
                                               ? load<n>(own + place)
                                               : *piece<n>(steps.from<element>(rank), place);
#pragma unroll
            for (int i = 0; i < n; i++) {
                const number widened = Format::widen(next.of[i]);
                numbers[i] = rank ? Format::template fold<operation>(numbers[i], widened) : widened;
            }
        }
        Piece<element, n> result;
#pragma unroll
        for (int i = 0; i < n; i++)
            result.of[i] =
                Format::narrow(divisor == 1 ? numbers[i] : Format::divided(numbers[i], divisor));
        return result;
    }
    template <int n> METHOD void put(int64_t place, const Piece<element, n> &got) const
    {
        const Steps after = steps.after();

        if (out)
            store<n>(out + place, got);
        for (int rank = 0; rank < steps.peers.n; rank++)
            if (rank != steps.peers.me && (to == ALL || to == rank))
                *piece<n>(after.into<element>(rank), place) = got;
    }
};

/* ---- Collectives ------------------------------------------------------------------------------
 *
 * Block b processes the chunks b, b + blocks, ..., of `chunk` elements, which fit into an area.
 * With two shots it processes a chunk for each rank at once. All ranks have as many blocks.
 */

METHOD int64_t part(int64_t left, int64_t before, int64_t chunk)
{
    left -= before;
    return left < 0 ? 0 : left < chunk ? left : chunk;
}

/* root: the rank that receives the result, or ALL. */
template <class Format, int operation>
METHOD void reduce_in_place(const Peers &peers, typename Format::element *array, double divisor,
                            int root, int shots, int64_t chunk, int64_t count)
{
    typedef typename Format::element element;
    Steps steps(peers);
    const int me = peers.me, n = peers.n;
    const bool keeps = root == ALL || root == me;
    const int64_t stride = shots == 1 ? chunk : n * chunk;

    for (int64_t first = blockIdx.x * stride; first < count; first += gridDim.x * stride) {
        element *const begin = array + first;
        const int64_t left = count - first;

        if (shots == 1) {
            if (root == ALL)
                in_block(Spread<element>{steps, begin, NO_RANK}, part(left, 0, chunk));
            else if (!keeps)
                in_block(Copy<element>{begin, steps.into<element>(root)}, part(left, 0, chunk));
            if (!steps.exchange_signals())
                return;
            if (keeps)
                in_block(Fold<Format, operation>{steps, begin, begin, divisor, NO_RANK},
                         part(left, 0, chunk));
            steps.next();
            continue;
        }
        for (int k = 1; k < n; k++) {
            const int rank = (me + k) % n;
            in_block(Copy<element>{begin + rank * chunk, steps.into<element>(rank)},
                     part(left, rank * chunk, chunk));
        }
        if (!steps.exchange_signals())
            return;
        element *const mine = begin + me * chunk;
        in_block(Fold<Format, operation>{steps, mine, keeps ? mine : 0, divisor, root},
                 part(left, me * chunk, chunk));
        steps.next();
        if (!steps.exchange_signals())
            return;
        for (int k = 1; keeps && k < n; k++) {
            const int rank = (me + k) % n;
            in_block(Copy<element>{steps.from<element>(rank), begin + rank * chunk},
                     part(left, rank * chunk, chunk));
        }
        steps.next();
    }
    steps.end();
}

template <class Format, int operation>
METHOD void scatter_reduced(const Peers &peers, const typename Format::element *send,
                            typename Format::element *recv, double divisor, const Starts &starts,
                            int64_t chunk, int64_t most)
{
    typedef typename Format::element element;
    Steps steps(peers);
    const int me = peers.me, n = peers.n;

    for (int64_t first = blockIdx.x * chunk; first < most; first += gridDim.x * chunk) {
        for (int k = 1; k < n; k++) {
            const int rank = (me + k) % n;
            in_block(Copy<element>{send + starts.of[rank] + first, steps.into<element>(rank)},
                     part(starts.count(rank), first, chunk));
        }
        if (!steps.exchange_signals())
            return;
        const element *const own = send + starts.of[me] + first;
        in_block(Fold<Format, operation>{steps, own, recv + first, divisor, NO_RANK},
                 part(starts.count(me), first, chunk));
        steps.next();
    }
    steps.end();
}

template <class Element>
METHOD void gather_to_all(const Peers &peers, const Element *send, Element *recv,
                          const Starts &starts, int64_t chunk, int64_t most)
{
    Steps steps(peers);
    const int me = peers.me, n = peers.n;

    for (int64_t first = blockIdx.x * chunk; first < most; first += gridDim.x * chunk) {
        const int64_t mine = part(starts.count(me), first, chunk);
        in_block(Spread<Element>{steps, send + first, NO_RANK}, mine);
        in_block(Copy<Element>{send + first, recv + starts.of[me] + first}, mine);
        if (!steps.exchange_signals())
            return;
        for (int k = 1; k < n; k++) {
            const int rank = (me + k) % n;
            in_block(Copy<Element>{steps.from<Element>(rank), recv + starts.of[rank] + first},
                     part(starts.count(rank), first, chunk));
        }
        steps.next();
    }
    steps.end();
}

/* With two shots, the root scatters a chunk for each rank, and each rank sends its chunk to all. */
template <class Element>
METHOD void spread_from(const Peers &peers, Element *array, int root, int shots, int64_t chunk,
                        int64_t count)
{
    Steps steps(peers);
    const int me = peers.me, n = peers.n;
    const int64_t stride = shots == 1 ? chunk : n * chunk;

    for (int64_t first = blockIdx.x * stride; first < count; first += gridDim.x * stride) {
        Element *const begin = array + first;
        const int64_t left = count - first;

        if (shots == 1) {
            if (me == root)
                in_block(Spread<Element>{steps, begin, NO_RANK}, part(left, 0, chunk));
            if (!steps.exchange_signals())
                return;
            if (me != root)
                in_block(Copy<Element>{steps.from<Element>(root), begin}, part(left, 0, chunk));
            steps.next();
            continue;
        }
        for (int k = 1; me == root && k < n; k++) {
            const int rank = (me + k) % n;
            in_block(Copy<Element>{begin + rank * chunk, steps.into<Element>(rank)},
                     part(left, rank * chunk, chunk));
        }
        if (!steps.exchange_signals())
            return;
        Element *const mine = begin + me * chunk;
        const int64_t length = part(left, me * chunk, chunk);
        const Element *const given = me == root ? mine : steps.from<Element>(root);
        in_block(Spread<Element>{steps.after(), given, root}, length);
        if (me != root)
            in_block(Copy<Element>{given, mine}, length);
        steps.next();
        if (!steps.exchange_signals())
            return;
        for (int k = 1; me != root && k < n; k++) {
            const int rank = (me + k) % n;
            in_block(Copy<Element>{steps.from<Element>(rank), begin + rank * chunk},
                     part(left, rank * chunk, chunk));
        }
        steps.next();
    }
    steps.end();
}

/* ---- Kernels --------------------------------------------------------------------------------- */

#define PEER_KERNEL(NAME) extern "C" __global__ void __launch_bounds__(512) NAME

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
