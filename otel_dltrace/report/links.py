"""The addresses at which viewers show one trace, without a search."""

import json
from urllib.parse import quote, urlencode

PERFETTO_PORT = 9001
"""The one port of this machine from which ui.perfetto.dev may read."""
_AROUND_MS = 60_000


def jaeger(base: str, trace_id: str, span_id: str = "") -> str:
    """Return the page of a trace in Jaeger, at *span_id* if that is given."""
    return f"{base}/trace/{trace_id}" + (f"?uiFind={span_id}" if span_id else "")


def tempo(base: str, trace_id: str) -> str:
    """Return what Tempo, which has no pages, answers for a trace: JSON."""
    return f"{base}/api/v2/traces/{trace_id}"


def grafana(base: str, trace_id: str, start: int, end: int, datasource: str) -> str:
    """Return the page of Grafana's Explore that shows a trace of the Tempo *datasource* (its uid).

    Args:
        base: Grafana's address.
        trace_id: In hexadecimal.
        start: When the step began, Unix ns: Tempo looks in that time alone.
        end: When it ended.
        datasource: The data source's uid.
    """
    source = {"type": "tempo", "uid": datasource}
    pane = {
        "datasource": datasource,
        "queries": [{"refId": "A", "datasource": source, "queryType": "traceql", "query": trace_id}],
        "range": {"from": str(start // 1_000_000 - _AROUND_MS), "to": str(end // 1_000_000 + _AROUND_MS)},
    }
    panes = json.dumps({"step": pane}, separators=(",", ":"))
    return f"{base}/explore?{urlencode({'schemaVersion': 1, 'panes': panes, 'orgId': 1})}"


def perfetto(base: str, file: str) -> str:
    """Return the page of Perfetto that reads *file* from this machine, where somebody serves it."""
    return f"{base}/#!/?url=http://127.0.0.1:{PERFETTO_PORT}/{quote(file)}"
