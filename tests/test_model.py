"""The cost model: formulas of the papers, shared links, and the tables of docs/model.md."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

from mpicoll.routes.tuning import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import model  # noqa: E402
from model import Byte, Place  # noqa: E402
from report import DOCS, fill_page  # noqa: E402

pytestmark = pytest.mark.any_mpi

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> tuple[float, float, float]:
    """Alpha, beta and gamma of a network, and nothing else that takes time."""
    alpha, beta, gamma = 1e-6, 1e-9, 0.25e-9
    monkeypatch.setattr(model, "LATENCY", alpha)
    monkeypatch.setattr(model, "BANDWIDTH", 1 / beta)
    monkeypatch.setattr(model, "MEMORY", math.inf)
    monkeypatch.setattr(model, "MESSAGE", 0.0)
    monkeypatch.setattr(model, "SENT", Byte(0, 0, 0))
    monkeypatch.setattr(model, "COMBINED", Byte(gamma, gamma, 0))
    return alpha, beta, gamma


def test_times_match_the_papers(network: tuple[float, float, float]) -> None:
    """Thakur, Rabenseifner, Gropp: one rank a node, powers of two."""
    alpha, beta, gamma = network
    n, m = 16, 48000.0
    rest, logn = (n - 1) / n, math.log2(n)
    halved = logn * alpha + rest * m * beta
    expected = {
        model.doubling: logn * (alpha + beta * m + gamma * m),
        model.rabenseifner: 2 * halved + rest * m * gamma,
        model.halving: halved + rest * m * gamma,
        model.pairwise: (n - 1) * alpha + rest * m * (beta + gamma),
        model.gather_doubling: halved,
        model.ring: (n - 1) * alpha + rest * m * beta,
    }
    for algorithm, time in expected.items():
        found = model.messages(Place(n, 1), algorithm(Place(n, 1), m), m)
        assert found == pytest.approx(time), algorithm


def test_page_has_the_tables_of_the_model() -> None:
    page = (DOCS / "model.md").read_text()
    assert fill_page(page, "model", {"defaults": model.lines()}) == page, (
        "python benchmarks/model.py --write"
    )


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        ("all_reduce", Place(2, 4)),
        ("all_reduce", Place(16, 64)),
        ("all_reduce of others", Place(16, 64)),
        ("reduce_scatter", Place(16, 64)),
        ("reduce_scatter", Place(64, 1)),
    ],
)
def test_default_tables_match_the_model(kind: str, place: Place) -> None:
    """The same routes from about the same sizes. A table with one route is worse."""
    found = model.find(Table(), kind, place)
    assert found.worst < model.WORSE
    assert [route for _, route in found.model] == [route for _, route in found.default]
    for (own, _), (default, _) in zip(found.model[1:], found.default[1:], strict=True):
        assert default / 4 <= own <= 4 * default
    (_, first), (_, last) = found.default
    for steps in (((0, first),), ((0, last),)):
        other = Table({place.ranks: {kind: {place.name: steps}}})
        assert model.find(other, kind, place).worst > model.WORSE
