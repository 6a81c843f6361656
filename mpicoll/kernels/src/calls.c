/* The short way of a call: look at the arrays, find the plan, count, and carry it out in the memory
 * that the ranks share, without a line of Python. What is unusual about a call in any way, and every
 * error, is left to the Python function that it takes the place of, mpicoll/dispatch/execute.py's
 * run_fast and run_all, to the same behaviour.
 *
 * An extension module for CPython's limited API: one file serves all versions from 3.10 on.
 */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include "arrays.h"

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <structmember.h>
#include <time.h>

/* What Python has told this module. */
static struct {
    PyObject *state;      /* of mpicoll.core.groups: its attribute `default` is the group */
    PyObject *group_type; /* ProcessGroup */
    /* Functions in Python, see Ways in mpicoll/kernels/calls.py. */
    PyObject *run_fast, *run_later, *run_all, *finish, *finished;
    PyObject *default_name, *submitted_name, *finished_name, *no, *yes;
} known;

/* ---- A group's calls --------------------------------------------------------------------------- */

typedef int all_reduce_function(const void *kind, char *array, size_t count, uint32_t number);
typedef int blocks_function(const void *kind, const char *send, char *recv, size_t count,
                            uint32_t root, uint32_t number);
typedef int agree_function(const void *shared, uint32_t number, uint64_t what, uint64_t count);
typedef int lists_function(const void *kind, const struct block *send, const struct block *recv,
                           size_t count, uint32_t root, uint32_t number);
typedef int ask_function(const void *shared, uint32_t number, uint64_t what, uint64_t count,
                         uint64_t nanoseconds);
typedef int fused_function(const void *kind, char *const *send, char *const *recv, size_t *ends,
                           size_t n, uint64_t sizes, uint32_t number);

/* Which of these a way calls. Each returns 1 if it has carried the call out, or, FUSED, the calls of a
 * list. */
enum { ALL_REDUCE, BLOCKS, AGREE, LISTS, FUSED };

/* How calls of one kind and of some sizes are carried out here. */
struct way {
    PyObject *primitive, *dtype, *op; /* objects of the tables: the same call has the same */
    PyObject *owner;                  /* of the memory that `argument` is in */
    uint64_t signature;               /* the call's, without the root */
    size_t fewest, end;               /* counts of a block */
    size_t n, me;                     /* ranks, and this one */
    void *function;
    const void *argument;
    int shape;
    int many_in, many_out; /* as many blocks as ranks */
    int listed;            /* which come as lists; those that only the root has are None elsewhere */
    int has_input, even, rooted;
    uint64_t parts; /* numbers of an element, as the ranks compare them */
    ask_function *ask; /* whether all ranks make an asynchronous call now; or NULL */
    const void *ask_argument;
    uint64_t patience; /* nanoseconds */
};

/* A call in the history: see CallEntry in mpicoll/kernels/calls.py. Times are nanoseconds of the monotonic
 * clock; 0: not yet. */
struct past {
    uint64_t id, place, number, kind, sizes, thread;
    int64_t created, started, completed;
    uint32_t root;
};

/* A group's last call. Other processes read it while this one waits: see mpicoll/failures/status_page.py, which
 * has the same. */
struct cell {
    uint64_t group, limit; /* written there */
    uint64_t number, kind, sizes, root;
    uint64_t inside; /* the call has not ended */
    uint64_t thread; /* that makes it */
};

typedef struct {
    PyObject_HEAD
    struct past *history; /* a ring of the latest calls */
    size_t length, next;
    uint64_t entered, begun; /* calls that were put there, and that have begun */
    struct past *current;    /* the one that is under way, if it is `current_id`'s yet */
    uint64_t current_id;
    unsigned long long sequence;
    PyObject *lock, *acquire, *release; /* the lock that is held during a call, and its methods */
    PyObject *worker;                   /* the group's thread, or None */
    PyObject *record;                   /* of the calls; see the attribute recent */
    int compared;                       /* each call is compared by itself: only the last counts */
    int dropped;                        /* and that differed */
    struct cell *last, own; /* the last call: in memory that others read, or here */
    unsigned long long next_check;
    struct way *ways;
    size_t n_ways;
} Calls;

/* The count of a block of a call: where blocks come as a list, that of the array beside it. */
static size_t count_of(const struct way *way, const struct side *out, const struct side *in)
{
    if (way->listed)
        return way->many_in ? out->first.count : in->first.count;
    return way->many_out ? out->first.count / way->n : out->first.count;
}

static int serves(const struct way *way, PyObject *primitive, PyObject *dtype, PyObject *op,
                  size_t count)
{
    return way->primitive == primitive && way->dtype == dtype && way->op == op &&
           count >= way->fewest && count < way->end;
}

static const struct way *find(const Calls *calls, PyObject *primitive, PyObject *dtype,
                              PyObject *op, const struct side *out, const struct side *in)
{
    for (size_t i = 0; i < calls->n_ways; i++) {
        const struct way *way = &calls->ways[i];
        if (way->shape != FUSED && serves(way, primitive, dtype, op, count_of(way, out, in)))
            return way;
    }
    return NULL;
}

/* The way of a list of calls of which the largest has `*count` elements a block, or, NULL, any. */
static const struct way *find_fused(const Calls *calls, PyObject *primitive, PyObject *dtype,
                                    PyObject *op, const size_t *count)
{
    for (size_t i = 0; i < calls->n_ways; i++) {
        const struct way *way = &calls->ways[i];
        if (way->shape == FUSED &&
            serves(way, primitive, dtype, op, count ? *count : way->fewest))
            return way;
    }
    return NULL;
}

/* Blocks of an input and an output that are one array each fit and can be cut between rows. */
static int arrays_fit(const struct way *way, const struct seen *in, const struct seen *out,
                      size_t count)
{
    const size_t n = way->n;
    return in->count == (way->many_in ? n : 1) * count &&
           out->count == (way->many_out ? n : 1) * count &&
           (way->even || (in->rows % n == 0 && out->rows % n == 0));
}

