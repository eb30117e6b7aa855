"""What a run can be written as: a row for each format (the command: `export`)."""

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import count, takewhile
from pathlib import Path
from typing import Any, NamedTuple

from otel_dltrace.analysis.select import select
from otel_dltrace.export.chrome.rotation import part_path
from otel_dltrace.export.chrome.writer import write_chrome
from otel_dltrace.export.foreign.byteps_out import (
    comms_in,
    profile_paths,
    write_byteps,
    write_byteps_server,
)
from otel_dltrace.export.foreign.horovod_out import timelines_in, write_horovod
from otel_dltrace.export.foreign.van_out import vans_in, write_van_profiles
from otel_dltrace.export.otlp.json_lines import write_otlp_json
from otel_dltrace.export.outgoing.as_sent import as_sent
from otel_dltrace.export.rundir.stream import Pieces, pieces_of, stream_spans
from otel_dltrace.model.plan import Window
from otel_dltrace.model.spans import Process


def _as_told(_spans: Any, path: Path) -> Sequence[Path]:
    return [path]


def _none(_output: Path, _places: Sequence[Path]) -> Iterable[Path]:
    return ()


class Format(NamedTuple):
    """A format: what it is for, its output unless told, how runs are read for it (some steps and ranks), and written.

    What *shows_metrics* is written with the arguments ``metrics`` and ``notes`` too, what *tells* which files it has
    written with ``wrote``; else *places* says it, given what was read and the output. *older* says what an export to
    the same output may have left beside the files that this one has written.
    """

    about: str
    output: str
    read: Callable[[Sequence[Path], Window | None, Collection[int] | None], Any]
    write: Callable[..., int]
    unit: str
    shows_metrics: bool = False
    tells: bool = False
    places: Callable[[Any, Path], Sequence[Path]] = _as_told
    older: Callable[[Path, Sequence[Path]], Iterable[Path]] = _none


def _by_process(runs: Sequence[Path], steps: Window | None, ranks: Collection[int] | None) -> dict[Process, Pieces]:
    found = {pieces.steps.process: pieces for pieces in pieces_of(runs, steps)}
    chosen = select([pieces.steps for pieces in found.values()], steps, ranks)
    return {batch.process: found[batch.process] for batch in chosen}


FORMATS = {
    "chrome": Format(
        "Chrome trace JSON, for https://ui.perfetto.dev and chrome://tracing; metrics as counters",
        "trace.json.gz",
        stream_spans,
        write_chrome,
        "events",
        shows_metrics=True,
        older=lambda output, places: takewhile(Path.exists, (part_path(output, n) for n in count(len(places)))),
    ),
    "otlp": Format(
        "OTLP JSON lines, as the OpenTelemetry Collector's file exporter writes them; its\n"
        "otlp_json_file receiver sends them on to any back end. Every step in full, whatever\n"
        "OTEL_DLTRACE_STEPS says, under the ids that its spans have over OTLP",
        "spans.jsonl.gz",
        as_sent,
        write_otlp_json,
        "spans",
    ),
    "byteps": Format(
        "BytePS's worker timelines: <local rank>/comm.json below the directory FILE. BytePS counts\n"
        "how often each tensor was completed, from 1, and so does --completions; --steps selects\n"
        "by our steps, from 0",
        "traces",
        _by_process,
        write_byteps,
        "events",
        tells=True,
        older=lambda output, _: comms_in(output),
    ),
    "byteps-server": Format(
        "BytePS's server profile, as complete JSON; with several servers each in a folder beside FILE:\n"
        "<server>/server_profile.json",
        "server_profile.json",
        _by_process,
        write_byteps_server,
        "pushes and pulls",
        places=profile_paths,
    ),
    "van": Format(
        "ps-lite's van profile, of a run that was imported from one: what a node received, a line for\n"
        "each message; with several nodes <role>-<rank>/pslite_van_profile below the directory FILE",
        "pslite_van_profile",
        _by_process,
        write_van_profiles,
        "messages",
        tells=True,
        older=lambda output, _: vans_in(output),
    ),
    "horovod": Format(
        "Horovod's timeline: negotiation, ready ticks and activities of each tensor, as complete\n"
        "JSON with names escaped; with several timelines 0.json, 1.json ... below the directory\n"
        "FILE, in the order in which they came",
        "timeline.json",
        _by_process,
        write_horovod,
        "events",
        tells=True,
        older=lambda output, _: timelines_in(output),
    ),
}
