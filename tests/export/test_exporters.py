"""Exporters chosen by OTEL_TRACES_EXPORTER get our spans from the drain; what they do wrong hurts nobody else."""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from otel_dltrace.export.choice import exporters, names_otlp
from otel_dltrace.export.outgoing.exporter_outlet import ExporterOutlet
from otel_dltrace.export.outgoing.gate import Outgoing
from otel_dltrace.export.rings.cursor import Cursor
from otel_dltrace.model import semconv as s
from otel_dltrace.model.errors import ConfigError
from tests.support import servers
from tests.support.processes import Place
from tests.support.runs import Rank
from tests.support.steps import EVERYTHING, SLACK_S, STEPS, TAKEN_UP, recorded

SHOP = """
    import os, sys, threading, time
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    class ToFile(SpanExporter):
        def __init__(self):
            self.file = open(os.environ["SHOP_FILE"], "a", buffering=1)
            if self.file.tell():  # one that was killed may have left half a line
                self.file.write("\\n")
        def export(self, spans):
            self.file.write("".join(span.to_json(indent=None) + "\\n" for span in spans))
            return SpanExportResult.SUCCESS
        def shutdown(self):
            self.file.write('"shut down"\\n')

    class Raises(SpanExporter):
        def export(self, spans):
            raise ValueError("no spans today")

    class Unmade(SpanExporter):
        def __init__(self):
            raise OSError("no room")

    class Refuses(SpanExporter):
        def export(self, spans):
            return SpanExportResult.FAILURE

    class Blocks(SpanExporter):
        def __init__(self):
            threading.Thread(target=threading.Event().wait).start()  # would keep the interpreter from ending
        def export(self, spans):
            threading.Event().wait()

    class Exits(SpanExporter):
        def export(self, spans):
            sys.exit(3)

    class EndsAll(SpanExporter):
        def export(self, spans):
            os._exit(3)

    class Slow(SpanExporter):
        def export(self, spans):
            time.sleep(0.5)
            return SpanExportResult.SUCCESS

    def no_exporter():
        return "nothing"
"""
OFFERED = {
    "to_file": "shop:ToFile",
    "raises": "shop:Raises",
    "unmade": "shop:Unmade",
    "refuses": "shop:Refuses",
    "blocks": "shop:Blocks",
    "exits": "shop:Exits",
    "ends_all": "shop:EndsAll",
    "slow": "shop:Slow",
    "no_module": "not_there:Exporter",
    "no_exporter": "shop:no_exporter",
}
PER_STEP, OUTSIDE = 4, 1  # with the root; and what is before any step


@pytest.fixture
def shop(place: Place) -> dict[str, str]:
    """Install a package that offers exporters; return the environment in which it is found."""
    site = place.folder / "site"
    info = site / "shop-1.0.dist-info"
    info.mkdir(parents=True)
    place.write(SHOP, "site/shop.py")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shop\nVersion: 1.0\n")
    points = "\n".join(f"{name} = {value}" for name, value in OFFERED.items())
    (info / "entry_points.txt").write_text(f"[opentelemetry_traces_exporter]\n{points}\n")
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH", "")]))
    return {"PYTHONPATH": path, "SHOP_FILE": str(place.folder / "shop.jsonl"), **EVERYTHING}


def in_the_shop(place: Place) -> list[dict]:
    """Return the spans that `to_file` has written; its shutdown came last."""
    *spans, end = map(json.loads, (place.folder / "shop.jsonl").read_text().splitlines())
    assert end == "shut down"
    return spans


def ids_of(spans) -> list[str]:
    """Return the spans' ids, sorted, for spans as JSON of the SDK."""
    return sorted(span["context"]["span_id"].removeprefix("0x") for span in spans)


def figures(place: Place) -> dict:
    """Return the summary of the one drain, once it has ended."""
    place.wait_for_drains()
    (path,) = place.runs()[0].glob("hosts/*/drain.json")
    return json.loads(path.read_text())["summary"]


def spans_in(text: str) -> list[dict]:
    """Return the JSON objects in what a program and the console exporter printed."""
    spans, decoder, at = [], json.JSONDecoder(), text.find("{")
    while at >= 0:
        span, end = decoder.raw_decode(text, at)
        spans.append(span)
        at = text.find("{", end)
    return spans


