"""Operations that have been launched and not waited for: when each of them is over, found out cheaply."""

import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import repeat
from time import monotonic_ns
from typing import Any

from otel_dltrace.instrument._torch.callbacks import called
from otel_dltrace.instrument._torch.groups import c10d
from otel_dltrace.instrument._torch.kinds import Kinds
from otel_dltrace.instrument._torch.pending import Pending
from otel_dltrace.instrument._torch.recorder import recorded_of
from otel_dltrace.model.semconv import PRECISE_NS, Flag, Level, Source
from otel_dltrace.record.tracer import Tracer

_ASYNC = int(Flag.ASYNC)
"""To ask a flag of an enumeration costs 2 us."""
LOOKED_AT = 16
"""How many are looked at before the program blocks: those that it launched first."""


Wait = tuple[Pending, Any, int, bool]
"""A wait that has begun: for what, on which work, when, and whether it was done by then."""


def _bare(method: Any) -> Any:
    """Return *method* without the site around it: what we ask is not what the program asks."""
    return getattr(method, "__wrapped__", method)


class Works:
    """The works under way of one process."""

    def __init__(self, tracer: Tracer, wait: int) -> None:
        self._recorder, self._steps, self._wait = tracer.recorder, tracer.steps, wait
        self._recorded = recorded_of(tracer)
        self._pending: weakref.WeakKeyDictionary[Any, Pending] = weakref.WeakKeyDictionary()
        self._by_storage: dict[int, Pending] = {}
        self._in_block: dict[str, Pending] = {}
        self.finished: deque[Pending] = deque()
        self.unwatched: deque[tuple[Any, Pending]] = deque()
        self._kinds = Kinds()
        self._silent: set[int] = set()
        work = c10d().Work
        self._is_completed: Callable[[Any], bool] = _bare(work.is_completed)
        self._get_future: Callable[[Any], Any] = _bare(work.get_future)

    # -- launched ---------------------------------------------------------------------------------

    def launched(self, work: Any, pending: Pending, group: Any) -> None:
        """Know that *work* of *group* is under way."""
        pending.group = group
        self._pending[work] = pending
        operation = pending.operation
        if pending.source != Source.HOST_DONE:
            # A device's future is complete as soon as the work is enqueued, and a callback on it
            # would make another stream wait for the transfer.
            if pending.mark:
                operation.flags |= Flag.DEVICE
            pending.close(pending.seen)
        elif not pending.pollable or operation.descriptor in self._silent:
            pending.pollable, pending.group = False, None
        elif self._kinds.wants_callback(operation):
            self._watch(partial(self._get_future, work), pending)
        else:
            self.unwatched.append((work, pending))

    def launched_future(self, future: Any, pending: Pending, group: Any) -> None:
        """Know that an operation of *group* is under way of which there is a future alone."""
        pending.group = group
        if pending.source != Source.HOST_DONE:
            pending.close(pending.seen)
        else:
            self._watch(lambda: future, pending)

    def launched_tensor(self, tensors: list[Any], pending: Pending) -> None:
        """Know that the results *tensors* of a functional collective are under way."""
        if pending.source != Source.HOST_DONE:
            pending.close(pending.seen)
            return
        if len(self._by_storage) > 1 << 10:
            del self._by_storage[next(iter(self._by_storage))]  # nobody waits for it: it ends as issued
        for tensor in tensors:
            self._by_storage[tensor.untyped_storage()._cdata] = pending

    def launched_in_block(self, pending: Pending, group: Any) -> None:
        """Know that *pending* is in a block of *group*, which launches all at once: its work is that of the last one.

        The one before it ends here, as issued.
        """
        self._in_block[group.group_name] = pending

    def block_ended(self, group: Any, work: Any) -> None:
        """Know that a block of *group* has launched what is in it; *work* is None where that was nothing."""
        pending = self._in_block.pop(group.group_name, None)
        if pending is not None and work is not None:
            self.launched(work, pending, group)

    def _watch(self, future: Callable[[], Any], pending: Pending) -> None:
        try:
            to_watch = future()
        except RuntimeError:  # Gloo's reduce_scatter has none
            self._silent.add(pending.operation.descriptor)
            pending.pollable, pending.group = False, None
            return
        pending.watched = True
        self._kinds.in_flight += 1
        group, pending.group = pending.group, None
        called(to_watch.add_done_callback, self._callback_of(pending), group)

    def _callback_of(self, pending: Pending) -> Callable[[Any], Any]:
        """Return what sets when *pending* was done, and has others write it.

        It runs on a thread of the backend, which gets a new Python thread state for each call: a function in Python
        would map pages for its frames there each time, so it is C from end to end. Without the GIL it would lease a
        chunk for every record, too.
        """
        this = repeat(pending)
        when = map(setattr, this, repeat("done"), iter(monotonic_ns, None))
        what = zip(when, map(self.finished.append, this), strict=False)
        return partial(next, what)

    # -- looked at ----------------------------------------------------------------------------------

    def flush(self) -> None:
        """Write the operations that were done before anybody waited for them."""
        self._write_finished()
        while self.unwatched:
            with suppress(IndexError):
                work, pending = self.unwatched.popleft()
                if not self._is_over(work, pending):
                    self.unwatched.appendleft((work, pending))
                    return

    def _write_finished(self) -> None:
        while self.finished:
            with suppress(IndexError):  # another thread was quicker
                pending = self.finished.popleft()
                self._kinds.in_flight -= 1
                if not pending.closed:
                    pending.close(pending.done)
                    self._kinds.learn(pending.operation, pending.done)

    def _look(self) -> None:
        """See what is done before the program blocks: what ends later ends while nothing is computed."""
        self._write_finished()
        for work, pending in list(self.unwatched)[:LOOKED_AT]:
            self._is_over(work, pending)

    def step_ends(self) -> None:
        """Have those that nobody has waited for in this step say themselves when they are done."""
        self.flush()
        for _ in range(len(self.unwatched)):
            with suppress(IndexError):
                work, pending = self.unwatched.popleft()
                if not self._is_over(work, pending):
                    self._watch(partial(self._get_future, work), pending)

    def leave(self) -> None:
        """Write what is done, and what is not known to be: nobody will wait for it any more."""
        self.flush()
        self._by_storage.clear()
        self._in_block.clear()
        for pending in list(self._pending.values()):
            if not pending.pollable:
                pending.give_up()

    def _is_over(self, work: Any, pending: Pending) -> bool:
        if not pending.closed:
            self.answered(pending, self._is_completed(work))
        return pending.closed

    def asked(self, work: Any) -> Pending | None:
        """Return what *work* is doing, if it is open and has no callback."""
        pending = self._pending.get(work) if self._pending else None
        return None if pending is None or pending.closed or pending.watched or not pending.pollable else pending

    def answered(self, pending: Pending, completed: bool) -> None:
        """Know that the program, or we, have asked just now whether *pending* is done."""
        now = monotonic_ns()
        if not completed:
            pending.seen = now
            return
        self._kinds.learn(pending.operation, pending.seen, now)
        pending.close_seen(now)

    def given_future(self, pending: Pending, future: Any) -> None:
        """Know that the program has *future* to wait with: it says the end."""
        if not pending.watched:
            self._watch(lambda: future, pending)

    # -- waited for -----------------------------------------------------------------------------------

    def wait_begins(self, work: Any) -> Wait | None:
        """Return the wait for *work* that begins; None where it is none of ours, or over."""
        pending = self._pending.pop(work, None) if self._pending else None
        if pending is None or (pending.closed and pending.source == Source.HOST_DONE):
            return None
        # Of a closed one nobody asks: the question alone would break a graph that the program captures.
        completed = pending.closed or bool(pending.done) or (pending.pollable and self._is_completed(work))
        if not completed and (self.unwatched or self.finished):
            self._look()
        if pending.mark:
            pending.asked = self._steps.mark_operation()
        return pending, work, monotonic_ns(), completed

    def tensor_wait_begins(self, tensor: Any) -> Wait | None:
        """Return the wait for a result of a functional collective that begins."""
        if not self._by_storage:
            return None
        pending = self._by_storage.pop(tensor.untyped_storage()._cdata, None)
        return None if pending is None or pending.closed else (pending, tensor, monotonic_ns(), False)

    def _succeeded(self, pending: Pending, work: Any) -> None:
        """Learn what only a wait that has succeeded tells."""
        device, operation = self._steps.device, pending.operation
        if pending.asked is not None and device is not None:
            is_followed = device.waited(operation.number, operation.step, pending.mark, pending.asked)
            if is_followed:
                self._recorded.knows(operation.number)
        if pending.settle is not None:
            pending.settle(pending, work)

    def waited(self, wait: Wait, error: BaseException | None = None) -> None:
        """End what was waited for."""
        end = monotonic_ns()
        pending, work, start, completed = wait
        operation = pending.operation
        if error is None and (pending.asked is not None or pending.settle is not None):
            self._succeeded(pending, work)
        if operation.flags & _ASYNC:
            number = self._failed(error, operation.step) if error is not None else 0
            self._recorder.span(
                self._wait,
                Level.PHASE,
                start,
                end,
                parent=operation.number,
                flags=Flag.ERROR if number else 0,
                number=number,
                step=operation.step,
            )
        if not completed:
            self._kinds.resumed = end
        if pending.closed:
            return
        if pending.pollable:
            since, now = (pending.done or pending.seen, start) if completed else (end, end)
            self._kinds.learn(operation, since, now)
        if error is not None or pending.done:
            pending.close(pending.done or end, error=error)
        elif completed:
            pending.close_seen(start)
        elif pending.pollable or end - start > PRECISE_NS:
            pending.close(end)
        else:
            pending.close_seen(end)
        self.flush()

    def _failed(self, error: BaseException, step: int) -> int:
        """Return the number of a wait that has failed with *error*."""
        number = self._recorder.number()
        self._recorder.error(number, Level.PHASE, error, step)
        return number
