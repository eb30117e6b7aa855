"""What several tests need: programs in processes of their own, and what they left behind."""

import ast
import contextlib
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import psutil

from otel_dltrace.export.drain import Drain
from otel_dltrace.export.otlp.merge import Merger
from otel_dltrace.export.otlp.requests import LIMIT, EncodedRequest, Part, encode_together
from otel_dltrace.export.plain_spans import plain_spans
from otel_dltrace.export.rundir.reader import read_run
from otel_dltrace.model.arrays import Column
from otel_dltrace.model.attributes import Value
from otel_dltrace.model.spans import SpanBatch, stack_rows

QUIET = ("OTEL_", "DMLC_", "PMI", "OMPI_", "SLURM_", "TORCHELASTIC_", "RANK", "WORLD_SIZE", "LOCAL_")
LONG_S = 240.0
"""How long a test waits for what comes in seconds on an idle machine: less than pytest gives the test."""


class Place:
    """A working folder, a ring folder on tmpfs, and programs run there."""

    def __init__(self, folder: Path, rings: Path) -> None:
        self.folder, self.rings = folder, rings
        self.children: list[subprocess.Popen[str]] = []

    def env(self, **more: str) -> dict[str, str]:
        """Return an environment without anybody's tracing but ours."""
        env = {k: v for k, v in os.environ.items() if not k.startswith(QUIET)}
        return {**env, "OTEL_DLTRACE_RING_DIR": str(self.rings), "PYTHONUNBUFFERED": "1", **more}

    def start(self, code: str, *args: str, **env: str) -> "subprocess.Popen[str]":
        """Start a Python program given as text."""
        return self.popen([sys.executable, str(self.write(code)), *args], **env)

    def write(self, code: str, name: str = "program.py") -> Path:
        """Write a program's text to a file, all at once: who was started with it before may be about to read it."""
        path = self.folder / name
        new = path.with_name(f"{path.name}.new")
        new.write_text(textwrap.dedent(code))
        return new.replace(path)

    def popen(self, command: list[str], **env: str) -> "subprocess.Popen[str]":
        """Start a command here."""
        child = subprocess.Popen(
            command,
            cwd=self.folder,
            env=self.env(**env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.children.append(child)
        return child

    def run(self, code: str, *args: str, timeout: float = LONG_S, **env: str) -> "subprocess.CompletedProcess[str]":
        """Run a Python program given as text to its end."""
        return self.finish(self.start(code, *args, **env), timeout)

    def command(self, *args: str, timeout: float = LONG_S, **env: str) -> "subprocess.CompletedProcess[str]":
        """Run ``otel-dltrace`` with *args*."""
        return self.finish(self.popen([sys.executable, "-m", "otel_dltrace", *args], **env), timeout)

    def torchrun(
        self, code: str, *args: str, ranks: int = 2, timeout: float = LONG_S, **env: str
    ) -> "subprocess.CompletedProcess[str]":
        """Run a program on *ranks* ranks."""
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command = [*launcher, str(self.write(code)), *args]
        return self.finish(self.popen(command, OMP_NUM_THREADS="1", **env), timeout)

    @staticmethod
    def finish(process: "subprocess.Popen[str]", timeout: float = LONG_S) -> "subprocess.CompletedProcess[str]":
        """Wait for *process* and return what it said."""
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            raise AssertionError(f"no end after {timeout} s\n{out}\n{err}") from None
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def processes(self) -> list[psutil.Process]:
        """Return every process that traces into our ring folder, or drains it, whoever its parent is by now."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("OTEL_DLTRACE_RING_DIR") == str(self.rings):
                    found.append(process)
        return found

    def drains(self, *, starting: bool = False) -> list[psutil.Process]:
        """Return the drains that serve our ring folder; with *starting* also who is about to be one."""
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                command = process.cmdline()
                if "drain" in command and (starting or "-c" not in command):  # who starts one has its whole command
                    found.append(process)
        return found

    def wait_for_rings(self, timeout: float = LONG_S) -> None:
        """Wait until every ring has been read and removed."""
        deadline = time.monotonic() + timeout
        while list(self.rings.glob("*.ring")):
            assert time.monotonic() < deadline, [path.read_text() for path in self.rings.glob("*.log")]
            time.sleep(0.02)

    def wait_for_drains(self, timeout: float = LONG_S) -> None:
        """Wait until the drains have ended by themselves: what they deliver is delivered, or on disk."""
        deadline = time.monotonic() + timeout
        while drains := self.drains(starting=True):
            assert time.monotonic() < deadline, drains
            time.sleep(0.05)

    def deliver(self, **env: str) -> None:
        """Send what a drain left on disk: `run` gives it a second and a half at its end, little on a busy machine."""
        for run in self.runs():
            if list(run.glob("hosts/*/spill/*.otlp")):
                done = self.command("recover", str(run), **env)
                assert done.returncode == 0, done.stderr

    def runs(self) -> list[Path]:
        """Return the run directories here, oldest first."""
        return sorted(self.folder.glob("dltrace-*"), key=lambda path: path.stat().st_mtime)

    def spans(self) -> list[SpanBatch]:
        """Return all spans of all runs here, one batch per process; a run that is just being made has none yet."""
        return [batch for run in self.runs() if (run / "hosts").is_dir() for batch in read_run(run)]


def waiting(code: str) -> str:
    """Return *code* as a program that waits for its drain until it is done: a busy machine may take more than 2 s."""
    wait = f"import otel_dltrace.configure.recording as _recording\n_recording.EXIT_S = {LONG_S}\n"
    return wait + textwrap.dedent(code)


@contextlib.contextmanager
def a_place(folder: Path) -> Iterator[Place]:
    """Make a place; end its drains and remove its rings afterwards."""
    rings = Path(tempfile.mkdtemp(prefix="dltrace-test-", dir="/dev/shm"))
    place = Place(folder, rings)
    try:
        yield place
    finally:
        for child in place.children:
            child.kill()
        for process in place.processes():  # ranks outlive a killed torchrun
            with contextlib.suppress(psutil.Error):
                process.kill()
        for child in place.children:
            child.communicate()  # whoever had its pipes as well is gone by now
        shutil.rmtree(rings, ignore_errors=True)


def abandon(drain: Drain) -> None:
    """Leave the rings that *drain*, of this process, reads as if its process had been killed."""
    for follower in drain.followers.values():
        follower.source.close()


def top_level(source: str) -> dict[str, list[str] | None]:
    """Return the functions and assigned names at the top of a module, with the parameters of the former."""
    found: dict[str, list[str] | None] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = [argument.arg for argument in node.args.args]
        elif isinstance(node, ast.Assign):
            found |= {target.id: None for target in node.targets if isinstance(target, ast.Name)}
    return found


def attributes_of(batch: SpanBatch) -> list[dict[str, Value]]:
    """Return the attributes of each row of *batch*, as they are sent."""
    spans = plain_spans(batch, np.zeros((len(batch), 16), np.uint8))
    return [{**span.constant.attributes, **span.own} for span in spans]


def requests_of(
    batch: SpanBatch,
    trace_ids: Column,
    resource: Mapping[str, Value],
    left_out: Column | None = None,
    limit: int = LIMIT,
) -> list[EncodedRequest]:
    """Return the requests that a drain sends of *batch* alone."""
    return encode_together([Part(batch, trace_ids, resource, left_out)], stack_rows([batch.rows]), Merger(), limit)


@contextlib.contextmanager
def room_for(size: int) -> Iterator[None]:
    """Let no file grow beyond *size* bytes: the kernel refuses it as it does on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def but_for_rings(stderr: str) -> str:
    """Return what a program has said, but for where its spans wait that a test leaves to no drain."""
    return "".join(line for line in stderr.splitlines(keepends=True) if "which no drain serves" not in line)


@contextlib.contextmanager
def nobody() -> Iterator[None]:
    """Be a user whom permissions bind, as root is not."""
    was = os.geteuid()
    os.seteuid(65534 if was == 0 else was)
    try:
        yield
    finally:
        os.seteuid(was)
