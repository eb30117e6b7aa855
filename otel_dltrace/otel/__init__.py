"""What OpenTelemetry finds of us by its entry points; loaded by its SDK alone."""
