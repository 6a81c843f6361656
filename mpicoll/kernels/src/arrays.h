/* Views of NumPy arrays, and of tensors with DLPack's exchange API. Included by calls.c. */

#ifndef MPICOLL_ARRAYS_H
#define MPICOLL_ARRAYS_H

#include <Python.h>

#include "shared.h"

#include <string.h>

/* The first fields of NumPy's arrays, which are part of its ABI (PyArrayObject_fields in
 * numpy/ndarraytypes.h, unchanged from 1.7 to 2.x). mpicoll/kernels/calls.py checks them when it
 * loads this module. */
struct numpy_array {
    PyObject_HEAD
    char *data;
    int dimensions;
    int64_t *shape, *strides; /* of Py_ssize_t, which has 64 bits */
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

/* The first fields of DLPackExchangeAPI of DLPack 1.3: functions of a tensor type. */
struct exchange {
    uint32_t major, minor;
    struct exchange *previous;
    void *allocate, *managed_from_object, *object_from_managed;
    int (*tensor_from_object)(void *object, struct tensor *out); /* borrows; may be NULL */
};

/* View of an array that is one block of host memory. */
struct view {
    PyObject *dtype; /* a row of mpicoll's table, borrowed */
    char *data;
    size_t count, itemsize, rows;
    const void *shape; /* shape_size bytes */
    size_t shape_size;
    int writable;
};

enum { MAX_DTYPES = 64, MAX_TYPES = 8 };

/* The types and dtypes of arrays that can be viewed. */
static struct {
    PyObject *numpy_type;
    struct {
        PyObject *numpy, *dtype;
        size_t itemsize;
        int code, bits;
    } dtypes[MAX_DTYPES];
    int n_dtypes, latest; /* index of the last dtype found */
    struct {
        PyObject *type, *is_unusual; /* a method: true if a tensor's memory is not its value */
        struct exchange *exchange;
    } types[MAX_TYPES];
    int n_types;
} registered;

/* Fills a view of C-contiguous memory; `i` is the index of its dtype. Returns 0 if it is empty. */
static int fill_view(struct view *view, int i, char *data, const int64_t *shape, int dimensions,
                     int writable)
{
    *view = (struct view){registered.dtypes[i].dtype, data, 1, registered.dtypes[i].itemsize,
                          dimensions ? (size_t)shape[0] : 1, shape,
                          (size_t)dimensions * sizeof *shape, writable};
    for (int k = 0; k < dimensions; k++)
        view->count *= (size_t)shape[k];
    return view->count > 0;
}

static int view_numpy(struct view *view, PyObject *object)
{
    const struct numpy_array *array = (const struct numpy_array *)object;
    if ((array->flags & (C_CONTIGUOUS | ALIGNED)) != (C_CONTIGUOUS | ALIGNED))
        return 0;
    for (int k = 0; k < registered.n_dtypes; k++) {
        const int i = k == 0 ? registered.latest : k <= registered.latest ? k - 1 : k;
        if (array->dtype == registered.dtypes[i].numpy) {
            registered.latest = i;
            return fill_view(view, i, array->data, array->shape, array->dimensions,
                             (array->flags & WRITEABLE) != 0);
        }
    }
    return 0;
}

static int view_tensor(struct view *view, PyObject *object, int type)
{
    struct tensor tensor;
    if (registered.types[type].exchange->tensor_from_object(object, &tensor)) {
        PyErr_Clear();
        return 0;
    }
    if (tensor.device_type != ON_HOST || tensor.lanes != 1 || !tensor.data)
        return 0;
    int64_t stride = 1;
    for (int k = tensor.dimensions - 1; k >= 0; stride *= tensor.shape[k--])
        if (tensor.strides && tensor.shape[k] != 1 && tensor.strides[k] != stride)
            return 0;
    for (int i = 0; i < registered.n_dtypes; i++)
        if (tensor.code == registered.dtypes[i].code && tensor.bits == registered.dtypes[i].bits)
            return fill_view(view, i, tensor.data + tensor.byte_offset, tensor.shape,
                             tensor.dimensions, 1);
    return 0;
}

/* Returns whether an array's memory is its value: 1, 0, or -1 with an exception. Runs Python under
 * torch's TorchFunctionMode, which may even free arrays: so all arrays are checked before any is
 * viewed. */
static int is_plain(PyObject *object)
{
    PyObject *type = (PyObject *)Py_TYPE(object);
    for (int i = 0; i < registered.n_types; i++)
        if (type == registered.types[i].type) {
            PyObject *unusual =
                PyObject_CallFunctionObjArgs(registered.types[i].is_unusual, object, NULL);
            Py_XDECREF(unusual);
            return unusual ? unusual == Py_False : -1;
        }
    return 1;
}

/* Views an array. Returns 0 if it is not one block of host memory. Runs no Python. */
static int view_object(struct view *view, PyObject *object)
{
    PyObject *type = (PyObject *)Py_TYPE(object);
    if (type == registered.numpy_type)
        return view_numpy(view, object);
    for (int i = 0; i < registered.n_types; i++)
        if (type == registered.types[i].type)
            return view_tensor(view, object, i);
    return 0;
}

/* Maximum number of arrays in a list, and of an array's blocks that functions of a fast path get: the
 * ranks that can share memory, MAX_RANKS in mpicoll/routes/host/shared.py. */
enum { MAX_ARRAYS = 256 };

/* The input or output of a call. */
struct operand {
    PyObject *held;    /* tuple of the arrays, if they are passed as a list */
    size_t n;          /* number of arrays; 0: the argument is None */
    struct view first; /* the first array; writable if all are */
    int same_count, same_shape;
    char *begin, *end; /* address range of all arrays */
    struct mpicoll_block blocks[MAX_ARRAYS];
};

static const struct view nothing = {Py_None, NULL, 0, 0, 0, NULL, 0, 1};

static int have_same_shape(const struct view *one, const struct view *other)
{
    return one->shape_size == other->shape_size &&
           (one->shape_size == 0 || memcmp(one->shape, other->shape, one->shape_size) == 0);
}

/* Holds the arrays of an argument: an array, a list of arrays, or None. Returns what is_plain
 * returns, combined over all arrays. */
static int hold_operand(struct operand *operand, PyObject *object)
{
    if (PyList_CheckExact(object)) {
        operand->held = PyList_AsTuple(object);
        if (!operand->held)
            return -1;
    } else if (PyTuple_CheckExact(object)) {
        Py_INCREF(object);
        operand->held = object;
    } else {
        return is_plain(object);
    }
    const Py_ssize_t n = PyTuple_Size(operand->held);
    int plain = n >= 1 && n <= MAX_ARRAYS;
    for (Py_ssize_t k = 0; k < n && plain > 0; k++)
        plain = is_plain(PyTuple_GetItem(operand->held, k));
    return plain;
}

/* Views the arrays of a list. Returns 0 if they are not supported. */
static int view_list(struct operand *operand)
{
    const Py_ssize_t n = PyTuple_Size(operand->held);
    operand->n = (size_t)n;
    operand->same_count = operand->same_shape = 1;
    for (Py_ssize_t k = 0; k < n; k++) {
        struct view one;
        if (!view_object(&one, PyTuple_GetItem(operand->held, k)))
            return 0;
        char *end = one.data + one.count * one.itemsize;
        operand->blocks[k] = (struct mpicoll_block){one.data, one.count};
        if (k == 0) {
            operand->first = one;
            operand->begin = one.data;
            operand->end = end;
            continue;
        }
        if (one.dtype != operand->first.dtype)
            return 0;
        operand->first.writable &= one.writable;
        operand->same_count &= one.count == operand->first.count;
        operand->same_shape &= have_same_shape(&one, &operand->first);
        operand->begin = one.data < operand->begin ? one.data : operand->begin;
        operand->end = end > operand->end ? end : operand->end;
    }
    return 1;
}

/* Views the arrays of an operand. Returns 0 if they are not supported. */
static int view_operand(struct operand *operand, PyObject *object)
{
    if (operand->held)
        return view_list(operand);
    operand->n = object != Py_None;
    if (object == Py_None) {
        operand->first = nothing;
        return 1;
    }
    if (!view_object(&operand->first, object))
        return 0;
    operand->begin = operand->first.data;
    operand->end = operand->begin + operand->first.count * operand->first.itemsize;
    operand->blocks[0] = (struct mpicoll_block){operand->first.data, operand->first.count};
    return 1;
}

static int blocks_overlap(const struct mpicoll_block *one, const struct mpicoll_block *other,
                          size_t itemsize)
{
    return one->count && other->count &&
           (uintptr_t)one->data < (uintptr_t)other->data + other->count * itemsize &&
           (uintptr_t)other->data < (uintptr_t)one->data + one->count * itemsize;
}

static int overlap(const struct operand *one, const struct operand *other)
{
    if ((uintptr_t)one->end <= (uintptr_t)other->begin ||
        (uintptr_t)other->end <= (uintptr_t)one->begin)
        return 0;
    for (size_t i = 0; i < one->n; i++)
        for (size_t k = 0; k < other->n; k++)
            if (blocks_overlap(&one->blocks[i], &other->blocks[k], one->first.itemsize))
                return 1;
    return 0;
}

/* Returns whether two blocks of a list share memory. */
static int overlaps_itself(const struct operand *operand)
{
    for (size_t i = 0; i < operand->n; i++)
        for (size_t k = 0; k < i; k++)
            if (blocks_overlap(&operand->blocks[i], &operand->blocks[k], operand->first.itemsize))
                return 1;
    return 0;
}

/* ---- Functions of the module ----------------------------------------------------------------- */

static void set_object(PyObject **place, PyObject *value)
{
    PyObject *before = *place;
    Py_INCREF(value);
    *place = value;
    Py_XDECREF(before);
}

/* add_dtype(dtype, numpy_dtype, itemsize, dlpack_code, dlpack_bits); code -1: not for tensors. */
static PyObject *add_dtype(PyObject *module, PyObject *args)
{
    PyObject *dtype, *numpy;
    Py_ssize_t itemsize;
    int code, bits;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOnii", &dtype, &numpy, &itemsize, &code, &bits))
        return NULL;
    if (registered.n_dtypes == MAX_DTYPES) {
        PyErr_SetString(PyExc_ValueError, "too many dtypes");
        return NULL;
    }
    Py_INCREF(dtype);
    Py_INCREF(numpy);
    registered.dtypes[registered.n_dtypes].dtype = dtype;
    registered.dtypes[registered.n_dtypes].numpy = numpy;
    registered.dtypes[registered.n_dtypes].itemsize = (size_t)itemsize;
    registered.dtypes[registered.n_dtypes].code = code;
    registered.dtypes[registered.n_dtypes++].bits = bits;
    Py_RETURN_NONE;
}

/* add_type(type, exchange_api, is_unusual): register a tensor type with DLPack's exchange API.
 * Returns whether its version is supported. */
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
        registered.n_types == MAX_TYPES)
        Py_RETURN_FALSE;
    const int i = registered.n_types++;
    set_object(&registered.types[i].type, type);
    set_object(&registered.types[i].is_unusual, is_unusual);
    registered.types[i].exchange = exchange;
    Py_RETURN_TRUE;
}

/* view_array(array): return (dtype, address, count, rows, writable), or None if not supported. */
static PyObject *view_array(PyObject *module, PyObject *array)
{
    struct view view;
    (void)module;
    const int plain = is_plain(array);
    if (plain < 0)
        return NULL;
    if (!plain || !view_object(&view, array))
        Py_RETURN_NONE;
    return Py_BuildValue("OKKKi", view.dtype, (unsigned long long)(uintptr_t)view.data,
                         (unsigned long long)view.count, (unsigned long long)view.rows,
                         view.writable);
}

/* set_numpy(type): set the type of NumPy arrays; None: leave them to Python. */
static PyObject *set_numpy(PyObject *module, PyObject *type)
{
    (void)module;
    set_object(&registered.numpy_type, type);
    Py_RETURN_NONE;
}

#endif
