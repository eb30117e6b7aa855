"""Another Python process that answers a question: whatever it imports, and however it ends, is no harm to us."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ANSWERED = "\nwith open(sys.argv[1], 'w') as file: json.dump(answer, file)\n"


@dataclass(frozen=True, slots=True)
class Child:
    """What came back: *answer*, None where there is none for the reason *trouble*; what was said on the way."""

    answer: Any
    trouble: str
    said: str

    @classmethod
    def ask(cls, code: str, env: Mapping[str, str], timeout_s: float = 120.0) -> "Child":
        """Run *code*, which imports sys and json and leaves its answer in ``answer``, under *env* on top of ours."""
        with tempfile.TemporaryDirectory(prefix="otel_dltrace-doctor-") as folder:
            out = Path(folder) / "answer.json"
            command = [sys.executable, "-c", code + _ANSWERED, str(out)]
            try:
                done = subprocess.run(
                    command,
                    env={**os.environ, **env},
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
            with suppress(FileNotFoundError, ValueError):  # it failed before it wrote, or as it did
                return cls(json.loads(out.read_text()), "", done.stderr)
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return cls(None, lines[-1].strip() if lines else f"exit code {done.returncode}", done.stderr)
