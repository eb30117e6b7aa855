"""Runs small PyTorch programs under tracing, as processes of their own, and reads what they recorded."""

import json
import mmap
import os
import secrets
import signal
import struct
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from otel_dltrace.export.rings.reader import RingReader
from otel_dltrace.model.identity import Bind
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.record.names import Names
from otel_dltrace.record.ring_file import AMEND, AMEND_ERROR, SPAN
from tests.support.paths import ROOT
from tests.support.ring_files import records_of
from tests.support.warm import warm

RECORD = struct.Struct("<IIIBBHQQQIIiiHHI")
COMPILES = sys.version_info[:3] != (3, 13, 0)
"""Whether torch.compile works: it wants Python 3.13.1."""

BEGIN = """
import atexit, gc, json, os, sys, time
from pathlib import Path

def let_go():
    # A thread of gloo that still holds a tensor of Python's aborts a process that is finalized: pytorch pull 179291.
    gc.collect()
    time.sleep(0.1)

atexit.register(let_go)

def stands(pid):
    # Whether the main thread of *pid* has done nothing for a tenth of a second: it waits, and not for the processor.
    def look():
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return [line.split()[1] for line in lines if line.startswith(("State", "voluntary", "nonvoluntary"))]

    before = look()
    time.sleep(0.1)
    return before[0] == "S" and look() == before

def say(**fields):
    rank = os.environ.get("RANK", "0")
    with open(os.path.join(os.environ["OUT"], f"rank{rank}.jsonl"), "a") as file:
        file.write(json.dumps(fields) + "\\n")
"""
TRACED = """
from otel_dltrace.instrument import registry
from otel_dltrace.model.topology import world_from_env
from otel_dltrace.record.recorder import Recorder
from otel_dltrace.record.tracer import Tracer, live

recorder = None

def record():
    global recorder, tracer
    recorder = Recorder(Path(os.environ["RINGS"]), 4 << 20, int(os.environ["TRACED"]))
    live.tracer = tracer = Tracer(recorder, "test", world_from_env(os.environ))

def stop():
    if recorder:
        tracer.steps.end()
        registry.uninstrument()
        live.tracer = None
        recorder.close()

atexit.register(stop)
"""
STARTED = "record()\n"
INSTRUMENT = "registry.instrument()\n"
IMPORT = "import torch, torch._dynamo, torch.utils.data\n"
"""Optimizers load dynamo, which takes as long again as torch itself."""


@dataclass(frozen=True)
class Span:
    """A record of a ring, with its descriptor."""

    descriptor: Descriptor
    kind: int
    level: int
    source: int
    number: int
    step: int
    start: int
    end: int
    size: int
    parent: int
    seq: int
    a: int
    b: int
    flags: int

    @property
    def name(self) -> str:
        """The span's name."""
        return self.descriptor.name


@dataclass
class Recorded:
    """What one process recorded, and what its program said."""

    records: list[Span]
    binds: list[Bind]
    errors: list[tuple[int, str]]
    said: list[dict[str, Any]] = field(default_factory=list)

    def spans(self, kind: str, name: str = "") -> list[Span]:
        """Return the spans of one descriptor kind (and name), the last record of each, by start."""
        last = {
            s.number: s for s in self.records if s.kind == SPAN and s.descriptor.kind == kind and name in ("", s.name)
        }
        return sorted(last.values(), key=lambda s: (s.start, s.number))

    def steps(self) -> list[int]:
        """Return the ordinals of the steps that ended."""
        return [s.step for s in self.spans("step")]

    def stages(self, step: int) -> dict[str, int]:
        """Return how often each stage came in *step*."""
        return {s.name: s.a for s in self.spans("stage") if s.step == step}


