"""The first word to a server, and what gRPC's errors mean to a user."""

import time
from collections.abc import Callable

import grpc

from otel_dltrace.pushpull.errors import MismatchError, PeerLateError, PeerLostError, PushPullError
from otel_dltrace.pushpull.options import Options
from otel_dltrace.pushpull.transport import credential, method

_RETRY_S = 0.05
_NO_TRUST = ("SSL routines", "security handshaker", "Verification")
"""What gRPC says of a server that listens already, and whose certificate or ours is not right."""
_TOO_LARGE = "message larger than max"
"""What gRPC says of a message that is longer than its receiver's partitions."""
_MEANING: dict[grpc.StatusCode, tuple[type[PushPullError], str]] = {
    # The first three are the server's own sentences.
    grpc.StatusCode.ABORTED: (PeerLostError, "{details}"),
    grpc.StatusCode.NOT_FOUND: (PeerLateError, "{details}"),
    grpc.StatusCode.INVALID_ARGUMENT: (MismatchError, "{details}"),
    grpc.StatusCode.FAILED_PRECONDITION: (MismatchError, "{where} refuses us: {details}"),
    grpc.StatusCode.UNAUTHENTICATED: (
        PeerLostError,
        "{where} refuses us: {details}; is PUSHPULL_TOKEN the same everywhere?",
    ),
    grpc.StatusCode.CANCELLED: (PeerLostError, "{where} ended during the request"),
    grpc.StatusCode.UNAVAILABLE: (PeerLostError, "{where} is gone or cannot be reached ({details})"),
    grpc.StatusCode.DEADLINE_EXCEEDED: (PeerLostError, "{where} did not answer in time; set PUSHPULL_TIMEOUT higher?"),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (MismatchError, "{where} refuses us: {details}"),
}


def _never() -> bool:
    return False


def greet(channel: grpc.Channel, where: str, options: Options, given_up: Callable[[], bool] = _never) -> None:
    """Return when the server at the other end of *channel*, called *where*, has answered, or nobody waits any more.

    It may not be there yet.
    gRPC's own waiting takes a server that one of us does not trust for one that is not there yet, and says no more.

    Raises:
        PeerLostError: It did not answer within the timeout, or one of us does not trust the other.
    """
    hello, said = channel.unary_unary(method("Hello")), "nobody answers"
    end = time.monotonic() + options.timeout_s
    while not given_up():
        left = end - time.monotonic()
        if left <= 0 or any(words in said for words in _NO_TRUST):
            raise PeerLostError(
                f"{where} cannot be reached ({said}); is it running, and do PUSHPULL_TLS_* of both sides match?"
            )
        try:
            hello(b"", metadata=(credential(options),), timeout=left)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise error_of(error, where) from None
            said = error.details() or ""
        else:
            return
        time.sleep(_RETRY_S)


def error_of(error: BaseException, where: str) -> PushPullError:
    """Return what *error* of gRPC means to a user."""
    if not isinstance(error, grpc.Call):
        return PeerLostError(f"{where}: {error}")
    kind, sentence = _MEANING.get(error.code(), (PeerLostError, "{where}: {details}"))
    details = error.details() or ""
    if _TOO_LARGE in details:
        details += "; is BYTEPS_PARTITION_BYTES the same everywhere?"
    return kind(sentence.format(where=where, details=details))
