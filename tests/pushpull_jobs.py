"""Runs push_pull jobs as real processes, and reads what each of them said."""

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

SAY = """
import json, os, signal, sys
OUT, ROLE = os.environ["OUT"], os.environ["DMLC_ROLE"]
def say(**fields):
    who = os.environ["DMLC_SERVER_ID"] if ROLE == "server" else f"{layout.rank}"
    with open(os.path.join(OUT, f"{ROLE}{who}.jsonl"), "a") as file:
        file.write(json.dumps(fields) + "\\n")
from otel_dltrace.pushpull import trace
from otel_dltrace.pushpull.options import read_env
layout, options = read_env(os.environ)
"""

WORKER = """
import numpy as np
from otel_dltrace.pushpull.compression import Fp16, TopK
from otel_dltrace.pushpull.engine import Engine
from otel_dltrace.pushpull.errors import PushPullError
engine = Engine(layout, options)
def push_pull(name, values, average=False, **how):
    operation = engine.push_pull(engine.declare(name, **how), values, average=average)
    engine.wait(operation)
    return values
try:
    engine.start()
    main()
    engine.stop()
except PushPullError as error:
    say(error=type(error).__name__, message=str(error))
    sys.exit(3)
"""

SERVER = """
from otel_dltrace.pushpull.serving import serve
setup()
serve(layout, options)
"""

LAUNCHER = """
import json, os, sys
from otel_dltrace.pushpull import launch
program, server, counts, grace_s = json.loads(sys.stdin.read())
launch.SERVE = (sys.executable, "-c", server)
sys.exit(launch.launch(launch.Plan((sys.executable, "-c", program), *counts, grace_s=grace_s), os.environ))
"""


@dataclass(frozen=True)
class Done:
    """How a job ended, and what its processes said, by role and rank."""

    code: int
    stderr: str
    said: dict[str, list[dict[str, Any]]]

    def each(self, field: str) -> dict[str, Any]:
        """Return what each process said last about *field*."""
        return {who: line[field] for who, lines in sorted(self.said.items()) for line in lines if field in line}


def run_job(
    folder: Path,
    main: str,
    counts: tuple[int, int, int],
    env: Mapping[str, str] | None = None,
    server: str = "",
    torch: bool = False,
    grace_s: float = 60.0,
) -> Done:
    """Run *main* in each of workers x local ranks beside servers, as *counts* has it.

    Args:
        folder: Where the processes say things.
        main: The body of each training process: `engine`, `layout`, `push_pull` and `say` are there; with *torch*
            the program as a whole.
        counts: Workers, local ranks, servers.
        env: More variables.
        server: What each server does before it serves.
        torch: Whether *main* uses torch, and makes its own start.
        grace_s: How long the others may take to end by themselves once one has failed.
    """
    text = textwrap.dedent(main)
    program = SAY + (text if torch else _function("main", text) + WORKER)
    served = SAY + _function("setup", textwrap.dedent(server)) + SERVER
    variables = {**os.environ, "OUT": str(folder), "PYTHONPATH": str(ROOT), "PUSHPULL_TIMEOUT": "120", **(env or {})}
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHER],
        env=variables,
        input=json.dumps([program, served, counts, grace_s]),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    files = folder.glob("*.jsonl")
    said = {file.stem: [json.loads(line) for line in file.read_text().splitlines()] for file in files}
    return Done(done.returncode, done.stderr, said)


def _function(name: str, body: str) -> str:
    return f"def {name}():\n" + textwrap.indent(body or "pass", "    ") + "\n"
