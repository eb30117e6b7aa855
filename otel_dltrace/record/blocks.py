"""What a program marks itself, as blocks: steps, phases, operations."""

from contextvars import Token
from time import monotonic_ns
from types import TracebackType

from otel_dltrace.model.semconv import STAGES, Flag, Level
from otel_dltrace.record.guard import failed, guarded
from otel_dltrace.record.recorder import Recorder
from otel_dltrace.record.steps import Open, Operation, Tracer, live, open_span

# Plain ints: reading a member of an enum costs a tenth of a record.
_PHASE, _ERROR = int(Level.PHASE), int(Flag.ERROR)


class step:  # noqa: N801  -- used as a context manager, named as one
    """Make the enclosed block one training step, in loops of your own.

    Args:
        number: Your own number of the step (``dl.step.user``); the ordinal counts by itself.
    """

    __slots__ = ("_number", "_tracer")

    def __init__(self, number: int | None = None) -> None:
        self._number = number
        self._tracer: Tracer | None = None

    @guarded
    def __enter__(self) -> "step":
        """Begin the step."""
        self._tracer = tracer = live.tracer  # it ends what it began, whatever is switched on in between
        if tracer is not None:
            tracer.steps.begin_own(self._number)
        return self

    @guarded
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the step."""
        if self._tracer is not None:
            self._tracer.steps.end_own()


class phase:  # noqa: N801
    """Record the enclosed block as a phase of the current step (or operation).

    A name that is one of the stages (``to_device``, ``reduce_metrics``, ...) counts as that stage.

    Args:
        name: A name of few kinds, such as ``rollout``: it becomes the span's name.
        size: Bytes moved, if any.
    """

    __slots__ = ("_descriptor", "_name", "_parent", "_recorder", "_size", "_start", "_token", "number", "step")
    _recorder: Recorder | None
    _token: "Token[Open | None]"

    def __init__(self, name: str, *, size: int = 0) -> None:
        self._name = name
        self._size = size

    # Both inline what `guarded` does: its extra frame would cost a part of a phase that can be seen.

    def __enter__(self) -> "phase":
        """Begin the phase."""
        tracer = live.tracer
        if tracer is None:
            self._recorder = None
            return self
        self._recorder = recorder = tracer.recorder
        self.number = 0  # one that is entered again is another span
        try:
            name = self._name
            if recorder.level < _PHASE and name not in STAGES:
                self._recorder = None
                return self
            try:
                self._descriptor = descriptor = tracer.phases[name]
            except KeyError:
                self._descriptor = descriptor = tracer.phase_descriptor(name)
            if descriptor >= 0:
                outer = open_span.get()
                self.step = now = recorder.step
                self._parent = outer.drawn() if outer is not None and outer.step == now else 0
                self._token = open_span.set(self)
            self._start = monotonic_ns()
        except Exception as broken:  # noqa: BLE001  -- see above
            self._recorder = None
            failed("phase", broken)
        return self

    def drawn(self) -> int:
        """Return the span's number, drawn when the first child asks: most phases have none."""
        if not self.number and self._recorder is not None:
            self.number = self._recorder.number()
        return self.number

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the phase; an error of the block passes through and is noted."""
        recorder = self._recorder
        if recorder is None:
            return
        end = monotonic_ns()
        try:
            descriptor = self._descriptor
            if descriptor < 0:
                self._end_stage(end)
                return
            try:
                if error is None:
                    recorder.phase(descriptor, self._start, end, self._size, self._parent, self.number, self.step)
                else:
                    self._fail(recorder, end, error)
            finally:
                open_span.reset(self._token)
        except Exception as broken:  # noqa: BLE001  -- see above
            failed("phase", broken)

    def _fail(self, recorder: Recorder, end: int, error: BaseException) -> None:
        recorder.error(self.drawn(), _PHASE, error, self.step)
        recorder.span(
            self._descriptor,
            _PHASE,
            self._start,
            end,
            self._size,
            self._parent,
            flags=_ERROR,
            number=self.number,
            step=self.step,
        )

    def _end_stage(self, end: int) -> None:
        if live.tracer is not None:
            live.tracer.steps.stage(self._name, self._start, end)


class operation:  # noqa: N801
    """Record the enclosed block as a communication operation, with the same id on every rank.

    Args:
        name: The operation, such as ``all_reduce`` or ``push_pull``.
        size: Bytes.
        tensor: The tensor's name; the same call order per tensor on every rank gives the same ids.
        group: The process group or set.
    """

    __slots__ = ("_fields", "_open", "_seq", "_size", "_token")
    _open: Operation | None

    def __init__(self, name: str, *, size: int = 0, tensor: str = "", group: str = "") -> None:
        self._fields = (name, tensor, group)
        self._size = size
        self._open = None

    @guarded
    def __enter__(self) -> "operation":
        """Begin the operation."""
        tracer = live.tracer
        if tracer is not None and tracer.recorder.level >= Level.COLLECTIVE:
            descriptor, occurrences = tracer.operation_descriptor(*self._fields)
            self._seq = next(occurrences)
            self._open = Operation(tracer.recorder, descriptor, self._size)
            self._token = open_span.set(self._open)
        return self

    @guarded
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the operation; an error of the block passes through and is noted."""
        if self._open is not None:
            try:
                self._open.close(self._seq, error=error)
            finally:
                open_span.reset(self._token)
