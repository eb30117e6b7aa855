"""What the ``.pth`` file loads in every Python process while ``OTEL_DLTRACE`` is set."""

from otel_dltrace.configure import autostart

autostart()
