"""Arrays of every library and layout: correct if supported, otherwise rejected."""

from __future__ import annotations

import array
import itertools
import re
import warnings

import ml_dtypes
import numpy as np
import pytest
from conftest import members, needs_2_ranks
from driver import Call, Uneven, by_dtype, guarded, legal_operations

import mpicoll as dist
from mpicoll.arrays.checks import check_distinct_elements
from mpicoll.dtypes import ReduceOp, by_name
from mpicoll.primitives import PRIMITIVES, Layout

pytestmark = pytest.mark.on_3

ROWS = [row for row in PRIMITIVES if row.layout is not Layout.EMPTY]
by_row = pytest.mark.parametrize("row", ROWS, ids=repr)


def strided(shape, dtype):
    """Every second element of the last dimension."""
    return np.zeros((*shape[:-1], 2 * shape[-1]), dtype.numpy)[..., ::2]


def backwards(shape, dtype):
    return np.zeros(shape, dtype.numpy)[tuple(slice(None, None, -1) for _ in shape)]


def transposed(shape, dtype):
    return np.zeros(shape[::-1], dtype.numpy).T


def inner(shape, dtype):
    """A block in the middle of a larger array."""
    whole = np.zeros([extent + 2 for extent in shape], dtype.numpy)
    return whole[tuple(slice(1, -1) for _ in shape)]


def column(shape, dtype):
    return np.zeros((*shape, 3), dtype.numpy)[..., 1]


def plain(shape, dtype):
    return np.zeros(shape, dtype.numpy)


def unaligned(shape, dtype):
    count = int(np.prod(shape))
    memory = np.zeros(count * dtype.itemsize + 1, np.uint8)
    return memory[1:].view(dtype.numpy).reshape(shape)


LAYOUTS = [strided, backwards, transposed, inner, column, unaligned]
SHAPES = [(6,), (4, 3), (2, 3, 4), (1, 5), (0, 3), (2, 0), ()]


def maker(of, wrap=lambda made: made):
    def make(shape, dtype):
        made = of(shape, dtype) if shape else np.zeros((2,), dtype.numpy)[1:].reshape(())
        assert made.shape == shape
        return wrap(made), made

    return make


def calls_of(row, world, dtype, make):
    """Calls with every shape. Blocks are stacked in some calls and concatenated in others."""
    for i, shape in enumerate(SHAPES):
        stacked = (i + row.code + dtype.code) % 2 == 0
        op = ReduceOp.MAX if ReduceOp.MAX in legal_operations(dtype) else ReduceOp.SUM
        op = op if row.reduces else None
        count, root = int(np.prod(shape)), world.size - 1
        yield Call(row.name, world, dtype, count, op, root, make, shape, stacked)


@by_row
@pytest.mark.parametrize("name", ["bool", "int64", "bfloat16", "complex64", "float32"])
def test_ranks_may_use_different_layouts(world, row, name):
    for i in range(len(LAYOUTS)):
        layout = LAYOUTS[(i + world.me) % len(LAYOUTS)]
        for call in calls_of(row, world, by_name[name], maker(layout)):
            call.run()
    layout = LAYOUTS[(row.code + world.me) % len(LAYOUTS)]
    calls = list(calls_of(row, world, by_name[name], maker(layout)))
    for call, work in [(call, call.start(async_op=True)) for call in calls]:
        work.wait()
        call.check()


@by_row
def test_one_rank_may_pass_a_strided_array(world, row):
    for count, odd in itertools.product((5, 30011), range(world.size)):
        make = maker(strided) if odd == world.me else guarded
        op = ReduceOp.SUM if row.reduces else None
        Call(row.name, world, by_name["float16"], count, op, 0, make).run()


def test_all_reduce_writes_to_a_memmap(world, tmp_path):
    path = tmp_path / f"{world.me}"
    mapped = np.memmap(path, np.float32, "w+", shape=(5, 3))
    mapped[...] = world.me
    dist.all_reduce(mapped)
    mapped.flush()
    assert (np.fromfile(path, np.float32) == sum(range(world.size))).all()
    assert np.fromfile(path, np.float32).size == 15


