"""What import and export say of the formats they know."""

from collections.abc import Mapping

_WIDTH = 8


def formats_help(about: Mapping[str, str]) -> str:
    """Return a list of formats by name, each with what it is for; a long name has a line of its own."""
    indent = "\n" + " " * (_WIDTH + 2)
    entries = []
    for name, text in about.items():
        head = f"  {name:{_WIDTH}}" if len(name) < _WIDTH else f"  {name}{indent}"
        entries.append(head + text.replace("\n", indent))
    return "formats:\n" + "\n".join(entries)
