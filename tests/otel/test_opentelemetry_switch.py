"""OpenTelemetry's own switch and entry points: found by its SDK's own loading, and the same as ours."""

import importlib.util
import json
import logging
import subprocess
import sys
from collections import Counter
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

import otel_dltrace
from otel_dltrace.instrument.registry import COMMON, TABLES
from otel_dltrace.model import semconv as s
from otel_dltrace.model.attributes import resource_attributes
from otel_dltrace.record.carrier import Remote, read_traceparent
from otel_dltrace.record.launch import drain_environment
from otel_dltrace.settings.config import VARIABLES
from otel_dltrace.settings.switch import INSTRUMENTOR_PREFIX
from tests.support import servers
from tests.support.processes import Place, a_place, attributes_of, but_for_rings

pytest.importorskip("opentelemetry.instrumentation")
pytest.importorskip("opentelemetry.distro")

INSTRUMENT = str(Path(sys.executable).with_name("opentelemetry-instrument"))
NO_EXPORTERS = {f"OTEL_{signal}_EXPORTER": "none" for signal in ("TRACES", "METRICS", "LOGS")}
OF_ONE_RUN = (s.DL_STAGE_TOTAL, s.DL_QUEUE_WAIT, s.DL_COMM_COLLECTIVE_ID)


def instrumented(place: Place, program: str, *options: str, **env: str) -> "subprocess.CompletedProcess[str]":
    """Run *program* under ``opentelemetry-instrument``."""
    command = [INSTRUMENT, *options, sys.executable, str(place.write(program))]
    return place.finish(place.popen(command, **{**NO_EXPORTERS, "OTEL_DLTRACE_DRAIN": "off", **env}))


# -- the switch -------------------------------------------------------------------------------------

TRAIN = """
    import torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, TensorDataset

    dist.init_process_group("gloo")
    torch.manual_seed(7)
    ddp = DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(3)]))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for (x,) in DataLoader(TensorDataset(torch.randn(12, 16)), batch_size=4):
        optimizer.zero_grad()
        loss = ddp(x).square().mean()
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss.detach().clone())
    dist.barrier()
    dist.destroy_process_group()
"""


def trained(folder: Path, *launcher: str, **env: str) -> Counter[Any]:
    """Run the training on two ranks; return how often each span came, without times and ids."""
    folder.mkdir()
    with a_place(folder) as place:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command = [*launcher, *torchrun, str(place.write(TRAIN))]
        done = place.finish(place.popen(command, OMP_NUM_THREADS="1", **env))
        assert done.returncode == 0, done.stderr
        place.wait_for_rings()
        assert len(place.runs()) == 1, "each rank thinks it is a job of its own"
        spans: Counter[Any] = Counter()
        for batch in place.spans():
            for row, attributes in enumerate(attributes_of(batch)):
                kept = sorted((k, v) for k, v in attributes.items() if k not in OF_ONE_RUN)
                spans[batch.rank, batch.descriptor_of(row).name, tuple(kept)] += 1
        return spans


def names(spans: Counter[Any]) -> set[str]:
    """Return the names of *spans*."""
    return {name for _, name, _ in spans}


def test_every_switch_gives_the_same_spans(tmp_path: Path) -> None:
    """OTEL_DLTRACE=1, opentelemetry-instrument as it comes, and both at once: each span once, on each rank."""
    pytest.importorskip("torch")
    ours = trained(tmp_path / "ours", OTEL_DLTRACE="1")
    theirs = trained(tmp_path / "theirs", INSTRUMENT)
    both = trained(tmp_path / "both", INSTRUMENT, OTEL_DLTRACE="1")

    assert {s.RANK_STEP, "forward", "backward", "optimizer", "all_reduce", "barrier"} <= names(ours)
    assert theirs == ours
    assert both == ours


def test_a_source_is_disabled_by_the_name_of_its_instrumentor(tmp_path: Path) -> None:
    """The others go on and know the ranks as before, under both switches at once."""
    pytest.importorskip("torch")
    disabled = {"OTEL_PYTHON_DISABLED_INSTRUMENTATIONS": "urllib3, dltrace_torch_distributed,dltrace_torch_ddp"}
    spans = trained(tmp_path / "run", INSTRUMENT, OTEL_DLTRACE="1", **disabled)

    assert names(spans) == {s.RANK_STEP, "dataloader_next", "prepare_batch", "forward", "backward", "optimizer"}


