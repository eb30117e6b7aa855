"""What each stage does with a partition: one method per queue type, and the table of them."""

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from otel_dltrace.model.queue_types import QueueType
from otel_dltrace.pushpull.buffers import Buffers, Bytes, share
from otel_dltrace.pushpull.client import Servers
from otel_dltrace.pushpull.compression import NONE, unpack
from otel_dltrace.pushpull.errors import PushPullError
from otel_dltrace.pushpull.layout import Layout
from otel_dltrace.pushpull.peers import Peers
from otel_dltrace.pushpull.stages import Signal
from otel_dltrace.pushpull.tasks import Task
from otel_dltrace.pushpull.wire import Values

Ended = Callable[[Task, PushPullError | None], None]


class Work:
    """The stages of one rank. Each returns whether the partition is through; else it tells *ended* later."""

    def __init__(self, layout: Layout, peers: Peers, servers: Servers | None, ended: Ended) -> None:
        self.layout = layout
        self.peers = peers
        self.servers = servers
        self.ended = ended
        me = layout.local_rank
        self._members = frozenset(layout.members) - {me}
        self._others = frozenset(range(layout.local_size)) - {me}
        self.table: Final[dict[QueueType, Callable[[Task], bool]]] = {
            QueueType.COORDINATE_REDUCE: self._coordinate_reduce,
            QueueType.REDUCE: self._reduce,
            QueueType.COPYD2H: self._copy_to_host,
            QueueType.PCIE_REDUCE: self._reduce_over_switches,
            QueueType.COORDINATE_PUSH: self._coordinate_push,
            QueueType.COMPRESS: self._compress,
            QueueType.PUSH: self._push,
            QueueType.PULL: self._pull,
            QueueType.DECOMPRESS: self._decompress,
            QueueType.COPYH2D: self._copy_from_host,
            QueueType.COORDINATE_BROADCAST: self._coordinate_broadcast,
            QueueType.BROADCAST: self._broadcast,
        }

    def _coordinate_reduce(self, task: Task) -> bool:
        """Let the others on the switch read our values, and tell its director so."""
        self._show(task)
        self._signal(Signal.REDUCE_READY, task, frozenset({self.layout.signal_root}))
        return True

    def _reduce(self, task: Task) -> bool:
        """Sum our share of the partition over the switch."""
        if self.layout.is_signal_root and self._members:
            self._show(task)
            self._signal(Signal.DO_REDUCE, task, self._members)
        buffers = _buffers(task)
        target = self._part(buffers.outputs[self.layout.local_rank], task)
        if not self._members:
            target[:] = _own(task)
            return True
        first, *rest = (self._part(buffers.inputs[rank], task) for rank in self.layout.members)
        target[:] = first
        for values in rest:
            _add(target, values, task)
        return True

    def _copy_to_host(self, task: Task) -> bool:
        """Put our share of the switch's sum where the root finds it."""
        buffers = _buffers(task)
        self._part(buffers.sums[self.layout.switch], task)[:] = self._part(
            buffers.outputs[self.layout.local_rank], task
        )
        return True

    def _reduce_over_switches(self, task: Task) -> bool:
        """Add the other switches' sums to ours, on the root's switch; elsewhere say that ours is there."""
        layout = self.layout
        last = layout.num_switches - 1
        if layout.switch != last:
            twin = last * layout.switch_size + layout.place
            self._signal(Signal.PCIE_REDUCE_READY, task, frozenset({twin}))
            return True
        *others, target = (self._part(part, task) for part in _buffers(task).sums)
        for values in others:
            _add(target, values, task)
        return True

    def _coordinate_push(self, task: Task) -> bool:
        self._signal(Signal.PUSH_READY, task, frozenset({self.layout.root}))
        return True

    def _compress(self, task: Task) -> bool:
        task.payload = task.operation.tensor.packers[task.partition].pack(_sum(task).view(task.operation.tensor.dtype))
        return True

    def _push(self, task: Task) -> bool:
        if self.servers is None or task.server is None:
            _result(task)[:] = _sum(task)
            return True
        request = task.request(self.layout.worker, self.layout.rank, _packing(task))
        payload = task.payload or _sum(task).data
        extra = _metadata(task)
        self.servers.push(task.server, request, payload, extra, lambda _, error: self.ended(task, error))
        return False

    def _pull(self, task: Task) -> bool:
        assert self.servers is not None
        assert task.server is not None
        request = task.request(self.layout.worker, self.layout.rank, _packing(task))

        def came(answer: bytes, error: PushPullError | None) -> None:
            if error is None:
                task.payload = answer
                if answer[0] == NONE:
                    _result(task)[:] = np.frombuffer(answer, np.uint8, offset=1)
            self.ended(task, error)

        self.servers.pull(task.server, request, _metadata(task), came)
        return False

    def _decompress(self, task: Task) -> bool:
        request = task.request(self.layout.worker, self.layout.rank, task.payload[0])
        _result(task).view(request.dtype)[:] = unpack(request, memoryview(task.payload)[1:])
        return True

    def _copy_from_host(self, task: Task) -> bool:
        """Take our share of what came back."""
        if self.layout.is_root:
            self._signal(Signal.DO_COPYH2D, task, self._others)
        buffers = _buffers(task)
        self._part(buffers.outputs[self.layout.local_rank], task)[:] = self._part(buffers.result, task)
        return True

    def _coordinate_broadcast(self, task: Task) -> bool:
        self._signal(Signal.BCAST_READY, task, frozenset({self.layout.signal_root}))
        return True

    def _broadcast(self, task: Task) -> bool:
        """Gather all shares of the switch into the tensor, and make its mean of the sum."""
        if self.layout.is_signal_root:
            self._signal(Signal.DO_BROADCAST, task, self._members)
        own, itemsize = _own(task), task.operation.values.itemsize
        for place, rank in enumerate(self.layout.members):
            lane = share(task.nbytes, place, self.layout.switch_size, itemsize)
            own[lane] = _buffers(task).outputs[rank][task.extent][lane]
        _divide(own.view(task.operation.tensor.dtype), task.operation.divisor)
        return True

    def _show(self, task: Task) -> None:
        _buffers(task).inputs[self.layout.local_rank][task.extent] = _own(task)

    def _part(self, memory: Bytes, task: Task) -> Bytes:
        """Return our share of the partition in *memory*."""
        itemsize = task.operation.values.itemsize
        return memory[task.extent][share(task.nbytes, self.layout.place, self.layout.switch_size, itemsize)]

    def _signal(self, signal: Signal, task: Task, receivers: frozenset[int]) -> None:
        self.peers.send(signal, task.key, task.mark, receivers)


