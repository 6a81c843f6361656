"""DistributedOptimizer: reduces gradients over all ranks, starting during the backward pass."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpicoll.errors import ArgumentError
from mpicoll.horovod.common.exceptions import HorovodInternalError
from mpicoll.horovod.torch.compression import Compression
from mpicoll.horovod.torch.implementations import Average, Sum
from mpicoll.horovod.torch.operations import (
    Handle,
    allreduce_async_,
    grouped_allreduce_async_,
    sparse_allreduce_async,
    synchronize,
)
from mpicoll.horovod.torch.process_sets import ProcessSet, global_process_set

__all__ = ["DistributedOptimizer"]


class _Begun(NamedTuple):
    """An operation on gradients. contexts: argument of decompress for each gradient."""

    parameters: list[Tensor]
    contexts: list[Any]
    handle: Handle


class _Distributed:
    """Mixin in front of the original optimizer's class.

    ``DistributedOptimizer`` sets _parameter_names, _compression and _groups, the lists of
    parameters whose gradients are reduced together.
    """

    def _distribute(
        self: Any, op: str, predivide: float, sparse_as_dense: bool, process_set: ProcessSet
    ) -> None:
        self._op, self._predivide = op, predivide
        self._as_dense, self._process_set = sparse_as_dense, process_set
        self._begun: dict[int, list[_Begun]] = {}
        self._synchronized, self._skip = False, False
        if not process_set.included() or (process_set.size() or 1) == 1:
            self._groups: list[list[Tensor]] = []
        self._expect()
        for index, group in enumerate(self._groups):
            for p in group:
                p.register_post_accumulate_grad_hook(partial(self._count, index))

    def _expect(self: Any) -> None:
        """Reset the counts of gradients for the next step."""
        self._left = dict.fromkeys(self._parameter_names, self.backward_passes_per_step)
        self._waiting = [len(group) for group in self._groups]

    def set_backward_passes_per_step(self: Any, passes: int) -> None:
        """Set the number of backward passes per step."""
        self.backward_passes_per_step = passes
        self._expect()

    def _count(self: Any, index: int, p: Tensor) -> None:
        """Begin to reduce a group after all passes have accumulated its gradients."""
        if self._left[p] <= 0:
            raise AssertionError(
                "DistributedOptimizer: more backward passes than backward_passes_per_step, "
                f"{self.backward_passes_per_step}, before step() or synchronize(); raise it"
            )
        self._left[p] -= 1
        if self._left[p] == 0:
            self._waiting[index] -= 1
            if self._waiting[index] == 0:
                self._begin(index)

    def _begin(self: Any, index: int) -> None:
        begun = self._begun[index] = []
        dense: list[Tensor] = []
        for p in self._groups[index]:
            if p.grad is None:  # other ranks may have a gradient
                p.grad = torch.zeros_like(p)
            if p.grad.is_sparse and not self._as_dense:
                name = self._parameter_names[p]
                finish = sparse_allreduce_async(p.grad, name, self._op, self._process_set)
                begun.append(_Begun([p], [None], finish))
            else:
                dense.append(p)
        if not dense:
            return
        gradients = [p.grad.to_dense() if p.grad.is_sparse else p.grad for p in dense]
        compressed = [self._compression.compress(gradient) for gradient in gradients]
        handle = grouped_allreduce_async_(
            [tensor for tensor, _ in compressed],
            name=",".join(self._parameter_names[p] for p in dense),
            op=self._op,
            prescale_factor=1 / self._predivide,
            postscale_factor=self._predivide,
            process_set=self._process_set,
        )
        begun.append(_Begun(dense, [context for _, context in compressed], handle))

    def synchronize(self: Any) -> None:
        """Wait until all gradients are reduced; missing gradients count as zeros."""
        for index in range(len(self._groups)):
            if index not in self._begun:
                self._begin(index)
        try:
            for each in itertools.chain(*self._begun.values()):
                outputs = synchronize(each.handle)
                if isinstance(outputs, Tensor):
                    outputs = (outputs,)
                for p, context, output in zip(each.parameters, each.contexts, outputs, strict=True):
                    if output.is_sparse:
                        p.grad = output
                        continue
                    output = self._compression.decompress(output, context)
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

    def step(self: Any, closure: Any = None) -> Any:
        """Step with the reduced gradients.

        closure: the optimizer may call it several times. After each call its gradients are reduced,
                 unless the closure has called synchronize(), and so is the loss that it returns,
                 with the same op: an optimizer that uses the loss, such as LBFGS, takes the same
                 decisions on all ranks.

        Returns the optimizer's result: the reduced loss of the first call of the closure, or None.
        """
        if not self._skip:
            if self._synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() after "
                    "optimizer.synchronize(): gradients are reduced once more",
                    stacklevel=2,
                )
            self.synchronize()
        self._synchronized = False
        if closure is not None and self._groups:
            closure = partial(self._reduced, closure)
        result = super().step(closure)  # type: ignore[misc]
        self._synchronized = False
        return result

    def _reduced(self: Any, closure: Any) -> Any:
        """Call a closure, reduce its gradients, and return its reduced loss."""
        loss = closure()
        number = isinstance(loss, Real) or (isinstance(loss, Tensor) and loss.numel() == 1)
        # A rank without a loss contributes zero, because other ranks may have a loss. The same
        # holds for missing gradients.
        own = loss.detach() if isinstance(loss, Tensor) else loss
        value = torch.tensor([float(own) if number else 0.0], dtype=torch.float64)
        name = f"loss.{next(iter(self._parameter_names.values()))}"
        handle = allreduce_async_(value, name=name, op=self._op, process_set=self._process_set)
        # Gradients are already reduced if no rank has accumulated any since.
        touched = bool(self._begun) or any(
            left != self.backward_passes_per_step for left in self._left.values()
        )
        ranks = torch.tensor([int(touched)])
        if synchronize(
            allreduce_async_(ranks, name=f"{name}.touched", op=Sum, process_set=self._process_set)
        ).item():
            self.synchronize()
        synchronize(handle)
        if not number:
            return loss
        return torch.full_like(loss, value.item()) if isinstance(loss, Tensor) else value.item()

    def zero_grad(self: Any, *arguments: Any, **options: Any) -> None:
        """Zero the gradients; raises AssertionError while they are being reduced."""
        if self._begun:
            raise AssertionError(
                "zero_grad: gradients are being reduced; call it after step() or synchronize()"
            )
        super().zero_grad(*arguments, **options)  # type: ignore[misc]

    def load_state_dict(self: Any, *arguments: Any, **options: Any) -> None:
        """Load a state, and discard pending reductions."""
        for each in itertools.chain(*self._begun.values()):
            with suppress(HorovodInternalError):  # such as after the loss of a rank
                synchronize(each.handle)
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
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return an optimizer like the given one that steps with gradients of all ranks.

    optimizer: of torch.optim; its groups and its state are shared, not copied.
    named_parameters: such as ``model.named_parameters()``; all parameters of the optimizer. The
                      names match gradients between ranks.
    compression: compression of gradients, as in allreduce.
    backward_passes_per_step: passes that accumulate gradients before they are reduced.
    op: as in allreduce.
    gradient_predivide_factor: with Average: divisor of gradients before the sum.
    groups: lists of parameters whose gradients are reduced in one operation once all are ready, or
            the number of such lists to form; None or 0: each gradient is reduced once it is ready,
            fused with other ready gradients.
    num_groups: deprecated form of ``groups``.
    sparse_as_dense: reduce sparse gradients as dense gradients.
    process_set: the ranks whose gradients are reduced.

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
    with_gradient = [p for p in parameters if p.requires_grad]
    if num_groups:
        warnings.warn(
            f"{where}: num_groups is deprecated; use groups", DeprecationWarning, stacklevel=2
        )
    together = _group(with_gradient, num_groups if groups is None else groups)
    distributed._parameter_names = {tensor: name for name, tensor in named}
    distributed._compression, distributed._groups = compression, together
    distributed.backward_passes_per_step = backward_passes_per_step
    distributed._distribute(op, gradient_predivide_factor, sparse_as_dense, process_set)
    return distributed


def _group(parameters: list[Tensor], groups: Any) -> list[list[Tensor]]:
    """Return the parameters in groups; see DistributedOptimizer."""
    where = "DistributedOptimizer: groups"
    if isinstance(groups, int):
        if groups < 0:
            raise ArgumentError(f"{where}: expected 0 or more, got {groups}")
        if groups == 0:
            return [[p] for p in parameters]
        count = len(parameters)
        ends = [count * index // groups for index in range(groups + 1)]
        split = [parameters[a:b] for a, b in itertools.pairwise(ends)]
        return [group for group in split if group]
    if not isinstance(groups, list) or not all(isinstance(group, list) for group in groups):
        raise ArgumentError(f"{where}: expected a number, or a list of lists of tensors")
    listed = [p for group in groups for p in group]
    if not all(isinstance(p, Tensor) for p in listed):
        raise ArgumentError(f"{where}: expected a number, or a list of lists of tensors")
    if len({id(p) for p in listed}) < len(listed):
        raise ArgumentError(f"{where}: expected each parameter once")
    known = {id(p) for p in parameters}
    chosen = [[p for p in group if id(p) in known] for group in groups]
    grouped = {id(p) for p in listed}
    return [group for group in chosen if group] + [[p] for p in parameters if id(p) not in grouped]
