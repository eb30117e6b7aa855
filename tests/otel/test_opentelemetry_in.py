"""The user's own OpenTelemetry spans beside ours: who is whose parent, and nothing of theirs is damaged."""

import json
import textwrap
from typing import Any

import pytest

from otel_dltrace.model.identity import Bind, rank_step_id, trace_id
from tests.support.processes import Place, but_for_rings

USER = """
import asyncio, json, sys, threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import otel_dltrace
from opentelemetry import context, trace
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from otel_dltrace.record.tracer import live

memory = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(memory))
tracer = provider.get_tracer("user")
step = otel_dltrace.step

@contextmanager
def span(name):
    with tracer.start_as_current_span(name) as it:
        yield it

with step():  # a process that nobody launched knows who it is once its second step begins
    pass

{program}

def plain(span):
    return {{
        "name": span.name,
        "trace": span.context.trace_id,
        "id": span.context.span_id,
        "parent": span.parent and span.parent.span_id,
        "links": [(link.context.trace_id, link.context.span_id) for link in span.links],
    }}

bind = live.tracer.recorder.bound if live.tracer else None
print(json.dumps({{"bind": bind and bind.fields(), "spans": [plain(span) for span in memory.get_finished_spans()]}}))
assert trace.get_current_span() is trace.INVALID_SPAN, trace.get_current_span()
"""


def joined(text: str) -> dict[str, tuple[str, list[str]]]:
    """Return for each span in a program's output its parent and its links, all by name."""
    said: dict[str, Any] = json.loads(text)
    names: dict[tuple[int, int], str] = {(span["trace"], span["id"]): span["name"] for span in said["spans"]}
    if said["bind"]:
        bind = Bind.read(said["bind"])
        names |= {(trace_id(bind, n), rank_step_id(bind, n)): f"step {n}" for n in range(10)}
    out = {}
    for span in said["spans"]:
        assert span["name"] not in out
        parent = "" if span["parent"] is None else names[span["trace"], span["parent"]]
        out[span["name"]] = (parent, [names[link[0], link[1]] for link in span["links"]])
    return out


def run_user(place: Place, program: str, **env: str) -> tuple[dict[str, tuple[str, list[str]]], str]:
    """Run *program* with a provider of the user's own; return who is whose parent, and what was said."""
    code = USER.format(program=textwrap.dedent(program))
    done = place.run(code, **{"OTEL_DLTRACE": "1", "OTEL_DLTRACE_DRAIN": "off", **env})
    assert done.returncode == 0, done.stderr
    return joined(done.stdout), but_for_rings(done.stderr)


