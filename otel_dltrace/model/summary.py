"""The one line that says what became of a run's spans, from the figures that its drains wrote down."""

from collections.abc import Mapping
from typing import Any


def summary_line(figures: Mapping[str, Any]) -> str:
    """Return e.g. ``4,068 spans recorded, 4,268 sent, none waiting, none lost``.

    Args:
        figures: The ``summary`` of a ``drain.json``: counts of spans, ``otlp`` where spans were sent, and
            ``exporters`` where others got them.
    """
    otlp, exporters = figures.get("otlp"), figures.get("exporters", {})
    parts = [f"{figures.get('spans', 0):,} spans recorded"]
    if figures.get("truncated"):
        parts.append(f"{figures['truncated']:,} of them cut off by the end of their process")
    if otlp:
        waiting = otlp.get("waiting", 0) + otlp.get("spilled", 0)
        parts += [f"{otlp.get('accepted', 0):,} sent", f"{waiting:,} waiting" if waiting else "none waiting"]
        if otlp.get("trouble") and waiting:
            parts[-1] += f" ({otlp['trouble']})"
    for name, exporter in exporters.items():
        parts.append(f"{exporter['accepted']:,} to {name}")
        if exporter["waiting"]:
            parts.append(f"{exporter['waiting']:,} waiting for {name}")
    return ", ".join([*parts, _lost(figures, otlp or {}, exporters)])


def _lost(figures: Mapping[str, Any], otlp: Mapping[str, Any], exporters: Mapping[str, Any]) -> str:
    reasons = {
        **{f"ring full at level {k[7:]}": n for k, n in figures.items() if k.startswith("lapped_")},
        "no room in the ring": figures.get("unrecorded", 0),
        "quota": figures.get("dropped_by_quota", 0),
        f"rejected: {otlp.get('rejection')}": otlp.get("rejected", 0),
        **otlp.get("dropped", {}),
        **{f"{name} {why}": n for name, exporter in exporters.items() for why, n in exporter["dropped"].items()},
    }
    lost = [f"{n:,} lost ({why})" for why, n in reasons.items() if n]
    return ", ".join(lost) or "none lost"
