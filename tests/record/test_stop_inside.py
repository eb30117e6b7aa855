"""Tracing that is stopped within what it traces: nobody is told of a failure, and it is whole when it starts again."""

import pytest

OPERATION = """
    import otel_dltrace as d
    exchange = d.operation("exchange", size=8)
    for again in range(2):
        d.start()
        with d.step():
            with exchange:
                pass
        d.stop()
        with exchange:
            pass
"""
STAGE = """
    import io
    import torch
    import otel_dltrace as d

    class Stopping:
        def __reduce__(self):
            d.stop()
            return int, ()

    for what in (Stopping(), 1):
        d.start()
        with d.step():
            torch.save(what, io.BytesIO())
    d.stop()
"""


@pytest.mark.parametrize(
    ("program", "name", "times"), [pytest.param(OPERATION, "exchange", 2, id="operation"), (STAGE, "checkpoint", 1)]
)
def test_what_tracing_is_stopped_in_is_traced_the_next_time(place, program, name, times):
    """The first ones' ends had nowhere to go."""
    if program is STAGE:
        pytest.importorskip("torch")
    result = place.run(program, OTEL_DLTRACE="1")
    place.wait_for_rings()
    found = [batch.descriptor_of(i).name for batch in place.spans() for i in range(len(batch))]

    assert (result.returncode, "failed" in result.stderr, found.count(name)) == (0, False, times), result.stderr
