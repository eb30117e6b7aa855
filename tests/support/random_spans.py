"""Batches of spans as hypothesis draws them, and how requests of them are compared."""

from hypothesis import strategies as st

from otel_dltrace.model.identity import NO_STEP, Bind
from otel_dltrace.model.operation import RANK_STEP, Descriptor
from otel_dltrace.model.spans import Process, SpanBatch, empty_rows
from otel_dltrace.model.time import Anchor

BIND = Bind("job-7", "2.00ff", world="default", role="worker", rank=3, world_size=8)


def normal(request):
    """Attributes in the order of their names, spans in that of their ids: neither order means anything."""
    (resource_spans,) = request.resource_spans
    (scope_spans,) = resource_spans.scope_spans
    spans = sorted(scope_spans.spans, key=lambda span: span.span_id)
    for span in spans:
        attributes = sorted(span.attributes, key=lambda attribute: attribute.key)
        del span.attributes[:]
        span.attributes.extend(attributes)
    del scope_spans.spans[:]
    scope_spans.spans.extend(spans)
    return request


def number(low, high):
    """Whole numbers, their extremes more often than chance has it."""
    return st.sampled_from([low, high, min(high, max(low, 0)), min(high, 127), min(high, 128)]) | st.integers(low, high)


# Every character there is, surrogates too; and short usual texts, so that rows share their shape.
texts = st.text(st.characters(exclude_categories=()), max_size=6) | st.sampled_from(
    ["", "gloo", "0", "a\0b", "\ud800", "é" * 90]
)
kinds = st.sampled_from(["step", "stage", "collective", "p2p", "phase", "tick", "metric"])
names = st.sampled_from(["rank.step", "train.step", "all_reduce", "isend", "irecv", "PUSH"]) | texts
descriptors = st.builds(
    Descriptor,
    kinds,
    names,
    texts,
    number(-1, (1 << 31) - 1),
    texts,
    texts,
    number(-1, (1 << 31) - 1),
    texts,
    texts,
    texts,
) | st.sampled_from([RANK_STEP, Descriptor("step", "train.step")])
WALL = 1_700_000_000_000_000_000
i32, u32 = number(-(1 << 31), (1 << 31) - 1), number(0, NO_STEP)
LAUNCHED = (("dl.launcher.trace_id", f"{0xABC:032x}"), ("dl.launcher.span_id", f"{0xDEF:016x}"))
columns = {
    "start": number(-WALL, (1 << 63) - 1),
    "end": number(-WALL, (1 << 63) - 1),
    "size": number(0, (1 << 64) - 1),
    "parent_id": number(0, (1 << 64) - 1),
    "step": u32,
    "descriptor": number(0, 4) | u32,
    "seq": u32,
    "a": i32,
    "b": i32,
    "error": st.integers(0, 2),
    "partition": number(0, 0xFFFF),
    "flags": number(0, 7) | number(0, 0xFFFF),
    "level": number(0, 15),
    "source": number(0, 15),
}
values = texts | number(-(1 << 63), (1 << 63) - 1) | st.booleans()
resources = st.dictionaries(st.text(min_size=1, max_size=6), values, max_size=4)
errors = st.lists(st.tuples(texts, texts), min_size=2, max_size=2)


@st.composite
def batches(draw):
    fields = draw(st.lists(st.fixed_dictionaries(columns), min_size=1, max_size=12))
    rows = empty_rows(len(fields))
    for name in columns:
        rows[name] = [f[name] for f in fields]
    n = len(fields)
    rows["span_id"] = draw(st.lists(number(0, (1 << 64) - 1), min_size=n, max_size=n, unique=True))
    launched = draw(st.sampled_from([(), LAUNCHED]))
    process = Process(1, draw(st.sampled_from([BIND, None])), anchor=Anchor(5, WALL + 5, 1), resource=launched)
    table = draw(st.lists(descriptors, max_size=5))
    batch = SpanBatch(rows, table, process, (("", ""), *draw(errors)))
    return batch.take(slice(None, None, draw(st.sampled_from([1, -1]))))
