"""NVIDIA's GPUs, as their driver sees them; what it does not tell has no series."""

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from otel_dltrace.model import metrics as m
from otel_dltrace.model.metric_batch import Point
from otel_dltrace.model.metrics import attributes_text
from otel_dltrace.record.guard import say

_THROTTLED = {
    0x0002: "applications_clocks",
    0x0004: "sw_power_cap",
    0x0008: "hw_slowdown",
    0x0010: "sync_boost",
    0x0020: "sw_thermal",
    0x0040: "hw_thermal",
    0x0080: "hw_power_brake",
}
"""nvml.h: the bits of nvmlClocksEventReasons that slow a GPU down; idle and display settings do not."""
_GONE_FOR_GOOD = {2, 3, 4, 13}
"""nvml.h: invalid argument, not supported, no permission, function not found."""
_LINKS = {"pcie": ((197, 198), 1), "nvlink": ((138, 139), 1024)}
"""nvml.h: fields that count what was sent and received, and their unit in bytes. PCIe's may begin anew."""
_ALL_LINKS = 0xFFFF_FFFF
_DIRECTIONS = ("transmit", "receive")
Reader = Callable[[Any, dict[str, str | int]], Iterator[Point]]


class NoGpuError(Exception):
    """GPUs cannot be sampled; the message says why and what to do, and is empty where there are none."""


def open_gpus(devices: Path = Path("/dev")) -> "GpuSource":
    """Return the source of this host's GPUs.

    Raises:
        NoGpuError: There are none, or nothing that could be asked about them.
    """
    there = (devices / "nvidiactl").exists()
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        why = "there are GPUs, but no nvidia-ml-py to ask about them: pip install '.[gpu]' in otel-dltrace's folder"
        raise NoGpuError(why if there else "") from None
    try:
        nvml.nvmlInit()
        return GpuSource(nvml)
    except nvml.NVMLError as error:
        raise NoGpuError(
            f"nvidia-ml-py is there, but NVML says {str(error)!r}: is there an NVIDIA driver, and in this container?"
        ) from None


class GpuSource:
    """Samples each GPU that the driver shows.

    Args:
        nvml: The module ``pynvml``, initialised.
    """

    name = "GPU"

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._counted: dict[str, tuple[int, int]] = {}
        readers: tuple[Reader, ...] = (
            self._utilization,
            self._memory,
            self._power,
            self._energy,
            self._temperature,
            self._throttled,
            self._io,
        )
        self._readers = [(handle, identity, reader) for handle, identity in self._gpus() for reader in readers]

    def _gpus(self) -> Iterator[tuple[Any, dict[str, str | int]]]:
        """Yield each GPU that can be asked; one that is lost leaves the others."""
        for i in range(self._nvml.nvmlDeviceGetCount()):
            try:
                handle = self._nvml.nvmlDeviceGetHandleByIndex(i)
                yield handle, self._identity(handle)
            except self._nvml.NVMLError as error:
                say(f"GPU {i} is not sampled: NVML says {str(error)!r}")

    def _identity(self, handle: Any) -> dict[str, str | int]:
        uuid, name = self._nvml.nvmlDeviceGetUUID(handle), self._nvml.nvmlDeviceGetName(handle)
        return {m.HW_ID: _text(uuid), m.HW_TYPE: "gpu", m.HW_NAME: _text(name)}

    def sample(self) -> Iterator[Point]:
        """Yield the values of this moment; what a GPU cannot tell is not asked again, what fails is left out."""
        for entry in [*self._readers]:
            handle, identity, reader = entry
            try:
                yield from [*reader(handle, identity)]
            except self._nvml.NVMLError as error:
                if error.value in _GONE_FOR_GOOD:
                    self._readers.remove(entry)
            except AttributeError:  # older versions of pynvml have fewer functions
                self._readers.remove(entry)

    def _utilization(self, handle: Any, gpu: dict[str, str | int]) -> Iterator[Point]:
        percent = self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu
        yield Point(m.HW_GPU_UTILIZATION, percent / 100, attributes_text({**gpu, m.GPU_TASK: "general"}))

    def _memory(self, handle: Any, gpu: dict[str, str | int]) -> Iterator[Point]:
        memory, text = self._nvml.nvmlDeviceGetMemoryInfo(handle), attributes_text(gpu)
        yield Point(m.HW_GPU_MEMORY_USAGE, memory.used, text)
        yield Point(m.HW_GPU_MEMORY_LIMIT, memory.total, text)
        if memory.total:
            yield Point(m.HW_GPU_MEMORY_UTILIZATION, memory.used / memory.total, text)

    def _power(self, handle: Any, gpu: dict[str, str | int]) -> Iterator[Point]:
        yield Point(m.HW_POWER, self._nvml.nvmlDeviceGetPowerUsage(handle) / 1e3, attributes_text(gpu))

    def _energy(self, handle: Any, gpu: dict[str, str | int]) -> Iterator[Point]:
        yield Point(m.HW_ENERGY, self._nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3, attributes_text(gpu))

    def _temperature(self, handle: Any, gpu: dict[str, str | int]) -> Iterator[Point]:
        degrees = self._nvml.nvmlDeviceGetTemperature(handle, self._nvml.NVML_TEMPERATURE_GPU)
        yield Point(m.HW_TEMPERATURE, degrees, attributes_text(gpu))

    def _throttled(self, handle: Any, gpu: dict[str, str | int]) -> Iterator[Point]:
        bits = self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
        for bit, reason in _THROTTLED.items():
            yield Point(m.DL_GPU_THROTTLED, int(bool(bits & bit)), attributes_text({**gpu, m.THROTTLE_REASON: reason}))

    def _io(self, handle: Any, gpu: dict[str, str | int]) -> Iterator[Point]:
        """Yield the bytes over each link that the driver counts."""
        asked = [
            (number, 0 if link == "pcie" else _ALL_LINKS) for link, (fields, _) in _LINKS.items() for number in fields
        ]
        values = iter(self._nvml.nvmlDeviceGetFieldValues(handle, asked))
        for link, (_, unit) in _LINKS.items():
            for direction in _DIRECTIONS:
                field = next(values)
                if field.nvmlReturn == self._nvml.NVML_SUCCESS:
                    text = attributes_text({**gpu, m.NETWORK_DIRECTION: direction, m.GPU_LINK: link})
                    yield Point(m.HW_GPU_IO, self._total(text, field.value.ullVal) * unit, text)

    def _total(self, series: str, value: int) -> int:
        """Return what *series* has counted in all: where a driver's counter begins anew it goes on."""
        last, before = self._counted.get(series, (0, 0))
        before += last if value < last else 0
        self._counted[series] = value, before
        return before + value


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value  # bytes, from older versions of nvidia-ml-py