/* A side is what this rank has to have: a list if it holds blocks, nothing if only the root has it. */
static int is_whole(const struct way *way, const struct side *side, int many, unsigned long root)
{
    if (many && way->rooted && way->me != root)
        return side->n == 0;
    return many ? side->held && side->n == way->n : !side->held && side->n == 1;
}

/* The same for blocks that come as lists. */
static int lists_fit(const struct way *way, const struct side *in, const struct side *out,
                     unsigned long root)
{
    if (!is_whole(way, in, way->many_in, root) || !is_whole(way, out, way->many_out, root) ||
        (out->held && overlaps_itself(out)))
        return 0;
    if (way->many_in && way->many_out) /* what a rank sends to itself */
        return in->blocks[way->me].count == out->blocks[way->me].count;
    const struct side *list = way->many_in ? in : out, *own = way->many_in ? out : in;
    if (list->n == 0)
        return 1;
    return list->alike && list->first.count == own->first.count &&
           (!way->rooted ||
            (list->alike_in_shape && have_same_shape(&list->first, &own->first)));
}

/* Input and output belong together, and do not overlap. */
static int fits(const struct way *way, const struct side *in, const struct side *out,
                unsigned long root, size_t count)
{
    if (in->n && out->n && (in->first.dtype != out->first.dtype || overlap(in, out)))
        return 0;
    if (way->listed)
        return lists_fit(way, in, out, root);
    return in->n == 1 && !in->held && out->n == 1 && !out->held &&
           arrays_fit(way, &in->first, &out->first, count);
}

/* Cuts a side that is one array into its blocks. */
static void cut(struct side *side, size_t n, size_t count)
{
    for (size_t k = 0; k < n && k < MOST_ARRAYS; k++)
        side->blocks[k] =
            (struct block){side->first.data + k * count * side->first.itemsize, count};
}

/* Whether the group's thread has tasks that are not finished, behind which a call has to queue, or which
 * make it. */
static int is_busy(const Calls *calls)
{
    if (calls->worker == Py_None)
        return 0;
    PyObject *submitted = PyObject_GetAttr(calls->worker, known.submitted_name);
    PyObject *finished = submitted ? PyObject_GetAttr(calls->worker, known.finished_name) : NULL;
    const int idle = finished ? PyObject_RichCompareBool(submitted, finished, Py_EQ) : -1;
    Py_XDECREF(submitted);
    Py_XDECREF(finished);
    if (idle < 0)
        PyErr_Clear();
    return idle != 1;
}

/* Whether all ranks make an asynchronous call now: then it is best carried out at once, where no
 * processor is free for a thread that would. */
static int are_all_here(const Calls *calls, const struct way *way, uint64_t sizes,
                        unsigned long root)
{
    const uint32_t number = (uint32_t)(calls->sequence + 1);
    int here;
    Py_INCREF(way->owner);
    Py_BEGIN_ALLOW_THREADS;
    here = way->ask(way->ask_argument, number, way->signature | (uint64_t)root << 24,
                    sizes * way->parts, way->patience);
    Py_END_ALLOW_THREADS;
    Py_DECREF(way->owner);
    return here;
}

static int64_t now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

/* Puts a call into the history; NULL if there is none. */
static struct past *enter(Calls *calls, uint64_t kind, uint64_t sizes, uint32_t root)
{
    if (!calls->length)
        return NULL;
    struct past *past = &calls->history[calls->next];
    calls->next = calls->next + 1 < calls->length ? calls->next + 1 : 0;
    *past = (struct past){.id = ++calls->entered,
                          .kind = kind,
                          .sizes = sizes,
                          .root = root,
                          .thread = PyThread_get_thread_ident(),
                          .created = now()};
    return past;
}

/* Begins a call of the history at a time. */
static void start(Calls *calls, struct past *past, int64_t time)
{
    past->place = ++calls->begun;
    past->number = calls->sequence;
    past->started = time;
    calls->current = past;
    calls->current_id = past->id;
}

static void start_now(Calls *calls, uint64_t kind, uint64_t sizes, uint32_t root)
{
    struct past *past = enter(calls, kind, sizes, root);
    if (past)
        start(calls, past, past->created);
}

/* The call that is under way is done. */
static void complete(Calls *calls)
{
    if (calls->current && calls->current->id == calls->current_id)
        calls->current->completed = now();
    calls->current = NULL;
}

/* Notes what the last call is, and that it has begun. */
static void note(Calls *calls, uint64_t kind, uint64_t sizes, uint64_t root)
{
    struct cell *last = calls->last;
    last->number = calls->sequence;
    last->kind = kind;
    last->sizes = sizes;
    last->root = root;
    last->thread = (uint64_t)(uintptr_t)pthread_self(); /* as threading.get_ident */
    __atomic_store_n(&last->inside, 1, __ATOMIC_RELEASE);
    calls->dropped = 0;
}

/* Notes that the last call has ended, and releases the lock. Returns a new reference, or NULL. */
static PyObject *release(Calls *calls)
{
    __atomic_store_n(&calls->last->inside, 0, __ATOMIC_RELEASE);
    return PyObject_CallFunctionObjArgs(calls->release, NULL);
}

/* Begins a call: takes the lock, counts the call, and puts it on the record. Returns 1, 0 if another
 * thread is in a call, or -1 with an exception. */
static int begin(Calls *calls, const struct way *way, uint64_t sizes, unsigned long root)
{
    PyObject *got = PyObject_CallFunctionObjArgs(calls->acquire, known.no, NULL);
    if (!got)
        return -1;
    Py_DECREF(got);
    if (got == known.no)
        return 0;
    calls->sequence++;
    note(calls, way->signature, sizes, root);
    start_now(calls, way->signature, sizes, (uint32_t)root);
    Py_INCREF(way->owner);
    return 1;
}

