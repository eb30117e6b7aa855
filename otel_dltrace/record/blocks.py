"""What a program marks itself, as blocks: steps, phases, operations."""

import struct
from contextvars import Token
from time import monotonic_ns
from types import TracebackType
from typing import Any, TypeVar

from otel_dltrace.model.identity import NO_STEP, NO_USER_STEP
from otel_dltrace.model.semconv import DEVICE_STAGES, EXIT, Flag, Level
from otel_dltrace.record.guard import failed, guarded
from otel_dltrace.record.operation import Open, Operation, end_before_inner, open_span, step_within
from otel_dltrace.record.packing import PHASE_SPAN, pack_phase, whole
from otel_dltrace.record.recorder import Recorder
from otel_dltrace.record.tracer import Tracer, live

# Plain ints: reading a member of an enum costs a tenth of a record.
_PHASE, _ERROR, _M32 = int(Level.PHASE), int(Flag.ERROR), 0xFFFF_FFFF
_NOWHERE = -1  # no step
_SMALL = (1 << 30) - 1  # CPython compares ints up to here at once, and the others by a call
_error = (struct.error, TypeError)  # the second is that of an array, which is an index only where it has one number
State = tuple[dict[str, Any] | None, dict[str, Any]]
"""What is copied and pickled of a block, which may be a part of a model: a subclass's own, and ours."""
_Step = TypeVar("_Step", bound="step")
_Phase = TypeVar("_Phase", bound="phase")
_Operation = TypeVar("_Operation", bound="operation")
_NO_FAILURES = (GeneratorExit, StopIteration, StopAsyncIteration)
# Bound here: looking the three up on the variable costs a tenth of a phase.
_get_open, _set_open, _reset_open = open_span.get, open_span.set, open_span.reset

ask_in_graph = _get_open
"""The call by which a block learns, at no cost, that ``torch.compile`` looks into it: there it gives `IN_GRAPH`."""
IN_GRAPH = object()
"""In a graph that is being compiled a block marks nothing, so that the graph stays whole."""


