"""BytePS's files in tests/data/byteps: real ones with truth beside them, and small ones by format and defect."""

import gzip
import json
from pathlib import Path
from typing import Any

from tests.support.paths import DATA

FILES = DATA / "byteps"
REAL = (
    "byteps_w2_s1/worker0/0",
    "byteps_w2_s1/worker1/0",
    "byteps_w1_l2_nodist/worker0/0",
    "byteps_w1_l2_nodist/worker0/1",
)
SMALL = tuple(sorted(path.name for path in FILES.glob("bps_*")))
COMM = tuple(name for name in SMALL if "comm" in name)
SERVER = tuple(name for name in SMALL if "profile" in name)
START_STEP = 5  # of the real runs


def real(name: str) -> bytes:
    """Return a ``comm.json`` that BytePS 0.2.5 wrote."""
    return gzip.decompress((FILES / name / "comm.json.gz").read_bytes())


def unpack(run: str, folder: Path) -> Path:
    """Lay out the files of a real *run* below *folder* as BytePS does; return where."""
    for name in REAL:
        if name.startswith(run):
            path = folder / name / "comm.json"
            path.parent.mkdir(parents=True)
            path.write_bytes(real(name))
    return folder / run


def truth(run: str, rank: int) -> dict[str, Any]:
    """Return what was recorded beside a real run, without looking at its timeline."""
    found: dict[str, Any] = json.loads((FILES / run / f"truth.rank{rank}.json").read_text())
    return found
