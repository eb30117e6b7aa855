"""What the README tells a stranger to type works as it is written there."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import PROGRAMS, ROOT
from tests.support.processes import a_place

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
ELSEWHERE = ("make demo", "make test", "pip install .")
"""Lines that CI itself runs: this suite is one of them."""


def test_the_two_commands_are_there_in_a_source_distribution(tmp_path):
    """Whoever has it from a package index, and no checkout, has what make needs."""
    pytest.importorskip("hatchling")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (packed,) = tmp_path.glob("*.tar.gz")
    subprocess.run(["tar", "-xf", packed, "-C", tmp_path], check=True)
    make = ["make", "--dry-run", "-C", str(packed).removesuffix(".tar.gz"), "demo", "test"]

    done = subprocess.run(make, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture
def place(tmp_path):
    """Give a folder with a training program, and our commands on the PATH."""
    with a_place(tmp_path) as it:
        example = (ROOT / "examples" / "train_ddp.py").read_text()
        small = re.sub(r'("--(?:width|depth)", type=int, default=)\d+', r"\g<1>2", example)
        assert small.count("default=2)") == 2
        (tmp_path / "train.py").write_text(small)
        shutil.copy(PROGRAMS / "sdk_spans.py", tmp_path / "anything_with_sdk_spans.py")
        shutil.copy(PROGRAMS / "solver.py", tmp_path)
        yield it


def shell_lines() -> list[str]:
    """Return the commands of all blocks, in order, without their comments."""
    lines = [re.sub(r" +#.*", "", line) for kind, block in BLOCKS if not kind for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith(ELSEWHERE)]


@pytest.mark.timeout(900)
def test_the_commands_run(place):
    """In one shell, one after the other; RUN is the run directory that the first of them made, of two ranks."""
    script = "\n".join(["set -e", *shell_lines()])
    script = re.sub(r"\bRUN\b", '"$(ls -dt dltrace-train-* | tail -1)"', script).replace("--rank 3", "--rank 1")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {f"{prefix}_ALLOW_RUN_AS_ROOT{what}": "1" for prefix in ("OMPI", "PRTE") for what in ("", "_CONFIRM")}
    env |= {"PATH": path, "OMP_NUM_THREADS": "1"}
    done = place.finish(place.popen(["bash", "-c", script], **env), timeout=840)

    assert done.returncode == 0, done.stderr
    assert (place.folder / "trace.json.gz").stat().st_size > 1000
    assert "prepare_batch" in done.stdout


@pytest.mark.parametrize("code", [block for kind, block in BLOCKS if kind == "python"])
def test_the_snippets_run(place, code):
    """With something in place of what a reader brings along."""
    brought = "import torch\nstream, play, exchange = range(2), lambda batch: torch.zeros(3), print\n"
    (place.folder / "snippet.py").write_text(brought + code)
    subprocess.run([sys.executable, "snippet.py"], cwd=place.folder, env=place.env(OTEL_DLTRACE="1"), check=True)
    place.wait_for_rings()

    names = {batch.descriptors[number].name for batch in place.spans() for number in batch["descriptor"]}
    assert {"rank.step", "rollout", "push_pull"} <= names
