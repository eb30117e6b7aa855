"""Print the address of a step's trace in Jaeger, Tempo, Grafana or Perfetto: by its derived id, without a search.

    otel-dltrace open RUN --step 120
    otel-dltrace open JOB --step 120 --rank 3 --in grafana
    otel-dltrace open RUN --step 120 --in perfetto --serve

A job's name stands for its newest run in OTEL_DLTRACE_DIR. For Perfetto the step is written to a Chrome trace first.
"""

import argparse
import os
from pathlib import Path
from urllib.parse import urlsplit

from otel_dltrace.analysis.select import select
from otel_dltrace.cli.printing import tell
from otel_dltrace.cli.selection import keep_whole, tell_damage
from otel_dltrace.cli.time_line import moves_of, on_one_line
from otel_dltrace.configure.outcome import short_path
from otel_dltrace.export.chrome.writer import write_chrome
from otel_dltrace.export.rundir.reader import read_run
from otel_dltrace.export.serve import serve_once
from otel_dltrace.export.step_trace import StepTrace, find_run, find_step, is_sent
from otel_dltrace.model.errors import ConfigError, DltraceError
from otel_dltrace.model.plan import Window
from otel_dltrace.report import links
from otel_dltrace.settings.config import Config
from otel_dltrace.settings.viewers import VIEWERS, is_address, viewer_url

_DATASOURCE = "tempo"
_ONLY = {"--serve": "perfetto", "--output": "perfetto", "--datasource": "grafana"}


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("run_or_job", metavar="RUN|JOB", help="a run directory, or the name of a job")
    parser.add_argument("--step", type=int, required=True, metavar="N", help="the step, by its ordinal")
    parser.add_argument(
        "--rank", type=int, metavar="N", help="point at this rank's span (Jaeger); show only its part (Perfetto)"
    )
    parser.add_argument("--in", dest="viewer", choices=sorted(VIEWERS), default="jaeger", help="viewer (%(default)s)")
    parser.add_argument("--url", help="the viewer's address, instead of what its variable says, see below")
    parser.add_argument("--datasource", metavar="UID", help=f"of Tempo in Grafana ({_DATASOURCE})")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="Perfetto: where the Chrome trace is written")
    parser.add_argument("--serve", action="store_true", help="Perfetto: hand the trace to the page, then exit")
    defaults = "\n".join(f"  {viewer.variable:26} {viewer.address}" for viewer in VIEWERS.values())
    parser.epilog = f"variables, and their defaults:\n{defaults}"


def run(args: argparse.Namespace) -> int:
    """Print the address; return 0."""
    config = Config.from_env()
    _check_viewer(args)
    base = args.url or viewer_url(os.environ, args.viewer)
    if not is_address(base):
        raise ConfigError(f"{base!r} is not an address of {args.viewer}: write --url http://HOST:PORT")
    base = base.rstrip("/")
    path = find_run(args.run_or_job, Path(config.directory))
    trace = find_step(path, args.step, args.rank, config.span_budget)
    if args.viewer == "perfetto":
        return _perfetto(args, path, base)
    print(_address(args, base, trace))
    if not is_sent(path):
        tell(f"nothing from {short_path(path)} has reached a collector so far; --in perfetto shows what is on disk")
    return 0


def _check_viewer(args: argparse.Namespace) -> None:
    """Refuse what another viewer than the one asked for would heed."""
    given = {"--serve": args.serve, "--output": args.output is not None, "--datasource": args.datasource is not None}
    for option, viewer in _ONLY.items():
        if given[option] and args.viewer != viewer:
            raise ConfigError(
                f"{option} is for {viewer}, and not for {args.viewer}: write --in {viewer}, or leave it out"
            )


def _address(args: argparse.Namespace, base: str, trace: StepTrace) -> str:
    if args.viewer == "jaeger":
        return links.jaeger(base, trace.trace_id, "" if args.rank is None else trace.span_id)
    if args.viewer == "tempo":
        return links.tempo(base, trace.trace_id)
    return links.grafana(base, trace.trace_id, trace.start, trace.end, args.datasource or _DATASOURCE)


def _perfetto(args: argparse.Namespace, path: Path, base: str) -> int:
    rank = "" if args.rank is None else f"-rank-{args.rank}"
    file: Path = args.output or Path(f"{path.resolve().name}-step-{args.step}{rank}.json.gz")
    keep_whole([path], file)
    ranks = None if args.rank is None else [args.rank]
    step = Window.parse(f"{args.step}-{args.step}")
    batches = select(read_run(path, step, ranks), step, ranks)
    spans = on_one_line(batches, moves_of([path], step))
    try:
        write_chrome(spans, file)
    except OSError as error:
        raise DltraceError(f"{file} cannot be written: {error.strerror or error}") from None
    tell_damage([path])
    print(links.perfetto(base, file.name), flush=True)
    if args.serve:
        parts = urlsplit(base)
        serve_once(file, f"{parts.scheme}://{parts.netloc}", links.PERFETTO_PORT)
    else:
        tell(f"the trace is in {short_path(file)}: drop it on {base}, or let --serve hand it to the address above")
    return 0
