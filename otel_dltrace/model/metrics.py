"""Every metric that this project writes, once: name, unit, instrument, and the attributes of its points.

Names and units are those of the OpenTelemetry semantic conventions; ``dl.*`` is ours, where these
have none. Standard library only, since the training process writes some of them.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final

from otel_dltrace.model import semconv
from otel_dltrace.model.operation import Descriptor

NOTHING: Final[Mapping[str, str | int]] = MappingProxyType({})
"""No attributes."""

GAUGE: Final = "gauge"
COUNTER: Final = "counter"
UPDOWNCOUNTER: Final = "updowncounter"
HISTOGRAM: Final = "histogram"


@dataclass(frozen=True)
class Metric:
    """What is constant about a metric.

    Attributes:
        name: Its name.
        unit: In UCUM, as OpenTelemetry wants it: ``s``, ``By``, ``1`` for a ratio.
        instrument: What a value says: a ``counter``'s is the total since the source began (never an
            increment), a ``histogram``'s is one observation, the others' are the value of the moment.
        description: What it is, for people.
        attributes: The names of the attributes that its points may have, besides `semconv.DL_RANK`.
    """

    name: str
    unit: str
    instrument: str
    description: str
    attributes: tuple[str, ...] = ()


# Attributes of points.
CPU_MODE: Final = "cpu.mode"
MEMORY_STATE: Final = "system.memory.state"
DEVICE: Final = "system.device"
DISK_DIRECTION: Final = "disk.io.direction"
INTERFACE: Final = "network.interface.name"
NETWORK_DIRECTION: Final = "network.io.direction"
FAULT_TYPE: Final = "system.paging.fault.type"
SWITCH_TYPE: Final = "process.context_switch.type"
HW_ID: Final = "hw.id"
HW_TYPE: Final = "hw.type"
HW_NAME: Final = "hw.name"
GPU_TASK: Final = "hw.gpu.task"
GPU_LINK: Final = "dl.gpu.link"
THROTTLE_REASON: Final = "dl.gpu.throttle.reason"
GC_GENERATION: Final = semconv.CPYTHON_GC_GENERATION

# The host, or the container that limits us: its memory and CPUs then.
SYSTEM_CPU_UTILIZATION: Final = "system.cpu.utilization"
SYSTEM_CPU_TIME: Final = "system.cpu.time"
SYSTEM_CPU_LOGICAL_COUNT: Final = "system.cpu.logical.count"
SYSTEM_MEMORY_USAGE: Final = "system.memory.usage"
SYSTEM_MEMORY_UTILIZATION: Final = "system.memory.utilization"
SYSTEM_MEMORY_LIMIT: Final = "system.memory.limit"
SYSTEM_DISK_IO: Final = "system.disk.io"
SYSTEM_DISK_OPERATIONS: Final = "system.disk.operations"
SYSTEM_DISK_IO_TIME: Final = "system.disk.io_time"
SYSTEM_NETWORK_IO: Final = "system.network.io"
HW_NETWORK_BANDWIDTH_LIMIT: Final = "hw.network.bandwidth.limit"

# Each GPU.
HW_GPU_UTILIZATION: Final = "hw.gpu.utilization"
HW_GPU_MEMORY_USAGE: Final = "hw.gpu.memory.usage"
HW_GPU_MEMORY_LIMIT: Final = "hw.gpu.memory.limit"
HW_GPU_MEMORY_UTILIZATION: Final = "hw.gpu.memory.utilization"
HW_GPU_IO: Final = "hw.gpu.io"
HW_POWER: Final = "hw.power"
HW_ENERGY: Final = "hw.energy"
HW_TEMPERATURE: Final = "hw.temperature"
DL_GPU_THROTTLED: Final = "dl.gpu.throttled"

# Each training process; what it alone knows are COUNTER records of its ring.
PROCESS_CPU_TIME: Final = "process.cpu.time"
PROCESS_CPU_UTILIZATION: Final = "process.cpu.utilization"
PROCESS_MEMORY_USAGE: Final = "process.memory.usage"
PROCESS_THREAD_COUNT: Final = "process.thread.count"
PROCESS_PAGING_FAULTS: Final = "process.paging.faults"
PROCESS_CONTEXT_SWITCHES: Final = "process.context_switches"
PROCESS_DISK_IO: Final = "process.disk.io"
DL_GC_PAUSE: Final = "dl.gc.pause"
DL_PROCESS_MEMORY_PEAK: Final = "dl.process.memory.peak"

# Each rank's training, from its steps and stages.
DL_STEP_DURATION: Final = "dl.step.duration"
DL_STEP_STAGE_DURATION: Final = "dl.step.stage.duration"
DL_STEP_GRAD_SYNC_EXPOSED: Final = "dl.step.grad_sync.exposed"
DL_TRAIN_SAMPLES: Final = "dl.train.samples"
DL_TRAIN_BATCHES: Final = "dl.train.batches"
DL_THROUGHPUT_SAMPLES: Final = "dl.throughput.samples"
DL_THROUGHPUT_BATCHES: Final = "dl.throughput.batches"

RESIDUAL: Final = "residual"
"""The ``dl.phase`` of `DL_STEP_STAGE_DURATION` for what no stage covers: step minus the union of its stages."""

_GPU = (HW_ID, HW_TYPE, HW_NAME)
_TABLE: Final = (
    Metric(SYSTEM_CPU_UTILIZATION, "1", GAUGE, "Share of all CPUs' time since the last sample, by mode", (CPU_MODE,)),
    Metric(SYSTEM_CPU_TIME, "s", COUNTER, "CPU time of all CPUs, by mode", (CPU_MODE,)),
    Metric(SYSTEM_CPU_LOGICAL_COUNT, "{cpu}", UPDOWNCOUNTER, "CPUs that may be used: the host's, or the container's"),
    Metric(SYSTEM_MEMORY_USAGE, "By", UPDOWNCOUNTER, "Memory in each state; the states add up", (MEMORY_STATE,)),
    Metric(SYSTEM_MEMORY_UTILIZATION, "1", GAUGE, "Share of the memory in each state", (MEMORY_STATE,)),
    Metric(SYSTEM_MEMORY_LIMIT, "By", UPDOWNCOUNTER, "Memory that may be used: the host's, or the container's"),
    Metric(SYSTEM_DISK_IO, "By", COUNTER, "Bytes read from and written to a disk", (DEVICE, DISK_DIRECTION)),
    Metric(
        SYSTEM_DISK_OPERATIONS, "{operation}", COUNTER, "Reads and writes that a disk did", (DEVICE, DISK_DIRECTION)
    ),
    Metric(SYSTEM_DISK_IO_TIME, "s", COUNTER, "Time for which a disk was busy", (DEVICE,)),
    Metric(SYSTEM_NETWORK_IO, "By", COUNTER, "Bytes sent and received by an interface", (INTERFACE, NETWORK_DIRECTION)),
    Metric(
        HW_NETWORK_BANDWIDTH_LIMIT, "By/s", UPDOWNCOUNTER, "Speed of an interface, if it reports one", (HW_ID, HW_TYPE)
    ),
    Metric(HW_GPU_UTILIZATION, "1", GAUGE, "Share of the time in which a kernel ran", (*_GPU, GPU_TASK)),
    Metric(HW_GPU_MEMORY_USAGE, "By", UPDOWNCOUNTER, "GPU memory in use; free is the limit less this", _GPU),
    Metric(HW_GPU_MEMORY_LIMIT, "By", UPDOWNCOUNTER, "GPU memory", _GPU),
    Metric(HW_GPU_MEMORY_UTILIZATION, "1", GAUGE, "Share of the GPU memory in use", _GPU),
    Metric(HW_GPU_IO, "By", COUNTER, "Bytes over PCIe and NVLink", (*_GPU, NETWORK_DIRECTION, GPU_LINK)),
    Metric(HW_POWER, "W", GAUGE, "Power that a GPU draws", _GPU),
    Metric(HW_ENERGY, "J", COUNTER, "Energy that a GPU has used since its driver was loaded", _GPU),
    Metric(HW_TEMPERATURE, "Cel", GAUGE, "Temperature of a GPU", _GPU),
    Metric(
        DL_GPU_THROTTLED, "1", GAUGE, "1 while a GPU is slowed down for this reason, else 0", (*_GPU, THROTTLE_REASON)
    ),
    Metric(PROCESS_CPU_TIME, "s", COUNTER, "CPU time of a rank's process", (CPU_MODE,)),
    Metric(PROCESS_CPU_UTILIZATION, "1", GAUGE, "Share of all CPUs' time since the last sample", (CPU_MODE,)),
    Metric(PROCESS_MEMORY_USAGE, "By", UPDOWNCOUNTER, "Physical memory of a rank's process (RSS)"),
    Metric(PROCESS_THREAD_COUNT, "{thread}", UPDOWNCOUNTER, "Threads of a rank's process"),
    Metric(PROCESS_PAGING_FAULTS, "{fault}", COUNTER, "Page faults; major ones waited for a disk", (FAULT_TYPE,)),
    Metric(
        PROCESS_CONTEXT_SWITCHES,
        "{context_switch}",
        COUNTER,
        "How often the process waited (voluntary) or was made to wait (involuntary)",
        (SWITCH_TYPE,),
    ),
    Metric(PROCESS_DISK_IO, "By", COUNTER, "Bytes that disks read and wrote for the process", (DISK_DIRECTION,)),
    Metric(DL_GC_PAUSE, "s", HISTOGRAM, "How long a garbage collection held the interpreter", (GC_GENERATION,)),
    Metric(DL_PROCESS_MEMORY_PEAK, "By", GAUGE, "The most physical memory that a rank's process has had (getrusage)"),
    Metric(DL_STEP_DURATION, "s", HISTOGRAM, "How long a rank's step took"),
    Metric(
        DL_STEP_STAGE_DURATION,
        "s",
        HISTOGRAM,
        "How long a stage took in a step, all pieces; `residual` is the step without its stages",
        (semconv.DL_PHASE,),
    ),
    Metric(
        DL_STEP_GRAD_SYNC_EXPOSED, "s", HISTOGRAM, "How long the training thread was blocked by collectives in a step"
    ),
    Metric(DL_TRAIN_SAMPLES, "{sample}", COUNTER, "Samples trained on, of batches whose size is known"),
    Metric(
        DL_TRAIN_BATCHES, "{batch}", COUNTER, "Batches trained on: those of a DataLoader; a step without one is one"
    ),
    Metric(DL_THROUGHPUT_SAMPLES, "{sample}/s", GAUGE, "Samples a second over the latest steps"),
    Metric(DL_THROUGHPUT_BATCHES, "{batch}/s", GAUGE, "Batches a second over the latest steps"),
)
METRICS: Final[Mapping[str, Metric]] = {metric.name: metric for metric in _TABLE}
"""Every metric by name."""

RECORD_UNITS: Final[Mapping[str, float]] = {"s": 1e-9}
"""What 1 in a COUNTER record, whose value is a whole number, is in a metric's unit: seconds are recorded in ns."""


