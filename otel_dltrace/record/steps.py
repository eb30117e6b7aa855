"""Which step is current, its stages, and the spans a program opens itself (contract 3 and 4)."""

from collections.abc import Callable, Iterator
from contextvars import ContextVar, Token
from itertools import count
from time import monotonic_ns
from types import TracebackType

from otel_dltrace.model.identity import NO_STEP, NO_USER_STEP
from otel_dltrace.model.operation import RANK_STEP, Descriptor
from otel_dltrace.model.semconv import COLLECTIVE, PHASE, STAGE, STAGES, Flag, Level, Source
from otel_dltrace.model.topology import World
from otel_dltrace.record.guard import failed, guarded
from otel_dltrace.record.launch import DrainStarter
from otel_dltrace.record.recorder import Recorder

# Plain ints: reading a member of an enum costs a tenth of a record.
_STEP, _COLLECTIVE, _PHASE, _ERROR = int(Level.STEP), int(Level.COLLECTIVE), int(Level.PHASE), int(Flag.ERROR)
_HOST_DONE = int(Source.HOST_DONE)
AS_STAGE = -1
"""In place of a descriptor: a phase of this name is counted as a stage."""
open_span: "ContextVar[phase | Operation | None]" = ContextVar("otel_dltrace.open_span", default=None)
"""The innermost open span of this context; it is a parent in its own step alone."""


class Steps:
    """The current step of this process and the stages seen in it.

    A stage that happens several times in a step is one span: every piece writes the span again,
    longer, under the same number, so that a kill loses none of them. *group_seq* returns the
    world group's number, by which drains notice ranks whose ordinals drift apart. *on_begin* is
    called when a step has begun, *on_end* when one is about to end, *on_left* when one has ended
    and no other begins where it did.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.group_seq: Callable[[], int] = lambda: 0
        self.on_begin: Callable[[], None] = lambda: None
        self.on_end: Callable[[], None] = lambda: None
        self.on_left: Callable[[], None] = lambda: None
        self.upcoming = 0
        self.is_open = False
        self.own, self.marked = 0, False
        self.user = NO_USER_STEP
        self.batch_size, self.epoch = 0, -1
        self._start = self._seq = self._number = self._last_end = 0
        self._rank_step = 0
        self._stages: dict[str, list[int]] = {}
        self._descriptors: dict[str, int] = {}

    def begin(self, start: int = 0, user: int | None = None) -> None:
        """Begin the next step at *start* (monotonic ns, default now); the one before ends there."""
        start = start or monotonic_ns()
        if self.is_open:
            self._end(start)
        recorder = self.recorder
        self._forget_stages_of(self.upcoming)
        recorder.step = self.upcoming
        self.upcoming += 1
        self.is_open = True
        self._start, self._last_end = start, start
        self.user = NO_USER_STEP if user is None else user
        self._seq = self.group_seq()
        self._rank_step = self._rank_step or recorder.intern(RANK_STEP)
        self._number = recorder.begin(self._rank_step, _STEP, start, size=self.user, seq=self._seq, b=self.epoch)
        self.on_begin()

    def end(self, end: int = 0) -> None:
        """End the current step at *end* (monotonic ns), by default where its last stage ended."""
        self._end(end)
        self.on_left()

    def _end(self, end: int) -> None:
        self.on_end()
        if not self.is_open:
            return
        self.is_open = False
        self.recorder.span(
            self._rank_step,
            _STEP,
            self._start,
            end or max(self._last_end, self._start),
            size=self.user,
            seq=self._seq,
            a=self.batch_size,
            b=self.epoch,
            number=self._number,
        )

    def begin_own(self, user: int | None) -> None:
        """Begin a step that the program marks itself; from then on (`marked`) no other sign begins one."""
        self.own += 1
        self.marked = True
        if self.own == 1:
            self.begin(user=user)

    def end_own(self) -> None:
        """End the step that the program marked."""
        self.own -= 1
        if self.own == 0:
            self.end(monotonic_ns())

    def stage(self, name: str, start: int, end: int, upcoming: bool = False) -> None:
        """Add a piece of stage *name*, from *start* to *end* (monotonic ns), to the current step.

        With *upcoming* it belongs to the step that follows, as evaluation does.
        """
        step = self.upcoming if upcoming else self.recorder.step
        if step == NO_STEP:
            return
        seen = self._stages.get(name)
        if seen is None or seen[5] != step:
            seen = self._stages[name] = [self.recorder.number(), start, end, 0, 0, step]
        seen[2] = end
        seen[3] += end - start
        seen[4] += 1
        if not upcoming and end > self._last_end:
            self._last_end = end
        self.recorder.span(
            self._descriptor(name), _STEP, seen[1], end, size=seen[3], a=seen[4], number=seen[0], step=step
        )

    def touch(self, end: int) -> None:
        """Know that the current step lasts at least until *end*."""
        self._last_end = max(self._last_end, end)

    def _descriptor(self, name: str) -> int:
        number = self._descriptors.get(name)
        if number is None:
            number = self._descriptors[name] = self.recorder.intern(Descriptor(STAGE, name))
        return number

    def _forget_stages_of(self, step: int) -> None:
        self._stages = {name: seen for name, seen in self._stages.items() if seen[5] == step}


class Operation:
    """A span that is written when it begins and again when it is over: a collective, a push-pull."""

    __slots__ = ("_closed", "_parent", "a", "b", "descriptor", "flags", "number", "recorder", "size", "start", "step")

    def __init__(
        self, recorder: Recorder, descriptor: int, size: int = 0, a: int = 0, b: int = -1, flags: int = 0
    ) -> None:
        outer = open_span.get()
        self.step = now = recorder.step
        self._parent = parent = outer.drawn() if outer is not None and outer.step == now else 0
        self.recorder, self.descriptor = recorder, descriptor
        self.size, self.flags, self.a, self.b = size, flags, a, b
        self._closed = False
        self.start = start = monotonic_ns()
        self.number = recorder.begin(descriptor, _COLLECTIVE, start, size, parent, 0, a, b, flags, now)

    def drawn(self) -> int:
        """Return the span's number, for a child."""
        return self.number

    def close(self, seq: int = 0, source: int = _HOST_DONE, error: BaseException | None = None, end: int = 0) -> None:
        """End the span at *end* (monotonic ns, default now); only the first call counts."""
        if self._closed or not self.number:
            return
        self._closed = True
        flags = self.flags
        if error is not None:
            self.recorder.error(self.number, Level.COLLECTIVE, error, self.step)
            flags |= Flag.ERROR
        self.recorder.span(
            self.descriptor,
            _COLLECTIVE,
            self.start,
            end or monotonic_ns(),
            self.size,
            self._parent,
            seq,
            0,
            self.a,
            self.b,
            flags,
            source,
            self.number,
            self.step,
        )


