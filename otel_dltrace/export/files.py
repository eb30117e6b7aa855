"""Files that are whole or absent: written under another name, then renamed."""

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa


def write_whole(path: Path, data: bytes) -> None:
    """Write *path* so that a reader never sees half of it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(data)
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)  # a full file system is not filled by halves
        raise


def write_json(path: Path, value: Any) -> None:
    """Write *value* as JSON, whole or not at all."""
    write_whole(path, (json.dumps(value, indent=1) + "\n").encode())


def read_json(path: Path) -> Any:
    """Return the JSON in *path*; None where it is absent or damaged."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def read_stream(path: Path) -> pa.Table | None:
    """Return the record batches of an Arrow stream that its writer may not have closed; None if it has none."""
    batches = []
    try:
        with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as reader:
            for batch in reader:
                batches.append(batch)  # noqa: PERF402  -- what was read before a torn end stays
    except (pa.ArrowInvalid, OSError):
        pass
    return pa.Table.from_batches(batches) if batches else None
