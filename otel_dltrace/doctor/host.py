"""The machine: its clocks, its shared memory, the folder for runs, and what a fork would break."""

import ctypes
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from otel_dltrace.export.otlp.settings import GRPC
from otel_dltrace.model.errors import ConfigError, DltraceError
from otel_dltrace.model.findings import FINE, NOTE, PROBLEM, Finding
from otel_dltrace.model.time import tightest_anchor
from otel_dltrace.record.launch import is_served
from otel_dltrace.record.ring import MIN_CHUNKS, SHARE_OF_FREE, free_in
from otel_dltrace.record.ring_file import CHUNK, make_ring_folder
from otel_dltrace.settings.config import VARIABLES, Config
from otel_dltrace.settings.said import said

_CLOCK_SOURCE = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
_SLOW_SOURCES = ("hpet", "acpi_pm", "jiffies", "pit", "refined-jiffies", "xen")
_NOT_SYNCHRONISED = 5  # what adjtimex returns then (TIME_ERROR)
_REMOTE = ("nfs", "lustre", "gpfs", "cifs", "smb", "beegfs", "ceph", "fuse", "9p", "afs", "glusterfs")
_LOCAL_ALL_THE_SAME = ("fuse.fuse-overlayfs", "fuse.overlayfs", "fuseblk")  # rootless containers; NTFS
_MIB = 1 << 20
_PROCESSES_LEFT = 32


def clocks() -> list[Finding]:
    """Return which clock the kernel reads, how near wall and monotonic time are read, and who sets the wall clock."""
    return [*_clock_source(), _pair(), *_synchronised()]


def _clock_source() -> Iterator[Finding]:
    try:
        source = _CLOCK_SOURCE.read_text().strip()
    except OSError:
        return
    begun = time.perf_counter_ns()
    for _ in range(1000):
        time.monotonic_ns()
    each = (time.perf_counter_ns() - begun) // 1000
    what = f"the kernel's clock source is {source}; a read takes {each} ns"
    if source in _SLOW_SOURCES:
        yield Finding("clock", NOTE, what, "two reads a span: tsc is faster, if the machine's is stable")
    else:
        yield Finding("clock", FINE, what)


def _pair() -> Finding:
    anchor = tightest_anchor(time.monotonic_ns, time.time_ns)
    what = f"wall and monotonic time are read together to +-{anchor.uncertainty / 1000:,.1f} us"
    return Finding("clock", FINE, what)


def _synchronised() -> Iterator[Finding]:
    try:
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512))  # asks only: its modes are 0
    except (AttributeError, OSError):
        return
    if state == _NOT_SYNCHRONISED:
        what = "the wall clock is not kept in step with that of other hosts (adjtimex)"
        yield Finding(
            "clock", NOTE, what, "run chrony or ntpd if ranks run on several hosts; on one it does not matter"
        )
    elif state >= 0:
        yield Finding("clock", FINE, "the wall clock is kept in step with that of other hosts (adjtimex)")


def shared_memory(config: Config) -> list[Finding]:
    """Return whether the ring folder is a tmpfs that we may write, with room for rings."""
    folder, there = config.rings, _nearest(config.rings)
    kind = _file_system(there)
    if os.path.lexists(folder):  # a link to nothing is in the way as well
        try:
            make_ring_folder(folder)
        except (DltraceError, OSError) as error:
            return [Finding("rings", PROBLEM, str(error))]
    elif not os.access(there, os.W_OK | os.X_OK):
        cure = "set OTEL_DLTRACE_RING_DIR to a tmpfs folder of yours"
        return [Finding("rings", PROBLEM, f"{folder} cannot be made: {there} cannot be written", cure)]
    found = [_room(config, there)]
    if kind not in ("tmpfs", "ramfs"):
        what = f"{folder} is on {kind or 'an unknown file system'}, not on a tmpfs"
        found.append(Finding("rings", PROBLEM, what, "set OTEL_DLTRACE_RING_DIR to a folder below /dev/shm"))
    return found


def _room(config: Config, there: Path) -> Finding:
    total, free = shutil.disk_usage(there).total, free_in(there)
    each = min(config.ring_size, int(free * SHARE_OF_FREE))
    size = f"{total / _MIB:,.0f} MiB, {free / _MIB:,.0f} free"
    more = "give it more: docker run --shm-size=1g, or an emptyDir of medium Memory in Kubernetes"
    if not total:
        size = f"no limit but the memory's {free / _MIB:,.0f} MiB"
        more = f"a ring takes at most {SHARE_OF_FREE:.0%} of that; lower OTEL_DLTRACE_RING_SIZE"
    if each < (MIN_CHUNKS + 1) * CHUNK:
        return Finding("rings", PROBLEM, f"{config.rings} has no room for a ring ({size})", more)
    what = f"{config.rings} ({size}) gives each process a ring of {each / _MIB:,.1f} MiB"
    return Finding("rings", NOTE if each < config.ring_size else FINE, what, more if each < config.ring_size else "")


