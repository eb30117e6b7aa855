"""A drain that stays for as long as a command runs, and has finished before it ends."""

import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from otel_dltrace.cli.progress import progress
from otel_dltrace.configure.drains import drain_for
from otel_dltrace.export.choice import exporters
from otel_dltrace.record.launch import DrainStarter
from otel_dltrace.record.ring import make_ring_folder
from otel_dltrace.settings.config import Config

DRAIN_ENDS_S = 60.0
"""How long the drain may take to finish once the program has ended."""


class HeldDrain:
    """A drain that was started, unless one ran; *roots* are, once it has ended, the run directories that it wrote."""

    def __init__(self, starter: DrainStarter) -> None:
        self.starter = starter
        self.roots: list[Path] = []


@contextmanager
def hold_drain(config: Config, env: Mapping[str, str]) -> Iterator[HeldDrain]:
    """Start the drain of *config*, and end it behind the block.

    Raises:
        ConfigError: A variable of OTLP cannot be used.
        RingError: The folder for rings cannot be.
    """
    drain_for(config, config.home)  # says at once what is wrong with an OTLP variable
    make_ring_folder(config.rings)
    held = HeldDrain(
        DrainStarter(
            config.home,
            config.rings,
            "auto",
            config.to_env(),
            lambda _ring: lambda _seconds: None,
            prints=bool(exporters(env)),
        )
    )
    drain = held.starter.start_process(piped=True)
    try:
        yield held
    finally:
        held.roots = _end_drain(drain)


def _end_drain(drain: "subprocess.Popen[bytes] | None") -> list[Path]:
    """Have the drain finish; return the run directories it wrote."""
    if drain is None:
        return []
    try:
        with progress("reading what is left"):
            # No signal: one that is still starting would die of it, and leave everything unread.
            out, _ = drain.communicate(b"!", timeout=DRAIN_ENDS_S)
    except subprocess.TimeoutExpired:
        Console(stderr=True).print("otel-dltrace: the drain is still busy; it goes on by itself")
        return []
    return [Path(line) for line in out.decode().splitlines()]
