"""The drain's side of metrics: samples the host and its ranks, and gives each run its own."""

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic, monotonic_ns
from typing import TYPE_CHECKING

from otel_dltrace.export.metrics.container import allowed_cpus
from otel_dltrace.export.metrics.process import ProcessSource, pid_namespace
from otel_dltrace.export.metrics.run import RankMetrics, RunMetrics
from otel_dltrace.export.metrics.sampler import IN_WINDOW_S, OUTSIDE_S, Sample, Sampler, Source, Watched
from otel_dltrace.export.metrics.settings import MetricSettings
from otel_dltrace.model.plan import Window
from otel_dltrace.record.guard import say, text_of, tried

if TYPE_CHECKING:
    from otel_dltrace.export.member import Member

WRITE_S = 1.0
"""Samples are written together, as rows are: of few rows, a batch in a file would be mostly head."""
LAST_SAMPLE_S = 2.0
"""How long a run that has ended waits for the sample of its end."""


class Metering:
    """Metrics of all runs that a drain serves.

    Args:
        settings: Where metrics go over OpenTelemetry; None for nowhere.
        samples: Whether the host and its ranks are sampled.
        window: The steps in which that is often.
        quota: How many bytes a run's metrics may fill on this host.

    Attributes:
        trouble: What the user should know: which sources there are not.
    """

    def __init__(self, settings: MetricSettings | None, samples: bool, window: Window, quota: int) -> None:
        self._settings, self._window, self._quota = settings, window, quota
        self._runs: dict[Path, RunMetrics] = {}
        self._ranks: dict[int, RankMetrics] = {}
        self._watched: dict[int, Watched] = {}
        self._closing: list[RunMetrics] = []
        self._written_at = 0.0
        self._sampled_at = 0
        self._cpus, self._namespace = allowed_cpus(), pid_namespace()
        self.trouble: list[str] = []
        self._sampler = Sampler(self._open_sources, self._tell) if samples else None
        self._is_started = False

    def _tell(self, sentence: str) -> None:
        self.trouble.append(sentence)
        say(sentence)

    def _open_sources(self) -> list[Source]:
        """Return the host's sources; called in the sampler's thread, since a driver may take long to answer."""
        if importlib.util.find_spec("psutil") is None:
            say("no host is sampled, since psutil is missing: pip install psutil")  # the training has said so, too
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
        run = self._runs[root]
        run.gone.discard(member.bind.rank)
        rank = self._ranks[member.process.nonce] = RankMetrics(run, member.process)
        return rank

    def tick(self, members: Sequence["Member"]) -> None:
        """Follow *members*, those of all rings, and write what was sampled."""
        self._end_runs({member.writer.root for member in members})
        self._forget(self._ranks.keys() - {member.process.nonce for member in members})
        if self._sampler is None:
            return
        if members and not self._is_started:
            self._is_started = True
            self._sampler.start()
        self._watch(self._sampler, members)
        is_near = any(rank.is_near(self._window) for rank in self._ranks.values())
        self._sampler.set_period(IN_WINDOW_S if is_near else OUTSIDE_S)
        if monotonic() - self._written_at >= WRITE_S:
            self._written_at = monotonic()
            self._write(self._sampler.take())

    def _forget(self, gone: set[int]) -> None:
        """Let go of the ranks whose rings, by nonce, have been read to their end."""
        for nonce in gone:
            rank = self._ranks.pop(nonce)
            rank.run.gone.add(rank.bind.rank)

    def _watch(self, sampler: Sampler, members: Sequence["Member"]) -> None:
        """Have the processes of *members* sampled, those whose pids mean something here."""
        living = {member.process.nonce: member for member in members}
        for nonce, member in living.items():
            header = member.source.reader.header
            if nonce not in self._watched and header.pid_namespace == self._namespace:
                source = ProcessSource(header.pid, member.bind.rank, self._cpus, member.bind.role)
                self._watched[nonce] = Watched(str(member.writer.root), source)
        self._watched = {nonce: watched for nonce, watched in self._watched.items() if nonce in living}
        sampler.watch(self._watched)

    def _write(self, samples: Sequence[Sample]) -> None:
        """Give each run what was sampled."""
        self._sampled_at = max((sample.time for sample in samples), default=self._sampled_at)
        for root, run in self._runs.items():
            run.write([row for s in samples for row in run.rows_of(s.time, s.host, s.own.get(str(root), ()))])

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
                run.finish()
                self._closing.append(run)

    def finish(self, timeout: float) -> None:
        """Sample once more, close the files and begin the last exports, within *timeout* seconds."""
        if self._sampler is not None and self._is_started:
            self._write(self._sampler.stop(timeout))
        for run in self._runs.values():
            run.finish(timeout)
        self._closing += self._runs.values()
        self._runs = {}

    def close(self, timeout: float) -> bool:
        """Return whether all exports have ended within *timeout* seconds."""
        until = monotonic() + timeout
        return all(run.wait(until) for run in self._closing)
