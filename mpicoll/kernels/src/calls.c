/* The native fast path: views the arrays, finds the registered call, counts it, and runs it in the
 * ranks' shared memory or by MPI, without Python. Anything that it does not support, and every
 * error, falls back to the Python function that it replaces, run_fast or run_all of
 * mpicoll/dispatch/execute.py, with the same behavior.
 *
 * An extension module for CPython's limited API: one binary serves all versions from 3.10 on. */

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

/* Python objects, see set_up. */
static struct {
    PyObject *state;      /* of mpicoll.core.groups; its attribute `default` is the default group */
    PyObject *group_type; /* ProcessGroup */
    /* Python functions, see bind_fast_path in mpicoll/kernels/calls.py. */
    PyObject *run_fast, *run_later, *run_all, *find_root, *finish, *finished;
    PyObject *default_name, *submitted_name, *finished_name, *no, *yes;
} python;

/* ---- A group's calls ------------------------------------------------------------------------- */

typedef int lists_function(const void *plan, const struct mpicoll_block *send,
                           const struct mpicoll_block *recv, size_t count, uint32_t root,
                           uint32_t number);
typedef int compare_function(const void *shared, uint32_t number, uint64_t what, uint64_t count);
typedef int fused_function(const void *plan, char **send, char **recv, size_t *ends, size_t n,
                           uint64_t sizes, uint32_t number);
typedef int all_entered_function(const void *shared, uint32_t number, uint64_t what, uint64_t count,
                                 uint64_t nanoseconds);

/* Type of a fast path's function. Each returns 1 if it has run the call, or the list (FUSED). */
enum { LISTS, COMPARE, FUSED };

/* How calls of one primitive, dtype, op and range of sizes are run here. Numbers have the type that
 * PyArg_ParseTuple writes. */
struct fast_path {
    PyObject *primitive, *dtype, *op; /* compared by identity */
    PyObject *owner;                  /* owner of the memory at `argument` */
    unsigned long long signature;     /* of the call, without the root */
    unsigned long long min_count, end; /* range of the elements of a block */
    unsigned long long n, me;          /* number of ranks, and this rank */
    unsigned long long function, argument; /* addresses of the function and its first argument */
    int type;
    int many_in, many_out; /* the input, or output, has one block per rank */
    int listed;            /* as a list of arrays; None on ranks other than the root if rooted */
    int has_input, even, has_root;
    unsigned long long numbers_per_element; /* numbers that make up an element */
    /* Addresses of a function that returns whether all ranks have entered an async call, or 0, and
     * of its first argument; and its timeout. */
    unsigned long long all_entered, all_entered_argument, timeout_ns;
};

/* Address of a fast path's function or argument. */
#define AT(TYPE, ADDRESS) ((TYPE *)(uintptr_t)(ADDRESS))

/* An entry of the call history, see CallEntry in mpicoll/kernels/calls.py. Times are nanoseconds of
 * the monotonic clock; 0: not yet. */
struct entry {
    uint64_t id, place, number, kind, sizes, thread;
    int64_t created, started, completed;
    uint32_t root;
};

/* The record of a group's last call. The node monitor reads it while this process waits; mirrored
 * in mpicoll/failures/status_page.py. */
struct last_call {
    uint64_t group, late; /* written by mpicoll/failures/status_page.py */
    uint64_t number, kind, sizes, root;
    uint64_t running; /* the call is running */
    uint64_t thread; /* that runs it */
};

/* A call record, see RecordEntry in mpicoll/kernels/calls.py. */
struct record {
    unsigned long long number, kind, sizes, root;
};
enum { MAX_RECORDS = 64 };

typedef struct {
    PyObject_HEAD
    struct entry *history; /* ring of the latest calls */
    size_t length, next;
    uint64_t entered, begun; /* number of calls entered into the history, and of calls begun */
    struct entry *current;    /* the running call, if its id is still current_id */
    uint64_t current_id;
    unsigned long long sequence;
    PyObject *lock, *acquire, *release; /* the lock held during a call, and its methods */
    PyObject *worker;                   /* the group's progress thread, or None */
    PyObject *group_ranks; /* dictionary: rank in the group, by global rank */
    PyObject *record;                   /* the call records, see the attribute recent: a list, */
    struct record records[MAX_RECORDS]; /* and the records that follow */
    size_t n_records;
    int compared; /* each call is compared as it runs, so only the last record is kept */
    int dropped;                        /* the last call was a mismatch that has been reported */
    struct last_call *last, own; /* the last call: in the status page, or in `own` */
    unsigned long long next_check;
    struct fast_path *paths;
    size_t n_paths;
} Calls;

/* Returns the elements of a block. If it is a list: of the single array on the opposite side. */
static size_t count_of(const struct fast_path *path, const struct operand *out,
                       const struct operand *in)
{
    if (path->listed)
        return path->many_in ? out->first.count : in->first.count;
    return path->many_out ? out->first.count / path->n : out->first.count;
}

/* Returns the fast path of a call; or, without `out`, of a list of calls whose largest has `*count`
 * elements per block (NULL: any). */
