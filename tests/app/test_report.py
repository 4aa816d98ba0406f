"""``autotune report`` reads the files of ``autotune probe``, and reports unreadable ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import autotune
from autotune.app.report import read_result, report, write_result
from autotune.core.documents.result import BaseFile, Result, Timelines
from autotune.core.files.codec import encode
from autotune.emit.document import json_text
from autotune.errors import InputError, UnwrittenError
from autotune.units import MIB
from tests.app.test_outcome import BASELINE, WINNER, result
from tests.reporting.examples import a_result, a_timeline, traced
from tests.reporting.pages import html, markdown
from tests.reporting.plans import a_plan


def lying_in(folder: Path, result: Result) -> Result:
    """Return a result as it is read from the folder of its bundle."""
    return replace(result.written, output_directory=str(folder))


@pytest.fixture
def written(tmp_path: Path) -> Path:
    (tmp_path / "result.json").write_text(json_text(a_result()), encoding="utf-8")
    return tmp_path


def test_a_result_has_the_lengths_of_rows_and_what_the_recommendation_or_shorter_ones_keep() -> None:
    chosen, nothing = result(BASELINE, WINNER, winner=WINNER), result(BASELINE)
    assert sum(part.rows for part in nothing.lengths) == 100
    assert chosen.limit is not None
    assert (chosen.limit.max_length, chosen.limit.coverage, chosen.shorter) == (2000, 1.0, ())
    assert nothing.limit is None
    assert [limit.max_length for limit in nothing.shorter] == [1024, 1000, 500]


def test_a_page_of_an_earlier_version_s_result_has_none_of_its_secrets(tmp_path: Path) -> None:
    base = BaseFile("a.yaml", diff="-hub_token: planted0secret\n+seed: 1\n", args={"hub_token": "planted0secret"})
    (tmp_path / "result.json").write_text(json_text(replace(a_result(), base=base)), encoding="utf-8")
    page = report(tmp_path).read_text(encoding="utf-8")
    assert "planted0secret" not in page
    assert "-hub_token: ***" in page


def test_the_page_lies_beside_the_result_and_is_that_of_the_result(written: Path) -> None:
    file = report(written)
    assert file == written / "report.html"
    assert file.read_text(encoding="utf-8") == html(lying_in(written, a_result()))


def test_the_file_itself_can_be_named_and_so_can_the_page(written: Path, tmp_path: Path) -> None:
    file = report(written / "result.json", output=tmp_path / "further" / "page.md", format="markdown")
    assert file.read_text(encoding="utf-8") == markdown(lying_in(written, a_result()))


def test_a_page_that_cannot_be_written_is_a_note_on_a_result_that_is_kept(tmp_path: Path) -> None:
    (tmp_path / "report.html" / "in the way").mkdir(parents=True)
    noted = write_result(a_result(), tmp_path).notes[-1]
    assert noted == f"There is no page: {tmp_path / 'report.html'} cannot be written: Is a directory."
    assert read_result(tmp_path / "result.json") == lying_in(tmp_path, a_result())


def test_a_result_whose_bundle_cannot_be_written_is_not_lost(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UnwrittenError, match="Choose another directory with --output") as caught:
        write_result(a_result(), tmp_path / "file")
    assert caught.value.document == a_result()


def test_moments_of_memory_lie_in_a_file_beside_the_result_from_where_the_page_has_them(tmp_path: Path) -> None:
    whole = traced()
    write_result(whole, tmp_path)
    document = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    for one in (document["recommended"], document["baseline"]):
        assert (one["timeline"]["levels"], one["timeline"]["marks"]) == ({}, [])
        assert one["timeline"]["breakdown"]
    assert read_result(tmp_path / "result.json").timelines == whole.timelines
    with_moments = report(tmp_path).read_text(encoding="utf-8")
    assert 'id="step_recommended"' in with_moments
    (tmp_path / "timeline.json").unlink()
    assert 'id="step_recommended"' not in report(tmp_path).read_text(encoding="utf-8")
    (tmp_path / "result.json").write_text(json.dumps(encode(whole)), encoding="utf-8")
    assert report(tmp_path).read_text(encoding="utf-8") == with_moments


def test_moments_of_another_result_are_not_taken(tmp_path: Path) -> None:
    write_result(traced(), tmp_path)
    other = json_text(Timelines(a_timeline(MIB), a_timeline(MIB)))
    (tmp_path / "timeline.json").write_text(other, encoding="utf-8")
    assert read_result(tmp_path / "result.json") == lying_in(tmp_path, traced())
    write_result(a_result(), tmp_path)
    assert not (tmp_path / "timeline.json").exists()


def test_where_there_is_no_result_that_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"There is no result: .*result.json cannot be read"):
        report(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON: .*Run `autotune probe` again with --resume, which writes it anew"),
        ("[]", "is not a result of `autotune probe`"),
        ('{"schema": 1, "estimates": []}', "is a plan, and `autotune report` reads the results of probes"),
        ('{"schema": 1, "basis": "planned"}', "is a plan, and `autotune report` reads the results of probes"),
        ('{"schema": 7}', "has schema 7, not 1"),
        ('{"schema": 1}', "is damaged, or was written by another version: Object missing required field"),
    ],
)
def test_what_is_no_result_is_told_apart(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=message):
        report(tmp_path)


def test_the_folder_of_a_plan_is_told_apart_from_one_without_a_result(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"schema": 1, "basis": "planned"}', encoding="utf-8")
    with pytest.raises(InputError, match=r"plan.json is a plan, .*`autotune plan --html FILE` writes"):
        report(tmp_path)
    (tmp_path / "result.json").write_text(json_text(a_result()), encoding="utf-8")
    assert report(tmp_path).exists()


def test_a_result_of_a_later_version_with_more_in_it_is_read(written: Path) -> None:
    document = json.loads((written / "result.json").read_text(encoding="utf-8"))
    (written / "result.json").write_text(json.dumps({**document, "new": 1}), encoding="utf-8")
    assert report(written).exists()


def test_a_plan_has_the_same_kind_of_page(tmp_path: Path) -> None:
    file = report(a_plan(), output=tmp_path / "plan.html")
    assert file.read_text(encoding="utf-8") == html(a_plan())
    with pytest.raises(InputError, match="A plan has no directory"):
        report(a_plan())


def test_another_format_is_refused(written: Path) -> None:
    with pytest.raises(InputError, match=r"format cannot be 'pdf'\. It is html or markdown"):
        report(written, format="pdf")  # type: ignore[arg-type]


def test_a_page_that_cannot_be_written_is_told(written: Path) -> None:
    (written / "file").write_text("", encoding="utf-8")
    with pytest.raises(InputError):
        report(written, output=written / "file" / "page.html")


def test_no_package_has_the_name_of_a_public_function() -> None:
    # Importing a package sets its name in the one above, where it would take the function's place.
    root = Path(autotune.__file__).parent
    assert [name for name in autotune.__all__ if (root / name).exists() or (root / f"{name}.py").exists()] == []


def test_a_result_whose_directory_was_moved_names_the_new_one(written: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    moved.mkdir()
    (written / "result.json").rename(moved / "result.json")
    assert read_result(moved / "result.json").output_directory == str(moved)
    assert f"{moved}/config.yaml" in report(moved).read_text(encoding="utf-8")


def test_a_page_is_written_to_the_home_that_its_path_names(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert report(written, output="~/page.html") == tmp_path / "page.html"
    assert (tmp_path / "page.html").exists()
    with pytest.raises(InputError, match="home directory in"):
        report(written, output="~nobody-of-this-name/page.html")
