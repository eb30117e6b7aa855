"""What the benchmarks say of what they have seen, and that they leave nothing behind; no figure is tested."""

import os
import socket
import subprocess
import sys

import psutil
import pytest

from benchmarks import __main__ as benchmarks
from benchmarks import bench_metrics, bench_pushpull, bench_training
from benchmarks._processes import Drain, environment, memory_of, scratch
from benchmarks._stats import merged
from benchmarks.bench_training import Workload
from tests.support.paths import ROOT

IDLE = "import time; print('up', flush=True); time.sleep(60)"


def block(s: float, cpu: float, drain: float = 0.0, left: float = 0.0) -> dict[str, float]:
    """Return what a block of some mode cost, in milliseconds."""
    return {"s": s / 1e3, "cpu": cpu / 1e3, "drain": drain / 1e3, "left": left / 1e3}


def test_a_table_says_what_each_mode_adds_and_beside_what_phase_adds():
    """Time against the round's own *off*, CPU with the drain's against both untraced blocks."""
    round_ = {
        "off": block(10.0, 20.0),
        "off again": block(10.1, 20.0),
        "phase": block(10.2, 20.1, drain=0.1),
        "torch.profiler": block(11.0, 22.0, left=5.0),
    }

    report = bench_training._report(Workload("small", "DDP"), [round_, round_])

    assert report.splitlines() == [
        "| DDP, 2 rounds | time (95 %) | + us a step (95 %) | CPU, trainers + drain (95 %) | + CPU us a step (95 %) "
        "| of it drain | CPU of phase (95 %) | goal |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        "| off again / off | +1.00 % (+1.00 - +1.00) | +100.0 (+100.0 - +100.0) | +0.00 % (+0.00 - +0.00) "
        "| +0.0 (+0.0 - +0.0) | 0.00 % |  |  |",
        "| phase / off | +2.00 % (+2.00 - +2.00) | +200.0 (+200.0 - +200.0) | +1.00 % (+1.00 - +1.00) "
        "| +200.0 (+200.0 - +200.0) | 0.50 % |  | <= 2.0 % |",
        "| torch.profiler / off | +10.00 % (+10.00 - +10.00) | +1000.0 (+1000.0 - +1000.0) "
        "| +10.00 % (+10.00 - +10.00) | +2000.0 (+2000.0 - +2000.0) | 0.00 % | 10.0x (10.0 - 10.0) |  |",
        "",
        "A step takes 10.0 ms and 20.0 ms of CPU on 2 ranks. "
        "The profiler's `stop` takes another 5.0 ms for each, which is not counted.",
    ]


def test_push_pull_says_what_partitions_add_and_how_many_there_were():
    """All ranks' CPU, rank 0's time."""
    ranks = [
        {
            "off": block(10, cpu),
            "off again": block(10, cpu),
            "operations": block(10.1, cpu),
            "partitions": block(10.2, cpu + 0.05, drain=drain),
        }
        for cpu, drain in ((12.0, 0.1), (8.0, 0.0))
    ]
    measured = bench_pushpull.Measured([merged(ranks)] * 2, 102)

    report = bench_pushpull._report(bench_pushpull.Layout(2, 1, 1), measured)

    assert report.splitlines() == [
        "| 2 workers, 1 local rank, 1 server, 2 rounds | time (95 %) | + us a step (95 %) "
        "| CPU, trainers + servers + drain (95 %) | of it drain | goal |",
        "| --- | --- | --- | --- | --- | --- |",
        "| off again / off | +0.00 % (+0.00 - +0.00) | +0.0 (+0.0 - +0.0) | +0.00 % (+0.00 - +0.00) | 0.00 % |  |",
        "| operations / off | +1.00 % (+1.00 - +1.00) | +100.0 (+100.0 - +100.0) | +0.00 % (+0.00 - +0.00) | 0.00 % "
        "|  |",
        "| partitions / off | +2.00 % (+2.00 - +2.00) | +200.0 (+200.0 - +200.0) | +1.00 % (+1.00 - +1.00) | 0.50 % "
        "| <= 3.0 %, aim 2.0 % |",
        "",
        "A step takes 10.0 ms and has 102 stages of partitions on all ranks: *partitions* records 10,000 a second "
        "(the goal is for 10,000 and more).",
    ]


