"""The drain's side of metrics: samples the host and its ranks, and gives each run its own."""

import importlib.util
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from time import monotonic, monotonic_ns
from typing import TYPE_CHECKING

from otel_dltrace.export.metrics.container import allowed_cpus
from otel_dltrace.export.metrics.process import ProcessSource
from otel_dltrace.export.metrics.run import RankMetrics, RunMetrics
from otel_dltrace.export.metrics.sampler import IN_WINDOW_S, OUTSIDE_S, Sample, Sampler, Source, Watched
from otel_dltrace.export.metrics.settings import MetricSettings
from otel_dltrace.model.metric_batch import NO_STEP
from otel_dltrace.model.plan import Window
from otel_dltrace.record.guard import say, text_of, tried
from otel_dltrace.record.process_id import pid_namespace

if TYPE_CHECKING:
    from otel_dltrace.export.member import Member

WRITE_S = 1.0
"""Samples are written together, as rows are: of few rows, a batch in a file would be mostly head."""
LAST_SAMPLE_S = 2.0
"""How long a run that has ended waits for the sample of its end."""
_SOON_S = 2.0


class Metering:
    """Metrics of all runs that a drain serves.

    Args:
        settings: Where metrics go over OpenTelemetry; None for nowhere.
        samples: Whether the host and its ranks are sampled.
        window: The steps in which that is often.
        quota: How many bytes a run's metrics may fill on this host.
        lag: How long ago, in seconds, a rank may have done the last step that is known of it.

    Attributes:
        trouble: What the user should know: which sources there are not.
    """

    def __init__(
        self, settings: MetricSettings | None, samples: bool, window: Window, quota: int, lag: float = 0.0
    ) -> None:
        self._settings, self._window, self._quota = settings, window, quota
        self._soon_s = _SOON_S + lag
        self._where = settings.where if settings and settings.where else "their exporter"
        self._runs: dict[Path, RunMetrics] = {}
        self._ranks: dict[int, RankMetrics] = {}
        self._watched: dict[int, Watched] = {}
        self._closing: list[tuple[Path, RunMetrics]] = []
        self._written_at = 0.0
        self._sampled_at = 0
        self._cpus, self._namespace = allowed_cpus(), pid_namespace()
        self.trouble: list[str] = []
        self._lost: dict[Path, str] = {}
        self._sampler = Sampler(self._open_sources, self._tell) if samples else None
        self._is_started = False

    @property
    def is_sampling(self) -> bool:
        """Whether the host and its ranks are sampled; then who these are is to be known soon."""
        return self._sampler is not None

    def _tell(self, sentence: str) -> None:
        self.trouble.append(sentence)
        say(sentence)

    def trouble_of(self, root: Path) -> list[str]:
        """Return what the user should know of the metrics of a run: of this host's, and of its own."""
        return [*self.trouble, *filter(None, [self._lost.get(root)])]

    def has(self, root: Path) -> bool:
        """Return whether metrics of a run are still to come, or on their way."""
        return root in self._runs or any(root == closing for closing, _ in self._closing)

    def _open_sources(self) -> list[Source]:
        """Return the host's sources; called in the sampler's thread, since a driver may take long to answer."""
        if importlib.util.find_spec("psutil") is None:
            say("the host is not sampled, since psutil is missing: pip install psutil")  # the training has said so, too
            return []
        from otel_dltrace.export.metrics.gpu import NoGpuError, open_gpus
        from otel_dltrace.export.metrics.host import CpuAndMemory, Disks, Network

        sources: list[Source] = []
        makers: dict[str, Callable[[], Source]] = {
            "CPU and memory": CpuAndMemory,
            "disks": Disks,
            "the network": Network,
            "GPUs": open_gpus,
        }
        for name, make in makers.items():
            source: Source | Exception = tried(make)
            if not isinstance(source, Exception):
                sources.append(source)
            elif text_of(source) or not isinstance(source, NoGpuError):
                self._tell(f"no metrics of {name}: {text_of(source)}")
        return sources

    def rank_of(self, member: "Member") -> RankMetrics:
        """Return what takes the rows and records of *member*."""
        root, folder = member.writer.root, member.writer.folder
        if root not in self._runs:
            self._runs[root] = RunMetrics(folder, member.process, self._settings, self._quota)
        rank = self._ranks[member.process.nonce] = RankMetrics(self._runs[root], member.process)
        return rank

    def tick(self, members: Sequence["Member"]) -> None:
        """Follow *members*, those of all rings, and write what was sampled."""
        self._end_runs({member.writer.root for member in members})
        self._let_go(monotonic())
        self._end_ranks({member.process.nonce for member in members})
        if self._sampler is None:
            return
        if members and not self._is_started:
            self._is_started = True
            self._sampler.start()
        self._watch(self._sampler, members)
        is_near = any(rank.is_near(self._window, self._soon_s) for rank in self._ranks.values())
        self._sampler.set_period(IN_WINDOW_S if is_near else OUTSIDE_S)
        if monotonic() - self._written_at >= WRITE_S:
            self._written_at = monotonic()
            self._write(self._sampler.take())

    def _end_ranks(self, living: Collection[int]) -> None:
        for nonce in self._ranks.keys() - living:
            self._ranks.pop(nonce).end()

    def _watch(self, sampler: Sampler, members: Sequence["Member"]) -> None:
        """Have the processes of *members* sampled, those whose pids mean something here, as who they are last."""
        living = {member.process.nonce: member for member in members}
        watched: dict[int, Watched] = {}
        for nonce, member in living.items():
            header, bind, root = member.source.reader.header, member.bind, str(member.writer.root)
            if header.pid_namespace != self._namespace:
                continue
            known = self._watched.get(nonce)
            if known is None or (known.run, known.source.rank, known.source.role) != (root, bind.rank, bind.role):
                known = Watched(root, ProcessSource(header.pid, bind.rank, self._cpus, bind.role))
            watched[nonce] = known
        self._watched = watched
        sampler.watch(watched)

    def _write(self, samples: Sequence[Sample]) -> None:
        """Give each run what was sampled."""
        self._sampled_at = max((sample.time for sample in samples), default=self._sampled_at)
        for root, run in self._runs.items():
            run.write([(s.time, NO_STEP, point) for s in samples for point in (*s.host, *s.own.get(str(root), ()))])

    def _end_runs(self, living: set[Path]) -> None:
        """Close the runs whose processes are all gone, with a last sample."""
        now = monotonic_ns()
        for root, run in [*self._runs.items()]:
            if root in living:
                run.ended = 0
            elif not run.ended:
                run.ended = now
                if self._sampler is not None:
                    self._sampler.sample_soon()
            elif run.is_loaded and (self._sampled_at > run.ended or now - run.ended > LAST_SAMPLE_S * 1e9):
                del self._runs[root]
                run.finish(monotonic())
                self._closing.append((root, run))

    def _let_go(self, until: float) -> None:
        """Let go of the runs whose last export has ended by *until*; note of which that got nowhere."""
        closing, self._closing = self._closing, []
        for root, run in closing:
            if not run.wait(until):
                self._closing.append((root, run))
            elif run.failed:
                self._lost[root] = f"the last metrics did not get to {self._where}: they are only in the run directory"

    def finish(self, timeout: float) -> None:
        """Sample once more, close the files and begin the last exports, within *timeout* seconds."""
        until = monotonic() + timeout
        if self._sampler is not None and self._is_started:
            self._write(self._sampler.stop(timeout))
        self._end_ranks(())
        for run in self._runs.values():
            run.finish(until)
        self._closing += self._runs.items()
        self._runs = {}

    def close(self, until: float) -> None:
        """Give the last exports *until* then (monotonic seconds); note which did not make it."""
        self._let_go(until)
        for root, _ in self._closing:
            self._lost[root] = f"the last metrics did not get to {self._where} in time, and are lost to it"