static const struct fast_path *find_path(const Calls *calls, PyObject *primitive, PyObject *dtype,
                                         PyObject *op, const struct operand *out,
                                         const struct operand *in, const size_t *count)
{
    for (size_t i = 0; i < calls->n_paths; i++) {
        const struct fast_path *path = &calls->paths[i];
        if ((path->type == FUSED) != !out || path->primitive != primitive ||
            path->dtype != dtype || path->op != op)
            continue;
        const size_t size = out ? count_of(path, out, in) : count ? *count : path->min_count;
        if (size >= path->min_count && size < path->end)
            return path;
    }
    return NULL;
}

/* Returns whether an operand is as this rank must pass it: a list if there is one block per rank,
 * nothing if only the root has it. */
static int is_expected(const struct fast_path *path, const struct operand *operand, int many,
                       unsigned long root)
{
    if (many && path->has_root && path->me != root)
        return operand->n == 0;
    return many ? operand->held && operand->n == path->n : !operand->held && operand->n == 1;
}

/* Returns whether the sizes of lists of arrays match. */
static int lists_fit(const struct fast_path *path, const struct operand *in,
                     const struct operand *out, unsigned long root)
{
    if (!is_expected(path, in, path->many_in, root) ||
        !is_expected(path, out, path->many_out, root) || (out->held && overlaps_itself(out)))
        return 0;
    if (path->many_in && path->many_out) /* the block that a rank sends to itself */
        return in->blocks[path->me].count == out->blocks[path->me].count;
    const struct operand *list = path->many_in ? in : out, *own = path->many_in ? out : in;
    return list->n == 0 ||
           (list->same_count && list->first.count == own->first.count &&
            (!path->has_root ||
             (list->same_shape && have_same_shape(&list->first, &own->first))));
}

/* Returns whether an array is exactly this rank's block of an operand: the call then runs in place. */
static int is_own_block(const struct fast_path *path, const struct operand *array,
                        const struct operand *blocks)
{
    const struct mpicoll_block *own = &array->blocks[0];
    if (array->held || array->n != 1)
        return 0;
    if (!blocks->held)
        return blocks->first.count == path->n * own->count &&
               own->data == blocks->first.data + path->me * own->count * array->first.itemsize;
    for (size_t k = 0; k < blocks->n; k++)
        if (k != path->me && blocks_overlap(&blocks->blocks[k], own, array->first.itemsize))
            return 0;
    return blocks->n == path->n && own->data == blocks->blocks[path->me].data &&
           own->count == blocks->blocks[path->me].count;
}

/* Returns whether input and output match, overlap only in place, and can be split by rows. */
static int fits(const struct fast_path *path, const struct operand *in, const struct operand *out,
                unsigned long root, size_t count)
{
    const size_t n = path->n;
    if (!path->has_input)
        return !in->n && !out->held;
    if (in->n && out->n &&
        (in->first.dtype != out->first.dtype ||
         (overlap(in, out) &&
          !(path->many_in ? !path->many_out && is_own_block(path, out, in)
                          : path->many_out && is_own_block(path, in, out)))))
        return 0;
    if (path->listed)
        return lists_fit(path, in, out, root);
    return in->n == 1 && !in->held && out->n == 1 && !out->held &&
           in->first.count == (path->many_in ? n : 1) * count &&
           out->first.count == (path->many_out ? n : 1) * count &&
           (path->even || (in->first.rows % n == 0 && out->first.rows % n == 0));
}

/* Splits an operand of one array into its blocks. */
static void split_blocks(struct operand *operand, size_t n, size_t count)
{
    for (size_t k = 0; k < n && k < MAX_ARRAYS; k++)
        operand->blocks[k] = (struct mpicoll_block){
            operand->first.data + k * count * operand->first.itemsize, count};
}

/* Returns whether a call must be queued: tasks are unfinished, or this is the progress thread. */
static int is_busy(const Calls *calls)
{
    if (calls->worker == Py_None)
        return 0;
    PyObject *submitted = PyObject_GetAttr(calls->worker, python.submitted_name);
    PyObject *finished = submitted ? PyObject_GetAttr(calls->worker, python.finished_name) : NULL;
    const int idle = finished ? PyObject_RichCompareBool(submitted, finished, Py_EQ) : -1;
    Py_XDECREF(submitted);
    Py_XDECREF(finished);
    if (idle < 0)
        PyErr_Clear();
    return idle != 1;
}

/* Returns whether all ranks have entered this async call. Then it is best run inline, because no
 * processor is free for the progress thread. */
static int have_all_entered(const Calls *calls, const struct fast_path *path, uint64_t sizes,
                        unsigned long root)
{
    const uint32_t number = (uint32_t)(calls->sequence + 1);
    int here;
    Py_INCREF(path->owner);
    Py_BEGIN_ALLOW_THREADS;
    here = AT(all_entered_function, path->all_entered)(
        AT(void, path->all_entered_argument), number, path->signature | (uint64_t)root << 24,
        sizes * path->numbers_per_element, path->timeout_ns);
    Py_END_ALLOW_THREADS;
    Py_DECREF(path->owner);
    return here;
}

static int64_t now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

/* Adds a call to the history. Returns NULL if no history is kept. */
static struct entry *enter(Calls *calls, uint64_t kind, uint64_t sizes, uint32_t root)
{
    if (!calls->length)
        return NULL;
    struct entry *entry = &calls->history[calls->next];
    calls->next = calls->next + 1 < calls->length ? calls->next + 1 : 0;
    *entry = (struct entry){.id = ++calls->entered,
                          .kind = kind,
                          .sizes = sizes,
                          .root = root,
                          .thread = PyThread_get_thread_ident(),
                          .created = now()};
    return entry;
}

