"""Bad days: whoever is killed, whatever the collector does, nothing is lost, doubled, or paid for by training."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from otel_dltrace.export.rundir.reader import read_summaries
from otel_dltrace.model import semconv as s
from otel_dltrace.model.identity import NO_STEP
from otel_dltrace.model.semconv import Flag
from otel_dltrace.model.spans import SpanBatch
from tests.support import servers
from tests.support.paths import ROOT
from tests.support.processes import Place, waiting
from tests.support.steps import EVERYTHING, SLACK_S, STEPS, TAKEN_UP, fill, recorded


def spans_named(batch: SpanBatch, name: str) -> np.ndarray:
    """Return the rows of one name."""
    return batch.rows[batch.lookup(lambda d: d.name == name, bool)]


# -- kills during torchrun ---------------------------------------------------------------------

TRAIN = """
    import mmap, os, sys, time
    import torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    import otel_dltrace as d

    dist.init_process_group("gloo")
    published = mmap.mmap(os.open(f"{sys.argv[1]}/published.{dist.get_rank()}", os.O_RDWR), 16)
    published[8:] = os.getpid().to_bytes(8, "little")
    ddp = DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    over = torch.zeros(1)
    for step in range(int(sys.argv[2])):
        over.fill_(os.path.exists(f"{sys.argv[1]}/over"))
        dist.all_reduce(over)  # the ranks end after the same step
        if over:
            break
        optimizer.zero_grad()
        ddp(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        with d.phase("published", size=step):
            pass
        published[:8] = (step + 1).to_bytes(8, "little")
        time.sleep(0.005)
    dist.barrier()
    dist.destroy_process_group()
"""


class Training:
    """Two ranks under torchrun that publish, where a kill cannot take it back, how many steps they have done."""

    def __init__(self, place: Place, steps: int) -> None:
        pytest.importorskip("torch")
        self.place = place
        self.files = [place.folder / f"published.{rank}" for rank in range(2)]
        for file in self.files:
            file.write_bytes(bytes(16))
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        program = [str(place.write(TRAIN)), str(place.folder), str(steps)]
        self.torchrun = place.popen([*launcher, *program], OTEL_DLTRACE="1", OMP_NUM_THREADS="1")

    def published(self, rank: int) -> int:
        """Return how many steps *rank* has done."""
        return int.from_bytes(self.files[rank].read_bytes()[:8], "little")

    def pids(self) -> list[int]:
        """Return the ranks' process ids."""
        return [int.from_bytes(file.read_bytes()[8:], "little") for file in self.files]

    def wait_for(self, steps: int) -> None:
        """Wait until both ranks have done as many."""
        servers.wait_until(lambda: min(map(self.published, range(2))) >= steps, what=f"{steps} steps")

    def end(self) -> None:
        """Have the training end; wait for torchrun and the ranks, kill those that a dead partner keeps waiting."""
        (self.place.folder / "over").touch()
        self.torchrun.communicate(timeout=240)
        pids = self.pids()
        ranks = [process for process in psutil.process_iter() if process.pid in pids]
        for rank in psutil.wait_procs(ranks, timeout=20)[1]:
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.kill()

    def check(self) -> None:
        """Compare the run directory with what was published: complete, in order, nothing twice, nothing open."""
        if list(self.place.rings.glob("*.ring")):
            assert self.place.command("recover").returncode == 0
        self.place.wait_for_rings()
        batches = {batch.rank: batch for batch in self.place.spans()}
        assert sorted(batches) == [0, 1]
        assert len(self.place.runs()) == 1
        ids = np.concatenate([batch["span_id"] for batch in batches.values()])
        assert len(np.unique(ids)) == len(ids)
        for rank, batch in batches.items():
            sizes = np.sort(spans_named(batch, "published")["size"])
            assert np.array_equal(sizes, np.arange(len(sizes)))
            assert self.published(rank) <= len(sizes) <= self.published(rank) + 1
            steps = np.sort(spans_named(batch, s.RANK_STEP)["step"])
            assert np.array_equal(steps, np.arange(len(steps)))
            assert len(steps) >= self.published(rank)
            assert (batch["end"] >= batch["start"]).all()


@pytest.mark.parametrize("seed", range(2))
def test_one_rank_is_killed(place, seed):
    """Its spans are as complete as the other's, its open step is marked as cut off."""
    training = Training(place, 1000)
    training.wait_for(5)
    time.sleep(random.Random(seed).random() * 0.5)
    os.kill(training.pids()[seed], signal.SIGKILL)
    training.end()

    training.check()
    (killed,) = (batch for batch in place.spans() if batch.rank == seed)
    cut = killed.rows[(killed["flags"] & Flag.TRUNCATED) > 0]
    steps = killed["step"][killed["step"] != NO_STEP]
    assert steps.max() in cut["step"]


@pytest.mark.parametrize("seed", range(2))
def test_all_ranks_are_killed(place, seed):
    """The drain outlives them, reads their rings to the end, and ends."""
    training = Training(place, 1000)
    training.wait_for(5)
    time.sleep(random.Random(seed).random() * 0.5)
    for pid in training.pids():
        with contextlib.suppress(ProcessLookupError):  # the second may have ended for want of the first
            os.kill(pid, signal.SIGKILL)
    training.end()

    place.wait_for_rings()  # by itself
    training.check()


def test_the_drain_is_killed_again_and_again(place):
    """The ranks start another each time, which goes on where the last one was."""
    training = Training(place, 1_000_000)
    training.wait_for(5)
    chance = random.Random(4)
    kills = 0
    while kills < 4:
        time.sleep(chance.uniform(0.2, 0.8))
        for drain in place.drains():
            drain.kill()
            kills += 1
        assert training.torchrun.poll() is None, training.torchrun.communicate()
    training.end()

    assert training.torchrun.returncode == 0
    training.check()


@pytest.mark.parametrize("seed", range(2))
def test_torchrun_is_killed(place, seed):
    """The ranks are orphans, and go on or fail: either way their spans are there."""
    training = Training(place, 150)
    training.wait_for(5)
    time.sleep(random.Random(seed).random() * 0.3)
    training.torchrun.kill()
    training.end()

    training.check()


UNBOUND = """
    import os, time, otel_dltrace as d
    d.start()
    with d.step(0):
        with d.phase("load"):
            pass
    with d.step(1):
        print("ready", flush=True)
        time.sleep(60)
"""


@pytest.mark.parametrize(
    ("more", "directories"),
    [
        pytest.param({"OTEL_DLTRACE_RUN": "nightly"}, 1, id="one run id"),
        pytest.param({}, 2, id="nothing that joins them"),
    ],
)
def test_ranks_killed_before_they_were_bound_are_who_their_environment_says(place, more, directories):
    """No process group ever came: rank and world size are the launcher's, the generation the run's or their own."""
    ranks = [
        place.start(UNBOUND, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", **more)
        for rank in range(2)
    ]
    for rank in ranks:
        assert rank.stdout.readline() == "ready\n"
        rank.kill()
        rank.communicate()

    place.wait_for_rings()
    batches = sorted(place.spans(), key=lambda batch: batch.rank)
    assert [(b.rank, b.process.bind.world_size, len(b)) for b in batches] == [(0, 2, 3), (1, 2, 3)]
    assert len(place.runs()) == directories
    assert [int(spans_named(b, s.RANK_STEP)["flags"][1]) & Flag.TRUNCATED for b in batches] == [Flag.TRUNCATED] * 2
    assert list(place.folder.glob(".dltrace-*")) == []


# -- collectors --------------------------------------------------------------------------------


@pytest.fixture
def black_hole() -> Iterator[str]:
    """Give the address of a server that takes connections and never answers."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(64)
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def check_arrived(place: Place, collector: servers.Collector, steps: int) -> None:
    """Compare what the collector has with what was recorded: those spans, a root for each step, and no others."""
    mine = recorded(place)
    assert len(mine) == 1 + 3 * steps
    collector.wait_for(len(mine) + steps)
    arrived = {span.span_id: span.name for span in collector.spans()}
    assert mine <= set(arrived)
    assert sorted(arrived[i] for i in set(arrived) - mine) == [s.TRAIN_STEP] * steps


def seconds_after(process: "subprocess.Popen[str]", says: str = "") -> float:
    """Return how long after its last statement *process* ended, which *says* so much at least."""
    out, err = process.communicate(timeout=240)
    ended = time.monotonic()
    assert process.returncode == 0, err
    assert says in err
    return ended - float(out.split()[-1])


@pytest.mark.parametrize("kind", ["dead", "black hole"])
def test_a_collector_that_does_not_answer_costs_two_seconds_at_most(place, black_hole, tmp_path, kind):
    """All is in the run directory, requests wait on disk, and recover delivers them once there is a collector."""
    endpoint = black_hole if kind == "black hole" else f"http://127.0.0.1:{servers.free_port()}"
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_EXPORTER_OTLP_TIMEOUT": "60", **EVERYTHING}
    process = place.start(STEPS + TAKEN_UP, "40", "0.01", **env)
    assert seconds_after(process, says="spans recorded") <= 2.0 + SLACK_S
    place.wait_for_rings()
    place.wait_for_drains()
    (run,) = place.runs()
    assert len(recorded(place)) == 121
    assert list(run.glob("hosts/*/spill/*.otlp"))
    (summary,) = (json.loads(path.read_text())["summary"] for path in run.glob("hosts/*/drain.json"))
    assert summary["spans"] == 121
    assert summary["otlp"]["spilled"] == 161

    with servers.collector(tmp_path) as collector:
        result = place.command("recover", str(run), OTEL_EXPORTER_OTLP_ENDPOINT=collector.http)
        assert result.returncode == 0, result.stderr
        assert "161 spans sent, 0 still waiting" in result.stdout
        check_arrived(place, collector, 40)
    assert not list(run.glob("hosts/*/spill/*.otlp"))


def test_a_collector_that_restarts_gets_what_it_missed(place, tmp_path):
    """What could not be sent meanwhile comes later; no step waits for it."""
    with servers.collector(tmp_path) as collector:
        env = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.http, **EVERYTHING}
        process = place.start(STEPS, "200", "0.02", **env)
        time.sleep(1.5)
        collector.kill()
        time.sleep(1.5)
        collector.start()
        assert seconds_after(process) <= 2.0 + SLACK_S
        place.wait_for_rings()
        place.wait_for_drains()
        result = place.command("recover", str(place.runs()[0]), OTEL_EXPORTER_OTLP_ENDPOINT=collector.http)
        assert result.returncode == 0, result.stderr
        check_arrived(place, collector, 200)


def test_a_damaged_certificate_costs_no_span(place, tmp_path, certificates):
    """The drain goes on as if the collector were away, says so once, and sends what waits when the file is whole."""
    authority = tmp_path / "authority.pem"
    authority.write_bytes(b"")
    tls = {"cert_file": certificates.server, "key_file": certificates.server_key}
    with servers.collector(tmp_path, tls) as collector:
        where = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.http, "OTEL_EXPORTER_OTLP_CERTIFICATE": str(authority)}
        process = place.start(STEPS, "200", "0.02", **where, **EVERYTHING)
        servers.wait_until(lambda: list(place.folder.glob("dltrace-*/hosts/*/spill/*.otlp")), what="requests on disk")
        (log,) = place.rings.glob("*.log")
        said = log.read_text()
        authority.write_bytes(Path(certificates.authority).read_bytes())
        seconds_after(process)
        place.wait_for_rings()
        place.wait_for_drains()
        place.deliver(**where)
        check_arrived(place, collector, 200)

    assert said.count("\n") == said.count("_CLIENT_KEY cannot be used") == 1, said


UNEVEN = """
    import importlib, os, sys, time
    import otel_dltrace

    importlib.import_module(sys.argv[2])

    def wait_for(name):
        while not os.path.exists(name):
            time.sleep(0.01)

    is_first = os.environ["RANK"] == "0"
    for number in range(4):
        with otel_dltrace.step():
            if number == 1 and is_first:
                time.sleep(float(sys.argv[1]))
                open("came", "w").close()
            if number == 2:
                wait_for("came")
    if is_first:
        wait_for("go")
"""


@pytest.mark.parametrize(
    ("pause", "module"),
    [
        pytest.param(
            "8", "json", id="a rank stands in a step for long"
        ),  # a root that waits for nobody goes out after 2 + 2
        pytest.param("0", "torch", id="rank 0 is bound when the others are gone"),  # as its process group never comes
    ],
)
def test_a_steps_root_covers_all_ranks_of_the_host(place, tmp_path, pause, module):
    """Also where they come to its end, or are known at all, at very different times: each step's root, with both."""
    world = {"WORLD_SIZE": "2", "OTEL_DLTRACE_RUN": "1", "OTEL_BSP_SCHEDULE_DELAY": "100", **EVERYTHING}
    with servers.collector(tmp_path) as collector:
        env = {"OTEL_DLTRACE": "1", "OTEL_EXPORTER_OTLP_ENDPOINT": collector.http, **world}
        first, second = (place.start(UNEVEN, pause, module, RANK=rank, **env) for rank in "01")
        assert place.finish(second).returncode == 0
        (tmp_path / "go").touch()
        assert place.finish(first).returncode == 0
        arrived = collector.wait_for(12)

    roots = {it.trace_id: it for it in arrived if it.name == s.TRAIN_STEP}
    assert len(roots) == 4
    for it in arrived:
        root = roots[it.trace_id]
        assert root.start_time_unix_nano <= it.start_time_unix_nano <= it.end_time_unix_nano <= root.end_time_unix_nano


def test_ranks_that_share_no_run_have_roots_of_their_own(place, tmp_path):
    """Nobody makes a process group for those of torchrun: each is a run of its own, and has no rank 0 beside it."""
    program = """
        import otel_dltrace
        for _ in range(3):
            with otel_dltrace.step():
                pass
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with servers.collector(tmp_path) as collector:
        env = {"OTEL_DLTRACE": "1", "OTEL_EXPORTER_OTLP_ENDPOINT": collector.http, **EVERYTHING}
        job = place.finish(place.popen([*command, str(place.write(program))], **env))
        arrived = collector.wait_for(12)
    roots = {it.span_id: it.trace_id for it in arrived if it.name == s.TRAIN_STEP}

    assert job.returncode == 0, job.stderr
    assert (len(roots), len(set(roots.values()))) == (6, 6)
    assert [roots[it.parent_span_id] for it in arrived if it.name == s.RANK_STEP] == [
        it.trace_id for it in arrived if it.name == s.RANK_STEP
    ]


def test_ranks_without_a_framework_are_seen_while_they_run(place, tmp_path):
    """Nobody makes a process group for them: the environment says whose they are, and two steps are enough to know."""
    program = """
        import os, time
        import otel_dltrace

        for _ in range(3):
            with otel_dltrace.step():
                pass
        while not os.path.exists("go"):
            time.sleep(0.01)
    """
    world = {"WORLD_SIZE": "2", "OTEL_DLTRACE_RUN": "1", "OTEL_BSP_SCHEDULE_DELAY": "100"}
    with servers.collector(tmp_path) as collector:
        env = {"OTEL_DLTRACE": "1", "OTEL_EXPORTER_OTLP_ENDPOINT": collector.http, **world}
        ranks = [place.start(program, RANK=rank, **env) for rank in "01"]
        arrived = collector.wait_for(9)
        (tmp_path / "go").touch()
        assert [place.finish(rank).returncode for rank in ranks] == [0, 0]

    assert Counter(it.name for it in arrived) == {s.TRAIN_STEP: 3, s.RANK_STEP: 6}


@pytest.mark.parametrize("seed", range(2))
def test_a_killed_drain_leaves_nothing_undelivered(place, tmp_path, seed):
    """Whatever it had not yet sent, acknowledged or spilled, the next one sends again."""
    chance = random.Random(seed)
    with servers.collector(tmp_path) as collector:
        env = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.http, **EVERYTHING}
        process = place.start(STEPS, "200", "0.02", **env)
        for _ in range(5):
            time.sleep(chance.uniform(0.4, 0.9))
            for drain in place.drains():
                drain.kill()
        seconds_after(process)
        place.wait_for_drains()
        assert place.command("recover", str(place.runs()[0]), **env).returncode == 0
        check_arrived(place, collector, 200)


# -- otel-dltrace run --------------------------------------------------------------------------

PATIENT = """
    import signal, sys, time
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    signal.signal(signal.SIGINT, lambda *_: sys.exit(8))
    import otel_dltrace as d
    with d.step(0):
        pass
    print("ready", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 7), (signal.SIGINT, 8)], ids=["SIGTERM", "SIGINT"])
