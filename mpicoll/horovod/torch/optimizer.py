"""An optimizer that steps with gradients of all ranks, reduced as soon as backward has them."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mpicoll.errors import ArgumentError, UnsupportedError
from mpicoll.horovod.torch.compression import Compression
from mpicoll.horovod.torch.kinds import Adasum, Average
from mpicoll.horovod.torch.operations import allreduce_async_, sparse_allreduce_async
from mpicoll.horovod.torch.process_sets import ProcessSet, global_process_set

__all__ = ["DistributedOptimizer"]


class _Distributed:
    """What a distributed optimizer's class has in front of the original one."""

    def _distribute(
        self: Any,
        named: list[tuple[str, Tensor]],
        compression: Any,
        passes: int,
        op: str,
        predivide: float,
        sparse_as_dense: bool,
        process_set: ProcessSet,
    ) -> None:
        self._names = {tensor: name for name, tensor in named}
        self._compression, self._op, self._predivide = compression, op, predivide
        self._as_dense, self._process_set = sparse_as_dense, process_set
        self.backward_passes_per_step = passes
        self._left = dict.fromkeys(self._names, passes)
        self._handles: dict[Tensor, tuple[Any, Any]] = {}
        self._synchronized, self._skip = False, False
        self._reduced = []
        if process_set.included() and (process_set.size() or 1) > 1:
            self._reduced = [
                p for group in self.param_groups for p in group["params"] if p.requires_grad
            ]
            for p in self._reduced:
                p.register_post_accumulate_grad_hook(self._count)

    def set_backward_passes_per_step(self: Any, passes: int) -> None:
        """Change how many backward passes a step has."""
        self.backward_passes_per_step = passes
        self._left = dict.fromkeys(self._names, passes)

    def _count(self: Any, p: Tensor) -> None:
        """Begin to reduce a gradient once all passes have added to it."""
        if self._left[p] <= 0:
            raise AssertionError(
                "DistributedOptimizer: more backward passes than backward_passes_per_step, "
                f"{self.backward_passes_per_step}, before step() or synchronize(); raise it"
            )
        self._left[p] -= 1
        if self._left[p] == 0:
            self._begin(p)

    def _begin(self: Any, p: Tensor) -> None:
        if p.grad is None:  # other ranks may have one
            p.grad = torch.zeros_like(p)
        gradient, name = p.grad, self._names[p]
        if gradient.is_sparse:
            if not self._as_dense:
                handle = sparse_allreduce_async(gradient, name, self._op, self._process_set)
                self._handles[p] = handle, None
                return
            gradient = gradient.to_dense()
        compressed, context = self._compression.compress(gradient)
        self._handles[p] = (
            allreduce_async_(
                compressed,
                name=name,
                op=self._op,
                prescale_factor=1 / self._predivide,
                postscale_factor=self._predivide,
                process_set=self._process_set,
            ),
            context,
        )

    def synchronize(self: Any) -> None:
        """Wait until all gradients are reduced; those that no pass has made count as zeros."""
        for p in self._reduced:
            if p not in self._handles:
                self._begin(p)
        try:
            for p, (handle, context) in self._handles.items():
                output = handle() if callable(handle) else handle.wait()
                if p.grad.is_sparse:
                    p.grad = output if output.is_sparse else output.to_sparse()
                else:
                    output = self._compression.decompress(output, context)
                    if output is not p.grad:
                        p.grad.copy_(output)
        finally:
            self._handles.clear()
            self._left = dict.fromkeys(self._names, self.backward_passes_per_step)
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self: Any) -> Iterator[None]:
        """Have step() not synchronize, after the program has."""
        self._skip = True
        try:
            yield
        finally:
            self._skip = False

    def step(self: Any, closure: Any = None) -> Any:
        """Step with the reduced gradients."""
        if not self._skip:
            if self._synchronized:
                warnings.warn(
                    "step() after synchronize() reduces once more; call it within "
                    "skip_synchronize()",
                    stacklevel=2,
                )
            self.synchronize()
        self._synchronized = False
        return super().step(closure)  # type: ignore[misc]

    def zero_grad(self: Any, *arguments: Any, **options: Any) -> None:
        """Zero the gradients, of which none may be on its way."""
        if self._handles:
            raise AssertionError(
                "zero_grad: gradients are being reduced; call it after step() or synchronize()"
            )
        super().zero_grad(*arguments, **options)  # type: ignore[misc]

    def load_state_dict(self: Any, *arguments: Any, **options: Any) -> None:
        """Load a state, and forget gradients that were on their way."""
        for handle, _ in self._handles.values():
            handle() if callable(handle) else handle.wait()
        self._handles.clear()
        self._left = dict.fromkeys(self._names, self.backward_passes_per_step)
        super().load_state_dict(*arguments, **options)  # type: ignore[misc]


def DistributedOptimizer(
    optimizer: Any,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: str = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return an optimizer like the given one that steps with gradients of all ranks.

    named_parameters: as of ``model.named_parameters()``; all that the optimizer has. The names
        match gradients between ranks.
    compression: what gradients are sent as.
    backward_passes_per_step: passes that add to gradients before they are reduced.
    op: as in allreduce; Adasum is not built here.
    gradient_predivide_factor: with Average: gradients are divided by it before they are added.
    num_groups, groups: ignored: what is ready at the same time is reduced together.
    sparse_as_dense: reduce sparse gradients as dense ones.
    process_set: the ranks whose gradients count.

    Raises ArgumentError (a ValueError) for impossible values, UnsupportedError (a ValueError) for
    Adasum.
    """
    where = "DistributedOptimizer"
    if op == Adasum:
        raise UnsupportedError(f"{where}: op: Adasum is not built here; allreduce has it")
    if gradient_predivide_factor != 1 and op != Average:
        raise ArgumentError(f"{where}: gradient_predivide_factor: expected 1 unless op is Average")
    if backward_passes_per_step <= 0:
        raise ArgumentError(
            f"{where}: backward_passes_per_step: expected 1 or more, got {backward_passes_per_step}"
        )
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    named = list(named_parameters or ())
    if named_parameters is None:
        named = [(f"gradient.{index}", p) for index, p in enumerate(parameters)]
    if not all(isinstance(each, tuple) for each in named):
        raise ArgumentError(f"{where}: named_parameters: expected tuples of a name and a parameter")
    names = [name for name, _ in named]
    if len(set(names)) < len(names):
        again = sorted({name for name in names if names.count(name) > 1})
        raise ArgumentError(f"{where}: named_parameters: names given twice: {', '.join(again)}")
    if {id(p) for p in parameters} - {id(p) for _, p in named}:
        raise ArgumentError(f"{where}: named_parameters: some of the optimizer's are not named")
    made: Any = type(type(optimizer).__name__, (_Distributed, type(optimizer)), {})
    distributed: Any = made.__new__(made)
    # Its groups and state are the original's; a step that a scheduler has wrapped is not.
    distributed.__dict__.update(
        {name: value for name, value in optimizer.__dict__.items() if name != "step"}
    )
    distributed._distribute(
        named, compression, backward_passes_per_step, op, gradient_predivide_factor,
        sparse_as_dense, process_set,
    )  # fmt: skip
    return distributed
