"""The command as a process: its response time, its imports, and a closed pipe."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys

import pytest

AUTOTUNE = (sys.executable, "-m", "autotune")
HEAVY = ("torch", "trl", "transformers", "optuna", "rich", "yaml", "numpy", "pyarrow", "datasets")


def processor_seconds(*words: str) -> float:
    """Return the processor time of the cheapest of some runs of Python."""
    # What is installed has its bytecode; the first run writes it where it lies.
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}

    def seconds() -> float:
        with subprocess.Popen([sys.executable, *words], stdout=subprocess.DEVNULL, env=variables) as process:
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0
        return used.ru_utime + used.ru_stime

    return min(seconds() for _ in range(6))


def with_an_api(words: list[str]) -> list[str]:
    """Return the command with functions in the place of the API's, which need torch and minutes."""
    script = (
        "import sys, types\n"
        "from autotune.core.documents.length_report import length_report\n"
        "from tests.reporting.examples import a_result, a_workload\n"
        "probe = sys.modules['autotune.api.probe'] = types.ModuleType('autotune.api.probe')\n"
        "probe.probe = lambda **options: types.SimpleNamespace(document=a_result(notes=('Größe',)))\n"
        "lengths = sys.modules['autotune.app.lengths'] = types.ModuleType('autotune.app.lengths')\n"
        "lengths.lengths = lambda **options: length_report(a_workload())\n"
        "from autotune.cli.boundary import run\n"
        f"sys.exit(run(['autotune', *{words!r}]))"
    )
    return [sys.executable, "-c", script]


@pytest.mark.parametrize("words", [("--help",), ("probe", "--help"), ("--version",)])
def test_help_takes_under_0_3_seconds_of_a_processor_that_imports_asyncio_in_0_1(words: tuple[str, ...]) -> None:
    reference = processor_seconds("-c", "import asyncio, http.client, unittest.mock")
    # A processor that is slower, or that others share, takes longer for both.
    assert processor_seconds("-m", "autotune", *words) < 3 * max(reference, 0.1)


@pytest.mark.parametrize("words", [("--help",), ("probe", "--help"), ("--version",), ("probe", "M")])
def test_help_and_usage_errors_load_nothing_heavy(words: tuple[str, ...]) -> None:
    script = (
        f"import sys; sys.argv = ['autotune', *{words!r}]\n"
        "import autotune.cli\n"
        "try: autotune.cli.main()\n"
        "except SystemExit: pass\n"
        f"print('LOADED', [name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "LOADED []"


@pytest.mark.parametrize("words", [["lengths", "M", "D"], ["lengths", "M", "D", "--json"]])
def test_a_reader_that_goes_away_is_no_error_and_not_nothing_fits(words: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(with_an_api(words), check=False, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


# Streams are opened before the words are read. The last two write to the one that is closed.
@pytest.mark.parametrize(
    ("words", "code", "closed"),
    [
        *((["lengths", "M", "D"], 0, closed) for closed in ("<&-", ">&-", "2>&-", "<&- >&- 2>&-")),
        (["probe", "M", "D", "--json"], 0, ">&-"),
        (["probe"], 2, "2>&-"),
    ],
)
def test_a_closed_stream_changes_no_exit_code(words: list[str], code: int, closed: str) -> None:
    command = ["bash", "-c", f'exec "$@" {closed}', "-", *with_an_api(words)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr


def test_an_incomplete_installation_is_an_error_and_not_nothing_fits() -> None:
    code = "import sys; sys.modules['autotune.cli.parser'] = None; from autotune.cli import main; sys.exit(main())"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith("autotune: import of autotune.cli.parser halted")
    assert ended.stderr.count("\n") == 1


def test_an_error_is_coloured_only_in_a_terminal() -> None:
    ours, theirs = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    done = subprocess.run([*AUTOTUNE, "probe"], check=False, stderr=theirs, env=environment)
    os.close(theirs)
    shown = os.read(ours, 4096)
    os.close(ours)
    assert done.returncode == 2
    assert shown.startswith(b"\x1b[1;31mautotune:\x1b[0m ")
    piped = subprocess.run([*AUTOTUNE, "probe"], check=False, capture_output=True, env=environment)
    assert piped.stderr.startswith(b"autotune: The following")


def test_an_ascii_terminal_is_no_reason_to_fail() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(with_an_api(["probe", "M", "D"]), check=False, capture_output=True, env=environment)
    assert (done.returncode, b"2.30x (95 % CI 2.11 to 2.51) the speed" in done.stdout) == (0, True), done.stderr
    shown = done.stdout.decode("ascii")
    assert "@ recommended   o TRL's default" in shown
    assert "####" in shown
    assert "?" not in shown.replace("Gr??e", "")


def test_a_document_is_utf8_whatever_the_locale() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    words = ["probe", "M", "D", "--json"]
    done = subprocess.run(with_an_api(words), check=True, capture_output=True, env=environment)
    assert "Größe" in json.loads(done.stdout)["notes"]
