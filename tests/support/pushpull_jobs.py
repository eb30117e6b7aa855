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

from tests.support.paths import ROOT
from tests.support.warm import warm

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
program, server, counts, grace_s = json.loads(os.environ["JOB"])
launch.SERVE = (sys.executable, "-c", server)
plan = launch.Plan((sys.executable, "-c", program), *counts, grace_s=grace_s)
"""
LAUNCH = """
sys.exit(launch.launch(plan, os.environ))
"""
FORK = """
class Worker:
    # A process as the launcher knows it: it is forked already, and begins once it has its variables.
    def __init__(self):
        reads, self.writes = os.pipe()
        ends_with_us = launch._ends_with_us()
        self.pid, self.returncode = os.fork(), None
        if not self.pid:
            os.setsid()
            ends_with_us()
            self.variables = json.loads(open(reads).readline())

    def begin(self, variables):
        with open(self.writes, "w") as pipe:
            print(json.dumps(variables), file=pipe)
        return self

    def poll(self, how=os.WNOHANG):
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, how)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self):
        return self.poll(0)

waiting, spawn = [], launch._spawn
while len(waiting) < counts[0] * counts[1]:
    waiting.append(worker := Worker())
    if not worker.pid:
        break
else:
    launch._spawn = lambda command, env: waiting.pop(0).begin(env) if command is plan.program else spawn(command, env)
    sys.exit(launch.launch(plan, os.environ))
os.environ.clear()
os.environ.update(worker.variables)
exec(program)
"""
"""Has workers forked from a launcher that has imported torch: quicker by seconds than to start each."""
SMALL = {"BYTEPS_PARTITION_BYTES": "4096", "BYTEPS_MIN_COMPRESS_BYTES": "0"}
ALONE = {"BYTEPS_FORCE_DISTRIBUTED": "1"}
SERVED = """
import time
from otel_dltrace.pushpull.store import Store
pushed, push, pull = {}, Store.push, Store.pull
def pushing(store, request, values):
    pushed[request.key] = time.monotonic_ns()
    return push(store, request, values)
def pulling(store, request):
    open(os.path.join(OUT, f"pulling-{request.key}"), "w").close()
    return pull(store, request)
Store.push, Store.pull = pushing, pulling
class Requests:
    def request_answered(self, kind, request, metadata, start, waited, end, error):
        say(
            kind=kind, key=request.key, name=request.name, rank=request.rank, worker=request.worker,
            nbytes=request.nbytes, waited=start < pushed[request.key] <= start + waited <= end,
            traceparent=metadata["traceparent"], secret="authorization" in metadata, error=error and repr(error),
        )
trace.observe(Requests())
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
    is_whole: bool = False,
    torch: bool = False,
    grace_s: float = 60.0,
) -> Done:
    """Run *main* in each of workers x local ranks beside servers, as *counts* has it.

    Args:
        folder: Where the processes say things.
        main: The body of each training process: `engine`, `layout`, `push_pull` and `say` are there.
        counts: Workers, local ranks, servers.
        env: More variables.
        server: What each server does before it serves.
        is_whole: Whether *main* is the program as a whole, and makes its own start.
        torch: Whether it is, and uses torch, which is imported once for all.
        grace_s: How long the others may take to end by themselves once one has failed.
    """
    text = textwrap.dedent(main)
    program = SAY + (text if is_whole or torch else _function("main", text) + WORKER)
    served = SAY + _function("setup", textwrap.dedent(server)) + SERVER
    variables = {**os.environ, "OUT": str(folder), "PYTHONPATH": str(ROOT), "PUSHPULL_TIMEOUT": "120", **(env or {})}
    variables["JOB"] = json.dumps([program, served, counts, grace_s])
    if torch:
        launcher = folder / "launcher.py"
        launcher.write_text(LAUNCHER + FORK)
        warmed = warm("import torch, torch._dynamo\n").run(launcher, [variables])
        code, stderr = warmed.codes[0], warmed.err
    else:
        command = [sys.executable, "-c", LAUNCHER + LAUNCH]
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=240, check=False)
        code, stderr = done.returncode, done.stderr
    files = folder.glob("*.jsonl")
    said = {file.stem: [json.loads(line) for line in file.read_text().splitlines()] for file in files}
    return Done(code, stderr, said)


def _function(name: str, body: str) -> str:
    return f"def {name}():\n" + textwrap.indent(body or "pass", "    ") + "\n"
