"""What cannot be read in a run directory, and is left out of all that is said of the run."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from otel_dltrace.export.files import read_json
from otel_dltrace.export.run_reader import host_folders, span_files


def damage_of(run: Path) -> list[str]:
    """Return a sentence for each damaged file of *run*; the contents of columns are not looked at.

    Raises:
        RunNotFoundError: There is no run directory at *run*.
    """
    return [f"{path.relative_to(run)} {what}" for folder in host_folders(run) for path, what in _in_folder(folder)]


def nothing_in(run: Path) -> str:
    """Return in one sentence why no span of *run* is known."""
    damage = "; ".join(damage_of(run))
    return f"{run}: no span can be read: {damage}" if damage else f"{run}: no span is in there yet"


def _in_folder(folder: Path) -> list[tuple[Path, str]]:
    summary, names, spans = folder / "drain.json", folder / "descriptors.arrows", span_files(folder)
    known = read_json(summary)
    found = []
    if summary.exists() and not isinstance(known, dict):
        found.append((summary, "is damaged: whose spans these are is not known"))
    is_over = isinstance(known, dict) and bool(known.get("ended"))
    troubles = ((path, _trouble(path, is_whole=is_over or path != spans[-1])) for path in spans)
    found += [(path, what) for path, what in troubles if what]
    if spans and (what := _trouble(names, is_whole=is_over)):
        found.append((names, f"{what}: some spans have no names"))
    return found


def _trouble(path: Path, *, is_whole: bool) -> str:
    """Return what is wrong with the Arrow or Parquet file *path*, "" for nothing; one being written may be torn."""
    batches = 0
    try:
        if path.suffix == ".parquet":
            pq.read_metadata(path)
            return ""
        if not is_whole and not path.stat().st_size:
            return ""
        with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as reader:
            for _ in reader:
                batches += 1
    except FileNotFoundError:
        return "is missing"
    except (pa.ArrowInvalid, OSError):
        if not batches:
            return "is damaged"
        return "is cut off" if is_whole else ""
    return ""
