"""The cost model: formulas of the papers, shared links, and the tables of docs/model.md."""

from __future__ import annotations

import model
import pytest
from model import Place
from report import DOCS, fill_page

from mpicoll.routes.tuning import Table

pytestmark = pytest.mark.any_mpi


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
