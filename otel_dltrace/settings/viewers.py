"""Where the viewers are that show a trace."""

from collections.abc import Mapping
from typing import NamedTuple

from otel_dltrace.settings.config import SWITCH


class Viewer(NamedTuple):
    """Where traces are looked at: the variable that says its address, and the address that it has by default."""

    variable: str
    address: str


VIEWERS = {
    "jaeger": Viewer(f"{SWITCH}_JAEGER_URL", "http://localhost:16686"),
    "tempo": Viewer(f"{SWITCH}_TEMPO_URL", "http://localhost:3200"),
    "grafana": Viewer(f"{SWITCH}_GRAFANA_URL", "http://localhost:3000"),
    "perfetto": Viewer(f"{SWITCH}_PERFETTO_URL", "https://ui.perfetto.dev"),
}


def viewer_url(env: Mapping[str, str], name: str) -> str:
    """Return the address of the viewer *name*, one of `VIEWERS`, without a slash at its end."""
    viewer = VIEWERS[name]
    return (env.get(viewer.variable, "").strip() or viewer.address).rstrip("/")
