"""The worker: it moves partitions through their stages, a thread for each stage, until it stops or gives up."""

import os
import threading
import time
from collections.abc import Iterable
from contextlib import suppress

import numpy as np

from otel_dltrace.pushpull import lateness, trace
from otel_dltrace.pushpull.client import Servers
from otel_dltrace.pushpull.compression import Compressor
from otel_dltrace.pushpull.cutting import Cutter
from otel_dltrace.pushpull.errors import PeerLostError, PushPullError
from otel_dltrace.pushpull.layout import Layout
from otel_dltrace.pushpull.options import Options
from otel_dltrace.pushpull.peers import Peers
from otel_dltrace.pushpull.queues import StageQueue
from otel_dltrace.pushpull.stages import Q, Signal, stage_list, waits
from otel_dltrace.pushpull.tasks import Operation, Task, Tensor
from otel_dltrace.pushpull.trace import PushPull
from otel_dltrace.pushpull.wire import Values, name_bytes
from otel_dltrace.pushpull.work import Work

_PACKING = (Q.COMPRESS, Q.DECOMPRESS)
_PUSH, _PULL = Q.PUSH, Q.PULL  # to read a member of an enum is a tenth of what telling of a stage costs


class Engine:
    """One training process's part in the job, from `start` to `stop`."""

    def __init__(self, layout: Layout, options: Options) -> None:
        self.layout = layout
        self.options = options
        self.error: PushPullError | None = None
        self._lock = threading.RLock()
        self._cutter = Cutter(layout, options)
        self._tensors: dict[str, Tensor] = {}
        self._under_way: set[Operation] = set()
        self._process = os.getpid()
        self._stopped = False
        self._peers = Peers(layout, options, self)
        remote = layout.distributed and layout.is_root
        self._servers = Servers(layout, options, self.fail) if remote else None
        self._work = Work(layout, self._peers, self._servers, self._ended)
        self._queues = self._make_queues()
        self._by_signal = _by_signal(self._queues.values())

    def start(self) -> None:
        """Meet the other local ranks and the servers, and so all other workers.

        Raises:
            PeerLostError: One of them did not come, or does not trust us.
            MismatchError: A server refuses us, for what we say of the job is not what it or other workers say.
        """
        try:
            self._peers.open()
            if self._servers is not None:
                self._servers.open()
                self._peers.served()
            elif self.layout.distributed:
                self._peers.wait_for_root()
            if self.error is not None:
                raise self.error
        except (PushPullError, ValueError) as error:
            if self.error is not None:  # it closes what was just asked, of which gRPC says so with a ValueError
                raise self.error from None
            if isinstance(error, PushPullError):
                self.fail(error)
            raise
        for queue in self._queues.values():
            number = self.options.compress_threads if queue.queue in _PACKING else 1
            for _ in range(number):
                threading.Thread(
                    target=self._loop, args=(queue,), name=f"pushpull-{queue.queue.name}", daemon=True
                ).start()

    def stop(self) -> None:
        """Say goodbye to all others; whatever is under way fails."""
        if self._stopped or self._process != os.getpid():
            return
        self._end(PushPullError("pushpull was shut down"), "")

    def declare(self, name: str, priority: int = 0, compressor: Compressor | None = None) -> Tensor:
        """Give *name* its key: processes of a job declare the same names in the same order.

        Raises:
            MismatchError: No tensor can be called so.
        """
        with self._lock:
            tensor = self._tensors.get(name)
            if tensor is None:
                name_bytes(name)
                tensor = self._tensors[name] = Tensor(name, len(self._tensors), priority, compressor)
            return tensor

    def push_pull(self, tensor: Tensor, values: Values, *, average: bool, initial: Values | None = None) -> Operation:
        """Begin to replace *values* by their sum over all processes of the job, or their mean.

        Args:
            tensor: What `declare` returned.
            values: Flat and contiguous; not to be touched until the operation is done.
            average: Whether to divide by the number of processes.
            initial: With this the key is asynchronous: a server's value, at first *initial*, to which *values*
                are added, and which comes back at once. Without servers it is what *values* are added to.

        Raises:
            PushPullError: The job cannot go on.
            MismatchError: The tensor is not what it was before, or is under way already.
        """
        with self._lock:
            if self.error is not None:
                raise self.error
            self._cutter.settle(tensor, values)
            divisor = self.layout.size if average else 1
            round_ = tensor.rounds
            operation = Operation(tensor, values, divisor, initial is not None, round_)
            operation.tasks = self._cutter.cut(operation)
            operation.remaining = len(operation.tasks)
            self._under_way.add(operation)
            tensor.rounds += 1
        if initial is not None:
            self._initialize(operation, initial)
        self._begin(operation)
        return operation

    def wait(self, operation: Operation) -> None:
        """Return when *operation* is done.

        Raises:
            PushPullError: It cannot be done, or nobody answered within the timeout.
        """
        followed = operation.followed
        if followed is None or operation.done.is_set():
            self._wait(operation)
            return
        start = time.monotonic_ns()
        try:
            self._wait(operation)
        finally:
            followed.waited(start, time.monotonic_ns())

    def poll(self, operation: Operation) -> bool:
        """Return whether *operation* is done or has failed: it does once polled for as long as `wait` waits."""
        if not operation.done.is_set() and lateness.is_late(operation, self.layout, self.options.timeout_s):
            self._give_up(operation)
        return operation.done.is_set()

    def _wait(self, operation: Operation) -> None:
        limit = self.options.timeout_s
        if not operation.done.wait(limit) and not (
            lateness.is_served(operation, self.layout) and operation.done.wait(limit + lateness.SERVER_S)
        ):
            self._give_up(operation)
        if operation.error is not None:
            raise operation.error

    def _give_up(self, operation: Operation) -> None:
        self.fail(PeerLostError(lateness.complaint(operation, self._queues, self.options.timeout_s)))

    def fail(self, error: PushPullError) -> None:
        """Give up, with all that is under way, and tell the others why."""
        self._end(error, str(error))

    def signalled(self, source: int, signal: Signal, key: int, mark: int) -> None:
        """Take in the word of another local rank."""
        for queue in self._by_signal[signal]:
            queue.signalled(source, key, mark)

    def left(self, source: int) -> None:
        """Note that another local rank has shut down."""
        for queue in self._queues.values():
            queue.left(source)

    def _make_queues(self) -> dict[Q, StageQueue]:
        wait = waits(self.layout)
        stages = stage_list(self.layout, compressed=True)
        queues = {stage: StageQueue(stage, wait.get(stage)) for stage in stages}
        if self.options.credit and self.layout.is_signal_root:
            queues[Q.REDUCE].credit = self._cutter.bound * self.options.credit
        return queues

    def _initialize(self, operation: Operation, initial: Values) -> None:
        if not self.layout.distributed:
            if not self.layout.rank:  # nobody keeps the value, all have it: one brings it along
                np.add(operation.values, initial, out=operation.values)
            return
        if self._servers is None or operation.round:
            return
        for task in operation.tasks:
            assert task.server is not None
            request = task.request(self.layout.worker, self.layout.rank, 0)
            self._servers.initialize(task.server, request, initial.view("u1")[task.extent].data)

    def _begin(self, operation: Operation) -> None:
        observer = trace.observer  # read once: it may be gone a moment later
        if observer is not None:
            tensor, now = operation.tensor, time.monotonic_ns()
            followed = observer.push_pull_started(
                tensor.name, tensor.declared_key, operation.round, tensor.nbytes, tensor.dtype, now
            )
            if followed is not None:
                self._follow(operation, followed)
        for task in operation.tasks:
            if operation.stages_followed:
                task.enqueued_ns = time.monotonic_ns()
            self._queues[task.queue].put(task)
        if not operation.tasks:
            self._complete(operation, None, time.monotonic_ns())

    def _follow(self, operation: Operation, followed: PushPull) -> None:
        """Have *followed* told of *operation*, at once of its end if the engine has given up in the meantime."""
        with self._lock:
            operation.followed = followed
            is_over = operation not in self._under_way
        if is_over:
            followed.completed(time.monotonic_ns(), self.error)
        elif followed.follows_stages:
            operation.stages_followed = dict.fromkeys(range(len(operation.tasks)), followed)

    def _loop(self, queue: StageQueue) -> None:
        """Do one stage's work until the engine stops."""
        do = self._work.table[queue.queue]
        try:
            while True:  # a condition at its end would keep Python 3.11 from specializing the loop, which runs for ever
                task = queue.take()
                if task is None:
                    return
                if task.operation.stages_followed:
                    task.started_ns = time.monotonic_ns()
                if do(task):
                    self._proceed(task)
        except PushPullError as error:
            self.fail(error)
        except Exception as error:  # noqa: BLE001 - a stage's bug has to reach whoever waits for the tensor
            self.fail(PushPullError(f"{queue.queue.name} failed: {type(error).__name__}: {error}"))

    def _ended(self, task: Task, error: PushPullError | None) -> None:
        """Go on with a partition that a server has answered for."""
        if error is not None:
            self.fail(error)
        elif self.error is None:
            self._proceed(task)

    def _proceed(self, task: Task) -> None:
        """Move a partition to its next stage, or out."""
        operation, queue = task.operation, task.queue
        if operation.stages_followed:
            now, enqueued = time.monotonic_ns(), task.enqueued_ns
            # Taken only now that its end is known: no stage outlasts an operation that is cut off in the meantime.
            followed = operation.stages_followed.pop(task.partition, None)
            if followed is not None:
                server = task.server if queue is _PUSH or queue is _PULL else None
                followed.stage_finished(task.partition, queue, task.nbytes, server, enqueued, task.started_ns, now)
                task.enqueued_ns, task.started_ns = now, 0  # into the next stage's queue
                operation.stages_followed[task.partition] = followed
        self._queues[queue].finished(task)
        if task.at + 1 < len(operation.tensor.stages):
            task.at += 1
            self._queues[task.queue].put(task)
            return
        task.payload, task.through = b"", True
        with self._lock:
            operation.remaining -= 1
            last = not operation.remaining
        if last:
            self._complete(operation, None, time.monotonic_ns())

    def _complete(self, operation: Operation, error: PushPullError | None, end: int) -> None:
        with self._lock:
            if operation not in self._under_way:
                return  # the engine gave up in the meantime
            self._under_way.remove(operation)
            followed = operation.followed
        operation.error = error
        if error is not None:
            _cut_off(operation, end)
        tensor = operation.tensor
        if error is None and self.layout.is_root and tensor.buffers is not None:
            tensor.buffers.unlink()
        if followed is not None:
            followed.completed(end, error)
        tensor.busy = False
        operation.done.set()

    def _end(self, error: PushPullError, reason: str) -> None:
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
            self.error = error
            open_ones = list(self._under_way)
        if isinstance(error, PeerLostError) and self.options.bereft is not None:
            with suppress(OSError):
                self.options.bereft.touch()
        for queue in self._queues.values():
            queue.close()
        end = time.monotonic_ns()  # before that of whoever hears of it from us
        # First tell the others: whoever waits here may end the process as soon as it learns of the error.
        self._peers.close(reason)
        if self._servers is not None and reason:
            # On a thread of its own: we may be on one of gRPC's, which has to go on for the goodbye to get through.
            threading.Thread(target=self._servers.close, args=(reason,), name="pushpull-goodbye").start()
        elif self._servers is not None:
            self._servers.close()  # here: Python 3.12 starts no thread once the program has ended
        for operation in open_ones:
            self._complete(operation, error, end)


def _by_signal(queues: Iterable[StageQueue]) -> dict[Signal, list[StageQueue]]:
    """Return whom each signal goes to: a compressed tensor waits in another queue than others."""
    table: dict[Signal, list[StageQueue]] = {}
    for queue in queues:
        if queue.wait:
            table.setdefault(queue.wait.signal, []).append(queue)
    return table


def _cut_off(operation: Operation, end: int) -> None:
    """Tell of the requests of *operation* that are not answered any more: what a server did for them is below these.

    No stage is told of from then on, but for one that is just being told of: it ended before its operation.
    """
    for task in operation.tasks:
        followed = operation.stages_followed.pop(task.partition, None)
        # Not of a partition that is still in the stage's queue.
        if followed is not None and task.queue in (_PUSH, _PULL) and task.started_ns:
            times = task.enqueued_ns, task.started_ns, max(task.started_ns, end)
            followed.stage_finished(task.partition, task.queue, task.nbytes, task.server, *times)