/* Marks a call of the history as started. */
static void start(Calls *calls, struct entry *entry, int64_t time)
{
    entry->place = ++calls->begun;
    entry->number = calls->sequence;
    entry->started = time;
    calls->current = entry;
    calls->current_id = entry->id;
}

static void start_now(Calls *calls, uint64_t kind, uint64_t sizes, uint32_t root)
{
    struct entry *entry = enter(calls, kind, sizes, root);
    if (entry)
        start(calls, entry, entry->created);
}

/* Marks the running call as completed. */
static void complete(Calls *calls)
{
    if (calls->current && calls->current->id == calls->current_id)
        calls->current->completed = now();
    calls->current = NULL;
}

/* Moves all call records into the list, which it returns; NULL with an exception. */
static PyObject *list_records(Calls *calls)
{
    struct record records[MAX_RECORDS]; /* allocations may run Python, which may make calls */
    const size_t n = calls->n_records;
    PyObject *list = calls->record;
    memcpy(records, calls->records, n * sizeof *records);
    calls->n_records = 0;
    Py_XINCREF(list);
    for (size_t i = 0; i < n && list; i++) {
        PyObject *entry = Py_BuildValue("(KKKK)", records[i].number, records[i].kind,
                                        records[i].sizes, records[i].root);
        if (!entry || PyList_Append(list, entry))
            Py_CLEAR(list);
        Py_XDECREF(entry);
    }
    return list;
}

/* Records the last call as running. Without `compared` there must be room for a record. */
static void record_last(Calls *calls, uint64_t kind, uint64_t sizes, uint64_t root)
{
    if (!calls->compared)
        calls->records[calls->n_records++] =
            (struct record){calls->sequence, kind, sizes, root};
    struct last_call *last = calls->last;
    last->number = calls->sequence;
    last->kind = kind;
    last->sizes = sizes;
    last->root = root;
    last->thread = (uint64_t)(uintptr_t)pthread_self(); /* as threading.get_ident */
    __atomic_store_n(&last->running, 1, __ATOMIC_RELEASE);
    calls->dropped = 0;
}

/* Marks the last call as ended and releases the lock. Returns a new reference, or NULL. */
static PyObject *release(Calls *calls)
{
    __atomic_store_n(&calls->last->running, 0, __ATOMIC_RELEASE);
    return PyObject_CallFunctionObjArgs(calls->release, NULL);
}

/* Begins a call: takes the lock, counts the call and records it. Returns 1; 0 if another thread is
 * in a call, the ranks compare their records now, or there is no room for a record; -1 with an
 * exception. */
static int begin(Calls *calls, const struct fast_path *path, uint64_t sizes, unsigned long root)
{
    if (calls->sequence + 1 >= calls->next_check || calls->n_records == MAX_RECORDS)
        return 0;
    PyObject *got = PyObject_CallFunctionObjArgs(calls->acquire, python.no, NULL);
    if (!got)
        return -1;
    Py_DECREF(got);
    if (got == python.no)
        return 0;
    calls->sequence++;
    record_last(calls, path->signature, sizes, root);
    start_now(calls, path->signature, sizes, (uint32_t)root);
    Py_INCREF(path->owner);
    return 1;
}

/* Ends a call, given the result of its function. Returns 1, or -1 with an exception. */
static int end(Calls *calls, const struct fast_path *path, int result, PyObject *primitive,
               PyObject *output, PyObject *input, PyObject *root)
{
    PyObject *type = NULL, *error = NULL, *traceback = NULL;
    int done = result == 1;
    if (!done) { /* Python finds the reason together with the other ranks, and may retry */
        PyObject *what = PyLong_FromLong(result);
        PyObject *ended =
            what ? PyObject_CallFunctionObjArgs(python.finish, (PyObject *)calls, path->owner, what,
                                                primitive, output, input, root, NULL)
                 : NULL;
        done = ended != NULL;
        Py_XDECREF(ended);
        Py_XDECREF(what);
        PyErr_Fetch(&type, &error, &traceback);
    }
    if (done)
        complete(calls);
    Py_DECREF(path->owner);
    PyObject *released = release(calls);
    Py_XDECREF(released);
    if (!done)
        PyErr_Restore(type, error, traceback);
    return done && released ? 1 : -1;
}

/* Results for async calls: the call must be queued; the call has failed with the current exception,
 * which its Work will raise. */
enum { QUEUED = 2, FAILED };

/* Runs a call on viewed arrays; see run_call. No Python runs before the call begins, so the state
 * of the group does not change. */
