"""The names of our variables, by which ``opentelemetry-instrument`` takes each as an option: ``--dltrace_level``."""

from otel_dltrace.settings.config import VARIABLES

# Its parser looks for attributes whose names begin with OTEL_.
globals().update({name: name for name in ("OTEL_DLTRACE", *VARIABLES.values())})
