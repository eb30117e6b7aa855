"""What a signal's handler of the program raises reaches the program, in the middle of what we do, too."""

import json

RAISING = """
    import gc, json, signal
    from functools import partial
    import otel_dltrace as d

    gc.disable()  # what is raised in what looks on while Python collects, Python prints and drops
    times, raised, caught = 200, 0, 0

    class Preempted(Exception):
        pass

    def handle(number, *_, frame=None):
        global raised
        raised += 1
        raise Preempted("by a signal")

    class Handler:
        def handle(self, number, frame):
            handle(number)

        def __call__(self, number, frame):
            handle(number)

    def preempt(handler, work):
        # Each time a signal comes somewhere in it; where its error is lost, another comes.
        global raised, caught
        raised = caught = 0
        signal.signal(signal.SIGALRM, handler)
        for n in range(times):
            try:
                signal.setitimer(signal.ITIMER_REAL, 2e-5 + n % 97 * 2e-6, 0.5)
                while True:
                    work()
            except Preempted:
                caught += 1
        signal.setitimer(signal.ITIMER_REAL, 0)
        return raised, caught
"""
BLOCKS = """
    def work():
        with d.phase("prepare"), d.operation("fetch"):
            pass

    with d.step():
        work()
    d.flush(60)
    handlers = handle, Handler().handle, partial(partial(handle), frame=None), Handler()
    print(json.dumps([preempt(handler, work) for handler in handlers]))
"""
LOOP = """
    import torch

    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = torch.utils.data.DataLoader([torch.ones(2)] * 4, batch_size=2)

    def work():
        for batch in loader:
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()

    work()
    d.flush(60)
    print(json.dumps(preempt(handle, work)))
"""


def test_in_blocks(place):
    """Whatever the handler is: a function, a method, one with an argument of its own, an object."""
    done = place.run(RAISING + BLOCKS, OTEL_DLTRACE="1")

    assert (done.returncode, json.loads(done.stdout)) == (0, [[200, 200]] * 4), done.stderr
    assert "Preempted" not in done.stderr


def test_in_a_training_loop(place):
    """In the sites around what torch does."""
    done = place.run(RAISING + LOOP, OTEL_DLTRACE="1")

    assert (done.returncode, json.loads(done.stdout)) == (0, [200, 200]), done.stderr
    assert "Preempted" not in done.stderr