static int run_viewed(Calls *calls, PyObject *const *args, struct operand *out, struct operand *in,
                          int async_op)
{
    PyObject *primitive = args[0], *op = args[5];
    PyObject *dtype = out->n ? out->first.dtype : in->first.dtype;
    const struct fast_path *found = find_path(calls, primitive, dtype, op, out, in, NULL);
    if (!found || !out->first.writable || is_busy(calls))
        return 0;
    struct fast_path path = *found; /* another thread may change the table */
    unsigned long root = 0;
    if (path.has_root) {
        root = PyLong_AsUnsignedLong(args[6]);
        if (PyErr_Occurred()) {
            PyErr_Clear();
            return 0;
        }
    }
    const size_t count = count_of(&path, out, in);
    if (!fits(&path, in, out, root, count))
        return 0;
    if (path.type == LISTS && !path.listed) {
        split_blocks(out, path.many_out ? path.n : 1, count);
        split_blocks(in, path.many_in ? path.n : 1, count);
    }
    const struct operand *given = path.has_input ? in : out;
    const uint64_t sizes = path.even ? count : 0;
    if (async_op && path.n > 1) {
        if (!path.all_entered)
            return 0;
        if (!have_all_entered(calls, &path, sizes, root))
            return QUEUED;
        /* Meanwhile another thread may have closed the group, or queued a task. */
        found = find_path(calls, primitive, dtype, op, out, in, NULL);
        if (!found || is_busy(calls))
            return 0;
        path = *found;
    }
    const int begun = begin(calls, &path, sizes, root);
    if (begun <= 0)
        return begun;
    const uint32_t number = (uint32_t)calls->last->number;
    int result;
    Py_BEGIN_ALLOW_THREADS;
    if (path.type == LISTS)
        result = AT(lists_function, path.function)(AT(void, path.argument), given->blocks,
                                                   out->blocks, count, (uint32_t)root, number);
    else
        result = AT(compare_function, path.function)(AT(void, path.argument), number,
                                                     path.signature, 0);
    Py_END_ALLOW_THREADS;
    const int done = end(calls, &path, result, primitive, out->held ? out->held : args[3],
                         in->held ? in->held : args[4], args[6]);
    /* Other exceptions, such as KeyboardInterrupt, are raised at once. */
    return done < 0 && async_op && PyErr_ExceptionMatches(PyExc_Exception) ? FAILED : done;
}

/* Releases an operand's tuple, which may free arrays, and keeps the current exception. */
static void release_held(PyObject *held)
{
    PyObject *type, *error, *traceback;
    if (!held)
        return;
    PyErr_Fetch(&type, &error, &traceback);
    Py_DECREF(held);
    PyErr_Restore(type, error, traceback);
}

/* Runs a call. Returns 1; -1 with an exception; 0 if not supported; else QUEUED or FAILED. */
static int run_call(Calls *calls, PyObject *const *args, int async_op)
{
    struct operand out, in;
    if (calls->n_paths == 0)
        return 0;
    out.held = in.held = NULL;
    int done = hold_operand(&out, args[3]);
    if (done > 0)
        done = hold_operand(&in, args[4]);
    if (done > 0)
        done = view_operand(&out, args[3]) && view_operand(&in, args[4])
                   ? run_viewed(calls, args, &out, &in, async_op)
                   : 0;
    release_held(out.held);
    release_held(in.held);
    return done;
}

/* Returns a call's group as a new reference; NULL, without an exception, for another type. */
static Calls *group_of(PyObject *group)
{
    if (group == Py_None)
        group = PyObject_GetAttr(python.state, python.default_name);
    else
        Py_INCREF(group);
    if (group && (PyObject *)Py_TYPE(group) != python.group_type) {
        Py_DECREF(group);
        group = NULL;
    }
    return (Calls *)group;
}

/* Clears the current exception and returns it as a new reference; NULL if there is none. */
static PyObject *take_exception(void)
{
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    if (error && traceback)
        PyException_SetTraceback(error, traceback);
    Py_XDECREF(type);
    Py_XDECREF(traceback);
    return error;
}

/* Returns the Work of an async call that has run, or that has failed with the current exception. */
static PyObject *finished(Calls *calls, PyObject *primitive, PyObject *output)
{
    PyObject *error = take_exception();
    PyObject *work = PyObject_CallFunctionObjArgs(python.finished, (PyObject *)calls, primitive,
                                                  output, error ? error : Py_None, NULL);
    Py_XDECREF(error);
    return work;
}

/* Calls a Python function with the arguments of run_fast or run_all, unless there is an exception. */
static PyObject *call_python(PyObject *function, PyObject *const *args)
{
    return PyErr_Occurred() ? NULL
                            : PyObject_CallFunctionObjArgs(function, args[0], args[1], args[2],
                                                           args[3], args[4], args[5], args[6],
                                                           NULL);
}

static int has_arguments(int correct)
{
    if (!correct)
        PyErr_SetString(PyExc_TypeError, "wrong number of arguments");
    return correct;
}

/* Returns the root's rank in the group: name, group, argument, global rank, group rank, default. */
static PyObject *find_root(PyObject *module, PyObject *const *args, Py_ssize_t n)
{
    (void)module;
    if (!has_arguments(n == 6))
        return NULL;
    const int of_group = args[4] != Py_None;
    PyObject *rank = of_group ? args[4] : args[3] == Py_None ? args[5] : args[3], *found = NULL;
    const int plain = PyLong_CheckExact(rank) && !(of_group && args[3] != Py_None);
    Calls *calls = plain ? group_of(args[1]) : NULL;
    if (calls && calls->group_ranks) {
        if (!of_group)
            found = PyDict_GetItemWithError(calls->group_ranks, rank);
        else if (PyLong_AsUnsignedLong(rank) < (unsigned long)PyDict_Size(calls->group_ranks))
            found = rank;
        PyErr_Clear();
        Py_XINCREF(found);
    }
    Py_XDECREF(calls);
    if (found)
        return found;
    return PyObject_CallFunctionObjArgs(python.find_root, args[0], args[1], args[2], args[3],
                                        args[4], args[5], NULL);
}

