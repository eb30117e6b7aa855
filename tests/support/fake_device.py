"""A device that is none: with a clock of its own, one queue of work, and events as PyTorch's are."""

import struct
from dataclasses import dataclass, field

import pytest

LOOK_NS = 400
"""What it takes the host to ask anything."""


def needs_a_build_without_devices() -> None:
    """Skip the test where torch has the module that it puts a device of its own in the place of."""
    if pytest.importorskip("torch").version.cuda:
        pytest.skip("this build of torch has the devices that are made up here")


def as_float32(value: float) -> float:
    """Return *value* as precisely as a device tells elapsed times."""
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded


@dataclass
class FakeDevice:
    """A device; the host's time moves by what the test says, and a little with every question.

    *offset* (ns) and *drift* are those of the device's clock against the host's.
    """

    offset: int = 0
    drift: float = 0.0
    now: int = 10**12
    busy_until: int = 0
    current: int | None = 0
    is_used: bool = True
    is_capturing: bool = False
    breaks: bool = False
    latency: int = 3_000
    events: list["FakeEvent"] = field(default_factory=list)

    def clock(self) -> int:
        """Return the host's time."""
        self.now += LOOK_NS
        return self.now

    def ask(self, ms: float) -> None:
        """Have the device do something that takes *ms*, after what it was asked for before."""
        self.busy_until = max(self.now, self.busy_until) + int(ms * 1e6)

    def own_time(self, host: int) -> float:
        """Return what the device's clock says at the host's time *host*."""
        return (host - self.offset) * (1 + self.drift)

    def is_open(self) -> bool:
        """Return whether events may be used."""
        return self.is_used and not self.is_capturing

    def meet(self, model: set[int]) -> None:
        """Know that a *model* is on these devices."""

    def index(self) -> int | None:
        """Return which device is current."""
        return self.current

    def event(self) -> "FakeEvent":
        """Return a new event."""
        event = FakeEvent(self)
        self.events.append(event)
        return event

    def aside(self, index: int) -> int:
        """Return a stream of the device *index* in which nothing else runs: that device."""
        return index


class FakeEvent:
    """An event of a `FakeDevice`; there is no way to wait for it."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.at = self.index = -1

    def record(self, stream: int | None = None) -> None:
        """Note the time when the device comes here; it stays with its first device."""
        device = self.device
        assert not device.is_capturing
        here = device.current if stream is None else stream
        if self.index not in (-1, here):
            raise RuntimeError(f"Event device {self.index} does not match recording stream's device {here}.")
        self.index = here
        if device.breaks:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        now = device.clock()
        self.at = now + device.latency if stream is not None else max(now, device.busy_until)

    def query(self) -> bool:
        """Return whether the device has come here."""
        assert not self.device.is_capturing
        return self.device.clock() >= self.at >= 0

    def elapsed_time(self, end_event: "FakeEvent") -> float:
        """Return the ms to *end_event*."""
        if not (self.query() and end_event.query()):
            raise RuntimeError("device not ready")
        return as_float32((self.device.own_time(end_event.at) - self.device.own_time(self.at)) / 1e6)
