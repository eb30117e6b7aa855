"""Which variables are ours, and which of them somebody may have meant who wrote another."""

from collections.abc import Iterable, Iterator, Mapping

from otel_dltrace.settings.config import SWITCH, VARIABLES
from otel_dltrace.settings.said import said
from otel_dltrace.settings.viewers import VIEWERS

OWN = frozenset({SWITCH, *VARIABLES.values(), *(viewer.variable for viewer in VIEWERS.values())})
UNKNOWN = "is not a variable we know, and has no effect"


def nearest(name: str, known: Iterable[str]) -> str:
    """Return which of *known* the variable *name* is likely to be misspelt from, "" for none."""
    from difflib import get_close_matches  # few programs have such a variable, and it costs their start

    return next(iter(get_close_matches(name, known, 1, 0.85)), "")


def misspelt(env: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence for each variable in *env* that looks like one of ours, and is none.

    Others that begin like ours may be Kubernetes', after a service of that name.
    """
    for name in env:
        if name.startswith(SWITCH) and name not in OWN and said(env, name) and (near := nearest(name, OWN)):
            yield f"{name} {UNKNOWN}; did you mean {near}?"
