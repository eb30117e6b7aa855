"""Write a run as a file that other programs read.

    otel-dltrace export RUN --to chrome -o trace.json.gz
    otel-dltrace export RUN --to chrome --max-bytes 256M -o trace.json.gz
    otel-dltrace export RUN --to otlp -o spans.jsonl.gz --steps 100-120 --rank 0
    otel-dltrace export RUN --to byteps -o traces/
    otel-dltrace export RUN --to byteps-server

A file whose name ends in .gz is gzipped. A file appears when it is complete, or not at all. With --max-bytes a Chrome
trace goes to trace.json, trace.1.json, trace.2.json ..., each of which can be opened by itself. Files of the same name
are replaced, and others stay, also in a directory; what an earlier export left beside the new ones is reported. A pipe
or a device is written to directly, and -o - is standard output.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from otel_dltrace.cli.export_formats import FORMATS, Format
from otel_dltrace.cli.export_machine import machine_of
from otel_dltrace.cli.formats_help import formats_help
from otel_dltrace.cli.printing import show, tell
from otel_dltrace.cli.progress import progress, summing
from otel_dltrace.cli.selection import add_selection, keep_whole, naming_damage, steps_of, tell_damage
from otel_dltrace.cli.time_line import moves_of, on_one_line
from otel_dltrace.configure.outcome import short_path
from otel_dltrace.export.files import is_stream
from otel_dltrace.export.foreign.byteps_out import completions_of, has_stages
from otel_dltrace.export.rundir.stream import stream_in_turns
from otel_dltrace.model.errors import ConfigError, DltraceError
from otel_dltrace.model.numbers import whole_number
from otel_dltrace.model.plan import FINEST, Window, parse_completions

_BYTES_A_TURN = 1200
"""Of a file, for each span that all ranks have in turn: some four turns of each are in a file."""
_MOST_NAMED = 4


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run directory")
    parser.add_argument("--to", required=True, choices=sorted(FORMATS), help="the format, see below")
    parser.add_argument("-o", "--output", type=_path, metavar="FILE", help="where to write it")
    add_selection(parser)
    parser.add_argument(
        "--completions",
        metavar="A-B",
        help="for byteps: only these completions of each tensor, counted from 1, or `all`; by default, if --steps is "
        "not given either, those that BYTEPS_TRACE_START_STEP and _END_STEP asked for in the traced run",
    )
    parser.add_argument(
        "--max-bytes",
        metavar="N",
        default="0",
        help="for chrome: bytes of JSON (before gzip) after which the next file begins, optionally with K, M or G: "
        "trace.1.json after trace.json; each has all that a viewer needs; 0, the default: never",
    )
    about = {name: f"{form.about}\ndefault: -o {form.output}" for name, form in FORMATS.items()}
    parser.epilog = formats_help(about)


def _path(text: str) -> Path:
    return Path("/dev/stdout" if text == "-" else text)


def run(args: argparse.Namespace) -> int:
    """Write the file and say how large it is."""
    args.runs = _distinct(args.runs)
    with naming_damage(args.runs):
        _export(args, FORMATS[args.to])
    return 0


def _export(args: argparse.Namespace, form: Format) -> None:
    output = args.output or Path(form.output)
    keep_whole(args.runs, output)
    max_bytes = _max_bytes(args)
    beside = machine_of(args) if form.shows_metrics else {}
    if args.to == "byteps":
        beside["window"] = _completions(args)
    elif args.completions is not None:
        raise ConfigError(f"--completions is for --to byteps; --steps chooses what {args.to} has")
    spans, parts = form.read(args.runs, steps_of(args), args.rank), list[Path]()
    if form.tells:
        beside["wrote"] = parts.append
    if is_stream(output) and (max_bytes or form.places(spans, output) != [output]):
        raise ConfigError(f"{output} takes one file, and this makes several; give -o a name for them")
    if max_bytes:
        beside |= {"max_bytes": max_bytes, "wrote": parts.append}
        spans = stream_in_turns(args.runs, steps_of(args), args.rank, max(1, max_bytes // _BYTES_A_TURN))
    drawn = on_one_line(spans, moves_of(args.runs, steps_of(args))) if form.shows_metrics else spans
    with progress(f"writing {output}") as count:
        try:
            written = form.write(drawn, output, summing(count), **beside)
        except BrokenPipeError:
            raise  # as of any command that is piped to one which has ended
        except OSError as error:
            raise DltraceError(_cannot(output, parts, error)) from None
    places = parts or form.places(spans, output)
    _tell(output, places, f"{written:,} {form.unit}")
    tell_damage(args.runs)
    older = {path for path in form.older(output, places) if path.exists() and path not in places}
    _tell_older(sorted(older, key=lambda path: (len(path.name), path)))  # 10.json behind 2.json
    if args.to == "byteps" and not has_stages(spans):
        tell(f"no stage of a partition was recorded, only totals; {FINEST}")


def _distinct(runs: Sequence[Path]) -> list[Path]:
    """Return *runs*, each once: `dltrace-*` names one by a link, too."""
    found: dict[str, Path] = {}
    for one in runs:
        found.setdefault(os.path.realpath(one), one)
    return list(found.values())


def _tell(output: Path, places: Sequence[Path], what: str) -> None:
    if is_stream(output):  # it may be standard output, in which no word of ours belongs
        tell(f"{what} written")
        return
    size = sum(path.stat().st_size for place in places for path in _files(place))
    show(f"{_named(places)}: {what}, {size / 1e6:.1f} MB")


def _tell_older(paths: Sequence[Path]) -> None:
    if paths:
        verb = "is" if len(paths) == 1 else "are"
        tell(f"{_named(paths)} {verb} from an earlier export, and not part of this one")


_LEAST_BYTES = 16 << 10
"""Of a file; in less there is little beside the names of its lanes."""


def _max_bytes(args: argparse.Namespace) -> int:
    """Return how large a file may become, 0 for any size.

    Raises:
        ConfigError: It is no number, or the format has no further files.
    """
    number = whole_number(args.max_bytes)
    if number is None:
        raise ConfigError(f"--max-bytes {args.max_bytes!r} is not a whole number; write 268435456, or 256M")
    if 0 < number < _LEAST_BYTES:
        raise ConfigError(f"--max-bytes {args.max_bytes} is too small for a file; write at least 16K")
    if number and args.to != "chrome":
        raise ConfigError(f"--max-bytes is for --to chrome; {args.to} is written to one place, whatever its size")
    return number


def _cannot(output: Path, parts: Sequence[Path], error: OSError) -> str:
    """Return in a sentence that *output* could not be written, and which *parts* of it there are."""
    if isinstance(error, FileNotFoundError | NotADirectoryError) and not output.parent.is_dir():
        return f"{output} cannot be written: there is no folder {output.parent}; make it first"
    if isinstance(error, NotADirectoryError) and output.exists():
        return f"{output} cannot be written: it is not a folder, and this writes files below one; give -o a folder"
    there = f"; {_named(parts)} had been written, and can be opened" if parts else ""
    return f"{output} cannot be written: {error.strerror or error}{there}"


def _named(paths: Sequence[Path]) -> str:
    """Return *paths* in words; of many the first and the last."""
    names = [short_path(path) for path in paths]
    return ", ".join(names) if len(names) <= _MOST_NAMED else f"{names[0]} to {names[-1]} ({len(names)} files)"


def _completions(args: argparse.Namespace) -> Window:
    """Return which completions of each tensor are written.

    Raises:
        ConfigError: They are no range, or the runs were traced for different ones.
    """
    if args.completions is not None:
        try:
            return parse_completions(args.completions)
        except ConfigError:
            raise ConfigError(f"--completions {args.completions!r} is not a range; write A-B, from 1, or all") from None
    asked = {completions_of(run) for run in args.runs} if args.steps is None else {""}
    if len(asked) > 1:
        known = ", ".join(sorted(one or "all" for one in asked))
        raise ConfigError(f"the runs were traced for different completions ({known}); give --completions")
    return parse_completions(*asked)


def _files(path: Path) -> list[Path]:
    """Return the files at *path*, which is one or a directory."""
    return [one for one in path.rglob("*") if one.is_file()] if path.is_dir() else [path]