def test_run_hands_signals_to_the_program_and_its_exit_code_back(place, number, code):
    """SIGTERM is passed on; Ctrl-C reaches both by itself. The report comes all the same."""
    command = [sys.executable, "-m", "otel_dltrace", "run", "--", sys.executable, str(place.write(PATIENT))]
    run = place.popen(["setsid", *command])
    assert run.stdout.readline() == "ready\n"
    send = os.killpg if number == signal.SIGINT else os.kill
    send(run.pid, number)
    result = place.finish(run)

    assert result.returncode == code, result.stderr
    assert place.runs()[0].name in result.stderr
    assert list(place.rings.iterdir()) == []


def test_run_ends_soon_whatever_the_collector_does(place, black_hole):
    """With a black hole for a collector: what waits goes to disk, and the report comes."""
    program = place.write(STEPS)
    command = [sys.executable, "-m", "otel_dltrace", "run", "--no-report", "--", sys.executable, str(program)]
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": black_hole, "OTEL_EXPORTER_OTLP_TIMEOUT": "60", **EVERYTHING}
    run = place.popen([*command, "20", "0.01"], **env)

    assert seconds_after(run) <= 10.0 + SLACK_S
    assert len(recorded(place)) == 61
    assert list(place.runs()[0].glob("hosts/*/spill/*.otlp"))
    assert list(place.rings.iterdir()) == []


