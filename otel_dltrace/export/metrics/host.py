"""The host's CPUs, memory, disks and network; where a container limits us, its CPUs and memory instead."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from time import monotonic

import psutil

from otel_dltrace.export.metrics.container import Container
from otel_dltrace.export.metrics.rates import Shares
from otel_dltrace.model import metrics as m
from otel_dltrace.model.metric_batch import Point
from otel_dltrace.model.metrics import pairs_text

_MODES = {
    "user": ("user",),
    "nice": ("nice",),
    "system": ("system",),
    "idle": ("idle",),
    "iowait": ("iowait",),
    "interrupt": ("irq", "softirq"),
    "steal": ("steal",),
}
"""For each ``cpu.mode`` the columns of the kernel's that make it; guests' time is in ``user`` already."""
_NOT_DISKS = ("loop", "ram", "zram", "dm-", "md")
"""No disks of their own: their bytes are memory's, or come again as those of the disks below."""
_NOT_INTERFACES = ("veth", "cali", "lxc", "eni")
"""Of other containers, as many as there are of these: Docker's and those of network plugins of Kubernetes."""
_MBIT = 1_000_000 // 8


class CpuAndMemory:
    """Samples CPUs and memory.

    Args:
        root: Where ``proc`` and ``sys`` are, for the container's limits.
    """

    name = "CPU and memory"

    def __init__(self, root: Path = Path("/")) -> None:
        self._cpus = psutil.cpu_count() or 1
        self._container = Container(psutil.virtual_memory().total, self._cpus, root)
        self._shares = Shares()

    def sample(self) -> Iterator[Point]:
        """Yield the values of this moment."""
        yield from self._cpu()
        yield from self._memory()

    def _cpu(self) -> Iterator[Point]:
        now, limited = monotonic(), self._container.cpu()
        if limited is not None:
            modes = {"user": limited.user, "system": limited.system}
            spent, count = {mode: seconds for mode, seconds in modes.items() if seconds is not None}, limited.count
        else:
            times = psutil.cpu_times()
            spent = {mode: sum(getattr(times, c, 0.0) for c in columns) for mode, columns in _MODES.items()}
            count = self._cpus
        shares = self._shares.since_last(now, spent, count)
        if shares and "idle" not in shares:
            shares["idle"] = max(0.0, 1.0 - sum(shares.values()))
        yield Point(m.SYSTEM_CPU_LOGICAL_COUNT, count)
        for mode, seconds in spent.items():
            yield Point(m.SYSTEM_CPU_TIME, seconds, _mode(mode))
        for mode, share in shares.items():
            yield Point(m.SYSTEM_CPU_UTILIZATION, share, _mode(mode))

    def _memory(self) -> Iterator[Point]:
        limited = self._container.memory()
        if limited is not None:
            total, cached = limited.limit, limited.reclaimable
            used, free = limited.used - cached, max(0, total - limited.used)
        else:
            memory = psutil.virtual_memory()
            total, used, free = memory.total, memory.used, memory.free
            cached = max(0, total - used - free)
        yield Point(m.SYSTEM_MEMORY_LIMIT, total)
        for state, value in (("used", used), ("cached", cached), ("free", free)):
            text = pairs_text((m.MEMORY_STATE, state))
            yield Point(m.SYSTEM_MEMORY_USAGE, value, text)
            yield Point(m.SYSTEM_MEMORY_UTILIZATION, value / total, text)


class Disks:
    """Samples the disks that are whole ones."""

    name = "disks"

    def sample(self) -> Iterator[Point]:
        """Yield what each disk has done since the host was started."""
        for device, done in (psutil.disk_io_counters(perdisk=True) or {}).items():
            if device.startswith(_NOT_DISKS) or not _is_whole(device):
                continue
            for direction in ("read", "write"):
                text = pairs_text((m.DEVICE, device), (m.DISK_DIRECTION, direction))
                yield Point(m.SYSTEM_DISK_IO, getattr(done, f"{direction}_bytes"), text)
                yield Point(m.SYSTEM_DISK_OPERATIONS, getattr(done, f"{direction}_count"), text)
            yield Point(m.SYSTEM_DISK_IO_TIME, done.busy_time / 1e3, pairs_text((m.DEVICE, device)))


@cache
def _is_whole(device: str) -> bool:
    """Return whether *device* is no partition, whose bytes are its disk's too."""
    return not Path("/sys/class/block", device.replace("/", "!"), "partition").exists()


class Network:
    """Samples the network interfaces, the loopback too: ranks of one host talk over it."""

    name = "network"

    def __init__(self) -> None:
        self._speeds = {name: found.speed for name, found in psutil.net_if_stats().items() if found.speed > 0}

    def sample(self) -> Iterator[Point]:
        """Yield what each interface has sent and received since the host was started."""
        for interface, done in psutil.net_io_counters(pernic=True).items():
            if interface.startswith(_NOT_INTERFACES) or not (done.bytes_sent or done.bytes_recv):
                continue
            for direction, value in (("transmit", done.bytes_sent), ("receive", done.bytes_recv)):
                text = pairs_text((m.INTERFACE, interface), (m.NETWORK_DIRECTION, direction))
                yield Point(m.SYSTEM_NETWORK_IO, value, text)
            if interface in self._speeds:
                text = pairs_text((m.HW_ID, interface), (m.HW_TYPE, "network"))
                yield Point(m.HW_NETWORK_BANDWIDTH_LIMIT, self._speeds[interface] * _MBIT, text)


def _mode(mode: str) -> str:
    return pairs_text((m.CPU_MODE, mode))