static PyObject *run_fast(PyObject *module, PyObject *const *args, Py_ssize_t n)
{
    (void)module;
    if (!has_arguments(n == 7))
        return NULL;
    const int async_op = args[2] == python.yes;
    Calls *calls = async_op || args[2] == python.no ? group_of(args[1]) : NULL;
    PyObject *fallback = python.run_fast, *result = NULL;
    if (calls) {
        const int done = run_call(calls, args, async_op);
        if (done == QUEUED)
            fallback = python.run_later;
        else if (done > 0 && async_op)
            result = finished(calls, args[0], args[3]);
        else if (done > 0)
            result = (Py_INCREF(Py_None), Py_None);
        Py_DECREF(calls);
        if (result)
            return result;
    }
    return call_python(fallback, args);
}

/* ---- Lists of calls -------------------------------------------------------------------------- */

/* The root of a list of calls (mpicoll/core/signature.py), and the bit of a hash of sizes. */
#define LIST 0xFFFFFFFFul
static const uint64_t HASH = 1ull << 59;

/* Returns a tuple of the items, in which tuples replace lists, as a new reference. NULL without an
 * exception if this is not a list or tuple, or contains unsupported arrays. */
static PyObject *hold_all(PyObject *list)
{
    PyObject *all = PyList_CheckExact(list) ? PyList_AsTuple(list)
                    : PyTuple_CheckExact(list) ? PyTuple_GetSlice(list, 0, PyTuple_Size(list))
                                               : NULL;
    const Py_ssize_t n = all ? PyTuple_Size(all) : 0;
    PyObject *held_items = n > 0 ? PyTuple_New(n) : NULL;
    int plain = held_items != NULL;
    for (Py_ssize_t i = 0; i < n && plain > 0; i++) {
        PyObject *item = PyTuple_GetItem(all, i);
        struct operand operand;
        operand.held = NULL;
        plain = item == Py_None ? 0 : hold_operand(&operand, item);
        if (plain > 0)
            PyTuple_SetItem(held_items, i, operand.held ? operand.held : (Py_INCREF(item), item));
        else
            Py_XDECREF(operand.held);
    }
    Py_XDECREF(all);
    if (plain <= 0)
        Py_CLEAR(held_items);
    return held_items;
}

/* Views an item of a tuple that hold_all returned. */
static int view_item(struct operand *operand, PyObject *items, Py_ssize_t i)
{
    PyObject *item = items == Py_None ? Py_None : PyTuple_GetItem(items, i);
    operand->held = PyTuple_CheckExact(item) ? item : NULL;
    return view_operand(operand, item);
}

/* The arrays of a list of calls. send, recv: address by block, then by call. ends: each call's end,
 * as an index of a block's elements. */
struct fused {
    char **send, **recv;
    size_t *ends;
    size_t n;
    PyObject *dtype;
    size_t max_count; /* maximum number of elements in a block of one call */
};

/* A memory range, to find memory that is both read and written. */
struct span {
    uintptr_t begin, end;
    int written;
};

static int compare_begin(const void *one, const void *other)
{
    const uintptr_t a = ((const struct span *)one)->begin, b = ((const struct span *)other)->begin;
    return (a > b) - (a < b);
}

/* Returns whether memory is written twice, or read by one call and written by the same or another:
 * 1, 0, or -1 with an exception. */
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
        const uintptr_t begin = (uintptr_t)fused->send[k]; /* `recv` follows `send` */
        spans[k] = (struct span){begin, begin + count * itemsize, k >= n * blocks_in};
        sorted = sorted && (k == 0 || spans[k - 1].begin <= begin);
    }
    if (!sorted)
        qsort(spans, all, sizeof *spans, compare_begin);
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

/* Views the arrays of all calls and fills the table. Returns 0 if they are not supported here. */
static int view_calls(const struct fast_path *path, struct fused *fused, PyObject *outputs,
                        PyObject *inputs)
{
    const size_t n = fused->n;
    const size_t blocks_in = path->many_in ? path->n : 1, blocks_out = path->many_out ? path->n : 1;
    struct operand out, in;
    size_t total = 0;
    for (size_t i = 0; i < n; i++) {
        if (!view_item(&out, outputs, (Py_ssize_t)i) || !view_item(&in, inputs, (Py_ssize_t)i) ||
            out.first.dtype != fused->dtype || !out.first.writable)
            return 0;
        const size_t count = count_of(path, &out, &in);
        if (!fits(path, &in, &out, 0, count))
            return 0;
        if (!out.held)
            split_blocks(&out, blocks_out, count);
        if (!in.held && in.n)
            split_blocks(&in, blocks_in, count);
        for (size_t k = 0; k < blocks_out; k++)
            fused->recv[k * n + i] = out.blocks[k].data;
        for (size_t k = 0; k < blocks_in && in.n; k++)
            fused->send[k * n + i] = in.blocks[k].data;
        fused->ends[i] = total += count;
        fused->max_count = count > fused->max_count ? count : fused->max_count;
    }
    return 1;
}

/* Hash of the sizes of the calls: see encode_list in mpicoll/core/signature.py. */
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