def test_inputs_may_have_stride_zero(world):
    n = world.size
    out = np.zeros((n, 4, 3), np.int32)
    dist.all_gather_single(out, np.broadcast_to(np.arange(3, dtype=np.int32) + world.me, (4, 3)))
    for r in range(n):
        assert (out[r] == np.arange(3) + r).all()


def as_torch(torch, made):
    """A tensor on the memory of a NumPy array."""
    try:
        return torch.from_numpy(made)
    except TypeError:  # ml_dtypes dtypes
        carrier = made.view(f"i{made.itemsize}") if made.size or made.ndim else made
        return torch.from_numpy(carrier).view(getattr(torch, made.dtype.name))


@by_dtype
def test_torch_tensors_of_every_dtype(world, torch, dtype):
    """Every primitive, contiguous and other layouts, with NumPy arrays on some ranks."""
    if not hasattr(torch, dtype.name):
        pytest.skip(f"torch has no {dtype}")
    layouts = [strided, transposed, inner, column]
    for i, row in enumerate(ROWS):
        kinds = [maker(layouts[(i + world.me) % 4], lambda made: as_torch(torch, made)), guarded]
        dense = maker(plain, lambda made: as_torch(torch, made))
        for make in (kinds[0], [*kinds, dense][(world.me + i) % 3]):
            for call in calls_of(row, world, dtype, make):
                call.run()
        for op in legal_operations(dtype) if row.reduces else [None]:
            Call(row.name, world, dtype, 3001, op, 0, dense).run()


def test_autograd_tensors_are_modified_without_autograd(world, torch):
    """Covers leaves, parameters and results of autograd."""
    n = world.size
    leaf = torch.full((3, 2), float(world.me), requires_grad=True)
    parameter = torch.nn.Parameter(torch.full((4,), 2.0))
    version = leaf._version
    dist.all_reduce(leaf)
    dist.all_reduce(parameter, ReduceOp.PRODUCT)
    assert leaf._version == version and leaf.grad_fn is None
    assert leaf.requires_grad and leaf.is_leaf and (leaf == sum(range(n))).all()
    assert parameter.requires_grad and (parameter == 2.0**n).all()
    computed = leaf * 2
    out = torch.zeros(n, 3, 2, requires_grad=True)
    dist.all_gather_single(out, computed)
    assert (out == 2 * sum(range(n))).all()
    dist.broadcast(computed.T, 0)
    leaf.sum().backward()
    assert (leaf.grad == 1).all()
    strided_leaf = torch.zeros(6, requires_grad=True)
    view = strided_leaf.detach()[::2]
    view += world.me + 1
    dist.all_reduce(view)
    expected = sum(range(n + 1))
    assert strided_leaf.tolist() == [expected, 0, expected, 0, expected, 0]


def test_lazy_views_are_valid_inputs_and_rejected_as_outputs(world, torch):
    """Lazy views: tensors with the conjugate or negative bit."""
    n = world.size
    values = torch.arange(6).reshape(2, 3) * (1 + 2j) + world.me
    out = torch.zeros(n, 2, 3, dtype=torch.complex64)
    assert values.conj().is_conj()
    for lazy in (values.conj(), values.conj().T.contiguous().T, values.conj().T.T):
        dist.all_gather_single(out, lazy)
        for r in range(n):
            expected = torch.arange(6).reshape(2, 3) * (1 - 2j) + r
            assert torch.equal(out[r], expected)
    negative = values.conj().imag
    assert negative.is_neg()
    for _ in range(3):  # the native fast path does not read lazy views
        got = torch.zeros(n, 2, 3)
        dist.all_gather_single(got, negative)
        for r in range(n):
            assert torch.equal(got[r], -2.0 * torch.arange(6).reshape(2, 3))
    for lazy, word in ((values.conj(), "conj"), (negative, "negative")):
        kept = lazy.clone()
        with pytest.raises(ValueError, match=f"all_reduce: tensor: .*{word}"):
            dist.all_reduce(lazy)
        assert torch.equal(lazy, kept)