/* Ends a call by what its function has returned. Returns 1, or -1 with an exception. */
static int end(Calls *calls, const struct way *way, int result, PyObject *primitive,
               PyObject *output, PyObject *input, PyObject *root)
{
    PyObject *type = NULL, *error = NULL, *traceback = NULL;
    int done = result == 1;
    if (!done) { /* all ranks find out together why, and how it goes on */
        PyObject *what = PyLong_FromLong(result);
        PyObject *ended =
            what ? PyObject_CallFunctionObjArgs(known.finish, (PyObject *)calls, way->owner, what,
                                                primitive, output, input, root, NULL)
                 : NULL;
        done = ended != NULL;
        Py_XDECREF(ended);
        Py_XDECREF(what);
        PyErr_Fetch(&type, &error, &traceback);
    }
    if (done)
        complete(calls);
    Py_DECREF(way->owner);
    PyObject *released = release(calls);
    Py_XDECREF(released);
    if (!done)
        PyErr_Restore(type, error, traceback);
    return done && released ? 1 : -1;
}

/* Of an asynchronous call: it is best left to the group's thread; or it was begun, and has failed with
 * the exception at hand, which is its Work's. */
enum { QUEUED = 2, FAILED };

/* Carries out a call on arrays that were seen; see carry_out. No Python runs before it begins, so
 * that the group stays as it is. */
static int carry_out_seen(Calls *calls, PyObject *const *args, struct side *out, struct side *in,
                          int later)
{
    PyObject *primitive = args[0], *op = args[5];
    PyObject *dtype = out->n ? out->first.dtype : in->first.dtype;
    const struct way *found = find(calls, primitive, dtype, op, out, in);
    if (!found || !out->first.writable || is_busy(calls))
        return 0;
    struct way way = *found; /* another thread may add to them */
    unsigned long root = 0;
    if (way.rooted) {
        root = PyLong_AsUnsignedLong(args[6]);
        if (PyErr_Occurred()) {
            PyErr_Clear();
            return 0;
        }
    }
    const size_t count = count_of(&way, out, in);
    if (way.has_input ? !fits(&way, in, out, root, count) : in->n || out->held)
        return 0;
    if (way.shape == LISTS && !way.listed) {
        cut(out, way.many_out ? way.n : 1, count);
        cut(in, way.many_in ? way.n : 1, count);
    }
    const struct side *given = way.has_input ? in : out;
    const uint64_t sizes = way.even ? count : 0;
    if (later) {
        if (!way.ask)
            return 0;
        if (!are_all_here(calls, &way, sizes, root))
            return QUEUED;
        /* Meanwhile another thread may have ended the group, or given its thread a task. */
        found = find(calls, primitive, dtype, op, out, in);
        if (!found || is_busy(calls))
            return 0;
        way = *found;
    }
    const int begun = begin(calls, &way, sizes, root);
    if (begun <= 0)
        return begun;
    const uint32_t number = (uint32_t)calls->last->number;
    int result;
    Py_BEGIN_ALLOW_THREADS;
    if (way.shape == ALL_REDUCE)
        result =
            ((all_reduce_function *)way.function)(way.argument, out->first.data, count, number);
    else if (way.shape == BLOCKS)
        result = ((blocks_function *)way.function)(way.argument, given->first.data,
                                                   out->first.data, count, (uint32_t)root, number);
    else if (way.shape == LISTS)
        result = ((lists_function *)way.function)(way.argument, given->blocks, out->blocks, count,
                                                  (uint32_t)root, number);
    else
        result = ((agree_function *)way.function)(way.argument, number, way.signature, 0);
    Py_END_ALLOW_THREADS;
    const int done = end(calls, &way, result, primitive, out->held ? out->held : args[3],
                         in->held ? in->held : args[4], args[6]);
    /* Others, as of Ctrl-C, are for the program. */
    return done < 0 && later && PyErr_ExceptionMatches(PyExc_Exception) ? FAILED : done;
}

/* Carries a call out: 1 if it did, -1 with an exception, 0 if it is not for here; or see above. */
static int carry_out(Calls *calls, PyObject *const *args, int later)
{
    struct side out, in;
    if (calls->n_ways == 0)
        return 0;
    out.held = in.held = NULL;
    int done = take(&out, args[3]);
    if (done > 0)
        done = take(&in, args[4]);
    if (done > 0)
        done = see_side(&out, args[3]) && see_side(&in, args[4])
                   ? carry_out_seen(calls, args, &out, &in, later)
                   : 0;
    PyObject *type = NULL, *error = NULL, *traceback = NULL;
    if (out.held || in.held) { /* the last reference to an array, perhaps */
        PyErr_Fetch(&type, &error, &traceback);
        Py_XDECREF(out.held);
        Py_XDECREF(in.held);
        PyErr_Restore(type, error, traceback);
    }
    return done;
}

/* The group of a call, if it is one of mpicoll's own: a new reference. NULL without an exception for all
 * other calls. */
static Calls *group_of(PyObject *group)
{
    if (group == Py_None)
        group = PyObject_GetAttr(known.state, known.default_name);
    else
        Py_INCREF(group);
    if (group && (PyObject *)Py_TYPE(group) != known.group_type) {
        Py_DECREF(group);
        group = NULL;
    }
    return (Calls *)group;
}

/* The Work of an asynchronous call that was carried out, or has failed with the exception at hand. */
static PyObject *finished(Calls *calls, PyObject *primitive, PyObject *output)
{
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    if (error && traceback)
        PyException_SetTraceback(error, traceback);
    PyObject *work = PyObject_CallFunctionObjArgs(known.finished, (PyObject *)calls, primitive,
                                                  output, error ? error : Py_None, NULL);
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(traceback);
    return work;
}

