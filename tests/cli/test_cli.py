"""The commands as a shell sees them: help that needs no page, completion, errors that name the cure."""

import errno
import fcntl
import importlib.util
import io
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from otel_dltrace.cli.completion import SHELLS
from otel_dltrace.cli.main import COMMANDS, main, make_parser
from otel_dltrace.settings.config import VARIABLES
from tests.support.paths import ROOT
from tests.support.processes import a_place, waiting
from tests.support.run_files import a_run


def help_of(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    return capsys.readouterr().out


def test_help_names_every_command(capsys):
    """Who knows nothing finds all there is."""
    text = help_of("--help", capsys)

    assert [name for name in COMMANDS if f"\n    {name}" not in text] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_each_argument_has_its_help(command):
    """No option is left to guess."""
    (choices,) = (action.choices for action in make_parser()._actions if action.metavar == "COMMAND")

    assert [action.dest for action in choices[command]._actions if not action.help] == []


def test_help_of_run_lists_the_variables(capsys):
    """What can be set is said where tracing is switched on."""
    text = help_of("run", capsys)

    assert [name for name in VARIABLES.values() if f"  {name} " not in text] == []


def test_help_of_run_shows_defaults_as_the_readme_does(capsys):
    """A number of bytes in the unit that one would write."""
    lines = [line.split()[:2] for line in help_of("run", capsys).splitlines() if line.startswith("  OTEL_DLTRACE")]

    assert {tuple(line) for line in lines} >= {("OTEL_DLTRACE_QUOTA", "5G"), ("OTEL_DLTRACE_RING_SIZE", "4M")}


@pytest.mark.parametrize("shell", SHELLS)
def test_the_packaged_completion_is_that_of_the_commands(shell, capsys):
    """An option added without `make docs` would not be completed."""
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)

    assert main(["completion", shell]) == 0
    assert capsys.readouterr().out == generate.completion(shell)


