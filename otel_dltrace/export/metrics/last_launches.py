"""From when on each backward of a step only waits for DDP's buckets: `analysis.steps.blocked` of rows as they come."""

import numpy as np

from otel_dltrace.model.arrays import Column, latest, places_in
from otel_dltrace.model.buckets import backwards
from otel_dltrace.model.semconv import Source


def is_within(rows: Column, backward: Column) -> Column:
    """Return a mask of the *rows* that begin in their step's *backward*, in a piece of it or between two."""
    place = places_in(rows["step"], backward["step"])
    if not len(backward):
        return place >= 0
    begin, end, at = backward["start"][place], backward["end"][place], rows["start"]
    within: Column = (place >= 0) & (begin <= at) & (at < end)
    return within


def after_last_launch(
    launched: Column, begun: Column, number: Column, backward: Column
) -> tuple[Column, Column, Column]:
    """Return (begin, end, step) from each backward's last launch until it waits no more.

    Bounds tell its end, and buckets that are seen to be done; else it is that of the stage.

    Args:
        launched: Buckets.
        begun: When what each of them communicates begins: with its launch, or in its hook.
        number: Which bucket each of them is.
        backward: That stage of each step.
    """
    step, until = launched["step"].astype(np.int64), launched["end"].copy()
    loose = launched["source"] != Source.BOUND
    until[loose] = _ends(launched.compress(loose), number[loose], backward)
    (step, until), last = latest((step, until.astype(np.int64)), begun)
    return last, np.maximum(until, last), step.astype(np.uint32)


def _ends(launched: Column, number: Column, backward: Column) -> Column:
    """Return the end of the backward of each bucket *launched* that is no bound; all are within their step's."""
    place = places_in(launched["step"], backward["step"])
    until: Column = backward["end"][place]
    is_seen = (launched["source"] == Source.HOST_DONE) & (backward["source"][place] != Source.DEVICE)
    seen = ~np.isin(place, place[~is_seen])
    at, done = launched["start"][seen], launched["end"][seen]
    begins, ends = backwards(number[seen], at, done)
    # More of them than the stage has pieces are one backward through several models: it ends with the last one's.
    told = np.bincount(place[seen][begins], minlength=len(backward))
    latest_done = np.zeros(len(backward), done.dtype)
    np.maximum.at(latest_done, place[seen], done)
    of_stage = np.minimum(until[seen], latest_done[place[seen]])
    until[seen] = np.where((told <= np.maximum(backward["a"], 1))[place[seen]], np.minimum(ends, of_stage), of_stage)
    return until
