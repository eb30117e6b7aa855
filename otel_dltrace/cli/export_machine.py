"""What a Chrome trace shows beside the spans: the metrics, and what the machine did in slow stages."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from otel_dltrace.analysis.compose import slow_stages_of
from otel_dltrace.analysis.select import select, select_metrics
from otel_dltrace.analysis.steps.table import step_tables
from otel_dltrace.cli.progress import progress, summing
from otel_dltrace.cli.selection import steps_of
from otel_dltrace.export.chrome.notes import Note
from otel_dltrace.export.rundir.metric_reader import read_metrics
from otel_dltrace.export.rundir.stream import read_outline
from otel_dltrace.model.attributes import Value
from otel_dltrace.model.errors import RunNotFoundError
from otel_dltrace.model.metric_batch import MetricBatch
from otel_dltrace.model.spans import SpanBatch
from otel_dltrace.report.machine import meanwhile, sentence


def machine_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the metrics of the chosen part of the runs, and remarks on it."""
    metrics: list[MetricBatch] = []
    notes: list[Note] = []
    outlines = []
    for run in args.runs:
        sampled = read_metrics(run)
        outline = _outline(run, bool(sampled))
        outlines += outline
        if sampled:
            chosen = _chosen(outline, args)
            cut = select_metrics(sampled, chosen)
            metrics += cut
            notes += _slow_stage_notes(chosen, cut)
    select(outlines, steps_of(args), args.rank)  # a rank or step that no run has is said before anything is written
    return {"metrics": metrics, "notes": notes}


def _chosen(batches: Sequence[SpanBatch], args: argparse.Namespace) -> list[SpanBatch]:
    try:
        return select(batches, steps_of(args), args.rank)
    except RunNotFoundError:
        return []  # of several runs one may have none of it


def _outline(run: Path, with_operations: bool) -> list[SpanBatch]:
    with progress("looking through the spans") as count:
        return read_outline(run, summing(count), with_operations)


def _slow_stage_notes(batches: Sequence[SpanBatch], metrics: Sequence[MetricBatch]) -> list[Note]:
    """Return a remark on each slow stage of *batches*, wherever it was slow: what the machine did meanwhile."""
    found, windows = slow_stages_of(batches, metrics)
    nonces = {t.rank: t.batch.process.nonce for t in step_tables(batches)}
    notes = []
    for stage, times in zip(found.stages, windows, strict=True):
        args: dict[str, Value] = {"what": sentence(stage), "meanwhile": meanwhile(stage)}
        name = f"slow {stage.slow.stage}"
        notes += [Note(nonces[stage.slow.rank], start, end, name, args) for start, end in times.tolist()]
    return notes
