"""`otel-dltrace open` prints the address of a step's trace, by an id that follows from the run on disk alone."""

import gzip
import json
import socket
import sys
import threading
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from otel_dltrace.cli.main import main
from otel_dltrace.export import serve
from otel_dltrace.export.rundir.host_folder import run_root
from otel_dltrace.export.rundir.writer import RunWriter
from otel_dltrace.export.serve import serve_once
from otel_dltrace.model.errors import DltraceError
from otel_dltrace.model.identity import Bind, rank_step_id, trace_id
from otel_dltrace.model.plan import share_of
from otel_dltrace.model.spans import SpanBatch
from otel_dltrace.settings.viewers import VIEWERS
from tests.support import servers
from tests.support.processes import a_place
from tests.support.runs import Rank, ddp

STEPS = """
import otel_dltrace
for number in range(4):
    with otel_dltrace.step():
        with otel_dltrace.phase("rollout"):
            pass
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a run of two ranks and three steps; be in the folder where it is."""
    monkeypatch.chdir(tmp_path)
    for viewer in VIEWERS.values():
        monkeypatch.delenv(viewer.variable, raising=False)
    return written(tmp_path, ddp(ranks=2, steps=3))


def written(folder: Path, batches: list[SpanBatch]) -> Path:
    """Write *batches* to a run directory in *folder*."""
    writer = None
    for batch in batches:
        bind = batch.process.bind
        writer = writer or RunWriter(run_root(folder, bind, 1), "node-0")
        writer.append(batch.process.nonce, batch.rows, batch.descriptors, batch.errors)
        writer.name_run(bind)
        writer.know(batch.process)
    assert writer is not None
    writer.write_summary({"spans": 1}, ended=True)
    writer.close()
    return writer.root


BIND = Bind("job", "1.00", "demo", world_size=2)
TRACE = f"{trace_id(BIND, 2):032x}"
SPAN = f"{rank_step_id(Bind('job', '1.00', 'demo', rank=1, world_size=2), 2):016x}"


def test_an_address_that_is_none_is_one_sentence(run, capsys):
    """Also one of which Python takes no part."""
    assert main(["open", "demo", "--step", "2", "--url", "http://["]) == 2
    assert capsys.readouterr().err == (
        "otel-dltrace: 'http://[' is not an address of jaeger: write --url http://HOST:PORT\n"
    )


@pytest.mark.parametrize(
    ("more", "address"),
    [
        pytest.param([], f"http://localhost:16686/trace/{TRACE}", id="Jaeger"),
        pytest.param(["--rank", "1"], f"http://localhost:16686/trace/{TRACE}?uiFind={SPAN}", id="Jaeger, a rank"),
        pytest.param(["--url", "https://j/ui/"], f"https://j/ui/trace/{TRACE}", id="Jaeger elsewhere"),
        pytest.param(["--in", "tempo"], f"http://localhost:3200/api/v2/traces/{TRACE}", id="Tempo"),
    ],
)
def test_the_address_has_the_derived_id(run, more, address, capsys):
    """Of the run directory, of the job's name and of the job's id."""
    for name in (str(run), run.name, "demo", "job"):
        assert main(["open", name, "--step", "2", *more]) == 0
        told = capsys.readouterr()
        assert told.out == f"{address}\n"
        assert "nothing from" in told.err


def test_a_step_of_a_very_large_world_is_in_the_trace_of_its_rank(run, tmp_path, capsys):
    """Such a step is several traces, by the budget that the ranks had."""
    rank = Rank(1500, 2048, nonce=7).step(4, 0.0, 10.0)
    rank.process = replace(rank.process, bind=replace(rank.process.bind, job="large"))
    bind = written(tmp_path, [rank.batch()]) and rank.process.bind
    shard = share_of(1500, 2048, 0, 10_000, 4).shard
    assert main(["open", "large", "--step", "4", "--in", "tempo"]) == 0

    assert shard > 0
    assert capsys.readouterr().out.rstrip().endswith(f"/{trace_id(bind, 4, shard):032x}")


