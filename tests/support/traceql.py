"""TraceQL as Tempo 3.0 documents it: its grammar, and whether the types in a query fit those that are sent.

There is no Tempo where the tests run. Tempo takes an attribute to be of any type: a query that compares an
integer with a text is valid there, and finds nothing. So here attributes have the type that they are sent with.
"""

import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from lark import Lark, Transformer, v_args
from lark.exceptions import UnexpectedInput, VisitError

INTRINSICS = {
    "span:name": "string",
    "span:duration": "duration",
    "span:status": "status",
    "span:statusMessage": "string",
    "span:kind": "kind",
    "span:id": "string",
    "span:parentID": "string",
    "span:childCount": "int",
    "trace:id": "string",
    "trace:duration": "duration",
    "trace:rootName": "string",
    "trace:rootService": "string",
    "event:name": "string",
    "event:timeSinceStart": "duration",
    "link:traceID": "string",
    "link:spanID": "string",
    "instrumentation:name": "string",
    "instrumentation:version": "string",
    "name": "string",
    "duration": "duration",
    "status": "status",
    "statusMessage": "string",
    "kind": "kind",
    "rootName": "string",
    "rootServiceName": "string",
    "traceDuration": "duration",
}
_PLAIN_NUMBERS = frozenset({"int", "float"})
_NUMBERS = _PLAIN_NUMBERS | {"duration"}


class QueryError(Exception):
    """A query that Tempo refuses, or that finds nothing."""


def check(query: str, attributes: Mapping[str, str]) -> None:
    """Check *query*.

    Args:
        query: One query.
        attributes: The type of each attribute that there is, by its name with its scope: ``span.dl.step``.

    Raises:
        QueryError: It is no TraceQL, knows an attribute that is not sent, or compares what cannot be equal.
    """
    try:
        _Types(attributes).transform(_parser().parse(query))
    except UnexpectedInput as error:
        raise QueryError(f"{query}\n{error.get_context(query)}is no TraceQL") from None
    except VisitError as error:
        raise QueryError(f"{query}: {error.orig_exc}") from None


@lru_cache(maxsize=1)
def _parser() -> Lark:
    grammar = Path(__file__).with_suffix(".lark").read_text(encoding="utf-8")
    return Lark(grammar, parser="earley", lexer="basic", maybe_placeholders=False)


@v_args(inline=True)
class _Types(Transformer[Any, str]):
    """Replaces each part of a query by the name of its type."""

    def __init__(self, attributes: Mapping[str, str]) -> None:
        super().__init__()
        self._attributes = attributes

    def attribute(self, name: str) -> str:
        """Return the type that the attribute is sent with."""
        if name not in self._attributes:
            raise TypeError(f"no span has {name}")
        return self._attributes[name]

    def intrinsic(self, name: str) -> str:
        if name not in INTRINSICS:
            raise TypeError(f"there is no {name}")
        return INTRINSICS[name]

    def filter(self, condition: str = "bool") -> str:
        return _expect(condition, {"bool"}, "a filter")

    def logic(self, left: str, right: str) -> str:
        _expect(left, {"bool"}, "&& and ||")
        return _expect(right, {"bool"}, "&& and ||")

    def negation(self, what: str) -> str:
        return _expect(what, {"bool"}, "!")

    def negative(self, what: str) -> str:
        return _expect(what, _NUMBERS, "-")

    def addition(self, left: str, right: str) -> str:
        kinds = {_expect(left, _NUMBERS, "arithmetic"), _expect(right, _NUMBERS, "arithmetic")}
        return next(kind for kind in ("duration", "float", "int") if kind in kinds)

    multiplication = addition

    def calculation(self, left: str, _: str, right: str) -> str:
        return self.addition(left, right)

    def exists(self, _: str) -> str:
        return "bool"

    def relation(self, left: str, operator: str, right: str) -> str:
        if operator in ("=~", "!~"):
            _expect(left, {"string"}, operator)
            _expect(right, {"string"}, operator)
        elif left != right and not {left, right} <= _PLAIN_NUMBERS:
            raise TypeError(f"{left} {operator} {right} is never true")
        return "bool"

    scalar_filter = relation

    def count(self) -> str:
        return "int"

    def aggregate(self, name: str, what: str) -> str:
        return _expect(what, _NUMBERS, name)

    def over_time(self, *arguments: str) -> str:
        what = next(argument for argument in arguments if argument in ("string", "bool", "status", "kind", *_NUMBERS))
        return _expect(what, _NUMBERS, "a function over time")

    def quantile(self, value: str) -> str:
        if not 0 <= float(value) <= 1:
            raise TypeError(f"{value} is no quantile")
        return "quantile"

    def ranking(self, number: str) -> str:
        if not int(number):
            raise TypeError("topk and bottomk need at least 1")
        return "ranking"

    def string(self, text: str) -> str:
        re.compile(text[1:-1])  # Tempo compiles it where it is the right side of =~
        return "string"

    def negative_number(self, kind: str) -> str:
        return kind

    def integer(self, _: str) -> str:
        return "int"

    def float(self, _: str) -> str:
        return "float"

    def duration(self, _: str) -> str:
        return "duration"

    def boolean(self, _: str) -> str:
        return "bool"

    def status(self, _: str) -> str:
        return "status"

    def kind(self, _: str) -> str:
        return "kind"


def _expect(found: str, wanted: "set[str] | frozenset[str]", where: str) -> str:
    if found not in wanted:
        raise TypeError(f"{where} takes {' or '.join(sorted(wanted))}, not {found}")
    return found
