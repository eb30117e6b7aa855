"""Say what works, what does not, and why: environment, installation, frameworks, collector, host, last run.

    otel-dltrace doctor
    OTEL_DLTRACE=1 OTEL_EXPORTER_OTLP_ENDPOINT=http://collector:4318 otel-dltrace doctor --json

Run it with the same Python, in the same folder and with the same environment as the training. It changes nothing, and
sends the collector one request without a span. Exit code: 0 if nothing is wrong (notes are no errors), 1 if a finding
is a problem, 2 if the command line is wrong.
"""

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from otel_dltrace.cli.progress import progress
from otel_dltrace.doctor.checks import examine
from otel_dltrace.model.findings import PROBLEM, worst
from otel_dltrace.report.findings import findings_json, write_findings

WIDTH = 100
"""Characters of a line where no terminal says how wide it is."""
_VERBOSITY = "GRPC_VERBOSITY"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--quick", action="store_true", help="do not import the frameworks to see which parts are traced"
    )


def run(args: argparse.Namespace) -> int:
    """Print the findings; return 1 if one is a problem."""
    env = dict(os.environ)
    with _grpc_silent(), progress("looking"):
        findings = examine(env, import_frameworks=not args.quick)
    verdict = worst(findings)
    if args.json:
        print(findings_json(findings, verdict))
    else:
        own = Console()
        write_findings(findings, own if own.is_terminal else Console(width=max(WIDTH, own.width)))
    return int(verdict == PROBLEM)


@contextmanager
def _grpc_silent() -> Iterator[None]:
    """Have gRPC say nothing of a handshake that fails, for we do; it asks the environment alone, once."""
    is_ours = _VERBOSITY not in os.environ
    os.environ.setdefault(_VERBOSITY, "NONE")
    try:
        yield
    finally:
        if is_ours:
            del os.environ[_VERBOSITY]
