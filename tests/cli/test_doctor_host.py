"""`otel-dltrace doctor` names what is wrong with frameworks, variables, folders, other tracers and the last run."""

import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError

import pytest

from otel_dltrace.doctor import endpoint, environment, frameworks, host, installation, runs
from otel_dltrace.doctor.checks import examine
from otel_dltrace.doctor.child import Child
from otel_dltrace.model.errors import ConfigError
from otel_dltrace.model.findings import FINE, NOTE, PROBLEM, Finding, worst
from otel_dltrace.report.findings import summary
from otel_dltrace.settings.config import Config
from tests.support.findings import TOKEN, otlp, problems


def doctor(*args: str, **env: str) -> "subprocess.CompletedProcess[str]":
    """Run the command under *env* alone."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("OTEL_", "BYTEPS_", "PYTHONPATH"))}
    command = [sys.executable, "-m", "otel_dltrace", "doctor", *args]
    return subprocess.run(command, env=clean | env, capture_output=True, text=True, timeout=240, check=False)


def test_the_command_says_all_of_it_and_its_code_tells(tmp_path, monkeypatch):
    """0 where nothing is wrong, with every area in the table; 1 and the same in JSON where something is."""
    monkeypatch.chdir(tmp_path)
    well = doctor("--quick")
    ill = doctor("--quick", "--json", OTEL_DLTRACE="1", OTEL_DLTRACE_LVL="step")
    areas = ("environment", "versions", "entry points", ".pth", "others", "frameworks", "endpoint", "clock")
    told = json.loads(ill.stdout)

    assert well.returncode == 0, well.stdout
    assert [area for area in (*areas, "rings", "run directory", "fork", "last run") if area not in well.stdout] == []
    assert (ill.returncode, told["verdict"]) == (1, "problem")
    assert [finding for finding in told["findings"] if finding["verdict"] == "problem"] == [
        {
            "area": "environment",
            "verdict": "problem",
            "what": "OTEL_DLTRACE_LVL=step is not a variable we know, and has no effect",
            "cure": "did you mean OTEL_DLTRACE_LEVEL?",
        }
    ]


def test_a_check_that_cannot_be_made_is_a_finding(monkeypatch):
    """The doctor is asked where things are broken; the others are made."""

    def broken() -> list[Finding]:
        raise ModuleNotFoundError("No module named 'numpy'")

    monkeypatch.setattr(installation, "entry_points", broken)
    found = examine({}, import_frameworks=False)

    assert [(one.area, one.what) for one in problems(found)] == [
        ("entry points", "this could not be checked: ModuleNotFoundError: No module named 'numpy'")
    ]
    assert {"environment", "clock", "fork"} < {one.area for one in found}


def test_a_wrong_option_is_no_finding():
    """Exit code 2, as of every command."""
    assert doctor("--slow").returncode == 2


def test_torch_is_found_and_would_be_traced():
    """It is imported in a process of its own, where all of our tables finds its place."""
    pytest.importorskip("torch")
    code = "from otel_dltrace.doctor.frameworks import patched\nimport sys, json\nanswer = patched(['torch'])"
    child = Child.ask(code, {"OTEL_DLTRACE": "0"})

    assert (child.answer["missing"], child.answer["absent"], child.said) == ([], [], "")
    assert "torch.distributed.distributed_c10d.all_reduce" in child.answer["placed"]


def test_a_framework_of_which_nothing_can_be_imported_is_told(tmp_path, monkeypatch):
    """As an mpi4py whose MPI is not there, or a Horovod without torch, which may be nobody's trouble."""
    package = tmp_path / "mpi4py"
    package.mkdir()
    (package / "__init__.py").write_text("class rc: initialize = True\n")
    (package / "MPI.py").write_text("raise ImportError('libmpi.so.40: cannot open shared object file')\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    (found,) = frameworks._frameworks(["mpi4py"], import_them=True)

    assert found.verdict == NOTE
    assert "is not traced, since nothing that we trace in it can be imported: libmpi.so.40: cannot" in found.what
    assert found.cure == f"to have it traced, fix it first: {sys.executable} -c 'import mpi4py.MPI'"


def test_a_framework_that_ends_its_process_is_a_finding():
    """What a child does at its import is no harm to the doctor."""
    child = Child.ask("import os; os.abort()", {})

    assert (child.answer, child.trouble) == (None, "exit code -6")


@pytest.mark.parametrize(
    ("env", "problem"),
    [
        pytest.param({"OTEL_DLTRACE_LEVL": "x"}, ["OTEL_DLTRACE_LEVL=x is not a variable"], id="misspelt"),
        pytest.param({"DLTRACE_LEVEL": "x"}, ["DLTRACE_LEVEL=x is not a variable"], id="without OTEL"),
        pytest.param({"OTEL_EXPORTER_OTLP_ENDPONT": "x"}, ["OTEL_EXPORTER_OTLP_ENDPONT=x is no"], id="OTLP misspelt"),
        pytest.param(
            {"OTEL_DLTRACE_LEVEL": "x", "OTEL_DLTRACE_STEPS": "y"},
            ["OTEL_DLTRACE_LEVEL='x' is not a level", "OTEL_DLTRACE_STEPS='y'"],
            id="two bad values",
        ),
        pytest.param({"OTEL_EXPORTER_OTLP_ENDPOINT": "h"}, ["OTEL_EXPORTER_OTLP_ENDPOINT='h' is not a URL"], id="URL"),
        pytest.param(
            {"OTEL_RESOURCE_ATTRIBUTES": "run=5,team:red, ,=x"},
            [f"OTEL_RESOURCE_ATTRIBUTES: '{entry}' is not name=value" for entry in ("team:red", "=x")],
            id="no attributes",
        ),
        pytest.param({"OTEL_TRACES_EXPORTER": "nix"}, ["OTEL_TRACES_EXPORTER: no exporter"], id="exporter"),
        pytest.param({"OTEL_DLTRACE": "maybe"}, ["OTEL_DLTRACE='maybe' is neither"], id="switch"),
        pytest.param(
            {"OTEL_DLTRACE": "1", "OTEL_SDK_DISABLED": "true"}, ["OTEL_DLTRACE=1 asks for tracing"], id="both"
        ),
        pytest.param(
            {"OTEL_EXPORTER_CHROME_TRACE_MAX_BYTES": "foo", "OTEL_EXPORTER_CHROME_TRACE_MAX_FILES": "2"},
            ["OTEL_EXPORTER_CHROME_TRACE_MAX_BYTES='foo' is not a whole number"],
            id="Chrome",
        ),
        pytest.param(
            {"OTEL_TRACES_SAMPLER": "dltrace_step", "OTEL_TRACES_SAMPLER_ARG": "2"},
            ["OTEL_TRACES_SAMPLER_ARG='2' is not a share of traces from 0 to 1"],
            id="of our sampler",
        ),
        pytest.param({"OTEL_TRACES_SAMPLER": "x", "OTEL_TRACES_SAMPLER_ARG": "2"}, [], id="of another sampler"),
        pytest.param(
            {"OTEL_TRACES_SAMPLER": "DLTRACE_STEP", "OTEL_PYTHON_ID_GENERATOR": "dltrace_ids"},
            [
                "OTEL_TRACES_SAMPLER: DLTRACE_STEP is not one of our names, and the SDK uses its default sampler",
                "OTEL_PYTHON_ID_GENERATOR: dltrace_ids is not one of our names, and the SDK does not start",
            ],
            id="our plugins misspelt",
        ),
        pytest.param(
            {"OTEL_DLTRACE_JAEGER_URL": "me:secret@jaeger:1"},
            ["OTEL_DLTRACE_JAEGER_URL='jaeger:1' is not an address of jaeger: write http://HOST:PORT"],
            id="viewer",
        ),
        pytest.param({"OTEL_DLTRACE_JAEGER_URL": "http://"}, ["OTEL_DLTRACE_JAEGER_URL='http://' is"], id="no host"),
        pytest.param({"OTEL_LOGS_EXPORTER": "none", "OTEL_BSP_SCHEDULE_DELAY": "9"}, [], id="of the SDK"),
        pytest.param({"OTEL_EXPORTER_JAEGER_ENDPOINT": "h", "OTEL_DLTRACE_LEVEL": "step"}, [], id="of somebody else"),
    ],
)
def test_what_the_environment_gets_wrong_is_named(env, problem):
    """Each variable by its name, with what is wrong about it."""
    found = [finding.what for finding in problems(environment.check(env))]

    assert [what for what, said in zip(found, problem, strict=True) if not what.startswith(said)] == []


def test_what_opentelemetry_forbids_is_not_advised():
    """`OTEL_DLTRACE=1` alone would switch nothing on."""
    switch, *_ = environment.check({"OTEL_SDK_DISABLED": "true"})

    assert (switch.verdict, switch.cure) == ("fine", "unset OTEL_SDK_DISABLED, and set OTEL_DLTRACE=1")


@pytest.mark.parametrize(
    "name",
    [
        "OTEL_CONFIG_FILE",
        "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE",
        "OTEL_EXPORTER_PROMETHEUS_HOST",
        "OTEL_EXPORTER_PROMETHEUS_PORT",
    ],
)
def test_what_acts_on_us_by_way_of_the_sdk_is_not_said_to_do_nothing(name):
    """Each is documented to act, here or in a test: what we record, and how metrics are sent."""
    (finding,) = environment.check({name: "8080"})[1:]

    assert (finding.verdict, finding.what.partition(",")[0]) == (FINE, f"{name}=8080")


@pytest.mark.parametrize(("seconds", "verdict"), [("10", FINE), ("2.5", FINE), ("10000", NOTE)])
def test_a_timeout_that_is_meant_in_milliseconds_is_told(seconds, verdict):
    """With it a request to a collector that hangs holds up the others for hours."""
    (finding,) = environment.check({"OTEL_EXPORTER_OTLP_TRACES_TIMEOUT": seconds})[1:]

    assert finding.verdict == verdict, finding


def test_a_misspelt_name_of_what_to_leave_out_is_told():
    """It leaves nothing out; what is traced goes by these names, and others are not ours to judge."""
    name = "OTEL_PYTHON_DISABLED_INSTRUMENTATIONS"

    (found,) = problems(environment.check({name: "dltrace_torch_dpp, dltrace_torch_ddp,redis"}))
    assert (found.what, found.cure) == (
        f"{name}: dltrace_torch_dpp is not one of our names, and leaves nothing out",
        "did you mean dltrace_torch_ddp?",
    )


def test_a_bad_name_hides_no_other_that_it_begins_with():
    """The switch is told as well as what is wrong beside it; of metrics, that spans go on."""
    env = {"OTEL_DLTRACE": "1", "OTEL_DLTRACE_LEVEL": "x", "OTEL_METRIC_EXPORT_INTERVAL": "0", **otlp("http://h")}
    env["OTEL_BSP_SCHEDULE_DELAY"] = "never"
    found = environment.check(env)

    assert "OTEL_DLTRACE=1" in [finding.what for finding in found if finding.verdict == FINE]
    assert [(one.what.partition("=")[0], one.cure) for one in problems(found)] == [
        ("OTEL_DLTRACE_LEVEL", "with it, programs run untraced"),
        ("OTEL_METRIC_EXPORT_INTERVAL", "with it, no metrics are sent; spans are"),
        ("OTEL_BSP_SCHEDULE_DELAY", "with it, spans wait 5 s to go out together"),
    ]


def test_a_library_that_is_missing_is_told(monkeypatch):
    """One that came with us, and that somebody has removed: without psutil no host is sampled."""
    there = installation.version

    def version(name):
        if name == "psutil":
            raise PackageNotFoundError(name)
        return there(name)

    monkeypatch.setattr(installation, "version", version)
    (found,) = problems(installation.versions())

    assert (found.what, found.cure) == (
        "psutil is missing: the drain and the commands need it",
        "pip install otel-dltrace",
    )


def test_an_answer_that_cannot_be_written_is_trouble():
    """It left nothing, or half of it."""
    found = Child.ask("import sys, json; answer = [{1, 2}]", {})

    assert (found.answer, found.trouble) == (None, "TypeError: Object of type set is not JSON serializable")


def test_what_is_asked_of_a_child_needs_no_folder(monkeypatch):
    """As on the read-only root of a container."""
    monkeypatch.setattr("tempfile.tempdir", "/proc")

    assert Child.ask("import sys, json; answer = 5", {}) == Child(5, "", "")


def test_what_lies_in_the_working_directory_is_no_module_of_a_child(tmp_path, monkeypatch):
    """Not a user's `queue.py`, nor what a stranger has put where all may write."""
    monkeypatch.chdir(tmp_path)
    for name in ("otel_dltrace", "json", "queue", "numpy"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('taken')\n")

    code = "import sys, json, queue, numpy, otel_dltrace.model\nanswer = 5"
    assert Child.ask(code, {}) == Child(5, "", "")


def test_python_itself_is_no_framework():
    """We follow its garbage collector, and import nothing for that."""
    assert "gc " not in "".join(finding.what for finding in frameworks.check(import_them=False))


def test_secrets_are_not_printed():
    """Neither a token nor a password."""
    env = otlp("http://user:secret@127.0.0.1:1", HEADERS=f"{TOKEN}secret,b=secret")
    others = [
        otlp("user:secret@127.0.0.1:1"),
        otlp("user:secret@127.0.0.1:1", "grpc"),
        otlp("http://user:a@secret@127.0.0.1:1/v1?token=secret"),
        {"OTEL_DLTRACE_JAEGER_URL": "user:secret@jaeger:16686", "OTEL_RESOURCE_ATTRIBUTES": "owner=a@b"},
        {"OTEL_EXPORTER_OTLP_HEADER": "a=secret", "OTEL_EXPORTER_OTLP_ENDPOINTS": "http://h:1/?token=secret"},
        {"OTEL_EXPORTER_OTLP_TOKEN": "secret", "OTEL_EXPORTER_JAEGER_PASSWORD": "secret"},
        {"OTEL_EXPORTER_OTLP_HEADERS": "Bearer secret", "OTEL_EXPORTER_OTLP_LOGS_HEADERS": "a=b,secret"},
        {"OTEL_EXPORTER_OTLP_CLIENT_KEY": "-----BEGIN PRIVATE KEY-----\nsecret"},
    ]
    found = [finding for one in (env, *others) for finding in (*environment.check(one), *endpoint.check(one))]
    told = [finding.what for finding in found]

    assert {"OTEL_EXPORTER_OTLP_HEADERS=authorization=...,b=...", "OTEL_RESOURCE_ATTRIBUTES=owner=a@b"} <= {*told}
    assert "secret" not in str(found)


@pytest.mark.parametrize(
    ("folders", "env", "verdict", "says"),
    [
        pytest.param([], {}, FINE, "nothing else", id="nobody"),
        pytest.param(
            ["opentelemetry/instrumentation/auto_instrumentation"], {"OTEL_DLTRACE": "1"}, NOTE, "done once",
            id="opentelemetry-instrument and our switch",
        ),
        pytest.param(
            ["opentelemetry/instrumentation/auto_instrumentation"], {}, FINE, "switches tracing on",
            id="opentelemetry-instrument alone",
        ),
        *(
            pytest.param(
                ["opentelemetry/instrumentation/auto_instrumentation"], env, FINE, "leaves tracing off",
                id=f"opentelemetry-instrument, {'='.join(*env.items())}",
            )
            for env in (
                {"OTEL_DLTRACE": "0"}, {"OTEL_DLTRACE": "off"}, {"OTEL_DLTRACE": "?"}, {"OTEL_SDK_DISABLED": "true"},
            )
        ),
        pytest.param(["ddtrace/bootstrap"], {"OTEL_DLTRACE": "1"}, NOTE, "except for torch", id="ddtrace-run"),
        pytest.param(
            ["ddtrace/bootstrap"], {"OTEL_DLTRACE": "1", "DD_TRACE_PYTORCH_ENABLED": "true"}, PROBLEM, "both wrap",
            id="ddtrace's torch",
        ),
    ],
)  # fmt: skip
def test_two_instrumentations_at_once_are_told(folders, env, verdict, says):
    """By what they put on PYTHONPATH."""
    (found,) = installation.others({**env, "PYTHONPATH": os.pathsep.join(f"/lib/{folder}" for folder in folders)})

    assert (found.verdict, says in found.what) == (verdict, True)


def test_a_sitecustomize_that_hides_another_is_told(tmp_path):
    """Python runs one of them."""
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir()
        (folder / "sitecustomize.py").touch()
    (found,) = installation.others({"PYTHONPATH": os.pathsep.join(map(str, folders))})

    assert (found.verdict, f"{tmp_path}/a/sitecustomize.py may hide {tmp_path}/b" in found.what) == (NOTE, True)


def test_a_folder_that_python_passes_over_is_passed_over(monkeypatch):
    """Another user's home, as of `sudo -E`, or a name that cannot be: Python does not mind either."""
    monkeypatch.setattr(installation.site, "getusersitepackages", lambda: "/" + "x" * 300)
    monkeypatch.setattr(installation.site, "ENABLE_USER_SITE", True)
    found = [*installation.pth(), *installation.others({"PYTHONPATH": "/" + "x" * 300})]

    assert [(one.area, one.verdict) for one in found] == [(".pth", FINE), ("others", FINE)]


def test_rings_belong_on_a_tmpfs(tmp_path):
    """A disk is slow, and may be remote."""
    on_disk = host._file_system(tmp_path) not in ("tmpfs", "ramfs")
    found = host.shared_memory(Config(ring_directory=str(tmp_path / "rings")))

    assert (PROBLEM in {finding.verdict for finding in found}) is on_disk
    assert worst(host.shared_memory(Config())) == FINE


@pytest.mark.parametrize("below", ["", "rings"])
def test_a_link_to_nothing_is_no_place_for_rings(tmp_path, below):
    """Nothing can be made where it is, and no process would be traced."""
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "gone")
    (found,) = host.shared_memory(Config(ring_directory=str(link / below)))

    assert (found.verdict, str(link) in found.what, "OTEL_DLTRACE_RING_DIR" in found.what + found.cure) == (
        PROBLEM,
        True,
        True,
    )


@pytest.mark.parametrize(("asked", "verdict"), [(4 << 20, FINE), (1 << 60, NOTE)], ids=["usual", "absurd"])
def test_a_ring_is_no_larger_than_its_share_of_the_memory_where_there_is_no_limit(monkeypatch, asked, verdict):
    """As the recorder makes it."""
    unlimited = os.statvfs_result((4096, 4096, 0, 0, 0, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: unlimited)
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 1 << 15, "SC_PAGE_SIZE": 1 << 12}.__getitem__)
    found = host.shared_memory(Config(ring_directory="/dev/shm/rings", ring_size=asked))[0]

    size = "4.0" if verdict == FINE else "6.4"
    said = f"/dev/shm/rings (no limit but the memory's 128 MiB) gives each process a ring of {size} MiB"
    assert (found.verdict, found.what) == (verdict, said)


