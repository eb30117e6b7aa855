"""Finish what a killed run left: read rings whose writer and drain are gone, send what waits on disk.

Spans go to the run directory that their run would have written, and over OTLP to where this command's own environment
says (OTEL_EXPORTER_OTLP_ENDPOINT): without it, nothing is sent. Open spans are closed as truncated.
"""

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from otel_dltrace.cli.printing import show, tell
from otel_dltrace.cli.progress import progress
from otel_dltrace.configure.drains import drain_for
from otel_dltrace.configure.outcome import short_path
from otel_dltrace.export.choice import names_otlp
from otel_dltrace.export.drain import Drain
from otel_dltrace.export.metrics.settings import MetricSettings
from otel_dltrace.export.otlp.settings import OtlpSettings
from otel_dltrace.export.rundir.delivered import add_delivered
from otel_dltrace.export.rundir.drain_json import end_if_read, left_elsewhere
from otel_dltrace.export.rundir.host_folder import lock_folder
from otel_dltrace.export.rundir.reader import host_folders
from otel_dltrace.model.errors import RunNotFoundError
from otel_dltrace.record.process_id import boot_id
from otel_dltrace.settings.config import Config


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "runs",
        nargs="*",
        type=Path,
        metavar="RUN",
        help="run directories whose waiting requests are sent as well; by default all of OTEL_DLTRACE_DIR",
    )


def run(args: argparse.Namespace) -> int:
    """Recover every orphan ring of this user, then send what waits in the runs recovered and in *args.runs*, or any."""
    for given in args.runs:
        host_folders(given)
    MetricSettings.from_env(os.environ)  # a bad value is told before anything is done
    config = Config.from_env()
    config.check_writable()
    with progress("reading rings"):
        drains = _drain_orphans(config)
    recovered = dict.fromkeys(root for drain in drains for root in drain.runs.writers)
    for root in recovered:
        totals = [drain.runs.totals.get(root, {}) for drain in drains]
        spans, still_open = (sum(total.get(name, 0) for total in totals) for name in ("spans", "truncated"))
        show(f"{short_path(root)}: {spans} spans recovered, {still_open} of them open")
    if not recovered and not any(map(_is_left, drains)):
        show(f"no ring in {config.rings} has lost both its writer and its drain")
    elif recovered and drains[0].outlet is None:
        show(f"nothing was sent: {_why_not()}; `otel-dltrace export RUN --to otlp` writes the spans for a collector")
    for root in args.runs:
        _end(root)
    roots = dict.fromkeys([*(root.absolute() for root in args.runs), *recovered])
    spills = [spill for root in roots for spill in _waiting_in(root)]
    if not args.runs:
        spills += _waiting_anywhere(Path(config.directory))
    is_all_ours = [_send_waiting(spill) for spill in dict.fromkeys(spills)]
    return 0 if all(is_all_ours) else 2


def _drain_orphans(config: Config) -> list[Drain]:
    """Read orphan rings; return the drains: where several of this host had each a folder in a run, one for each."""
    drains: list[Drain] = []
    while not drains or drains[-1].postponed:
        drain = drain_for(config, None, orphans_only=True)
        drain.linger = 0.0
        if drains:  # what an earlier one read and had to leave, as on a full disk, would come first again
            drain.rings.among = drains[-1].postponed
        drain.run()
        drains.append(drain)
    return drains


def _is_left(drain: Drain) -> bool:
    """Return whether *drain* has left a ring of this user unread; it has said why."""
    for path in drain.rings.unread:
        with suppress(FileNotFoundError):  # somebody has removed it since
            if path.lstat().st_uid == os.geteuid():
                return True
    return False


def _why_not() -> str:
    """Return why OTLP goes nowhere."""
    if names_otlp(os.environ):
        return "OTEL_EXPORTER_OTLP_ENDPOINT is not set"
    return f"OTEL_TRACES_EXPORTER={os.environ['OTEL_TRACES_EXPORTER']} leaves otlp out"


def _end(root: Path) -> None:
    """Write down that drains of *root* have ended that were killed when all was read: no ring is left to say it.

    Of one on another host that had not read all, what is left is there or, where that was started anew, nowhere.
    """
    for folder in host_folders(root):
        lock = lock_folder(folder) if _is_ours(folder) else None
        if lock is None:
            continue
        if end_if_read(folder):
            show(f"{short_path(folder)}: its drain is gone and had read everything, so nothing more will come")
        host, left = left_elsewhere(folder, boot_id().hex())
        if left:
            what = f"the rings of {left} process{'es' * (left > 1)} were not read to their end"
            cure = f"`otel-dltrace recover` on {host} reads them, unless that host has been restarted since"
            show(f"{short_path(folder)}: its drain is gone, and {what}: {cure}")
        os.close(lock)


def _waiting_in(root: Path) -> list[Path]:
    """Return where requests wait that an absent collector left on disk in the run *root*.

    Of one that could not be made, or written, the drain has said why.
    """
    with suppress(RunNotFoundError):
        return [folder / "spill" for folder in host_folders(root) if any((folder / "spill").glob("*.otlp"))]
    return []


def _waiting_anywhere(directory: Path) -> list[Path]:
    """Return the same of all runs in *directory*, where they are ours to send: others' are for them."""
    spills = {path.parent for path in directory.absolute().glob("dltrace-*/hosts/*/spill/*.otlp")}
    return sorted(spill for spill in spills if _is_ours(spill))


def _is_ours(folder: Path) -> bool:
    return os.access(folder, os.W_OK | os.X_OK, effective_ids=True)


def _send_waiting(spill: Path) -> bool:
    """Send the requests that wait in *spill*; return whether they are this user's."""
    if not spill.is_dir():
        return True  # it was removed while others were sent
    settings, where = OtlpSettings.from_env(os.environ), short_path(spill)
    if settings is None:
        show(f"requests wait in {where} and are not sent: {_why_not()}")
        return True
    try:
        with _taken(spill) as is_free:
            if is_free:
                _send(settings, spill)
            else:
                show(f"{where}: the drain that writes there is running, and sends what waits itself")
    except PermissionError:
        tell(f"{where} is not writable for you; whoever wrote the run can send what waits there")
        return False
    return True


def _send(settings: OtlpSettings, folder: Path) -> None:
    # Here, since most often nothing waits.
    from otel_dltrace.export.otlp.resend import resend
    from otel_dltrace.export.otlp.transport import connect
    from otel_dltrace.export.outgoing.outlet import as_told

    with progress(f"sending {short_path(folder)}") as count:
        delivery = resend(connect(settings), folder, progress=lambda figures: count(figures.accepted))
    told = as_told(settings, delivery)
    add_delivered(folder.parent, told)
    trouble = f" ({told['diagnosis']})" if delivery.spilled else ""
    show(f"{short_path(folder)}: {delivery.accepted} spans sent, {delivery.spilled} still waiting{trouble}")


@contextmanager
def _taken(spill: Path) -> Iterator[bool]:
    """Have what waits in *spill* for ourselves within the block, unless a drain has it; yield whether it is ours.

    Raises:
        PermissionError: It is another user's: the drain may be at work, and what we cannot remove is sent each time.
    """
    if not _is_ours(spill):
        raise PermissionError(spill)
    lock = lock_folder(spill.parent)
    yield lock is not None
    if lock is not None:
        os.close(lock)