def test_unsupported_tensors_are_rejected(world, torch):
    """The error names the operation, the argument and the reason. The group stays usable."""

    class Plain(torch.Tensor):
        pass

    class Wrapper(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise NotImplementedError

    sparse = torch.eye(3).to_sparse()
    wrapped = torch.Tensor._make_wrapper_subclass(Wrapper, (3,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about beta and deprecated features
        quantized = torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.quint8)
        compressed = torch.eye(3).to_sparse_csr()
        half = torch.zeros(3, dtype=torch.complex32)
    refused = [
        (torch.zeros(3).expand(2, 3), "output share memory"),
        (sparse, "layout torch.sparse_coo"),
        (compressed, "layout torch.sparse_csr"),
        (torch.zeros(3, device="meta"), "meta"),
        (quantized, "quint8"),
        (half, "complex32"),
        (wrapped, "Wrapper"),
    ]
    for _ in range(3):  # later calls use the native fast path
        valid = torch.ones(9)
        dist.all_reduce(valid[3:6])
        assert valid.tolist() == [1] * 3 + [world.size] * 3 + [1] * 3
    for tensor, words in refused:
        with pytest.raises(ValueError, match=rf"(?s)all_reduce: tensor: .*{re.escape(words)}"):
            dist.all_reduce(tensor)
        if words != "output share memory":
            out = torch.zeros(world.size, 3)
            with pytest.raises(ValueError, match="all_gather_single: input_tensor: "):
                dist.all_gather_single(out, tensor)
    subclass = torch.full((3,), 1.0).as_subclass(Plain)
    dist.all_reduce(subclass)
    assert subclass.tolist() == [world.size] * 3


def test_torch_reduce_ops_are_accepted(world, torch):
    ops = torch.distributed.ReduceOp
    for name, expected in (("SUM", 2.0 * world.size), ("AVG", 2.0), ("MAX", 2.0)):
        for op in (getattr(ops, name), ops(getattr(ops, name))):
            x = np.full(3, 2.0)
            dist.all_reduce(x, op)
            assert (x == expected).all()


def test_python_buffers(world):
    """bytearray, array.array and memoryview are inputs and outputs; bytes are inputs only."""
    n, me = world.size, world.me
    raw = bytearray([me + 1] * 5)
    dist.all_reduce(raw)
    assert raw == bytearray([sum(range(n + 1))] * 5)
    for code in "bBhHiIlLqQfd":
        numbers = array.array(code, [me + 1, 2, 3])
        dist.all_reduce(numbers)
        assert numbers == array.array(code, [sum(range(n + 1)), 2 * n, 3 * n])
    memory = memoryview(bytearray(6 * 8)).cast("B").cast("d", (2, 3))
    dist.broadcast(np.arange(6.0) if me == 0 else memory)
    assert me == 0 or memory.tolist() == [[0, 1, 2], [3, 4, 5]]
    every_other = memoryview(bytearray(range(10)))[::2]
    dist.all_reduce(every_other, ReduceOp.MAX)
    assert bytes(every_other) == bytes([0, 2, 4, 6, 8])
    truth = memoryview(bytearray(3)).cast("?")
    truth[1] = me == 0
    dist.all_reduce(truth)
    assert truth.tolist() == [False, True, False]
    out = bytearray(4 * n)
    dist.all_gather_single(out, bytes([me] * 4))
    assert bytes(out) == b"".join(bytes([r] * 4) for r in range(n))
    lists = [bytearray(4) for _ in range(n)]
    dist.all_gather(lists, memoryview(bytes([me] * 4)))
    assert lists == [bytearray([r] * 4) for r in range(n)]
    for read_only in (bytes(3), memoryview(bytes(3)), memoryview(bytearray(3)).toreadonly()):
        with pytest.raises(ValueError, match=r"all_reduce: tensor: .*read-only"):
            dist.all_reduce(read_only)


class Exporter:
    """An object that supports DLPack and no other protocol."""

    def __init__(self, array, device=None):
        self.array = array
        self.device = device

    def __dlpack__(self, **options):
        assert self.device is None, "mpicoll read an array on another device"
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.device or self.array.__dlpack_device__()


class OldExporter(Exporter):
    """A producer older than DLPack 1.0."""

    def __dlpack__(self, stream=None):
        return self.array.__dlpack__()


@pytest.mark.parametrize("kind", [Exporter, OldExporter])
def test_dlpack_exporters_of_numpy_arrays(world, kind):
    for row, name, of in itertools.product(ROWS, ("float64", "bool"), (transposed, plain)):
        for call in calls_of(row, world, by_name[name], maker(of, kind)):
            call.run()


@by_dtype
@pytest.mark.parametrize("kind", [Exporter, OldExporter])
def test_dlpack_exporters_of_torch_tensors(world, torch, kind, dtype):
    """Includes bfloat16 and float8."""
    if not hasattr(torch, dtype.name):
        pytest.skip(f"torch has no {dtype}")
    for row in ROWS[:: len(ROWS) // 4]:
        for of in (strided, plain):
            make = maker(of, lambda made: kind(as_torch(torch, made)))
            for call in calls_of(row, world, dtype, make):
                call.run()


def test_dlpack_arrays_without_a_gpu_are_rejected(world):
    """test_device_arrays.py has other devices."""
    for call in (
        lambda a: dist.all_reduce(a),
        lambda a: dist.all_gather_single(np.zeros(3 * world.size), a),
        lambda a: dist.isend(a, (world.me + 1) % world.size),
    ):
        for kind in (2, 13):
            with pytest.raises(ValueError, match=r"tensor: .*arrays on a GPU.*(CuPy|no GPU)"):
                call(Exporter(np.zeros(3), (kind, 1)))
    with pytest.raises(ValueError, match="all_reduce: tensor"):
        dist.all_reduce(Exporter(np.broadcast_to(np.zeros(1), 3)))


def test_jax_arrays_are_read_only_inputs(world):
    jax = pytest.importorskip("jax")
    n, me = world.size, world.me
    for name in ("float32", "bfloat16", "int32", "bool", "float8_e4m3fn"):
        row = by_name[name]
        out = np.zeros((n, 2, 3), row.numpy)
        dist.all_gather_single(out, jax.numpy.full((2, 3), me % 2, row.numpy))
        assert [out[r].astype(float).sum() for r in range(n)] == [6 * (r % 2) for r in range(n)]
        constant = jax.numpy.zeros(3, row.numpy)
        with pytest.raises(ValueError, match=r"all_reduce: tensor: .*read-only"):
            dist.all_reduce(constant)


def read_only(good):
    made = good.copy()
    made.flags.writeable = False
    return made


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda good: good.astype(">f4"), ValueError, "byte order"),
        (lambda good: np.zeros(good.size, [("a", "f4")]), ValueError, "dtype"),
        (lambda good: np.zeros(good.shape, "M8[s]"), ValueError, "dtype"),
        (lambda good: good.astype(object), ValueError, "dtype object"),
        (lambda good: good.astype("U4"), ValueError, "dtype <U4"),
        (lambda good: good.astype(np.longdouble), ValueError, "dtype (float128|longdouble)"),
        (lambda good: good.astype(ml_dtypes.int4), ValueError, "dtype int4"),
        (np.ma.array, ValueError, "MaskedArray"),
        *((lambda good, bad=bad: bad, TypeError, "expected an array") for bad in (
            [1.0, 2.0], 3.5, "text", object(), np.float32(1)
        )),
        (read_only, ValueError, "read-only"),
        (lambda good: np.lib.stride_tricks.as_strided(good, strides=(0,)), ValueError, "share mem"),
    ],
)  # fmt: skip
def test_error_names_the_reason(world, make, error, words):
    """test_arguments.py passes invalid arrays as each argument of each function."""
    bad = make(np.ones(2, np.float32))
    with pytest.raises(error, match=f"^all_reduce: tensor: .*{words}"):
        dist.all_reduce(bad)
    if error is TypeError or "dtype" in words:
        with pytest.raises(error, match=rf"^all_gather: tensor_list\[\d\]: .*{words}"):
            dist.all_gather([bad] * world.size, np.ones(2, np.float32))


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.layout is not Layout.IN_PLACE], ids=repr
)
def test_inconsistent_arguments_raise_value_error(world, row):
    """Inconsistent dtypes, counts and list lengths, after valid calls."""
    op = ReduceOp.SUM if row.reduces else None
    valid = Call(row.name, world, by_name["float32"], 2, op).arguments
    roots = {row.root: 0} if row.root else {}
    for _ in range(3):
        getattr(dist, row.name)(**valid, **roots)
    for argument in filter(None, (row.output, row.input)):
        good = valid.get(argument)
        if good is None or (row.root and world.me != 0):
            continue
        if isinstance(good, list):
            wrong = [([*good[:-1], good[-1].astype(np.float64)], "different dtypes")]
            wrong += [(good[:-1], "one array for each"), ([*good, good[0]], "one array for each")]
            if row.name not in ("all_gather", "reduce_scatter", "all_to_all"):
                wrong.append(([*good[:-1], np.zeros(3, np.float32)], "shape"))
        else:
            wrong = [(good.astype(np.float64), "different dtypes")]
            if row.layout is not Layout.EXCHANGED:
                wrong.append((np.zeros(2 * world.size + 1, np.float32), "elements|shape"))
        for bad, words in wrong:
            with pytest.raises(ValueError, match=rf"^{row}.*({words})"):
                getattr(dist, row.name)(**{**valid, **roots, argument: bad})
    Call(row.name, world, by_name["int32"], 3, op).run()


