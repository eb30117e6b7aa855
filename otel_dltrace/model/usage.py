"""What a machine was used for over time: metrics as rates over the intervals between their samples."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from otel_dltrace.model import metrics as m
from otel_dltrace.model import semconv
from otel_dltrace.model.arrays import Column
from otel_dltrace.model.metric_batch import HOST, MetricBatch

IDLE_MODES = ("idle", "iowait")
"""CPU time in which nothing computed."""


@dataclass(frozen=True)
class Usage:
    """One quantity of one thing (a host, a disk, a process), as n values that hold from *begin* to *end*, in ns.

    *rank* is that of a worker's process, -1 for what belongs to the host; *of* names the disk, interface, GPU or
    reason, or a process that is no worker.
    """

    rank: int
    of: str
    begin: Column
    end: Column
    value: Column


@dataclass(frozen=True, slots=True)
class Quantity:
    """How a quantity is made of a metric: which of its points, told apart by which attributes, summed over the rest.

    Counters become rates per second; what a gauge or an updowncounter says holds since the sample before.
    """

    name: str
    unit: str
    metric: str
    keep: Callable[[dict[str, str]], bool] = lambda _: True
    of: tuple[str, ...] = ()


def _is(name: str, value: str) -> Callable[[dict[str, str]], bool]:
    return lambda attributes: attributes.get(name) == value


def _is_busy(attributes: dict[str, str]) -> bool:
    return attributes.get(m.CPU_MODE) not in IDLE_MODES


CPU = Quantity("CPU busy", "1", m.SYSTEM_CPU_UTILIZATION, _is_busy)
MEMORY = Quantity("memory used", "By", m.SYSTEM_MEMORY_USAGE, _is(m.MEMORY_STATE, "used"))
MEMORY_FREE = Quantity("memory free", "By", m.SYSTEM_MEMORY_USAGE, _is(m.MEMORY_STATE, "free"))
DISK_BUSY = Quantity("disk busy", "1", m.SYSTEM_DISK_IO_TIME, of=(m.DEVICE,))
DISK_READ = Quantity("disk read", "By/s", m.SYSTEM_DISK_IO, _is(m.DISK_DIRECTION, "read"), (m.DEVICE,))
DISK_WRITE = Quantity("disk write", "By/s", m.SYSTEM_DISK_IO, _is(m.DISK_DIRECTION, "write"), (m.DEVICE,))
DISK_OPERATIONS = Quantity("disk operations", "/s", m.SYSTEM_DISK_OPERATIONS, of=(m.DEVICE,))
SENT = Quantity("sent", "By/s", m.SYSTEM_NETWORK_IO, _is(m.NETWORK_DIRECTION, "transmit"), (m.INTERFACE,))
RECEIVED = Quantity("received", "By/s", m.SYSTEM_NETWORK_IO, _is(m.NETWORK_DIRECTION, "receive"), (m.INTERFACE,))
LINE_RATE = Quantity("line rate", "By/s", m.HW_NETWORK_BANDWIDTH_LIMIT, of=(m.HW_ID,))
GPU = Quantity("GPU busy", "1", m.HW_GPU_UTILIZATION, of=(m.HW_ID,))
GPU_MEMORY = Quantity("GPU memory", "By", m.HW_GPU_MEMORY_USAGE, of=(m.HW_ID,))
GPU_POWER = Quantity("GPU power", "W", m.HW_POWER, of=(m.HW_ID,))
GPU_TEMPERATURE = Quantity("GPU temperature", "Cel", m.HW_TEMPERATURE, of=(m.HW_ID,))
GPU_IO = Quantity("GPU PCIe/NVLink", "By/s", m.HW_GPU_IO, of=(m.HW_ID,))
THROTTLED = Quantity("GPU throttled", "1", m.DL_GPU_THROTTLED, of=(m.HW_ID, m.THROTTLE_REASON))
PROCESS_CPU = Quantity("CPUs used", "{cpu}", m.PROCESS_CPU_TIME)
RESIDENT = Quantity("resident memory", "By", m.PROCESS_MEMORY_USAGE)
THREADS = Quantity("threads", "{thread}", m.PROCESS_THREAD_COUNT)
PROCESS_READ = Quantity("read from disks", "By/s", m.PROCESS_DISK_IO, _is(m.DISK_DIRECTION, "read"))
PROCESS_WRITE = Quantity("written to disks", "By/s", m.PROCESS_DISK_IO, _is(m.DISK_DIRECTION, "write"))
MAJOR_FAULTS = Quantity("major page faults", "/s", m.PROCESS_PAGING_FAULTS, _is(m.FAULT_TYPE, "major"))
MINOR_FAULTS = Quantity("minor page faults", "/s", m.PROCESS_PAGING_FAULTS, _is(m.FAULT_TYPE, "minor"))
SWITCHES = Quantity("involuntary switches", "/s", m.PROCESS_CONTEXT_SWITCHES, _is(m.SWITCH_TYPE, "involuntary"))

OF_HOSTS = (CPU, MEMORY, MEMORY_FREE, DISK_BUSY, DISK_READ, DISK_WRITE, DISK_OPERATIONS, SENT, RECEIVED)
OF_GPUS = (GPU, GPU_MEMORY, GPU_POWER, GPU_TEMPERATURE, GPU_IO, THROTTLED)
OF_PROCESSES = (PROCESS_CPU, RESIDENT, THREADS, PROCESS_READ, PROCESS_WRITE, MAJOR_FAULTS, MINOR_FAULTS, SWITCHES)
SHOWN = (*OF_HOSTS, *OF_GPUS, *OF_PROCESSES)
"""What the report shows of each host, GPU and process."""


def usages(batch: MetricBatch, quantity: Quantity) -> Iterator[Usage]:
    """Yield *quantity* of each thing that *batch*, the metrics of one host, tells of."""
    groups: dict[tuple[int, str], list[MetricBatch]] = {}
    for _, rank, text, values in batch.of(quantity.metric).series():
        attributes = m.attributes_of(text)
        if quantity.keep(attributes):
            of = " ".join(str(attributes.get(name, "")) for name in quantity.of)
            role = attributes.get(semconv.DL_ROLE)
            place = (rank, of) if role is None else (HOST, f"{role} {rank}")
            groups.setdefault(place, []).append(values)
    is_counter = m.METRICS[quantity.metric].instrument == m.COUNTER
    for (rank, of), parts in groups.items():
        usage = _sum([_rates(part) if is_counter else _levels(part) for part in parts])
        if usage is not None:
            begin, end, value = usage
            # Two clocks are read for a share, so that it may be a little too large.
            yield Usage(rank, of, begin, end, np.minimum(value, 1.0) if quantity.unit == "1" else value)


Levels = tuple[Column, Column, Column]
"""Begin, end and value, shape (n,)."""


def _levels(values: MetricBatch) -> Levels:
    """Return a gauge's values; each holds since the sample before, so the first one for no time."""
    return np.append(values.time[:1], values.time[:-1]), values.time, values.value


def _rates(values: MetricBatch) -> Levels:
    """Return a counter's growth per second; where it fell it began anew, and that interval is not known."""
    length, growth = np.diff(values.time) / 1e9, np.diff(values.value)
    good = (length > 0) & (growth >= 0)
    return values.time[:-1][good], values.time[1:][good], growth[good] / length[good]


def _sum(parts: Sequence[Levels]) -> Levels | None:
    """Return the sum of series that were sampled together; times that one of them lacks are left out."""
    begin, end, value = parts[0]
    for _, other_end, other in parts[1:]:
        _, mine, theirs = np.intersect1d(end, other_end, return_indices=True)
        begin, end, value = begin[mine], end[mine], value[mine] + other[theirs]
    return (begin, end, value) if len(end) else None
