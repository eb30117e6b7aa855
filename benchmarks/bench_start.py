"""What a process pays at its start and at its end: ``python -m benchmarks start``.

Every figure is a process of its own, timed from its start to its end (time, and CPU by ``wait4``). The cases take
turns in an order drawn anew in each round; *added* is the median over rounds of the difference to the base of its
group in the same round, and its CPU is set against what importing the SDK and its OTLP exporter adds.

The interpreters are two virtual environments made for this: in one the packages can be imported and there is no
.pth file that runs code, in the other there is ours besides. *on* is ``OTEL_DLTRACE=1``.

The end: a program that records one step prints the time as its last act; what follows is the exit of the
interpreter. Traced it hands its records to the drain and waits until they are read: by a drain that the program
itself has just started, and by one that has been at work for longer, as after any training.
"""

import os
import random
import subprocess
import sys
import time
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks._processes import ROOT, end_all, environment, scratch
from benchmarks._stats import median_of, ranged, ratio_of_medians, table

PTH = "otel_dltrace.pth"
NOTHING, TORCH, OURS = "pass", "import torch", "import otel_dltrace"
SDK_IMPORTS = "import opentelemetry.sdk.trace.export, opentelemetry.exporter.otlp.proto.http.trace_exporter"
EXIT = """
import time, otel_dltrace
with otel_dltrace.step():
    pass
{}
print(time.monotonic(), flush=True)
"""
END = EXIT.format("")
END_AFTER_DRAIN = EXIT.format("assert otel_dltrace.flush(60)")


@dataclass(frozen=True)
class Case:
    """A program, in one of the interpreters.

    Attributes:
        name: Its row.
        program: What it runs.
        base: The case from which it is told what is added; "" for none.
        installed: Our .pth file is there.
        switch: What ``OTEL_DLTRACE`` says; "" for nothing.
    """

    name: str
    program: str
    base: str = ""
    installed: bool = False
    switch: str = ""


def _switched(name: str, program: str) -> tuple[Case, ...]:
    return (
        Case(name, program),
        Case(f"{name}, .pth there", program, name, installed=True),
        Case(f"{name}, on", program, name, installed=True, switch="1"),
    )


BARE = "`python -c pass`"
SDK = Case("import of the SDK and its OTLP exporter", SDK_IMPORTS, BARE)
STARTS = (
    *_switched(BARE, NOTHING),
    *_switched("`import torch`", TORCH),
    Case("`import otel_dltrace`", OURS, BARE),
    SDK,
)
UNTRACED_END = "exit, off"
ENDS = (
    Case(UNTRACED_END, END),
    Case("exit, on, the drain has just been started", END, UNTRACED_END, installed=True, switch="1"),
    Case("exit, on, the drain is at work", END_AFTER_DRAIN, UNTRACED_END, installed=True, switch="1"),
)


@dataclass(frozen=True)
class Process:
    """What one process took, in seconds: in all, of CPU, and for its exit where the program said when that began."""

    whole: float
    cpu: float
    exit: float


Round = dict[str, Process]


def run(rounds: int) -> str:
    """Measure and return the tables in markdown."""
    with scratch() as folder:
        pythons = {installed: _make_python(folder, installed=installed) for installed in (False, True)}
        _round(pythons, folder, random.Random(0))  # byte code, the disk's cache
        chance = random.Random(0)
        seen = [_round(pythons, folder, chance) for _ in range(rounds)]
    return f"{_starts(seen)}\n\n{_ends(seen)}"


def _make_python(folder: Path, *, installed: bool) -> Path:
    """Make an interpreter that imports what this one does, and runs no .pth file but ours, if *installed*."""
    home = folder / ("with" if installed else "without")
    venv.create(home, symlinks=True)
    (site,) = home.glob("lib/python*/site-packages")
    paths = [path for path in sys.path if path.endswith("-packages")]
    (site / "paths.pth").write_text("\n".join([*paths, str(ROOT)]))
    if installed:
        (site / PTH).write_bytes((ROOT / PTH).read_bytes())
    return home / "bin" / "python"


def _round(pythons: dict[bool, Path], folder: Path, chance: random.Random) -> Round:
    """Run every case once."""
    cases = [*STARTS, *ENDS]
    seen = {case.name: _time(case, pythons[case.installed], folder) for case in chance.sample(cases, len(cases))}
    return {case.name: seen[case.name] for case in cases}


def _time(case: Case, python: Path, folder: Path) -> Process:
    """Run *case* and return what it took; its drain is ended off the clock.

    Raises:
        RuntimeError: It failed.
    """
    env = environment(folder, **({"OTEL_DLTRACE": case.switch} if case.switch else {}))
    command = [str(python), "-c", case.program]
    with (folder / "complaints").open("w+") as complaints:
        begun = time.monotonic()
        process = subprocess.Popen(command, env=env, cwd=folder, stdout=subprocess.PIPE, stderr=complaints, text=True)
        assert process.stdout is not None
        with process.stdout as output:
            said = output.read()
        _, status, usage = os.wait4(process.pid, 0)
        ended = time.monotonic()
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            complaints.seek(0)
            raise RuntimeError(f"{case.name}: {' '.join(command)} failed:\n{complaints.read()[-4000:]}")
    if "step" in case.program:
        end_all(folder / "rings")
    exit_s = ended - float(said) if said else 0.0
    return Process(ended - begun, usage.ru_utime + usage.ru_stime, exit_s)


def _starts(seen: list[Round]) -> str:
    head = [
        f"start to end, {len(seen)} rounds",
        "ms (95 %)",
        "added (95 %)",
        "CPU, ms (95 %)",
        "added (95 %)",
        "of the SDK's (95 %)",
    ]
    rows = [
        [case.name, *_cells(case, seen, "whole"), *_cells(case, seen, "cpu"), _beside_the_sdk(case, seen)]
        for case in STARTS
    ]
    return table(head, rows)


def _ends(seen: list[Round]) -> str:
    head = [f"from the program's last line, {len(seen)} rounds", "ms (95 %)", "added (95 %)"]
    return table(head, [[case.name, *_cells(case, seen, "exit")] for case in ENDS])


def _cells(case: Case, seen: list[Round], what: str) -> list[str]:
    own = _milliseconds([getattr(round_[case.name], what) for round_ in seen], ".1f")
    return [own, _milliseconds(_added(case, seen, what), "+.1f") if case.base else ""]


def _added(case: Case, seen: list[Round], what: str) -> list[float]:
    """Return the seconds that *case* took more than its base in each round."""
    return [getattr(round_[case.name], what) - getattr(round_[case.base], what) for round_ in seen]


def _beside_the_sdk(case: Case, seen: list[Round]) -> str:
    """Return the CPU that *case* adds, divided by what importing the SDK adds to a bare process."""
    if case.base != BARE or case is SDK:
        return ""
    ratio = ratio_of_medians(_added(case, seen, "cpu"), _added(SDK, seen, "cpu"))
    return ranged(ratio, len(seen), ".2f", "x")


def _milliseconds(seconds: Sequence[float], form: str) -> str:
    return ranged(median_of([1e3 * one for one in seconds]), len(seconds), form)