def test_the_budget_is_that_of_the_run(run, tmp_path, capsys, monkeypatch):
    """Whoever looks may have another."""
    monkeypatch.setenv("OTEL_DLTRACE_SPAN_BUDGET", "100")
    told = json.loads((run / "hosts/node-0/drain.json").read_text())
    traces = {}
    for budget in (None, 100, 20):
        more = {} if budget is None else {"span_budget": budget}
        (run / "hosts/node-0/drain.json").write_text(json.dumps(told | more))
        assert main(["open", str(run), "--step", "2", "--rank", "1", "--in", "tempo"]) == 0
        traces[budget] = capsys.readouterr().out.strip().rpartition("/")[2]

    bind = replace(BIND, rank=1)
    of = {budget: f"{trace_id(bind, 2, share_of(1, 2, 0, budget, 2).shard):032x}" for budget in (100, 20)}
    assert traces == {None: of[100], **of}
    assert of[100] != of[20]


def test_a_drain_writes_the_budget_down(place):
    """It is that of its programs."""
    program = str(place.write("import otel_dltrace\nwith otel_dltrace.step():\n    pass\n"))
    place.command("run", "--no-report", "--", sys.executable, program, OTEL_DLTRACE_SPAN_BUDGET="20")
    (told,) = (json.loads(path.read_text()) for path in place.folder.glob("dltrace-*/hosts/*/drain.json"))

    assert told["span_budget"] == 20


def test_grafana_gets_the_trace_and_its_time(run, capsys):
    """The pane asks the data source for the trace, from a minute before the step to a minute after."""
    assert main(["open", "demo", "--step", "2", "--in", "grafana", "--datasource", "mine"]) == 0
    url = urlsplit(capsys.readouterr().out.strip())
    query = parse_qs(url.query)
    pane = json.loads(query["panes"][0])["step"]
    source = {"type": "tempo", "uid": "mine"}

    assert (url.netloc, url.path, query["schemaVersion"]) == ("localhost:3000", "/explore", ["1"])
    assert pane["queries"] == [{"refId": "A", "datasource": source, "queryType": "traceql", "query": TRACE}]
    # Steps of 16 ms from 1000 ms of a monotonic clock whose zero is that of Unix time.
    assert pane["range"] == {"from": str(1032 - 60_000), "to": str(1048 + 60_000)}


def test_variables_say_where_viewers_are(run, capsys, monkeypatch):
    """An option says it for once."""
    monkeypatch.setenv("OTEL_DLTRACE_JAEGER_URL", "http://jaeger.example/")
    assert main(["open", "demo", "--step", "0"]) == 0
    assert capsys.readouterr().out.startswith("http://jaeger.example/trace/")
    monkeypatch.setenv("OTEL_DLTRACE_JAEGER_URL", "jaeger:1")
    assert main(["open", "demo", "--step", "0"]) == 2
    assert capsys.readouterr().err == (
        "otel-dltrace: OTEL_DLTRACE_JAEGER_URL='jaeger:1' is not an address of jaeger: write http://HOST:PORT\n"
    )


def test_for_perfetto_the_step_is_written(run, capsys):
    """A Chrome trace of that step alone, and the page that reads it from this machine."""
    assert main(["open", "demo", "--step", "2", "--rank", "1", "--in", "perfetto"]) == 0
    told = capsys.readouterr()
    name = f"{run.name}-step-2-rank-1.json.gz"
    events = json.loads(gzip.decompress(Path(name).read_bytes()))["traceEvents"]

    assert told.out == f"https://ui.perfetto.dev/#!/?url=http://127.0.0.1:9001/{name}\n"
    assert f"the trace is in {name}" in told.err
    assert {event["args"]["dl.step"] for event in events if event["ph"] == "X"} == {2}


def test_a_file_is_handed_out_once(tmp_path):
    """Under its name alone, to pages of one origin that ask for our address, and then the server ends."""
    file = tmp_path / "a trace.json"
    file.write_text("[]")
    port = servers.free_port()
    thread = threading.Thread(target=serve_once, args=(file, "https://ui.perfetto.dev", port))
    thread.start()

    def get(name, host=f"127.0.0.1:{port}"):
        request = urllib.request.Request(f"http://127.0.0.1:{port}/{name}", headers={"Host": host})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.read(), answer.headers["Access-Control-Allow-Origin"]

    def is_there():
        try:
            get("else")
        except urllib.error.HTTPError as error:
            error.close()
            return error.code == 404
        except urllib.error.URLError:
            return False
        raise AssertionError("a file of another name was handed out")

    servers.wait_until(is_there, what="the server")
    with pytest.raises(urllib.error.HTTPError, match="404") as refused:  # a page whose own name leads here by now
        get("a%20trace.json", f"elsewhere.example:{port}")
    refused.value.close()
    assert get("a%20trace.json") == (b"[]", "https://ui.perfetto.dev")
    thread.join(240)
    assert not thread.is_alive()