def test_bash_completes_a_command(tmp_path):
    """A real bash offers what begins with what was typed."""
    script = f"""
    eval "$({sys.executable} -m otel_dltrace completion bash)"
    COMP_WORDS=(otel-dltrace re) COMP_CWORD=1
    $(complete -p otel-dltrace | sed 's/.*-F \\([^ ]*\\).*/\\1/')
    echo "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=240, check=True)

    assert done.stdout.split() == ["report", "recover"]


@pytest.mark.skipif(not shutil.which("fish"), reason="no fish here")
def test_fish_completes_a_command(tmp_path):
    """A real fish offers the commands that begin with what was typed, and the formats."""
    script = f"{sys.executable} -m otel_dltrace completion fish | source; complete -C 'otel-dltrace re'"
    done = subprocess.run(["fish", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)

    assert [line.split("\t")[0] for line in done.stdout.splitlines()] == ["recover", "report"]


@pytest.mark.skipif(not shutil.which("zsh"), reason="no zsh here")
@pytest.mark.parametrize("typed", ["compare first sec", "open sec", "import horovod sec", "run -- sec"])
def test_zsh_completes_paths(typed, tmp_path):
    """A real zsh, at a terminal, ends the name of a run directory, also of a second one, and of files."""
    (tmp_path / "second").mkdir()
    pid, terminal = pty.fork()
    if not pid:
        os.chdir(tmp_path)
        os.execlp("zsh", "zsh", "-f", "-i")
    setup = f"""
    autoload -U compinit; compinit -u -D; eval "$({sys.executable} -m otel_dltrace completion zsh)"
    show() {{ print -r "line<$BUFFER>" }}; zle -N show; bindkey ^X show
    """
    try:
        os.write(terminal, f"{setup}\notel-dltrace {typed}\t\x18".encode())
        shown = read_until(terminal, rb"line<(otel-dltrace .*)>")
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(terminal)

    assert shown.decode().strip() == f"otel-dltrace {typed}ond/"


def read_until(terminal: int, pattern: bytes) -> bytes:
    """Return what *pattern* finds first in what comes from *terminal*."""
    seen = b""
    while not (found := re.search(pattern, seen)):
        assert select.select([terminal], [], [], 60)[0], seen
        seen += os.read(terminal, 4096)
    return found[1]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        pytest.param(["report", "nowhere"], "nowhere", id="no such run"),
        pytest.param(["report", "R", "--steps", "9-x"], "write A-B (both ends included), N, or all", id="steps"),
        pytest.param(["report", "R", "--steps", "9-2"], "'9-2' ends before it starts", id="steps, the wrong way round"),
        pytest.param(["run"], "write it after --", id="no program"),
        pytest.param(["run", "--", "no-such-program"], "no-such-program cannot be started", id="unknown program"),
        pytest.param(["run", "--level", "fine", "--", "true"], "'fine'", id="level"),
    ],
)
def test_what_a_user_can_mend_is_one_sentence(arguments, says, capfd, monkeypatch, tmp_path):
    """Exit code 2, and a line that says what and which."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OTEL_DLTRACE_RING_DIR", str(tmp_path / "rings"))

    assert main(arguments) == 2
    lines = [line for line in capfd.readouterr().err.splitlines() if line]
    assert len(lines) == 1
    assert says in lines[0]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        pytest.param("report R --rank x", "--rank 'x' is not a whole number; write 3, for example", id="number"),
        pytest.param("report R --by foo", "--by 'foo' is not one of key, negotiation", id="choice"),
        pytest.param("export R", "--to is missing", id="option"),
        pytest.param("report", "RUN is missing", id="argument"),
        pytest.param("report R --rank", "--rank: expected one argument", id="value"),
        pytest.param("report R --foo", "there is no argument --foo; `otel-dltrace report ", id="no such option"),
        pytest.param("drain --home a/b", "--home: 'a/b' is not the name of a drain", id="name"),
        pytest.param("drain --print-to 999", "--print-to: '999' is not an open file descriptor", id="descriptor"),
        pytest.param(
            "drain --linger nan", "--linger: 'nan' is not a number of seconds, 0 or more: write 5, ", id="own"
        ),
    ],
)
def test_a_wrong_command_line_is_one_sentence(line, says, capsys):
    """Without a page of usage before it."""
    with pytest.raises(SystemExit, match="2"):
        main(line.split())

    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"otel-dltrace: {says}")
    assert said.endswith(" --help` lists what there is")


def test_a_command_that_is_none_is_one_sentence(capsys):
    """With those that are."""
    with pytest.raises(SystemExit, match="2"):
        main(["repot"])

    commands = ", ".join(COMMANDS)
    assert capsys.readouterr().err == (
        f"otel-dltrace: COMMAND 'repot' is not one of {commands}; `otel-dltrace --help` lists what there is\n"
    )


@pytest.mark.parametrize("command", ["drain", "recover"])
def test_a_bad_variable_of_metrics_ends_a_command(command, capsys, monkeypatch, tmp_path):
    """As any other bad value does; a drain that a training started goes on with its spans."""
    monkeypatch.setenv("OTEL_DLTRACE_RING_DIR", str(tmp_path / "rings"))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "often")

    assert main([command]) == 2
    assert "OTEL_METRIC_EXPORT_INTERVAL='often' is not a number" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["nan", "-1", "inf", "soon"])
@pytest.mark.parametrize("option", ["--linger", "--deliver"])
def test_a_time_to_wait_is_a_number_of_seconds(option, seconds, capsys):
    """With nan a drain would never end."""
    with pytest.raises(SystemExit) as ended:
        main(["drain", f"{option}={seconds}"])

    assert ended.value.code == 2
    assert f"{seconds!r} is not a number of seconds, 0 or more" in capsys.readouterr().err


STEPS = """
import otel_dltrace
for number in range(3):
    with otel_dltrace.step(number):
        pass
"""


