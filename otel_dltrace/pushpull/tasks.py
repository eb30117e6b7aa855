"""What is under way: a declared tensor, one push_pull of it, and the partitions of that."""

import threading
from dataclasses import dataclass, field

from otel_dltrace.model.queue_types import QueueType
from otel_dltrace.pushpull.buffers import Buffers
from otel_dltrace.pushpull.compression import Compressor, Packer
from otel_dltrace.pushpull.errors import MismatchError, PushPullError, shown
from otel_dltrace.pushpull.trace import PushPull
from otel_dltrace.pushpull.wire import Request, Values


@dataclass(slots=True, eq=False)
class Tensor:
    """A tensor by its name. What follows from its size is known once it was pushed."""

    name: str
    declared_key: int
    priority: int = 0
    compressor: Compressor | None = None
    dtype: str = ""
    nbytes: int = 0
    mark: int = 0
    stages: tuple[QueueType, ...] = ()
    buffers: Buffers | None = None
    packers: list[Packer] = field(default_factory=list)
    rounds: int = 0
    busy: bool = False

    def compress(self, compressor: Compressor) -> None:
        """Have it compressed by *compressor* from its first push_pull on.

        Raises:
            MismatchError: It was pushed otherwise: what that left out, and the others' packing, cannot be changed.
        """
        if self.buffers is not None and self.compressor != compressor:
            raise MismatchError(f"{shown(self.name)} was pushed with another compression; use another name")
        self.compressor = compressor


@dataclass(slots=True, eq=False)
class Operation:
    """One push_pull: *values* are pushed, and become what comes back, divided by *divisor*."""

    tensor: Tensor
    values: Values
    divisor: int
    asynchronous: bool
    round: int
    tasks: "list[Task]" = field(default_factory=list)
    remaining: int = 0
    error: PushPullError | None = None
    done: threading.Event = field(default_factory=threading.Event)
    asked: float = 0.0
    """When somebody last asked in vain whether it is done, as `time.monotonic` counts."""
    awaited: float = 0.0
    """How many seconds somebody has been asking."""
    followed: PushPull | None = None
    """By whom it is observed."""
    stages_followed: dict[int, PushPull] = field(default_factory=dict)
    """By whom the stages of each partition are; whoever tells of one takes it out meanwhile, so it is told of once."""


@dataclass(slots=True, eq=False)
class Task:
    """One partition on its way through its stages."""

    operation: Operation
    partition: int
    key: int
    offset: int
    nbytes: int
    server: int | None
    at: int = 0
    """Index of the stage that it is in, or in the queue of."""
    through: bool = False
    payload: bytes = b""
    """What is packed for the wire, or came packed from it."""
    enqueued_ns: int = 0
    started_ns: int = 0
    """When it left the stage's queue; 0 while it is in there, for a clock may show one time for both."""

    @property
    def name(self) -> str:
        """The tensor's name."""
        return self.operation.tensor.name

    @property
    def mark(self) -> int:
        """The tensor's fingerprint."""
        return self.operation.tensor.mark

    @property
    def priority(self) -> int:
        """The tensor's priority."""
        return self.operation.tensor.priority

    @property
    def queue(self) -> QueueType:
        """The stage that it is in, or in the queue of."""
        return self.operation.tensor.stages[self.at]

    @property
    def extent(self) -> slice:
        """Its bytes within the tensor."""
        return slice(self.offset, self.offset + self.nbytes)

    def request(self, worker: int, rank: int, packing: int) -> Request:
        """Return what a server has to know about it."""
        operation = self.operation
        return Request(
            self.key,
            operation.round,
            worker,
            rank,
            operation.tensor.name,
            operation.tensor.dtype,
            self.nbytes,
            packing,
            operation.asynchronous,
        )
