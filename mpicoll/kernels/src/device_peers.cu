/* Collectives of GPUs that reach each other's memory: each is one kernel on every rank's GPU.
 *
 * device_kernels.py puts this behind device.cu, and behind it a line that makes kernels of it, as
 * ALL_REDUCE(...) at the end. Any C++ compiler that is told what a thread and a barrier of a
 * block are takes it, too.
 *
 * Every rank has a workspace that the kernels of all ranks write to: a Header, and two areas for
 * each block. Block b of a rank has to do with the blocks b of the others alone. It works in steps.
 * In a step it pushes data into the others' areas, tells each of them so, waits until each has told
 * it, and takes what has come. Data and flags go in one direction, and a block polls memory of its
 * own GPU.
 *
 * Steps are numbered on from call to call, and step s goes through area s % 2. Two areas are
 * enough: a rank pushes step s + 2 when all others have told it of step s + 1, which they do once
 * they have taken what came with step s. So are two flags for each rank, by the same argument. The
 * number of the latest step is kept on the device, where a kernel finds it when a graph is replayed.
 *
 * One shot: every rank pushes all of it to all, and combines all. Two shots: it pushes to each rank
 * that one's share, combines its own, and pushes the result to all; 2 (n - 1) / n of the message
 * leave a GPU, which is the least (R. Rabenseifner, Optimization of collective reduction operations,
 * ICCS 2004). In kernels with flags: the all-reduce of TensorRT-LLM and of vLLM, and the all-pairs
 * algorithms 1PA and 2PA of MSCCL++ (A. Shah et al., arXiv:2504.09014, 2025). All combine in the
 * order of the ranks.
 *
 * What a block has written before a barrier of its threads is visible to whom one of them tells it
 * with a release at system scope, and to those that meet the thread that acquires it behind a
 * barrier (D. Lustig et al., A formal analysis of the NVIDIA PTX memory consistency model, ASPLOS
 * 2019).
 *
 * Blocks wait for each other: there are no more of them than a GPU holds at once, whatever else it
 * does, and no two ranks share it. One that waits for too long gives up, and all ranks do.
 *
 * So they do when a host says so, by a word in memory of the host that all hosts and GPUs see: a
 * rank may fail before it has put its kernel into a stream. For the host that is a store, which needs
 * nothing of the driver: that may wait for a kernel (cudaFree, the loading of a module), and streams
 * may share a queue of the hardware with one. To read the word takes a GPU as long as a few looks at
 * its own memory, so a thread reads it once in a millisecond that it waits. (NCCL's abortFlag.)
 */

/* Ranks of a group, and blocks of a kernel; peers.py has them as well. */
#define RANKS 16
#define BLOCKS 32

/* The begin of a workspace. It begins as zeros. The flags of a block are in one line of memory. */
struct alignas(128) Header {
    uint64_t told[BLOCKS][2][RANKS]; /* by block, step modulo 2, and rank: the rank's call and step */
    uint64_t steps[BLOCKS];          /* the latest step of each block of this rank */
    uint64_t failure;                /* why a rank has given up, if one has */
};

/* What belongs to a group, as one rank's GPU sees it, and to all calls of a kind. */
struct Peers {
    char *of[RANKS];   /* the ranks' workspaces */
    uint64_t *failure; /* on the host, for all ranks: why one has given up; a host may write it, too */
    uint64_t limit;    /* nanoseconds to wait for a rank */
    int64_t room;      /* bytes of an area for what one rank pushes; a multiple of 16 */
    uint64_t call;     /* what all ranks must have alike of the call, above the bits of a step */
    int32_t n, me;
};

/* Where the blocks of an array begin, and where the last one ends, in elements. */
struct Starts {
    int64_t of[RANKS + 1];

    METHOD int64_t count(int rank) const
    {
        return of[rank + 1] - of[rank];
    }
};

/* Bits of a step; those above are of a call. */
#define STEP_BITS 48
#define STEP_MASK (((uint64_t)1 << STEP_BITS) - 1)

