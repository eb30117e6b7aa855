"""Text as files and requests can hold it, and terminals."""

_TURNING = (0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
"""Unicode's marks that say in which direction text runs."""
_OBEYED = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160), *_TURNING], "?")
"""They and control characters, but for tabs and ends of lines."""


def clean(text: str) -> str:
    """Return *text* as UTF-8 can hold it; lone surrogates (file names read as bytes) become question marks."""
    return text.encode("utf-8", "replace").decode()


def harmless(text: str) -> str:
    """Return *text* with question marks for what a terminal would obey: names of files may be anybody's."""
    return text.translate(_OBEYED)
