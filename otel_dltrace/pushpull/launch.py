"""Start the processes of a job on this host, and end them together."""

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from otel_dltrace.model.errors import ConfigError
from otel_dltrace.model.safe_path import safe_path
from otel_dltrace.pushpull.folder import job_folder, remove_orphans
from otel_dltrace.pushpull.layout import Layout
from otel_dltrace.pushpull.options import BEREFT, is_forced

SERVE = (sys.executable, "-m", "otel_dltrace", "pushpull", "serve")
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_POLL_S = 0.02
_UP_S = 2.0
"""How long a server that nobody asks has to come up: from then on whoever traces the job knows of it."""
_LEFT_S = 1.0
"""What at least is left, once the children have ended, to what they have started: it may have waited for them."""
_PR_SET_PDEATHSIG = 1
"""Linux's prctl.h: the signal that a process gets when the thread that started it ends."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is started."""

    program: Sequence[str]
    workers: int = 1
    local_ranks: int = 1
    servers: int = 1
    root: str = ""
    """Where server 0 listens; an own port of the loopback if empty."""
    only_worker: int | None = None
    """Start this worker alone; the rest of the job is on other hosts, and *root* says where."""
    grace_s: float = 5.0
    """How long the others have, once one has failed, to say why and end by themselves."""


@dataclass(slots=True)
class _Child:
    name: str
    process: "subprocess.Popen[bytes]"
    server: bool = False
    bereft: Path | None = None
    """The file that is there if it fails since another one did."""
    has_group: bool = True
    """Whether it, or what it started and has outlived it, was there when it was last polled."""

    def poll(self) -> int | None:
        """Return its exit code, None while it runs."""
        code = self.process.poll()
        # Polled all the time, and not looked for again once gone: its number may be another's then.
        if code is not None and self.has_group:
            self.has_group = _has_group(self.process.pid)
        return code

    @property
    def blame(self) -> tuple[bool, bool]:
        """What sorts first those that failed by themselves, and of them those that were killed."""
        return self.bereft is not None and self.bereft.exists(), self.process.returncode > 0


@dataclass(slots=True)
class _Job:
    """The processes, and the signal that was sent to us to end them."""

    asks_servers: bool
    children: list[_Child] = field(default_factory=list)
    received: int = 0
    begun: float = field(default_factory=time.monotonic)

    def running(self, servers: bool) -> list[_Child]:
        return [child for child in self.children if child.server <= servers and child.poll() is None]

    def failed(self) -> _Child | None:
        """Return a child that ended with an error; before others one for which they may have ended."""
        failed = [child for child in self.children if child.poll()]
        return min(failed, key=lambda child: child.blame, default=None)

    def left(self) -> list[_Child]:
        """Return the children that run, and those of which something that they started does."""
        return [child for child in self.children if child.poll() is None or child.has_group]

    def lives(self) -> bool:
        """Return whether anything of the job runs: in a container nobody may take note of what has ended."""
        left = {child.process.pid for child in self.left()}
        return bool(left and left - _zombies())

    def send(self, number: int) -> None:
        """Send a signal to every child and what it started, be it over itself."""
        for child in self.left():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(child.process.pid, number)

    def end(self, number: int, seconds: float) -> None:
        """Send a signal to all, and wait for them and what they have started, but not longer."""
        begun = time.monotonic()
        self.send(number)
        self.wait(seconds, servers=True)
        # A child may be a shell, which is over at once: the training below it has what is left of the time.
        end = max(begun + seconds, time.monotonic() + _LEFT_S)
        while self.lives() and time.monotonic() < end:
            time.sleep(_POLL_S)

    def wait(self, seconds: float, servers: bool) -> None:
        """Wait for workers, and servers too if asked to, but not longer."""
        end = time.monotonic() + seconds
        while self.running(servers) and time.monotonic() < end:
            time.sleep(_POLL_S)


def launch(plan: Plan, env: Mapping[str, str]) -> int:
    """Run *plan* to its end; return 0, or the exit code of the process that failed first.

    A worker that ends with an error ends the job: the others have a moment to say what they miss, then they are
    killed. Servers end once their workers have, and with the job whatever its processes have started. Where Linux can,
    all of them end with the thread that calls this: a launcher that is killed leaves none of them behind, and the next
    one removes its folder.

    Raises:
        ConfigError: The program cannot be started.
    """
    job = _Job(Layout(num_workers=plan.workers, force_distributed=is_forced(env)).distributed)
    remove_orphans()
    with job_folder() as folder, _root(plan) as root, _forwarding(job):
        try:
            _start(job, plan, {**env, **_common(plan, root, env)}, folder)
            return _watch(job, plan.grace_s)
        finally:
            job.send(signal.SIGKILL)
            for child in job.children:
                child.process.wait()


def _watch(job: _Job, grace_s: float) -> int:
    while job.running(servers=False) and job.failed() is None and not job.received:
        time.sleep(_POLL_S)
    end = time.monotonic() + grace_s
    first = _first_of(job, end)
    if first is None and not job.received:
        job.wait(grace_s if job.asks_servers else job.begun + _UP_S - time.monotonic(), servers=True)
        job.end(signal.SIGTERM, grace_s)  # a server whose workers never came does not know that they are gone
        return 0
    if first is not None:
        sys.stderr.write(f"otel-dltrace: {first.name} {_ended(first.process.returncode)}; ending the others\n")
        job.wait(end - time.monotonic(), servers=False)
    job.end(job.received or signal.SIGTERM, grace_s)
    code = first.process.returncode if first else -job.received
    return code if code >= 0 else 128 - code


