"""The file of measured ways, from job to job."""

from __future__ import annotations

from rank_scripts import Ended, job


@job("""
    import json, pathlib, tempfile
    from mpi4py import MPI
    from mpicoll.routes.host import ways
    rank, x = MPI.COMM_WORLD.rank, np.ones(1 << 15, np.float32)
    folder = MPI.COMM_WORLD.bcast(tempfile.mkdtemp() if rank == 0 else None)
    os.environ.update(XDG_CACHE_HOME=folder, MPICOLL_TABLE="")

    def measure(calls):
        '''Return the ways of all_reduce after a number of calls in a new default group.'''
        ways._read.cache_clear()
        ways._written.clear()
        dist.init_process_group()
        for _ in range(12):  # the group shares memory from its 8th call on
            dist.barrier()
        for _ in range(calls):
            dist.all_reduce(x)
        found = dist.group.WORLD.resources.find("shared").ways.describe()
        dist.destroy_process_group()
        MPI.COMM_WORLD.Barrier()
        return [text for kind, text in found.items() if kind.startswith("all_reduce float32")]

    def write(text):
        MPI.COMM_WORLD.Barrier()  # every rank has read the file
        if rank == 0:
            path.write_text(text)
        MPI.COMM_WORLD.Barrier()

    assert measure(1) == []
    (first,) = measure(20)
    (path,) = pathlib.Path(folder, "mpicoll").iterdir()
    saved = json.loads(path.read_text())
    times = saved["all_reduce float32 SUM"]["17"]
    assert all(f"{ns / 1000:.1f} us" in first for ns in times.values())
    assert len(times) == first.count(" us") > 1

    # The file's times, not times of this job, until the 40th call.
    earlier = {"17": {"0": 7000, "2": 5000}}
    write(json.dumps({"all_reduce float32 SUM": earlier}))
    assert measure(30) == ["slots-past-caches 5.0 us, slots 7.0 us"]
    assert json.loads(path.read_text()) == {"all_reduce float32 SUM": earlier}

    others = ["1", '{"17": {"0": 0}}', '{"40": {"0": 1}}', '{"17": {"a": 1}}',
              '{"17": {"0": 4294967296}}', '{"17": {"0": Infinity}}', "[" * 99999]
    for bad in "[", "[]", "1", *('{"all_reduce float32 SUM": %s}' % each for each in others):
        write(bad)
        (measured,) = measure(20)
        assert measured.count(" us") > 1, (bad, measured)
    say("done")
""")
def test_a_job_begins_with_the_ways_of_an_earlier_job(ended: Ended) -> None:
    ended.printed("done", "done")