def read_ring(path: Path) -> Recorded:
    """Return what the ring at *path* holds."""
    names = Names()
    names.read(path.with_suffix(".names").read_bytes())
    with path.open("rb") as file:
        reader = RingReader(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
    records, errors = [], []
    for record in records_of(reader, final=True):
        f = RECORD.unpack(record)
        if f[3] == AMEND:
            if record[56] == AMEND_ERROR:
                errors.append((f[0], names.strings[int.from_bytes(record[16:20], "little")]))
            continue
        descriptor = names.descriptors[f[2]]
        records.append(
            Span(descriptor, f[3], f[4] >> 4, f[4] & 15, f[0], f[1], f[6], f[7], f[8], f[9], f[10], f[11], f[12], f[5])
        )
    reader.close()
    return Recorded(records, names.binds, errors)


def run(
    folder: Path,
    program: str,
    ranks: int = 1,
    level: int = 3,
    *more: str,
    imported: str = IMPORT,
    **variables: str,
) -> list[Recorded]:
    """Run *program* on *ranks* ranks and return what each process recorded, by rank; *level* 0 traces nothing.

    The processes are forked from one that has imported torch, as in `run_each`.

    Args:
        folder: An empty folder.
        program: Its text, to follow `BEGIN`.
        ranks: How many; where they are several, each has the environment that torchrun would give it.
        level: The level at which it is recorded.
        more: Arguments for torchrun, which then starts the ranks, each from its beginning.
        imported: What is imported once for all of them.
        variables: More environment variables.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "program.py"
    env = os.environ | {"RINGS": str(folder / "rings"), "OUT": str(folder), "OMP_NUM_THREADS": "1", **variables}
    env |= {"PYTHONPATH": str(ROOT), "TRACED": str(level), "PYTHONFAULTHANDLER": "1"}
    begin, instrument, record = (BEGIN + TRACED, INSTRUMENT, STARTED) if level else (BEGIN, "", "")
    if more:
        file.write_text(begin + record + instrument + textwrap.dedent(program))
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), *more]
        code, error = _finish([*torchrun, "--standalone", str(file)], env)
        codes = [code]
    else:
        file.write_text(record + textwrap.dedent(program))
        with _rendezvous(ranks) as theirs:
            done = warm(begin + instrument + imported).run(file, [env | its for its in theirs])
        codes, error = done.codes, done.err
    assert not any(codes), (codes, error[-6000:])
    assert "otel_dltrace: " not in error, error
    rings = [read_ring(path) for path in sorted((folder / "rings").glob("*.ring"))]
    if not level:
        rings = [Recorded([], [], []) for _ in range(ranks)]
    if len(rings) > 1:
        rings.sort(key=lambda r: (r.binds[0].generation_number, r.binds[0].rank) if r.binds else (0, 0))
    if len(rings) == ranks:
        for rank, ring in enumerate(rings):
            said = folder / f"rank{rank}.jsonl"
            ring.said = [json.loads(line) for line in said.read_text().splitlines()] if said.exists() else []
    return rings


@contextmanager
def _rendezvous(ranks: int) -> Iterator[list[dict[str, str]]]:
    """Give what torchrun says to each rank that it starts, and the store where they meet; one rank has no launcher."""
    if ranks == 1:
        yield [{}]
        return
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": secrets.token_hex(8),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    yield [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    del store


def _finish(command: list[str], env: dict[str, str]) -> tuple[int, str]:
    """Run *command* to its end; one that hangs is ended with all its ranks."""
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as process:
        try:
            _, error = process.communicate(timeout=240)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)  # torchrun ends its ranks, which have sessions of their own
            _, error = process.communicate(timeout=240)
        return process.returncode, error


FORKED = """
import hashlib

folder = Path(__file__).parent
is_first_shared = not torch.backends.cuda.is_built()  # else autograd has threads for devices, which no fork has
if is_first_shared:
    exec(first)
for number, program in enumerate(programs):
    for traced in (True, False):
        child = os.fork()
        if child:
            assert os.waitpid(child, 0)[1] == 0, program
            continue
        if not is_first_shared:
            exec(first)
        recorder = Recorder(folder / str(number), 1 << 20)
        if traced:
            live.tracer = Tracer(recorder)
        else:
            registry.uninstrument()
        here = {"__name__": "__main__"}
        exec(setup + program, here)
        if traced:
            live.tracer.steps.end()
            recorder.close()
        result = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in here["parameters"]())).hexdigest()
        (folder / f"{number}.{traced}").write_text(result)
        sys.stdout.flush()
        os._exit(0)
"""


def run_each(folder: Path, setup: str, programs: dict[str, str], first: str = "") -> dict[str, tuple[Recorded, bool]]:
    """Run every program in a process of its own, forked after torch was imported: quicker by seconds.

    Each also runs untraced.

    Args:
        folder: An empty folder.
        setup: What they share; it defines ``parameters()``.
        programs: Their texts.
        first: What is run before that: once for all, to be quicker still, where a fork can go on from there.

    Returns:
        For each program what it recorded, and whether its parameters end up the same, to the bit,
        as when it is not traced.
    """
    texts = [textwrap.dedent(program) for program in programs.values()]
    file = folder / "program.py"
    file.write_text(f"setup, programs, first = {(setup, texts, first)!r}\n{FORKED}")
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = warm(BEGIN + TRACED + INSTRUMENT + IMPORT).run(file, [env], 600)
    assert (done.codes, done.err) == ([0], ""), done.err[-6000:]
    results = {}
    for number, name in enumerate(programs):
        rings = list((folder / str(number)).glob("*.ring"))
        recorded = read_ring(rings[0]) if rings else Recorded([], [], [])
        same = (folder / f"{number}.True").read_text() == (folder / f"{number}.False").read_text()
        results[name] = (recorded, same)
    return results


def counts(spans: list[Span]) -> dict[str, int]:
    """Return how often each name comes in *spans*."""
    return dict(Counter(s.name for s in spans))