/* Why a rank has given up, in which call, with itself and the rank that it has waited for. Hosts have
 * reasons of their own, see peers.py.
 */
enum { LATE = 1, DIFFERS = 2 };
#define FAILURE(CALL, WHY, ME, RANK)                                                               \
    ((uint64_t)(CALL) << 48 | (uint64_t)(WHY) << 32 | (uint64_t)(ME) << 16 | (uint64_t)(RANK))

/* Nanoseconds of waiting after which a thread reads again what the hosts say. */
#define LOOK 1000000

#ifdef __CUDA_ARCH__
METHOD void tell(uint64_t *flag, uint64_t value)
{
    asm volatile("st.release.sys.u64 [%0], %1;" : : "l"(flag), "l"(value) : "memory");
}

METHOD uint64_t ask(const uint64_t *flag)
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

METHOD void rest()
{
}
#else
METHOD void tell(uint64_t *flag, uint64_t value)
{
    __atomic_store_n(flag, value, __ATOMIC_RELEASE);
}

METHOD uint64_t ask(const uint64_t *flag)
{
    return __atomic_load_n(flag, __ATOMIC_ACQUIRE);
}
#endif

/* ---- Memory that may lie anywhere ------------------------------------------------------------ */

template <int n, class Element> METHOD bool whole(const Element *array)
{
    return n == 1 || (size_t)array % sizeof(Piece<Element, n>) == 0;
}

template <int n, class Element> METHOD Piece<Element, n> load(const Element *array)
{
    if (whole<n>(array))
        return *piece<n>(array, 0);
    Piece<Element, n> loaded;
#pragma unroll
    for (int i = 0; i < n; i++)
        loaded.of[i] = array[i];
    return loaded;
}

template <int n, class Element> METHOD void store(Element *array, const Piece<Element, n> &stored)
{
    if (whole<n>(array)) {
        *piece<n>(array, 0) = stored;
        return;
    }
#pragma unroll
    for (int i = 0; i < n; i++)
        array[i] = stored.of[i];
}

/* Put what a Work gets of ``count`` elements, by the threads of one block. Each thread gets several
 * pieces before it puts the first, so that more of them are under way.
 */
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

/* Where a block is among its steps. */
struct Steps {
    const Peers &peers;
    uint64_t step; /* the one under way */

    METHOD explicit Steps(const Peers &peers)
        : peers(peers), step(header(peers.me)->steps[blockIdx.x] + 1)
    {
    }

    METHOD Header *header(int rank) const
    {
        return (Header *)peers.of[rank];
    }

    /* From the begin of a workspace to what a rank pushes there in this step. */
    METHOD int64_t offset(int source) const
    {
        const int64_t areas = blockIdx.x * 2 + step % 2;
        return (int64_t)sizeof(Header) + (areas * peers.n + source) * peers.room;
    }

    /* Where this rank pushes to another. */
    template <class Element> METHOD Element *into(int rank) const
    {
        return (Element *)(peers.of[rank] + offset(peers.me));
    }

    /* What has come from another. */
    template <class Element> METHOD const Element *from(int rank) const
    {
        return (const Element *)(peers.of[peers.me] + offset(rank));
    }

    /* Tell all ranks that this one has pushed, and wait for them. False if one has given up. */
    METHOD bool meet() const
    {
        const uint64_t value = peers.call << STEP_BITS | step;
        const int parity = (int)(step % 2);
        bool failed = false;

        __syncthreads();
        for (int rank = threadIdx.x; rank < peers.n; rank += blockDim.x)
            if (rank != peers.me)
                tell(&header(rank)->told[blockIdx.x][parity][peers.me], value);
        for (int rank = threadIdx.x; rank < peers.n; rank += blockDim.x)
            if (rank != peers.me)
                failed |= !await(rank, &header(peers.me)->told[blockIdx.x][parity][rank], value);
        return !__syncthreads_or(failed);
    }