# -- which get spans -------------------------------------------------------------------------------


def test_named_exporters_get_every_span_once(place, shop):
    """One of somebody's package and the SDK's console, which prints where the program prints; roots included."""
    result = place.run(STEPS, "20", "0.01", OTEL_TRACES_EXPORTER="to_file, console", **shop)
    assert result.returncode == 0, result.stderr

    delivery = figures(place)["exporters"]
    spans = in_the_shop(place)
    mine = {id_.hex() for id_ in recorded(place)}
    roots = [span for span in spans if span["name"] == s.TRAIN_STEP]
    assert len(spans) == 20 * PER_STEP + OUTSIDE
    assert len(roots) == 20
    assert ids_of(spans) == sorted([*mine, *ids_of(roots)]) == ids_of(spans_in(result.stdout))
    nothing_lost = {"accepted": len(spans), "waiting": 0, "dropped": {}, "trouble": ""}
    assert delivery == {"to_file": nothing_lost, "console": nothing_lost}
    known = {span["context"]["span_id"] for span in spans}
    assert {span["parent_id"] for span in spans} - known == {None}


def test_under_run_the_console_is_the_terminal_as_well(place):
    """Where `run` asks the drain for the run directories, spans do not come between."""
    program = ["--", sys.executable, str(place.write(STEPS)), "3", "0"]
    result = place.command("run", "--no-report", *program, OTEL_TRACES_EXPORTER="console", **EVERYTHING)

    assert result.returncode == 0, result.stderr
    assert len(spans_in(result.stdout)) == 3 * PER_STEP + OUTSIDE
    assert f"{3 * PER_STEP + OUTSIDE} to console, none lost; in {place.runs()[0].name}" in result.stderr


def test_under_run_an_exporter_that_ends_the_drain_costs_its_own_spans_alone(place, shop):
    """The run directory has the rest, and is named: it was written with the settings of `run`."""
    program = ["--", sys.executable, str(place.write(STEPS)), "3", "0"]
    result = place.command("run", "--no-report", *program, OTEL_TRACES_EXPORTER="ends_all", **shop)

    assert result.returncode == 0, result.stderr
    assert f"{3 * PER_STEP + OUTSIDE} waiting for ends_all" in result.stderr
    assert f"; in {place.runs()[0].name}" in result.stderr
    assert len(recorded(place)) == 3 * (PER_STEP - 1) + OUTSIDE


@pytest.mark.parametrize(
    ("names", "otlp"),
    [
        pytest.param("otlp,to_file", True, id="beside another"),
        pytest.param("to_file", False, id="not named"),
        pytest.param("to_file,none", False, id="none"),
    ],
)
def test_otlp_goes_out_if_it_is_named(place, shop, tmp_path, names, otlp):
    """The collector and the other exporter get the same spans; not named, it gets none though an endpoint is set."""
    with servers.collector(tmp_path) as collector:
        env = {"OTEL_TRACES_EXPORTER": names, "OTEL_EXPORTER_OTLP_ENDPOINT": collector.http}
        result = place.run(STEPS, "5", "0.01", **env, **shop)
        assert result.returncode == 0, result.stderr
        summary = figures(place)
        arrived = sorted(span.span_id.hex() for span in collector.spans())

    assert ("otlp" in summary) == otlp
    assert arrived == (ids_of(in_the_shop(place)) if otlp else [])
    assert len(in_the_shop(place)) == 5 * PER_STEP + OUTSIDE


@pytest.mark.parametrize(
    ("value", "otlp", "others"),
    [
        pytest.param(None, True, [], id="unset"),
        pytest.param(" ", True, [], id="empty"),
        pytest.param("none", False, [], id="none"),
        pytest.param(" None ", False, [], id="none in capitals"),
        pytest.param("otlp", True, [], id="otlp"),
        pytest.param("console, otlp ,console,", True, ["console"], id="a list"),
        pytest.param("console", False, ["console"], id="another alone"),
    ],
)
def test_the_variable_says_who_gets_spans(value, otlp, others):
    """Names stand between commas; unset means OTLP."""
    env = {} if value is None else {"OTEL_TRACES_EXPORTER": value}
    assert (names_otlp(env), [point.name for point in exporters(env)]) == (otlp, others)


