"""The one line that says what became of a run's spans, from the figures that its drains wrote down."""

import json
from collections.abc import Mapping
from typing import Any

REFUSED = "refused by the collector"
"""Why spans were dropped that a collector said no to for good."""
_SHARED = "with those of other runs of the same drain"


def told_in(text: str) -> dict[str, Any] | None:
    """Return what the *text* of a ``drain.json`` tells: ``summary``, ``processes``, ``ended``; None if it is damaged.

    The spans are also those that are read and not counted yet.
    """
    try:
        told = json.loads(text)
        summary = dict(told["summary"])
        summary["spans"] = summary.get("spans", 0) + told.get("so_far", 0)
        return {"summary": summary, "processes": list(told["processes"]), "ended": bool(told.get("ended"))}
    except (TypeError, ValueError, KeyError):
        return None


def summary_line(figures: Mapping[str, Any], *, is_over: bool = True) -> str:
    """Return e.g. ``4,068 spans recorded, 4,268 sent, none waiting, none lost``.

    What was not sent is in the run directory all the same; lost is what is nowhere.

    Args:
        figures: The ``summary`` of a ``drain.json``: counts of spans, ``otlp`` where spans were sent, and
            ``exporters`` where others got them.
        is_over: Whether nothing more will happen to them; before, nobody knows that none is lost.
    """
    otlp, exporters = figures.get("otlp"), figures.get("exporters", {})
    parts = [f"{figures.get('spans', 0):,} spans recorded"]
    if figures.get("truncated"):
        parts.append(f"{figures['truncated']:,} of them cut off")
    if otlp:
        parts += _sent(otlp)
    for name, exporter in exporters.items():
        parts.append(f"{exporter['accepted']:,} to {name}")
        if exporter["waiting"]:
            parts.append(f"{exporter['waiting']:,} waiting for {name}")
    if figures.get("not_in_otlp"):
        parts.append(f"{figures['not_in_otlp']:,} not to be sent (outside OTEL_DLTRACE_STEPS or the span budget)")
    trouble = [*figures.get("metrics", {}).get("trouble", []), *figures.get("trouble", [])]
    return "; ".join([", ".join([*parts, *_lost(figures, exporters, is_over=is_over)]), *trouble])


def _sent(otlp: Mapping[str, Any]) -> list[str]:
    waiting = otlp.get("waiting", 0) + otlp.get("spilled", 0)
    trouble = otlp.get("diagnosis") or otlp.get("trouble")
    why = f" ({trouble})" if trouble else ""
    said = "; ".join(filter(None, (otlp.get("warning"), _SHARED if otlp.get("shared") else "")))
    remark = f" ({said})" if said else ""
    parts = [f"{otlp.get('accepted', 0):,} sent{remark}", f"{waiting:,} waiting{why}" if waiting else "none waiting"]
    kept = {f" (rejected: {otlp.get('rejection')})": otlp.get("rejected", 0)}
    for reason, count in otlp.get("dropped", {}).items():
        kept[why if reason == REFUSED and why else f" ({reason})"] = count
    return parts + [f"{count:,} kept here and not sent{reason}" for reason, count in kept.items() if count]


def losses(figures: Mapping[str, int]) -> list[str]:
    """Return what *figures* say is nowhere, e.g. ``7 records lost (ring full at level phase)``, each by its reason."""
    # Of what the ring could not hold only records are counted: an operation is two, its begin and its end.
    records = {
        **{f"ring full at level {k[7:]}": n for k, n in figures.items() if k.startswith("lapped_")},
        "no room in the ring": figures.get("unrecorded", 0),
    }
    reasons = {
        "quota": figures.get("dropped_by_quota", 0),
        "removed with the run directory": figures.get("removed", 0),
    }
    lost = [f"{n:,} record{'s' * (n != 1)} lost ({why})" for why, n in records.items() if n]
    return lost + [f"{n:,} lost ({why})" for why, n in reasons.items() if n]


def _lost(figures: Mapping[str, Any], exporters: Mapping[str, Any], *, is_over: bool) -> list[str]:
    dropped = {f"{name} {why}": n for name, exporter in exporters.items() for why, n in exporter["dropped"].items()}
    lost = losses(figures) + [f"{n:,} lost ({why})" for why, n in dropped.items() if n]
    if lost:
        return lost
    return ["none lost"] if is_over else []