/* Runs the calls that hold_all returned; see run_call. */
static int run_held(Calls *calls, PyObject *primitive, PyObject *op, PyObject *outputs,
                           PyObject *inputs)
{
    struct operand first;
    if (!view_item(&first, outputs, 0) || is_busy(calls))
        return 0;
    const struct fast_path *found = find_path(calls, primitive, first.first.dtype, op, NULL, NULL, NULL);
    if (!found || found->has_input == (inputs == Py_None))
        return 0;
    struct fast_path path = *found; /* another thread may change the table */
    struct fused fused = {NULL, NULL, NULL, (size_t)PyTuple_Size(outputs), first.first.dtype, 0};
    const size_t blocks_in = path.has_input ? path.many_in ? path.n : 1 : 0;
    const size_t blocks_out = path.many_out ? path.n : 1;
    char **table = PyMem_Malloc(fused.n * ((blocks_in + blocks_out) * sizeof *table +
                                           sizeof *fused.ends));
    if (!table) {
        PyErr_NoMemory();
        return -1;
    }
    fused.send = table;
    fused.recv = table + fused.n * blocks_in;
    fused.ends = (size_t *)(fused.recv + fused.n * blocks_out);
    int done = view_calls(&path, &fused, outputs, inputs);
    found = done ? find_path(calls, primitive, fused.dtype, op, NULL, NULL, &fused.max_count)
                 : NULL;
    done = found != NULL;
    if (done) {
        done = overlap_any(&fused, blocks_in, blocks_out, first.first.itemsize);
        done = done < 0 ? -1 : !done;
    }
    if (done > 0) {
        path = *found;
        const uint64_t sizes = hash_sizes(fused.ends, fused.n);
        done = begin(calls, &path, sizes, LIST);
        if (done > 0) {
            const uint32_t number = (uint32_t)calls->last->number;
            int result;
            Py_BEGIN_ALLOW_THREADS;
            result = AT(fused_function, path.function)(AT(void, path.argument), fused.send,
                                                       fused.recv, fused.ends, fused.n, sizes,
                                                       number);
            Py_END_ALLOW_THREADS;
            calls->sequence += result == 1; /* the comparison of the list, and the data */
            PyObject *root = PyLong_FromUnsignedLong(LIST);
            done = end(calls, &path, root ? result : -1, primitive, outputs, inputs,
                       root ? root : Py_None);
            Py_XDECREF(root);
        }
    }
    PyMem_Free(table);
    return done;
}

static int run_list(Calls *calls, PyObject *const *args)
{
    if (calls->n_paths == 0)
        return 0;
    PyObject *outputs = hold_all(args[4]);
    PyObject *inputs = NULL;
    if (outputs) {
        inputs = args[5] == Py_None ? (Py_INCREF(Py_None), Py_None) : hold_all(args[5]);
        if (inputs && inputs != Py_None && PyTuple_Size(inputs) != PyTuple_Size(outputs))
            Py_CLEAR(inputs);
    }
    int done = PyErr_Occurred() ? -1 : 0;
    if (inputs)
        done = run_held(calls, args[1], args[6], outputs, inputs);
    release_held(outputs);
    release_held(inputs);
    return done;
}

static PyObject *run_all(PyObject *module, PyObject *const *args, Py_ssize_t n)
{
    (void)module;
    if (!has_arguments(n == 7))
        return NULL;
    Calls *calls = args[3] == python.no ? group_of(args[2]) : NULL;
    if (calls) {
        const int done = run_list(calls, args);
        Py_DECREF(calls);
        if (done)
            return done < 0 ? NULL : (Py_INCREF(Py_None), Py_None);
    }
    return call_python(python.run_all, args);
}

/* ---- The type -------------------------------------------------------------------------------- */

static void forget_paths(Calls *calls)
{
    struct fast_path *paths = calls->paths;
    const size_t n = calls->n_paths;
    calls->paths = NULL;
    calls->n_paths = 0;
    for (size_t i = 0; i < n; i++) {
        Py_DECREF(paths[i].primitive);
        Py_DECREF(paths[i].dtype);
        Py_DECREF(paths[i].op);
        Py_DECREF(paths[i].owner);
    }
    PyMem_Free(paths);
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
            PyErr_SetString(PyExc_TypeError, "Calls is initialised already");
        return -1;
    }
    if (length) {
        calls->history = calloc((size_t)length, sizeof *calls->history);
        calls->length =
            calls->history ? (size_t)length : 0; /* if out of memory, without a history */
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
    Py_VISIT(calls->group_ranks);
    Py_VISIT(calls->record);
    for (size_t i = 0; i < calls->n_paths; i++) {
        Py_VISIT(calls->paths[i].primitive);
        Py_VISIT(calls->paths[i].dtype);
        Py_VISIT(calls->paths[i].op);
        Py_VISIT(calls->paths[i].owner);
    }
    return 0;
}

