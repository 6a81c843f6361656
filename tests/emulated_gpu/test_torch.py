"""torch on the emulated device: its streams, events and memory, and its operators on the host.

Run it with `make test-gpu-emulated-torch`.
"""

from __future__ import annotations

import os

import pytest

torch = pytest.importorskip("torch")
if "EMULATED_GPU_CACHE" not in os.environ or not torch.version.cuda:
    pytest.skip("run it with make test-gpu-emulated-torch", allow_module_level=True)
pytest.importorskip("torch_kernels")


def test_streams_are_ordered_by_events_only():
    tensor, side = torch.zeros(10, device="cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        tensor.fill_(1)
    done = side.record_event()
    assert (tensor.cpu() == 0).all() and not done.query()
    torch.cuda.current_stream().wait_event(done)
    assert (tensor.cpu() == 1).all() and done.query()


@pytest.mark.parametrize("pinned", [False, True])
def test_asynchronous_copies(pinned):
    host = torch.arange(1000.0, pin_memory=pinned)
    found = torch.zeros(1000, pin_memory=True)
    assert host.is_pinned() is pinned
    with torch.cuda.stream(torch.cuda.Stream()):
        tensor = host.to("cuda", non_blocking=True)
        host += 1  # pageable memory has been read, pinned memory has not
        found.copy_(tensor, non_blocking=True)
    assert not found.any()
    torch.cuda.current_stream().synchronize()
    assert not found.any(), "a stream waits for another"
    torch.cuda.synchronize()
    assert (found == torch.arange(1000.0) + pinned).all()


@pytest.mark.parametrize(
    "function",
    [
        lambda a: (a.t() * 2 + 1).sum(0),
        lambda a: a.double().t().contiguous()[1:, ::2].bfloat16(),
        lambda a: a[:, 1].copy_(a[:, 2].half()) * a.relu_()[0, 0].item(),
        lambda a: torch.cat(torch._foreach_add([a, a.t()], 1.0), out=a.new_empty(0)),
        lambda a: torch.autograd.functional.jacobian(lambda x: (x @ x).tanh(), a),
    ],
)
def test_operators(function):
    given = torch.linspace(-1, 1, 25).view(5, 5)
    expected, found = function(given.clone()), function(given.cuda())
    assert found.is_cuda and found.stride() == expected.stride()
    torch.testing.assert_close(found.cpu(), expected)


def test_kernel_that_is_not_replaced_raises():
    sparse = torch.eye(3).to_sparse().cuda()
    with pytest.raises(RuntimeError, match="NoKernelImageForDevice"):
        sparse.add(sparse).coalesce()