OWN = """
    import os, sys, otel_dltrace
    with otel_dltrace.step():
        pass
    from otel_dltrace.record.tracer import live
    print(live.tracer is not None)
"""


@pytest.mark.parametrize(
    ("env", "on"),
    [
        pytest.param({}, True, id="as it comes"),
        pytest.param({"OTEL_DLTRACE": "0"}, False, id="forbidden by our switch"),
        pytest.param({"OTEL_SDK_DISABLED": "true"}, False, id="forbidden by theirs"),
        pytest.param(
            {"OTEL_SDK_DISABLED": "true", "OTEL_DLTRACE": "1"}, False, id="forbidden by one, asked by the other"
        ),
        pytest.param({"OTEL_PYTHON_DISABLED_INSTRUMENTATIONS": "*"}, False, id="every instrumentor disabled"),
    ],
)
def test_their_switch_can_be_overruled(place: Place, env: dict[str, str], on: bool) -> None:
    """A program that is only instrumented records its own steps; what forbids tracing wins."""
    done = instrumented(place, OWN, **env)

    assert (done.stdout, but_for_rings(done.stderr)) == (f"{on}\n", "")
    assert bool(list(place.rings.glob("*.ring"))) == on


def test_without_an_endpoint_nothing_is_sent(place: Place) -> None:
    """The distro's own defaults name an exporter and a protocol, and nobody to send to."""
    done = instrumented(
        place, OWN, OTEL_TRACES_EXPORTER="otlp", OTEL_EXPORTER_OTLP_PROTOCOL="grpc", OTEL_DLTRACE_DRAIN="auto"
    )
    assert done.returncode == 0, done.stderr
    place.wait_for_rings()
    (drain,) = place.runs()[0].glob("hosts/*/drain.json")

    assert not json.loads(drain.read_text())["summary"].get("sent")


def test_a_bad_value_is_one_sentence_whoever_asks(place: Place) -> None:
    """Both switches and every instrumentor stumble over it, the program does not."""
    done = instrumented(place, OWN, OTEL_DLTRACE="1", OTEL_DLTRACE_LEVEL="everything")

    assert done.stdout == "False\n"
    first, second = done.stderr.splitlines()  # of the command, and of the program it becomes
    assert first == second
    assert first.startswith("otel_dltrace: OTEL_DLTRACE_LEVEL='everything' is not a level")


def test_every_source_has_an_instrumentor() -> None:
    """One row in the registry, one entry point of that name."""
    found = {
        point.name: point.load().source
        for point in entry_points(group="opentelemetry_instrumentor")
        if point.value.startswith("otel_dltrace.")
    }

    assert found == {INSTRUMENTOR_PREFIX + source: source for source in TABLES if source != COMMON}


CONTRACT = """
    import logging, sys
    logging.basicConfig(stream=sys.stdout, format="%(message)s")
    import torch.distributed, torch.autograd, torch.nn.parallel
    from otel_dltrace.otel.instrumentors import TorchDdpInstrumentor, TorchTrainingInstrumentor
    from otel_dltrace.record.tracer import live

    def functions():
        reducer = torch.distributed.Reducer
        return torch.autograd.backward, reducer.prepare_for_backward, torch.distributed.init_process_group

    def wrapped():
        return [now is not before for now, before in zip(functions(), originals)]

    originals = functions()
    ddp, training = TorchDdpInstrumentor(), TorchTrainingInstrumentor()
    assert ddp is TorchDdpInstrumentor() is not training
    training.instrument()
    ddp.instrument()
    ddp.instrument()
    print(wrapped(), ddp.is_instrumented_by_opentelemetry, live.tracer is not None)
    training.uninstrument()
    print(wrapped(), torch.autograd.backward.__wrapped__ is originals[0])
    ddp.uninstrument()
    ddp.uninstrument()
    print(wrapped())
"""


def test_an_instrumentor_does_what_all_of_them_do(place: Place) -> None:
    """Twice warns as theirs does; taking one away leaves the other, also around a function both have wrapped."""
    pytest.importorskip("torch")
    done = place.run(CONTRACT, OTEL_DLTRACE_DRAIN="off")

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "Attempting to instrument while already instrumented",
        "[True, True, True] True True",
        "[True, True, True] True",
        "Attempting to uninstrument while already uninstrumented",
        "[False, False, False]",
    ]