    METHOD bool await(int rank, const uint64_t *flag, uint64_t value) const
    {
        const uint64_t begun = nanoseconds();
        uint64_t looked = begun;

        for (;;) {
            const uint64_t seen = ask(flag), other = ask(&header(peers.me)->failure);
            if (other) {
                if (!ask(peers.failure))
                    tell(peers.failure, other);
                return false;
            }
            if (seen == value)
                return true;
            const uint64_t now = nanoseconds();
            if ((seen & STEP_MASK) == step)
                give_up(FAILURE(peers.call, DIFFERS, peers.me, rank));
            else if (now - begun > peers.limit)
                give_up(FAILURE(peers.call, LATE, peers.me, rank));
            else if (now - looked > LOOK) {
                const uint64_t said = ask(peers.failure);
                if (said)
                    tell(&header(peers.me)->failure, said);
                looked = now;
            } else
                rest();
        }
    }

    METHOD void give_up(uint64_t why) const
    {
        for (int rank = 0; rank < peers.n; rank++)
            tell(&header(rank)->failure, why);
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

    /* End the call; each step has been followed by ``next``. */
    METHOD void end() const
    {
        __syncthreads();
        if (threadIdx.x == 0)
            header(peers.me)->steps[blockIdx.x] = step - 1;
    }
};

/* ---- Work of a block ------------------------------------------------------------------------- */

enum { NOBODY = -2, ALL = -1 };

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

/* Push the same to all other ranks but one, perhaps NOBODY. */
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

/* Combine this rank's elements and what has come from the others. In the step that follows, push
 * the result to a rank, to ALL others, or to NOBODY.
 */
template <class Format, int operation> struct Fold {
    typedef typename Format::element element;
    typedef typename Format::number number;
    enum { length = LENGTH(sizeof(element)) };

    const Steps steps;
    const element *own;
    element *out; /* may be ``own``; null: this rank does not keep it */
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
 * Block b takes the chunks b, b + blocks, ..., of ``chunk`` elements, of which an area has room; of
 * two shots a chunk for each rank at once. All ranks have as many.
 */

METHOD int64_t part(int64_t left, int64_t before, int64_t chunk)
{
    left -= before;
    return left < 0 ? 0 : left < chunk ? left : chunk;
}

/* root: the rank that gets the result, or ALL. */
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
                in_block(Spread<element>{steps, begin, NOBODY}, part(left, 0, chunk));
            else if (!keeps)
                in_block(Copy<element>{begin, steps.into<element>(root)}, part(left, 0, chunk));
            if (!steps.meet())
                return;
            if (keeps)
                in_block(Fold<Format, operation>{steps, begin, begin, divisor, NOBODY},
                         part(left, 0, chunk));
            steps.next();
            continue;
        }
        for (int k = 1; k < n; k++) {
            const int rank = (me + k) % n;
            in_block(Copy<element>{begin + rank * chunk, steps.into<element>(rank)},
                     part(left, rank * chunk, chunk));
        }
        if (!steps.meet())
            return;
        element *const mine = begin + me * chunk;
        in_block(Fold<Format, operation>{steps, mine, keeps ? mine : 0, divisor, root},
                 part(left, me * chunk, chunk));
        steps.next();
        if (!steps.meet())
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
        if (!steps.meet())
            return;
        const element *const own = send + starts.of[me] + first;
        in_block(Fold<Format, operation>{steps, own, recv + first, divisor, NOBODY},
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
        in_block(Spread<Element>{steps, send + first, NOBODY}, mine);
        in_block(Copy<Element>{send + first, recv + starts.of[me] + first}, mine);
        if (!steps.meet())
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

/* Of two shots, the root scatters a chunk for each rank, and each gives its own to all others. */
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
                in_block(Spread<Element>{steps, begin, NOBODY}, part(left, 0, chunk));
            if (!steps.meet())
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
        if (!steps.meet())
            return;
        Element *const mine = begin + me * chunk;
        const int64_t length = part(left, me * chunk, chunk);
        const Element *const given = me == root ? mine : steps.from<Element>(root);
        in_block(Spread<Element>{steps.after(), given, root}, length);
        if (me != root)
            in_block(Copy<Element>{given, mine}, length);
        steps.next();
        if (!steps.meet())
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
