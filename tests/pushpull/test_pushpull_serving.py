"""Servers that are started by hand, as a cluster does it: they meet, lose and find each other."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from otel_dltrace.pushpull.options import Options
from otel_dltrace.pushpull.transport import credential, method, open_channel, pack_json, unpack_json
from tests.support.paths import ROOT
from tests.support.servers import free_port, wait_until

SERVE = [sys.executable, "-m", "otel_dltrace", "pushpull", "serve"]
WORKER = """
import os
import numpy as np
from otel_dltrace.pushpull.engine import Engine
from otel_dltrace.pushpull.options import read_env
engine = Engine(*read_env(os.environ))
engine.start()
values = np.full(5000, 3, np.float32)
engine.wait(engine.push_pull(engine.declare("w"), values, average=False))
engine.stop()
print(values.sum())
"""
JOINING = """
import os, sys, time
from otel_dltrace.pushpull.contact import greet
from otel_dltrace.pushpull.options import agreed, read_env
from otel_dltrace.pushpull.transport import credential, method, open_channel, pack_json
layout, options = read_env(os.environ)
channel = open_channel(options.root, options)
greet(channel, "server 0", options)
who = {"metadata": [credential(options)]}
channel.unary_unary(method("Servers"))(b"", **who)
fields = {"worker": 0, "session": "s", "num_workers": layout.num_workers, "agreed": agreed(layout, options)}
session = channel.unary_stream(method("Session"))(pack_json(**fields), **who)
time.sleep(0.5)
print("joined", flush=True)
"""
"""Joins server 0 alone."""
LEAVING = """
channel.unary_unary(method("Leave"))(pack_json(worker=0, session="s", reason=""), **who)
time.sleep(3)
sys.exit(7)
"""


class Job:
    """A job of one worker and two servers, of which each process is started by its own command."""

    def __init__(self) -> None:
        counts = {"DMLC_NUM_WORKER": "1", "DMLC_NUM_SERVER": "2", "BYTEPS_FORCE_DISTRIBUTED": "1"}
        self.root = f"127.0.0.1:{free_port()}"
        ours = {"PYTHONPATH": str(ROOT), "DMLC_PS_ROOT_PORT": self.root.rpartition(":")[2], "PUSHPULL_TOKEN": "one"}
        self.env = {**os.environ, **counts, **ours, "BYTEPS_PARTITION_BYTES": "4096"}
        self.running = ExitStack()

    def start(self, command: list[str], **own: str) -> "subprocess.Popen[str]":
        """Start a process; it is killed with the test."""
        process = subprocess.Popen(
            command, env=self.env | own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.running.enter_context(process)
        self.running.callback(process.kill)
        return process

    def serve(self, number: int) -> "subprocess.Popen[str]":
        """Start a server."""
        return self.start(SERVE, DMLC_SERVER_ID=str(number))

    def ask(self, name: str, body: bytes = b"", address: str = "") -> bytes:
        """Return what a server, server 0 if no other, answers, once it is there."""
        options = Options(token="one")
        with open_channel(address or self.root, options) as channel:
            call = channel.unary_unary(method(name))
            return bytes(call(body, metadata=[credential(options)], wait_for_ready=True, timeout=60))

    def addresses(self) -> list[str]:
        """Return where the servers are, once all have come."""
        return list(unpack_json(self.ask("Servers"), addresses=list)["addresses"])

    def trains(self) -> bool:
        """Return whether a worker gets its sum from both servers."""
        said, _ = self.start([sys.executable, "-c", WORKER]).communicate(timeout=120)
        return said == "15000.0\n"


def end_of(process: "subprocess.Popen[str]") -> tuple[int, str]:
    """Return the exit code of *process*, and the last line that it has said."""
    _, said = process.communicate(timeout=60)
    return process.returncode, said.strip().rpartition("\n")[2]


@pytest.fixture
def job() -> Iterator[Job]:
    """Give a job of which nothing runs yet."""
    it = Job()
    with it.running:
        yield it


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_ends_when_server_0_goes_before_any_worker_came(number, job):
    """Nobody would ever learn of it; started again, both serve."""
    first, second = job.serve(0), job.serve(1)
    job.addresses()
    first.send_signal(number)
    code, said = end_of(second)
    assert code == 2
    assert f"server 0 at {job.root} " in said
    again = [job.serve(0), job.serve(1)]
    assert job.trains()
    assert [end_of(server)[0] for server in again] == [0, 0]


def test_a_server_that_is_started_again_before_any_worker_came_takes_its_place(job):
    """Also on another port, as in a new pod."""
    servers = [job.serve(0), job.serve(1)]
    job.addresses()
    servers[1].kill()
    servers[1].wait()
    servers[1] = job.serve(1)
    assert job.trains()
    assert [end_of(server)[0] for server in servers] == [0, 0]


@pytest.mark.parametrize("silent", [pytest.param(True, id="silent"), pytest.param(False, id="of the same number")])
def test_the_latest_server_of_a_number_counts(silent, job):
    """Nobody knows how long one that is silent will be; one that is there learns why it is not asked."""
    servers = [job.serve(0), job.serve(1)]
    before = job.addresses()[1]
    if silent:
        servers[1].send_signal(signal.SIGSTOP)
    late = job.serve(1)
    wait_until(lambda: job.addresses()[1] != before)
    assert job.trains()
    assert [end_of(server)[0] for server in (servers[0], late)] == [0, 0]
    servers[1].send_signal(signal.SIGCONT)
    code, said = end_of(servers[1])
    assert code == 2
    assert silent or "another server 1 has come, at 127.0.0.1:" in said


def test_a_server_that_comes_after_workers_is_refused(job):
    """They look for it where it was, and say so themselves when it is gone."""
    job.env["DMLC_NUM_WORKER"] = "2"
    job.serve(0)
    server = job.serve(1)
    job.addresses()
    worker = job.start([sys.executable, "-c", JOINING + "time.sleep(60)"])
    assert worker.stdout.readline() == "joined\n"
    server.kill()
    code, said = end_of(job.serve(1))
    assert (code, "server 1 came after the workers" in said) == (2, True)


def test_a_server_that_nobody_asks_is_not_blamed_for_its_end(job):
    """The worker's error ends the job, though a server that misses server 0 ended before."""
    launch = [sys.executable, "-m", "otel_dltrace", "pushpull", "launch", "--servers", "3", "--"]
    code, said = end_of(job.start([*launch, sys.executable, "-c", JOINING + LEAVING]))
    assert (code, said) == (7, "otel-dltrace: local rank 0 of worker 0 ended with exit code 7; ending the others")


def test_servers_that_are_ended_together_say_nothing(job):
    """In whatever order their signals come."""
    servers = [job.serve(0), job.serve(1)]
    for address in job.addresses():
        job.ask("Hello", address=address)
    for server in servers:
        server.terminate()
    assert [end_of(server) for server in servers] == [(0, ""), (0, "")]


def test_a_server_that_comes_to_a_job_that_has_failed_is_told(job):
    """No worker would ever come to it."""
    first = job.serve(0)
    job.ask("Leave", pack_json(worker=0, session="a", reason="it was killed"))
    assert end_of(job.serve(1)) == (2, "otel-dltrace: worker 0: it was killed")
    first.kill()
