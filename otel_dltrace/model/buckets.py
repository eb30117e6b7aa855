"""Which backward of a step DDP's buckets are of: one step may have several."""

import numpy as np

from otel_dltrace.model.arrays import Column
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.model.semconv import COMM_HOOK

_DIGITS = 10
"""A number of so many digits is no bucket's, and might not fit."""


def bucket_number(d: Descriptor) -> int:
    """Return the number of a bucket of DDP's; other tensors may be called so too, with anything behind it."""
    word = d.tensor.removeprefix("bucket ")
    return int(word) if len(word) < _DIGITS and word.isdecimal() else 0


def is_hooked(d: Descriptor) -> bool:
    """Return whether it is a bucket that a communication hook of the program's reduces."""
    return d.is_bucket and d.name == COMM_HOOK


def first_calls(at: Column, end: Column, calls: Column) -> Column:
    """Return when each hook, launched *at* a time and done at its *end*, begins to communicate: with its first call.

    Until then it computes, as one that compresses does. Where none of the *calls* is in it, that is at once.
    """
    calls = np.sort(calls)
    place = np.searchsorted(calls, at)
    first = calls.take(place, mode="clip") if len(calls) else at
    begun: Column = np.where((place < len(calls)) & (first <= end), first, at)
    return begun


def backwards(number: Column, at: Column, end: Column) -> tuple[Column, Column]:
    """Return of each bucket, launched *at* a time and done at its *end*, whether a backward begins there, and its end.

    That is when the last of its buckets was done. Another one may have begun where buckets are numbered anew and all
    that were launched before are done.
    """
    order = np.argsort(at, kind="stable")
    number, at, end = number[order], at[order], end[order]
    new = np.ones(len(at), bool)
    new[1:] = (number[1:] <= number[:-1]) & (at[1:] >= np.maximum.accumulate(end)[:-1])
    begins, last = np.empty_like(new), np.empty_like(end)
    begins[order] = new
    last[order] = np.maximum.reduceat(end, np.flatnonzero(new))[np.cumsum(new) - 1] if len(end) else end
    return begins, last