@dataclass(frozen=True)
class SeedMetric:
    """One of the nine system metrics of Determined's profiler, and where it is now.

    *of* are attributes that choose its points; *rate* says that it is the counter's rate.
    """

    name: str
    metric: str
    of: tuple[tuple[str, str], ...] = ()
    rate: bool = False


SEED: Final = (
    SeedMetric("GPU utilization", HW_GPU_UTILIZATION),
    SeedMetric("GPU memory usage", HW_GPU_MEMORY_USAGE),
    SeedMetric("Network throughput (sent)", SYSTEM_NETWORK_IO, ((NETWORK_DIRECTION, "transmit"),), rate=True),
    SeedMetric("Network throughput (received)", SYSTEM_NETWORK_IO, ((NETWORK_DIRECTION, "receive"),), rate=True),
    SeedMetric("Disk IOPS", SYSTEM_DISK_OPERATIONS, rate=True),
    SeedMetric("Disk throughput (read)", SYSTEM_DISK_IO, ((DISK_DIRECTION, "read"),), rate=True),
    SeedMetric("Disk throughput (write)", SYSTEM_DISK_IO, ((DISK_DIRECTION, "write"),), rate=True),
    SeedMetric("Host memory usage", SYSTEM_MEMORY_USAGE, ((MEMORY_STATE, "used"),)),
    SeedMetric("Average CPU utilization across cores", SYSTEM_CPU_UTILIZATION),
)
"""All nine, in the order of their page. CPU utilization is the sum over all modes but ``idle`` and ``iowait``."""


def record_descriptor(metric: str, attributes: Mapping[str, str | int] = NOTHING) -> Descriptor:
    """Return the descriptor of COUNTER records of *metric*: its activity holds the attributes of the point."""
    return Descriptor(semconv.METRIC, metric, activity=attributes_text(attributes))


def attributes_text(attributes: Mapping[str, str | int]) -> str:
    """Return *attributes* as canonical JSON, "" for none: equal attributes give equal texts."""
    return json.dumps(attributes, sort_keys=True, separators=(",", ":")) if attributes else ""


@lru_cache(maxsize=4096)
def pairs_text(*pairs: tuple[str, str | int]) -> str:
    """Return the attributes *pairs* as `attributes_text` does, the quicker for those asked for before."""
    return attributes_text(dict(pairs))


def attributes_of(text: str) -> dict[str, Any]:
    """Return the attributes that `attributes_text` made *text* of; none of a text that is damaged."""
    try:
        attributes = json.loads(text) if text else {}
    except ValueError:
        return {}
    return attributes if isinstance(attributes, dict) else {}
