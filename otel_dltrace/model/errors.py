"""The errors a user can cause; each message says what, which value, and what to do."""


class DltraceError(Exception):
    """Base of every error that otel_dltrace raises on purpose."""


class ConfigError(DltraceError, ValueError):
    """A setting that cannot be used."""


class TraceFormatError(DltraceError, ValueError):
    """A file that is not what its name or place promises."""


class RunNotFoundError(DltraceError):
    """A run directory, rank or step that is not there."""


class RingError(DltraceError):
    """A ring that cannot be made or read."""
