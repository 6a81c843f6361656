"""all_reduce of sparse tensors (COO), such as gradients of ``nn.Embedding(sparse=True)`` in DDP."""

from __future__ import annotations

import torch

from mpicoll.core.groups import ProcessGroup
from mpicoll.core.work import Work
from mpicoll.dispatch import execute
from mpicoll.dtypes import ReduceOp
from mpicoll.errors import MismatchError, UnsupportedError
from mpicoll.primitives import ALL_GATHER, ALL_GATHER_SINGLE


def all_reduce(group: ProcessGroup, tensor: torch.Tensor, op: ReduceOp) -> Work:
    """Start to sum the tensors of all ranks, in place. The result is coalesced.

    Every rank gathers all indices and values, and adds them in rank order, so all ranks get the
    same bits. The number of nonzeros may differ between ranks; layout and shape must not.

    Raises UnsupportedError for operations other than SUM and AVG. The Work raises MismatchError if
    shapes differ.
    """
    if op not in (ReduceOp.SUM, ReduceOp.AVG):
        raise UnsupportedError(
            f"all_reduce: op: unsupported reduction operation: {op.name} of a sparse tensor; "
            "expected SUM or AVG"
        )

    stream = torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None

    def task() -> None:
        with torch.no_grad(), torch.cuda.stream(stream):
            tensor.copy_(_sum(group, tensor.coalesce(), op))
        if stream is not None:
            stream.synchronize()

    return execute.submit(group, task, "all_reduce", (tensor,))


def _sum(group: ProcessGroup, own: torch.Tensor, op: ReduceOp) -> torch.Tensor:
    counts = _gather_counts(group, own)
    indices, values = own.indices(), own.values()
    # With entries as rows, the indices of each entry are contiguous.
    all_indices = _gather(group, indices.t().contiguous(), counts)
    all_values = _gather(group, values, counts)
    if op is ReduceOp.AVG:
        all_values /= group.size()
    return torch.sparse_coo_tensor(all_indices.t(), all_values, own.shape).coalesce()


def _gather_counts(group: ProcessGroup, own: torch.Tensor) -> list[int]:
    """Check that the tensors of all ranks agree, and return the number of entries of each rank."""
    mine = torch.tensor([own._nnz(), own.sparse_dim(), own.dense_dim(), *own.shape])
    table = torch.empty(group.size(), len(mine), dtype=torch.int64)
    execute.run(ALL_GATHER_SINGLE, group, False, table, mine)
    shapes = table[:, 1:]
    if not bool((shapes == shapes[0]).all()):
        listed = "; ".join(f"rank {r}: {row.tolist()}" for r, row in enumerate(shapes))
        raise MismatchError(
            f"all_reduce on rank {group.rank()} of group {group.group_name}: the ranks' sparse "
            f"tensors differ in sparse dimensions, dense dimensions or shape: {listed}"
        )
    return table[:, 0].tolist()  # type: ignore[no-any-return]


def _gather(group: ProcessGroup, own: torch.Tensor, counts: list[int]) -> torch.Tensor:
    rows = own.new_empty(sum(counts), *own.shape[1:])
    execute.run(ALL_GATHER, group, False, list(rows.split(counts)), own)
    return rows