@pytest.mark.parametrize("name", ["int32", "bfloat16", "bool", "float64"])
@pytest.mark.parametrize("count", [1, 5, 20011])
def test_inputs_and_outputs_may_overlap_as_documented(world, name, count):
    """The input may be a part of the output, or the reverse; both may be the same array."""
    dtype, n, me = by_name[name], world.size, world.me
    op = ReduceOp.MAX
    for where in range(n):  # at any rank's position, not only this rank's
        part = slice(where * count, (where + 1) * count)
        call = Call("all_gather_single", world, dtype, count)
        _, (_, whole, result) = call.watched
        whole[part] = call.given(me)
        dist.all_gather_single(whole, whole[part])
        result.check(whole, call.what)

        call = Call("reduce_scatter_single", world, dtype, count, op)
        (_, _, result), (_, whole, _) = call.watched
        dist.reduce_scatter_single(whole[part], whole, op)
        result.check(whole[part], call.what)

        call = Call("scatter", world, dtype, count)
        _, out, result = call.watched[0]
        inputs = call.arguments.get("scatter_list")
        out = inputs[where] if inputs else out
        dist.scatter(out, inputs, src=0)
        result.check(out, call.what)

    call = Call("all_to_all_single", world, dtype, count)
    (_, whole, _), (_, _, result) = call.watched
    dist.all_to_all_single(whole, whole)
    result.check(whole, call.what)

    call = Call("all_gather", world, dtype, count)
    outputs = call.arguments["tensor_list"]
    outputs[me][...] = call.given(me)
    dist.all_gather(outputs, outputs[me])
    call.check()

    call = Call("all_to_all", world, dtype, count)
    lists = call.arguments["input_tensor_list"]
    dist.all_to_all(lists, lists)
    for one, (_, _, result) in zip(lists, call.watched[n:], strict=True):
        result.check(one, call.what)


