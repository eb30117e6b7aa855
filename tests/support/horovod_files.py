"""Horovod's timelines in tests/data/horovod: real ones with truth beside them, and small ones by version and defect."""

import gzip
import json
from pathlib import Path
from typing import Any

from tests.support.paths import DATA

FILES = DATA / "horovod"
REAL = (
    "horovod_mpi_np2",
    "horovod_mpi_np2_straggler_nocache",
    "horovod_gloo_np2_ops",
    "horovod_mpi_np4_psets",
    "horovod_mpi_np2_sigkill",
)
SMALL = tuple(sorted(path.stem for path in FILES.glob("hvd_*")))
ODD = (
    "hvd_driver_HEAD_killed_after_first_event",
    "hvd_driver_HEAD_no_events_0bytes",
    "hvd_hand_le_v0.20.0_only_bracket",
    "hvd_hand_le_v0.20.0_unclosed",
    "hvd_real_HEAD_procset02_badname_INVALIDJSON",
)
WHOLE = (*REAL, *(name for name in SMALL if name not in ODD))
"""What Horovod wrote to its end, and is JSON."""


def timeline(name: str) -> bytes:
    """Return a timeline."""
    packed = FILES / f"{name}.json.gz"
    return gzip.decompress(packed.read_bytes()) if packed.exists() else (FILES / f"{name}.json").read_bytes()


def unpack(name: str, folder: Path) -> Path:
    """Write a timeline to a file in *folder*; return where."""
    path = folder / "timeline.json"
    path.write_bytes(timeline(name))
    return path


def truth(name: str, rank: int) -> dict[str, Any]:
    """Return what was recorded beside a real run, without looking at its timeline."""
    found: dict[str, Any] = json.loads((FILES / f"{name}.truth.rank{rank}.json").read_text())
    return found
