"""Numbers as people write them."""

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def whole_number(text: str) -> int | None:
    """Return the whole number that *text* is, with K, M or G (of 1,024) after it if you like; None if it is none."""
    digits, unit = (text[:-1], text[-1].upper()) if text[-1:].isalpha() else (text, "")
    return int(digits) * _UNITS[unit] if digits.isascii() and digits.isdigit() and unit in _UNITS else None
