"""A pytest plugin for tests whose subject is how a whole job goes. (PYTEST_DONT_REWRITE)

A test gets its job by a decorator and looks at how it ended, by the fixture ``ended``. All jobs of
a module begin together, a few at a time, because most of a job's time is spent waiting. The module
has a function ``run(job, parameters of the test, folder)`` that returns what ``ended`` is to be.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

#: The environment of all jobs. They start in threads, so they must not read ``os.environ``, which
#: other tests of the module change.
ENVIRONMENT = dict(os.environ)
#: How many jobs run at a time.
AT_A_TIME = 3


def made_by(kind: Callable[..., Any]) -> Callable[..., Callable[[Any], Any]]:
    """The decorator that gives a test its job: ``kind(script, ...)``.

    $name in the script is a parameter of the test.
    """

    def job(script: str, **how: Any) -> Callable[[Any], Any]:
        def decorate(test: Any) -> Any:
            test.job = kind(textwrap.dedent(script), **how)
            return test

        return decorate

    return job


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that have a job as slow: before tests are chosen by their markers."""
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item.function, "job"):
            item.add_marker("slow")


@pytest.fixture(scope="module")
def jobs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Any]]]:
    """The jobs of all chosen tests of this module that are not skipped, begun at once."""
    chosen = [
        item
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.module is request.module
        and hasattr(item.function, "job")
        and not any(mark.args[0] for mark in item.iter_markers("skipif"))
    ]
    pool = ThreadPoolExecutor(AT_A_TIME)
    try:
        yield {
            item.nodeid: pool.submit(
                request.module.run,
                item.function.job,
                item.callspec.params if hasattr(item, "callspec") else {},
                tmp_path_factory.mktemp("job"),
            )
            for item in chosen
        }
    finally:
        pool.shutdown(cancel_futures=True)


@pytest.fixture
def ended(request: pytest.FixtureRequest, jobs: dict[str, Future[Any]]) -> Any:
    """How the test's job ended."""
    return jobs[request.node.nodeid].result()