def test_what_is_asked_for_by_name_and_absent_is_one_sentence(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing begins, and nothing is raised into the program."""
    from otel_dltrace.otel.instrumentors import SourceInstrumentor
    from otel_dltrace.record.tracer import live

    class Absent(SourceInstrumentor):
        source = "torch_ddp"
        needs = ("no-such-framework >= 2",)

    with caplog.at_level(logging.DEBUG):
        Absent().instrument()

    assert caplog.messages == [
        'Absent only instruments "no-such-framework >= 2", but no installed version was found, '
        "so nothing can be instrumented."
    ]
    assert live.tracer is None


def configured(place: Place, sources: str, program: str, **env: str) -> "subprocess.CompletedProcess[str]":
    """Run *program* under a configuration file that says *sources* of ours."""
    pytest.importorskip("opentelemetry.configuration")
    text = f'file_format: "1.0"\ninstrumentation/development:\n  python: {sources}\n'
    return instrumented(place, program, OTEL_CONFIG_FILE=str(place.write(text, "otel.yaml")), **env)


def ours(stderr: str) -> list[str]:
    """Return what we have said: OpenTelemetry says that it ignores arguments of its own, and whom it asked twice."""
    return [line for line in stderr.splitlines() if line.startswith("otel_dltrace: ")]


@pytest.mark.parametrize(
    "sources",
    [
        pytest.param("{dltrace_torch_training: {level: step}}", id="one"),
        pytest.param("{dltrace_process: {}, dltrace_torch_training: {level: step}}", id="the second one"),
        pytest.param("{dltrace_process: {level: step}, dltrace_torch_training: {}}", id="the first one"),
        pytest.param("{dltrace_process: {quota: 7}, dltrace_torch_training: {level: step}}", id="each its own"),
    ],
)
def test_a_configuration_file_says_what_a_source_records(place: Place, sources: str) -> None:
    """Its options are the fields of our configuration; what it leaves open the variables say."""
    pytest.importorskip("torch")
    program = """
        from otel_dltrace.settings.config import Config
        from otel_dltrace.record.tracer import live
        print(Config.from_env(live.tracer.starter._env) == Config.from_env(level="step", **QUOTA))
    """.replace("QUOTA", str({"quota": 7} if "quota" in sources else {}))
    said = {"RUN": "r", "JOB": "j", "SPAN_BUDGET": "77", "STEPS": "3-4", "DIR": str(place.folder / "x")}
    done = configured(place, sources, program, **{f"OTEL_DLTRACE_{name}": text for name, text in said.items()})

    assert (done.returncode, done.stdout, ours(done.stderr)) == (0, "True\n", []), done.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        pytest.param("ring_size: 8M", "ring_size='8M' is of type str; it must be a whole number", id="text"),
        pytest.param("metrics: 1", "metrics=1 is of type int; it must be True or False", id="number for a flag"),
        pytest.param("steps: 10", "steps=10 is of type int; it must be a text", id="number for a text"),
        pytest.param("level: bogus", "level='bogus' is not a level", id="level"),
        pytest.param("levl: step", "'levl' is not a field of the configuration", id="misspelt"),
    ],
)
def test_what_a_configuration_file_says_wrong_is_one_sentence(place: Place, options: str, said: str) -> None:
    """Tracing is off, also of the sources of which it says nothing."""
    pytest.importorskip("torch")
    sources = f"{{dltrace_process: {{}}, dltrace_torch_training: {{{options}}}, dltrace_pushpull: {{}}}}"
    done = configured(place, sources, OWN)

    assert done.stdout == "False\n"
    assert "Traceback" not in done.stderr
    (sentence,) = ours(done.stderr)
    assert sentence.startswith(f"otel_dltrace: {said}")
    assert sentence.endswith("; tracing is off")


@pytest.mark.parametrize("before", ["pass", "step()"], ids=["nothing recorded", "a step recorded"])
@pytest.mark.parametrize("wrong", ["level='bogus'", "levl='step'"])
def test_a_wrong_option_of_a_later_source_is_off_for_all(place: Place, before: str, wrong: str) -> None:
    """What they are told is one configuration, whenever it is told."""
    program = f"""
        from otel_dltrace import step as block
        from otel_dltrace.otel.instrumentors import OpenTelemetryInstrumentor, ProcessInstrumentor, PushpullInstrumentor
        from otel_dltrace.record.tracer import live

        def step():
            with block():
                pass

        ProcessInstrumentor().instrument()
        {before}
        PushpullInstrumentor().instrument({wrong})
        OpenTelemetryInstrumentor().instrument()
        print(live.tracer)
    """
    done = place.run(program, OTEL_DLTRACE_DRAIN="off")

    assert (done.returncode, done.stdout) == (0, "None\n"), done.stderr
    assert [line.rpartition("; ")[2] for line in ours(but_for_rings(done.stderr))] == ["tracing is off"]
    assert len(list(place.rings.glob("*.ring"))) == (before != "pass")


@pytest.mark.parametrize("anew", ["otel_dltrace.start()", "otel_dltrace.stop()", "wrong.uninstrument()"])
def test_after_a_wrong_option_the_program_can_ask_anew(place: Place, anew: str) -> None:
    """By a start that succeeds, or by taking back what was refused; until then nothing begins."""
    program = f"""
        import otel_dltrace
        from otel_dltrace.instrument.registry import _registry
        from otel_dltrace.otel.instrumentors import OpenTelemetryInstrumentor, ProcessInstrumentor, PushpullInstrumentor
        from otel_dltrace.record.tracer import live

        def is_on(source):
            return live.tracer is not None and source in _registry._on

        wrong = PushpullInstrumentor()
        wrong.instrument(level="bogus")
        OpenTelemetryInstrumentor().instrument()
        print(is_on("opentelemetry"))
        {anew}
        ProcessInstrumentor().instrument()
        print(is_on("process"), live.is_refused)
    """
    done = place.run(program, OTEL_DLTRACE_DRAIN="off")

    assert (done.returncode, done.stdout) == (0, "False\nTrue False\n"), done.stderr


def test_our_variables_are_options_of_their_command(place: Place) -> None:
    """The names are generated from those that the configuration knows."""
    program = "import os; print(os.environ['OTEL_DLTRACE_LEVEL'], os.environ['OTEL_DLTRACE_STEPS'])"
    done = instrumented(place, program, "--dltrace_level", "step", "--dltrace_steps", "1-2", "--dltrace", "0")

    assert (done.stdout, done.stderr) == ("step 1-2\n", "")
    from otel_dltrace.otel import variables

    assert {name for name in vars(variables) if name.startswith("OTEL_")} == {"OTEL_DLTRACE", *VARIABLES.values()}


def test_the_drain_is_not_instrumented(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its own requests would be spans of the user's; the rest of the path stays."""
    injected = Path(str(importlib.util.find_spec("opentelemetry.instrumentation.auto_instrumentation").origin)).parent
    ours = Path(otel_dltrace.__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", f"{injected}:/somewhere:{ours}:{injected}/")

    assert drain_environment({})["PYTHONPATH"] == f"/somewhere:{ours}"


# -- what users' own providers take from us -----------------------------------------------------------

SEEDED = """
    import json, random
    from opentelemetry import trace

    random.seed(42)
    tracer = trace.get_tracer("user")
    contexts = [tracer.start_span("x").get_span_context() for _ in range(2)]
    ids = {i for c in contexts for i in (c.trace_id, c.span_id)}
    print(json.dumps([sorted(ids), random.random(), contexts[0].trace_flags]))
"""


def test_ids_do_not_follow_the_users_seed(place: Place) -> None:
    """Two ranks that seed alike have different ids, and their own numbers come as without any span."""
    runs = [instrumented(place, SEEDED, OTEL_PYTHON_ID_GENERATOR="dltrace") for _ in range(2)]
    (one, number, flags), (other, same_number, _) = (json.loads(run.stdout) for run in runs)

    assert (len(one), len(other), set(one) & set(other)) == (4, 4, set())
    assert number == same_number == pytest.approx(0.6394267984578837)
    assert flags == 3  # sampled, and random as samplers may rely on


DETECTED = """
    import json, os
    import otel_dltrace
    from opentelemetry import trace

    provider = trace.get_tracer_provider()
    for _ in range(2):
        with otel_dltrace.step():
            pass
    print(json.dumps(dict(provider.resource.attributes)), flush=True)
    child = os.fork()
    if not child:
        print(json.dumps(dict(provider.resource.attributes)), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""
OPERATOR = "service.instance.id=ns.pod.container,dl.rank=7,team=vision"


@pytest.mark.parametrize("switch", ["", "1"], ids=["their switch", "both"])
def test_a_users_resource_is_ours(place: Place, switch: str) -> None:
    """Every attribute of ours is in the user's resource, the instance's id too; a forked child is another instance."""
    env = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "OTEL_DLTRACE_JOB": "j7", "OTEL_DLTRACE_RUN": "r1"}
    done = instrumented(
        place,
        DETECTED,
        OTEL_DLTRACE=switch,
        OTEL_DLTRACE_DRAIN="auto",
        OTEL_EXPERIMENTAL_RESOURCE_DETECTORS="otel,dltrace",
        OTEL_RESOURCE_ATTRIBUTES=OPERATOR,
        OTEL_SERVICE_NAME="bert",
        **env,
    )
    assert done.returncode == 0, done.stderr
    theirs, childs = map(json.loads, done.stdout.splitlines())
    place.wait_for_rings()
    (batch,) = place.spans()
    ours = {k: v for k, v in resource_attributes(batch.process).items() if k != s.DL_CLOCK_UNCERTAINTY}

    assert {name: theirs.get(name) for name in ours} == ours
    assert (ours[s.SERVICE_NAME], ours[s.DL_RANK], ours["team"]) == ("bert", 3, "vision")
    assert childs[s.SERVICE_INSTANCE_ID] not in ("ns.pod.container", theirs[s.SERVICE_INSTANCE_ID])
    assert childs[s.PROCESS_PID] != theirs[s.PROCESS_PID]


def test_a_process_without_a_rank_claims_none(place: Place) -> None:
    """The launcher runs under the same switch as its ranks; rank 0 is one of these."""
    program = """
        import json
        from opentelemetry import trace
        print(json.dumps(dict(trace.get_tracer_provider().resource.attributes)))
    """
    done = instrumented(place, program, OTEL_EXPERIMENTAL_RESOURCE_DETECTORS="dltrace")
    known = json.loads(done.stdout)

    assert done.stderr == ""
    assert [name for name in known if name.startswith("dl.")] == [s.DL_JOB_NAME, s.DL_JOB_ATTEMPT, s.DL_WORLD]
    assert known[s.SERVICE_NAME] == "program"


def test_a_job_that_the_program_names_is_so_before_and_after_the_first_step(place: Place) -> None:
    """A user's provider is often made before there is a step."""
    done = place.run("""
        import json
        import otel_dltrace
        from otel_dltrace.otel.resource import RankDetector

        otel_dltrace.start(job="bert")
        for _ in range(2):
            seen = RankDetector().detect().attributes
            print(json.dumps([seen[name] for name in ("service.name", "dl.job.id", "dl.job.name")]))
            with otel_dltrace.step():
                pass
    """)
    assert [json.loads(line) for line in done.stdout.splitlines()] == [["bert"] * 3] * 2


SAMPLED = """
    import json, threading
    import otel_dltrace
    from opentelemetry import context, trace
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    memory = InMemorySpanExporter()
    provider = trace.get_tracer_provider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    tracer = trace.get_tracer("user")

    def work(name):
        with tracer.start_as_current_span(name), tracer.start_as_current_span(f"below {name}"):
            pass

    work("before")
    for n in range(4):
        with otel_dltrace.step():
            work(f"in {n}")
            thread = threading.Thread(target=work, args=(f"thread in {n}",))
            thread.start()
            thread.join()
            tracer.start_span(f"apart in {n}", context=context.Context()).end()
    with tracer.start_as_current_span("around"):
        with otel_dltrace.step():
            work("in 4")
    print(json.dumps(sorted(span.name for span in memory.get_finished_spans() if "below" not in span.name)))
    print(sum("below" in span.name for span in memory.get_finished_spans()))
"""


@pytest.mark.parametrize(
    ("argument", "outside"),
    [pytest.param("", ["around", "before", "in 4"], id="all"), pytest.param("0", [], id="none")],
)
def test_spans_inside_a_step_follow_its_window(place: Place, argument: str, outside: list[str]) -> None:
    """A step in the window keeps all its spans, one outside none; apart from steps the argument decides."""
    done = instrumented(
        place,
        SAMPLED,
        OTEL_TRACES_SAMPLER="dltrace_step",
        OTEL_TRACES_SAMPLER_ARG=argument,
        OTEL_DLTRACE_STEPS="0-0,2-2",
    )
    inside = [f"{word}in {n}" for word in ("apart ", "", "thread ") for n in (0, 2)]
    kept, below = done.stdout.splitlines()

    assert but_for_rings(done.stderr) == ""
    assert json.loads(kept) == sorted([*inside, *outside])
    assert int(below) == 4 + len([name for name in outside if name != "around"])


@pytest.mark.parametrize(
    ("variable", "value", "trouble"),
    [
        ("OTEL_TRACES_SAMPLER_ARG", "some", " is not a share of traces from 0 to 1"),
        ("OTEL_TRACES_SAMPLER_ARG", "2", " is not a share of traces from 0 to 1"),
        ("OTEL_DLTRACE_STEPS", "now", ": 'now' is not a window; use first=N, every=N, A-B or all, joined by commas"),
    ],
)
def test_a_sampler_that_cannot_be_made_leaves_the_default(
    place: Place, variable: str, value: str, trouble: str
) -> None:
    """The SDK says why, and the user's spans come."""
    env = {variable: value}
    done = instrumented(place, SAMPLED, OTEL_TRACES_SAMPLER="dltrace_step", OTEL_DLTRACE="0", **env)

    sentence = f"Using default sampler. Failed to initialize sampler, dltrace_step: {variable}={value!r}{trouble}"
    assert done.stderr.splitlines()[0] == sentence
    assert len(json.loads(done.stdout.splitlines()[0])) == 15


# -- TRACEPARENT, and everything together --------------------------------------------------------------

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.mark.parametrize(
    ("text", "remote"),
    [
        pytest.param(f"00-{TRACE}-{SPAN}-01", Remote(TRACE, SPAN), id="sampled"),
        pytest.param(f" 00-{TRACE.upper()}-{SPAN}-00\n", Remote(TRACE, SPAN), id="not sampled, in capitals"),
        pytest.param(f"01-{TRACE}-{SPAN}-01-more", Remote(TRACE, SPAN), id="of a later version"),
        pytest.param(f"00-{TRACE}-{SPAN}-01-more", None, id="too long for its version"),
        pytest.param(f"ff-{TRACE}-{SPAN}-01", None, id="of no version"),
        pytest.param(f"00-{'0' * 32}-{SPAN}-01", None, id="no trace"),
        pytest.param(f"00-{TRACE}-{'0' * 16}-01", None, id="no span"),
        pytest.param(f"00-{TRACE[:-1]}-{SPAN}-01", None, id="cut"),
        pytest.param("", None, id="empty"),
    ],
)
def test_a_traceparent_names_a_span_or_none(text: str, remote: Remote | None) -> None:
    """As the W3C has it; what cannot be read is as if it were not there."""
    assert read_traceparent(text) == remote


@pytest.mark.parametrize(
    ("traceparent", "said"), [(f"00-{TRACE}-{SPAN}-01", [TRACE, SPAN]), ("nonsense", [None, None])]
)
def test_a_job_names_the_span_that_launched_it(place: Place, traceparent: str, said: list[str | None]) -> None:
    """A step is a trace of its own, so the launcher's span is an attribute of its ranks."""
    done = place.run(OWN, OTEL_DLTRACE="1", TRACEPARENT=traceparent)
    assert done.returncode == 0, done.stderr
    place.wait_for_rings()
    (batch,) = place.spans()
    known = resource_attributes(batch.process)

    assert [known.get(s.DL_LAUNCHER_TRACE_ID), known.get(s.DL_LAUNCHER_SPAN_ID)] == said


TOGETHER = """
    import otel_dltrace
    from opentelemetry import trace
    tracer = trace.get_tracer("user")
    for n in range(3):
        with otel_dltrace.step(), tracer.start_as_current_span(f"user {n}"), otel_dltrace.phase("rollout"):
            pass
"""


def test_their_spans_and_ours_are_one_tree_in_the_collector(place: Place, tmp_path: Path) -> None:
    """The distro sends the user's spans, the drain ours: each user's span hangs under the step that is there."""
    with servers.collector(tmp_path) as collector:
        done = instrumented(
            place,
            TOGETHER,
            OTEL_DLTRACE_DRAIN="auto",
            OTEL_TRACES_EXPORTER="otlp",
            OTEL_EXPORTER_OTLP_ENDPOINT=collector.grpc,
            OTEL_EXPORTER_OTLP_INSECURE="true",
        )
        assert done.returncode == 0, done.stderr
        spans = collector.wait_for(3 * (1 + 1 + 1 + 1))  # root, step, phase, the user's
    by_id = {(span.trace_id, span.span_id): span for span in spans}
    parents = {}
    for span in spans:
        parent = by_id.get((span.trace_id, span.parent_span_id))
        parents.setdefault(span.name, []).append(parent.name if parent else "")

    assert parents == {
        s.TRAIN_STEP: [""] * 3,
        s.RANK_STEP: [s.TRAIN_STEP] * 3,
        "rollout": [s.RANK_STEP] * 3,
        "user 0": [""],  # alone, a process learns who it is in its second step
        "user 1": [s.RANK_STEP],
        "user 2": [s.RANK_STEP],
    }
