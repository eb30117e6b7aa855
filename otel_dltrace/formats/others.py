"""Files that are trace events too, and so taken for one of another tracer: what they are, and what reads them."""

import re

HEAD = 1 << 14
"""Bytes at a file's begin that tell."""
_CHROME = re.compile(rb'(?:\xef\xbb\xbf)?\s*\{\s*"displayTimeUnit"\s*:\s*"ns"\s*,\s*"(?:traceEvents|otherData)"\s*:')
_BYTEPS = re.compile(rb'"(?:Comm\.|(?:push|pull)-[0-9]{1,9}").*?"tid"\s*:', re.DOTALL)
_BYTESCHEDULER = re.compile(rb'"name":\s*"[A-Z]+(?:QUEUE|COMMUNICATION)",\s*"ph":\s*"[BE]"')
_HOROVOD = re.compile(rb'\s*\[\n\{"name": "process_name", "ph": "M", "pid": \d+, "args": \{')
_IS_CHROME = (
    "is a Chrome trace as `otel-dltrace export --to chrome` writes it, which is for viewers; "
    "give the run directory that it was made from to `otel-dltrace report` or `export`"
)
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_GZIP = b"\x1f\x8b"
_IS_PACKED = "is gzipped; give the output of `zcat`, as a file or through a pipe (/dev/stdin)"
_IS_UTF16 = "is UTF-16, but a timeline is UTF-8; give the output of `iconv -f UTF-16 -t UTF-8`"
_IS_BYTEPS = "is BytePS's, not a timeline of Horovod; read it with `otel-dltrace import byteps`"
_IS_HOROVOD = "is a timeline of Horovod, not BytePS's; read it with `otel-dltrace import horovod`"
_IS_BYTESCHEDULER = "is ByteScheduler's; read it with `otel-dltrace import bytescheduler`"


def instead_of_byteps(head: bytes) -> str:
    """Return what a file that begins with *head* is instead of one of BytePS, and what to do; "" if it may be one."""
    return _IS_HOROVOD if _HOROVOD.match(head) and not _BYTEPS.search(head) else _instead_of_both(head)


def instead_of_horovod(head: bytes) -> str:
    """Return what a file that begins with *head* is instead of a timeline, and what to do; "" if it may be one."""
    # Horovod's events have no "tid"; the names of its tensors may be any.
    return _IS_BYTEPS if _BYTEPS.search(head) else _instead_of_both(head)


def _instead_of_both(head: bytes) -> str:
    if head.startswith(_GZIP):
        return _IS_PACKED
    if head.startswith(_UTF16):
        return _IS_UTF16
    if _BYTESCHEDULER.search(head):
        return _IS_BYTESCHEDULER
    return _IS_CHROME if _CHROME.match(head) else ""
