"""DistributedOptimizer: reduces gradients over all ranks, starting during the backward pass."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from mpicoll.errors import ArgumentError, UnsupportedError
from mpicoll.horovod.common.exceptions import HorovodInternalError
from mpicoll.horovod.torch.basics import size
from mpicoll.horovod.torch.compression import Compression
from mpicoll.horovod.torch.implementations import Average, Request
from mpicoll.horovod.torch.mpi_ops import allreduce_async_


class _Distributed:
    """Mixin in front of the original optimizer's class."""

    def _distribute(
        self: Any,
        names: dict[Tensor, str],
        compression: Any,
        passes: int,
        op: str,
        predivide: float,
        sparse_as_dense: bool,
    ) -> None:
        """Begin to watch the gradients. names: name of each parameter."""
        self._parameter_names, self._compression, self._op = names, compression, op
        self._predivide, self._as_dense = predivide, sparse_as_dense
        #: For each gradient that is being reduced, the context for decompress, and the handle.
        self._begun: dict[Tensor, tuple[Any, Request]] = {}
        self._synchronized, self._skip = False, False
        self.set_backward_passes_per_step(passes)
        for p in names:
            p.register_post_accumulate_grad_hook(self._count)

    def _expect(self: Any) -> None:
        """Reset the counts of gradients for the next step."""
        self._left = dict.fromkeys(self._parameter_names, self.backward_passes_per_step)

    def set_backward_passes_per_step(self: Any, passes: int) -> None:
        """Set the number of backward passes per step."""
        self.backward_passes_per_step = passes
        self._expect()

    def _count(self: Any, p: Tensor) -> None:
        """Begin to reduce a gradient after all passes have accumulated it."""
        if self._left[p] <= 0:
            raise AssertionError(
                "DistributedOptimizer: more backward passes than backward_passes_per_step, "
                f"{self.backward_passes_per_step}, before step() or synchronize(); raise it"
            )
        self._left[p] -= 1
        if self._left[p] == 0:
            self._begin(p)

    def _begin(self: Any, p: Tensor) -> None:
        if p.grad is None:  # other ranks may have a gradient
            p.grad = torch.zeros_like(p)
        gradient, name = p.grad, self._parameter_names[p]
        if gradient.is_sparse:
            if not self._as_dense:
                raise UnsupportedError(
                    f"DistributedOptimizer: the gradient of {name} is sparse; pass "
                    "sparse_as_dense=True"
                )
            gradient = gradient.to_dense()
        tensor, context = self._compression.compress(gradient)
        handle = allreduce_async_(
            tensor,
            name=name,
            op=self._op,
            prescale_factor=1 / self._predivide,
            postscale_factor=self._predivide,
        )
        self._begun[p] = context, handle

    def synchronize(self: Any) -> None:
        """Wait until all gradients are reduced; missing gradients count as zeros."""
        for p in self._parameter_names:
            if p not in self._begun:
                self._begin(p)
        try:
            for p, (context, handle) in self._begun.items():
                output = self._compression.decompress(handle.wait(), context)
                if p.grad.is_sparse:
                    p.grad = output.to_sparse()
                elif output is not p.grad:
                    p.grad.copy_(output)
        finally:
            self._begun.clear()
            self._expect()
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self: Any) -> Iterator[None]:
        """Context in which step() does not synchronize, because the program has."""
        self._skip = True
        try:
            yield
        finally:
            self._skip = False

    def step(self: Any, closure: None = None) -> Any:
        """Step with the reduced gradients.

        Raises UnsupportedError (a ValueError) for a closure, which optimizers call between
        reductions: the ranks would diverge.
        """
        if closure is not None:
            raise UnsupportedError(
                "DistributedOptimizer: step: closure: not supported; compute the gradients with "
                "backward() before step()"
            )
        if not self._skip:
            if self._synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() after "
                    "optimizer.synchronize(): gradients are reduced once more",
                    stacklevel=2,
                )
            self.synchronize()
        self._synchronized = False
        return super().step()  # type: ignore[misc]

    def zero_grad(self: Any, *arguments: Any, **options: Any) -> None:
        """Zero the gradients; raises AssertionError while they are being reduced."""
        if self._begun:
            raise AssertionError(
                "zero_grad: gradients are being reduced; call it after step() or synchronize()"
            )
        super().zero_grad(*arguments, **options)  # type: ignore[misc]

    def load_state_dict(self: Any, *arguments: Any, **options: Any) -> None:
        """Load a state, and discard pending reductions."""
        for _, handle in self._begun.values():
            with suppress(HorovodInternalError):  # such as after the loss of a rank
                handle.wait()
        self._begun.clear()
        self._expect()
        super().load_state_dict(*arguments, **options)  # type: ignore[misc]


def DistributedOptimizer(
    optimizer: Any,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: str = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | list[list[Tensor]] | None = None,
    sparse_as_dense: bool = False,
) -> Any:
    """Return an optimizer like the given one that steps with gradients of all ranks.

    optimizer: of torch.optim; its groups and its state are shared, not copied.
    named_parameters: such as ``model.named_parameters()``; all parameters of the optimizer. The
                      names match gradients between ranks.
    compression: compression of gradients, as in allreduce.
    backward_passes_per_step: passes that accumulate gradients before they are reduced.
    op: as in allreduce.
    gradient_predivide_factor: with Average: divisor of gradients before the sum.
    num_groups, groups: ignored: gradients that are ready are fused.
    sparse_as_dense: reduce sparse gradients as dense gradients; if False, they raise
        UnsupportedError (a ValueError).

    Raises ArgumentError (a ValueError) for invalid arguments.
    """
    where = "DistributedOptimizer"
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
        raise ArgumentError(f"{where}: named_parameters: a parameter of the optimizer has no name")
    made: Any = type(type(optimizer).__name__, (_Distributed, type(optimizer)), {})
    distributed: Any = made.__new__(made)
    # Share groups and state, but not a step method that a scheduler has wrapped.
    distributed.__dict__.update(
        {name: value for name, value in optimizer.__dict__.items() if name != "step"}
    )
    own = {id(p) for p in parameters if p.requires_grad}
    reduced = {p: name for name, p in named if id(p) in own and size() > 1}
    distributed._distribute(
        reduced,
        compression,
        backward_passes_per_step,
        op,
        gradient_predivide_factor,
        sparse_as_dense,
    )
    return distributed