# -- the ring folder ---------------------------------------------------------------------------


@pytest.fixture
def tmpfs(place) -> Iterator[Callable[..., Path]]:
    """Give what mounts a tmpfs of some MB (and of so many files) for the place's rings."""
    mounted: list[Path] = []

    def mount(megabytes: int, files: int = 1000) -> Path:
        folder = place.folder / "small"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m,nr_inodes={files}", "tmpfs", str(folder)]
        try:
            result = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            pytest.skip(f"nothing mounts here: {error}")
        if result.returncode:
            pytest.skip(f"no tmpfs may be mounted here: {result.stderr.strip()}")
        mounted.append(folder)
        place.rings = folder
        return folder

    yield mount
    for folder in mounted:
        for drain in place.drains():
            drain.kill()
        subprocess.run(["umount", "-l", str(folder)], check=True)


CLOSES_ALL = """
    import os
    import otel_dltrace as d
    d.start()
    with d.step():
        pass
    os.closerange(3, 100)
    with d.step():
        pass
"""


def test_a_program_that_closes_our_descriptors_is_told_what_that_costs(place):
    """The lock on its ring goes with it: the drain takes the process for ended, and the summary counts what it read."""
    told = place.run(CLOSES_ALL).stderr

    assert "the program has closed the file descriptor of its ring: what it recorded after that may be lost\n" in told


