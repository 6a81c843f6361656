/* Arrays as they are seen without a line of Python: those of NumPy, and tensors that show themselves
 * through DLPack. A part of calls.c, which includes it.
 */

#ifndef MPICOLL_ARRAYS_H
#define MPICOLL_ARRAYS_H

#include <Python.h>

#include <stdint.h>
#include <string.h>

/* The beginning of NumPy's arrays, which is part of its binary interface (PyArrayObject_fields in
 * numpy/ndarraytypes.h, the same from 1.7 to 2.x). mpicoll/kernels/calls.py tries it when it loads
 * this module. */
struct numpy_array {
    PyObject_HEAD
    char *data;
    int dimensions;
    Py_ssize_t *shape, *strides;
    PyObject *base, *dtype;
    int flags;
};
enum { C_CONTIGUOUS = 0x1, ALIGNED = 0x100, WRITEABLE = 0x400 };

/* DLTensor of DLPack 1.x. */
struct tensor {
    char *data;
    int32_t device_type, device_id, dimensions;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
};
enum { ON_HOST = 1 };

/* The beginning of DLPackExchangeAPI of DLPack 1.3: functions by which a type shows its tensors. */
struct exchange {
    uint32_t major, minor;
    struct exchange *previous;
    void *allocate, *managed_from_object, *object_from_managed;
    int (*tensor_from_object)(void *object, struct tensor *out); /* borrows; may be NULL */
};

/* What is seen of an array that is one block of host memory. */
struct seen {
    PyObject *dtype; /* mpicoll's, borrowed */
    char *data;
    size_t count, itemsize, rows;
    const void *shape; /* of that many bytes */
    size_t shape_size;
    int writable;
};

enum { MOST_DTYPES = 64, MOST_TYPES = 8 };

/* What can be seen. */
static struct {
    PyObject *numpy_type;
    struct {
        PyObject *numpy, *dtype;
        size_t itemsize;
        int code, bits;
    } dtypes[MOST_DTYPES];
    int n_dtypes, latest; /* of an array */
    struct {
        PyObject *type, *is_unusual; /* a method: true for tensors whose memory is not their value */
        struct exchange *exchange;
    } types[MOST_TYPES];
    int n_types;
} visible;

static int see_numpy(struct seen *seen, PyObject *object)
{
    const struct numpy_array *array = (const struct numpy_array *)object;
    if ((array->flags & (C_CONTIGUOUS | ALIGNED)) != (C_CONTIGUOUS | ALIGNED))
        return 0;
    for (int k = 0; k < visible.n_dtypes; k++) {
        const int i = k == 0 ? visible.latest : k <= visible.latest ? k - 1 : k;
        if (array->dtype == visible.dtypes[i].numpy) {
            visible.latest = i;
            seen->dtype = visible.dtypes[i].dtype;
            seen->itemsize = visible.dtypes[i].itemsize;
            seen->data = array->data;
            seen->writable = (array->flags & WRITEABLE) != 0;
            seen->count = 1;
            for (int k = 0; k < array->dimensions; k++)
                seen->count *= (size_t)array->shape[k];
            seen->rows = array->dimensions ? (size_t)array->shape[0] : 1;
            seen->shape = array->shape;
            seen->shape_size = (size_t)array->dimensions * sizeof *array->shape;
            return seen->count > 0;
        }
    }
    return 0;
}

static int see_tensor(struct seen *seen, PyObject *object, int type)
{
    struct tensor tensor;
    if (visible.types[type].exchange->tensor_from_object(object, &tensor)) {
        PyErr_Clear();
        return 0;
    }
    if (tensor.device_type != ON_HOST || tensor.lanes != 1 || !tensor.data)
        return 0;
    size_t count = 1;
    for (int k = tensor.dimensions - 1; k >= 0; k--) {
        if (tensor.strides && tensor.shape[k] != 1 && tensor.strides[k] != (int64_t)count)
            return 0;
        count *= (size_t)tensor.shape[k];
    }
    for (int i = 0; i < visible.n_dtypes; i++)
        if (tensor.code == visible.dtypes[i].code && tensor.bits == visible.dtypes[i].bits) {
            seen->dtype = visible.dtypes[i].dtype;
            seen->itemsize = visible.dtypes[i].itemsize;
            seen->data = tensor.data + tensor.byte_offset;
            seen->writable = 1;
            seen->count = count;
            seen->rows = tensor.dimensions ? (size_t)tensor.shape[0] : 1;
            seen->shape = tensor.shape;
            seen->shape_size = (size_t)tensor.dimensions * sizeof *tensor.shape;
            return count > 0;
        }
    return 0;
}