def test_a_folder_that_cannot_be_written_is_told(monkeypatch):
    """By its variable, or because it is where we are; the doctor goes on."""
    envs = ({"OTEL_DLTRACE_DIR": folder} for folder in ("/proc/runs", "~no-such-user/runs"))
    said = [finding.what for env in envs for finding in problems(host.run_directory(env, Config()))]
    monkeypatch.chdir("/proc/self")

    assert said == [
        "OTEL_DLTRACE_DIR='/proc/runs' cannot be written: No such file or directory",
        "OTEL_DLTRACE_DIR='~no-such-user/runs' names a user who has no home directory",
    ]
    assert [finding.area for finding in problems(examine({}, import_frameworks=False))] == ["run directory"]


def test_a_bad_variable_leaves_the_others_as_they_are(tmp_path):
    """What is said of rings and runs is of those that programs will have."""
    env = {"OTEL_DLTRACE_LEVEL": "x", "OTEL_DLTRACE_QUOTA": "y", "OTEL_DLTRACE_RING_SIZE": "1M"}
    config = environment.config_of({**env, "OTEL_DLTRACE_DIR": str(tmp_path)})

    assert config == Config(ring_size=1 << 20, directory=str(tmp_path))


@pytest.mark.parametrize(
    ("env", "kept"),
    [
        pytest.param({"OTEL_DLTRACE_COMM_DIR": "/proc/nope"}, {}, id="a folder that cannot be written"),
        pytest.param({"OTEL_DLTRACE_DIR": "/proc/a", "OTEL_DLTRACE_RING_DIR": "/proc/b"}, {}, id="two of them"),
        pytest.param(
            {"BYTEPS_TRACE_ON": "1", "BYTEPS_TRACE_DIR": "/proc/x"},
            {"level": "partition", "steps": "9-19", "comm_steps": "10-20", "comm_directory": "trace"},
            id="one of BytePS's",
        ),
        pytest.param({"BYTEPS_TRACE_ON": "1", "BYTEPS_TRACE_START_STEP": "50"}, {}, id="a default of BytePS's"),
        pytest.param(
            {"BYTEPS_SERVER_ENABLE_PROFILE": "1", "BYTEPS_SERVER_PROFILE_OUTPUT_PATH": "/proc/x"},
            {"server_spans": "on", "server_profile": "server_profile.json"},
            id="a server's profile",
        ),
    ],
)
def test_the_doctor_looks_on_without_what_cannot_be_used(env, kept, tmp_path, monkeypatch):
    """It is told by its variable, and no reason to end."""
    monkeypatch.chdir(tmp_path)

    assert environment.config_of({**env, "OTEL_DLTRACE_QUOTA": "7"}) == Config(quota=7, **kept)
    assert worst([*environment.check(env), *host.run_directory(env, Config())]) == PROBLEM