def test_a_tmpfs_without_room_turns_tracing_off_with_one_sentence(place, tmpfs):
    """1 MB: no ring fits into a twentieth of it."""
    tmpfs(1)
    result = place.run(STEPS, "3", "0")

    assert result.returncode == 0
    assert result.stderr.count("\n") == 1
    assert "no room for a ring" in result.stderr
    assert place.runs() == []


def test_a_ring_whose_names_find_no_room_does_not_stay(place, tmpfs):
    """No drain would know whose it is: it would lie there, with all its pages, until somebody removed it."""
    folder = tmpfs(64, files=2)
    result = place.run(STEPS, "3", "0", OTEL_DLTRACE_DRAIN="off")

    assert result.returncode == 0
    assert (result.stderr.count("\n"), "cannot be made" in result.stderr) == (1, True), result.stderr
    assert list(folder.iterdir()) == []


def test_a_tmpfs_of_64_mb_holds_a_smaller_ring(place, tmpfs):
    """Everything is traced."""
    tmpfs(64)
    result = place.run(STEPS, "50", "0.001")

    assert result.returncode == 0, result.stderr
    place.wait_for_rings()
    assert len(recorded(place)) == 151


def test_a_tmpfs_that_fills_up_later_costs_no_span(place, tmpfs):
    """The ring has its pages; names and cursors that find no room are missing, and training goes on."""
    folder = tmpfs(64)
    process = place.start(STEPS, "100", "0.02")
    servers.wait_until(lambda: any(b"PUSH" in path.read_bytes() for path in folder.glob("*.names")), what="all names")
    servers.wait_until(place.drains, what="the drain")
    fill(folder / "full")
    _, err = process.communicate(timeout=240)

    assert process.returncode == 0, err
    place.wait_for_rings()
    assert len(recorded(place)) == 301


