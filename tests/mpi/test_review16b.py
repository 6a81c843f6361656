from __future__ import annotations
import numpy as np, pytest, simulated
from conftest import TIMEOUT
from test_devices import got
import mpicoll as dist
from mpicoll.cuda import capabilities, runtime
from mpicoll.routes.device import peer, workspaces

pytestmark = pytest.mark.any_mpi


def test_graph_in_flight_at_destroy(mpi, monkeypatch):
    arrays = simulated.Arrays(4)
    monkeypatch.setattr(simulated, "DELAY", 1.0)
    monkeypatch.setattr(runtime, "_runtime", arrays.cuda)
    monkeypatch.setenv("MPICOLL_CUDA_AWARE", "none")
    monkeypatch.setattr(capabilities, "_known", None)
    monkeypatch.setattr(peer, "WORKSPACE", 64 * 1024)
    dist.init_process_group(timeout=TIMEOUT)
    me = dist.get_rank()
    group = dist.new_group()
    array = arrays.make(np.full(100, me, np.float32), me)
    array.upload()
    dist.all_reduce(array, group=group)
    got(array)
    with arrays.capturing(array) as graph:
        dist.all_reduce(array, group=group)
    mpi.Barrier()
    graph.launch()
    stream, seen = arrays.cuda._find(me, array.number), []
    close = workspaces.Workspaces.close
    def watched(self, *how):
        seen.append(stream.end - stream.done)
        arrays.cuda._run(stream, stream.end)  # or the process would end
        mpi.Barrier()
        close(self, *how)
    monkeypatch.setattr(workspaces.Workspaces, "close", watched)
    dist.destroy_process_group(group)
    monkeypatch.setattr(workspaces.Workspaces, "close", close)
    dist.destroy_process_group()
    assert seen == [0], "kernels of the group were not done"