CASES = {
    "outside any step": (
        """
        with span("before"):
            pass
        with step():
            pass
        with span("after"):
            pass
        """,
        {"before": ("", []), "after": ("", [])},
    ),
    "inside a step": (
        """
        with step(), span("outer"), span("inner"):
            pass
        with step():
            tracer.start_span("loose").end()
        """,
        {"inner": ("outer", []), "outer": ("step 1", []), "loose": ("step 2", [])},
    ),
    "around steps": (
        """
        with span("epoch") as epoch:
            for name in ("first", "second"):
                with step():
                    assert trace.get_current_span() is epoch
                    with span(name):
                        pass
                assert trace.get_current_span() is epoch
            with span("between"):
                pass
        with step(), span("later"):
            pass
        """,
        {
            "first": ("epoch", []),
            "second": ("epoch", []),
            "between": ("epoch", []),
            "epoch": ("", ["step 1", "step 2"]),
            "later": ("step 3", []),
        },
    ),
    "begun in one step and ended in another": (
        """
        first, second = step(), step()
        first.__enter__()
        with span("long"):
            first.__exit__(None, None, None)
            second.__enter__()
            with span("child"):
                pass
        with span("after it"):  # the end of "long" has brought step 1 back
            pass
        second.__exit__(None, None, None)
        with span("outside"):
            pass
        """,
        {
            "child": ("long", []),
            "long": ("step 1", ["step 2"]),
            "after it": ("step 2", []),
            "outside": ("", []),
        },
    ),
    "ended by hand while it is current": (
        """
        token = context.attach(trace.set_span_in_context(tracer.start_span("ended")))
        trace.get_current_span().end()
        with step():
            assert trace.get_current_span().get_span_context().is_valid
            with span("below"):
                pass
        context.detach(token)
        with step(), span("later"):
            pass
        """,
        {"ended": ("", []), "below": ("ended", []), "later": ("step 2", [])},
    ),
    "steps that follow one another without an end": (
        """
        steps = live.tracer.steps
        for name in ("one", "two"):
            steps.begin()
            with span(name):
                pass
        steps.end()
        with span("after"):
            pass
        """,
        {"one": ("step 1", []), "two": ("step 2", []), "after": ("", [])},
    ),
    "in threads": (
        """
        def work(name):
            with span(name):
                pass
            assert trace.get_current_span() is trace.INVALID_SPAN

        with ThreadPoolExecutor(1) as pool:
            pool.submit(work, "before").result()
            with step():
                pool.submit(work, "in step 1").result()
                thread = threading.Thread(target=work, args=("in a thread",))
                thread.start()
                thread.join()
            with step():
                pool.submit(work, "in step 2").result()
            pool.submit(work, "after").result()
        """,
        {
            "before": ("", []),
            "in step 1": ("step 1", []),
            "in a thread": ("step 1", []),
            "in step 2": ("step 2", []),
            "after": ("", []),
        },
    ),
    "in tasks": (
        """
        async def work(name, ready=None):
            if ready is not None:
                await ready.wait()
            with span(name):
                await asyncio.sleep(0)
                with span(f"below {name}"):
                    await asyncio.sleep(0)

        async def main():
            early, late = asyncio.Event(), asyncio.Event()
            old = asyncio.create_task(work("old", early))
            with step():
                await asyncio.gather(work("a"), work("b"))
                early.set()
                await old
                kept = asyncio.create_task(work("kept", late))
            with step():
                late.set()
                await kept

        asyncio.run(main())
        """,
        {
            "below a": ("a", []),
            "below b": ("b", []),
            "a": ("step 1", []),
            "b": ("step 1", []),
            "below old": ("old", []),
            "old": ("step 1", []),
            "below kept": ("kept", []),
            "kept": ("step 2", []),
        },
    ),
    "with a parent of the user's choice": (
        """
        with step():
            tracer.start_span("root", context=context.Context()).end()
            tracer.start_span("another root", context.Context()).end()
        """,
        {"root": ("", []), "another root": ("", [])},
    ),
    "below spans that are not sampled": (
        """
        from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
        unsampled = TracerProvider(sampler=ALWAYS_OFF).get_tracer("user")
        with unsampled.start_as_current_span("unseen") as unseen:
            with step():
                assert trace.get_current_span() is unseen
        with step(), span("seen"):
            pass
        """,
        {"seen": ("step 2", [])},
    ),
    "once tracing is stopped": (
        """
        with step():
            otel_dltrace.stop()
            with span("after"):
                pass
        """,
        {"after": ("", [])},
    ),
    "once uninstrumented": (
        """
        with step():
            otel_dltrace.uninstrument()
            with span("apart"):
                pass
        with step(), span("still apart"):
            pass
        """,
        {"apart": ("", []), "still apart": ("", [])},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_users_span_has_the_parent_it_should_have(place: Place, case: str) -> None:
    """A span of the user hangs under the step that is current, or under the user's own; none is lost."""
    program, expected = CASES[case]

    assert run_user(place, program) == (expected, "")


def test_nothing_is_joined_before_the_process_knows_who_it_is(place: Place) -> None:
    """Ids need the job and the rank: a rank that has not met the others has none to give."""
    program = """
    with step(), span("early"):
        pass
    """

    assert run_user(place, program, RANK="0", WORLD_SIZE="2") == ({"early": ("", [])}, "")


def test_a_process_that_loads_batches_is_in_no_step(place: Place) -> None:
    """It lives on when the step in which it was forked has ended; the user's own span around it stays its parent."""
    pytest.importorskip("torch")
    program = """
    import torch.utils.data

    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 1

        def __getitem__(self, index):
            with tracer.start_as_current_span("load") as load:
                return load.parent and load.parent.span_id

    def parents():
        return list(torch.utils.data.DataLoader(Data(), num_workers=1, collate_fn=list, multiprocessing_context="fork"))

    with step():
        assert trace.get_current_span().get_span_context().is_valid
        assert parents() == [[None]], parents()
        with span("around") as around:
            assert parents() == [[around.get_span_context().span_id]], parents()
    """

    assert run_user(place, program) == ({"around": ("step 1", [])}, "")


def test_a_provider_that_raises_does_so_as_without_us(place: Place) -> None:
    """The user's error reaches the user, on every thread, and the step is current as before."""
    program = """
    class Broken(SpanProcessor):
        def on_start(self, span, parent_context=None):
            raise RuntimeError("theirs")

    broken = TracerProvider()
    broken.add_span_processor(Broken())

    def fail():
        before = trace.get_current_span()
        try:
            broken.get_tracer("user").start_span("never")
        except RuntimeError as error:
            assert (str(error), error.__cause__, error.__context__) == ("theirs", None, None)
            assert trace.get_current_span() is before
            return
        raise AssertionError

    with step():
        fail()
        thread = ThreadPoolExecutor(1)
        thread.submit(fail).result()
        thread.shutdown()
        with span("next"):
            pass
    """

    assert run_user(place, program) == ({"next": ("step 1", [])}, "")


def test_a_span_that_takes_no_link_harms_nobody(place: Place) -> None:
    """Whatever class a user's span is of: our own trouble is one sentence, and the step goes on."""
    program = """
    class Odd(trace.NonRecordingSpan):
        def is_recording(self):
            return True

        def add_link(self, *args):
            raise RuntimeError("no links here")

    with trace.use_span(Odd(trace.SpanContext(1, 2, False))):
        for _ in range(2):
            with step():
                pass
    with step(), span("next"):
        pass
    """

    spans, said = run_user(place, program)
    assert spans == {"next": ("step 3", [])}
    assert said == "otel_dltrace: step_begins failed and is not traced (RuntimeError: no links here)\n"


def test_another_process_is_told_which_step_it_serves(place: Place) -> None:
    """What is injected into a request names the step twice: as the parent, and in tracestate (contract 3)."""
    program = """
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
    with step(), span("request"):
        carrier = {}
        TraceContextTextMapPropagator().inject(carrier)
    print(carrier["tracestate"], carrier["traceparent"][-2:], file=sys.stderr)
    """

    assert run_user(place, program)[1] == "dltrace=1.default.0 01\n"


def test_what_is_injected_behind_a_span_names_the_step_that_began_in_it(place: Place) -> None:
    """A span around the fetch of a batch, in which the step begins, uncovers that step and not the one before."""
    program = """
    from contextlib import ExitStack
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    def told():
        carrier = {}
        TraceContextTextMapPropagator().inject(carrier)
        print(carrier.get("tracestate"), file=sys.stderr)

    with step():
        load = span("load")
        load.__enter__()
    with ExitStack() as stack:
        stack.enter_context(step())
        load.__exit__(None, None, None)
        told()
        with span("end"):
            stack.pop_all().close()
        told()
    """

    assert run_user(place, program)[1] == "dltrace=2.default.0\nNone\n"


def test_a_program_without_opentelemetry_loads_none(place: Place) -> None:
    """Joining costs such a program nothing: not an import."""
    done = place.run(
        "import sys, otel_dltrace as d\nfor _ in range(3):\n    with d.step(): pass\n"
        "print([m for m in sys.modules if m.partition('.')[0] == 'opentelemetry'])",
        OTEL_DLTRACE="1",
        OTEL_DLTRACE_DRAIN="off",
    )

    assert (done.stdout, but_for_rings(done.stderr)) == ("[]\n", "")


def test_the_root_links_to_what_launched_the_job(place: Place) -> None:
    """A step is a trace of its own, so the span in TRACEPARENT is nobody's parent: each step's root links to it."""
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    program = "import otel_dltrace as d\nfor _ in range(2):\n    with d.step(): pass"
    console = place.run(program, OTEL_DLTRACE="1", OTEL_TRACES_EXPORTER="console", TRACEPARENT=parent)
    place.wait_for_rings()
    exported = place.command("export", *map(str, place.runs()), "--to", "otlp", "-o", "spans.jsonl")
    assert exported.returncode == 0, exported.stderr

    link = {"traceId": parent[3:35], "spanId": parent[36:52], "flags": 0x300}
    written = [json.loads(line) for line in (place.folder / "spans.jsonl").read_text().splitlines()]
    spans = [s for line in written for r in line["resourceSpans"] for scope in r["scopeSpans"] for s in scope["spans"]]
    expected = [("rank.step", []), ("rank.step", []), ("train.step", [link]), ("train.step", [link])]
    assert sorted((span["name"], span.get("links", [])) for span in spans) == expected
    assert console.stdout.count(f'"trace_id": "0x{link["traceId"]}"') == 2


DATADOG = """
import json, os
import otel_dltrace
from ddtrace.trace import TraceFilter, tracer

seen = []

class Keep(TraceFilter):
    def process_trace(self, trace):
        seen.extend(trace)
        return None

tracer.configure(trace_processors=[Keep()])
if os.environ.get("DD_TRACE_OTEL_ENABLED"):
    from ddtrace.opentelemetry import TracerProvider
    from opentelemetry import trace
    trace.set_tracer_provider(TracerProvider())
for n in range(3):
    with tracer.trace(f"before {n}"):
        pass
    with otel_dltrace.step(), tracer.trace(f"outer {n}"), tracer.trace(f"inner {n}"):
        pass
    with tracer.trace(f"around {n}"), otel_dltrace.step(), tracer.trace(f"below {n}"):
        pass
names = {None: "", **{span.span_id: span.name for span in seen}}
print(json.dumps({span.name: names.get(span.parent_id, "step") for span in seen}))
"""


@pytest.mark.parametrize("api", ["", "true"], ids=["its own API", "through OpenTelemetry's API"])
def test_datadog_beside_us_traces_as_it_did(place: Place, api: str) -> None:
    """All its spans arrive under its own parents; where it serves OpenTelemetry's API, steps are among them."""
    pytest.importorskip("ddtrace")
    env = {"DD_INSTRUMENTATION_TELEMETRY_ENABLED": "0", "DD_TRACE_OTEL_ENABLED": api, "PYTHONWARNINGS": "error"}
    alone, beside = (place.run(DATADOG, OTEL_DLTRACE=on, OTEL_DLTRACE_DRAIN="off", **env) for on in ("0", "1"))

    expected = {}
    for n in range(3):
        expected |= {f"before {n}": "", f"inner {n}": f"outer {n}", f"outer {n}": ""}
        expected |= {f"below {n}": f"around {n}", f"around {n}": ""}
    assert (json.loads(alone.stdout), "Warning" in alone.stderr) == (expected, False)
    if api:
        expected |= {f"outer {n}": "step" for n in range(1, 3)}  # not in step 0: the process is not bound yet
    assert (json.loads(beside.stdout), "Warning" in beside.stderr) == (expected, False)