/* Whether an array's memory is its value: 1, 0, or -1 with an exception. Runs Python where torch is
 * told to (TorchFunctionMode), which may do anything: before any array is seen, whose memory it might
 * free. */
static int is_usual(PyObject *object)
{
    PyObject *type = (PyObject *)Py_TYPE(object);
    for (int i = 0; i < visible.n_types; i++)
        if (type == visible.types[i].type) {
            PyObject *unusual =
                PyObject_CallFunctionObjArgs(visible.types[i].is_unusual, object, NULL);
            Py_XDECREF(unusual);
            return unusual ? unusual == Py_False : -1;
        }
    return 1;
}

/* Whether this is an array that is one block of host memory. Runs no Python. */
static int see(struct seen *seen, PyObject *object)
{
    PyObject *type = (PyObject *)Py_TYPE(object);
    if (type == visible.numpy_type)
        return see_numpy(seen, object);
    for (int i = 0; i < visible.n_types; i++)
        if (type == visible.types[i].type)
            return see_tensor(seen, object, i);
    return 0;
}

/* The most arrays of a list that are seen here, and ranks of a group whose calls are carried out here:
 * as many as share memory, see MOST in mpicoll/routes/host/shared.py. */
enum { MOST_ARRAYS = 256 };

/* A block, or an array of a list; shared.c has the same. */
struct block {
    char *data;
    size_t count;
};

/* One side of a call. */
struct side {
    PyObject *held;    /* a tuple of the arrays, if they come as a list */
    size_t n;          /* arrays; 0: the argument is None */
    struct seen first; /* the first one, writable if all are */
    int alike, alike_in_shape;
    int apart; /* each block lies outside the hull of the blocks before it in the list */
    char *begin, *end; /* all lie between these */
    struct block blocks[MOST_ARRAYS];
};

static const struct seen nothing = {Py_None, NULL, 0, 0, 0, NULL, 0, 1};

static int have_same_shape(const struct seen *one, const struct seen *other)
{
    return one->shape_size == other->shape_size &&
           (one->shape_size == 0 || memcmp(one->shape, other->shape, one->shape_size) == 0);
}

/* Takes an argument, an array, a list of such, or None, whose arrays are all usual ones; the rest is as
 * in is_usual. */
static int take(struct side *side, PyObject *object)
{
    if (PyList_CheckExact(object)) {
        side->held = PyList_AsTuple(object);
        if (!side->held)
            return -1;
    } else if (PyTuple_CheckExact(object)) {
        Py_INCREF(object);
        side->held = object;
    } else {
        return is_usual(object);
    }
    const Py_ssize_t n = PyTuple_Size(side->held);
    int usual = n >= 1 && n <= MOST_ARRAYS;
    for (Py_ssize_t k = 0; k < n && usual > 0; k++)
        usual = is_usual(PyTuple_GetItem(side->held, k));
    return usual;
}

/* Sees the arrays of a list that was taken; the rest is as in see. */
static int see_list(struct side *side)
{
    const Py_ssize_t n = PyTuple_Size(side->held);
    side->n = (size_t)n;
    side->alike = side->alike_in_shape = side->apart = 1;
    for (Py_ssize_t k = 0; k < n; k++) {
        struct seen one;
        if (!see(&one, PyTuple_GetItem(side->held, k)))
            return 0;
        char *end = one.data + one.count * one.itemsize;
        side->blocks[k] = (struct block){one.data, one.count};
        if (k == 0) {
            side->first = one;
            side->begin = one.data;
            side->end = end;
            continue;
        }
        if (one.dtype != side->first.dtype)
            return 0;
        side->first.writable &= one.writable;
        side->alike &= one.count == side->first.count;
        side->alike_in_shape &= have_same_shape(&one, &side->first);
        side->apart &= one.data >= side->end || end <= side->begin;
        side->begin = one.data < side->begin ? one.data : side->begin;
        side->end = end > side->end ? end : side->end;
    }
    return 1;
}

/* Sees an argument that was taken. */
static int see_side(struct side *side, PyObject *object)
{
    if (side->held)
        return see_list(side);
    side->n = object != Py_None;
    if (object == Py_None) {
        side->first = nothing;
        return 1;
    }
    if (!see(&side->first, object))
        return 0;
    side->begin = side->first.data;
    side->end = side->begin + side->first.count * side->first.itemsize;
    side->blocks[0] = (struct block){side->first.data, side->first.count};
    return 1;
}

