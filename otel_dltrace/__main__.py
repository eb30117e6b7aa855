"""``python -m otel_dltrace`` is the command ``otel-dltrace``."""

import sys

from otel_dltrace.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
