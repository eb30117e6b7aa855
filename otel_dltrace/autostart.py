"""What the ``.pth`` file loads in every Python process while ``OTEL_DLTRACE`` is set."""

import sys

from otel_dltrace.settings.program import program_name

# A command of ours says itself what is wrong with a variable; `sys.argv` is not there yet.
if program_name(sys.orig_argv) not in ("otel_dltrace", "otel-dltrace"):
    from otel_dltrace.configure.sources import autostart

    autostart()
