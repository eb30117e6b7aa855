"""When a training step begins and what its stages are (contract 4); knows no framework."""

import weakref
from collections import deque
from collections.abc import Callable, Hashable
from threading import get_ident, main_thread

from otel_dltrace.instrument import _optimizers
from otel_dltrace.instrument._batch_sizes import take
from otel_dltrace.model.semconv import (
    BACKWARD,
    DATALOADER_NEXT,
    EVALUATE,
    FORWARD,
    OPTIMIZER,
    PREPARE_BATCH,
    STEP_LR_SCHEDULERS,
)
from otel_dltrace.record.device import Mark
from otel_dltrace.record.steps import Steps
from otel_dltrace.record.tracer import Tracer

AHEAD = 8
"""Batches that may be fetched before the first of them is trained on; more is a pass over the data."""
MAX_USES = 1000
MAX_HELD = 64
"""Batches whose size is known and that are not trained on yet; pieces of stages whose step is not known yet."""


_Elsewhere = tuple[int, Callable[[], object]]
"""Which thread has fetched a batch, and from what iterator, while no step has begun."""


def _nobody() -> None:
    return None


class Loop:
    """Turns what a training loop is seen to do into steps and stages.

    A step lasts one optimizer cycle. After an optimizer has stepped, the next batch begins a step;
    where no batches are fetched, the next forward of a root module does, and where no forward is
    seen either, the next backward. Two optimizers in turn on one batch are one step; where the process
    has had one alone, a further cycle on the same batch is a step of its own. That is known at its
    backward, for a forward may be just to see what was learned; once it was seen, the forward begins
    the step. So it does where the next batch was fetched behind the last forward of the cycle.
    Behind a pass over the data, all of which was trained on, the first forward may be just to see, too.
    Where there is no optimizer at all, each backward ends a cycle.
    An evaluation between two steps is the beginning of the second, and one after the last step adds
    none. Where the program marks its steps, nothing here begins one. All times are monotonic ns.

    An epoch is a pass over the data: it is over when the iterator whose batches begin steps has no
    more. A loop that leaves it before tells its epochs itself, with ``set_epoch`` or ``step(epoch=)``,
    which count from then on.

    What a batch is for shows only when it is used: batches from a source that is not known yet are
    held back until then, and a source is taken to be used as it was the time before. So are those that
    another thread than the main one fetches before the first step: the thread may be the one that trains.

    What happens in every step is flat, and only what is rare is a function of its own: between two
    kernels Python's code is cold, and every frame costs microseconds.
    """

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        self.home, self._has_trained = main_thread().ident, False
        """The thread that trains, and whether it was seen to: what others do is beside the stages of a step."""
        self.fetching = False
        """Whether a batch is asked for: what is done until it is there belongs to the step that it belongs to."""
        self._cycle_done, self._forward_seen, self._cycle_end = True, False, 0
        self.stepped, self._has_learned = set[int](), False
        """The optimizers that stepped since the last forward seen; whether a backward has ended since one stepped."""
        self._batches: Callable[[], object] = _nobody
        """The iterator that gave the last batch to train on, while it lives and has more."""
        self._is_used_again = self._is_ahead = False
        """Whether a batch was trained on in several cycles of the program's one optimizer; whether one was fetched
        behind the last forward of a cycle, and so for the next one."""
        self._leading: Callable[[], object] = _nobody
        """The iterator that gave the batch with which the last step began; when it has no more, an epoch is over."""
        self._is_passed = self._is_over = self._is_in_doubt = False
        """Whether it had no more; and no step has begun since; and a forward since may be just to see."""
        self.epoch = -1
        """The number of the next pass over the data, where a sampler was told it."""
        self._fetched = 0
        """When the batch was there, until a forward takes it."""
        self._evaluating = steps.upcoming_since(EVALUATE)
        """When an evaluation between two steps, or before all, began; 0: there is none."""
        self._uses: dict[Hashable, bool] = {}
        """Whether the batches of a source were trained on, the last time."""
        self._source: Hashable = None
        """The source of the last batch, until that has been trained on."""
        self._last: Callable[[], object] = _nobody
        self._evaluated = False
        """Whether the last batch had a forward without gradients and no training since."""
        self._is_aside = False
        """Whether one has been fetched since without gradients, for which such a forward is."""
        self._ahead: list[tuple[Hashable, int, int, int, _Elsewhere | None]] = []
        self._optimizer = 0
        self._optimizing = 0
        """When the optimizer began."""
        self._updating = 0
        """When the optimizer began, or went on after its closure; 0 while that runs."""
        self._closure_seen = False
        self._outer = (0, 0)
        """Which optimizer's step ends a second time, and when it began."""
        self._sizes: deque[tuple[Hashable, int]] = deque(maxlen=MAX_HELD)
        """Of the batches that were fetched and not trained on yet, with their source."""
        self._doubted: tuple[Hashable, int] = None, 0
        """The last one that was taken for a batch of an evaluation, as those of its source were before."""
        self._pieces: list[tuple[str, int, int, Mark | None]] = []
        """Of stages within a fetch, and since one of a batch of which it is not known what for."""
        self._mark: Mark | None = None
        self._backward: Mark | None = None
        """From the begin of the forward or optimizer that runs, and of the backward: optimizers may step inside it."""
        steps.block = self.piece

    def fetched(
        self, batches: object, start: int, end: int, size: int = 0, source: Hashable = 0, *, training: bool = True
    ) -> None:
        """Know that *batches*, an iterator, gave a batch of *size* samples.

        Args:
            batches: The iterator.
            start: When it was asked.
            end: When the batch was there.
            size: The number of samples, 0 if that is not known.
            source: What is the same for all batches that are used alike.
            training: False where nothing can be learned now, as gradients are off.
        """
        if get_ident() != self.home and (training or self._forward_seen):
            if training and not self.steps.upcoming:
                self._hold(batches, source, start, end, size)
                return
            # A prefetching thread is ahead by a number of batches that no other rank shares.
            self._stage(DATALOADER_NEXT, start, end)
            if self._cycle_done and self._batches() is batches:
                self._batches = _nobody  # fetched for another thread to train on: its forwards begin the steps
            return
        self.fetching = False
        if not training:
            self._is_aside = True
            self._evaluate(start, end)
            return
        if self._evaluated:
            self._settle(training=False)
        use = self._uses.get(source)
        if self._ahead and use is not None:
            self._settle(training=use)
        self._last, self._source, self._is_aside = weakref.ref(batches), source, False
        if use is False:
            self._doubted = source, size
            self._evaluate(start, end)
        elif use or not self._cycle_done or self.steps.marked or not self.steps.upcoming:
            self._take(source, start, end, size)
        else:
            self._ahead.append((source, start, end, size, None))
            if len(self._ahead) > AHEAD:
                self._settle(training=False)

    def _hold(self, batches: object, source: Hashable, start: int, end: int, size: int) -> None:
        """Hold a batch of another thread than the main one, until it is seen which of them trains."""
        if self._evaluated:
            self._ahead, self._evaluated = [], False
        self._source = source
        self._ahead.append((source, start, end, size, (get_ident(), weakref.ref(batches))))
        del self._ahead[:-AHEAD]

    def _take(self, source: Hashable, start: int, end: int, size: int) -> None:
        steps = self.steps
        if self._cycle_done:
            if not steps.marked:  # as `_begin` does
                self._cycle_done = False
                steps.begin(self._evaluating or start)
                self._evaluating = 0
                steps.is_fresh = True
            if self.epoch >= 0:
                steps.epoch = self.epoch
            elif self._is_passed or steps.epoch < 0:
                steps.epoch += 1
            self._leading, self._is_passed = self._last, False
            self._is_over = self._is_in_doubt = False
        self._batches = self._last
        self._is_ahead = self._forward_seen and not self.stepped
        self._optimizer, self._fetched = 0, end
        if self._pieces:
            self._place_pieces(end)
        between = not steps.is_open if steps.marked else self._evaluating != 0
        steps.stage(DATALOADER_NEXT, start, end, between)
        if size:
            self._sizes.append((source, size))

    def _settle(self, *, training: bool) -> None:
        """Know what the batches of late are for."""
        wrong = training and self._uses.get(self._source) is False
        if self._source is not None:
            self._uses[self._source] = training
        if training:
            self._source = None
        self._evaluated = False
        if wrong and self._doubted[1]:
            self._sizes.append(self._doubted)
        if wrong and self._cycle_done:
            self._begin(self._evaluating)
            self._batches = self._last
        if not training:
            kept = [held for held in self._sizes if self._uses.get(held[0])]  # of a loader that is a batch ahead
            self._sizes = deque(kept, MAX_HELD)
            leading = self._leading()
            if leading is not None and leading is self._last():  # the first step began with a batch of an evaluation
                self._leading, self._is_passed = _nobody, False
        if self._ahead:
            self._use(training=training)
        self._place_pieces()
        if len(self._uses) > MAX_USES:
            self._uses.clear()

    def _use(self, *, training: bool) -> None:
        """Give the batches that were held to their steps."""
        ahead, self._ahead = self._ahead, []
        for source, start, end, size, elsewhere in ahead:
            if elsewhere is not None:
                if elsewhere[0] != self.home:
                    continue  # fetched ahead for this thread, or for nothing
                self._last = elsewhere[1]
            self._uses[source] = training
            self._place_pieces(start)
            if training:
                self._take(source, start, end, size)
            else:
                self._evaluate(start, end)

    def exhausted(self, batches: object) -> None:
        """Know that *batches* has no more: loops that prefetch train on the last one after this."""
        if self._batches() is batches:
            self._batches = _nobody
        if self._last() is batches and (self._evaluated or len(self._ahead) > 1):
            self._settle(training=False)
        if self._leading() is batches:
            self._leading, self._is_passed, self._is_over = _nobody, True, True
        if self._last() is batches:
            self._last = _nobody
        self.fetch_failed()

    def fetch_failed(self) -> None:
        """Know that there was no batch."""
        self.fetching = False
        if not self._awaits:
            self._place_pieces()

    def forward_begins(self, start: int, given: object = (), *, training: bool = True) -> None:
        """Know that the forward of a root module begins, *given* these arguments."""
        steps = self.steps
        if training:
            self.home, self._has_trained, self._forward_seen = get_ident(), True, True
            self.stepped.clear()
            if self._source is not None:
                self._settle(training=True)
        elif self._is_beside():
            return
        elif self._source is not None and not self._is_aside:
            self._evaluated = True
        steps.is_fresh = False
        if self._fetched:
            is_usual = not steps.marked and not steps.blocks
            since, until = (self._fetched, start) if is_usual else self._gap(self._fetched, start)
            between = not steps.is_open if steps.marked else self._evaluating != 0
            steps.stage(PREPARE_BATCH, since, until, between)
            self._fetched = 0
        if training:
            if self._cycle_done and (
                self._batches() is None or ((self._is_used_again or self._is_ahead) and _optimizers.is_one())
            ):
                self._begin_at_forward(start)
            self._is_ahead = False
            # Else it was an evaluation in the middle of a step.
            self._evaluating = self._evaluating if self._is_in_doubt else 0
            if self._optimizer:
                self._closure_begins(start)
            if self._sizes:
                size = self._sizes.popleft()[1] if len(self._sizes) == 1 else take(self._sizes, given)
                steps.batch_size += 0 if steps.is_told else size
            self._mark = None if steps.device is None else steps.mark()

    def _begin_at_forward(self, start: int) -> None:
        """Begin a step with a forward that begins at *start*, or wait for what shows that it is one to train with."""
        self._is_in_doubt = self._is_over and not (self._sizes or self._optimizing or self.steps.marked)
        if self._is_in_doubt:
            self._evaluating = self._evaluating or start
        else:
            self._begin(self._optimizing or start)

    def _is_beside(self) -> bool:
        """Return whether this thread is an actor's, or a validation's, beside the one that trains."""
        return self._has_trained and get_ident() != self.home

    def _gap(self, fetched: int, start: int) -> tuple[int, int]:
        """Return the gap before a forward: within its step, and before what the program marks around the forward."""
        steps = self.steps
        since = steps.within(fetched) if steps.marked else fetched
        return since, next((block for block in steps.blocks if block >= since), start)

    def forward_ended(self, start: int, end: int, *, training: bool = True) -> None:
        """Know that the forward of a root module, begun at *start*, is over."""
        if not training:
            if self._is_beside():
                self._stage(EVALUATE, start, end)
            else:
                self._evaluate(start, end)
            return
        steps, mark, self._mark = self.steps, self._mark, None
        between = not steps.is_open if steps.marked else self._evaluating != 0
        steps.stage(FORWARD, start, end, between, mark)

    def backward_begins(self, start: int) -> None:
        """Know that a backward begins."""
        steps = self.steps
        if not self._forward_seen:
            self.home, self._has_trained = get_ident(), True
        if self._source is not None:
            self._settle(training=True)
        self._fetched, steps.is_fresh = 0, False
        if self._is_in_doubt:
            self._begin(start)
        if self._cycle_done and not self._forward_seen and self._batches() is None:
            self._begin(self._cycle_end or self._optimizing or start)
        elif self._cycle_done and not steps.marked and self._batches() is not None:
            self._cycle_again(start)
        if not self._forward_seen and self._sizes:
            steps.trained_on(self._sizes.popleft()[1])
        self._backward = None if steps.device is None else steps.mark()

    def _cycle_again(self, start: int) -> None:
        """Know that a backward begins on a batch with which an optimizer has stepped.

        Where forwards are seen, one more of the same forward is no further cycle.
        """
        if _optimizers.is_one() and not (self._forward_seen and self.stepped):
            self._begin(start)
            self._is_used_again = True

    def backward_ended(self, start: int, end: int) -> None:
        """Know that a backward, begun at *start*, is over."""
        steps, mark, self._backward, self._evaluating = self.steps, self._backward, None, 0
        steps.stage(BACKWARD, start, end, steps.marked and not steps.is_open, mark)
        self._has_learned = True
        if not (self._cycle_end or self._cycle_done) and _optimizers.are_none():
            self._cycle_done = True  # the program updates its parameters itself, where nothing is seen of it
        if self._optimizer:
            self._updating, self._closure_seen = end, True
            self._mark = steps.mark()

    def _closure_begins(self, start: int) -> None:
        """Leave out of the optimizer's time what its closure does, and what comes before the first."""
        if self._updating and self._closure_seen:
            mark, self._mark = self._mark, None
            self._stage(OPTIMIZER, self._updating, start, mark)
        self._updating, self._closure_seen = 0, True

    def optimizer_begins(self, optimizer: object, start: int) -> None:
        """Know that *optimizer* (or the scaler that holds one) begins to step."""
        if self._source is not None:
            self._settle(training=True)
        if self._is_in_doubt:
            self._begin(start)
        self.steps.is_fresh = False
        if self._optimizer == id(optimizer) and not self._closure_seen:
            self._outer = self._optimizer, self._optimizing  # a subclass's step, which calls that of its class
            return
        # One that another holds steps inside it; but one after a forward or backward does not: the other had failed.
        if self._optimizer in (0, id(optimizer)) or self._closure_seen:
            self._optimizer, self._closure_seen, self._outer = id(optimizer), False, (0, 0)
            self._optimizing = self._updating = start
            self._mark = None if self.steps.device is None else self.steps.mark()

    def optimizer_ended(self, optimizer: object, end: int, *, failed: bool = False) -> None:
        """Know that *optimizer* has stepped; inside the step of another one (a scaler) it says nothing."""
        if self._optimizer != id(optimizer):
            if self._outer[0] == id(optimizer) and not failed:
                self._stage(OPTIMIZER, self._outer[1], end)
                self._outer, self._cycle_end = (0, 0), end
            return
        start, self._optimizer, self._optimizing = self._updating or end, 0, 0
        if failed:
            return
        steps, mark, self._mark, self._evaluating = self.steps, self._mark, None, 0
        steps.stage(OPTIMIZER, start, end, steps.marked and not steps.is_open, mark)
        if self._sizes and not steps.batch_size:  # neither a forward nor a backward was seen
            steps.trained_on(self._sizes.popleft()[1])
        if self._has_learned and id(optimizer) in self.stepped and self._forward_seen:
            self._forward_seen = False  # they run in a compiled function by now
            self._sizes.clear()
        self.stepped.add(id(optimizer))
        self._cycle_done, self._cycle_end = True, end
        self._has_learned = False

    def interrupted(self) -> None:
        """Know that the step is over, done or not, and that nothing of the next one has begun."""
        self.begin_anew()
        self.steps.leave()

    def begin_anew(self) -> None:
        """Know that what is done from now on is of no cycle that has begun: a forked child's is not its parent's."""
        self._cycle_done, self._batches, self._source = True, _nobody, None
        self.fetching, self._evaluating, self._fetched, self._optimizer = False, 0, 0, 0
        self._ahead, self._pieces, self._is_in_doubt = [], [], False

    def scheduler_ended(self, start: int, end: int) -> None:
        """Know that a learning-rate scheduler has stepped."""
        self._stage(STEP_LR_SCHEDULERS, start, end)

    def piece(self, name: str, start: int, end: int, mark: Mark | None) -> None:
        """Know of a piece of the stage *name*, which a framework or the program itself tells of."""
        if get_ident() == self.home:
            if self._evaluating and not self.steps.marked:  # the step that follows begins with it
                self._evaluating = min(self._evaluating, max(start, self._cycle_end))
            elif self._awaits and len(self._pieces) < MAX_HELD:
                self._pieces.append((name, start, end, mark))
                return
            elif name == EVALUATE and self._cycle_done and not self.steps.marked:
                self._evaluating, self._fetched = max(start, self._cycle_end), 0  # as where its batches are seen
        self._stage(name, start, end, mark)

    @property
    def _awaits(self) -> bool:
        """Whether it is not known yet which step is going on."""
        return self.fetching or (bool(self._ahead) and self._cycle_done)

    def _place_pieces(self, before: int = 1 << 63) -> None:
        """Give the pieces that were held and began *before* to the step of which it is known by now."""
        while self._pieces and self._pieces[0][1] < before:
            self._stage(*self._pieces.pop(0))

    def _begin(self, start: int) -> None:
        self._is_over = self._is_in_doubt = False
        if self.steps.marked:
            return
        self._cycle_done = False
        self._batches = _nobody
        self.steps.begin(self._evaluating or start)
        self._evaluating = 0

    def _evaluate(self, start: int, end: int) -> None:
        if self._cycle_done and not self._evaluating and not self.steps.marked:
            self._evaluating = self._ahead[0][1] if self._ahead else start
            self._fetched = 0  # what lies behind it prepares no batch
        self._place_pieces(end)
        self._stage(EVALUATE, start, end)

    def _stage(self, name: str, start: int, end: int, mark: Mark | None = None) -> None:
        between = not self.steps.is_open if self.steps.marked else self._evaluating != 0
        self.steps.stage(name, start, end, upcoming=between, mark=mark)


joins: list[Callable[[Tracer], None]] = []
"""Who else follows a tracer, and is told of a new one."""


def loop_of(tracer: Tracer) -> Loop:
    """Return the loop that *tracer* follows: one per tracer. Who is in a hurry asks for ``tracer.loop`` first."""
    if tracer.loop is None:
        tracer.loop = Loop(tracer.steps)
        for join in joins:
            join(tracer)
    loop: Loop = tracer.loop
    return loop
