"""Servers of push_pull jobs: who does not belong to the job is refused, and who does not come is not waited for."""

import asyncio
import os
import socket
import subprocess
import sys
from contextlib import ExitStack

import pytest

from otel_dltrace.pushpull.layout import Layout
from otel_dltrace.pushpull.options import Options
from otel_dltrace.pushpull.server import Server
from otel_dltrace.pushpull.transport import credential, method, open_channel, pack_json, unpack_json
from tests.support.certificates import make_certificates
from tests.support.paths import ROOT
from tests.support.pushpull_jobs import run_job
from tests.support.servers import free_port, wait_until

SERVE = [sys.executable, "-m", "otel_dltrace", "pushpull", "serve"]
STRANGER = """
import os
from otel_dltrace.pushpull.engine import Engine
from otel_dltrace.pushpull.errors import PushPullError
from otel_dltrace.pushpull.options import read_env
try:
    engine = Engine(*read_env(os.environ))
    engine.start()
    engine.stop()
    print("in")
except PushPullError as error:
    print(error)
"""


def beside_a_server(server: dict[str, str], worker: dict[str, str], program: str = STRANGER) -> str:
    """Return what a worker says that meets one server; the server ends with it, or is ended."""
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "DMLC_NUM_WORKER": "1",
        "DMLC_NUM_SERVER": "1",
        "DMLC_PS_ROOT_PORT": str(free_port()),
        "BYTEPS_FORCE_DISTRIBUTED": "1",
        "PUSHPULL_TOKEN": "right",
        "PUSHPULL_TIMEOUT": "120",
    }
    with subprocess.Popen(SERVE, env=env | server) as serving:
        try:
            asked = subprocess.run(
                [sys.executable, "-c", program],
                env=env | worker,
                capture_output=True,
                text=True,
                timeout=240,
                check=True,
            )
        finally:
            serving.terminate()
    return asked.stdout.strip()


def test_a_server_that_does_not_come_ends_the_job():
    """Worker and server 0 wait for it, the worker says which one it is, and neither is left behind."""
    counts = {"DMLC_NUM_WORKER": "1", "DMLC_NUM_SERVER": "2", "BYTEPS_FORCE_DISTRIBUTED": "1", "PUSHPULL_TOKEN": "one"}
    ours = {"PYTHONPATH": str(ROOT), "DMLC_PS_ROOT_PORT": str(free_port()), "PUSHPULL_TIMEOUT": "5"}
    env = {**os.environ, **counts, **ours, "DMLC_SERVER_ID": "0"}
    with subprocess.Popen(SERVE, env=env) as first:
        try:
            wait_until(lambda: answers(int(env["DMLC_PS_ROOT_PORT"])), what="server 0")
            command = [sys.executable, "-c", STRANGER]
            worker = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=True)
            code = first.wait(60)
        finally:
            first.terminate()
    assert (worker.stdout, code) == ("server 1 did not come to server 0 within 5 s\n", 0)


def test_a_worker_that_comes_to_a_job_that_has_failed_opens_its_session():
    """It is told there; a server waits for one that has not come for as long as `PUSHPULL_TIMEOUT`."""
    first = Server(Layout(num_servers=1), Options(token="one"))
    first.addresses[0] = "10.0.0.2:9000"
    first.store.fail("worker 0: it was killed")
    assert asyncio.run(first._servers(b"", {})) == pack_json(addresses=["10.0.0.2:9000"])


def test_workers_that_come_to_a_job_that_has_failed_are_told_why():
    """Whatever they ask which server when they learn of it."""
    counts = {"DMLC_NUM_WORKER": "4", "DMLC_NUM_SERVER": "3", "BYTEPS_FORCE_DISTRIBUTED": "1", "PUSHPULL_TOKEN": "one"}
    ours = {"PYTHONPATH": str(ROOT), "DMLC_PS_ROOT_PORT": str(free_port()), "PUSHPULL_TIMEOUT": "120"}
    env = {**os.environ, **counts, **ours}
    with ExitStack() as running:

        def start(command: list[str], **more: str) -> "subprocess.Popen[str]":
            process = subprocess.Popen(command, env=env | more, stdout=subprocess.PIPE, text=True)
            running.enter_context(process)
            running.callback(process.kill)
            return process

        for number in range(3):
            start(SERVE, DMLC_SERVER_ID=str(number))
        fail_all(f"127.0.0.1:{env['DMLC_PS_ROOT_PORT']}", "it was killed")
        late = [start([sys.executable, "-c", STRANGER], DMLC_WORKER_ID=str(number)) for number in (1, 2, 3)]
        told = [worker.communicate(timeout=240)[0] for worker in late]
    assert told == ["worker 0: it was killed\n"] * 3


