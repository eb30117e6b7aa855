"""The backwards that synchronise gradients: what is known of each, and of its model, which nothing here keeps alive."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from otel_dltrace.instrument._torch.buckets import Layout
from otel_dltrace.record.device import Mark
from otel_dltrace.record.recorder import Recorder


class Backward:
    """A backward that synchronises the gradients of one model, from the end of the forward on.

    Attributes:
        of: The model's.
        since: When its reducer began to count.
        ready: When each gradient was ready, from then on; until it is over, those of the one before.
        seq: The group's number before it.
        advance: By how much it has advanced that.
        is_alone: Whether it has synchronised no other model.
        is_delayed: Whether DDP has launched all buckets at its end, as in the first one of a static graph.
        end: When it was over.
        step: The step that it was in.
        is_rebuilt: Whether DDP had rebuilt its buckets.
        over: When the device goes on behind it.
    """

    __slots__ = (
        "advance",
        "end",
        "is_alone",
        "is_delayed",
        "is_rebuilt",
        "of",
        "over",
        "ready",
        "seq",
        "since",
        "step",
    )

    def __init__(self, of: "Model", since: int, ready: Sequence[int]) -> None:
        self.of, self.since, self.ready = of, since, ready
        self.seq = self.advance = self.end = self.step = 0
        self.is_alone = self.is_delayed = self.is_rebuilt = False
        self.over: Mark | None = None


class Model:
    """What is known of one model, which this keeps not alive: its buckets, and who said so.

    Attributes:
        model: Returns it, while it lives.
        layout: Its buckets, as known to `recorder`, before or after DDP *has rebuilt* them, after so many *hooks*.
        unwritten: Its last backward, where its buckets were not known.
    """

    __slots__ = ("has_rebuilt", "hooks", "layout", "model", "recorder", "unwritten")

    def __init__(self, model: Any) -> None:
        self.model: Callable[[], Any] = weakref.ref(model)
        self.layout: Layout | None = None
        self.recorder: Recorder | None = None
        self.has_rebuilt, self.hooks = False, 0
        self.unwritten: Backward | None = None


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
            known = self.models[model] = Model(model)
        self.latest = known
        return known
