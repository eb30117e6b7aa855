"""Where records become spans: the drain, the run directory, OTLP and Chrome; its own process, never the trainer's."""
