"""Which step is current, its stages, and the spans a program opens itself (contract 3 and 4)."""

from collections.abc import Callable
from contextvars import ContextVar, Token
from time import monotonic_ns
from types import TracebackType

from otel_dltrace.model.identity import NO_STEP
from otel_dltrace.model.operation import RANK_STEP, Descriptor
from otel_dltrace.model.semconv import COLLECTIVE, PHASE, STAGE, STAGES, Flag, Level, Source
from otel_dltrace.record.guard import guarded
from otel_dltrace.model.topology import World
from otel_dltrace.record.launch import DrainStarter
from otel_dltrace.record.recorder import Recorder

NO_USER_STEP = 0xFFFF_FFFF_FFFF_FFFF
"""The size of a step record whose user gave no number."""
NO_PARENT = (0, -1)
open_span: ContextVar[tuple[int, int]] = ContextVar("otel_dltrace.open_span", default=NO_PARENT)
"""Number and step of the innermost open span of this context; step -1: the current one."""


class Steps:
    """The current step of this process and the stages seen in it.

    A stage that happens several times in a step is one span: every piece writes the span again,
    longer, under the same number, so that a kill loses none of them. *group_seq* returns the
    world group's number, by which drains notice ranks whose ordinals drift apart.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.group_seq: Callable[[], int] = lambda: 0
        self.on_begin: Callable[[], None] = lambda: None
        self.upcoming = 0
        self.is_open = False
        self.own, self.marked = 0, False
        self.user = NO_USER_STEP
        self.batch_size, self.epoch = 0, -1
        self._start = self._seq = self._number = self._last_end = 0
        self._stages: dict[str, list[int]] = {}
        self._descriptors: dict[str, int] = {}

    def begin(self, start: int = 0, user: int | None = None) -> None:
        """Begin the next step at *start* (monotonic ns, default now); the one before ends there."""
        start = start or monotonic_ns()
        if self.is_open:
            self.end(start)
        recorder = self.recorder
        self._forget_stages_of(self.upcoming)
        recorder.step = self.upcoming
        self.upcoming += 1
        self.is_open = True
        self._start, self._last_end = start, start
        self.user = NO_USER_STEP if user is None else user
        self._seq = self.group_seq()
        self._number = recorder.begin(
            recorder.intern(RANK_STEP), Level.STEP, start, size=self.user, seq=self._seq, b=self.epoch
        )
        self.on_begin()

    def end(self, end: int = 0) -> None:
        """End the current step at *end* (monotonic ns), by default where its last stage ended."""
        if not self.is_open:
            return
        self.is_open = False
        self.recorder.span(
            self.recorder.intern(RANK_STEP),
            Level.STEP,
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
            self._descriptor(name), Level.STEP, seen[1], end, size=seen[3], a=seen[4], number=seen[0], step=step
        )

    def touch(self, end: int) -> None:
        """Know that the current step lasts at least until *end*."""
        if end > self._last_end:
            self._last_end = end

    def _descriptor(self, name: str) -> int:
        number = self._descriptors.get(name)
        if number is None:
            number = self._descriptors[name] = self.recorder.intern(Descriptor(STAGE, name))
        return number

    def _forget_stages_of(self, step: int) -> None:
        self._stages = {name: seen for name, seen in self._stages.items() if seen[5] == step}


class Operation:
    """A span that is written when it begins and again when it is over: a collective, a push-pull."""

    __slots__ = ("_a", "_b", "_closed", "_parent", "descriptor", "flags", "number", "recorder", "size", "start", "step")

    def __init__(
        self, recorder: Recorder, descriptor: int, size: int = 0, a: int = 0, b: int = -1, flags: int = 0
    ) -> None:
        parent, step = open_span.get()
        self.recorder, self.descriptor = recorder, descriptor
        self.size, self.flags, self._a, self._b = size, flags, a, b
        self._parent = parent
        self.step = recorder.step if step < 0 else step
        self._closed = False
        self.start = monotonic_ns()
        self.number = recorder.begin(
            descriptor, Level.COLLECTIVE, self.start, size, parent, a=a, b=b, flags=flags, step=self.step
        )

    def close(self, seq: int = 0, source: int = Source.HOST_DONE, error: BaseException | None = None) -> None:
        """End the span now; only the first call counts."""
        if self._closed or not self.number:
            return
        self._closed = True
        flags = self.flags
        if error is not None:
            self.recorder.error(self.number, Level.COLLECTIVE, error, self.step)
            flags |= Flag.ERROR
        self.recorder.span(
            self.descriptor,
            Level.COLLECTIVE,
            self.start,
            monotonic_ns(),
            self.size,
            self._parent,
            seq,
            0,
            self._a,
            self._b,
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
    """

    def __init__(
        self,
        recorder: Recorder,
        job_name: str = "job",
        environment: World = World(),  # noqa: B008  -- frozen
        world_name: str = "default",
        starter: DrainStarter | None = None,
    ) -> None:
        self.recorder = recorder
        self.job_name, self.environment, self.world_name = job_name, environment, world_name
        self.starter = starter
        self.steps = Steps(recorder)
        self.phases: dict[str, int] = {}
        self.occurrences: dict[tuple[str, str, str], int] = {}

    def phase_descriptor(self, name: str) -> int:
        """Return the number of the phase *name*; the first call interns it."""
        number = self.phases[name] = self.recorder.intern(Descriptor(PHASE, name))
        return number


