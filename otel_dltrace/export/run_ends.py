"""Which runs have ended, for a drain that goes on: none of their rings has been there for some seconds."""

from collections.abc import Collection, Iterable
from pathlib import Path

from otel_dltrace.export.serving import LINGER_S


class RunEnds:
    """Knows since when runs have no ring."""

    def __init__(self) -> None:
        self._since: dict[Path, float] = {}

    def among(self, roots: Iterable[Path], living: Collection[Path], now: float) -> list[Path]:
        """Return which of *roots*, less those *living*, have had no ring for as long as a drain waits for more."""
        self._since = {root: self._since.get(root, now) for root in roots if root not in living}
        return [root for root, since in self._since.items() if now - since >= LINGER_S]

    def forget(self, root: Path) -> None:
        """Let go of *root*: if it begins again, it ends anew."""
        self._since.pop(root, None)
