"""What a variable says, the same wherever it is read."""

from collections.abc import Mapping


def said(env: Mapping[str, str], variable: str) -> str:
    """Return what *env* says of *variable*, "" where it says nothing: blanks are none, as in a template left open."""
    return env.get(variable, "").strip()