def test_the_drain_of_run_waits_however_late_the_first_record_comes(tmp_path):
    """Importing a framework may take longer than a drain lingers; without its keeper it ends."""
    with a_place(tmp_path) as place:
        command = [sys.executable, "-m", "otel_dltrace", "drain", "--while-open", "--linger", "0"]
        drain = subprocess.Popen(command, cwd=tmp_path, env=place.env(), stdin=subprocess.PIPE)
        try:
            place.run("")  # longer than no linger at all
            place.run(STEPS, OTEL_DLTRACE="1", OTEL_DLTRACE_DRAIN="off")
            place.wait_for_rings()
            drain.stdin.close()
            assert drain.wait(240) == 0
        finally:
            drain.kill()
        assert sum(map(len, place.spans())) == 3


SLOW_DRAIN = """
import select, sys
if sys.orig_argv[1:4] == ["-m", "otel_dltrace", "drain"]:
    select.select([0], [], [])  # until it is told to end, or left alone
"""


def test_run_loses_nothing_to_a_drain_that_is_up_after_the_program_has_ended(tmp_path):
    """A busy machine starts it late: it hears then that it is to end, and reads what is there."""
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "sitecustomize.py").write_text(SLOW_DRAIN)
    with a_place(tmp_path) as place:
        program = str(place.write(STEPS))
        done = place.command("run", "--no-report", "--", sys.executable, program, PYTHONPATH=str(tmp_path / "slow"))

        assert done.stderr.startswith("otel-dltrace: 3 spans recorded, none lost; in "), done.stderr
        assert sum(map(len, place.spans())) == 3


KILLS_ITS_DRAIN = """
import os, psutil, otel_dltrace
for step in range(6):
    with otel_dltrace.step():
        pass
    if step == 2:
        assert otel_dltrace.flush(100)
        children = psutil.Process(os.getppid()).children()
        (drain,) = [child for child in children if "--while-open" in child.cmdline()]
        drain.kill()
"""


def test_the_exit_code_of_run_is_the_programs_whatever_becomes_of_the_report(tmp_path):
    """Training that has failed, or not, is not told by a disk that takes no report."""
    with a_place(tmp_path) as place, Path("/dev/full").open("wb") as full:
        program = [sys.executable, str(place.write(f"{STEPS}\nraise SystemExit(7)"))]
        done = subprocess.run(
            [sys.executable, "-m", "otel_dltrace", "run", "--", *program],
            cwd=place.folder,
            env=place.env(),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=240,
            check=False,
        )
    assert (done.returncode, "no report: OSError: [Errno 28] No space left on device" in done.stderr) == (7, True)
    assert "3 spans recorded, none lost" in done.stderr


def test_run_reports_also_where_its_drain_is_killed(tmp_path):
    """Another one does its work, and is waited for."""
    with a_place(tmp_path) as place:
        done = place.command("run", "--", sys.executable, str(place.write(KILLS_ITS_DRAIN)))

        assert "otel-dltrace: 6 spans recorded, none lost; in " in done.stderr, done.stderr
        assert "steps 0-5, 6 done by all ranks; 6 spans" in " ".join(done.stdout.split())
        assert sum(map(len, place.spans())) == 6


def test_a_short_program_is_drained_by_a_thread(tmp_path):
    """What the thread needs at the interpreter's end has been imported before it."""
    with a_place(tmp_path) as place:
        done = place.run(STEPS, OTEL_DLTRACE="1", OTEL_DLTRACE_DRAIN="thread")

        assert (sum(map(len, place.spans())), list(place.rings.glob("*.ring"))) == (3, []), done.stderr


def test_without_docstrings_everything_works(tmp_path):
    """Some images set PYTHONOPTIMIZE=2: the help is shorter then, and the drain that a training starts is there."""
    with a_place(tmp_path) as place:
        traced = place.run(waiting(STEPS), OTEL_DLTRACE="1", PYTHONOPTIMIZE="2")
        assert "3 spans recorded, none lost" in traced.stderr
        told = [place.command(*args, PYTHONOPTIMIZE="2") for args in (["--help"], ["report", str(*place.runs())])]

    assert [(done.returncode, done.stderr) for done in told] == [(0, "")] * 2
    assert [name for name in COMMANDS if f"\n    {name}" not in told[0].stdout] == []
    assert "3 spans" in told[1].stdout