def test_metrics_say_what_a_sample_and_a_step_cost():
    """A second's samples of eight ranks, and their steps; both together are held against the goal."""
    seen = {
        "sampler": [0.02, 0.02],
        "export": [0.006] * 2,
        "summary, 20 ms": [0.04] * 2,
        "summary, 100 ms": [0.008] * 2,
    }

    report = bench_metrics._report(seen)

    assert report.splitlines() == [
        "| 8 ranks, 2 rounds | CPU, us (95 %) | of one core | of a step | goal |",
        "| --- | --- | --- | --- | --- |",
        "| sampler, a sample | 1000.0 (1000.0 - 1000.0) | 0.200 % (0.200 - 0.200) |  |  |",
        "| an export | 6000.0 (6000.0 - 6000.0) | 0.010 % (0.010 - 0.010) |  |  |",
        "| summary, a step of 20 ms | 10.0 (10.0 - 10.0) | 0.400 % (0.400 - 0.400) | 0.075 % (0.075 - 0.075) "
        "| <= 0.2 % |",
        "| summary, a step of 100 ms | 10.0 (10.0 - 10.0) | 0.080 % (0.080 - 0.080) | 0.035 % (0.035 - 0.035) "
        "| <= 0.2 % |",
    ]


def test_what_is_not_told_from_nothing_is_no_divisor():
    """Where the CPU that *phase* adds may be none, nothing is divided by it."""
    rounds = [
        {"off": block(1, 2), "off again": block(1, 2), "phase": block(1, cpu), "torch.profiler": block(1, 3)}
        for cpu in (1.9, 2.1, 1.9, 2.1)
    ]

    row = bench_training._report(Workload("sync", "all_reduce", "call"), rounds).splitlines()[4]

    assert row.split(" | ")[-2:] == ["?", " |"]


def test_a_scratch_folder_ends_what_traces_there_and_is_gone():
    """Also a drain that was stopped for an untraced block; nobody else is touched."""
    with scratch() as folder:
        command = [sys.executable, "-c", IDLE, "drain"]
        ours = subprocess.Popen(command, env=environment(folder), stdout=subprocess.PIPE)
        other = subprocess.Popen(command, env=environment(folder / "other"), stdout=subprocess.PIPE)
        for process in (ours, other):
            process.stdout.readline()
        drain = Drain(folder / "rings")
        drain.stop()
        held = drain.memory()

    assert (len(held), psutil.pid_exists(ours.pid), other.poll(), folder.exists()) == (1, False, None, False)
    other.kill()
    for process in (ours, other):
        process.communicate()


def test_the_memory_of_a_process_counts_rings_apart(tmp_path):
    """A mapped file that ends in .ring is the ring's part."""
    ring = tmp_path / "a.ring"
    ring.write_bytes(b"x" * (1 << 20))
    program = f"import mmap; f = open({os.fspath(ring)!r}, 'r+b'); m = mmap.mmap(f.fileno(), 0); m[:]; {IDLE}"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        held = memory_of(psutil.Process(process.pid))
        process.kill()

    assert {name: held[name] for name in ("ring rss", "ring pss")} == {"ring rss": 1 << 20, "ring pss": 1 << 20}
    assert held["rss"] >= held["pss"] > 1 << 20


@pytest.mark.parametrize(
    ("argument", "sentence"),
    [
        pytest.param("nope", "there is no benchmark nope; use record, ", id="an unknown name"),
        pytest.param("--rounds=0", "0 rounds measure nothing; use at least 1", id="no rounds"),
    ],
)
def test_what_cannot_be_measured_is_a_sentence(monkeypatch, capsys, argument, sentence):
    """Before anything runs."""
    monkeypatch.setattr(sys, "argv", ["benchmarks", argument])

    with pytest.raises(SystemExit) as ended:
        benchmarks.main()

    assert (ended.value.code, sentence in capsys.readouterr().err) == (2, True)


def test_every_benchmark_is_documented():
    """Under its name, in docs/benchmarks.md."""
    text = (ROOT / "docs" / "benchmarks.md").read_text().partition("## Results")[0]
    said = {line.split()[1].rstrip(":") for line in text.splitlines() if line.startswith("###")}

    assert set(benchmarks.BENCHMARKS) <= said


@pytest.mark.parametrize("name", ["record", "wire"])
def test_a_benchmark_of_our_own_internals_runs_to_its_end(name):
    """*wire* puts its own in the place of some, and fails unless all that was recorded was sent."""
    command = [sys.executable, "-m", "benchmarks", name, "--rounds", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)

    assert (done.returncode, f"### {name}\n" in done.stdout) == (0, True), done.stderr


def ask(endpoint: str) -> bytes:
    """Send a request; return the answer's first byte."""
    host, port = endpoint.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), 5) as there:
        there.settimeout(0.05)
        there.sendall(b"POST /v1/traces HTTP/1.1\r\n\r\n")
        return there.recv(1)


@pytest.mark.parametrize(
    ("away", "outcome"), [(bench_training.CLOSED, ConnectionRefusedError), (bench_training.BLACK_HOLE, TimeoutError)]
)
def test_a_collector_that_is_away_refuses_or_never_answers(away, outcome):
    """Nobody is there, or the kernel takes the connection and that is all."""
    with bench_training.collector(away) as env, pytest.raises(outcome):
        ask(env["OTEL_EXPORTER_OTLP_ENDPOINT"])
    with bench_training.collector("") as env:
        assert env == {}
