"""Text as files and requests can hold it."""


def clean(text: str) -> str:
    """Return *text* as UTF-8 can hold it; lone surrogates (file names read as bytes) become question marks."""
    return text.encode("utf-8", "replace").decode()
