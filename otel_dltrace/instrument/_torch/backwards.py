"""The backwards that synchronise gradients: what is known of each, and of its model, which nothing here keeps alive."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from otel_dltrace.instrument._torch.buckets import Layout
from otel_dltrace.record.device import Mark
from otel_dltrace.record.recorder import Recorder


@dataclass(slots=True, eq=False)
class Backward:
    """A backward that synchronises the gradients of one model, from the end of the forward on."""

    of: "Model"
    since: int
    """When the model's reducer began to count."""
    ready: Sequence[int]
    """When each gradient was ready, from then on; until it is over, those of the one before."""
    seq: int = 0
    """The group's number before it."""
    advance: int = 0
    """By how much it has advanced that."""
    is_alone: bool = False
    """Whether it has synchronised no other model."""
    is_delayed: bool = False
    """Whether DDP has launched all buckets at its end, as in the first one of a static graph."""
    end: int = 0
    """When it was over."""
    step: int = 0
    """The step that it was in."""
    is_rebuilt: bool = False
    """Whether DDP had rebuilt its buckets."""
    over: Mark | None = None
    """When the device goes on behind it."""


@dataclass(slots=True, eq=False)
class Model:
    """What is known of one model, which this keeps not alive: its buckets, and who said so."""

    model: Callable[[], Any]
    """Returns it, while it lives."""
    layout: Layout | None = None
    """Its buckets, as known to `recorder`, before or after DDP *has rebuilt* them, after so many *hooks*."""
    recorder: Recorder | None = None
    has_rebuilt: bool = False
    hooks: int = 0
    unwritten: Backward | None = None
    """Its last backward, where its buckets were not known."""


class Seen:
    """What has been seen: one for the process.

    Attributes:
        prepared_at: When a reducer began to count in the forward that is running; 0: not yet.
        prepared: The backwards that are to come.
        latest: The model that was prepared last.
        models: All that live.
    """

    def __init__(self) -> None:
        self.prepared_at = 0
        self.prepared: list[Backward] = []
        self.latest: Model | None = None
        self.models: weakref.WeakKeyDictionary[Any, Model] = weakref.WeakKeyDictionary()

    def model(self, model: Any) -> Model:
        """Return what is known of *model*."""
        known = self.models.get(model)
        if known is None:
            known = self.models[model] = Model(weakref.ref(model))
        self.latest = known
        return known
