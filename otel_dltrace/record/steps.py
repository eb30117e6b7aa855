"""Which step of this process is current, and the stages seen in it (contract 4)."""

from collections.abc import Callable
from threading import get_ident, main_thread
from time import monotonic_ns

from otel_dltrace.model.identity import NO_STEP, NO_USER_STEP
from otel_dltrace.model.operation import RANK_STEP, Descriptor
from otel_dltrace.model.semconv import EVALUATE, STAGE, Flag, Level, Source
from otel_dltrace.record import guard
from otel_dltrace.record.covering import Piece, cover
from otel_dltrace.record.device import DeviceTimes, Mark
from otel_dltrace.record.operation import open_span
from otel_dltrace.record.recorder import Recorder

# Plain ints: reading a member of an enum costs a tenth of a record.
_STEP = int(Level.STEP)
_HOST_DONE, _DEVICE = int(Source.HOST_DONE), int(Flag.DEVICE)
MAX_PIECES = 4096
"""Pieces of stages that are remembered, to take those inside a longer one out of it."""
MANY_INSIDE = 100
"""So many marked steps inside another one are not meant to be there."""


def nothing() -> None:
    """Do nothing: nobody wants to be called."""


class _Seen:
    """What one step has seen of a stage: its span, and of how many pieces, which take *total* ns together.

    No ``__init__``: that would be a call, a tenth of what a step of four stages costs.
    """

    __slots__ = ("count", "descriptor", "end", "flags", "number", "start", "step", "total")
    number: int
    step: int
    descriptor: int
    start: int
    end: int
    total: int
    count: int
    flags: int


