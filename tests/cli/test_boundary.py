"""Every end of a command has an exit code, one message, and a traceback only on request."""

from __future__ import annotations

import errno
import json
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from autotune.cli.boundary import run
from autotune.cli.programs import resume_command
from autotune.core.documents.catalogue import CatalogueRow
from autotune.core.documents.length_report import length_report
from autotune.core.documents.result import Result
from autotune.core.events import StageStarted
from autotune.core.files.codec import decode
from autotune.core.status import Ending, RunStatus
from autotune.errors import InputError, InterruptedSearchError
from autotune.reporting.words import short_path
from tests.reporting.examples import a_result, a_workload, interrupted, nothing_fits
from tests.small import write_rows, write_small_model

PROBE = ("autotune", "probe", "M", "D")
FAILED = replace(nothing_fits(), status=RunStatus.FAILED)
UNDECIDED = replace(interrupted(), status=RunStatus.UNDECIDED, ended=Ending.TIME)


class Outcome:
    """What ``autotune.probe`` returns, as far as the command line looks at it."""

    def __init__(self, document: Result) -> None:
        self.document = document


def finding(result: Result) -> Callable[..., Outcome]:
    """Return a probe function that reports one event and returns a result."""

    def probe(listener: Callable[[StageStarted], None], **options: object) -> Outcome:
        listener(StageStarted("Tokenising"))
        return Outcome(result)

    return probe


def raising(error: BaseException) -> Callable[..., Any]:
    """Return a function that fails."""

    def function(**options: object) -> None:
        raise error

    return function


@pytest.mark.parametrize(
    ("result", "code"), [(a_result(), 0), (nothing_fits(), 1), (FAILED, 1), (UNDECIDED, 3), (interrupted(), 130)]
)
def test_the_exit_code_tells_how_the_run_ended(api: Callable[..., None], result: Result, code: int) -> None:
    api(probe=finding(result))
    assert run(PROBE) == code


