"""Operations by kind and rank: how many, how large, and whose ends may be averaged."""

import pytest

from otel_dltrace.analysis.collectives.joined import join
from otel_dltrace.analysis.collectives.operations import OperationRow, RankOperation, operations
from otel_dltrace.analysis.spread import Spread
from otel_dltrace.model.attributes import number_columns
from otel_dltrace.model.semconv import DL_COMM_SIZE, Flag, Source
from tests.support.runs import MS, Rank


def test_operations_are_counted_per_kind_and_rank():
    """Tensors that differ in a number are one kind; the skew is over joined collectives, and ranks are in order."""
    ranks = [Rank(r, 2) for r in range(2)]
    for r, rank in enumerate(ranks):
        for i in range(3):
            begin, size = 10 * i + r, 1024 * (r + 1)
            rank.collective(0, begin, 10 * i + 5, i + 1, tensor=f"bucket {i}", dtype="float32", size=size)
        rank.collective(0, 50, 90, 9, flags=Flag.TRUNCATED)
    batches = [rank.batch() for rank in reversed(ranks)]
    of_ranks = (
        RankOperation(0, 3, 3072, Spread(3, 15 * MS, 5 * MS, 5 * MS, 5 * MS, 5 * MS)),
        RankOperation(1, 3, 6144, Spread(3, 12 * MS, 4 * MS, 4 * MS, 4 * MS, 4 * MS)),
    )

    found = operations(batches, join(batches))

    assert found == (
        OperationRow(
            "all_reduce",
            "gloo",
            "0",
            "float32",
            "bucket N",
            "host_done",
            (3, 3),
            (3072, 6144),
            Spread(6, 27 * MS, 4_500_000, 4_500_000, 5 * MS, 5 * MS),
            Spread(3, 3 * MS, MS, MS, MS, MS),
            of_ranks,
        ),
    )


def test_ends_of_different_meaning_are_not_averaged():
    """An issue time and a done time make two rows."""
    rank = Rank().collective(0, 0, 5, 1).collective(0, 5, 6, 2, source=Source.HOST_ISSUE)
    batches = [rank.batch()]
    found = operations(batches, join(batches))
    assert [(row.source, row.time.total) for row in found] == [("host_done", 5 * MS), ("host_issue", MS)]


def test_sizes_that_do_not_fit_together_into_64_bits_are_added():
    """Two of the largest made a negative number."""
    most = (1 << 63) - 1
    batch = Rank().collective(0, 0, 5, 1, size=most).collective(0, 5, 6, 2, size=most).batch()
    (row,) = operations([batch], join([batch]))

    assert row.bytes == (2 * most, 2 * most)


@pytest.mark.parametrize("size", [1 << 63, (1 << 64) - 1], ids=["2**63", "-1"])
def test_a_size_that_cannot_be_is_none(size):
    """A program told it: it neither makes the sum of the others smaller, nor is sent as a negative number."""
    batch = Rank().collective(0, 0, 5, 1).collective(0, 5, 6, 2, size=size).batch()
    (row,) = operations([batch], join([batch]))
    ((values, told),) = ((values, told) for name, values, told in number_columns(batch) if name == DL_COMM_SIZE)

    assert (row.count, row.bytes, values[told].tolist()) == ((2, 2), (1024, 1024), [1024])