static int overlap(const struct side *one, const struct side *other)
{
    if ((uintptr_t)one->end <= (uintptr_t)other->begin ||
        (uintptr_t)other->end <= (uintptr_t)one->begin)
        return 0;
    const size_t itemsize = one->first.itemsize;
    for (size_t i = 0; i < one->n; i++)
        for (size_t k = 0; k < other->n; k++) {
            const struct block *a = &one->blocks[i], *b = &other->blocks[k];
            if ((uintptr_t)a->data < (uintptr_t)b->data + b->count * itemsize &&
                (uintptr_t)b->data < (uintptr_t)a->data + a->count * itemsize)
                return 1;
        }
    return 0;
}

/* Whether two blocks of a list share memory. */
static int overlaps_itself(const struct side *side)
{
    const size_t itemsize = side->first.itemsize;
    if (side->apart)
        return 0;
    for (size_t i = 0; i < side->n; i++)
        for (size_t k = 0; k < i; k++) {
            const struct block *a = &side->blocks[i], *b = &side->blocks[k];
            if (a->count && b->count &&
                (uintptr_t)a->data < (uintptr_t)b->data + b->count * itemsize &&
                (uintptr_t)b->data < (uintptr_t)a->data + a->count * itemsize)
                return 1;
        }
    return 0;
}

/* ---- What can be seen: functions of the module ------------------------------------------------- */

static void keep(PyObject **place, PyObject *value)
{
    PyObject *before = *place;
    Py_INCREF(value);
    *place = value;
    Py_XDECREF(before);
}

/* add_dtype(dtype, numpy_dtype, itemsize, dlpack_code, dlpack_bits); code -1: not of tensors. */
static PyObject *add_dtype(PyObject *module, PyObject *args)
{
    PyObject *dtype, *numpy;
    unsigned long long itemsize;
    int code, bits;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOKii", &dtype, &numpy, &itemsize, &code, &bits))
        return NULL;
    if (visible.n_dtypes == MOST_DTYPES) {
        PyErr_SetString(PyExc_ValueError, "too many dtypes");
        return NULL;
    }
    const int i = visible.n_dtypes++;
    keep(&visible.dtypes[i].dtype, dtype);
    keep(&visible.dtypes[i].numpy, numpy);
    visible.dtypes[i].itemsize = (size_t)itemsize;
    visible.dtypes[i].code = code;
    visible.dtypes[i].bits = bits;
    Py_RETURN_NONE;
}

/* add_type(type, exchange_api, is_unusual): a type of tensors that show themselves through DLPack's
 * exchange API. Returns whether that can be used. */
static PyObject *add_type(PyObject *module, PyObject *args)
{
    PyObject *type, *capsule, *is_unusual;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOO", &type, &capsule, &is_unusual))
        return NULL;
    if (!PyCapsule_IsValid(capsule, "dlpack_exchange_api"))
        Py_RETURN_FALSE;
    struct exchange *exchange = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    while (exchange && exchange->major > 1)
        exchange = exchange->previous;
    if (!exchange || exchange->major != 1 || !exchange->tensor_from_object ||
        visible.n_types == MOST_TYPES)
        Py_RETURN_FALSE;
    const int i = visible.n_types++;
    keep(&visible.types[i].type, type);
    keep(&visible.types[i].is_unusual, is_unusual);
    visible.types[i].exchange = exchange;
    Py_RETURN_TRUE;
}

/* look(array): (dtype, address, count, rows, writable) of an array that is seen here; else None. */
static PyObject *look(PyObject *module, PyObject *array)
{
    struct seen seen;
    (void)module;
    const int usual = is_usual(array);
    if (usual < 0)
        return NULL;
    if (!usual || !see(&seen, array))
        Py_RETURN_NONE;
    return Py_BuildValue("OKKKi", seen.dtype, (unsigned long long)(uintptr_t)seen.data,
                         (unsigned long long)seen.count, (unsigned long long)seen.rows,
                         seen.writable);
}

/* set_numpy(type): the type of NumPy's arrays; None: they are left to Python. */
static PyObject *set_numpy(PyObject *module, PyObject *type)
{
    (void)module;
    keep(&visible.numpy_type, type);
    Py_RETURN_NONE;
}

#endif