def test_run_says_that_its_folder_is_full_and_recover_has_what_waits(place, tmpfs):
    """Neither the report nor the last line takes what is on the disk for all that there is."""
    rings, full = place.rings, tmpfs(1)
    place.rings = rings
    fill(full / "full")
    program = str(place.write(STEPS))
    result = place.command("run", "--dir", str(full), "--", sys.executable, program, "50", "0.001")

    last = result.stderr.splitlines()[-1]
    (ring,) = rings.glob("*.ring")
    assert result.returncode == 0, result.stderr
    assert f"{ring} cannot be emptied into its run directory ([Errno 28] No space left on device)" in last
    assert "none lost" not in result.stdout + result.stderr
    assert not any(drain["ended"] for run in full.glob("dltrace-*") for drain in read_summaries(run))
    assert list(full.glob("dltrace-*/hosts/*/.drain*")) == []
    (full / "full").unlink()
    assert "151 spans recovered" in place.command("recover", OTEL_DLTRACE_DIR=str(full)).stdout


FILLS_ITS_FOLDER = """
    import sys, time
    from pathlib import Path
    import otel_dltrace as d
    from otel_dltrace.model.identity import Bind
    from otel_dltrace.record.tracer import live
    from tests.support.steps import fill

    d.start()
    live.tracer.recorder.bind(Bind("job", "1.00", "demo", world_size=1))
    for number in range(5):
        with d.step():
            pass
        if number == 2:
            while not (host := next(Path(sys.argv[1]).glob("dltrace-*/hosts/*"), None)):
                time.sleep(0.05)
            d.flush()
            told, room = host / "drain.json", host / ".drain.json.room"
            while not (told.exists() and '"so_far": 3' in told.read_text() and room.exists() and room.stat().st_size):
                time.sleep(0.05)
            fill(Path(sys.argv[1], "full"))
"""


