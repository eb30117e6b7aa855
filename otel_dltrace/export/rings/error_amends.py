"""AMEND records that say with which error a span ended, and the table of a process's errors."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from otel_dltrace.export.rings.records import ErrorAmend
from otel_dltrace.model.arrays import Column
from otel_dltrace.model.semconv import Flag

MAX_PENDING = 10_000
"""Errors without their span that are held: where the ring was lapped it never comes."""
MAX_ERRORS = 4096
"""Different errors that are told apart; of further ones only the type is kept."""


class ErrorAmends:
    """Holds each error until its span comes.

    Attributes:
        errors: Type and message by number; the first stands for none.
    """

    def __init__(self) -> None:
        self.errors: list[tuple[str, str]] = [("", "")]
        self._numbers: dict[tuple[str, str], int] = {}
        self._pending: dict[int, ErrorAmend] = {}

    def hold(self, amends: Iterable[ErrorAmend]) -> int:
        """Take in *amends*; return how many had to go, the oldest, as there were too many."""
        self._pending.update((amend.span_no, amend) for amend in amends)
        if len(self._pending) <= MAX_PENDING:
            return 0
        oldest = list(self._pending)[: len(self._pending) - MAX_PENDING // 2]
        for span_no in oldest:
            del self._pending[span_no]
        return len(oldest)

    def apply(self, rows: Column, name_of: Callable[[int], str]) -> None:
        """Give *rows* their errors, in place; *name_of* returns the type that a number in the ring stands for."""
        if not self._pending:
            return
        for i in np.flatnonzero(np.isin(rows["span_no"], list(self._pending))):
            amend = self._pending.pop(int(rows["span_no"][i]))
            rows["error"][i] = self._number(name_of(amend.type_string), amend.message)
            rows["flags"][i] |= np.uint16(Flag.ERROR)

    def renumber(self, rows: Column, errors: Sequence[tuple[str, str]]) -> None:
        """Have *rows*, whose errors are numbers in *errors*, speak of our `errors`; in place."""
        if len(errors) > 1:
            numbers = np.array([0, *(self._number(*error) for error in errors[1:])], np.uint32)
            rows["error"] = numbers[rows["error"]]

    def _number(self, kind: str, message: str) -> int:
        """Return the number of an error in `errors`, which stays short however often a program fails."""
        if len(self.errors) >= MAX_ERRORS:
            message = ""
        number = self._numbers.setdefault((kind, message), len(self.errors))
        if number == len(self.errors):
            self.errors.append((kind, message))
        return number