def block(rank, to, count, dtype):
    return (np.arange(count) * 3 + 5 * rank + 7 * to).astype(dtype)


def wait(work):
    if work is not None:
        work.wait()


UNEVEN_DTYPES = [np.int64, ml_dtypes.bfloat16, np.bool_, np.complex64]
by_mode = pytest.mark.parametrize(
    ("dtype", "async_op"), [*itertools.product(UNEVEN_DTYPES, [False, True])]
)


@by_mode
def test_all_gather_supports_uneven_blocks(teams, dtype, async_op):
    for team in members(teams):
        for counts in ([3, 0, 7, 1], [0, 0, 5, 0], [1, 2, 3, 4], [0, 9, 0, 20000], [2, 2, 2, 2]):
            made = [np.zeros((counts[r], 2), dtype) for r in range(team.size)]
            mine = block(team.me, 0, 2 * counts[team.me], dtype).reshape(-1, 2)
            if team.me % 2:
                mine = np.asfortranarray(mine)
                made = [np.zeros((2, counts[r]), dtype).T for r in range(team.size)]
            wait(dist.all_gather(made, mine, team.group, async_op))
            for r, one in enumerate(made):
                assert (one == block(r, 0, 2 * counts[r], dtype).reshape(-1, 2)).all()


@by_mode
def test_all_to_all_supports_uneven_blocks(teams, dtype, async_op):
    """Lists and split sizes, with zeros, and with a rank that sends and receives nothing."""
    for team in members(teams):
        n, me = team.size, team.me

        for turn, count in enumerate((
            lambda r, to: 4,
            lambda r, to: (3 * r + 5 * to) % 4,
            lambda r, to, n=n: 0 if n - 1 in (r, to) else r + 2 * to + 1,
            lambda r, to: 10007 * ((r + to) % 2),
        )):  # fmt: skip
            out = [block(me, to, 2 * count(me, to), dtype).reshape(-1, 2) for to in range(n)]
            expected = [block(r, me, 2 * count(r, me), dtype).reshape(-1, 2) for r in range(n)]
            got = [np.zeros_like(one) for one in expected]
            if me % 2:
                out = [np.asfortranarray(one) for one in out]
                got = [np.zeros(one.shape[::-1], dtype).T for one in got]
            wait(dist.all_to_all(got, out, team.group, async_op))
            for one, right in zip(got, expected, strict=True):
                assert (one == right).all()

            whole, into = np.concatenate(out), np.zeros_like(np.concatenate(expected))
            sizes = [one.shape[0] for one in expected], [one.shape[0] for one in out]
            if turn == 0 and me % 2:  # with equal blocks the sizes are optional
                sizes = None, None if me % 3 else []
            elif me == 0:
                sizes = tuple(sizes[0]), np.array(sizes[1])
            if me % 2:
                whole = np.asfortranarray(whole)
            wait(dist.all_to_all_single(into, whole, *sizes, team.group, async_op))
            assert (into == np.concatenate(expected)).all()


