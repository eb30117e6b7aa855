"""What the benchmarks share: medians with their intervals, and tables in markdown."""

import random
import statistics
from collections.abc import Callable, Mapping, Sequence

Statistic = Callable[[Sequence[int]], float]
"""Computes a figure from the rounds whose numbers it is given."""
RESAMPLES = 1000
Round = dict[str, dict[str, float]]
"""For each mode, what a block of a round cost per step or call: ``s``, ``cpu``, ``drain``, and what else is told."""


def with_interval(statistic: Statistic, rounds: int) -> tuple[float, float, float]:
    """Return *statistic* of all *rounds*, and its 95 % interval over resamples of them, with replacement."""
    chance = random.Random(0)
    values = sorted(statistic(chance.choices(range(rounds), k=rounds)) for _ in range(RESAMPLES))
    return statistic(range(rounds)), values[int(0.025 * RESAMPLES)], values[int(0.975 * RESAMPLES) - 1]


def ranged(statistic: Statistic, rounds: int, form: str, unit: str = "") -> str:
    """Return *statistic* in the format *form* with its *unit*, and its interval: ``1.02x (0.99 - 1.05)``."""
    value, low, high = with_interval(statistic, rounds)
    return f"{value:{form}}{unit} ({low:{form}} - {high:{form}})"


def percent_more(ratio: Statistic, rounds: int) -> str:
    """Return by how many percent *ratio* is above 1, and its interval."""
    return ranged(lambda chosen: 100 * (ratio(chosen) - 1), rounds, "+.2f", " %")


def median_of(values: Sequence[float]) -> Statistic:
    """Return what computes the median of the chosen *values*."""
    return lambda rounds: statistics.median(values[i] for i in rounds)


def rate_of(values: Sequence[float]) -> Statistic:
    """Return what computes how many there are in a unit of time, each of which takes the median of the *values*."""
    median = median_of(values)
    return lambda rounds: 1 / median(rounds)


def ratio_of_medians(above: Sequence[float], below: Sequence[float]) -> Statistic:
    """Return what divides the median of the chosen *above* by that of the chosen *below*."""
    over, under = median_of(above), median_of(below)
    return lambda rounds: over(rounds) / under(rounds)


def ratio_of_sums(above: Sequence[float], below: Sequence[float]) -> Statistic:
    """Return what divides the sum of the chosen *above* by that of the chosen *below*."""
    return lambda rounds: sum(above[i] for i in rounds) / sum(below[i] for i in rounds)


def in_turn(cases: Mapping[str, Callable[[], float]], rounds: int, parts: int) -> dict[str, list[float]]:
    """Return what the *cases*, each of which returns its seconds, take in each round for one of its *parts*."""
    for case in cases.values():
        case()  # imports, caches
    seen: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, case in cases.items():
            seen[name].append(case() / parts)
    return seen


def merged(ranks: Sequence[Round]) -> Round:
    """Return a round's figures of all ranks: rank 0's time, since they wait for each other, everybody's CPU."""
    return {mode: {**seen, "cpu": sum(rank[mode]["cpu"] for rank in ranks)} for mode, seen in ranks[0].items()}


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return *rows* under *head* as a markdown table."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows))
