"""The report for programs: every field of the result under its own name, all times in ns."""

import json
from dataclasses import asdict

from otel_dltrace.analysis.compose import RunReport
from otel_dltrace.analysis.negotiation.coordinator import Negotiations
from otel_dltrace.analysis.push_pulls.keys import Keys
from otel_dltrace.analysis.scaling import Scaling

SCHEMA_VERSION = 1


def to_json(report: RunReport | Keys | Negotiations | Scaling, **of: str | int) -> str:
    """Return *report* as one JSON object, *of* being what it is of; what cannot be told is null."""
    return json.dumps({"schema": SCHEMA_VERSION, **of, **asdict(report)}, indent=2, allow_nan=False)
