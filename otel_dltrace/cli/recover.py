"""Finish what a killed run left: read rings whose writer and drain are gone, send what waits on disk.

Spans go where their run would have put them; open ones are closed as truncated.
"""

import argparse
import sys
from pathlib import Path

from otel_dltrace.configure import Config, drain_for
from otel_dltrace.export.otlp_sender import resend
from otel_dltrace.export.otlp_settings import OtlpSettings
from otel_dltrace.export.run_reader import host_folders


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="run directories whose spilled requests are sent")