class _Live:
    """The one place that holds what is switched on; `stop()` clears it."""

    tracer: Tracer | None = None


live = _Live()


class step:  # noqa: N801  -- used as a context manager, named as one
    """Make the enclosed block one training step, in loops of your own.

    Args:
        number: Your own number of the step (``dl.step.user``); the ordinal counts by itself.
    """

    __slots__ = ("_number",)

    def __init__(self, number: int | None = None) -> None:
        self._number = number

    @guarded
    def __enter__(self) -> "step":
        """Begin the step."""
        if live.tracer is not None:
            live.tracer.steps.begin_own(self._number)
        return self

    @guarded
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the step."""
        if live.tracer is not None:
            live.tracer.steps.end_own()


class phase:  # noqa: N801
    """Record the enclosed block as a phase of the current step (or operation).

    A name that is one of the stages (``to_device``, ``reduce_metrics``, ...) counts as that stage.

    Args:
        name: A name of few kinds, such as ``rollout``: it becomes the span's name.
        size: Bytes moved, if any.
    """

    __slots__ = ("_before", "_name", "_number", "_size", "_start", "_token")
    _token: Token[tuple[int, int]] | None

    def __init__(self, name: str, *, size: int = 0) -> None:
        self._name = name
        self._size = size
        self._token = None

    def __enter__(self) -> "phase":
        """Begin the phase."""
        tracer = live.tracer
        if tracer is not None and tracer.recorder.level >= 3:
            self._before = before = open_span.get()
            self._number = tracer.recorder.number()
            self._token = open_span.set((self._number, before[1]))
            self._start = monotonic_ns()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the phase; an error of the block passes through and is noted."""
        if self._token is not None:
            _end_phase(self, monotonic_ns(), error)


@guarded
def _end_phase(p: phase, end: int, error: BaseException | None) -> None:
    tracer = live.tracer
    assert p._token is not None
    open_span.reset(p._token)
    if tracer is None:
        return
    if p._name in STAGES:
        tracer.steps.stage(p._name, p._start, end)
        return
    number = tracer.phases.get(p._name) or tracer.phase_descriptor(p._name)
    parent, step_of_parent = p._before
    if error is not None:
        tracer.recorder.error(p._number, Level.PHASE, error)
    tracer.recorder.span(
        number, 3, p._start, end, p._size, parent, flags=2 if error else 0, number=p._number, step=step_of_parent
    )


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
            name, tensor, group = self._fields
            self._seq = tracer.occurrences[self._fields] = tracer.occurrences.get(self._fields, 0) + 1
            descriptor = Descriptor(COLLECTIVE, name, group=group, tensor=tensor, backend="user")
            self._open = Operation(tracer.recorder, tracer.recorder.intern(descriptor), self._size)
            self._token = open_span.set((self._open.number, self._open.step))
        return self

    @guarded
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the operation; an error of the block passes through and is noted."""
        if self._open is not None:
            open_span.reset(self._token)
            self._open.close(self._seq, error=error)