def test_the_figures_of_a_run_find_room_where_its_last_spans_do(place, tmpfs):
    """A few spans fit into the page that a segment has; without figures the run would never have ended."""
    rings, full = place.rings, tmpfs(1)
    place.rings = rings
    environment = {"OTEL_DLTRACE_DIR": str(full), "PYTHONPATH": str(ROOT)}
    result = place.run(waiting(FILLS_ITS_FOLDER), str(full), **environment)
    place.wait_for_drains()

    assert "5 spans recorded, none lost" in result.stderr, result.stderr
    ((drain,),) = map(read_summaries, full.glob("dltrace-*"))
    assert (drain["ended"], drain["summary"]["spans"], drain["files"]) == (True, 5, ["spans-00001.arrows"])
    assert list(full.glob("dltrace-*/hosts/*/.drain*")) == []


# -- damaged files -----------------------------------------------------------------------------


def damage_header(ring: Path) -> None:
    """Overwrite page 0."""
    with ring.open("r+b") as file:
        file.write(b"\xff" * 64)


def damage_records(ring: Path) -> None:
    """Overwrite every record with random bytes, but keep leases and commits: all of it is taken for true."""
    data = np.frombuffer(ring.read_bytes(), np.uint8).copy()
    chunks = data[4096:].reshape(-1, 64, 64)
    noise = np.random.default_rng(7).integers(0, 256, chunks.shape, np.uint8)
    noise[:, 0], noise[:, :, 60:] = chunks[:, 0], chunks[:, :, 60:]
    ring.write_bytes(data[:4096].tobytes() + noise.tobytes())


