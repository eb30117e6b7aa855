"""The thread of the drain that samples: twice a second inside the window, every five seconds outside."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from threading import Event, Lock, Thread
from time import monotonic, monotonic_ns
from typing import NamedTuple, Protocol

from otel_dltrace.export.metrics.process import ProcessSource
from otel_dltrace.model.metric_batch import Point
from otel_dltrace.record.guard import say, text_of, tried

IN_WINDOW_S, OUTSIDE_S = 0.5, 5.0
MOST_WAITING = 1200
"""Samples that wait for a drain that cannot write them: ten minutes inside the window."""
MOST_FAILURES = 3
"""A source that fails so often in a row is dropped: a driver or ``/proc`` may fail once."""


class Source(Protocol):
    """What can be sampled."""

    name: str

    def sample(self) -> Iterable[Point]:
        """Return the values of this moment."""


class Watched(NamedTuple):
    """A process to be sampled: the key of the run that gets its points, and its source."""

    run: str
    source: ProcessSource


class Sample(NamedTuple):
    """What was seen at *time* (monotonic ns): the host's points, and those of each run's processes."""

    time: int
    host: list[Point]
    own: dict[str, list[Point]]


class Sampler:
    """Samples sources, all at once, in a thread of its own; one that keeps failing is dropped with one sentence.

    Args:
        open_sources: Returns the host's sources. It is called in the thread: a driver may take long to answer.
        say_trouble: Is told the sentence of a source that is not sampled, or no longer.
    """

    def __init__(self, open_sources: Callable[[], Sequence[Source]], say_trouble: Callable[[str], None] = say) -> None:
        self._open_sources, self._say = open_sources, say_trouble
        self.period = IN_WINDOW_S
        self._waiting: deque[Sample] = deque(maxlen=MOST_WAITING)
        self._watched: dict[int, Watched] = {}
        self._followed: dict[int, Watched] = {}
        self._failures: dict[object, int] = {}
        self._lock = Lock()
        self._wake = Event()
        self._stopped = self._now = False
        self._thread = Thread(target=self._run, name="otel_dltrace sampler", daemon=True)

    def start(self) -> None:
        """Begin to sample."""
        self._thread.start()

    def watch(self, watched: Mapping[int, Watched]) -> None:
        """Sample these processes from now on, by the nonce of their rings, and no others."""
        with self._lock:
            self._watched = dict(watched)

    def set_period(self, seconds: float) -> None:
        """Sample every *seconds*; what becomes shorter counts at once."""
        is_sooner, self.period = seconds < self.period, seconds
        if is_sooner:
            self._wake.set()

    def sample_soon(self) -> None:
        """Sample once now, out of turn: something ends."""
        self._now = True
        self._wake.set()

    def take(self) -> list[Sample]:
        """Return the samples since the last call."""
        samples = []
        while self._waiting:
            samples.append(self._waiting.popleft())
        return samples

    def stop(self, timeout: float) -> list[Sample]:
        """Sample once more, so that short runs and last moments are seen, and end; return what is left."""
        self._stopped = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return self.take()

    # -- in the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        opened = tried(self._open_sources)
        if isinstance(opened, Exception):
            self._say(f"the host's metrics cannot be sampled ({text_of(opened)}); training and spans go on")
            opened = []
        sources = [*opened]
        due = monotonic()
        while True:
            self._sample(sources)
            if self._stopped:
                self.watch({})
                self._follow()
                break
            due = max(due + self.period, monotonic())  # no catching up where a sample took longer
            while not (self._stopped or self._now) and (wait := due - monotonic()) > 0:
                if self._wake.wait(wait):
                    self._wake.clear()
                    due = min(due, monotonic() + self.period)
            self._now = False

    def _sample(self, sources: list[Source]) -> None:
        now = monotonic_ns()
        host: list[Point] = []
        for source in sources:
            host += self._points_of(source, source.name)
        own: dict[str, list[Point]] = {}
        for run, process in self._follow().values():
            own.setdefault(run, []).extend(self._points_of(process, f"rank {process.rank}"))
        self._waiting.append(Sample(now, host, own))

    def _points_of(self, source: Source | ProcessSource, name: str) -> list[Point]:
        """Return the values of *source*; none where it fails, and once it has been dropped."""
        failures = self._failures.get(source, 0)
        if failures == MOST_FAILURES:
            return []
        points = tried(_all_of, source)
        if not isinstance(points, Exception):
            self._failures.pop(source, None)
            return points
        self._failures[source] = failures + 1
        if failures + 1 == MOST_FAILURES:
            self._say(f"{name} is no longer sampled ({type(points).__name__}: {text_of(points)})")
        return []

    def _follow(self) -> dict[int, Watched]:
        """Return the processes to be sampled; those no longer are let go of, here where nobody is reading them."""
        with self._lock:
            watched = self._watched
        for nonce, (_, source) in self._followed.items():
            if nonce not in watched or watched[nonce].source is not source:
                source.close()
                self._failures.pop(source, None)
        self._followed = watched
        return watched


def _all_of(source: Source | ProcessSource) -> list[Point]:
    return [*source.sample()]
