"""A program that knows nothing of us and makes spans with the OpenTelemetry API."""

from opentelemetry import trace

tracer = trace.get_tracer("anything")
with tracer.start_as_current_span("request"):
    for name in ("parse", "answer"):
        with tracer.start_as_current_span(name) as span:
            span.set_attribute("size", len(name))
