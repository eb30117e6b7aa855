"""OTLP: batches to protobuf by columns, to JSON by rows, and the thread that delivers requests."""