def fail_all(root: str, why: str) -> None:
    """Take the word of worker 0 to all servers, once they have come, that it cannot go on."""
    options = Options(token="one")

    def call(address: str, name: str, body: bytes) -> bytes:
        with open_channel(address, options) as channel:
            return channel.unary_unary(method(name))(body, metadata=[credential(options)], wait_for_ready=True)

    for address in unpack_json(call(root, "Servers", b""), addresses=list)["addresses"]:
        call(address, "Leave", pack_json(worker=0, session="a", reason=why))


def test_a_stranger_is_refused():
    """Without the job's token nothing is answered."""
    says = beside_a_server({}, {"PUSHPULL_TOKEN": "wrong"})
    assert "refuses us: the token is not this job's; is PUSHPULL_TOKEN the same everywhere?" in says


@pytest.mark.parametrize(
    ("name", "body", "code", "says"),
    [
        pytest.param(
            "Session", b"{", "INVALID_ARGUMENT", "b'{' is not a JSON object with worker (int), ", id="no json"
        ),
        pytest.param("Session", b"\xff", "INVALID_ARGUMENT", "b'\\xff' is not a JSON object", id="no text"),
        pytest.param("Session", b"[" * 9999, "INVALID_ARGUMENT", "[[[' is not a JSON object with", id="deep"),
        pytest.param("Session", b'{"worker": 0}', "INVALID_ARGUMENT", "num_workers (int), agreed (dict);", id="fields"),
        pytest.param(
            "Session",
            b'{"worker": -1, "session": "", "num_workers": 1, "agreed": {}}',
            "FAILED_PRECONDITION",
            "worker -1 of 1 came, but the server's job has 1",
            id="rank below 0",
        ),
        pytest.param("Leave", b"{}", "INVALID_ARGUMENT", "worker (int), session (str), reason (str);", id="leave"),
        pytest.param("Register", b'{"server": Infinity}', "INVALID_ARGUMENT", "server (int), address (str);", id="inf"),
        pytest.param(
            "Register",
            b'{"server": -1, "address": "h:1"}',
            "INVALID_ARGUMENT",
            "server -1 came, but server 0's job has 1",
            id="server below 0",
        ),
    ],
)
def test_a_body_that_is_none_of_ours_is_answered_in_a_sentence(name, body, code, says):
    """Whoever has the token may still be of another release; the server goes on."""
    asks = f"""
import os
import grpc
from otel_dltrace.pushpull.contact import greet
from otel_dltrace.pushpull.options import read_env
from otel_dltrace.pushpull.transport import credential, method, open_channel
_, options = read_env(os.environ)
with open_channel(options.root, options) as channel:
    greet(channel, "it", options)
    kind = channel.unary_unary if {name!r} == "Leave" else channel.unary_stream
    call = kind(method({name!r}))
    try:
        list(call({body!r}, metadata=(credential(options),), timeout=20))
    except grpc.RpcError as error:
        print(error.code().name, error.details())
    greet(channel, "it", options)
"""
    answer, _, sentence = beside_a_server({}, {}, asks).partition(" ")
    assert answer == code
    assert says in sentence


def test_a_namesake_that_is_refused_ends_no_job(tmp_path):
    """Its goodbye is its own, not that of the worker whose number it has."""
    program = """
    from otel_dltrace.pushpull.client import Servers
    push_pull("w", np.ones(1, np.float32))
    told = []
    twin = Servers(layout, options, told.append)
    twin.open()
    twin.close(str(told[0]))
    say(told=str(told[0]).partition("refuses us: ")[2], sum=push_pull("w", np.ones(1, np.float32)).tolist())
    """
    done = run_job(tmp_path, program, (2, 1, 1))
    assert (done.code, done.stderr) == (0, "")
    own = "does each have its own DMLC_WORKER_ID?"
    assert list(done.each("told").values()) == [f"worker {worker} is here already; {own}" for worker in range(2)]
    assert list(done.each("sum").values()) == [[2.0]] * 2


