"""What tracing costs, as ratios from interleaved runs; docs/benchmarks.md says what each means."""
