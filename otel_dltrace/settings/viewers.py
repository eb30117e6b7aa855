"""Where the viewers are that show a trace."""

from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

from otel_dltrace.model.errors import ConfigError
from otel_dltrace.settings.config import SWITCH
from otel_dltrace.settings.said import said


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
    """Return the address of the viewer *name*, one of `VIEWERS`, without a slash at its end.

    Raises:
        ConfigError: What its variable says is none.
    """
    viewer = VIEWERS[name]
    url = said(env, viewer.variable) or viewer.address
    if not is_address(url):
        from otel_dltrace.export.otlp.settings import public  # a training process has read this file, and not that

        raise ConfigError(f"{viewer.variable}={public(url)!r} is not an address of {name}: write http://HOST:PORT")
    return url.rstrip("/")


def is_address(url: str) -> bool:
    """Return whether a browser may be sent to *url*."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a bracket that is not closed, or a port that is no number
        return False