class Steps:
    """The current step of this process and the stages seen in it.

    A stage that happens several times in a step is one span: every piece writes the span again,
    longer, under the same number, so that a kill loses none of them. Of pieces inside one another
    each counts for what is not in the inner one, so that the totals of a step's stages add up to
    no more than the step. *group_seq* returns the world group's number, by which drains notice
    ranks whose ordinals drift apart. Those in *on_begin* are called when a step has begun: who has
    no more to do then takes itself out, since between two kernels each call costs microseconds.
    *on_end* is called when one is about to end, *on_left* when one has ended and no other begins
    where it did. *block* is told of a stage that the program marks: by default it is one of the
    current step, or of the next one. *device*, where there is one, finds out when the device was at a stage.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.group_seq: Callable[[], int] = lambda: 0
        self.on_begin: list[Callable[[], object]] = []
        self.on_end: Callable[[], None] = nothing
        self.on_left: Callable[[], None] = nothing
        self.block: Callable[[str, int, int, Mark | None], None] = self._block
        self.device: DeviceTimes | None = None
        self.upcoming = 0
        self.is_open = False
        self.is_fresh = False
        """Whether a batch has begun the step that is open, and nothing has been done with it."""
        self.own, self.marked = 0, False
        self.user = NO_USER_STEP
        self.batch_size, self.epoch = 0, -1
        self.is_told = False
        """Whether the program has said how many samples are trained on in the step: that comes first."""
        self._start = self._seq = self._number = self._last_end = 0
        self._rank_step = 0
        self._around = self._inside = 0
        self._stages: dict[str, _Seen] = {}
        """By name, of the last step that had it."""
        self.blocks: list[int] = []
        """When the stages began that the program marks, and is in, in the thread that begins steps."""
        self._thread = main_thread().ident
        self._pieces: list[Piece] = []
        """What the stages of the thread that begins steps cover."""

    def begin(self, start: int = 0, user: int | None = None) -> None:
        """Begin the next step at *start* (monotonic ns, default now); the one before ends there."""
        start = start or monotonic_ns()
        if self.is_open:
            self._end(start)
        recorder = self.recorder
        recorder.step = self.upcoming
        self.upcoming += 1
        self.is_open = True
        self._start, self._last_end = start, start
        pieces = self._pieces
        self._pieces = [p for p in pieces if p[1] > start] if pieces and pieces[-1][1] > start else []
        self._thread = get_ident()
        self.batch_size, self.is_told, self.is_fresh = 0, False, False
        self.user = NO_USER_STEP if user is None else user
        self._seq = self.group_seq()
        self._rank_step = self._rank_step or recorder.intern(RANK_STEP)
        self._number = recorder.begin(self._rank_step, _STEP, start, self.user, 0, self._seq, 0, self.epoch)
        if self.on_begin:
            for begun in tuple(self.on_begin):
                begun()

    def end(self, end: int = 0) -> None:
        """End the current step at *end* (monotonic ns), by default where its last stage ended; now if it is marked."""
        self._end(end or (monotonic_ns() if self.own else 0))
        self.on_left()

    def leave(self) -> None:
        """End the step that is open, and be in none until the next one begins."""
        if self.is_open:
            self.end()
        self.recorder.step = NO_STEP
        self.is_fresh = False

    def _end(self, end: int) -> None:
        if self.device is not None:
            self.device.step_ends()
        self.on_end()
        if not self.is_open:
            return
        self.is_open = False
        self.recorder.span(
            self._rank_step,
            _STEP,
            self._start,
            max(end or self._last_end, self._start),
            self.user,
            0,
            self._seq,
            0,
            self.batch_size,
            self.epoch,
            0,
            _HOST_DONE,
            self._number,
        )

    def after_fork(self) -> None:
        """Forget the step that is open, and what is open in it: they are the parent's."""
        self.is_open = self.is_fresh = False
        self.own, self._last_end = 0, 0
        self._stages, self._pieces = {}, []
        self.device, self._thread = None, get_ident()
        open_span.set(None)

    def begin_own(self, user: int | None, batch_size: int) -> None:
        """Begin a step that the program marks itself; from then on (`marked`) no other sign begins one.

        One that its batch has begun already goes on.
        """
        self.own += 1
        self.marked = True
        if self.own == 1:
            if self.is_fresh and user is not None:
                self.user = user
            elif not self.is_fresh:
                self.begin(user=user)
            self.is_fresh = False
            self.batch_size, self.is_told = batch_size, bool(batch_size)
        else:
            self._count_inside()

    def _count_inside(self) -> None:
        """Say it once if the program marks step after step within one that does not end."""
        if self._around != self._start:
            self._around, self._inside = self._start, 0
        self._inside += 1
        if self._inside == MANY_INSIDE:
            guard.say(
                f"{MANY_INSIDE} steps were marked inside one that has not ended, and do not count as steps: "
                "leave each step() before the next one begins (`with otel_dltrace.step():`)",
                "steps inside",
            )

    def end_own(self, error: BaseException | None) -> None:
        """End the step that the program marked, unless it is the one in which this process was forked.

        *error* is what ended it.
        """
        self.own = max(0, self.own - 1)
        if self.own == 0:
            if error is not None:
                self.fail(error)
            self.end(monotonic_ns())

    def fail(self, error: BaseException) -> None:
        """Note that the step that is open has failed with *error* just now; so it lasts until now at least."""
        if self.is_open:
            self.recorder.error(self._number, _STEP, error)
            self._last_end = monotonic_ns()

    def fail_stage(self, name: str, end: int, error: BaseException) -> None:
        """Note that the stage *name*, a piece of which has ended at *end*, failed with *error*.

        Of one that is held until it is known which step it is of nothing is noted.
        """
        seen = self._stages.get(name)
        if seen is not None and seen.end == end:
            self.recorder.error(seen.number, _STEP, error, seen.step)

    def within(self, start: int) -> int:
        """Return *start*, or when the step began that is open, if that was later."""
        return max(start, self._start) if self.is_open else start

    def trained_on(self, size: int) -> None:
        """Know that a batch of *size* samples is trained on in the current step."""
        if not self.is_told:
            self.batch_size += size

    def mark(self) -> Mark | None:
        """Return when the device comes to what a stage asks of it next; None where nobody will know.

        Stages of other threads than the one that trains have the host's times: to ask a device, while
        that one captures a graph, would break the graph.
        """
        return None if self.device is None or get_ident() != self._thread else self.device.mark()

    def mark_operation(self) -> Mark | None:
        """Return the same for an operation, which may begin in another thread: a backward has its own."""
        return None if self.device is None else self.device.mark(elsewhere=get_ident() != self._thread)

    def trains_here(self) -> bool:
        """Return whether this is the thread that begins steps: only there a device may be asked anything."""
        return get_ident() == self._thread

    def _block(self, name: str, start: int, end: int, mark: Mark | None) -> None:
        # Between two marked steps it is the second one's, as where a loop is followed.
        self.stage(name, start, end, self.marked and not self.is_open, mark)

    def stage(self, name: str, start: int, end: int, upcoming: bool = False, mark: Mark | None = None) -> None:
        """Add a piece of stage *name*, from *start* to *end* (monotonic ns), to the current step.

        With *upcoming* it belongs to the step that follows, as evaluation does. *mark* is from its begin.
        """
        recorder = self.recorder
        step = self.upcoming if upcoming else recorder.step
        if step == NO_STEP:
            self._stage_outside(name, start, end, mark)
            return
        seen = self._stages.get(name)
        if seen is None or seen.step != step:
            descriptor = recorder.intern(Descriptor(STAGE, name)) if seen is None else seen.descriptor
            seen = _Seen()
            seen.number, seen.step = recorder.number(), step
            seen.start, seen.end, seen.descriptor = start, end, descriptor
            seen.total = seen.count = seen.flags = 0
            self._stages[name] = seen  # only now: another thread may have the same stage
        seen.total += end - start
        seen.count += 1
        if get_ident() == self._thread:
            pieces = self._pieces
            if not pieces or pieces[-1][1] <= start:
                pieces.append((start, end, name))  # the usual case, without a call
                if len(pieces) > MAX_PIECES:
                    del pieces[: MAX_PIECES // 2]
            else:
                self._cover(seen, name, start, end)
        if start < seen.start:  # noqa: PLR1730  -- `min` is a call, here and below
            seen.start = start
        if end > seen.end:  # noqa: PLR1730
            seen.end = end
        if not upcoming and end > self._last_end:
            self._last_end = end
        if self.device is not None:
            seen.flags = self._followed(self.device, seen, mark)
        # By position: names of arguments cost a twentieth of a record.
        recorder.span(
            seen.descriptor,
            _STEP,
            seen.start,
            seen.end,
            seen.total,
            0,
            0,
            0,
            seen.count,
            0,
            seen.flags,
            _HOST_DONE,
            seen.number,
            step,
        )

    def _stage_outside(self, name: str, start: int, end: int, mark: Mark | None) -> None:
        """Add a piece of a stage that is in no step: an evaluation is of the one that follows, the first one, too."""
        if name == EVALUATE:
            self.stage(name, start, end, True, mark)

    def upcoming_since(self, name: str) -> int:
        """Return when stage *name* of the step that follows began; 0 if it has none yet."""
        seen = self._stages.get(name)
        return seen.start if seen is not None and seen.step == self.upcoming else 0

    def _followed(self, device: DeviceTimes, seen: _Seen, mark: Mark | None) -> int:
        """Return the flag of the stage *seen*, of which a piece that began at *mark* has ended."""
        if mark is not None and get_ident() == self._thread:
            return _DEVICE if device.piece(seen.number, seen.step, seen.count, mark) else 0
        if seen.flags:
            device.drop(seen.number)
        return 0

    def _cover(self, seen: _Seen, name: str, start: int, end: int) -> None:
        """Note a piece; take out of its stage, *seen*, what others have of it, and those of the same *name*."""
        inner, again = cover(self._pieces, name, start, end)
        seen.total -= inner
        seen.count -= min(again, seen.count - 1)