static PyObject *run_fast(PyObject *module, PyObject *const *args, Py_ssize_t n)
{
    (void)module;
    if (n != 7) {
        PyErr_Format(PyExc_TypeError, "run_fast takes 7 arguments, not %zd", n);
        return NULL;
    }
    const int later = args[2] == known.yes;
    Calls *calls = later || args[2] == known.no ? group_of(args[1]) : NULL;
    PyObject *python_way = known.run_fast, *result = NULL;
    if (calls) {
        const int done = carry_out(calls, args, later);
        if (done == QUEUED)
            python_way = known.run_later;
        else if (done > 0 && later)
            result = finished(calls, args[0], args[3]);
        else if (done > 0)
            result = (Py_INCREF(Py_None), Py_None);
        Py_DECREF(calls);
        if (result)
            return result;
    }
    return PyErr_Occurred() ? NULL
                            : PyObject_CallFunctionObjArgs(python_way, args[0], args[1], args[2],
                                                           args[3], args[4], args[5], args[6],
                                                           NULL);
}

/* ---- A list of calls --------------------------------------------------------------------------- */

/* The root of a list of calls, see mpicoll/core/signature.py, and the mark of what sizes come to. */
#define LIST 0xFFFFFFFFul
static const uint64_t HASH = 1ull << 59;

/* Returns a tuple of the items of a list or tuple, in which tuples stand for lists: a new reference. NULL
 * without an exception if it is not for here, or if an array is not a usual one. */
static PyObject *take_all(PyObject *list)
{
    PyObject *all = PyList_CheckExact(list) ? PyList_AsTuple(list)
                    : PyTuple_CheckExact(list) ? PyTuple_GetSlice(list, 0, PyTuple_Size(list))
                                               : NULL;
    const Py_ssize_t n = all ? PyTuple_Size(all) : 0;
    PyObject *taken = n > 0 ? PyTuple_New(n) : NULL;
    int usual = taken != NULL;
    for (Py_ssize_t i = 0; i < n && usual > 0; i++) {
        PyObject *item = PyTuple_GetItem(all, i);
        struct side side;
        side.held = NULL;
        usual = item == Py_None ? 0 : take(&side, item);
        if (usual > 0)
            PyTuple_SetItem(taken, i, side.held ? side.held : (Py_INCREF(item), item));
        else
            Py_XDECREF(side.held);
    }
    Py_XDECREF(all);
    if (usual <= 0)
        Py_CLEAR(taken);
    return taken;
}

/* Sees an item that take_all returned. */
static int see_item(struct side *side, PyObject *items, Py_ssize_t i)
{
    PyObject *item = items == Py_None ? Py_None : PyTuple_GetItem(items, i);
    side->held = PyTuple_CheckExact(item) ? item : NULL;
    return see_side(side, item);
}

/* What a list of calls is carried out on: of each block, of all that are sent, then of all that are
 * received, the place in each call; and the ends of the calls' elements in a block. */
struct fused {
    char **send, **recv;
    size_t *ends;
    size_t n;
    PyObject *dtype;
    size_t most; /* elements of a call's block */
};

/* Memory of a span, for finding what is both read and written. */
struct span {
    uintptr_t begin, end;
    int written;
};

static int by_begin(const void *one, const void *other)
{
    const uintptr_t a = ((const struct span *)one)->begin, b = ((const struct span *)other)->begin;
    return (a > b) - (a < b);
}

/* Whether anything is written twice, or read in one call and written in another, or in the same: 1, 0,
 * or -1 with an exception. */
static int overlap_any(const struct fused *fused, size_t blocks_in, size_t blocks_out,
                       size_t itemsize)
{
    const size_t n = fused->n, all = n * (blocks_in + blocks_out);
    struct span *spans = PyMem_Malloc(all * sizeof *spans);
    uintptr_t read = 0, written = 0;
    int found = 0, sorted = 1;
    if (!spans) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t k = 0; k < all; k++) {
        const size_t call = k % n, count = fused->ends[call] - (call ? fused->ends[call - 1] : 0);
        const uintptr_t begin = (uintptr_t)fused->send[k]; /* those that are received come behind */
        spans[k] = (struct span){begin, begin + count * itemsize, k >= n * blocks_in};
        sorted = sorted && (k == 0 || spans[k - 1].begin <= begin);
    }
    if (!sorted)
        qsort(spans, all, sizeof *spans, by_begin);
    for (size_t k = 0; k < all && !found; k++) {
        uintptr_t *own = spans[k].written ? &written : &read;
        if (spans[k].begin == spans[k].end)
            continue;
        found = spans[k].begin < written || (spans[k].written && spans[k].begin < read);
        *own = *own > spans[k].end ? *own : spans[k].end;
    }
    PyMem_Free(spans);
    return found;
}

/* Sees the arrays of all calls and puts them into the table. Returns 1, or 0 if they are not for here. */
static int see_calls(const struct way *way, struct fused *fused, PyObject *outputs,
                        PyObject *inputs)
{
    const size_t n = fused->n;
    const size_t blocks_in = way->many_in ? way->n : 1, blocks_out = way->many_out ? way->n : 1;
    struct side out, in;
    size_t total = 0;
    for (size_t i = 0; i < n; i++) {
        if (!see_item(&out, outputs, (Py_ssize_t)i) || !see_item(&in, inputs, (Py_ssize_t)i) ||
            out.first.dtype != fused->dtype || !out.first.writable)
            return 0;
        const size_t count = count_of(way, &out, &in);
        if (way->has_input ? !fits(way, &in, &out, 0, count) : in.n || out.held)
            return 0;
        if (!out.held)
            cut(&out, blocks_out, count);
        if (!in.held && in.n)
            cut(&in, blocks_in, count);
        for (size_t k = 0; k < blocks_out; k++)
            fused->recv[k * n + i] = out.blocks[k].data;
        for (size_t k = 0; k < blocks_in && in.n; k++)
            fused->send[k * n + i] = in.blocks[k].data;
        fused->ends[i] = total += count;
        fused->most = count > fused->most ? count : fused->most;
    }
    return 1;
}