class Tracer:
    """The live side of one process: its recorder, its steps, its users' own descriptors.

    Attributes:
        job_name: The job's name for people.
        environment: Who the launcher says we are.
        world_name: The world's name, in jobs with several.
        starter: What started the drain, and waits for it at the end.
        span_budget: Spans per trace over OTLP, by which all compute in which trace a rank's step is.
    """

    def __init__(
        self,
        recorder: Recorder,
        job_name: str = "job",
        environment: World = World(),  # noqa: B008  -- frozen
        world_name: str = "default",
        starter: DrainStarter | None = None,
        span_budget: int = 0,
    ) -> None:
        self.recorder = recorder
        self.job_name, self.environment, self.world_name = job_name, environment, world_name
        self.starter, self.span_budget = starter, span_budget
        self.steps = Steps(recorder)
        self.phases: dict[str, int] = dict.fromkeys(STAGES, AS_STAGE)
        self.occurrences: dict[tuple[str, str], Iterator[int]] = {}
        self.operations: dict[tuple[str, str, str], tuple[int, Iterator[int]]] = {}

    def phase_descriptor(self, name: str) -> int:
        """Return the number of the phase *name*; the first call interns it."""
        number = self.phases[name] = self.recorder.intern(Descriptor(PHASE, name))
        return number

    def operation_descriptor(self, name: str, tensor: str, group: str) -> tuple[int, Iterator[int]]:
        """Return the number of a user's own operation, and its sequence numbers from 1.

        Ids know the tensor and not the operation, so a push and a pull of one tensor share a count.
        """
        known = self.operations.get((name, tensor, group))
        if known is None:
            descriptor = Descriptor(COLLECTIVE, name, group=group, tensor=tensor or name, backend="user")
            # setdefault: two threads that come first together must draw from one count.
            numbers = self.occurrences.setdefault((tensor or name, group), count(1))
            known = self.operations[name, tensor, group] = (self.recorder.intern(descriptor), numbers)
        return known


class _Live:
    """The one place that holds what is switched on; `stop()` clears it."""

    tracer: Tracer | None = None


live = _Live()


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
    _token: "Token[phase | Operation | None]"

    def __init__(self, name: str, *, size: int = 0) -> None:
        self._name = name
        self._size = size
        self.number = 0

    # Both inline what `guarded` does: its extra frame would cost a part of a phase that can be seen.

    def __enter__(self) -> "phase":
        """Begin the phase."""
        tracer = live.tracer
        if tracer is None:
            self._recorder = None
            return self
        self._recorder = recorder = tracer.recorder
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