def test_a_connection_that_asks_nothing_holds_nobody_up(tmp_path, monkeypatch):
    """A browser opens one ahead of need; the next one gets the file, however slowly that reads."""
    came = []

    class Server(serve._Server):
        def server_activate(self):
            super().server_activate()
            came.extend(socket.create_connection(self.server_address, 60) for _ in range(2))
            came[1].sendall(b"GET /trace.json HTTP/1.0\r\n\r\n")  # it has asked before anybody's patience begins

    monkeypatch.setattr(serve, "PATIENCE_S", 0.05)
    monkeypatch.setattr(serve, "_Server", Server)
    file = tmp_path / "trace.json"
    file.write_text("[]")
    serve_once(file, "https://ui.perfetto.dev", servers.free_port())
    idle, asked = came
    with idle, asked, asked.makefile("rb") as answer:
        assert answer.read().endswith(b"\r\n\r\n[]")
        assert idle.recv(1) == b""


def test_a_file_that_is_not_there_is_not_served(tmp_path):
    """One sentence, before anybody is asked to read it."""
    with pytest.raises(DltraceError, match=r"gone\.json cannot be read: No such file"):
        serve_once(tmp_path / "gone.json", "https://ui.perfetto.dev", servers.free_port())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        pytest.param(["demo", "--step", "9"], "step 9 is not in ", id="step"),
        pytest.param(["demo", "--step", "2", "--rank", "7"], "it has ranks 0 to 1", id="rank"),
        pytest.param(["other", "--step", "2"], "it has runs of demo", id="job"),
        pytest.param(
            ["demo", "--step", "2", "--url", "jaeger:1"], "'jaeger:1' is not an address of jaeger", id="address"
        ),
        pytest.param(
            ["demo", "--step", "2", "--in", "perfetto", "-o", "/proc/x"], "/proc/x cannot be written", id="file"
        ),
        pytest.param(["demo", "--step", "2", "--serve"], "--serve is for perfetto, and not for jaeger", id="serve"),
        pytest.param(
            ["demo", "--step", "2", "--in", "tempo", "-o", "x"], "--output is for perfetto, and not for tempo", id="o"
        ),
        pytest.param(
            ["demo", "--step", "2", "--datasource", "x"], "--datasource is for grafana, and not for jaeger", id="source"
        ),
        pytest.param(["d" * 300, "--step", "2"], "cannot be read: File name too long", id="a long name"),
    ],
)
def test_what_is_not_there_is_one_sentence(run, arguments, says, capsys):
    """Exit code 2, and what there is instead."""
    assert main(["open", *arguments]) == 2
    assert says in capsys.readouterr().err


def test_jaeger_has_the_trace_at_that_address(tmp_path):
    """A real run, a real Jaeger: what the printed id names is the step."""
    with servers.jaeger(tmp_path) as jaeger, a_place(tmp_path) as place:
        env = {"OTEL_EXPORTER_OTLP_ENDPOINT": jaeger.http, "OTEL_SERVICE_NAME": "opened"}
        assert place.run(STEPS, OTEL_DLTRACE="1", **env).returncode == 0
        place.wait_for_rings()
        done = place.command("open", "opened", "--step", "2", OTEL_DLTRACE_JAEGER_URL=jaeger.query)
        assert done.stderr == ""
        base, trace = done.stdout.strip().split("/trace/")
        found = jaeger.trace(trace, 3)
        steps = {a.value.int_value for span in servers.spans_of(found) for a in span.attributes if a.key == "dl.step"}
        with urllib.request.urlopen(f"{jaeger.query}/trace/{trace}", timeout=60) as page:
            assert page.status == 200

    assert base == jaeger.query
    assert sorted(span.name for span in servers.spans_of(found)) == ["rank.step", "rollout", "train.step"]
    assert steps == {2}


def test_a_port_that_is_in_use_is_one_sentence(tmp_path):
    """Perfetto fetches from one port alone, and somebody else may have it."""
    (tmp_path / "t.json").write_text("[]")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(DltraceError, match=f"port {port} cannot be used .*: stop what uses it"):
            serve_once(tmp_path / "t.json", "https://ui.perfetto.dev", port)
