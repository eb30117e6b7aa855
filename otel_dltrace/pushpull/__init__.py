"""A small parameter server for torch on the BytePS plan; it knows nothing of tracing, but has named trace points.

``import otel_dltrace.pushpull.torch as bps`` is what a training program uses.
"""