PRINTING = pytest.mark.parametrize(
    "arguments",
    [
        ["report", "RUN"],
        ["report", "RUN", "--json"],
        ["completion", "tcsh"],
        ["export", "RUN", "--to", "otlp"],
        ["collector", "--print", "gateway"],
    ],
    ids=" ".join,
)


def printed_to(stdout: int, arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command on the run ``RUN`` in *folder*, with *stdout*."""
    a_run(folder / "RUN", compacted=False)
    command = [sys.executable, "-m", "otel_dltrace", *arguments]
    settled = {"PYTHONUNBUFFERED", "COLUMNS", "LINES"}  # pytest's workers have a width of their own
    env = {name: value for name, value in os.environ.items() if name not in settled}
    return subprocess.run(
        command, cwd=folder, env=env, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=240, check=False
    )


def on_a_terminal(width: int, arguments: list[str], folder: Path) -> list[str]:
    """Return the lines, without colours, that a command writes to a terminal of *width* columns."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    with os.fdopen(ours, "rb", buffering=0) as screen, ThreadPoolExecutor() as pool:
        done = pool.submit(printed_to, its, arguments, folder)
        done.add_done_callback(lambda _: os.close(its))  # which ends what can be read
        shown = b"".join(iter(partial(_read, screen), b"")).decode()
    return re.sub(r"\x1b\[[0-9;]*m", "", shown).replace("\r\n", "\n").splitlines()


def _read(screen: io.FileIO) -> bytes:
    """Return what is there, nothing where the other side is closed."""
    try:
        return screen.read(4096) or b""
    except OSError:  # so Linux says it
        return b""


def test_sentences_fold_where_the_terminal_ends(tmp_path):
    """And tables do not: squeezed they would lose their columns."""
    narrow, wide = (on_a_terminal(width, ["report", "RUN"], tmp_path / str(width)) for width in (60, 200))

    assert " ".join(narrow).split() == " ".join(wide).split()
    assert [line for line in narrow if len(line.rstrip()) > 60 and line not in wide] == []
    assert len(wide) < len(narrow)


def test_what_the_doctor_finds_fits_the_terminal(tmp_path):
    """Its table has sentences alone, which may fold anywhere."""
    assert [line for line in on_a_terminal(60, ["doctor", "--quick"], tmp_path) if len(line) > 60] == []


@PRINTING
def test_a_reader_that_has_ended_is_no_fault(arguments, tmp_path):
    """`| head` leaves early: we end without a word, with the code of one that SIGPIPE ended."""
    read, write = os.pipe()
    os.close(read)
    done = printed_to(write, arguments, tmp_path)
    os.close(write)

    assert (done.returncode, done.stderr) == (141, "")


@PRINTING
def test_a_disk_that_is_full_is_one_sentence(arguments, tmp_path):
    """Of what is printed to a file that takes no more."""
    with Path("/dev/full").open("wb") as full:
        done = printed_to(full.fileno(), arguments, tmp_path)

    assert (done.returncode, done.stderr) == (
        2,
        "otel-dltrace: the output: No space left on device; make room for it\n",
    )


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EMFILE])
def test_a_disk_that_fails_is_one_sentence(number, tmp_path, monkeypatch, capsys):
    """Wherever it does: here, where a host's folder is listed that was there just now."""
    run, glob = a_run(tmp_path / "run", compacted=False), Path.glob
    host = min((run / "hosts").iterdir())

    def fail(folder: Path, pattern: str) -> Iterator[Path]:
        if folder == host:
            raise OSError(number, os.strerror(number), str(folder))
        return glob(folder, pattern)

    monkeypatch.setattr(Path, "glob", fail)
    code = main(["report", str(run)])

    assert code == 2
    assert capsys.readouterr().err == f"otel-dltrace: {host}: {os.strerror(number)}\n"