def test_a_goodbye_while_the_servers_are_met_raises_nothing():
    """The job fails, and so it is said on another thread, just when the worker calls a server: it hangs up."""
    program = """
import os
from otel_dltrace.pushpull import client
from otel_dltrace.pushpull.options import read_env
meet, told = client.greet, []
def greet(channel, where, options, *given_up):
    meet(channel, where, options)
    if given_up:
        channel.close()
client.greet = greet
servers = client.Servers(*read_env(os.environ), told.append)
try:
    servers.open()
except ValueError:  # gRPC's; the engine says why the job failed
    servers.close("local rank 0 of worker 0 died or was killed")
    print(told)
"""
    assert beside_a_server({}, {}, program) == "[]"


def test_a_port_has_one_server():
    """The second one says that it is taken: it would get some of the first one's workers, and refuse them."""
    counts = {"DMLC_NUM_WORKER": "1", "DMLC_NUM_SERVER": "1", "BYTEPS_FORCE_DISTRIBUTED": "1"}
    env = {**os.environ, **counts, "PYTHONPATH": str(ROOT), "DMLC_PS_ROOT_PORT": str(free_port())}
    with subprocess.Popen(SERVE, env=env | {"PUSHPULL_TOKEN": "first"}) as first:
        try:
            wait_until(lambda: answers(int(env["DMLC_PS_ROOT_PORT"])), what="the first server")
            second = subprocess.run(
                SERVE, env=env | {"PUSHPULL_TOKEN": "second"}, capture_output=True, text=True, timeout=60, check=False
            )
        finally:
            first.terminate()
    assert second.returncode == 2
    assert "is the port taken, or 127.0.0.1 (DMLC_NODE_HOST) not an address of this host?" in second.stderr


def test_a_server_asked_to_listen_elsewhere_says_so():
    """A port that it takes wherever there is room is not taken: the address is none of this host."""
    counts = {"DMLC_NUM_WORKER": "1", "DMLC_NUM_SERVER": "2", "DMLC_SERVER_ID": "1", "PUSHPULL_TOKEN": "x"}
    env = {**os.environ, **counts, "PYTHONPATH": str(ROOT), "DMLC_NODE_HOST": "192.0.2.1"}  # RFC 5737: nobody's
    done = subprocess.run(SERVE, env=env, capture_output=True, text=True, timeout=60, check=False)
    says = "server 1 cannot listen at 192.0.2.1:0; is 192.0.2.1 (DMLC_NODE_HOST) not an address of this host?"
    assert (done.returncode, done.stderr.splitlines()[-1]) == (2, f"otel-dltrace: {says}")


def test_a_server_does_not_wait_for_ever_for_who_never_comes():
    """Once the job has failed the timeout is enough: a worker that crashed before its `init` would keep it up."""
    port = free_port()
    counts = {"DMLC_NUM_WORKER": "2", "DMLC_NUM_SERVER": "1", "DMLC_PS_ROOT_PORT": str(port), "PUSHPULL_TOKEN": "x"}
    env = {**os.environ, **counts, "PYTHONPATH": str(ROOT), "PUSHPULL_TIMEOUT": "4"}
    with subprocess.Popen(SERVE, env=env | {"PUSHPULL_TIMEOUT": "1"}) as serving:
        try:
            wait_until(lambda: answers(port), what="the server")
            came = subprocess.run(
                [sys.executable, "-c", STRANGER], env=env, capture_output=True, text=True, timeout=240, check=True
            )
            assert serving.wait(60) == 0
        finally:
            serving.kill()
    assert came.stdout == f"not all workers came to server 0 at 127.0.0.1:{port} in 4 s\n"


def answers(port: int) -> bool:
    """Return whether somebody listens at *port*."""
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def test_a_job_can_talk_over_tls(tmp_path, tmp_path_factory):
    """With a certificate for each side a worker gets in; without one, or with one of somebody else, it does not."""
    made = make_certificates(tmp_path)
    ca = {"PUSHPULL_TLS_CA": made.authority}
    server = {**ca, "PUSHPULL_TLS_CERT": made.server, "PUSHPULL_TLS_KEY": made.server_key}
    worker = {**ca, "PUSHPULL_TLS_CERT": made.client, "PUSHPULL_TLS_KEY": made.client_key}
    assert beside_a_server(server, worker) == "in"
    plain = beside_a_server(server, {"PUSHPULL_TIMEOUT": "1"})
    assert plain.startswith("the server at 127.0.0.1:")
    other = make_certificates(tmp_path_factory.mktemp("other"))
    distrusting = beside_a_server(server, {**worker, "PUSHPULL_TLS_CA": other.authority, "PUSHPULL_TIMEOUT": "200"})
    assert "CERTIFICATE_VERIFY_FAILED" in distrusting, "said at once, not after the timeout"