/* What the sizes of the calls come to: see encode_list in mpicoll/core/signature.py. */
static uint64_t hash_sizes(const size_t *ends, size_t n)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < n; i++) {
        uint64_t mixed =
            ends[i] - (i ? ends[i - 1] : 0) + (uint64_t)(i + 1) * 0x9E3779B97F4A7C15u;
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9u;
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EBu;
        sum += mixed ^ mixed >> 31;
    }
    return (sum & (HASH - 1)) | HASH;
}

/* Carries out the calls that take_all returned; the rest is as in carry_out. */
static int carry_out_taken(Calls *calls, PyObject *primitive, PyObject *op, PyObject *outputs,
                           PyObject *inputs)
{
    struct side first;
    if (!see_item(&first, outputs, 0) || is_busy(calls))
        return 0;
    const struct way *found = find_fused(calls, primitive, first.first.dtype, op, NULL);
    if (!found || found->has_input == (inputs == Py_None))
        return 0;
    struct way way = *found; /* another thread may add to them */
    struct fused fused = {NULL, NULL, NULL, (size_t)PyTuple_Size(outputs), first.first.dtype, 0};
    const size_t blocks_in = way.has_input ? way.many_in ? way.n : 1 : 0;
    const size_t blocks_out = way.many_out ? way.n : 1;
    char **table = PyMem_Malloc(fused.n * ((blocks_in + blocks_out) * sizeof *table +
                                           sizeof *fused.ends));
    if (!table) {
        PyErr_NoMemory();
        return -1;
    }
    fused.send = table;
    fused.recv = table + fused.n * blocks_in;
    fused.ends = (size_t *)(fused.recv + fused.n * blocks_out);
    int done = see_calls(&way, &fused, outputs, inputs);
    found = done ? find_fused(calls, primitive, fused.dtype, op, &fused.most) : NULL;
    done = found != NULL;
    if (done) {
        done = overlap_any(&fused, blocks_in, blocks_out, first.first.itemsize);
        done = done < 0 ? -1 : !done;
    }
    if (done > 0) {
        way = *found;
        const uint64_t sizes = hash_sizes(fused.ends, fused.n);
        done = begin(calls, &way, sizes, LIST);
        if (done > 0) {
            const uint32_t number = (uint32_t)calls->last->number;
            int result;
            Py_BEGIN_ALLOW_THREADS;
            result = ((fused_function *)way.function)(way.argument, fused.send, fused.recv,
                                                      fused.ends, fused.n, sizes, number);
            Py_END_ALLOW_THREADS;
            calls->sequence += result == 1; /* the list, and the data */
            PyObject *root = PyLong_FromUnsignedLong(LIST);
            done = end(calls, &way, root ? result : -1, primitive, outputs, inputs,
                       root ? root : Py_None);
            Py_XDECREF(root);
        }
    }
    PyMem_Free(table);
    return done;
}

static int carry_out_all(Calls *calls, PyObject *const *args)
{
    if (calls->n_ways == 0)
        return 0;
    PyObject *outputs = take_all(args[4]);
    PyObject *inputs = NULL;
    if (outputs) {
        inputs = args[5] == Py_None ? (Py_INCREF(Py_None), Py_None) : take_all(args[5]);
        if (inputs && inputs != Py_None && PyTuple_Size(inputs) != PyTuple_Size(outputs))
            Py_CLEAR(inputs);
    }
    int done = PyErr_Occurred() ? -1 : 0;
    if (inputs)
        done = carry_out_taken(calls, args[1], args[6], outputs, inputs);
    PyObject *type, *error, *traceback; /* the last reference to an array, perhaps */
    PyErr_Fetch(&type, &error, &traceback);
    Py_XDECREF(outputs);
    Py_XDECREF(inputs);
    PyErr_Restore(type, error, traceback);
    return done;
}

static PyObject *run_all(PyObject *module, PyObject *const *args, Py_ssize_t n)
{
    (void)module;
    if (n != 7) {
        PyErr_Format(PyExc_TypeError, "run_all takes 7 arguments, not %zd", n);
        return NULL;
    }
    Calls *calls = args[3] == known.no ? group_of(args[2]) : NULL;
    if (calls) {
        const int done = carry_out_all(calls, args);
        Py_DECREF(calls);
        if (done)
            return done < 0 ? NULL : (Py_INCREF(Py_None), Py_None);
    }
    return PyErr_Occurred() ? NULL
                            : PyObject_CallFunctionObjArgs(known.run_all, args[0], args[1],
                                                           args[2], args[3], args[4], args[5],
                                                           args[6], NULL);
}

/* ---- The type ---------------------------------------------------------------------------------- */

static void forget_ways(Calls *calls)
{
    struct way *ways = calls->ways;
    const size_t n = calls->n_ways;
    calls->ways = NULL;
    calls->n_ways = 0;
    for (size_t i = 0; i < n; i++) {
        Py_DECREF(ways[i].primitive);
        Py_DECREF(ways[i].dtype);
        Py_DECREF(ways[i].op);
        Py_DECREF(ways[i].owner);
    }
    PyMem_Free(ways);
}