@pytest.mark.parametrize("result", [a_result(), nothing_fits(), UNDECIDED, interrupted()])
def test_json_is_all_that_is_on_stdout(
    api: Callable[..., None], result: Result, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    api(probe=finding(result))
    run([*PROBE, "--json"])
    out, err = capfdbinary.readouterr()
    assert decode(Result, json.loads(out)) == result
    assert b"Tokenising" in err


def test_without_json_the_report_is_on_stdout_and_progress_is_not(
    api: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    api(probe=finding(a_result()))
    run(PROBE)
    out, err = capsys.readouterr()
    assert ("the speed of TRL's default" in out, "Tokenising" in out) == (True, False)
    assert ("the speed of TRL's default" in err, "Tokenising" in err) == (False, True)


def test_choices_reach_the_api_in_its_own_types(api: Callable[..., None]) -> None:
    given: dict[str, object] = {}

    def probe(**options: object) -> Outcome:
        given.update(options)
        return Outcome(a_result())

    api(probe=probe)
    run([*PROBE, "--allow", "lora,precision", "--fix", "packing=bfd", "--exclude", "liger", "--trials", "3"])
    del given["listener"]
    assert given == {
        "model": "M",
        "dataset": "D",
        "allow": ["lora", "precision"],
        "fix": {"packing": "bfd"},
        "exclude": ["liger"],
        "trials": 3,
    }


def test_bad_input_is_one_line_with_what_to_do(api: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    api(probe=raising(InputError("M has no config.json.", hint="Name a model directory.")))
    assert run(PROBE) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "autotune: M has no config.json. Name a model directory."


def test_usage_errors_end_as_bad_input_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["autotune", "probe", "M"]) == 2
    assert capsys.readouterr().err.startswith("autotune: The following arguments are required: DATASET.")


def test_a_traceback_comes_only_with_debug(api: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    api(probe=raising(InputError("No.")))
    run(PROBE)
    assert "Traceback" not in capsys.readouterr().err
    assert run([*PROBE, "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "/x/study.db"),
            "/x/study.db cannot be written: No space left on device. Free some space.",
        ),
        (
            FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']"),
            "No usable temporary directory found in ['/tmp']. Set TMPDIR to a directory that can be written.",
        ),
        (
            OSError(errno.EMFILE, "Too many open files"),
            "Too many open files. Raise the limit of open files (ulimit -n).",
        ),
    ],
    ids=["disk", "temporary folder", "open files"],
)
def test_what_the_system_lacks_is_one_line(
    api: Callable[..., None], error: Exception, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    api(probe=raising(error))
    assert run(PROBE) == 2
    err = capsys.readouterr().err
    assert err.splitlines()[-1].endswith(said)
    assert "Traceback" not in err


def test_a_working_directory_that_was_removed_is_one_line(
    api: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert run(PROBE) == 2
    assert "The dataset 'D' cannot be accessed: the working directory was removed." in capsys.readouterr().err
    api(probe=lambda **_: Path("here").absolute())
    assert run(PROBE) == 2
    assert capsys.readouterr().err == "autotune: The working directory was removed. Go to another directory.\n"
    assert short_path(tmp_path / "bundle") == str(tmp_path / "bundle")


def test_a_short_path_is_no_option_of_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert [short_path(tmp_path / name) for name in ("-out", "out")] == ["./-out", "out"]


def test_a_file_of_autotune_s_own_that_is_missing_is_a_bug(api: Callable[..., None]) -> None:
    api(probe=raising(FileNotFoundError(errno.ENOENT, "No such file or directory", "kernels.yaml")))
    assert run(PROBE) == 70


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"),
        RuntimeError("can't start new thread"),
    ],
    ids=repr,
)
def test_memory_that_ran_out_is_one_line(
    api: Callable[..., None], error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    api(probe=raising(error))
    assert run(PROBE) == 2
    err = capsys.readouterr().err
    assert "ran out of memory" in err
    assert "--resume" in err
    assert "Traceback" not in err


def test_a_bug_is_not_told_as_nothing_fits(api: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    api(probe=raising(ZeroDivisionError("oh")))
    assert run(PROBE) == 70
    err = capsys.readouterr().err
    assert "ZeroDivisionError: oh" in err
    assert "bug of autotune" in err


@pytest.mark.parametrize("when", ["while it runs", "while it is imported"])
def test_an_interruption_prints_the_command_that_goes_on(
    api: Callable[..., None], when: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if when == "while it runs":
        api(probe=raising(KeyboardInterrupt()))
    else:
        # It may have been imported by another test; names such as __file__ are asked for by whoever walks all modules.
        lazy = ModuleType("autotune.api.probe")
        vars(lazy)["__getattr__"] = lambda name: raising(
            KeyboardInterrupt() if name == "probe" else AttributeError(name)
        )()
        monkeypatch.setitem(sys.modules, lazy.__name__, lazy)
    assert run([*PROBE, "--fix", "lora=none", "--output", "my run"]) == 130
    err = capsys.readouterr().err
    assert "probe M D --fix lora=none --output 'my run' --resume" in err
    assert "Traceback" not in err


def test_an_interrupted_result_prints_the_command_too(
    api: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    api(probe=raising(InterruptedSearchError("Ctrl-C", interrupted())))
    assert run(PROBE) == 130
    out, err = capsys.readouterr()
    assert "Interrupted before any candidate" in out
    assert err.rstrip().endswith("probe M D --resume")


@pytest.mark.parametrize(("result", "code"), [(a_result(), 0), (nothing_fits(), 1)])
def test_an_interruption_after_the_search_ends_quietly_with_the_code_of_the_result(
    api: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    result: Result,
    code: int,
) -> None:
    def interrupted_show(*shown: object, **options: object) -> None:
        signal.raise_signal(signal.SIGTERM)

    api(probe=finding(result))
    monkeypatch.setattr("autotune.reporting.terminal.show", interrupted_show)
    assert run(PROBE) == code
    assert "Interrupted" not in capsys.readouterr().err


def test_an_interruption_leaves_the_signal_as_it_was(api: Callable[..., None]) -> None:
    before = signal.getsignal(signal.SIGINT)
    api(probe=raising(KeyboardInterrupt()))
    run(PROBE)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_command_with_nothing_to_resume_offers_nothing(
    api: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    api(lengths=raising(KeyboardInterrupt()))
    assert run(["autotune", "lengths", "M", "D"]) == 130
    assert capsys.readouterr().err == "autotune: Interrupted.\n"


@pytest.mark.parametrize(
    ("words", "resumed"), [("M D --resume", "M D --resume"), ("--seed 1 -- -M D", "--seed 1 --resume -- -M D")]
)
def test_a_run_is_resumed_by_the_same_command_with_one_option_more(words: str, resumed: str) -> None:
    command = resume_command(["/x/__main__.py", "probe", *words.split()])
    assert command is not None
    assert command.endswith(f"-m autotune probe {resumed}")
    assert command.startswith(sys.executable)


def test_lengths_and_techniques_write_documents(
    api: Callable[..., None], capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    report = length_report(a_workload())
    row = CatalogueRow("packing", "Fills rows.", "", "", ("args.packing",), True, "none", ())
    api(lengths=lambda **_: report, catalogue=lambda **_: (row,))
    assert run(["autotune", "lengths", "M", "D", "--json"]) == 0
    assert decode(type(report), json.loads(capfdbinary.readouterr().out)) == report
    assert run(["autotune", "techniques", "--json"]) == 0
    assert [decode(CatalogueRow, each) for each in json.loads(capfdbinary.readouterr().out)] == [row]


STORAGE = "postgresql://me:planted0secret@host/name?sslpassword=planted1secret"


def test_no_way_to_end_tells_a_secret_of_the_command(
    api: Callable[..., None], capfd: pytest.CaptureFixture[str]
) -> None:
    quoted = "bad address: planted0secret, planted1secret"
    ends: list[BaseException] = [KeyboardInterrupt(), InputError(quoted), ValueError(quoted), MemoryError(quoted)]
    ends.append(OSError(errno.ENOSPC, quoted, STORAGE))
    for error in ends:
        api(probe=raising(error))
        run([*PROBE, "--storage", STORAGE, "--debug"])
        run([*PROBE, f"--storage={STORAGE}"])
    run(["autotune", "probe", "M", "D", STORAGE])
    run(["autotune", "probe", "M", "D", "--nothing", STORAGE])
    out, err = capfd.readouterr()
    assert "planted" not in out + err
    assert "me:***@host/name?sslpassword=***' --debug --resume" in err
    assert "Replace *** with the secret" in err


def test_a_name_that_is_too_long_for_a_file_is_told_in_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(("autotune", "report", "x" * 300)) == 2
    assert capsys.readouterr().err == (
        f"autotune: There is no result: {'x' * 300} cannot be read (File name too long). "
        "Give the directory that `autotune probe` wrote.\n"
    )


@pytest.mark.parametrize(
    "words",
    [
        ("probe", "MODEL", "DATA", "--output", "-"),
        ("plan", "MODEL", "DATA", "--gpu", "T4", "--output", "-"),
        ("plan", "MODEL", "DATA", "--gpu", "T4", "--html", "-"),
        ("report", "runs", "--output", "-"),
    ],
)
def test_a_hyphen_is_refused_as_the_name_of_a_file(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    model, rows = (
        write_small_model(tmp_path / "model", weights=False),
        write_rows(tmp_path / "rows.jsonl", [{"text": "a"}]),
    )
    named = {"MODEL": str(model), "DATA": str(rows)}
    assert run(("autotune", *(named.get(word, word) for word in words))) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.splitlines()[-1].startswith("autotune: '-' is not the name of a file or directory. Give a name")
    assert not (tmp_path / "-").exists()


def test_an_empty_name_of_a_file_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(("autotune", "check", "")) == 2
    assert "The name of a file or directory is empty." in capsys.readouterr().out
