"""What a user of push_pull can run into; each message says what, where, and what to do."""

from otel_dltrace.model.errors import DltraceError

_LONGEST = 100


def shown(name: str) -> str:
    """Return *name* as a sentence quotes it, a long one without its middle: gRPC has a few thousand bytes for one."""
    return repr(name if len(name) <= _LONGEST else f"{name[: _LONGEST // 2]}...{name[-_LONGEST // 2 :]}")


class PushPullError(DltraceError, RuntimeError):
    """Base of the errors of this room."""


class PeerLostError(PushPullError):
    """Another process of the job died, left, or cannot be reached."""


class PeerLateError(PeerLostError):
    """Another process of the job was waited for in vain; it may be waiting itself."""


class MismatchError(PushPullError, ValueError):
    """Processes of one job that disagree about a tensor or about the job itself."""
