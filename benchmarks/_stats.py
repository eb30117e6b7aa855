"""What the benchmarks share: medians with their intervals, and tables in markdown."""

import random
import statistics
from collections.abc import Callable, Sequence

Statistic = Callable[[Sequence[int]], float]
"""Computes a figure from the rounds whose numbers it is given."""


def interval(statistic: Statistic, rounds: int, resamples: int = 1000) -> tuple[float, float]:
    """Return the 95 % interval of *statistic* over resamples of the numbers of *rounds* rounds, with replacement."""
    chance = random.Random(0)
    values = sorted(statistic(chance.choices(range(rounds), k=rounds)) for _ in range(resamples))
    return values[int(0.025 * resamples)], values[int(0.975 * resamples) - 1]


def with_interval(statistic: Statistic, rounds: int) -> tuple[float, float, float]:
    """Return *statistic* of all *rounds* and its 95 % interval."""
    return (statistic(range(rounds)), *interval(statistic, rounds))


def median_of(values: Sequence[float]) -> Statistic:
    """Return what computes the median of the chosen *values*."""
    return lambda rounds: statistics.median(values[i] for i in rounds)


def ratio_of_medians(above: Sequence[float], below: Sequence[float]) -> Statistic:
    """Return what divides the median of the chosen *above* by that of the chosen *below*."""
    over, under = median_of(above), median_of(below)
    return lambda rounds: over(rounds) / under(rounds)


def ratio_of_sums(above: Sequence[float], below: Sequence[float]) -> Statistic:
    """Return what divides the sum of the chosen *above* by that of the chosen *below*."""
    return lambda rounds: sum(above[i] for i in rounds) / sum(below[i] for i in rounds)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return *rows* under *head* as a markdown table."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows))
