"""Events a second between BytePS's ``comm.json`` and a run directory: ``python -m benchmarks import``.

The file is laid out as BytePS writes it: 400 tensors of 1 to 4 partitions, 11 occurrences, the stages of a root, as a
worker of a large model records them. *Import* is all that `otel-dltrace import byteps` does once it runs: digest, read,
spans with parents and queue waits, Arrow segments on tmpfs. *Import, laid out otherwise* takes the same events on one
line, which go the way of any JSON. *Export* is that run directory read and written as ``comm.json``. *json.loads* only
parses the file into dictionaries.

All take turns in one process. Figures are medians over rounds; the intervals hold 95 % of the medians (and ratios
of medians) of resampled rounds.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import numpy as np

from benchmarks._processes import scratch
from benchmarks._stats import in_turn, ranged, rate_of, ratio_of_medians, table
from otel_dltrace.export.foreign.byteps_in import Options, import_byteps
from otel_dltrace.export.foreign.byteps_out import write_byteps
from otel_dltrace.export.rundir.reader import read_run
from otel_dltrace.formats.comm_json import Comm, Series, write_comm

TENSORS, OCCURRENCES = 400, 11
STAGES = ("REDUCE", "COPYD2H", "PUSH", "PULL", "COPYH2D", "BROADCAST")
OURS, OTHER, EXPORT, LOADS = "import", "import, laid out otherwise", "export", "json.loads"
GOAL = 200_000
_BEGIN, _STEP, _BAR = 1_700_000_000_000_000, 500_000, 90


def timeline() -> Comm:
    """Return what a worker records."""
    series: list[Series] = []
    offsets: list[int] = []
    for tensor in range(TENSORS):
        name = f"byteps.Gradient.encoder.layer.{tensor // 16}.attention.output.{tensor % 16}.weight"
        series.append(Series(name))
        offsets.append(tensor * 1000)
        for partition in range(1 + tensor % 4):
            for place, stage in enumerate(STAGES):
                series.append(Series(name, tensor << 16 | partition, stage))
                offsets.append(tensor * 1000 + 10 + place * 100 + partition)
    which = np.repeat(np.arange(len(series), dtype=np.int32), OCCURRENCES)
    ts = _BEGIN + np.array(offsets)[which] + np.tile(np.arange(OCCURRENCES), len(series)) * _STEP
    is_total = np.array([not one.stage for one in series])[which]
    return Comm(series, which, ts, np.where(is_total, 10 + len(STAGES) * 100, _BAR))


def _cases(folder: Path) -> tuple[dict[str, Callable[[], float]], int]:
    """Return what takes the seconds of each case once, and how many events there are."""
    comm = timeline()
    ours, other = (folder / name / "0" / "comm.json" for name in ("ours", "other"))
    for path in (ours, other):
        path.parent.mkdir(parents=True)
    ours.write_bytes(b"".join(write_comm(comm)))
    other.write_text(json.dumps(json.loads(ours.read_bytes())))
    import_byteps([ours], folder / "RUN", Options())

    def imported(path: Path) -> Callable[[], float]:
        def once() -> float:
            begun = perf_counter()
            import_byteps([path], folder / "NEW", Options())
            seconds = perf_counter() - begun
            shutil.rmtree(folder / "NEW")
            return seconds

        return once

    def exported() -> float:
        begun = perf_counter()
        write_byteps({batch.process: [batch] for batch in read_run(folder / "RUN")}, folder / "traces", lambda _: None)
        return perf_counter() - begun

    def loads() -> float:
        begun = perf_counter()
        json.loads(ours.read_bytes())
        return perf_counter() - begun

    return {OURS: imported(ours), OTHER: imported(other), EXPORT: exported, LOADS: loads}, len(comm)


def run(rounds: int) -> str:
    """Measure and return the table in markdown."""
    with scratch() as folder:
        cases, events = _cases(folder)
        seen = in_turn(cases, rounds, events)
    head = [f"case, {events:,} events", "events/s (95 %)", "times the speed of json.loads (95 %)", "goal"]
    return table(head, [_row(name, seen) for name in seen])


def _row(name: str, seen: dict[str, list[float]]) -> list[str]:
    own = seen[name]
    beside = "" if name == LOADS else ranged(ratio_of_medians(seen[LOADS], own), len(own), ".2f", "x")
    return [name, ranged(rate_of(own), len(own), ",.0f"), beside, f">= {GOAL:,}" if name == OURS else ""]