@pytest.mark.parametrize(
    ("arguments", "code", "printed"),
    [
        pytest.param(["report", "nowhere"], 2, "", id="an error"),
        pytest.param(["export", "RUN", "--to", "otlp", "-o", "-"], 0, '{"resourceSpans"', id="a note"),
    ],
)
def test_without_standard_error_nothing_of_it_is_on_standard_output(arguments, code, printed, tmp_path):
    """Another program may read that."""
    a_run(tmp_path / "RUN", compacted=False)
    command = ["sh", "-c", 'exec "$@" 2>&-', "sh", sys.executable, "-m", "otel_dltrace", *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)

    assert (done.returncode, {line[:16] for line in done.stdout.splitlines()}) == (code, {printed} - {""})


@pytest.mark.parametrize("compacted", [True, False], ids=["Parquet", "segments"])
def test_a_path_that_no_encoding_has_is_read_and_printed(compacted, tmp_path):
    """A run may have been moved there; whatever standard output takes."""
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/d\xff"))
    folder.mkdir()
    a_run(tmp_path / "RUN", compacted=compacted).rename(folder / "RUN")
    for arguments in (["report"], ["export", "--to", "chrome", "-o", str(folder / "y.json")]):
        command = [sys.executable, "-m", "otel_dltrace", *arguments, str(folder / "RUN")]
        env = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
        done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, timeout=240, check=False)

        assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(rb"d\udcff/y.json: ")


def test_what_an_encoding_has_not_is_shown_all_the_same(tmp_path):
    """As Python shows it in errors."""
    command = [sys.executable, "-m", "otel_dltrace", "collector", "--print", "gateway"]
    texts = [
        subprocess.run(
            command, env={**os.environ, "PYTHONIOENCODING": encoding}, capture_output=True, check=True
        ).stdout
        for encoding in ("ascii", "utf-8")
    ]

    assert texts[0] == texts[1].decode().encode("ascii", "backslashreplace")


@pytest.mark.parametrize("redirected", ["--linger 0 >&-", "--linger 0 --while-open <&-"])
def test_a_drain_needs_neither_standard_input_nor_output(redirected, tmp_path):
    """Nobody reads then, or nobody keeps it; it ends, and leaves nothing."""
    with a_place(tmp_path) as place:
        command = ["sh", "-c", f"exec {sys.executable} -m otel_dltrace drain {redirected}"]
        done = subprocess.run(
            command, cwd=tmp_path, env=place.env(), stderr=subprocess.PIPE, text=True, timeout=240, check=False
        )

        assert (done.returncode, done.stderr, list(place.rings.iterdir())) == (0, "", [])


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(["run", "--no-report", "--", "true"], id="run"),
        pytest.param(["pushpull", "launch", "--servers", "0", "--", "true"], id="pushpull"),
    ],
)
def test_what_starts_a_program_loads_neither_report_nor_drain(place, command):
    """The program starts at once, and what waits for it is small."""
    text = f"""
        import sys
        from otel_dltrace.cli.main import main
        code = main({command})
        print(code, [name for name in ("numpy", "pyarrow", "rich", "requests", "grpc") if name in sys.modules])
    """
    done = place.run(text, OTEL_DLTRACE="1", OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:9")

    assert (done.stdout, done.stderr) == ("0 []\n", "otel-dltrace: nothing was traced\n")


def test_where_nothing_waits_recover_loads_nothing_that_sends(place):
    """Most often no collector was away."""
    text = """
        import sys
        from otel_dltrace.cli.main import main
        code = main(["recover"])
        print(code, [name for name in ("requests", "grpc", "opentelemetry") if name in sys.modules])
    """
    assert place.run(text).stdout.splitlines()[-1] == "0 []"


def test_progress_is_shown_to_a_terminal_with_a_count():
    """What a path says is shown as it is, were it markup."""
    theirs, ours = pty.openpty()
    text = "from otel_dltrace.cli.progress import progress\nwith progress('reads [red]a') as count: count(1234567)"
    subprocess.run([sys.executable, "-c", text], stderr=ours, check=True, env={**os.environ, "TERM": "xterm"})
    os.close(ours)
    shown = b""
    with os.fdopen(theirs, "rb", buffering=0) as terminal, suppress(OSError):  # the other side is closed: no more comes
        while piece := terminal.read(4096):
            shown += piece
    assert b"reads [red]a 1,234,567" in shown
