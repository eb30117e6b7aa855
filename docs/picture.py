"""Take the README's picture: two steps of a run in Perfetto, by ``python docs/picture.py RUN [STEPS]``.

Needs what tests/support/chromium.py needs. The run is one of ``make demo``, whose rank 1 prepares its batches slowly.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HOME = Path(__file__).parents[1]
sys.path.insert(0, str(HOME))

from tests.support.chromium import viewers  # noqa: E402

SIZE = (1400, 670)
COMMANDS = ("dev.perfetto.ToggleLeftSidebar", "dev.perfetto.ExpandAllGroups")
DRAWN_S = 2.0
"""Perfetto does not tell when it has drawn."""


def main() -> None:
    """Write ``docs/step.png``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", metavar="RUN", help="the run directory")
    parser.add_argument("steps", metavar="STEPS", nargs="?", default="20-21", help="20-21 unless told")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trace, profile = Path(folder, "trace.json"), Path(folder, "profile")
        profile.mkdir()
        export = ["export", args.run, "--to", "chrome", "-o", str(trace), "--steps", args.steps]
        subprocess.run([sys.executable, "-m", "otel_dltrace", *export], check=True)
        with viewers(profile) as shown:
            shown.driver.set_window_size(*SIZE)
            shown.perfetto(trace)
            for command in COMMANDS:
                shown.driver.execute_script("app.commands.runCommand(arguments[0])", command)
            time.sleep(DRAWN_S)
            shown.driver.save_screenshot(str(HOME / "docs" / "step.png"))


if __name__ == "__main__":
    main()
