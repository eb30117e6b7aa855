"""Another Python process that answers a question: whatever it imports, and however it ends, is no harm to us."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from otel_dltrace.model.safe_path import safe_path

_BEGINS = "import sys\nsys.path[:] = filter(None, sys.path)\n"  # Python 3.10 knows no other way
_ANSWERED = "\nwith open(int(sys.argv[1]), 'w') as file: json.dump(answer, file)\n"


@dataclass(frozen=True, slots=True)
class Child:
    """What came back: *answer*, None where there is none for the reason *trouble*; what was said on the way."""

    answer: Any
    trouble: str
    said: str

    @classmethod
    def ask(cls, code: str, env: Mapping[str, str], timeout_s: float = 120.0) -> "Child":
        """Run *code*, which imports sys and json and leaves its answer in ``answer``, under *env* on top of ours."""
        # In memory: a container's root may be read-only, and then no folder is there for a file.
        with os.fdopen(os.memfd_create("otel_dltrace-doctor"), "r") as out:
            command = [sys.executable, "-c", _BEGINS + code + _ANSWERED, str(out.fileno())]
            path = safe_path(os.environ.get("PYTHONPATH", "").split(os.pathsep))
            try:
                done = subprocess.run(
                    command,
                    env={**os.environ, **path, **env},
                    pass_fds=[out.fileno()],
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    text=True,
                    errors="replace",
                    timeout=timeout_s,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                return cls(None, f"no answer after {timeout_s:.0f} s", "")
            except OSError as error:
                return cls(None, error.strerror or str(error), "")
            out.seek(0)
            with suppress(ValueError):  # it failed before it wrote, or as it did
                return cls(json.load(out), "", done.stderr)
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return cls(None, lines[-1].strip() if lines else f"exit code {done.returncode}", done.stderr)
