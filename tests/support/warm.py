"""Programs that start with what takes long already done, such as the import of torch: processes forked after it.

Each is a process of its own, as one that is started; only what it begins with is not run again.
"""

import atexit
import functools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.paths import PROGRAMS, ROOT
from tests.support.processes import LONG_S

_PROGRAM = PROGRAMS / "warm.py"


@dataclass(frozen=True)
class Done:
    """The exit codes of some processes, and what they said."""

    codes: list[int]
    out: str
    err: str


class Warm:
    """A Python that has run *begin* under *env*, and waits for what is to be forked from it."""

    def __init__(self, begin: str, env: Mapping[str, str]) -> None:
        command = [sys.executable, str(_PROGRAM), begin]
        pipe = subprocess.PIPE
        # A session of its own, to be ended with all that was forked from it.
        self._process = subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, text=True, start_new_session=True)
        atexit.register(self.end)

    def run(self, program: Path, environments: Sequence[Mapping[str, str]], timeout: float = LONG_S) -> Done:
        """Run *program* in one process for each of *environments*."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        with tempfile.NamedTemporaryFile("r+") as out, tempfile.NamedTemporaryFile("r+") as err:
            asked = {"program": str(program), "environments": environments, "out": out.name, "err": err.name}
            stdin.write(json.dumps(asked) + "\n")
            stdin.flush()
            if not select.select([stdout], [], [], timeout)[0]:
                self.end()
                raise AssertionError(f"no end after {timeout} s\n{out.read()}\n{err.read()}")
            return Done(json.loads(stdout.readline()), out.read(), err.read())

    def end(self) -> None:
        """End it, and whatever was forked from it."""
        with self._process:
            os.killpg(self._process.pid, signal.SIGKILL)
        warm.cache_clear()
        atexit.unregister(self.end)


@functools.cache
def warm(begin: str) -> Warm:
    """Return the Python of this test process that has run *begin*, which is started where there is none yet."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    return Warm(begin, env)
