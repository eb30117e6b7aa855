"""Names of any kind go all the way: from the program to the run directory, to viewers, to the report."""

import json

import pytest

from otel_dltrace.cli.main import main
from otel_dltrace.export.otlp.spill import Spill
from otel_dltrace.record import guard
from tests.support.byteps_files import real
from tests.support.processes import a_place

# What is recorded, and what of it is kept: what UTF-8 cannot say becomes a question mark, what is long is cut.
NAMES = {
    "say \"hi\" \\ 'there'": "say \"hi\" \\ 'there'",
    "a\0b": "a\0b",
    "two\nlines\r\tand a tab": "two\nlines\r\tand a tab",
    "\x1b[31mred\x07": "\x1b[31mred\x07",
    "file-\udcff.pt": "file-?.pt",
    "\u202eabc\u05d0": "\u202eabc\u05d0",
    "\U0001f680 rollout": "\U0001f680 rollout",
    "[bold]x[/bold] <b>&amp;": "[bold]x[/bold] <b>&amp;",
    "": "",
    "m" * (1 << 20): "m" * 4096,
}
PROGRAM = """
import otel_dltrace
from names import NAMES
otel_dltrace.start()
for number in range(2):
    with otel_dltrace.step(number):
        for name in NAMES:
            with otel_dltrace.phase(name), otel_dltrace.operation(name, size=1, tensor=name, group=name):
                pass
otel_dltrace.stop()
"""
COUNT = 2 * len(NAMES) * 2 + 2
"""Two steps, and in each a phase and an operation of each name."""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Give a run whose names are all of the above."""
    with a_place(tmp_path_factory.mktemp("names")) as it:
        it.write(f"NAMES = {list(NAMES)!a}", "names.py")
        done = it.run(PROGRAM)
        assert done.returncode == 0, done.stderr
        it.wait_for_rings()
        yield it


def test_the_run_directory_keeps_them(place):
    """Nothing is lost, and each name comes back."""
    (batch,) = place.spans()
    names = {batch.descriptors[number].name for number in batch["descriptor"]}

    assert (len(batch), names) == (COUNT, {*NAMES.values(), "rank.step"})


def test_the_chrome_trace_is_json_with_them(place):
    """A viewer gets each name as it is."""
    done = place.command("export", str(place.runs()[0]), "--to", "chrome", "-o", "trace.json")
    assert done.returncode == 0, done.stderr
    events = json.loads((place.folder / "trace.json").read_text())["traceEvents"]

    assert set(NAMES.values()) <= {event["name"] for event in events}


def test_otlp_json_holds_them(place):
    """So does a collector that reads the file."""
    done = place.command("export", str(place.runs()[0]), "--to", "otlp", "-o", "spans.jsonl")
    assert done.returncode == 0, done.stderr
    names = set()
    for line in (place.folder / "spans.jsonl").read_text().splitlines():
        for resource in json.loads(line)["resourceSpans"]:
            names |= {span.get("name", "") for scope in resource["scopeSpans"] for span in scope["spans"]}

    assert set(NAMES.values()) <= names


def test_the_report_is_safe_to_print(place):
    """No name moves the terminal's cursor, colours it, or turns its text around."""
    done = place.command("report", str(place.runs()[0]))

    assert done.returncode == 0, done.stderr
    assert not set(done.stdout) & set("\0\x1b\x07\u202e\r\t")


def test_what_commands_and_programs_say_is_safe_to_print(tmp_path, capfd, monkeypatch):
    """A folder may have any name, as one that was unpacked from a stranger's archive."""
    folder = tmp_path / "\x1b]0;mine\x07\x9b31m\u202e größe"
    folder.mkdir()
    assert main(["report", str(folder)]) == 2
    monkeypatch.setattr(guard, "_said", set())
    guard.say(f"{folder} is full")

    shown = f"{tmp_path}/?]0;mine??31m? größe"
    told, said = capfd.readouterr().err.splitlines()
    assert told.startswith(f"otel-dltrace: {shown} ")
    assert said == f"otel_dltrace: {shown} is full"


def test_what_commands_print_of_files_is_safe_to_print(tmp_path, capfd, monkeypatch):
    """Those that are looked for are another's, where a folder is shared; and so is what a file of theirs is called."""
    monkeypatch.setenv("OTEL_DLTRACE_DIR", str(tmp_path))
    monkeypatch.setenv("OTEL_DLTRACE_RING_DIR", str(tmp_path))
    named = "\x1b[31m\u202e"
    Spill(tmp_path / f"dltrace-{named}-1" / "hosts" / "node" / "spill").put(b"x", 1)
    (tmp_path / f"traces{named}" / "0").mkdir(parents=True)
    (tmp_path / f"traces{named}" / "0" / "comm.json").write_bytes(real("byteps_w2_s1/worker0/0")[:-2])
    run, traces = tmp_path / f"run{named}", tmp_path / f"traces{named}"

    assert main(["recover"]) == 0
    assert main(["import", "byteps", str(traces), "-o", str(run)]) == 0
    assert main(["export", str(run), "--to", "byteps", "-o", str(traces)]) == 0
    said = capfd.readouterr()
    assert said.out.count("?[31m?") == 4  # what waits, the run, a note, and what was written
    assert not set(said.out + said.err) & set("\x1b\u202e")