static int calls_init(PyObject *self, PyObject *args, PyObject *keywords)
{
    Calls *calls = (Calls *)self;
    PyObject *lock;
    unsigned long long length = 0;
    (void)keywords;
    if (!PyArg_ParseTuple(args, "O|K", &lock, &length))
        return -1;
    PyObject *acquire = PyObject_GetAttrString(lock, "acquire");
    PyObject *release = PyObject_GetAttrString(lock, "release");
    PyObject *record = Py_BuildValue("[(iiii)]", 0, 0, 0, 0);
    if (!acquire || !release || !record || calls->lock) {
        Py_XDECREF(acquire);
        Py_XDECREF(release);
        Py_XDECREF(record);
        if (calls->lock)
            PyErr_SetString(PyExc_TypeError, "it is initialised already");
        return -1;
    }
    if (length) {
        calls->history = calloc((size_t)length, sizeof *calls->history);
        calls->length = calls->history ? (size_t)length : 0; /* it goes without */
    }
    Py_INCREF(lock);
    Py_INCREF(Py_None);
    calls->lock = lock;
    calls->acquire = acquire;
    calls->release = release;
    calls->record = record;
    calls->worker = Py_None;
    calls->last = &calls->own;
    return 0;
}

static int calls_traverse(PyObject *self, visitproc visit, void *arg)
{
    Calls *calls = (Calls *)self;
    Py_VISIT((PyObject *)Py_TYPE(self));
    Py_VISIT(calls->lock);
    Py_VISIT(calls->acquire);
    Py_VISIT(calls->release);
    Py_VISIT(calls->worker);
    Py_VISIT(calls->record);
    for (size_t i = 0; i < calls->n_ways; i++) {
        Py_VISIT(calls->ways[i].primitive);
        Py_VISIT(calls->ways[i].dtype);
        Py_VISIT(calls->ways[i].op);
        Py_VISIT(calls->ways[i].owner);
    }
    return 0;
}

static int calls_clear(PyObject *self)
{
    Calls *calls = (Calls *)self;
    forget_ways(calls);
    Py_CLEAR(calls->acquire);
    Py_CLEAR(calls->release);
    Py_CLEAR(calls->lock);
    Py_CLEAR(calls->worker);
    Py_CLEAR(calls->record);
    return 0;
}

static void calls_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    calls_clear(self);
    free(((Calls *)self)->history);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

/* Parses kind, sizes and root; 0 with an exception if they are none. */
static int parse_call(PyObject *const *args, unsigned long long *kind, unsigned long long *sizes,
                      uint32_t *root)
{
    *kind = PyLong_AsUnsignedLongLong(args[0]);
    *sizes = PyLong_AsUnsignedLongLong(args[1]);
    *root = (uint32_t)PyLong_AsUnsignedLongLongMask(args[2]);
    return !PyErr_Occurred();
}

/* schedule(kind, sizes, root): puts a call that is queued into the history; returns its id there. */
static PyObject *calls_schedule(PyObject *self, PyObject *const *args, Py_ssize_t n)
{
    unsigned long long kind, sizes;
    uint32_t root;
    if (n != 3) {
        PyErr_SetString(PyExc_TypeError, "schedule takes kind, sizes and root");
        return NULL;
    }
    if (!parse_call(args, &kind, &sizes, &root))
        return NULL;
    const struct past *past = enter((Calls *)self, kind, sizes, root);
    return PyLong_FromUnsignedLongLong(past ? past->id : 0);
}

/* begin_uncompared(kind, sizes, root): the same of a call that begins now and is not counted. */
static PyObject *calls_begin_uncompared(PyObject *self, PyObject *const *args, Py_ssize_t n)
{
    unsigned long long kind, sizes;
    uint32_t root;
    if (n != 3) {
        PyErr_SetString(PyExc_TypeError, "begin_uncompared takes kind, sizes and root");
        return NULL;
    }
    if (!parse_call(args, &kind, &sizes, &root))
        return NULL;
    start_now((Calls *)self, kind, sizes, root);
    Py_RETURN_NONE;
}

/* complete(): the call that has begun last is done. */
static PyObject *calls_complete(PyObject *self, PyObject *unused)
{
    (void)unused;
    complete((Calls *)self);
    Py_RETURN_NONE;
}

/* history(): the latest calls, oldest first, as tuples: the fields of CallEntry. */
static PyObject *calls_history(PyObject *self, PyObject *unused)
{
    const Calls *calls = (Calls *)self;
    const size_t n = calls->entered < calls->length ? (size_t)calls->entered : calls->length;
    PyObject *list = PyList_New((Py_ssize_t)n);
    (void)unused;
    for (size_t i = 0; list && i < n; i++) {
        const struct past *past = &calls->history[(calls->next + calls->length - n + i) %
                                                  calls->length];
        PyObject *entry = Py_BuildValue(
            "(KKKKKKLLLK)", (unsigned long long)past->id, (unsigned long long)past->place,
            (unsigned long long)past->number, (unsigned long long)past->kind,
            (unsigned long long)past->sizes, (unsigned long long)past->root,
            (long long)past->created, (long long)past->started, (long long)past->completed,
            (unsigned long long)past->thread);
        if (!entry)
            Py_CLEAR(list);
        else
            PyList_SetItem(list, (Py_ssize_t)i, entry);
    }
    return list;
}

/* begin(kind, sizes, root, scheduled=0): counts a call and puts it on the record. Returns whether the
 * record is to be compared with the other ranks' now. */
static PyObject *calls_begin(PyObject *self, PyObject *const *args, Py_ssize_t n)
{
    Calls *calls = (Calls *)self;
    unsigned long long kind, sizes;
    uint32_t root;
    if (n != 3 && n != 4) {
        PyErr_SetString(PyExc_TypeError, "begin takes kind, sizes, root and scheduled");
        return NULL;
    }
    if (!parse_call(args, &kind, &sizes, &root))
        return NULL;
    const unsigned long long scheduled = n == 4 ? PyLong_AsUnsignedLongLong(args[3]) : 0;
    if (PyErr_Occurred())
        return NULL;
    calls->sequence++;
    struct past *past =
        scheduled && calls->length ? &calls->history[(scheduled - 1) % calls->length] : NULL;
    if (past && past->id == scheduled) { /* it is there yet */
        past->thread = PyThread_get_thread_ident();
        start(calls, past, now());
    } else {
        start_now(calls, kind, sizes, root);
    }
    note(calls, kind, sizes, root);
    if (!calls->compared) {
        PyObject *number = PyLong_FromUnsignedLongLong(calls->sequence);
        PyObject *entry = number ? PyTuple_Pack(4, number, args[0], args[1], args[2]) : NULL;
        const int failed = !entry || PyList_Append(calls->record, entry);
        Py_XDECREF(number);
        Py_XDECREF(entry);
        if (failed)
            return NULL;
    }
    return PyBool_FromLong(calls->sequence >= calls->next_check);
}

