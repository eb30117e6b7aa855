"""What runs inside the training process imports the standard library and nothing else."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import otel_dltrace
from tests.support.ring_files import environment

PACKAGE = Path(otel_dltrace.__path__[0])
IMPORTED = [
    *(f"otel_dltrace.model.{name}" for name in ("semconv", "operation", "topology", "identity", "errors", "time")),
    *(
        f"otel_dltrace.{room}.{path.stem}"
        for room in ("record", "instrument")
        for path in sorted((PACKAGE / room).glob("*.py"))
        if path.stem != "__init__"
    ),
]
BLOCKED = "numpy pyarrow torch opentelemetry google grpc requests psutil rich".split()
PROGRAM = """
import importlib, json, sys
from pathlib import Path
for name in json.loads(sys.argv[1]):
    sys.modules[name] = None
loaded = []
for name in json.loads(sys.argv[2]):
    importlib.import_module(name)
from otel_dltrace.record.recorder import Recorder
from otel_dltrace.record.blocks import operation, phase, step
from otel_dltrace.record.tracer import Tracer, live
recorder = Recorder(Path(sys.argv[3]), 1 << 20)
live.tracer = Tracer(recorder)
with step(), operation("all_reduce", size=4), phase("rollout"), phase("to_device"):
    pass
blocked = [name for name, module in sys.modules.items() if module and name.split(".")[0] in json.loads(sys.argv[1])]
print(recorder.number(), blocked)
"""


def test_recording_needs_the_standard_library_alone(tmp_path: Path) -> None:
    """Every module of record and instrument, and a few spans, with all else out of reach."""
    arguments = (json.dumps(BLOCKED), json.dumps(IMPORTED), str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], env=environment(), capture_output=True, text=True, check=False
    )

    assert (done.stdout, done.stderr) == ("5 []\n", "")


@pytest.mark.parametrize("module", ["otel_dltrace", "otel_dltrace.autostart"])
def test_importing_us_loads_no_framework_and_no_sdk(module: str) -> None:
    """Both are imported by the function that needs them, or by the program that has them."""
    program = f"import {module}, sys; print([name for name in {BLOCKED} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(), capture_output=True, text=True, check=True
    )

    assert (done.stdout, done.stderr) == ("[]\n", "")
