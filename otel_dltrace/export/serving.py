"""What a drain is told to do."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from otel_dltrace.export.choice import DELAY_S
from otel_dltrace.export.outgoing.gate import SETTLE_S
from otel_dltrace.model.plan import Window

LINGER_S = 5.0
"""A drain ends this long after its last writer."""
LONGEST_PAUSE_S = 1.0
"""Between two looks at the rings."""
_ROUNDING_S = 0.001
"""By how much less than the delay two reads of a ring may seem to be apart."""


@dataclass(frozen=True)
class Serving:
    """Which rings a drain serves, and where their spans go.

    Attributes:
        rings: The ring folder.
        directory: Where run directories are made; None: where each ring's writer asked for.
        home: Only rings of this drain's name; None for all.
        orphans_only: Only rings whose writer is gone (`recover`).
        window: The steps that go out in full.
        budget: Spans per trace.
        quota: Bytes that a host may keep of a job.
        linger: Seconds to wait for more writers.
        delay: The longest that a record waits in its ring, in seconds.
    """

    rings: Path
    directory: Path | None = None
    home: str | None = None
    orphans_only: bool = False
    window: Window = Window(everything=True)
    budget: int = 0
    quota: int = 5 << 30
    linger: float = LINGER_S
    delay: float = DELAY_S

    @property
    def settle(self) -> float:
        """How long, in seconds, a step waits for what may still come of it: until its ring is read once more."""
        return max(SETTLE_S, self.delay - _ROUNDING_S)

    @property
    def settle_roots(self) -> float:
        """How long a step's root waits for more local ranks, which are read in turns of their own."""
        return max(SETTLE_S, self.delay + LONGEST_PAUSE_S)

    def parent(self, home: Mapping[str, Any]) -> Path:
        """Return where the run directory of a ring is made whose writer told of itself in *home*."""
        return self.directory or Path(home.get("directory") or ".")
