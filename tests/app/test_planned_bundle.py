"""``autotune.plan`` writes the bundle of its recommendation, and ``autotune.check`` reads it."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from datasets import load_dataset

import autotune
from autotune.app.planned_bundle import bundle_folder
from autotune.core.candidate import Choice
from autotune.core.documents.bundle import Basis
from autotune.core.documents.estimate import Plan
from autotune.core.documents.verdict import Outcome
from autotune.core.events import Event, StageStarted
from autotune.core.machine import Hardware
from autotune.core.workload import DatasetSource
from autotune.emit.bundle import write_planned_bundle
from autotune.emit.figures import planned as handed_over
from autotune.errors import InputError, UnwrittenError
from autotune.units import GIB
from tests.emit.planned_bundles import a_bundle
from tests.planning.stand_in import LosingTracer
from tests.reporting.examples import a_workload
from tests.small import write_rows

ONE_WAY: dict[str, Choice] = {
    "activation_offloading": "off", "allocator": "default", "attention": "sdpa", "gradient_checkpointing": "off",
    "liger": "off", "optimizer": "adamw_torch", "packing": "none", "pad_to_multiple_of": "none", "padding_free": "on",
    "per_device_train_batch_size": 2, "precision": "float32", "torch_empty_cache_steps": "off",
}  # fmt: skip
CUT = 12
ROWS = DatasetSource("rows", "json", "rows.jsonl")
pytestmark = pytest.mark.usefixtures("traces_by_formula")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("planned")


@pytest.fixture(scope="module")
def rows(folder: Path) -> str:
    return str(write_rows(folder / "rows.jsonl", [{"text": "the speed of a token " * (1 + i % 3)} for i in range(16)]))


@pytest.fixture(scope="module")
def planned(model: str, rows: str, folder: Path) -> Plan:
    """A plan of rows that have to be cut before the trainer sees them."""
    output = folder / "bundle"
    return autotune.plan(model, rows, gpu="RTX4090", fix=ONE_WAY, max_length=CUT, output=output)


def names(folder: Path) -> list[str]:
    """Return the names of the files in a folder."""
    return sorted(file.name for file in folder.iterdir())


def test_the_fastest_that_fits_is_written(planned: Plan, folder: Path) -> None:
    bundle, fastest = planned.bundle, planned.fastest
    assert bundle is not None
    assert fastest is not None
    assert fastest.memory is not None
    assert (bundle.candidate, bundle.needed_bytes) == (fastest.candidate, fastest.memory.device_bytes)
    assert bundle.host_bytes == fastest.memory.machine_bytes
    assert (bundle.basis, bundle.directory) == (Basis.PLANNED, str(folder / "bundle"))
    assert names(folder / "bundle") == ["config.yaml", "plan.json", "rows.parquet", "train.py"]
    assert planned.unwritten == ""


def test_a_bundle_that_may_not_fit_has_the_doubt_in_its_files(
    planned: Plan, model: str, rows: str, tmp_path: Path
) -> None:
    assert planned.bundle is not None
    assert planned.bundle.doubts == ()
    budget = f"{round(planned.bundle.needed_bytes * 1.02)}"
    tight = autotune.plan(
        model, rows, gpu="RTX4090", fix=ONE_WAY, max_length=CUT, memory_budget=budget, output=tmp_path / "bundle"
    )
    assert tight.bundle is not None
    (doubt,) = tight.bundle.doubts
    assert doubt.startswith("The margin is below the stated error (±10 %, ")
    head = (tmp_path / "bundle" / "train.py").read_text(encoding="utf-8")
    assert doubt in " ".join(head.split())


def test_a_check_reads_it_needs_the_same_and_says_that_it_was_not_measured(planned: Plan, folder: Path) -> None:
    assert planned.bundle is not None
    verdict = autotune.check(folder / "bundle" / "config.yaml", gpu="RTX4090")
    assert verdict.outcome is Outcome.FITS
    assert verdict.need is not None
    # The rows of the bundle are the cut ones.
    assert verdict.need.tokens == 2 * CUT
    assert verdict.need.bytes == pytest.approx(planned.bundle.needed_bytes, rel=0.01)
    assert any("has not measured it" in finding.message for finding in verdict.findings)


@pytest.mark.nightly
def test_the_rows_are_read_again_where_the_plan_is_known_from_before(model: str, rows: str, planned: Plan) -> None:
    assert planned.bundle is not None
    folder = Path(planned.bundle.directory)
    before = (folder / "rows.parquet").read_bytes()
    (folder / "rows.parquet").unlink()
    again = autotune.plan(model, rows, gpu="RTX4090", fix=ONE_WAY, max_length=CUT, output=folder)
    assert again.new_trace_count == 0
    assert again.bundle == replace(planned.bundle, settings=again.settings)
    assert (folder / "rows.parquet").read_bytes() == before


def test_rows_that_the_bundle_does_not_copy_are_not_read_again(model: str, tmp_path: Path) -> None:
    rows, tokenised = write_rows(tmp_path / "rows.jsonl", [{"text": "the speed of a token"}] * 16), []
    for folder in ("first", "second"):
        events: list[Event] = []
        output = tmp_path / folder
        autotune.plan(model, rows, gpu="RTX4090", fix=ONE_WAY, token_coverage=1, output=output, listener=events.append)
        assert names(output) == ["config.yaml", "plan.json", "train.py"]
        tokenised.append(any("tokenising" in event.text for event in events if isinstance(event, StageStarted)))
    assert tokenised == [True, False]


def test_a_plan_on_a_split_trains_on_it(model: str, rows: str, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    shutil.copy(rows, tmp_path / "data" / "test.jsonl")
    found = autotune.plan(
        model,
        tmp_path / "data",
        split="test",
        gpu="24GiB",
        fix=ONE_WAY,
        token_coverage=1,
        output=tmp_path / "bundle",
        global_batch_size=32,
    )
    assert found.bundle is not None
    assert found.settings["split"] == "test"
    assert "The dataset has 16 documents, fewer than a global batch of 32: an epoch is one step of 16." in found.notes
    assert not any("give a DATASET" in note for note in found.notes)
    (entry,) = yaml.safe_load((tmp_path / "bundle" / "config.yaml").read_text(encoding="utf-8"))["datasets"]
    assert entry == {"path": str(tmp_path / "data"), "split": "test"}
    assert load_dataset(**entry)["text"] == load_dataset("json", data_files=rows, split="train")["text"]


def test_where_nothing_fits_nothing_is_left_to_start(model: str, rows: str, planned: Plan) -> None:
    assert planned.bundle is not None
    folder = Path(planned.bundle.directory)
    known = {"gpu": "RTX4090", "fix": ONE_WAY, "max_length": CUT}
    found = autotune.plan(model, rows, memory_budget="64MiB", output=folder, **known)  # type: ignore[arg-type]
    assert (found.bundle, found.unwritten) == (None, "nothing is predicted to fit")
    assert names(folder) == []


def test_where_no_trace_ends_the_reason_is_given_in_place_of_a_fit(
    model: str, rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autotune.probing.tracing.ServerTracer.__call__", lambda _, asked: LosingTracer()(asked))
    found = autotune.plan(model, rows, gpu="24GiB", fix={**ONE_WAY, "optimizer": "sgd"}, output=tmp_path / "bundle")
    assert (found.bundle, found.fastest) == (None, None)
    assert found.unwritten == "nothing could be predicted: a job ended with signal 9"


def test_rows_of_a_length_alone_make_no_bundle(model: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--seq-len names none"):
        autotune.plan(model, seq_len=8, gpu="RTX4090", output=tmp_path / "bundle")


@pytest.mark.parametrize("name", ["file", "file/further/down"])
def test_a_folder_that_cannot_be_made_is_refused_before_anything_is_read(
    name: str, model: str, rows: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    told: list[Event] = []
    with pytest.raises(InputError, match=r"Not a directory.*--output"):
        autotune.plan(model, rows, gpu="RTX4090", output=tmp_path / name, listener=told.append)
    assert told == []


def test_a_plan_whose_folder_cannot_be_written_in_the_end_is_not_lost(
    model: str, rows: str, planned: Plan, tmp_path: Path
) -> None:
    in_the_way = tmp_path / "bundle"
    with pytest.raises(UnwrittenError, match="cannot be written: it is not a directory") as caught:
        autotune.plan(
            model, rows, gpu="RTX4090", fix=ONE_WAY, max_length=CUT, output=in_the_way,
            listener=lambda _: in_the_way.touch(),
        )  # fmt: skip
    assert caught.value.document.fastest == planned.fastest
    assert (caught.value.document.bundle, in_the_way.is_file()) == (None, True)


def test_a_folder_with_something_else_is_left_alone(model: str, rows: str, tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text("{}", encoding="utf-8")
    with pytest.raises(InputError, match="holds other files and no plan of autotune"):
        autotune.plan(model, rows, gpu="RTX4090", output=tmp_path)
    assert names(tmp_path) == ["result.json"]


@pytest.mark.parametrize("text", ["{}", '{"schema": 1}', "[]", "no JSON"])
def test_a_folder_with_a_plan_json_of_somebody_else_is_refused(text: str, tmp_path: Path) -> None:
    for name in ("plan.json", "train.py"):
        (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match="holds other files and no plan of autotune"):
        bundle_folder(tmp_path, ROWS, None)
    assert names(tmp_path) == ["plan.json", "train.py"]


def test_a_bundle_whose_plan_was_killed_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(BaseException):
        """The process ends while it writes the bundle."""

    def end(*_: object) -> None:
        raise Killed

    hardware, workload = Hardware("cuda", "H100", 80 * GIB), a_workload()
    given = handed_over(a_bundle(None), workload, hardware, max_tokens=None, threads=None)
    monkeypatch.setattr("autotune.emit.bundle.script_text", end)
    with pytest.raises(Killed):
        write_planned_bundle(a_bundle(None), given, tmp_path)
    monkeypatch.undo()
    assert names(tmp_path) != []
    assert bundle_folder(tmp_path, ROWS, None) == tmp_path
    write_planned_bundle(a_bundle(None), given, tmp_path)
    assert names(tmp_path) == ["accelerate.yaml", "config.yaml", "plan.json", "train.py"]
    assert bundle_folder(tmp_path, ROWS, None) == tmp_path
