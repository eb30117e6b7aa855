"""What a doctor found: a table for people, and JSON for programs."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from otel_dltrace.model.findings import FINE, NOTE, PROBLEM, Finding
from otel_dltrace.report.words import plain

_MARKS = {FINE: ("ok", "green"), NOTE: ("note", "yellow"), PROBLEM: ("PROBLEM", "bold red")}


def write_findings(findings: Sequence[Finding], console: Console) -> None:
    """Write *findings* to *console* as a table, and their number."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    table.add_column("what", no_wrap=True)
    table.add_column("how it is, and what to do", overflow="fold")
    before = ""
    for finding in findings:
        mark, style = _MARKS[finding.verdict]
        text = Text(plain(finding.what))
        if finding.cure:
            text.append(f"\n-> {plain(finding.cure)}", style="dim" if finding.verdict == FINE else "bold")
        table.add_row(Text(mark, style=style), finding.area if finding.area != before else "", text)
        before = finding.area
    console.print(table, highlight=False)
    console.print(Text(f"\n{summary(findings)}"), highlight=False)


def summary(findings: Sequence[Finding]) -> str:
    """Return how many problems and notes there are, in one sentence."""
    count = Counter(finding.verdict for finding in findings)
    if not count[PROBLEM]:
        notes = f"; {count[NOTE]} to note" if count[NOTE] else ""
        return f"No problem in {len(findings)} findings{notes}."
    problems = "is a problem" if count[PROBLEM] == 1 else "are problems"
    return f"{count[PROBLEM]} of {len(findings)} findings {problems}, {count[NOTE]} to note."


def findings_json(findings: Sequence[Finding], verdict: str) -> str:
    """Return *findings* and their worst *verdict* as one JSON object."""
    return json.dumps({"schema": 1, "verdict": verdict, "findings": [asdict(one) for one in findings]}, indent=2)