def _first_of(job: _Job, end: float) -> _Child | None:
    """Return the child that failed first; until *end* one that fails for another's sake may have ended before that."""
    while True:
        first = job.failed()
        is_for_another = first is not None and first.blame[0]
        if not (is_for_another and job.running(servers=True)) or job.received or time.monotonic() >= end:
            return first
        time.sleep(_POLL_S)


def _ended(code: int) -> str:
    return f"ended with exit code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"


def _common(plan: Plan, root: str, env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that all processes of the job have."""
    host, _, port = root.rpartition(":")
    return {
        "DMLC_NUM_WORKER": str(plan.workers),
        "DMLC_NUM_SERVER": str(plan.servers),
        "DMLC_PS_ROOT_URI": host,
        "DMLC_PS_ROOT_PORT": port,
        "BYTEPS_LOCAL_SIZE": str(plan.local_ranks),
        "PUSHPULL_TOKEN": env.get("PUSHPULL_TOKEN") or secrets.token_hex(16),
        # As torchrun does: each process with a thread per core would have them all wait for each other.
        "OMP_NUM_THREADS": env.get("OMP_NUM_THREADS", "1"),
        # A DataLoader's forked workers do not talk to servers, and gRPC would log a line about each of them.
        "GRPC_ENABLE_FORK_SUPPORT": env.get("GRPC_ENABLE_FORK_SUPPORT", "0"),
    }


def _start(job: _Job, plan: Plan, env: dict[str, str], folder: Path) -> None:
    """Start the processes; no more of them once one has failed, or we are to end."""
    for child in _children(plan, env, folder):
        job.children.append(child)
        if job.received or job.failed() is not None:
            return


def _children(plan: Plan, env: dict[str, str], folder: Path) -> Iterator[_Child]:
    """Yield each process as it is started, servers first."""
    for server in range(plan.servers) if plan.only_worker is None else ():
        # All are here, so they listen where server 0 is looked for: another address of ours would not be found.
        role = {"DMLC_ROLE": "server", "DMLC_SERVER_ID": str(server), "DMLC_NODE_HOST": env["DMLC_PS_ROOT_URI"]}
        bereft = folder / f"server{server}.bereft"
        path = safe_path(env.get("PYTHONPATH", "").split(os.pathsep))
        process = _spawn(SERVE, env | role | path | {BEREFT: str(bereft)})
        yield _Child(f"server {server}", process, server=True, bereft=bereft)
    for worker in range(plan.workers) if plan.only_worker is None else (plan.only_worker,):
        meeting = folder / str(worker)
        meeting.mkdir(mode=0o700)
        for local_rank in range(plan.local_ranks):
            bereft = meeting / f"{local_rank}.bereft"
            role = {
                "DMLC_ROLE": "worker",
                "DMLC_WORKER_ID": str(worker),
                "BYTEPS_LOCAL_RANK": str(local_rank),
                "PUSHPULL_DIR": str(meeting),
                BEREFT: str(bereft),
            }
            name = f"local rank {local_rank} of worker {worker}"
            yield _Child(name, _spawn(plan.program, env | role), bereft=bereft)


def _has_group(number: int) -> bool:
    try:
        os.killpg(number, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's by now, as by sudo
        return True
    return True


def _zombies() -> set[int]:
    """Return the groups of which every process has ended, and waits for its parent to ask; none without Linux."""
    states = defaultdict[int, set[bytes]](set)
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # gone meanwhile
            # After the name, in which anything may be: the state, the parent, the group.
            state, _, group = path.read_bytes().rpartition(b")")[2].split()[:3]
            states[int(group)].add(state)
    return {group for group, found in states.items() if found == {b"Z"}}


def _spawn(command: Sequence[str], env: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    try:
        # A session of its own: a signal then reaches what the program starts, too, and comes but once.
        return subprocess.Popen(
            command,
            env=env,
            start_new_session=True,
            preexec_fn=_ends_with_us(),  # noqa: PLW1509 - it takes no lock that another thread could hold
        )
    except OSError as error:
        raise ConfigError(f"{command[0]} cannot be started: {error.strerror}") from None


def _ends_with_us() -> Callable[[], None] | None:
    """Return what a child does before it runs its program, so that the kernel ends it with us; None without Linux."""
    try:
        import ctypes  # not everybody's Python has it

        prctl = ctypes.CDLL(None).prctl
    except (ImportError, OSError, AttributeError):
        return None
    prctl.argtypes = [ctypes.c_int, ctypes.c_ulong]
    return partial(_end_with, os.getpid(), prctl)


def _end_with(parent: int, prctl: Callable[[int, int], int]) -> None:
    """Have SIGTERM sent to this process when *parent* dies; it may have died already, and then nothing is sent."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # until the program runs it would go to the parent's handler
    prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def _root(plan: Plan) -> Iterator[str]:
    """Give the address of server 0; its port is held for it until the job has ended."""
    if plan.root:
        yield plan.root
        return
    with socket.socket() as holder:
        # The server binds it as well, which it may while nobody listens: so one server, and no other job's.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{holder.getsockname()[1]}"


@contextmanager
def _forwarding(job: _Job) -> Iterator[None]:
    """Have the signals that end us end the job; one that we were started to ignore, as by `nohup`, is no reason to."""

    def received(number: int, _frame: object) -> None:
        job.received = number

    heard = [number for number in FORWARDED if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, received) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
