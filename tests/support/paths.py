"""Where the tests find the checkout, their files and the programs that they run."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data"
PROGRAMS = ROOT / "tests" / "programs"
