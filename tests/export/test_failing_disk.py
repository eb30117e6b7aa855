"""A disk, or a server of files, that fails now and then: the drain tries again, and no work of its is lost."""

import errno
import os
from collections.abc import Callable, Iterator
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from otel_dltrace.cli import drain as command
from otel_dltrace.cli.main import main
from otel_dltrace.export import drain as drains
from otel_dltrace.export.drain import Drain
from otel_dltrace.export.files import read_object
from otel_dltrace.export.rings import folder as ring_folder
from otel_dltrace.export.rings.folder import RingFolder
from otel_dltrace.export.rings.source import RingSource
from otel_dltrace.export.rundir.writer import RunWriter
from otel_dltrace.export.serving import Serving

RECORDS = """
    import otel_dltrace as d
    d.start()
    for _ in range(3):
        with d.step():
            pass
"""


def failing(function: Callable[..., Any], errors: Iterator[int]) -> Callable[..., Any]:
    """Return *function*, but that its first calls fail with *errors*."""

    def fails_at_first(*args: Any, **kwargs: Any) -> Any:
        if number := next(errors, 0):
            raise OSError(number, os.strerror(number))
        return function(*args, **kwargs)

    return fails_at_first


def steps_in(place) -> list[int]:
    return sorted(np.concatenate([batch["step"] for batch in place.spans()]).tolist())


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        pytest.param(RunWriter, "append", id="as spans are written"),
        pytest.param(RunWriter, "know", id="as the run directory is made"),
        pytest.param(drains, "Unbound", id="as the ring is taken up"),
        pytest.param(ring_folder, "take_for_reading", id="as it is had for oneself"),
        pytest.param(RingSource, "_mapped", id="as it is opened"),
    ],
)
def test_what_fails_for_a_moment_is_tried_again_also_when_the_program_has_ended(place, monkeypatch, owner, name):
    """Nobody has to recover what a single error, of a disk that is well again, has held up."""
    place.run(RECORDS, OTEL_DLTRACE_DRAIN="off")
    errors = iter([errno.EIO, errno.ESTALE])
    monkeypatch.setattr(owner, name, failing(getattr(owner, name), errors))
    Drain(Serving(place.rings, place.folder, linger=2.0)).run()

    assert next(errors, 0) == 0
    assert (steps_in(place), list(place.rings.iterdir())) == ([0, 1, 2], [])


@pytest.mark.parametrize(
    ("owner", "name", "succeeds"),
    [
        pytest.param(RunWriter, "append", 0, id="the run directory"),
        pytest.param(RingSource, "read_names", 1, id="the ring, once it is opened"),
    ],
)
def test_what_fails_for_longer_is_given_up_in_one_sentence(place, monkeypatch, capfd, owner, name, succeeds):
    """The ring stays for `recover`, and the drain ends."""
    place.run(RECORDS, OTEL_DLTRACE_DRAIN="off")
    (ring,) = place.rings.glob("*.ring")
    errors = chain([0] * succeeds, repeat(errno.EIO, 1000))
    monkeypatch.setattr(owner, name, failing(getattr(owner, name), errors))
    Drain(Serving(place.rings, place.folder, linger=0.0)).run()

    assert ring.exists()
    assert capfd.readouterr().err == (
        f"otel_dltrace: {ring} cannot be emptied into its run directory ([Errno 5] Input/output error) and stays where "
        "it is; `otel-dltrace recover` tries it again\n"
    )


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        pytest.param(RingFolder, "remove_unborn", id="what was never born"),
        pytest.param(RingFolder, "remove_old_logs", id="what was left long ago"),
        pytest.param(command, "_remove", id="its own bell"),
    ],
)
def test_a_drain_that_cannot_tidy_up_has_done_its_work(place, monkeypatch, capfd, owner, name):
    """Its runs are complete, and say so."""
    place.run(RECORDS, OTEL_DLTRACE_DRAIN="off")
    for variable, value in place.env(OTEL_DLTRACE="0").items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(os, "nice", lambda _: None)
    if owner is command:
        monkeypatch.setattr(Path, "unlink", unlink_but(Path.unlink, {".bell", ".lock"}))
    else:
        monkeypatch.setattr(owner, name, failing(getattr(owner, name), iter([errno.EBUSY])))
    code = main(["drain", "--linger", "0"])
    (told,) = (read_object(run / "drain.json") for root in place.runs() for run in root.glob("hosts/*"))

    assert (code, told["ended"], told["summary"]["spans"], capfd.readouterr().err) == (0, True, 3, "")


def unlink_but(unlink: Callable[..., None], kinds: set[str]) -> Callable[..., None]:
    """Return *unlink*, to which files of these *kinds* are busy."""

    def refuse(path: Path, *args: Any, **kwargs: Any) -> None:
        if path.suffix in kinds and path.exists():
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))
        unlink(path, *args, **kwargs)

    return refuse