#: Block sizes of reduce_scatter, one per rank.
SIZES = ([3, 0, 7, 1], [0, 0, 5, 0], [1, 2, 3, 4], [0, 9000, 1, 20000])


@by_dtype
def test_reduce_scatter_supports_uneven_blocks(teams, dtype):
    for team in members(teams):
        for turn, op in enumerate(legal_operations(dtype)):
            for sizes in SIZES[: 4 if op is ReduceOp.SUM else 3]:
                call = Uneven(team, dtype, sizes, op)
                wait(call.start(async_op=turn % 2 == 1))
                call.check()


def test_uneven_reduce_scatter_of_noncontiguous_arrays(world):
    """Shapes differ between blocks. The output may be one of the inputs."""
    n, me = world.size, world.me
    blocks = [block(me, r, 6 * r, np.float64).reshape(2, -1) for r in range(n)]
    totals = [sum(block(k, r, 6 * r, np.float64) for k in range(n)).reshape(2, -1)
              for r in range(n)]  # fmt: skip
    output = np.zeros((3 * me, 2)).T
    dist.reduce_scatter(output, [np.asfortranarray(one) for one in blocks], dist.ReduceOp.SUM)
    assert (output == totals[me]).all()
    dist.reduce_scatter(blocks[me], blocks)
    assert (blocks[me] == totals[me]).all()