static int calls_clear(PyObject *self)
{
    Calls *calls = (Calls *)self;
    forget_paths(calls);
    Py_CLEAR(calls->acquire);
    Py_CLEAR(calls->release);
    Py_CLEAR(calls->lock);
    Py_CLEAR(calls->worker);
    Py_CLEAR(calls->group_ranks);
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

/* The arguments kind, sizes and root of methods. */
struct call {
    unsigned long long kind, sizes;
    uint32_t root;
};

/* Returns 0 with an exception if they are invalid. */
static int parse_call(struct call *call, PyObject *const *args, Py_ssize_t n)
{
    if (!has_arguments(n == 3))
        return 0;
    call->kind = PyLong_AsUnsignedLongLong(args[0]);
    call->sizes = PyLong_AsUnsignedLongLong(args[1]);
    call->root = (uint32_t)PyLong_AsUnsignedLongLongMask(args[2]);
    return !PyErr_Occurred();
}

static PyObject *calls_schedule(PyObject *self, PyObject *const *args, Py_ssize_t n)
{
    struct call call;
    if (!parse_call(&call, args, n))
        return NULL;
    const struct entry *entry = enter((Calls *)self, call.kind, call.sizes, call.root);
    return PyLong_FromUnsignedLongLong(entry ? entry->id : 0);
}

static PyObject *calls_begin_uncompared(PyObject *self, PyObject *const *args, Py_ssize_t n)
{
    struct call call;
    if (!parse_call(&call, args, n))
        return NULL;
    start_now((Calls *)self, call.kind, call.sizes, call.root);
    Py_RETURN_NONE;
}

static PyObject *calls_complete(PyObject *self, PyObject *unused)
{
    (void)unused;
    complete((Calls *)self);
    Py_RETURN_NONE;
}

static PyObject *calls_history(PyObject *self, PyObject *unused)
{
    const Calls *calls = (Calls *)self;
    const size_t n = calls->entered < calls->length ? (size_t)calls->entered : calls->length;
    PyObject *list = PyList_New((Py_ssize_t)n);
    (void)unused;
    for (size_t i = 0; list && i < n; i++) {
        const struct entry *found = &calls->history[(calls->next + calls->length - n + i) %
                                                  calls->length];
        PyObject *entry = Py_BuildValue(
            "(KKKKKKLLLK)", (unsigned long long)found->id, (unsigned long long)found->place,
            (unsigned long long)found->number, (unsigned long long)found->kind,
            (unsigned long long)found->sizes, (unsigned long long)found->root,
            (long long)found->created, (long long)found->started, (long long)found->completed,
            (unsigned long long)found->thread);
        if (!entry)
            Py_CLEAR(list);
        else
            PyList_SetItem(list, (Py_ssize_t)i, entry);
    }
    return list;
}

static PyObject *calls_begin(PyObject *self, PyObject *const *args, Py_ssize_t n)
{
    Calls *calls = (Calls *)self;
    struct call call;
    if (!parse_call(&call, args, n == 4 ? 3 : n))
        return NULL;
    const unsigned long long scheduled = n == 4 ? PyLong_AsUnsignedLongLong(args[3]) : 0;
    PyObject *list = calls->n_records == MAX_RECORDS ? list_records(calls) : NULL;
    Py_XDECREF(list);
    if (PyErr_Occurred())
        return NULL;
    calls->sequence++;
    struct entry *found =
        scheduled && calls->length ? &calls->history[(scheduled - 1) % calls->length] : NULL;
    if (found && found->id == scheduled) { /* its entry has not been overwritten */
        found->thread = PyThread_get_thread_ident();
        start(calls, found, now());
    } else {
        start_now(calls, call.kind, call.sizes, call.root);
    }
    record_last(calls, call.kind, call.sizes, call.root);
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
    return calls->record ? list_records(calls) : (Py_INCREF(Py_None), Py_None);
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
    calls->n_records = 0;
    calls->compared = 0;
    Py_XDECREF(before);
    return 0;
}

static PyObject *calls_compare_each(PyObject *self, PyObject *unused)
{
    Calls *calls = (Calls *)self;
    (void)unused;
    calls->compared = 1;
    calls->last->number = calls->sequence;
    calls->next_check = ~0ull >> 1;
    Py_RETURN_NONE;
}

static PyObject *calls_end(PyObject *self, PyObject *unused)
{
    (void)unused;
    return release((Calls *)self);
}

static PyObject *calls_publish(PyObject *self, PyObject *where)
{
    Calls *calls = (Calls *)self;
    struct last_call *last_call = PyLong_AsVoidPtr(where);
    if (PyErr_Occurred())
        return NULL;
    const struct last_call *before = calls->last;
    last_call = last_call ? last_call : &calls->own;
    if (last_call != before) {
        const struct last_call now = {last_call->group, last_call->late, before->number,
                                      before->kind,     before->sizes,    before->root,
                                      before->running,  before->thread};
        *last_call = now;
        calls->last = last_call;
    }
    Py_RETURN_NONE;
}

static PyObject *calls_drop_last(PyObject *self, PyObject *unused)
{
    (void)unused;
    ((Calls *)self)->dropped = 1;
    Py_RETURN_NONE;
}

static PyObject *calls_register(PyObject *self, PyObject *args)
{
    Calls *calls = (Calls *)self;
    struct fast_path path;
    if (!PyArg_ParseTuple(args, "OOOOKKKKKKKippppppKKKK", &path.primitive, &path.dtype, &path.op,
                          &path.owner, &path.signature, &path.min_count, &path.end, &path.n,
                          &path.me, &path.function, &path.argument, &path.type, &path.many_in,
                          &path.many_out, &path.listed, &path.has_input, &path.even,
                          &path.has_root, &path.numbers_per_element, &path.all_entered,
                          &path.all_entered_argument, &path.timeout_ns))
        return NULL;
    struct fast_path *paths = PyMem_Realloc(calls->paths, (calls->n_paths + 1) * sizeof path);
    if (!paths)
        return PyErr_NoMemory();
    calls->paths = paths;
    Py_INCREF(path.primitive);
    Py_INCREF(path.dtype);
    Py_INCREF(path.op);
    Py_INCREF(path.owner);
    paths[calls->n_paths++] = path;
    Py_RETURN_NONE;
}

static PyObject *calls_forget(PyObject *self, PyObject *unused)
{
    (void)unused;
    forget_paths((Calls *)self);
    Py_RETURN_NONE;
}

#define FAST(FUNCTION) (PyCFunction)(void (*)(void)) FUNCTION, METH_FASTCALL

static PyMethodDef calls_methods[] = { /* see PythonCalls in mpicoll/kernels/calls.py */
    {"begin", FAST(calls_begin), NULL},
    {"schedule", FAST(calls_schedule), NULL},
    {"begin_uncompared", FAST(calls_begin_uncompared), NULL},
    {"complete", calls_complete, METH_NOARGS, NULL},
    {"history", calls_history, METH_NOARGS, NULL},
    {"end", calls_end, METH_NOARGS, NULL},
    {"publish", calls_publish, METH_O, NULL},
    {"compare_each", calls_compare_each, METH_NOARGS, NULL},
    {"drop_last", calls_drop_last, METH_NOARGS, NULL},
    {"register_fast_path", calls_register, METH_VARARGS, NULL},
    {"forget_fast_paths", calls_forget, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef calls_members[] = {
    {"sequence", T_ULONGLONG, offsetof(Calls, sequence), 0, NULL},
    {"next_check", T_ULONGLONG, offsetof(Calls, next_check), 0, NULL},
    {"lock", T_OBJECT_EX, offsetof(Calls, lock), READONLY, NULL},
    {"worker", T_OBJECT_EX, offsetof(Calls, worker), 0, NULL},
    {"group_ranks", T_OBJECT_EX, offsetof(Calls, group_ranks), 0, NULL},
    {"compared", T_INT, offsetof(Calls, compared), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

/* Returns the field of the last call at an offset. */
static PyObject *calls_get_last(PyObject *self, void *offset)
{
    const char *last = (const char *)((Calls *)self)->last;
    return PyLong_FromUnsignedLongLong(*(const uint64_t *)(last + (uintptr_t)offset));
}

static PyGetSetDef calls_attributes[] = {
    {"thread", calls_get_last, NULL, NULL, (void *)offsetof(struct last_call, thread)},
    {"inside", calls_get_last, NULL, NULL, (void *)offsetof(struct last_call, running)},
    {"recent", calls_get_recent, calls_set_recent, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot calls_slots[] = {
    {Py_tp_doc, "The calls of a group: call numbers, call records, history and fast paths."},
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

/* ---- Signals --------------------------------------------------------------------------------- */

static PyObject *interruption; /* exception raised by a signal handler on the main thread */

/* Runs pending Python signal handlers. Returns whether one has raised. */
static int run_handlers(void)
{
    PyGILState_STATE state = PyGILState_Ensure();
    const int raised = PyErr_CheckSignals() != 0;
    if (raised) {
        PyObject *before = interruption;
        interruption = take_exception();
        Py_XDECREF(before);
    }
    PyGILState_Release(state);
    return raised;
}

static PyObject *signal_handler(PyObject *module, PyObject *unused)
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

/* ---- The module ------------------------------------------------------------------------------ */

static PyObject *set_up(PyObject *module, PyObject *args)
{
    PyObject **const places[] = {&python.state,     &python.group_type, &python.run_fast,
                                 &python.run_later, &python.run_all,    &python.find_root,
                                 &python.finish,    &python.finished};
    (void)module;
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        PyObject *value = PyTuple_GetItem(args, (Py_ssize_t)i);
        if (!value)
            return NULL;
        set_object(places[i], value);
    }
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"run_fast", FAST(run_fast), "run_fast(primitive, group, async_op, output, input, op, root)"},
    {"run_all", FAST(run_all), "run_all(name, primitive, group, async_op, outputs, inputs, op)"},
    {"find_root", FAST(find_root),
     "find_root(name, group, argument, global_rank, group_rank, default)"},
    {"set_up", set_up, METH_VARARGS,
     "set_up(state, group_type, run_fast, run_later, run_all, find_root, finish, finished)"},
    {"set_numpy", set_numpy, METH_O, "set_numpy(type)"},
    {"add_dtype", add_dtype, METH_VARARGS, "add_dtype(dtype, numpy_dtype, itemsize, code, bits)"},
    {"add_type", add_type, METH_VARARGS, "add_type(type, exchange_api, is_unusual)"},
    {"view_array", view_array, METH_O, "view_array(array)"},
    {"signal_handler", signal_handler, METH_NOARGS, "Return the address of run_handlers."},
    {"take_interruption", take_interruption, METH_NOARGS,
     "Return and clear the exception that a handler has raised, or None."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "mpicoll.kernels._calls", NULL, -1, functions, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__calls(void)
{
    PyObject *module = PyModule_Create(&definition);
    PyObject *type = module ? PyType_FromSpec(&calls_spec) : NULL;
    python.default_name = PyUnicode_InternFromString("default");
    python.submitted_name = PyUnicode_InternFromString("submitted");
    python.finished_name = PyUnicode_InternFromString("finished");
    python.no = Py_False;
    python.yes = Py_True;
    if (!type || !python.default_name || !python.submitted_name || !python.finished_name ||
        PyModule_AddObject(module, "Calls", type)) {
        Py_XDECREF(type);
        Py_XDECREF(module);
        return NULL;
    }
    return module;
}