def cut_short(ring: Path) -> None:
    """Lose the second half."""
    with ring.open("r+b") as file:
        file.truncate(ring.stat().st_size // 2)


def orphan(place: Place) -> Path:
    """Return a ring whose writer was killed, and that nobody has read."""
    before = set(place.rings.glob("*.ring"))
    process = place.start(UNBOUND, OTEL_DLTRACE_DRAIN="off")
    assert process.stdout.readline() == "ready\n"
    process.kill()
    process.communicate()
    (ring,) = set(place.rings.glob("*.ring")) - before
    return ring


@pytest.mark.parametrize("damage", [damage_header, cut_short], ids=["header", "length"])
def test_a_damaged_ring_stays_and_the_others_are_read(place, damage):
    """Drain and recover say one sentence about it and go on."""
    ring = orphan(place)
    damage(ring)
    (place.rings / "notes.ring").write_text("this is no ring")
    (place.rings / "0123.ring").write_bytes(os.urandom(1 << 16))
    (place.rings / "junk").write_bytes(os.urandom(4096))

    result = place.run(STEPS, "5", "0")
    assert result.returncode == 0, result.stderr
    servers.wait_until(lambda: len(list(place.rings.glob("*.ring"))) == 3, what="the ring of the program")
    recover = place.command("recover")

    assert recover.returncode == 0
    assert len(recorded(place)) == 16
    for name in ("notes.ring", "0123.ring", ring.name):
        assert sum(name in line for line in recover.stderr.splitlines()) == 1
        assert (place.rings / name).exists()


def test_a_ring_of_random_records_does_no_harm(place):
    """Its spans are nonsense, or it is left; the drain lives and reads the other ring."""
    damage_records(orphan(place))
    orphan(place)

    result = place.command("recover", OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{servers.free_port()}")

    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    wholes = [batch for batch in place.spans() if len(spans_named(batch, "load")) == 1]
    assert len(wholes) == 1
    assert len(wholes[0]) == 3


@pytest.mark.parametrize("where", ["middle", "end", "begin"])
def test_a_torn_names_file_costs_names_not_spans(place, where):
    """What could be read is used; recover says that some spans have no names."""
    ring = orphan(place)
    names = ring.with_suffix(".names")
    data = bytearray(names.read_bytes())
    if where == "end":
        names.write_bytes(data[:-3])
    elif where == "begin":
        names.write_bytes(b"")
    else:
        data[-60] ^= 0xFF
        names.write_bytes(data)

    result = place.command("recover")

    assert result.returncode == 0, result.stderr
    assert sum("some of its spans have no names" in line for line in result.stderr.splitlines()) == 1
    assert len(recorded(place)) == 3
    assert not list(place.rings.glob("*.ring"))
