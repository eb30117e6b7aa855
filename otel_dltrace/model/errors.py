"""The errors a user can cause; each message says what, which value, and what to do."""


class DltraceError(Exception):
    """Base of every error that otel_dltrace raises on purpose."""


class ConfigError(DltraceError, ValueError):
    """A setting that cannot be used."""


class FieldError(ConfigError):
    """The field *name* of the configuration has a *value* that cannot be used; *why* goes on with the sentence."""

    def __init__(self, name: str, value: object, why: str) -> None:
        super().__init__(name, value, why)
        self.name, self.value, self.why = name, value, why

    def __str__(self) -> str:
        """Return the sentence."""
        return f"{self.name}={self.value!r}{self.why}"


class TraceFormatError(DltraceError, ValueError):
    """A file that is not what its name or place promises."""


class RunNotFoundError(DltraceError):
    """A run directory, rank or step that is not there."""


class RingError(DltraceError):
    """A ring that cannot be made or read."""
