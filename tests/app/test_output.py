"""The output directory: named after the run, created if missing, and refused if it has other files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from sqlalchemy import make_url

from autotune.app.output import default_output, open_output
from autotune.core.candidate import Candidate
from autotune.core.measurement import Schedule
from autotune.errors import InputError
from autotune.study.problem import ComparisonTurn, ProbeRun, Purpose


@pytest.mark.parametrize(
    ("model", "dataset", "name"),
    [
        ("Qwen/Qwen2.5-0.5B", "data.jsonl", "autotune-Qwen2.5-0.5B-data"),
        ("./models/small/config.json", "trl-lib/Capybara", "autotune-small-Capybara"),
        ("model", "rows/data.jsonl.gz", "autotune-model-data"),
        ("models/a b", "folder/with rows/", "autotune-a-b-with-rows"),
        # What stands after a dot is no ending of a file.
        ("meta-llama/Llama-3.2-1B", "rajpurkar/squad_v1.1", "autotune-Llama-3.2-1B-squad_v1.1"),
        ("model", "rows/answers.v2/", "autotune-model-answers.v2"),
        ("model", "ROWS.JSONL", "autotune-model-ROWS"),
    ],
)
def test_a_directory_is_named_after_model_and_dataset(model: str, dataset: str, name: str) -> None:
    assert default_output(model, dataset) == name


def test_a_missing_directory_is_made_and_found_again(tmp_path: Path) -> None:
    made = open_output(tmp_path / "a" / "b")
    made.workload.mkdir()
    # Of a run that was killed before its first file was whole.
    (made.directory / ".run.json.0123.part").touch()
    assert open_output(made.directory) == made


def test_a_directory_with_somebody_s_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(InputError, match="holds other files"):
        open_output(tmp_path)


@pytest.mark.parametrize("text", ["{}", '{"budget_bytes": null}', "[]", "no JSON"])
@pytest.mark.parametrize("others", [(), ("train.py",)])
def test_a_run_json_of_somebody_else_makes_no_directory_autotune_s(
    text: str, others: tuple[str, ...], tmp_path: Path
) -> None:
    for name in ("run.json", *others):
        (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match="holds other files"):
        open_output(tmp_path)
    assert (tmp_path / "run.json").read_text() == text


def test_a_run_s_own_directory_may_hold_a_bundle(tmp_path: Path) -> None:
    open_output(tmp_path).remember_budget(5)
    (tmp_path / "config.yaml").write_text("")
    assert open_output(tmp_path).remembered_budget() == 5


def test_a_second_run_in_one_directory_is_told_how_to_search_together(tmp_path: Path) -> None:
    with open_output(tmp_path).locked():
        with pytest.raises(InputError, match="Another run writes to") as caught, open_output(tmp_path).locked():
            pass
        assert "--storage" in caught.value.hint
    with open_output(tmp_path).locked():
        assert open_output(tmp_path).directory == tmp_path


@pytest.mark.parametrize("left", ["run.json", "workload", "study.db", "probes"])
@pytest.mark.parametrize("before", [False, True])
def test_a_run_that_ends_before_it_probes_leaves_no_directory_that_it_made(
    left: str, before: bool, tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    if before:
        directory.mkdir()
    made = open_output(directory)
    (directory / left).mkdir()
    with pytest.raises(InputError, match="no such model"), made.locked():
        raise InputError("There is no such model.")
    assert directory.exists() == (before or left in ("study.db", "probes"))


def test_a_lock_that_is_a_link_is_refused_and_what_it_names_stays(tmp_path: Path) -> None:
    mine = tmp_path / "thesis.tex"
    mine.write_text("words")
    made = open_output(tmp_path / "run")
    (made.directory / ".lock").symlink_to(mine)
    with pytest.raises(InputError, match=r"\.lock cannot be opened: it is a symbolic link"), made.locked():
        pass
    assert mine.read_text() == "words"


def test_a_lock_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    made = open_output(tmp_path)
    (tmp_path / ".lock").mkdir()  # another user's file is writable for root, as whom tests may run
    with pytest.raises(InputError, match=r"\.lock cannot be opened: Is a directory"), made.locked():
        pass


@pytest.mark.parametrize("name", ["x" * 300, os.fsdecode(b"caf\xe9")], ids=["too long", "not UTF-8"])
def test_a_name_that_no_directory_can_have_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"File name too long|not UTF-8"):
        open_output(tmp_path / name)


def test_a_directory_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"file cannot be used: it is not a directory\. Choose another --output"):
        open_output(tmp_path / "file")


def test_a_broken_memory_of_a_run_is_as_good_as_none(tmp_path: Path) -> None:
    made = open_output(tmp_path)
    (tmp_path / "run.json").write_text("{")
    assert made.remembered_budget() is None


def test_no_probe_starts_in_a_directory_that_was_removed(tmp_path: Path) -> None:
    made = open_output(tmp_path / "out")
    made.directory.rmdir()
    with pytest.raises(InputError, match="out was removed during the search"):
        made.probe(ProbeRun(1, Candidate({}), Purpose.SEARCH, Schedule()))


def test_each_run_has_a_folder_of_its_own(tmp_path: Path) -> None:
    candidate, schedule = Candidate({}), Schedule()
    turns = [ComparisonTurn(winner, number, pair) for winner in (7, 9) for pair in (0, 1) for number in (winner, 0)]
    runs = [
        *(ProbeRun(number, candidate, Purpose.SEARCH, schedule) for number in (0, 7, 9)),
        *(ProbeRun(number, candidate, Purpose.CONFIRMATION, schedule) for number in (7, 9)),
        *(ProbeRun(turn.number, candidate, Purpose.COMPARISON, schedule, turn) for turn in turns),
        ProbeRun(0, candidate, Purpose.COMPARISON, schedule, ComparisonTurn(0, 0, 0)),
    ]
    folders = [open_output(tmp_path).probe(run).relative_to(tmp_path / "probes").as_posix() for run in runs]
    assert len(set(folders)) == len(runs)
    assert folders[:7] == [
        "0",
        "7",
        "9",
        "7-confirmation",
        "9-confirmation",
        "7-comparison-1",
        "7-comparison-1-baseline",
    ]


@pytest.mark.parametrize("name", ["a?b", "a%20b"])
def test_a_directory_in_whose_place_sqlite_would_write_to_another_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="The URL of a study cannot have the "):
        open_output(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_the_study_lies_in_the_directory_whatever_other_marks_its_name_has(tmp_path: Path) -> None:
    made = open_output(tmp_path / "a#b c:d@e+f&g")
    assert make_url(made.study_url).database == str(made.directory / "study.db")


def test_a_run_leaves_one_copy_of_the_rows(tmp_path: Path) -> None:
    output = open_output(tmp_path / "found")
    rows = output.workload / "tokenized"
    rows.mkdir(parents=True)
    with output.locked():
        for name in ("data-00000-of-00001.arrow", "cache-d57fa78157cd3511.arrow"):
            (rows / name).touch()
    assert [file.name for file in rows.iterdir()] == ["data-00000-of-00001.arrow"]