def test_a_name_that_nobody_offers_is_one_sentence(place, shop):
    """It says which names there are; the program runs on untraced, and as a command's it is exit code 2."""
    with pytest.raises(ConfigError, match=r"no exporter called 'consol' is installed; available: .*console, .*otlp"):
        exporters({"OTEL_TRACES_EXPORTER": "otlp,consol"})

    program = place.write("print('still here')")
    env = {**shop, "OTEL_DLTRACE": "1", "OTEL_TRACES_EXPORTER": "shopp"}
    result = place.finish(place.popen([sys.executable, str(program)], **env))
    command = place.command("run", "--", sys.executable, str(program), **env)

    assert (result.returncode, result.stdout) == (0, "still here\n")
    assert len(result.stderr.splitlines()) == 1
    assert "'shopp'" in result.stderr
    assert "to_file" in result.stderr
    assert (command.returncode, command.stdout) == (2, "")
    assert "'shopp'" in command.stderr


# -- exporters that do it wrong --------------------------------------------------------------------


def seconds_to_exit(process: "subprocess.Popen[str]") -> float:
    """Return how long after its last statement *process* ended; its output is open until its drain has ended too."""
    assert process.wait(240) == 0
    return time.monotonic() - float(process.stdout.readline())


@pytest.mark.parametrize(
    ("name", "why"),
    [
        pytest.param("raises", "raised ValueError", id="raises"),
        pytest.param("unmade", "raised OSError", id="cannot be made"),
        pytest.param("no_module", "raised ModuleNotFoundError", id="cannot be imported"),
        pytest.param("no_exporter", "raised TypeError", id="is none"),
        pytest.param("refuses", "returned FAILURE", id="fails"),
        pytest.param("blocks", "had not taken them when the drain ended", id="blocks"),
        pytest.param("exits", "had not taken them when the drain ended", id="ends its thread"),
    ],
)
def test_a_bad_exporter_costs_its_own_spans_alone(place, shop, name, why):
    """The run directory and the exporter beside it are complete, the rank ends in time, the loss is told."""
    process = place.start(STEPS, "10", "0.01", OTEL_TRACES_EXPORTER=f"{name},to_file", **shop)
    assert seconds_to_exit(process) <= 2.0 + SLACK_S

    delivery = figures(place)["exporters"]
    spans = 10 * PER_STEP + OUTSIDE
    assert len(recorded(place)) == spans - 10
    assert len(in_the_shop(place)) == delivery["to_file"]["accepted"] == spans
    assert (delivery[name]["accepted"], delivery[name]["dropped"]) == (0, {why: spans})


def test_what_an_exporter_still_has_to_take_is_not_said_to_be_safe(place, shop):
    """The program ends before the exporter's verdict, so nobody can say yet that none is lost."""
    done = place.run(STEPS + TAKEN_UP, "10", "0.01", OTEL_TRACES_EXPORTER="blocks", **shop)
    last = done.stderr.splitlines()[-1]

    assert last.startswith("otel_dltrace: so far ")
    assert "; the drain is still at work; in dltrace-" in last
    assert "none lost" not in last


def test_a_slow_exporter_is_left_behind(place, shop):
    """Steps go on, what it cannot take in the end is counted, and nothing is counted twice."""
    process = place.start(STEPS, "40", "0.05", OTEL_TRACES_EXPORTER="slow", **shop)
    assert seconds_to_exit(process) <= 2.0 + SLACK_S

    slow = figures(place)["exporters"]["slow"]
    assert len(recorded(place)) == 40 * (PER_STEP - 1) + OUTSIDE
    assert slow["accepted"] + sum(slow["dropped"].values()) == 40 * PER_STEP + OUTSIDE
    assert slow["waiting"] == 0