def test_folders_that_cannot_be_written_are_those_that_are_looked_at(tmp_path):
    """Others that would do are none that a program will have: what lies there is not its last run."""
    file = tmp_path / "file"
    file.touch()
    env = {"OTEL_DLTRACE_DIR": f"{file}/runs", "OTEL_DLTRACE_RING_DIR": f"{file}/rings"}

    found = examine(env, import_frameworks=False)

    assert [(one.verdict, one.what) for one in found if one.area in ("rings", "last run")] == [
        (PROBLEM, f"{file}/rings cannot be made: {file} cannot be written"),
        (FINE, f"there is no run in {file}/runs yet"),
    ]


def test_without_any_folder_the_doctor_says_so(monkeypatch):
    """It has nowhere to look then."""
    monkeypatch.chdir("/proc/self")
    monkeypatch.setattr("tempfile.tempdir", "/proc")

    with pytest.raises(ConfigError, match="not even /proc can be written: set TMPDIR"):
        environment.config_of({"OTEL_DLTRACE_DIR": "/proc/x", "OTEL_DLTRACE_QUOTA": "7"})


def test_the_folder_for_runs_is_not_blamed_for_that_of_rings(tmp_path, monkeypatch):
    """That of rings has a variable of its own, here with a folder that can be."""
    monkeypatch.setattr("otel_dltrace.settings.config.private_folder", lambda: "/proc/rings")
    rings = tmp_path / "rings"

    assert problems(host.run_directory({"OTEL_DLTRACE_DIR": str(tmp_path)}, Config(ring_directory=str(rings)))) == []


