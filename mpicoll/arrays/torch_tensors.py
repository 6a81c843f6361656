"""The adapter of torch tensors. Reads address and size directly from the tensor."""

from __future__ import annotations

import sys
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING

from mpicoll.arrays.checks import check_distinct_elements
from mpicoll.arrays.cuda_arrays import build_device_view
from mpicoll.arrays.views import Adapter, Array, Buffer, View, array_at
from mpicoll.cuda.runtime import LEGACY
from mpicoll.cuda.streams import CurrentStreams
from mpicoll.dtypes import DType, Kind, by_name
from mpicoll.errors import UnsupportedError
from mpicoll.kernels.calls import add_tensor_type

if TYPE_CHECKING:
    from torch import Tensor


def find_adapter(array: object) -> Adapter | None:
    """Return the adapter if this is a tensor. Subclasses have no fast view."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(array, torch.Tensor):
        return None
    adapter = _build_adapter(torch)
    return adapter if type(array) in _plain_types(torch) else adapter._replace(fast_view=None)


def _plain_types(torch: ModuleType) -> set[type]:
    return {torch.Tensor, torch.nn.Parameter}


@cache
def _build_adapter(torch: ModuleType) -> Adapter:
    from mpi4py import MPI

    from_address = MPI.buffer.fromaddress
    strided = torch.strided
    rows = {getattr(torch, name): row for name, row in by_name.items() if hasattr(torch, name)}
    plain_types = _plain_types(torch)

    def alias(tensor: Tensor) -> Array:
        # Not Tensor.numpy(): afterwards, the storage can no longer be resized, which FSDP does.
        row = rows[tensor.dtype]
        strides = [step * row.itemsize for step in tensor.stride()]
        return array_at(tensor.data_ptr(), tuple(tensor.shape), strides, row)

    def refuse(tensor: Tensor, where: str, writable: bool) -> None:
        kind = type(tensor)
        if (
            kind not in plain_types
            and kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
        ):
            raise UnsupportedError(
                f"{where}: {kind.__name__} is not supported: it is not one block of memory; pass "
                "the local tensor"
            )
        if tensor.layout is not strided:
            raise UnsupportedError(
                f"{where}: a tensor of layout {tensor.layout} is not supported; expected a dense "
                "tensor (to_dense())"
            )
        if not tensor.is_cpu and not tensor.is_cuda:
            raise UnsupportedError(
                f"{where}: tensors on {tensor.device} are not supported; copy to the host or to a "
                "CUDA device first"
            )
        if tensor.dtype not in rows:
            raise UnsupportedError(
                f"{where}: {tensor.dtype} is not supported; expected one of {', '.join(by_name)}"
            )
        if writable and (tensor.is_neg() or tensor.is_conj()):
            raise UnsupportedError(
                f"{where}: a lazy conjugate or negative view cannot be an output; assign x = "
                "x.resolve_conj().resolve_neg() and pass x"
            )

    streams = CurrentStreams(
        lambda index: torch.cuda.current_stream(index).cuda_stream or LEGACY,
        lambda index, stream: torch.cuda.stream(torch.cuda.ExternalStream(stream, index)),
    )

    # Complex tensors have no fast view, because they may be lazy conjugates.
    real = {kind: row for kind, row in rows.items() if row.kind is not Kind.COMPLEX}

    def fast_view(tensor: Tensor) -> tuple[DType, Buffer, int] | None:
        row = real.get(tensor.dtype)
        if row is None or not tensor.is_cpu or tensor.is_neg():
            return None
        try:
            if not tensor.is_contiguous():
                return None
            count = tensor.numel()
            return row, from_address(tensor.data_ptr(), count * row.itemsize), count
        except (RuntimeError, ValueError):  # not one block of memory, or no memory
            return None

    def build_view(tensor: Tensor, writable: bool, where: str) -> View:
        if hasattr(tensor, "trigger_wait"):  # an AsyncCollectiveTensor: a pending result
            tensor = tensor.trigger_wait()
        seen = fast_view(tensor) if type(tensor) in plain_types else None
        if seen is None:
            refuse(tensor, where, writable)
            tensor = tensor.resolve_conj().resolve_neg()
            row, count, buffer = rows[tensor.dtype], tensor.numel(), None
            if tensor.is_cuda:
                index, size = tensor.get_device(), row.itemsize
                strides = tuple(step * size for step in tensor.stride())
                return build_device_view(
                    tensor.detach(), row, index, tensor.data_ptr(), tuple(tensor.shape), strides,
                    streams.current(index), writable, False, where, streams,
                )  # fmt: skip
            if count and not tensor.data_ptr():
                raise UnsupportedError(f"{where}: the tensor has no memory")
            if tensor.is_contiguous():
                buffer = from_address(tensor.data_ptr(), count * row.itemsize)
            elif writable:
                check_distinct_elements(tensor.shape, tensor.stride(), 1, where)
        else:
            row, buffer, count = seen
        held = tensor.detach()  # keeps the memory even if tensor.data is assigned
        return View(tensor, row, count, buffer, lambda _: alias(held))

    for kind in plain_types:
        exchange = getattr(kind, "__dlpack_c_exchange_api__", None)
        add_tensor_type(kind, exchange, torch.Tensor.is_neg)
    return Adapter(build_view, fast_view)