static PyObject *calls_get_recent(PyObject *self, void *closure)
{
    Calls *calls = (Calls *)self;
    (void)closure;
    if (calls->compared) {
        return calls->dropped ? Py_BuildValue("[(iiii)(Kiii)]", 0, 0, 0, 0,
                                              calls->last->number, -1, 0, 0)
                              : Py_BuildValue("[(iiii)(KKKK)]", 0, 0, 0, 0, calls->last->number,
                                              calls->last->kind, calls->last->sizes,
                                              calls->last->root);
    }
    PyObject *record = calls->record ? calls->record : Py_None;
    Py_INCREF(record);
    return record;
}

static int calls_set_recent(PyObject *self, PyObject *value, void *closure)
{
    Calls *calls = (Calls *)self;
    (void)closure;
    if (!value || !PyList_Check(value)) {
        PyErr_SetString(PyExc_TypeError, "recent: expected a list");
        return -1;
    }
    PyObject *before = calls->record;
    Py_INCREF(value);
    calls->record = value;
    calls->compared = 0;
    Py_XDECREF(before);
    return 0;
}

/* compare_each(): from now on each call is compared by what carries it out. */
static PyObject *calls_compare_each(PyObject *self, PyObject *unused)
{
    Calls *calls = (Calls *)self;
    (void)unused;
    calls->compared = 1;
    calls->last->number = calls->sequence;
    calls->next_check = ~0ull >> 1;
    Py_RETURN_NONE;
}

/* end(): the last call has ended; releases the lock. */
static PyObject *calls_end(PyObject *self, PyObject *unused)
{
    (void)unused;
    return release((Calls *)self);
}

/* publish(address): keeps the last call there from now on; 0: here. */
static PyObject *calls_publish(PyObject *self, PyObject *where)
{
    Calls *calls = (Calls *)self;
    struct cell *cell = PyLong_AsVoidPtr(where);
    if (PyErr_Occurred())
        return NULL;
    const struct cell *before = calls->last;
    cell = cell ? cell : &calls->own;
    if (cell != before) {
        const struct cell now = {cell->group,  cell->limit, before->number, before->kind,
                                 before->sizes, before->root, before->inside, before->thread};
        *cell = now;
        calls->last = cell;
    }
    Py_RETURN_NONE;
}

/* drop_last(): the last call differed between the ranks, which was reported. */
static PyObject *calls_drop_last(PyObject *self, PyObject *unused)
{
    (void)unused;
    ((Calls *)self)->dropped = 1;
    Py_RETURN_NONE;
}

/* learn(primitive, dtype, op, owner, signature, fewest, end, n, me, function, argument, flags...):
 * carry such calls out here. */
static PyObject *calls_learn(PyObject *self, PyObject *args)
{
    Calls *calls = (Calls *)self;
    struct way way;
    unsigned long long signature, fewest, end, n, me, function, argument;
    unsigned long long parts, ask, ask_argument, patience;
    if (!PyArg_ParseTuple(args, "OOOOKKKKKKKippppppKKKK", &way.primitive, &way.dtype, &way.op,
                          &way.owner, &signature, &fewest, &end, &n, &me, &function, &argument,
                          &way.shape, &way.many_in, &way.many_out, &way.listed, &way.has_input,
                          &way.even, &way.rooted, &parts, &ask, &ask_argument, &patience))
        return NULL;
    if (n > MOST_ARRAYS)
        Py_RETURN_NONE;
    struct way *ways = PyMem_Realloc(calls->ways, (calls->n_ways + 1) * sizeof way);
    if (!ways)
        return PyErr_NoMemory();
    calls->ways = ways;
    way.signature = signature;
    way.fewest = (size_t)fewest;
    way.end = (size_t)end;
    way.n = (size_t)n;
    way.me = (size_t)me;
    way.function = (void *)(uintptr_t)function;
    way.argument = (const void *)(uintptr_t)argument;
    way.parts = parts;
    way.ask = (ask_function *)(uintptr_t)ask;
    way.ask_argument = (const void *)(uintptr_t)ask_argument;
    way.patience = patience;
    Py_INCREF(way.primitive);
    Py_INCREF(way.dtype);
    Py_INCREF(way.op);
    Py_INCREF(way.owner);
    ways[calls->n_ways++] = way;
    Py_RETURN_NONE;
}

static PyObject *calls_forget(PyObject *self, PyObject *unused)
{
    (void)unused;
    forget_ways((Calls *)self);
    Py_RETURN_NONE;
}

