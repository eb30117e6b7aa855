"""What a container may use, and uses: the cgroup's limits, where they are tighter than the host (v2, and v1).

The limit of any folder from the process's own up to the root binds, so usage is read where the tightest one is.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

from otel_dltrace.record.guard import tried

_MOUNT = Path("sys/fs/cgroup")
_ANY = float("inf")


@dataclass(frozen=True)
class Memory:
    """Bytes: what may be used, what is, and what of that the kernel would give back at once."""

    limit: int
    used: int
    reclaimable: int


@dataclass(frozen=True)
class Cpu:
    """How many CPUs' time may be used, and the seconds used so far in each mode.

    None where nobody counts them for those that share the limit: others' time is no share of it.
    """

    count: float
    user: float | None
    system: float | None


class Container:
    """Reads this process's cgroup; which of its folders binds is found out once.

    Args:
        memory: Bytes of the host.
        cpus: CPUs of the host.
        root: Where ``proc`` and ``sys`` are.
    """

    def __init__(self, memory: float, cpus: int, root: Path = Path("/")) -> None:
        paths, mount = _own_paths(root / "proc/self/cgroup"), root / _MOUNT
        unified = [*_up(mount, paths.get("", "/"))]
        limits = [(_number(folder / "memory.max"), folder, False) for folder in unified]
        in_v1 = _up(mount / "memory", paths.get("memory", "/"))
        limits += [(_number(folder / "memory.limit_in_bytes"), folder, True) for folder in in_v1]
        self._memory = min(limits)
        counts: list[tuple[float, Path | None, bool]] = [(_cpus_v2(folder), folder, False) for folder in unified]
        spent, allowed = (next(_up(mount / name, paths.get(name, "/"))) for name in ("cpuacct", "cpuset"))
        shared = paths.get("cpuacct", "/")
        counts.append(
            (_cpuset(allowed / "cpuset.effective_cpus"), spent if paths.get("cpuset") == shared else None, True)
        )
        for folder in _up(mount / "cpu", paths.get("cpu", "/")):
            same = mount / "cpuacct" / folder.relative_to(mount / "cpu")
            own = spent if paths.get("cpu") == shared else None
            counts.append((_quota_v1(folder), same if same.is_dir() else own, True))
        self._cpu = min(counts, key=itemgetter(0))
        self._host_memory, self._host_cpus = memory, cpus

    def memory(self) -> Memory | None:
        """Return the container's memory; None where nothing limits it below the host's.

        Raises:
            OSError: A file of the cgroup cannot be read.
        """
        limit, folder, is_v1 = self._memory
        if limit >= self._host_memory:
            return None
        used = int((folder / ("memory.usage_in_bytes" if is_v1 else "memory.current")).read_text())
        cached = _pairs(folder / "memory.stat").get("total_inactive_file" if is_v1 else "inactive_file", 0)
        return Memory(int(limit), used, min(used, cached))

    def cpu(self) -> Cpu | None:
        """Return the container's CPUs; None where nothing limits them below the host's.

        Raises:
            OSError: A file of the cgroup cannot be read.
        """
        count, folder, is_v1 = self._cpu
        if count >= self._host_cpus:
            return None
        if folder is None:
            return Cpu(count, None, None)
        if is_v1:
            user, system = (int((folder / f"cpuacct.usage_{mode}").read_text()) / 1e9 for mode in ("user", "sys"))
            return Cpu(count, user, system)
        spent = _pairs(folder / "cpu.stat")
        return Cpu(count, spent["user_usec"] / 1e6, spent["system_usec"] / 1e6)


def allowed_cpus() -> float:
    """Return how many CPUs' time may be used here."""
    cpus = os.cpu_count() or 1
    limited = tried(Container(_ANY, cpus).cpu)
    return limited.count if isinstance(limited, Cpu) else cpus


def _own_paths(file: Path) -> Mapping[str, str]:
    """Return this process's path in each hierarchy, by controller; version 2's by ""."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return {}
    fields = [line.split(":", 2) for line in lines if line.count(":") >= 2]
    return {controller: path for _, controllers, path in fields for controller in controllers.split(",")}


def _up(mount: Path, path: str) -> Iterator[Path]:
    """Yield *path* below *mount* and its parents, *mount* the last, as far as they are seen from inside a namespace."""
    folder = mount / path.lstrip("/")
    while folder != mount:
        if folder.is_dir():
            yield folder
        folder = folder.parent
    yield mount


def _cpus_v2(folder: Path) -> float:
    """Return how many CPUs *folder* allows; any number where it does not say."""
    quota, _, period = _text(folder / "cpu.max").partition(" ")
    return min(_share(quota, period), _cpuset(folder / "cpuset.cpus.effective"))


def _quota_v1(folder: Path) -> float:
    return _share(_text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us"))


def _share(quota: str, period: str) -> float:
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() else _ANY


def _cpuset(file: Path) -> float:
    """Return how many CPUs a list such as ``0-3,8`` names; any number where there is no list."""
    text = _text(file)
    ranges = [part.partition("-") for part in text.split(",")] if text else []
    try:
        return sum(int(last or first) - int(first) + 1 for first, _, last in ranges) or _ANY
    except ValueError:
        return _ANY


def _number(file: Path) -> float:
    """Return the limit in *file*; any number where there is none."""
    text = _text(file)
    return int(text) if text.isdecimal() else _ANY


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _pairs(file: Path) -> dict[str, int]:
    """Return the numbers of a file with a name and a number on each line."""
    lines = (line.split() for line in file.read_text().splitlines())
    return {name: int(value) for name, value in lines}
