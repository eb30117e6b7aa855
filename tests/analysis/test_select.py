"""Which part of a run is looked at: steps and ranks by number, what is not there, how numbers are spelled."""

import pytest

from otel_dltrace.analysis.select import MOST_STRETCHES, select, spell
from otel_dltrace.model.errors import RunNotFoundError
from otel_dltrace.model.plan import Window
from tests.support.runs import Rank


def test_steps_and_ranks_can_be_selected():
    """Anything with `in` selects steps; records outside any step are not in them."""
    batches = [Rank(r, 3).step(0, 0, 1).step(1, 1, 2).step(5, 2, 3).batch() for r in range(3)]

    chosen = select(batches, steps=Window.parse("1-4,5-9"), ranks=[0, 2])

    assert [(batch.rank, batch["step"].tolist()) for batch in chosen] == [(0, [1, 5]), (2, [1, 5])]
    assert select(batches) == batches


@pytest.mark.parametrize(
    ("steps", "ranks", "sentence"),
    [
        pytest.param(None, [1, 7, 8], "rank 7-8 is not in this run; it has 0-1", id="rank"),
        pytest.param(range(9, 12), None, "none of the steps asked for is in this run; it has steps 0-1, 5", id="step"),
    ],
)
def test_what_is_not_there_is_said(steps, ranks, sentence):
    """An unknown rank, or steps that nobody made, is an error that names what there is."""
    batches = [Rank(r, 2).step(0, 0, 1).step(1, 1, 2).step(5, 2, 3).batch() for r in range(2)]
    with pytest.raises(RunNotFoundError) as error:
        select(batches, steps, ranks)
    assert str(error.value) == sentence


def test_numbers_are_spelled_as_ranges():
    """Neighbours are joined."""
    assert spell({7, 0, 1, 2, 9, 10}) == "0-2, 7, 9-10"


def test_of_many_numbers_the_first_are_spelled():
    """Of a world in which every other rank is missing a sentence names some, and how many more there are."""
    told = ", ".join(str(2 * n) for n in range(MOST_STRETCHES))
    assert spell(range(0, 2 * MOST_STRETCHES, 2)) == told
    assert spell([*range(0, 2 * MOST_STRETCHES, 2), *range(5000, 6234)]) == f"{told} and 1,234 more"
