"""When a training step begins and what its stages are (contract 4); knows no framework."""

import threading
import weakref
from collections.abc import Callable

from otel_dltrace.record.steps import Steps, Tracer


def _nobody() -> None:
    return None


class Loop:
    """Turns what a training loop is seen to do into steps and stages.

    A step lasts one optimizer cycle. After an optimizer has stepped, the next batch begins a step;
    where no batches are fetched, the next forward of a root module does. Two optimizers in turn on
    one batch are one step. An evaluation between two steps is the beginning of the second, and one
    after the last step adds none. Where the program marks its steps, nothing here begins one.
    All times are monotonic ns.
    """

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        self.in_backward = False
        self._cycle_done = True
        self._batches: Callable[[], object] = _nobody
        """The iterator that gave the last batch, while it lives and has more."""
        self._evaluating = 0
        """When an evaluation between two steps began; 0: there is none."""
        self._fetched = 0
        """When the batch was there, until a forward takes it."""
        self._optimizer = 0
        self._optimizing = 0
        self._home = threading.main_thread().ident

    def fetched(self, batches: object, start: int, end: int, size: int = 0, *, training: bool = True) -> None:
        """Know that *batches*, an iterator, gave a batch of *size* samples."""
        if not training:
            self._evaluate(start, end)
            return
        if threading.get_ident() != self._home:
            # A prefetching thread is ahead by a number of batches that no other rank shares.
            self._stage("dataloader_next", start, end)
            return
        if self._cycle_done:
            self._begin(start)
        self._batches = weakref.ref(batches)
        self._optimizer, self._fetched = 0, end
        self._stage("dataloader_next", start, end)
        if size:
            self.steps.batch_size = size

    def exhausted(self, batches: object) -> None:
        """Know that *batches* has no more: loops that prefetch train on the last one after this."""
        if self._batches() is batches:
            self._batches = _nobody

    def forward_begins(self, start: int, *, training: bool = True) -> None:
        """Know that the forward of a root module begins."""
        if self._fetched:
            self._stage("prepare_batch", self._fetched, start)
            self._fetched = 0
        if training:
            self._home = threading.get_ident()
            if self._cycle_done and self._batches() is None:
                self._begin(self._optimizing or start)
            self._evaluating = 0  # it was an evaluation in the middle of a step

    def forward_ended(self, start: int, end: int, *, training: bool = True) -> None:
        """Know that the forward of a root module, begun at *start*, is over."""
        if training:
            self._stage("forward", start, end)
        else:
            self._evaluate(start, end)

    def backward_ended(self, start: int, end: int) -> None:
        """Know that a backward, begun at *start*, is over."""
        self._evaluating = 0
        self._stage("backward", start, end)

    def optimizer_begins(self, optimizer: object, start: int) -> None:
        """Know that *optimizer* (or the scaler that holds one) begins to step."""
        if self._optimizer in (0, id(optimizer)):
            self._optimizer, self._optimizing = id(optimizer), start

    def optimizer_ended(self, optimizer: object, end: int, *, failed: bool = False) -> None:
        """Know that *optimizer* has stepped; inside the step of another one (a scaler) it says nothing."""
        if self._optimizer != id(optimizer):
            return
        start, self._optimizer, self._optimizing = self._optimizing, 0, 0
        if failed:
            return
        self._evaluating = 0
        self._stage("optimizer", start, end)
        self._cycle_done = True

    def scheduler_ended(self, start: int, end: int) -> None:
        """Know that a learning-rate scheduler has stepped."""
        self._stage("step_lr_schedulers", start, end)

    def _begin(self, start: int) -> None:
        if self.steps.marked:
            return
        self._cycle_done = False
        self._batches = _nobody
        self.steps.begin(self._evaluating or start)
        self._evaluating = 0

    def _evaluate(self, start: int, end: int) -> None:
        if self._cycle_done and not self._evaluating and not self.steps.marked:
            self._evaluating = start
        self._stage("evaluate", start, end)

    def _stage(self, name: str, start: int, end: int) -> None:
        between = not self.steps.is_open if self.steps.marked else self._evaluating != 0
        self.steps.stage(name, start, end, upcoming=between)


_loop: Loop | None = None


def loop_of(tracer: Tracer) -> Loop:
    """Return the loop that *tracer* follows: one per process and tracer."""
    global _loop  # noqa: PLW0603  -- the one of the live tracer
    if _loop is None or _loop.steps is not tracer.steps:
        _loop = Loop(tracer.steps)
    return _loop