static PyMethodDef calls_methods[] = {
    {"begin", (PyCFunction)(void (*)(void))calls_begin, METH_FASTCALL,
     "begin(kind, sizes, root, scheduled=0): count a call; return whether the record is to be "
     "compared now."},
    {"schedule", (PyCFunction)(void (*)(void))calls_schedule, METH_FASTCALL,
     "schedule(kind, sizes, root): put a queued call into the history; return its id there."},
    {"begin_uncompared", (PyCFunction)(void (*)(void))calls_begin_uncompared, METH_FASTCALL,
     "begin_uncompared(kind, sizes, root): put a call that is not counted into the history."},
    {"complete", calls_complete, METH_NOARGS, "complete(): the call that began last is done."},
    {"history", calls_history, METH_NOARGS, "history(): the latest calls, oldest first."},
    {"end", calls_end, METH_NOARGS, "end(): the last call has ended; release the lock."},
    {"publish", calls_publish, METH_O,
     "publish(address): keep the last call there, where others see it; 0: here."},
    {"compare_each", calls_compare_each, METH_NOARGS,
     "compare_each(): from now on each call is compared by what carries it out."},
    {"drop_last", calls_drop_last, METH_NOARGS,
     "drop_last(): the last call differed, if each is compared by itself."},
    {"learn", calls_learn, METH_VARARGS, "learn(...): carry such calls out without Python."},
    {"forget", calls_forget, METH_NOARGS, "forget(): leave all calls to Python again."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef calls_members[] = {
    {"sequence", T_ULONGLONG, offsetof(Calls, sequence), 0, NULL},
    {"next_check", T_ULONGLONG, offsetof(Calls, next_check), 0, NULL},
    {"lock", T_OBJECT_EX, offsetof(Calls, lock), READONLY, NULL},
    {"worker", T_OBJECT_EX, offsetof(Calls, worker), 0, NULL},
    {"compared", T_INT, offsetof(Calls, compared), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

/* The thread that made the last call, as threading.get_ident has it. */
static PyObject *calls_get_thread(PyObject *self, void *closure)
{
    (void)closure;
    return PyLong_FromUnsignedLongLong(((Calls *)self)->last->thread);
}

/* Whether the last call has not ended. */
static PyObject *calls_get_inside(PyObject *self, void *closure)
{
    (void)closure;
    return PyBool_FromLong(((Calls *)self)->last->inside != 0);
}

static PyGetSetDef calls_attributes[] = {
    {"thread", calls_get_thread, NULL, NULL, NULL},
    {"inside", calls_get_inside, NULL, NULL, NULL},
    {"recent", calls_get_recent, calls_set_recent, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot calls_slots[] = {
    {Py_tp_doc, "The calls of a group: their number, their record, and the short way of some."},
    {Py_tp_init, calls_init},
    {Py_tp_traverse, calls_traverse},
    {Py_tp_clear, calls_clear},
    {Py_tp_dealloc, calls_dealloc},
    {Py_tp_methods, calls_methods},
    {Py_tp_members, calls_members},
    {Py_tp_getset, calls_attributes},
    {0, NULL},
};

static PyType_Spec calls_spec = {
    "mpicoll.kernels._calls.Calls", sizeof(Calls), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, calls_slots,
};

/* ---- Signals ----------------------------------------------------------------------------------- */

static PyObject *interruption; /* what a handler has raised; the main thread's */

/* Runs Python's handlers of signals that are due: whether one has raised. */
static int run_handlers(void)
{
    PyGILState_STATE state = PyGILState_Ensure();
    const int raised = PyErr_CheckSignals() != 0;
    if (raised) {
        PyObject *type, *error, *traceback;
        PyErr_Fetch(&type, &error, &traceback);
        PyErr_NormalizeException(&type, &error, &traceback);
        if (error && traceback)
            PyException_SetTraceback(error, traceback);
        Py_XDECREF(type);
        Py_XDECREF(traceback);
        PyObject *before = interruption;
        interruption = error;
        Py_XDECREF(before);
    }
    PyGILState_Release(state);
    return raised;
}

static PyObject *attendant(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    return PyLong_FromVoidPtr((void *)(uintptr_t)run_handlers);
}

static PyObject *take_interruption(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    PyObject *found = interruption;
    interruption = NULL;
    return found ? found : (Py_INCREF(Py_None), Py_None);
}

/* ---- The module -------------------------------------------------------------------------------- */

/* set_up(state, group_type, run_fast, run_later, run_all, finish, finished): before the first call. */
static PyObject *set_up(PyObject *module, PyObject *args)
{
    PyObject *state, *type, *run_fast, *run_later, *run_all, *finish, *finished;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOOOOOO", &state, &type, &run_fast, &run_later, &run_all, &finish,
                          &finished))
        return NULL;
    keep(&known.state, state);
    keep(&known.group_type, type);
    keep(&known.run_fast, run_fast);
    keep(&known.run_later, run_later);
    keep(&known.run_all, run_all);
    keep(&known.finish, finish);
    keep(&known.finished, finished);
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"run_fast", (PyCFunction)(void (*)(void))run_fast, METH_FASTCALL,
     "run_fast(primitive, group, async_op, output, input, op, root)"},
    {"run_all", (PyCFunction)(void (*)(void))run_all, METH_FASTCALL,
     "run_all(name, primitive, group, async_op, outputs, inputs, op)"},
    {"set_up", set_up, METH_VARARGS,
     "set_up(state, group_type, run_fast, run_later, run_all, finish, finished)"},
    {"set_numpy", set_numpy, METH_O, "set_numpy(type)"},
    {"add_dtype", add_dtype, METH_VARARGS, "add_dtype(dtype, numpy_dtype, itemsize, code, bits)"},
    {"add_type", add_type, METH_VARARGS, "add_type(type, exchange_api, is_unusual)"},
    {"look", look, METH_O, "look(array)"},
    {"attendant", attendant, METH_NOARGS, "attendant(): the address of what runs signal handlers."},
    {"take_interruption", take_interruption, METH_NOARGS,
     "take_interruption(): what one has raised there, or None."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "mpicoll.kernels._calls", NULL, -1, functions, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__calls(void)
{
    PyObject *module = PyModule_Create(&definition);
    PyObject *type = module ? PyType_FromSpec(&calls_spec) : NULL;
    known.default_name = PyUnicode_InternFromString("default");
    known.submitted_name = PyUnicode_InternFromString("submitted");
    known.finished_name = PyUnicode_InternFromString("finished");
    known.no = Py_False;
    known.yes = Py_True;
    if (!type || !known.default_name || !known.submitted_name || !known.finished_name || PyModule_AddObject(module, "Calls", type)) {
        Py_XDECREF(type);
        Py_XDECREF(module);
        return NULL;
    }
    return module;
}
