"""docs/queries.md: each query is TraceQL, and asks for attributes that are sent, by the type they are sent with."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_dltrace.export.rundir.traces import trace_id_column
from otel_dltrace.model import semconv as s
from otel_dltrace.model.identity import NO_STEP, Bind
from tests.support.paths import ROOT
from tests.support.sent import SENT, everything
from tests.support.traceql import QueryError, check

TEXT = (ROOT / "docs" / "queries.md").read_text(encoding="utf-8")
QUERIES = re.findall(r"^```traceql\n(.+?)\n```$", TEXT, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("query", QUERIES)
def test_a_documented_query_finds_what_is_sent(query):
    """Its syntax is Tempo's, its attributes are ours, and it compares numbers with numbers."""
    check(query, SENT)


def test_the_questions_that_are_promised_are_answered():
    """Slowest steps, last rank, p99 of PUSH for each key, exposed communication by rank."""
    text = "\n".join(QUERIES)
    promised = [
        '{ span:name = "train.step" && span:duration >',
        "by (resource.dl.rank) | bottomk(",
        '{ span.dl.queue.type = "PUSH" } | quantile_over_time(span:duration, 0.99) by (span.dl.key)',
        '{ span:name = "wait" || span.dl.comm.async = false } | sum_over_time(span:duration) by (resource.dl.rank)',
    ]

    assert [part for part in promised if part not in text] == []


def test_the_attributes_that_queries_may_use_are_those_of_the_semantic_conventions():
    """Nothing is sent under a name that is not in model/semconv.py."""
    names = {value for name, value in vars(s).items() if name.isupper() and isinstance(value, str)}

    assert {name.partition(".")[2] for name in SENT} - names == set()


@pytest.mark.parametrize(
    ("query", "why"),
    [
        pytest.param('{ span.dl.step = "120" }', "int = string is never true", id="a number as text"),
        pytest.param("{ span.dl.queue.wait > 1ms }", "int > duration is never true", id="microseconds as duration"),
        pytest.param("{ span.dl.rank = 3 }", "no span has span.dl.rank", id="the wrong scope"),
        pytest.param("{ span:name > 2s }", "string > duration is never true", id="a name is no duration"),
        pytest.param("{ span:lenght > 2s }", "there is no span:lenght", id="an intrinsic that is none"),
        pytest.param("{ span.dl.step }", "a filter takes bool, not int", id="a filter that asks nothing"),
        pytest.param('{ span.dl.step =~ "1.*" }', "=~ takes string, not int", id="a pattern for a number"),
        pytest.param("{ } | quantile_over_time(span:duration, 99)", "99 is no quantile", id="percent"),
        pytest.param("{ } | sum_over_time(span:name)", "not string", id="the sum of names"),
        pytest.param("{ } | topk(3)", "is no TraceQL", id="the best of no series"),
        pytest.param("{ } | rate() by resource.dl.rank", "is no TraceQL", id="by without parentheses"),
        pytest.param('{ span:name = "PUSH"', "is no TraceQL", id="an open brace"),
        pytest.param("{ span:name = PUSH }", "is no TraceQL", id="a text without quotes"),
        pytest.param("{ } | rate() | topk(0)", "at least 1", id="the best none"),
    ],
)
def test_a_query_that_finds_nothing_is_told(query, why):
    """What Tempo would refuse, and what it would answer with silence."""
    with pytest.raises(QueryError, match=re.escape(why)):
        check(query, SENT)


@given(st.lists(st.integers(0, NO_STEP - 1), min_size=1, max_size=50), st.text(max_size=5))
def test_no_trace_id_that_is_sent_begins_with_zero(steps, job):
    """Tempo prints ids without leading zeros, and a link by such an id would lead nowhere."""
    batch = everything().take(np.zeros(len(steps), int))
    batch.rows["step"] = steps

    ids = trace_id_column(batch, Bind(job, "1.00"))

    assert [row.tobytes().hex() for row in ids if row[0] < 0x10] == []
