"""What tracing costs, as ratios from interleaved runs: ``python -m benchmarks`` (docs/benchmarks.md says what each means)."""