class step:  # noqa: N801  -- used as a context manager, named as one
    """Make the enclosed block one training step, in loops of your own.

    One inside another is a part of it, and its number and batch size count for nothing.

    Args:
        number: Your own number of the step (``dl.step.user``); the ordinal counts by itself.
        batch_size: Samples that it trains on, where no DataLoader tells.
        epoch: Your number of the pass over the data (``dl.epoch``), where no DataLoader tells; it holds until another.
    """

    __slots__ = ("_batch_size", "_epoch", "_number", "_tracer")

    def __init__(self, number: int | None = None, *, batch_size: int = 0, epoch: int | None = None) -> None:
        self._number, self._batch_size, self._epoch = number, batch_size, epoch
        self._tracer: Tracer | None = None

    def __getstate__(self) -> State:
        """Be copied and pickled as one that has not been entered."""
        return _state(self, "_number", "_batch_size", "_epoch", _tracer=None)

    def __enter__(self: _Step) -> _Step:
        """Begin the step."""
        try:
            tracer = live.tracer
            if tracer is not None and _get_open() is IN_GRAPH:
                tracer = None
            self._tracer = tracer  # it ends what it began, whatever is switched on in between
            if tracer is not None:
                self._tell(tracer)
                number = None if self._number is None else whole(self._number, NO_USER_STEP)
                tracer.steps.begin_own(number, whole(self._batch_size))
        except Exception as broken:  # noqa: BLE001  -- whoever takes the block by `as` has it all the same
            failed("step", broken)
        return self

    @guarded
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the step; an error of the block passes through and is noted."""
        if self._tracer is not None:
            self._tell(self._tracer)  # a batch that was fetched in it may have begun another epoch
            self._tracer.steps.end_own(_failure(error))

    def _tell(self, tracer: Tracer) -> None:
        if self._epoch is not None:
            tracer.steps.epoch = whole(self._epoch, -1)


def _state(block: object, *kept: str, **unentered: Any) -> State:
    return getattr(block, "__dict__", None), {name: getattr(block, name) for name in kept} | unentered


def _failure(error: BaseException | None) -> BaseException | None:
    """Return *error* if it is one: others end a generator, a loop, or a program in order."""
    is_end = isinstance(error, SystemExit) and not error.code
    return None if is_end or isinstance(error, _NO_FAILURES) else error


class phase:  # noqa: N801
    """Record the enclosed block as a phase of the current step (or operation).

    A name that is one of the stages (``to_device``, ``reduce_metrics``, ...) counts as that stage. One object
    may be entered again once it is over; blocks inside one another, or on several threads at once, need an object each.

    Args:
        name: A name of few kinds, such as ``rollout``: it becomes the span's name.
        size: Bytes moved, if any.
    """

    __slots__ = ("_mark", "_name", "_recorder", "descriptor", "number", "parent", "size", "start", "step", "token")
    _recorder: Recorder | None
    token: "Token[Open | None] | None"

    # Not by keyword alone: filling in what such a one is costs a hundredth of a phase.
    def __init__(self, name: str, size: int = 0) -> None:
        self._name = name
        self.size = size

    def __getstate__(self) -> State:
        """Be copied and pickled as one that has not been entered."""
        return _state(self, "_name", "size")

    # Both inline what `guarded` does, and the end what `Recorder.span` does: frames are a part of a phase that can be
    # seen. `parent` is the parent's number and, above its 32 bits, the occurrence, as they lie in the record.
    # Without a recorder it is a stage, or nothing: then `start` is 0.

    def __enter__(self: _Phase) -> _Phase:  # noqa: C901  -- flat: see above
        """Begin the phase."""
        tracer = live.tracer
        if tracer is None:
            self._recorder, self.start = None, 0
            return self
        outer = _get_open()
        if outer is IN_GRAPH:
            self._recorder, self.start = None, 0
            return self
        self._recorder = recorder = tracer.recorder
        self.number = 0  # one that is entered again is another span
        try:
            try:
                self.descriptor = descriptor = tracer.phases[self._name]
            except KeyError:
                self.descriptor = descriptor = tracer.phase_descriptor(self._name)
            if descriptor >= 0:
                if recorder.level < _PHASE:
                    self._recorder, self.start = None, 0
                    return self
                self.step = now = recorder.step
                self.parent = 0
                if outer is not None:
                    if outer.step != now and not tracer.steps.trains_here():
                        self.step = now = step_within(outer, now)
                    if outer.step == now:
                        self.parent = outer.drawn()
                if now > _SMALL and now == NO_STEP and not self.parent:
                    # It is a trace of its own, which all ranks name by its name and how often that came (contract 4).
                    self.parent = next(tracer.turns[self._name]) << 32
                self.start = monotonic_ns()  # before it is open: a signal's handler may begin what is below it
                self.token = _set_open(self)
            else:
                self._recorder = None
                self._mark = tracer.steps.mark() if self._name in DEVICE_STAGES else None
                self.start = start = monotonic_ns()
                if tracer.steps.trains_here():
                    tracer.steps.blocks.append(start)
        except Exception as broken:  # noqa: BLE001  -- see above
            self._recorder, self.start = None, 0
            failed("phase", broken)
        return self

    def drawn(self) -> int:
        """Return the span's number, drawn when the first child asks: most phases have none.

        Outside any step the children may go out before the phase is over: its BEGIN tells in which trace they are.
        """
        recorder = self._recorder
        if not self.number and recorder is not None:
            self.number = recorder.number()
            if self.step == NO_STEP:
                parent, seq = self.parent & _M32, self.parent >> 32
                recorder.begin(
                    self.descriptor, _PHASE, self.start, self.size, parent, seq, step=NO_STEP, number=self.number
                )
        return self.number

    def __exit__(  # noqa: C901, PLR0912  -- flat: see above
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the phase; an error of the block passes through and is noted."""
        try:
            recorder = self._recorder
        except AttributeError:
            return  # it was never entered
        if recorder is None:
            if self.start:
                self._end_stage(_failure(error))
            return
        end = monotonic_ns()
        try:
            drawn = self.number
            try:
                if error is not None and _failure(error) is not None:
                    recorder.error(self.drawn(), _PHASE, error, self.step)
                    self._write(recorder, end, self.number, _ERROR)
                    return
                try:
                    lane = recorder.local.lane
                except AttributeError:
                    lane = recorder.new_lane()
                # Kept: a task that began in the block may go on after it, and ask for its parent.
                self.number = number = drawn or next(lane.numbers, 0) or recorder.next_number(lane)
                chunk = lane.chunk
                slots, lease, buffer, _ = chunk
                offset = next(slots, 0)
                if offset and lane.chunk is chunk:
                    try:
                        pack_phase(
                            buffer,
                            offset,
                            number,
                            self.step,
                            self.descriptor,
                            PHASE_SPAN,
                            self.start,
                            end,
                            self.size,
                            self.parent,
                            lease,
                        )
                    except _error:
                        if not recorder.spoil(offset, lease):
                            return
                    else:
                        return
                self._write(recorder, end, number)
            finally:
                try:
                    if drawn and _get_open() is not self:
                        end_before_inner(self)
                    else:
                        _reset_open(self.token)  # type: ignore[arg-type]  # None raises
                except (ValueError, TypeError):
                    self._end_elsewhere()
        except Exception as broken:  # noqa: BLE001  -- see above
            failed("phase", broken)

    def _write(self, recorder: Recorder, end: int, number: int, flags: int = 0) -> None:
        parent, seq = self.parent & _M32, self.parent >> 32
        recorder.span(
            self.descriptor,
            _PHASE,
            self.start,
            end,
            self.size,
            parent,
            seq,
            flags=flags,
            number=number,
            step=self.step,
        )

    def _end_elsewhere(self) -> None:
        """Be in the way of nothing in the context that this one began in, and still is in: it ended in another.

        So does an asynchronous generator that is not exhausted. What comes there is below what this one is below.
        """
        if self.token is None:
            return  # it is in the way nowhere: what it began in has ended first
        self.number = self.parent & _M32
        if not self.number:
            self.step = _NOWHERE

    @guarded
    def _end_stage(self, error: BaseException | None) -> None:
        end = monotonic_ns()
        if live.tracer is not None:
            steps = live.tracer.steps
            if self.start in steps.blocks:
                steps.blocks.remove(self.start)
            steps.block(self._name, self.start, end, self._mark)
            if error is not None:
                steps.fail_stage(self._name, end, error)


