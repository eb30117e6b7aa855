"""What cannot be read in a run directory, and is left out of all that is said of the run."""

import os
import re
from pathlib import Path

import pyarrow as pa

from otel_dltrace.export.files import read_json, read_object
from otel_dltrace.export.metrics.segments import METRICS, SCHEMA
from otel_dltrace.export.rundir import columns
from otel_dltrace.export.rundir.arrow_files import UNREADABLE, open_parquet, read_through
from otel_dltrace.export.rundir.drain_json import entries_of
from otel_dltrace.export.rundir.reader import copies_in, host_folders, read_named, read_processes, writers_in
from otel_dltrace.export.rundir.span_files import NAMES, OPEN, gone_files, segment_number, span_files

_OURS = re.compile(r"(?:spans|steps)-[0-9.-]+\.(?:arrows|parquet)")
_CLOSED = "cannot be read: permission denied"
_FOREIGN = "is not a file of a run"


def damage_of(run: Path) -> list[str]:
    """Return a sentence for each file of *run* that cannot be read.

    Numbers are checked in Parquet alone, which has checksums.

    Raises:
        RunNotFoundError: There is no run directory at *run*.
    """
    found = [found for folder in host_folders(run) for found in _in_folder(folder)]
    copies = [(copy, f"is a copy of {folder.name}, and is not read again") for copy, folder in copies_in(run).items()]
    return [f"{path.relative_to(run)} {what}" for path, what in [*_in_run(run / "run.json"), *found, *copies]]


def but_for(run: Path) -> str:
    """Return the end of a sentence on what is not in *run*: which files could have held it; "" where all are whole."""
    damage = "; ".join(damage_of(run))
    return f", without what cannot be read: {damage}" if damage else ""


def nothing_in(run: Path) -> str:
    """Return in one sentence why no span of *run* is known."""
    damage = "; ".join(damage_of(run))
    return f"{run}: no span can be read: {damage}" if damage else f"{run}: there is no span in it yet"


def _in_run(info: Path) -> list[tuple[Path, str]]:
    schema = read_object(info).get("schema")
    is_version = isinstance(schema, int) and not isinstance(schema, bool) and schema > 0
    is_fine = is_version or not info.exists()
    return [] if is_fine else [(info, f"{_harm(info)}: which version wrote the run is not known")]


def _harm(path: Path) -> str:
    """Return what is wrong with a JSON file that tells nothing."""
    return "is damaged" if os.access(path, os.R_OK, effective_ids=True) else _CLOSED


def _in_folder(folder: Path) -> list[tuple[Path, str]]:
    summary, names = folder / "drain.json", folder / NAMES
    gone = _gone(folder, read_object(summary).get("files"))
    spans = span_files(folder)
    found = [(summary, what)] if (what := _unnamed(folder, summary, bool(spans))) else []
    found += [(folder / name, "is missing: it was there at the run's end") for name in gone]
    is_over = bool(read_object(summary).get("ended"))
    metrics = sorted(folder.glob(METRICS), key=segment_number)
    troubles = (
        (path, _trouble(path, is_whole=is_over or path != some[-1])) for some in (spans, metrics) for path in some
    )
    standing = ((path, _trouble(path, is_whole=True)) for path in sorted(folder.glob(OPEN)))
    # A drain may have compacted it, or what was open has ended; a link to nothing stays.
    found += [(path, what) for path, what in [*troubles, *standing] if what and os.path.lexists(path)]
    if spans and (what := _trouble(names, is_whole=is_over)):
        found.append((names, f"{what}: some spans have no names"))
    return found


def _gone(folder: Path, left: object) -> list[str]:
    """Return which files are gone that a drain has *left* in *folder* at its end; what it says may be damaged."""
    names = left if isinstance(left, list) else []
    return gone_files(folder, [name for name in names if isinstance(name, str) and _OURS.fullmatch(name)])


def _unnamed(folder: Path, summary: Path, has_spans: bool) -> str:
    """Return what is wrong with the *summary* in *folder*, and what is known of those whom it should name."""
    named, writers = read_named(folder), writers_in(folder)
    known = read_json(summary)
    if not summary.exists():
        what = "is missing" if has_spans else ""
    elif not isinstance(known, dict) or len(named) < len(entries_of(known)):
        what = _harm(summary)
    else:
        unnamed = len(writers - named.keys())
        what = f"does not name {unnamed} of {len(writers)} processes" if unnamed else ""
    in_rows = bool(writers) and writers <= read_processes(folder).keys()
    told = "rank and role are those in the columns" if in_rows else "whose spans these are is not known"
    return f"{what}: {told}" if what else ""


def _trouble(path: Path, *, is_whole: bool) -> str:
    """Return what is wrong with the Arrow or Parquet file *path*, "" for nothing; one being written may be torn."""
    try:
        return _in_parquet(path) if path.suffix == ".parquet" else _in_stream(path, is_whole=is_whole)
    except FileNotFoundError:
        return "is missing"
    except PermissionError:
        return _CLOSED
    except UNREADABLE:
        return "is damaged"


def _in_parquet(path: Path) -> str:
    with open_parquet(path) as file:
        if not columns.are_spans(file.schema_arrow):
            return _FOREIGN
        # Reading checks the pages. What is between and behind them has no checksum, but says how many rows there are.
        read = 0
        for batch in file.iter_batches(columns=columns.SPANS.names):
            if columns.has_gaps(batch):
                return _FOREIGN
            read += batch.num_rows
        told, groups = file.metadata.num_rows, range(file.metadata.num_row_groups)
        # No more of a row group: where its columns are described a flipped bit has pyarrow end the process.
        in_groups = sum(file.metadata.row_group(i).num_rows for i in groups)
        return "" if read == told == in_groups else "is damaged"


def _in_stream(path: Path, *, is_whole: bool) -> str:
    if not is_whole and not path.stat().st_size:
        return ""
    stream = read_through(path)
    if stream.is_whole:
        return "" if stream.schema.equals(_schema_of(path)) else _FOREIGN
    if not stream.batches:
        return "is damaged"
    return "is cut off" if is_whole else ""


def _schema_of(path: Path) -> pa.Schema:
    """Return the columns that an Arrow stream of *path*'s name has."""
    if path.name == NAMES:
        return columns.DESCRIPTORS
    return SCHEMA if path.match(METRICS) else columns.SPANS