def test_what_a_killed_drain_had_not_exported_comes_again(place, shop):
    """Delivery is at least once, as over OTLP."""
    process = place.start(STEPS, "100", "0.02", OTEL_TRACES_EXPORTER="to_file", **shop)
    servers.wait_until(lambda: in_the_file(place), what="spans exported")
    for drain in place.drains():
        drain.kill()
    assert process.wait(240) == 0
    if list(place.rings.glob("*.ring")):
        assert place.command("recover", OTEL_TRACES_EXPORTER="to_file", **shop).returncode == 0
    place.wait_for_rings()
    place.wait_for_drains()

    exported = set(ids_of(whole_lines(place)))
    assert {id_.hex() for id_ in recorded(place)} <= exported
    assert len(exported) == 100 * PER_STEP + OUTSIDE


def test_nor_is_what_was_outside_any_step_forgotten(place, shop):
    """It was on its way together with the steps."""
    process = place.start(STEPS, "20", "0.01", OTEL_TRACES_EXPORTER="blocks", **shop)
    (drain,) = servers.wait_until(place.drains, what="the drain")
    drain.suspend()
    assert process.wait(240) == 0
    drain.resume()
    (ring,) = place.rings.glob("*.ring")
    servers.wait_until(lambda: Cursor.read(ring.with_suffix(".cursor")).places, what="all handed to the exporter")
    drain.kill()
    drain.wait()
    assert place.command("recover", OTEL_TRACES_EXPORTER="to_file", **shop).returncode == 0

    assert len(ids_of(in_the_shop(place))) == 20 * PER_STEP + OUTSIDE


def whole_lines(place: Place) -> Iterator[dict]:
    """Yield the spans that `to_file` has written whole, whoever was killed meanwhile."""
    for line in (place.folder / "shop.jsonl").read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            if (span := json.loads(line)) != "shut down":
                yield span


def in_the_file(place: Place) -> int:
    """Return how much `to_file` has written."""
    file = place.folder / "shop.jsonl"
    return file.stat().st_size if file.exists() else 0


# -- the queue -------------------------------------------------------------------------------------


class Held(SpanExporter):
    """Holds each call of `export` until it is let go."""

    def __init__(self):
        self.called, self.go = threading.Semaphore(0), threading.Semaphore(0)
        self.spans = []
        self.was_shut_down = False

    def export(self, spans):
        """Wait, then take them."""
        self.called.release()
        self.go.acquire()
        self.spans += spans
        return SpanExportResult.SUCCESS

    def shutdown(self):
        """Remember it."""
        self.was_shut_down = True


def step_of(number, spans):
    """One step with as many spans, and the same as what a gate lets out."""
    rank = Rank(0, 1).step(number, 0, 9)
    for _ in range(spans - 1):
        rank.wait(number, 1, 2)
    batch = rank.batch()
    return batch.take(slice(0, 0)), [Outgoing(number, batch.rows)]


def test_a_full_queue_drops_what_comes():
    """Whole steps wait or are dropped, those that wait come in order, in calls of at most 512 spans."""
    held = Held()
    outlet = ExporterOutlet("held", lambda: held, most_waiting=1000)
    for number in range(4):
        outlet.send(*step_of(number, 600))
    assert held.called.acquire(timeout=240)
    full = (outlet.figures(), outlet.unsettled())
    for _ in range(4):
        held.go.release()
    outlet.close(10)
    closed = outlet.figures()

    assert full == (
        {"accepted": 0, "waiting": 1200, "dropped": {"was too slow": 1200}, "trouble": ""},
        {(1, 0), (1, 1)},
    )
    assert closed == {"accepted": 1200, "waiting": 0, "dropped": {"was too slow": 1200}, "trouble": ""}
    assert [span.attributes["dl.step"] for span in held.spans] == [0] * 600 + [1] * 600
    assert (outlet.unsettled(), outlet.is_stuck, held.was_shut_down) == (set(), False, True)


def test_an_exporter_without_spans_is_never_made():
    """Naming one costs nothing, and opens no file, until there is something to export."""
    outlet = ExporterOutlet("never", lambda: pytest.fail("it was made"))
    batch = Rank(0, 1).batch()

    outlet.send(batch, [Outgoing(0, np.zeros(0, batch.rows.dtype))])

    outlet.close(1)
    assert outlet.figures() == {"accepted": 0, "waiting": 0, "dropped": {}, "trouble": ""}
    assert not outlet.is_stuck
