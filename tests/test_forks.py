"""Forked children of a rank."""

from __future__ import annotations

from rank_scripts import Ended, job


@job("""
    def raises(call):
        error = error_of(dist.ForkedError, call)
        assert isinstance(error, RuntimeError) and "forked" in str(error)
    dist.init_process_group()
    x, w, rank = np.ones(4), dist.group.WORLD, dist.get_rank()
    g = dist.new_group([0, 1])
    dist.all_reduce(x)
    dist.all_reduce(x, async_op=True).wait()
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        for group in None, w, g:
            raises(lambda: dist.all_reduce(x, group=group))
            raises(lambda: dist.all_reduce(x, group=group, async_op=True))
            raises(lambda: dist.send(x, 1 - rank, group=group))
            raises(lambda: dist.irecv(x, group=group))
            raises(lambda: dist.all_gather_object([None, None], 1, group=group))
            raises(lambda: dist.barrier(group=group))
        raises(dist.init_process_group)
        raises(dist.get_rank)
        raises(dist.new_group)
        raises(dist.destroy_process_group)
        sys.exit(5)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
    for group in None, g:
        dist.all_reduce(x, group=group)
        dist.all_reduce(x, group=group, async_op=True).wait()
    assert x[0] == 2**6
    say("done")
    dist.destroy_process_group()
""")
def test_calls_in_a_forked_child_raise(ended: Ended) -> None:
    ended.printed("done", "done")


@job("""
    import multiprocessing
    def load(queue):
        try:
            dist.get_rank()
        except dist.ForkedError:
            queue.put("forked")
    def broken():
        raise ValueError("in the child")
    def exits():
        sys.exit(6)
    if __name__ == "__main__":
        dist.init_process_group()
        context = multiprocessing.get_context("fork")
        queue = context.Queue()
        for target, arguments, code in (load, (queue,), 0), (broken, (), 1), (exits, (), 6):
            child = context.Process(target=target, args=arguments)
            child.start()
            dist.barrier()
            child.join()
            assert child.exitcode == code, (target, child.exitcode)
        assert queue.get() == "forked"
        x = np.ones(4)
        dist.all_reduce(x, async_op=True).wait()
        say("done", x[0])
        dist.destroy_process_group()
""")
def test_end_of_a_multiprocessing_child_does_not_end_the_rank(ended: Ended) -> None:
    ended.printed("done 2.0", "done 2.0")
    assert ended.err.count("ValueError: in the child") == 2


@job("""
    import gc
    dist.init_process_group()
    for _ in range(70):
        dist.all_reduce(np.ones(5000))
    try:
        dist.all_reduce(np.ones(5000 + dist.get_rank()))
    except dist.MismatchError as error:
        kept = error  # its frames keep references to the shared segment
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        mine = [np.full(1 << 20, i, np.uint8) for i in range(200)]
        kept = None
        gc.collect()
        assert [int(one.min()) for one in mine] == [int(one.max()) for one in mine]
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    say("done")
    dist.destroy_process_group()
""")
def test_memory_of_a_forked_child_is_not_overwritten(ended: Ended) -> None:
    """The child releases objects of its parent that refer to the shared segment."""
    ended.printed("done", "done")
