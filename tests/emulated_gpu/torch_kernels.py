"""Run torch's CUDA operators on the host. torch has no PTX that the emulated device could run.

Importing this module replaces each operator with a CUDA kernel by a function that synchronizes the
current stream, runs torch's CPU operator on copies of the arguments, and enqueues copies of the
results in the current stream. Other streams read the results only if they wait for that stream.
Memory, streams, events and copies without conversion remain torch's own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.library import Library, get_kernel
from torch.utils._pytree import tree_leaves, tree_map

#: Operators of tensors that launch no kernel. Views are others.
KEPT = {"resize_", "set_", "is_set_to", "record_stream", "_local_scalar_dense"}

library = Library("aten", "IMPL")
copy_bytes = get_kernel("aten::copy_", "CUDA")


def is_on_device(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_cuda


def memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory from the first to the last element of a strided tensor."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    count = 1 + sum((length - 1) * stride for length, stride in steps)
    return tensor.as_strided((count if tensor.numel() else 0,), (1,))


def download(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on the host with the same strides. Waits for the current stream."""
    flat = memory(tensor)
    host = torch.empty_like(flat, device="cpu").copy_(flat)
    return host.as_strided(tensor.shape, tensor.stride())


def upload(tensor: torch.Tensor, host: torch.Tensor) -> torch.Tensor:
    """Enqueue a copy from a host tensor with the same strides."""
    memory(tensor).copy_(memory(host), non_blocking=True)
    return tensor


def copy(keys: Any, into: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> Any:
    """Copy bytes, or convert on the host."""
    is_flat = into.is_contiguous() and source.is_contiguous()
    if is_flat and (into.dtype, into.shape) == (source.dtype, source.shape):
        return copy_bytes.call_boxed(keys, into, source, non_blocking)
    given = download(source) if source.is_cuda else source
    return upload(into, download(into).copy_(given)) if into.is_cuda else into.copy_(given)


class HostCall:
    """A call on the host, with copies of the tensors of the current device."""

    def __init__(self) -> None:
        self.hosts: dict[int, torch.Tensor] = {}  # by the identity of the device tensor
        self.tensors: dict[int, torch.Tensor] = {}  # by the identity of the host tensor

    def give(self, value: Any) -> Any:
        """Return the value to pass to the operator."""
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if is_on_device(value):
            if id(value) not in self.hosts:
                self.hosts[id(value)] = host = download(value)
                self.tensors[id(host)] = value
            return self.hosts[id(value)]
        return value

    def store(self, value: Any) -> None:
        """Upload an argument that the operator has written."""
        if is_on_device(value):
            host = self.hosts[id(value)]
            upload(value if value.shape == host.shape else value.resize_(host.shape), host)

    def take(self, value: Any) -> Any:
        """Return the result to return for one of the operator."""
        if not isinstance(value, torch.Tensor) or id(value) in self.tensors:
            return self.tensors.get(id(value), value)
        layout = {"dtype": value.dtype, "device": torch.cuda.current_device()}
        return upload(torch.empty_strided(value.shape, value.stride(), **layout), value)


def replace(operator: torch._ops.OpOverload) -> None:
    """Run an operator on the host."""
    arguments = operator._schema.arguments
    written = [each.alias_info is not None and each.alias_info.is_write for each in arguments]

    def run(*positional: Any, **named: Any) -> Any:
        call, given = HostCall(), (positional, named)
        tensors = filter(is_on_device, tree_leaves(given))
        with torch.cuda.device(next((each.device for each in tensors), None)):
            passed, by_name = tree_map(call.give, given)
            found = operator(*passed, **by_name)
            for place, argument in enumerate(arguments):
                if written[place]:
                    value = positional[place] if place < len(positional) else named[argument.name]
                    for tensor in tree_leaves(value):
                        call.store(tensor)
            return tree_map(call.take, found)

    library.impl(operator, run, "CUDA")


for name in torch._C._dispatch_get_registrations_for_dispatch_key("CUDA"):
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    if namespace == "aten" and packet not in KEPT:
        operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
        kinds = [str(each.type) for each in operator._schema.arguments]
        if not operator.is_view and any("Tensor" in kind for kind in kinds):
            replace(operator)
library.impl("copy_", copy, "CUDA", with_keyset=True)