def note_end(tracer: Tracer, error: BaseException) -> None:
    """Have the step that is open say that *error* ends the program; outside any step a phase, if there are records."""
    if tracer.steps.is_open:
        tracer.steps.fail(error)
    elif tracer.recorder.ring is not None:
        at_exit = phase(EXIT).__enter__()
        at_exit.__exit__(type(error), error, None)


class operation:  # noqa: N801
    """Record the enclosed block as a communication operation, with the same id on every rank.

    Args:
        name: The operation, such as ``all_reduce`` or ``push_pull``.
        size: Bytes.
        tensor: The tensor's name; the same call order per tensor on every rank gives the same ids.
        group: The process group or set.
    """

    __slots__ = ("_fields", "_open", "_seq", "_size")
    _open: Operation | None

    def __init__(self, name: str, *, size: int = 0, tensor: str = "", group: str = "") -> None:
        self._fields = (name, tensor, group)
        self._size = size
        self._open = None

    def __getstate__(self) -> State:
        """Be copied and pickled as one that has not been entered."""
        return _state(self, "_fields", "_size", _open=None)

    def __enter__(self: _Operation) -> _Operation:
        """Begin the operation."""
        try:
            tracer = live.tracer
            if tracer is not None and _get_open() is not IN_GRAPH and tracer.recorder.level >= Level.COLLECTIVE:
                descriptor, occurrences = tracer.operation_descriptor(*self._fields)
                self._seq = next(occurrences)
                self._open = Operation(tracer.recorder, descriptor, self._size)
                self._open.token = _set_open(self._open)
        except Exception as broken:  # noqa: BLE001  -- as in `step`
            failed("operation", broken)
        return self

    @guarded
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the operation; an error of the block passes through and is noted."""
        opened, self._open = self._open, None
        if opened is not None:
            try:
                opened.close(self._seq, error=_failure(error))
            finally:
                try:
                    if opened.token is not None and _get_open() is opened:
                        _reset_open(opened.token)
                    else:
                        end_before_inner(opened)
                except ValueError:  # it began in another context, which a phase tells of
                    opened.step_aside()
