"""Numbers as people write them."""

import math
from collections.abc import Mapping

from otel_dltrace.model.errors import ConfigError

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_DIGITS = 20
"""No setting needs more, and Python refuses to read more than 4,300."""
MOST = 10**_DIGITS - 1
"""The largest that is read again as we write it, without a unit."""


def whole_number(text: str) -> int | None:
    """Return the whole number that *text* is, with K, M or G (of 1,024) after it if you like; None if it is none."""
    digits, unit = (text[:-1], text[-1].upper()) if text[-1:].isalpha() else (text, "")
    is_number = digits.isascii() and digits.isdigit() and len(digits) <= _DIGITS and unit in _UNITS
    return int(digits) * _UNITS[unit] if is_number else None


def size(env: Mapping[str, str], name: str, default: int = 0) -> int:
    """Return the whole number that the variable *name* of *env* says, with K, M or G if you like, or *default*.

    Raises:
        ConfigError: It says none.
    """
    text = env.get(name, "").strip()
    number = whole_number(text) if text else default
    if number is None:
        raise ConfigError(f"{name}={text!r} is not a whole number (K, M or G may follow it)")
    return number


def milliseconds(env: Mapping[str, str], name: str, default: float) -> float:
    """Return the time that the variable *name* of *env* says, or *default*.

    Raises:
        ConfigError: It says none.
    """
    text = env.get(name, "").strip()
    value = _real(text) if text else default
    if not 0 < value < math.inf:
        raise ConfigError(f"{name}={text!r} is not a number of milliseconds above 0: write {default:.0f}, for example")
    return value


def share(env: Mapping[str, str], name: str) -> float:
    """Return the share that the variable *name* of *env* says, 1 if it says nothing.

    Raises:
        ConfigError: It says none.
    """
    text = env.get(name, "").strip()
    value = _real(text) if text else 1.0
    if not 0 <= value <= 1:
        raise ConfigError(f"{name}={text!r} is not a share of traces from 0 to 1")
    return value


def _real(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
