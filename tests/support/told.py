"""Servers on loopback that answer OTLP requests as a test tells them to."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceResponse,
)


class Told:
    """What a server is told to answer, one entry a request, the last for ever; and when each request came."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.times = []
        self.bodies = []

    def next(self, body):
        """Note the request and return what to answer."""
        self.times.append(time.monotonic())
        self.bodies.append(body)
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


@contextmanager
def http_server(told):
    """Serve answers that are a status, headers and a body."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            status, headers, body = told.next(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(status)
            for name, value in {"content-length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def grpc_server(told):
    """Serve answers that are a response, or a code, a message and a RetryInfo in seconds (or None)."""

    def export(body, context):
        answer = told.next(body)
        if isinstance(answer, ExportTraceServiceResponse):
            return answer.SerializeToString()
        code, message, delay = answer
        if delay is not None:
            info = AnyMessage()
            whole = int(delay)
            info.Pack(RetryInfo(retry_delay=Duration(seconds=whole, nanos=int((delay - whole) * 1e9))))
            details = Status(code=code.value[0], message=message, details=[info]).SerializeToString()
            context.set_trailing_metadata([("grpc-status-details-bin", details)])
        return context.abort(code, message)

    handler = grpc.method_handlers_generic_handler(
        "opentelemetry.proto.collector.trace.v1.TraceService", {"Export": grpc.unary_unary_rpc_method_handler(export)}
    )
    server = grpc.server(ThreadPoolExecutor(2), handlers=[handler])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def response(rejected, message):
    """Return the answer that leaves out *rejected* spans."""
    return ExportTraceServiceResponse(
        partial_success=ExportTracePartialSuccess(rejected_spans=rejected, error_message=message)
    )
