"""``python -m otel_dltrace`` is the command ``otel-dltrace``."""

import sys

if __name__ == "__main__":
    is_safe = getattr(sys.flags, "safe_path", sys.flags.isolated)
    if not is_safe and __file__ != f"{sys.path[0]}/otel_dltrace/__main__.py":
        del sys.path[0]  # the working directory, where a program's own `queue.py` would be taken for Python's
    from otel_dltrace.cli.main import main

    sys.exit(main())