def run_directory(env: Mapping[str, str], config: Config) -> list[Finding]:
    """Return where runs are written, whether they can be, and how much room there is."""
    variable = VARIABLES["directory"]
    asked = {variable: said(env, variable) or "."}
    try:
        # The folder for rings is looked at elsewhere; that of *config* can be written.
        Config.from_env({**asked, VARIABLES["ring_directory"]: config.ring_directory}).check_writable(asked)
    except ConfigError as error:
        return [Finding("run directory", PROBLEM, str(error), f"set {variable} to a folder that can be")]
    there = _nearest(Path(config.directory))
    free, kind = shutil.disk_usage(there).free, _file_system(there)
    where = f"run directories are made in {config.directory} ({kind or 'unknown file system'})"
    found = [Finding("run directory", FINE, f"{where}, {free / _MIB / 1024:,.1f} GiB free")]
    if free < config.quota:
        what = f"a host may write {config.quota / _MIB / 1024:,.1f} GiB there, but less is free"
        found.append(Finding("run directory", NOTE, what, "lower OTEL_DLTRACE_QUOTA, or set OTEL_DLTRACE_DIR"))
    if kind.startswith(_REMOTE) and kind not in _LOCAL_ALL_THE_SAME:
        what = "it is a network file system: the drain writes it, no rank waits for it"
        found.append(Finding("run directory", FINE, what))
    return found


def forks(env: Mapping[str, str], config: Config) -> list[Finding]:
    """Return what would go wrong when a traced program forks, and whether a drain can be started, or serves."""
    found = []
    protocol = env.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or env.get("OTEL_EXPORTER_OTLP_PROTOCOL", "")
    in_program = config.drain == "thread" and protocol.strip().lower() == GRPC
    if in_program:
        what = "the drain is a thread and sends gRPC, so a program that forks takes gRPC's threads and locks along"
        found.append(
            Finding("fork", NOTE, what, "set OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf, or OTEL_DLTRACE_DRAIN=auto")
        )
    if env.get("GRPC_ENABLE_FORK_SUPPORT", "1").strip().lower() in ("0", "false"):
        what = f"GRPC_ENABLE_FORK_SUPPORT={env['GRPC_ENABLE_FORK_SUPPORT']}: a child forked after gRPC began hangs"
        found.append(Finding("fork", PROBLEM if in_program else NOTE, what, "unset it"))
    left = _processes_left()
    if config.drain == "auto" and left is not None and left < _PROCESSES_LEFT:
        what = f"only {left} more processes and threads may be started here, and the drain is one"
        found.append(
            Finding("fork", NOTE, what, "raise the limit (ulimit -u, pids.max), or set OTEL_DLTRACE_DRAIN=thread")
        )
    is_left_to_others = config.drain == "off"
    if is_left_to_others and not is_served(config.rings, config.home):
        what = f"OTEL_DLTRACE_DRAIN=off leaves the rings to a drain started with --stay, and none serves {config.rings}"
        cure = "start `otel-dltrace drain --stay` with the same OTEL_DLTRACE_RING_DIR"
        found.append(Finding("fork", PROBLEM, what, cure))
    if not found:
        drain = f"a drain serves {config.rings}" if is_left_to_others else "the drain can be started"
        what = f"a forked or spawned process records separately, DataLoader's workers not at all; {drain}"
        found.append(Finding("fork", FINE, what))
    return found


def _processes_left() -> int | None:
    """Return how many processes the cgroup still allows, None where it has no limit."""
    folder = Path("/sys/fs/cgroup")
    for limit, now in (
        (folder / "pids.max", folder / "pids.current"),
        (folder / "pids/pids.max", folder / "pids/pids.current"),
    ):
        try:
            most = limit.read_text().strip()
            return int(most) - int(now.read_text()) if most.isdecimal() else None
        except (OSError, ValueError):
            continue
    return None


def _nearest(path: Path) -> Path:
    """Return *path*, or what is there of its parents."""
    return next(one for one in (path, *path.parents) if os.path.lexists(one))


def _file_system(path: Path) -> str:
    """Return the type of the file system that *path* is on, "" if that cannot be told."""
    real, best = str(path.resolve()), ("", "")
    try:
        lines = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        _, point, kind, *_ = line.split(" ")
        point = point.replace("\\040", " ")
        if (real == point or real.startswith(point.rstrip("/") + "/")) and len(point) >= len(best[0]):
            best = (point, kind)
    return best[1]
