"""The switch: a line in a .pth file that every Python process runs, and what the package loads."""

import os
import statistics
import subprocess
import sys
import textwrap
import time

import pytest

from tests.support.paths import ROOT

PTH = ROOT / "otel_dltrace.pth"
LINE = PTH.read_text().strip()
OURS = "print(sorted(m for m in sys.modules if m.startswith('otel_dltrace')))"


def python(*args: str, **env: str) -> "subprocess.CompletedProcess[str]":
    """Run Python with *args*, without anybody's tracing but what *env* says."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("OTEL_")}
    return subprocess.run(
        [sys.executable, *args], env={**clean, **env}, capture_output=True, text=True, timeout=240, check=False
    )


def test_the_line_is_one_that_site_runs():
    """Site runs lines that begin with import, and prints a traceback in every process if one fails."""
    assert LINE.startswith("import ")
    assert "\n" not in LINE


@pytest.mark.parametrize("value", [None, "", "0"], ids=["unset", "empty", "0"])
def test_what_is_off_costs_less_than_a_millisecond_and_imports_nothing(monkeypatch, value):
    """Measured where it runs: the line itself, in a process that knows os."""
    monkeypatch.delenv("OTEL_DLTRACE", raising=False)
    if value is not None:
        monkeypatch.setenv("OTEL_DLTRACE", value)
    loaded = set(sys.modules)
    times = []
    for _ in range(101):
        before = time.perf_counter()
        exec(LINE)  # as site does
        times.append(time.perf_counter() - before)

    assert statistics.median(times) < 0.001
    assert set(sys.modules) == loaded


def test_unset_nothing_of_ours_is_loaded_at_startup():
    """Not by the line, in a fresh process."""
    result = python("-c", f"import sys\nexec({LINE!r})\n{OURS}")

    assert (result.stdout.strip(), result.stderr) == ("[]", "")


def test_on_the_line_loads_the_package_and_nothing_heavy():
    """No torch, numpy, pyarrow or OpenTelemetry comes into a process that may never train."""
    heavy = "print([m for m in ('torch', 'numpy', 'pyarrow', 'opentelemetry', 'grpc') if m in sys.modules])"
    result = python(
        "-c", f"import sys\nexec({LINE!r})\n{heavy}\nprint('otel_dltrace' in sys.modules)", OTEL_DLTRACE="1"
    )

    assert result.stdout.split("\n")[:2] == ["[]", "True"], result.stderr


def test_import_loads_no_framework():
    """`import otel_dltrace` is for the standard library alone."""
    code = "import sys, otel_dltrace; print({'torch', 'numpy', 'pyarrow', 'opentelemetry', 'grpc'} & set(sys.modules))"
    result = python("-c", code)

    assert (result.stdout.strip(), result.stderr) == ("set()", "")


def test_the_package_can_be_reloaded():
    """As a notebook does with what it has imported; the names stay what they are, and what records goes on."""
    code = """
        import importlib, otel_dltrace as d
        importlib.reload(d)
        before = [d.instrument, d.step]
        importlib.reload(d)
        print([d.instrument, d.step] == before)
    """
    result = python("-c", textwrap.dedent(code))

    assert (result.stdout, result.stderr) == ("True\n", "")


@pytest.mark.parametrize("flags", [("-S",), ("-I",), ("-E",), ("-IS",)], ids=lambda flags: flags[0])
@pytest.mark.parametrize("value", ["0", "1"])
def test_no_flag_of_python_breaks_it(flags, value):
    """Without site the line does not run; isolated it runs as always; either way nothing is printed."""
    result = python(*flags, "-c", "print('ok')", OTEL_DLTRACE=value)

    assert (result.returncode, result.stdout, result.stderr) == (0, "ok\n", "")


CHILDREN = """
import multiprocessing, os, sys
import otel_dltrace as d

def work(queue):
    with d.phase("in the child"):
        pass
    queue.put("otel_dltrace" in sys.modules)

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    queue = context.Queue()
    child = context.Process(target=work, args=(queue,))
    child.start()
    print(queue.get(timeout=240))
    child.join(240)
    print(child.exitcode)
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_children_of_every_kind_start_and_end_in_peace(tmp_path, method):
    """Each is switched on by itself, records in a ring of its own, and ends with 0."""
    program = tmp_path / "program.py"
    program.write_text(CHILDREN)
    result = python(
        str(program),
        method,
        OTEL_DLTRACE="1",
        OTEL_DLTRACE_DRAIN="off",
        OTEL_DLTRACE_RING_DIR=str(tmp_path / "rings"),
        OTEL_DLTRACE_DIR=str(tmp_path),
    )

    assert (result.returncode, result.stdout) == (0, "True\n0\n"), result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("switch", ["0", "1"], ids=["by the program alone", "by the environment as well"])
def test_the_public_names_stay_what_they_are(tmp_path, switch):
    """A room of the package has the name of a function: loading it takes nothing away, however often one switches."""
    program = """
        import otel_dltrace
        for _ in range(2):
            otel_dltrace.start()
            otel_dltrace.instrument()
            otel_dltrace.uninstrument()
            otel_dltrace.stop()
        print([name for name in otel_dltrace.__all__ if name[0] != "_" and not callable(getattr(otel_dltrace, name))])
    """
    settings = {"OTEL_DLTRACE_RING_DIR": str(tmp_path), "OTEL_DLTRACE_DIR": str(tmp_path), "OTEL_DLTRACE_DRAIN": "off"}
    text = f"exec({LINE!r})\n{textwrap.dedent(program)}"
    result = python("-c", text, OTEL_DLTRACE=switch, **settings)

    assert (result.stdout, result.stderr) == ("[]\n", "")
