"""Where records become spans: the drain, the run directory, OTLP and Chrome; as a rule in a process of its own."""
