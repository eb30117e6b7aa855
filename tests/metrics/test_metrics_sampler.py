"""The thread that samples: often inside the window, once more at the end, and on without a source that fails."""

import os
import threading
from collections.abc import Container, Iterable

import psutil

from otel_dltrace.export.metrics.process import ProcessSource
from otel_dltrace.export.metrics.sampler import IN_WINDOW_S, OUTSIDE_S, Sampler, Watched
from otel_dltrace.model import metrics as m
from otel_dltrace.model.metric_batch import Point
from tests.support.servers import wait_until


class Counting:
    """Counts its samples; fails at those in *fails_at*."""

    def __init__(self, name: str, fails_at: Container[int] = ()) -> None:
        self.name, self.fails_at, self.count = name, fails_at, 0

    def sample(self) -> Iterable[Point]:
        """Return the count so far."""
        self.count += 1
        if self.count in self.fails_at:
            raise ValueError("no more")
        return [Point(self.name, self.count)]


def test_a_source_that_keeps_failing_is_dropped_with_one_sentence():
    """The others go on; it may fail twice in a row, as a driver does that is busy."""
    said, good, bad = [], Counting("good"), Counting("bad", fails_at={2, 3, *range(5, 100)})
    sampler = Sampler(lambda: [bad, good], said.append)
    sampler.set_period(0.001)
    sampler.start()
    wait_until(lambda: good.count > 10)
    samples = sampler.stop(30)

    assert said == ["bad is no longer sampled (ValueError: no more)"]
    assert [p.value for sample in samples for p in sample.host if p.metric == "bad"] == [1, 4]
    assert bad.count == 7
    assert [sample.time for sample in samples] == sorted(sample.time for sample in samples)


def test_where_no_source_can_be_opened_there_is_a_sentence():
    """And processes are sampled all the same."""
    said = []

    def no_sources() -> list[Counting]:
        raise RuntimeError("no /proc here")

    sampler = Sampler(no_sources, said.append)
    sampler.start()
    samples = sampler.stop(30)

    assert said == ["the host's metrics cannot be sampled (no /proc here); training and spans go on"]
    assert samples[-1].host == []


def test_it_samples_at_the_begin_at_once_when_told_and_at_the_end():
    """However long the period is."""
    source = Counting("a")
    sampler = Sampler(lambda: [source])
    sampler.set_period(OUTSIDE_S * 1000)
    sampler.start()
    wait_until(lambda: source.count == 1)
    sampler.sample_soon()
    wait_until(lambda: source.count == 2)
    samples = sampler.stop(30)

    assert [sample.host for sample in samples] == [[Point("a", 1)], [Point("a", 2)], [Point("a", 3)]]


def test_a_shorter_period_counts_at_once():
    """The window opens: nobody waits for the end of a long pause."""
    source = Counting("a")
    sampler = Sampler(lambda: [source])
    sampler.set_period(OUTSIDE_S * 1000)
    sampler.start()
    wait_until(lambda: source.count == 1)
    sampler.set_period(IN_WINDOW_S / 100)
    wait_until(lambda: source.count > 3)

    sampler.stop(30)


def test_each_run_gets_the_points_of_its_processes(tmp_path):
    """A process whose files make no sense is left out, and told of once."""
    (tmp_path / "9").mkdir()
    (tmp_path / "9" / "stat").write_text("9 (python) nonsense\n")
    said, done = [], threading.Event()

    class Process(ProcessSource):
        """One that has always the same memory."""

        def sample(self) -> Iterable[Point]:
            """Return its memory."""
            done.set()
            return [Point(m.PROCESS_MEMORY_USAGE, 7.0, rank=self.rank)]

    sampler = Sampler(list, said.append)
    watched = {1: Watched("run-a", Process(1, 0, 1)), 2: Watched("run-b", Process(2, 1, 1))}
    sampler.watch({**watched, 3: Watched("run-b", ProcessSource(9, 2, 1, proc=tmp_path))})
    sampler.set_period(0.001)
    sampler.start()
    done.wait(240)
    wait_until(lambda: said)
    samples = sampler.stop(30)

    a, b = (Point(m.PROCESS_MEMORY_USAGE, 7.0, rank=rank) for rank in (0, 1))
    assert [sample.own for sample in samples] == [{"run-a": [a], "run-b": [b]}] * len(samples)
    assert said == ["rank 2 is no longer sampled (IndexError: list index out of range)"]


def test_processes_that_are_never_sampled_open_no_files():
    """They come and go between two samples, as short jobs do beside a sidecar; one that was sampled is closed."""
    sampler = Sampler(list)
    sampler.set_period(OUTSIDE_S * 1000)
    before = files_of_processes()
    sampler.watch({0: Watched("run", ProcessSource(os.getpid(), 0, 1))})
    sampler.start()
    (first,) = wait_until(sampler.take)
    for nonce in range(1, 20):
        sampler.watch({nonce: Watched("run", ProcessSource(os.getpid(), nonce, 1))})
    sampler.watch({})
    (last,) = sampler.stop(30)

    assert ([*first.own], [*last.own], files_of_processes()) == (["run"], [], before)


def files_of_processes() -> list[str]:
    """Return which files about processes are open in this one; other files may come and go with other threads."""
    return sorted(file.path for file in psutil.Process().open_files() if file.path.startswith("/proc/"))


def test_a_process_that_is_bound_anew_is_sampled_as_who_it_is_now():
    """The same ring, with another rank in another run."""
    sampler = Sampler(list)
    sampler.set_period(OUTSIDE_S * 1000)
    sampler.watch({0: Watched("first", ProcessSource(os.getpid(), 0, 1))})
    sampler.start()
    (first,) = wait_until(sampler.take)
    sampler.watch({0: Watched("second", ProcessSource(os.getpid(), 3, 1))})
    (second,) = sampler.stop(30)

    ranks = [{run: {p.rank for p in points} for run, points in sample.own.items()} for sample in (first, second)]
    assert ranks == [{"first": {0}}, {"second": {3}}]