@needs_2_ranks
def test_reduce_scatter_detects_sizes_that_differ_between_ranks(world):
    # a new group, because its first calls are compared
    n, me, group = world.size, world.me, dist.new_group()
    # equal blocks, or other uneven blocks, on the other ranks
    for sizes in ([2] * n, [4, *[2] * (n - 1)]):
        theirs = list(range(1, n + 1)) if me == 0 else sizes
        inputs, output = [np.ones(size) for size in theirs], np.zeros(theirs[me])
        with pytest.raises(dist.MismatchError, match=r"rank 0: .* of 1 \+ 2.* elements of float64"):
            dist.reduce_scatter(output, inputs, group=group)
    dist.destroy_process_group(group)
    with pytest.raises(ValueError, match=rf"input_list: .*\[{me}\] has shape \({me + 1},\)"):
        dist.reduce_scatter(np.zeros(99), [np.ones(r + 1) for r in range(n)])


def test_calls_leave_the_storage_of_a_tensor_resizable(world):
    """Tensor.numpy() makes a storage non-resizable, but FSDP frees parameters by resizing it."""
    torch = pytest.importorskip("torch")
    n = world.size
    single = torch.zeros(4 * n)
    dist.all_gather_single(single, torch.ones(4))
    half = torch.ones(4, dtype=torch.bfloat16)
    dist.all_reduce(half)
    strided = torch.ones(4, 4).t()
    dist.all_reduce(strided)
    part = torch.zeros(3)
    dist.reduce_scatter_single(part, torch.ones(3 * n))
    for tensor in (single, half, strided, part):
        tensor.untyped_storage().resize_(0)


def test_all_to_all_single_rejects_zero_dimensional_arrays(world):
    """A zero-dimensional array has no rows to split, so it is only valid with one rank."""
    n = world.size
    dist.all_to_all_single(np.zeros(n), np.ones(n))
    if n == 1:
        got = np.zeros(())
        dist.all_to_all_single(got, np.ones(()))
        assert got == 1
    else:
        with pytest.raises(dist.ArgumentError):
            dist.all_to_all_single(np.zeros(()), np.ones(()))


def test_overlapping_elements_are_detected():
    """Compared with the number of elements that cover each byte, for random shapes and strides."""
    random, found = np.random.default_rng(1), 0
    for _ in range(3000):
        shape = tuple(map(int, random.integers(0, 5, random.integers(0, 4))))
        strides = tuple(map(int, random.integers(-9, 10, len(shape))))
        itemsize = int(random.choice([1, 2, 4]))
        starts = np.zeros(1, np.int64)
        for extent, step in zip(shape, strides, strict=True):
            starts = np.add.outer(starts, np.arange(extent) * step).ravel()
        taken = (starts.reshape(-1, 1) + np.arange(itemsize)).ravel()
        if np.unique(taken).size < taken.size:
            found += 1
            with pytest.raises(dist.ArgumentError):
                check_distinct_elements(shape, strides, itemsize, "x")
    assert found > 300
    whole = np.zeros((4, 5, 6))
    parts = whole[::-2, 1:3, ::3], whole.transpose(2, 0, 1)[::2], whole.diagonal(), whole[:, :0]
    for part in (whole, *parts, whole.T):
        check_distinct_elements(part.shape, part.strides, part.itemsize, "x")