def _buffers(task: Task) -> Buffers:
    buffers = task.operation.tensor.buffers
    assert buffers is not None
    return buffers


def _own(task: Task) -> Bytes:
    """Return the partition within the user's tensor."""
    return task.operation.values.view(np.uint8)[task.extent]


def _sum(task: Task) -> Bytes:
    """Return the partition summed over all local ranks: the root's switch comes last."""
    return _buffers(task).sums[-1][task.extent]


def _result(task: Task) -> Bytes:
    return _buffers(task).result[task.extent]


def _packing(task: Task) -> int:
    packers = task.operation.tensor.packers
    return packers[task.partition].packing if packers else NONE


def _metadata(task: Task) -> Mapping[str, str]:
    """Return what the observer wants to send along."""
    followed = task.operation.followed
    return {} if followed is None else followed.request_sending(task.partition)


def _add(target: Bytes, values: Bytes, task: Task) -> None:
    dtype = task.operation.tensor.dtype
    total = target.view(dtype)
    with np.errstate(over="ignore", invalid="ignore"):  # an infinite gradient is for the GradScaler to find
        np.add(total, values.view(dtype), out=total)


def _divide(values: Values, divisor: int) -> None:
    if divisor > 1:
        divide = np.divide if values.dtype.kind == "f" else np.floor_divide
        divide(values, divisor, out=values)