def test_a_fork_that_would_hang_is_told():
    """Where the drain is a thread of the program, gRPC is in it."""
    env = {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", "GRPC_ENABLE_FORK_SUPPORT": "0"}

    assert [one.verdict for one in host.forks(env, Config(drain="thread"))] == [NOTE, PROBLEM]
    assert [one.verdict for one in host.forks(env, Config())] == [NOTE]
    assert worst(host.forks({}, Config())) == FINE


@pytest.mark.parametrize(
    ("figures", "verdict"),
    [
        pytest.param({"spans": 5}, FINE, id="all well"),
        pytest.param({"spans": 5, "lapped_phase": 2}, PROBLEM, id="lost"),
        pytest.param({"spans": 5, "otlp": {"accepted": 1, "rejected": 4, "rejection": "old"}}, PROBLEM, id="rejected"),
        pytest.param({"spans": 5, "otlp": {"accepted": 1, "spilled": 4, "trouble": "away"}}, NOTE, id="waiting"),
    ],
)
def test_the_last_run_is_looked_at(figures, verdict, tmp_path):
    """What was lost or rejected is a problem, what waits is worth a note."""
    folder = tmp_path / "dltrace-job-00000000" / "hosts" / "node"
    folder.mkdir(parents=True)
    (folder / "drain.json").write_text(json.dumps({"summary": figures, "processes": [], "ended": True}))
    (found,) = runs.check(Config(directory=str(tmp_path), ring_directory=str(tmp_path / "rings")))

    assert found.verdict == verdict
    assert found.what.startswith("dltrace-job-00000000, ")
    assert " ago: 5 spans recorded" in found.what


def test_of_a_run_under_way_what_is_read_so_far_is_told(tmp_path):
    """Nobody knows yet that none is lost."""
    folder = tmp_path / "dltrace-job-00000000" / "hosts" / "node"
    folder.mkdir(parents=True)
    told = {"summary": {}, "processes": [], "ended": False, "so_far": 7}
    (folder / "drain.json").write_text(json.dumps(told))
    (found,) = runs.check(Config(directory=str(tmp_path), ring_directory=str(tmp_path / "rings")))

    assert found.what.endswith(": 7 spans recorded; the drain is at work, or was killed")


def test_the_last_run_is_the_one_that_began_last(tmp_path):
    """The figures of an earlier run are written anew when its drain has lingered, or by `recover`."""
    for number, name in enumerate(["dltrace-later-00000000", "dltrace-earlier-00000000"]):
        folder = tmp_path / name / "hosts" / "node"
        folder.mkdir(parents=True)
        (folder / "drain.json").write_text(json.dumps({"summary": {"spans": 5}, "processes": []}))
        (folder.parents[1] / "run.json").write_text("{}")
        os.utime(folder.parents[1] / "run.json", (1000 - number, 1000 - number))
        os.utime(folder / "drain.json", (2000 + number, 2000 + number))
    (found,) = runs.check(Config(directory=str(tmp_path), ring_directory=str(tmp_path / "rings")))

    assert found.what.startswith("dltrace-later-00000000, ")


def test_the_number_of_problems_is_a_sentence():
    """Below the table."""
    one, two = ([Finding("clock", verdict, "x") for verdict in (FINE, NOTE, *[PROBLEM] * n)] for n in (1, 2))
    assert (summary(one), summary(two)) == (
        "1 of 3 findings is a problem, 1 to note.",
        "2 of 4 findings are problems, 1 to note.",
    )


@pytest.mark.parametrize(("count", "said"), [(1, "1 ring in {} has lost its"), (2, "2 rings in {} have lost their")])
def test_rings_whose_writer_is_gone_are_told(count, said, tmp_path):
    """A drain that was killed has left them, or is at work."""
    killed = "import os, sys; from pathlib import Path; from otel_dltrace.record.recorder import Recorder as R; "
    killed += "R(Path(sys.argv[1]), 1 << 20).span(0, 3, 1, 2); os._exit(0)"
    for _ in range(count):
        subprocess.run([sys.executable, "-c", killed, str(tmp_path)], check=True)
    (found,) = runs.check(Config(directory=str(tmp_path / "runs"), ring_directory=str(tmp_path)))[1:]

    assert (found.verdict, found.what) == (
        NOTE,
        f"{said.format(tmp_path)} writer: a drain is still reading, or was killed",
    )


@pytest.mark.parametrize(("kind", "is_remote"), [("nfs4", True), ("fuse.sshfs", True), ("fuse.fuse-overlayfs", False)])
def test_a_network_file_system_is_told(kind, is_remote, tmp_path, monkeypatch):
    """What a rootless container lays over its own disk is none."""
    monkeypatch.setattr(host, "_file_system", lambda _path: kind)
    found = host.run_directory({}, Config(directory=str(tmp_path)))

    assert any("network file system" in finding.what for finding in found) is is_remote
