"""``autotune probe`` from the command line to ``trl sft``, on small models, in real processes."""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from autotune import check
from autotune.core.documents.verdict import Outcome, Source
from autotune.probing import JobServer
from tests.brief import LONG
from tests.end_to_end.runs import Ended, autotune, by_script, by_trl, descendants, start, train, until
from tests.small import long_tailed_texts, text_rows, write_rows, write_small_model
from tests.study.dashboard import attributes, shown
from tests.virtual.alone import apart

pytestmark = pytest.mark.slow

# TRL's default of bfloat16 takes several times as long on a CPU that lacks it.
QUICK = ("--device", "cpu", "--effort", "quick", "--fix", "precision=float32", "--no-plan")
PLANNED = QUICK[:-1]
# Enough knobs for a search, few enough for a test.
SPACE = """
techniques:
  max_length: [coverage, batch/1]
  packing: [none, bfd]
  padding_free: ["off", "on"]
  gradient_checkpointing: ["on", "off"]
  per_device_train_batch_size: [1, 2, 8]
recipes:
  - {max_length: batch/1, packing: bfd, per_device_train_batch_size: 1}
  - {max_length: coverage, padding_free: "on"}
"""


@pytest.fixture(scope="module")
def space(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("space") / "space.yaml"
    file.write_text(SPACE, encoding="utf-8")
    return file


@dataclass(frozen=True)
class Stopped:
    """A run that a signal ended in its second probe.

    Attributes:
        words: of its command, but for where it ran.
        left: the processes that it left running.
        replies: of the probes that it had finished, and when.
        status: of the result that it wrote; None if it wrote none.
    """

    ended: Ended
    words: tuple[str | Path, ...]
    output: Path
    left: list[psutil.Process]
    replies: Mapping[Path, int]
    status: str | None

    def resumed(self) -> Ended:
        """Run it again, to its end."""
        return autotune(*self.words, "--resume", folder=self.output.parent)


def stopped_by(number: signal.Signals, folder: Path, *words: str | Path) -> Stopped:
    """Start a run in a folder, send it a signal in its second probe, and return the ended run."""
    words = ("probe", *words, "--trials", "3", "--output", "bundle", "--json")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(LONG, "1")
        running = start(*words, folder=folder)
    probes, result = folder / "bundle" / "probes", folder / "bundle" / "result.json"
    until(lambda: len(list(probes.glob("*/request.json"))) == 2, running)
    main, family = psutil.Process(running.pid), descendants(running.pid)
    # A scheduler sends it to all processes of a job; the kernel kills one.
    for process in [main] if number is signal.SIGKILL else [main, *family]:
        with suppress(psutil.NoSuchProcess):  # one that has ended since
            process.send_signal(number)
    out, said = running.communicate(timeout=120)
    _, left = psutil.wait_procs([main, *family], timeout=60)
    replies = {file: file.stat().st_mtime_ns for file in probes.glob("*/reply.json")}
    status = json.loads(result.read_text(encoding="utf-8"))["status"] if result.exists() else None
    return Stopped(Ended(running.returncode, out, said), words, folder / "bundle", left, replies, status)


@pytest.fixture(scope="module")
def stopped(
    tmp_path_factory: pytest.TempPathFactory, small_model_directory: Path, small_dataset_file: Path, space: Path
) -> Stopped:
    """A run that a scheduler ended."""
    words = (small_model_directory, small_dataset_file, *PLANNED, "--space", space)
    return stopped_by(signal.SIGTERM, tmp_path_factory.mktemp("found"), *words)


@pytest.fixture(scope="module")
def found(stopped: Stopped) -> tuple[Ended, Path]:
    """The same run, resumed, which finds something, and where its bundle is."""
    return stopped.resumed(), stopped.output


def test_a_confirmed_recommendation_is_found(found: tuple[Ended, Path]) -> None:
    ended, _ = found
    assert ended.code == 0, ended.err
    document = ended.document
    assert document["status"] == "found"
    assert document["confirmed"] is True
    # Rates that tie within 2 % are equal to the search, which then goes by memory.
    assert document["recommended"]["tokens_per_second"] * 1.03 >= document["baseline"]["tokens_per_second"]


def test_steps_are_traced_before_the_first_probe_and_stand_beside_what_was_measured(
    stopped: Stopped, found: tuple[Ended, Path]
) -> None:
    ended, _ = found
    baseline = ended.document["baseline"]["number"]
    trial = next(trial for trial in ended.document["trials"] if trial["number"] == baseline)
    assert trial["predicted_bytes"] > 0
    assert trial["predicted_tokens_per_second"] > 0
    assert stopped.ended.err.index("note: Traced") < stopped.ended.err.index("probe 0 started")


def test_the_study_of_a_run_is_shown_by_optuna_s_own_dashboard(found: tuple[Ended, Path]) -> None:
    ended, bundle = found
    study = shown(f"sqlite:///{bundle / 'study.db'}")
    assert (study["name"], study["objective_names"]) == ("autotune", ["tokens per second"])
    # A candidate with a choice outside of the space, such as TRL's default, has no parameters.
    assert {item["name"] for item in study["union_search_space"]} <= {
        "gradient_checkpointing", "max_length", "packing", "padding_free", "per_device_train_batch_size",
    }  # fmt: skip
    # The probe that was ended is there as well.
    trials = [trial for trial in study["trials"] if trial["state"] != "Fail"]
    assert len(study["trials"]) == len(trials) + 1
    for trial, written in zip(trials, ended.document["trials"], strict=True):
        known = attributes(trial)
        assert known["outcome"] == written["status"].replace("_", " ")
        assert ("memory used (GiB)" in known) == (written["peak_bytes"] is not None)
        assert trial["state"] == ("Complete" if written["status"] == "ok" else "Pruned")
    sortable = {item["key"] for item in study["union_user_attrs"] if item["sortable"]}
    assert sortable >= {"memory used (GiB)", "predicted memory (GiB)"}


def test_both_compared_steps_of_a_run_are_in_its_report(found: tuple[Ended, Path]) -> None:
    ended, bundle = found
    page = (bundle / "report.html").read_text(encoding="utf-8")
    for role, one in (("recommended", ended.document["recommended"]), ("default", ended.document["baseline"])):
        assert sum(one["timeline"]["breakdown"].values()) > 0
        assert f'id="step_{role}"' in page or one["timeline"] == ended.document["recommended"]["timeline"]


@pytest.mark.nightly
def test_without_a_plan_nothing_is_predicted(
    small_model_directory: Path, small_dataset_file: Path, space: Path, tmp_path: Path
) -> None:
    words = ("probe", small_model_directory, small_dataset_file, *QUICK, "--space", space, "--trials", "1", "--json")
    ended = autotune(*words, folder=tmp_path)
    assert "Traced in" not in ended.err
    assert {trial["predicted_bytes"] for trial in ended.document["trials"]} == {None}


def test_standard_output_is_exactly_the_document(found: tuple[Ended, Path]) -> None:
    ended, bundle = found
    assert ended.document == json.loads((bundle / "result.json").read_text())


def test_the_global_batch_and_the_coverage_are_what_was_asked_for(found: tuple[Ended, Path]) -> None:
    document = found[0].document
    chosen = document["recommended"]
    # Packed rows hold as many documents as they do, within a tenth of the eight that TRL's defaults give.
    assert chosen["documents_per_step"] == pytest.approx(8, rel=0.1)
    assert chosen["token_coverage"] >= 0.99


def test_its_page_has_the_verdict(found: tuple[Ended, Path]) -> None:
    page = (found[1] / "report.html").read_text(encoding="utf-8")
    # How fast it is beside TRL's default depends on the machine.
    assert "Confirmed by a longer run with the worst batch." in page


def test_a_check_of_its_configuration_takes_what_was_measured(
    found: tuple[Ended, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    ended, folder = found
    checked = check(folder / "config.yaml", trainer="sft")
    assert checked.need is not None
    assert (checked.outcome, checked.need.source) == (Outcome.FITS, Source.STUDIED)
    assert checked.need.bytes == ended.document["recommended"]["peak_bytes"]


def run_script_of_trl(config: Path, folder: Path) -> None:
    """Run the script that ``trl sft`` launches, as the main module, in a folder."""
    os.chdir(folder)
    sys.argv = ["sft.py", "--config", str(config), "--max_steps", "2", "--report_to", "none"]
    runpy.run_module("trl.scripts.sft", run_name="__main__")


def test_trl_s_script_runs_the_configuration_unchanged(
    found: tuple[Ended, Path], job_server: JobServer, tmp_path: Path
) -> None:
    apart(job_server, run_script_of_trl, found[1] / "config.yaml", tmp_path)
    assert list(tmp_path.rglob("trainer_state.json"))


@pytest.mark.nightly
def test_trl_s_command_runs_the_configuration_unchanged(found: tuple[Ended, Path], tmp_path: Path) -> None:
    train(by_trl("sft", found[1] / "config.yaml"), tmp_path)


@pytest.mark.nightly
def test_the_script_trains_too(found: tuple[Ended, Path], tmp_path: Path) -> None:
    train(by_script(found[1] / "train.py"), tmp_path)


def test_a_second_run_needs_to_say_that_it_resumes(
    found: tuple[Ended, Path], small_model_directory: Path, small_dataset_file: Path, space: Path
) -> None:
    words = ("probe", small_model_directory, small_dataset_file, *QUICK, "--space", space, "--output", found[1])
    kept = (found[1] / "run.json").read_text()
    again = autotune(*words, "--memory-budget", "2GiB", folder=found[1].parent)
    assert again.code == 2
    assert "--resume" in again.err
    assert "Traceback" not in again.err
    assert (found[1] / "run.json").read_text() == kept


@pytest.mark.nightly
def test_another_workload_s_study_is_not_resumed(
    found: tuple[Ended, Path], small_model_directory: Path, tmp_path: Path, space: Path
) -> None:
    other = write_rows(tmp_path / "other.jsonl", text_rows(long_tailed_texts(60, seed=8)))
    words = ("probe", small_model_directory, other, *QUICK, "--space", space, "--output", found[1], "--resume")
    kept = (found[1] / "run.json").read_text()
    ended = autotune(*words, "--memory-budget", "2GiB", folder=tmp_path)
    assert ended.code == 2
    assert "dataset" in ended.err
    assert "memory limit" in ended.err
    assert (found[1] / "run.json").read_text() == kept


def assert_left(stopped: Stopped, number: signal.Signals) -> None:
    """Check that an ended run left no process, and that it reported the interruption if it could."""
    assert stopped.left == []
    assert len(stopped.replies) == 1
    if number is not signal.SIGKILL:
        assert stopped.ended.code == 128 + number
        assert "--resume" in stopped.ended.err
        assert "Traceback" not in stopped.ended.err
        assert stopped.status == "interrupted"


def assert_goes_on(stopped: Stopped, resumed: Ended) -> None:
    """Check that a resumed run lost and repeated nothing."""
    assert resumed.code == 0, resumed.err
    probed = [trial for trial in resumed.document["trials"] if trial["status"] not in ("vetoed", "crashed")]
    assert len(stopped.replies) < len(probed) <= 3
    assert {file: file.stat().st_mtime_ns for file in stopped.replies} == stopped.replies


def test_a_run_that_is_ended_leaves_nothing_running_and_goes_on_with_nothing_lost_or_repeated(
    stopped: Stopped, found: tuple[Ended, Path]
) -> None:
    assert_left(stopped, signal.SIGTERM)
    assert_goes_on(stopped, found[0])


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_so_does_a_run_that_is_interrupted_or_killed(
    number: signal.Signals, small_model_directory: Path, small_dataset_file: Path, space: Path, tmp_path: Path
) -> None:
    stopped = stopped_by(number, tmp_path, small_model_directory, small_dataset_file, *QUICK, "--space", space)
    assert_left(stopped, number)
    assert_goes_on(stopped, stopped.resumed())


@pytest.mark.nightly
def test_a_budget_that_nothing_fits_in_ends_with_1_and_says_what_might_help(
    small_model_directory: Path, small_dataset_file: Path, tmp_path: Path
) -> None:
    words = ("probe", small_model_directory, small_dataset_file, *QUICK, "--trials", "4")
    ended = autotune(*words, "--memory-budget", "2MiB", "--json", folder=tmp_path)
    assert ended.code == 1, ended.err
    assert ended.document["status"] == "nothing_fits"
    assert {trial["status"] for trial in ended.document["trials"]} <= {"out_of_memory", "vetoed"}
    assert "--allow" in ended.err
    assert "--max-length" in ended.err


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("model_type", "packs"),
    [("opt", False), ("llama", True), ("qwen2", True)],
)
def test_rows_are_packed_only_where_packed_documents_stay_apart(
    model_type: str, packs: bool, small_dataset_file: Path, space: Path, tmp_path: Path
) -> None:
    model = write_small_model(tmp_path / model_type, model_type)
    words = ("probe", model, small_dataset_file, *QUICK, "--space", space, "--trials", "3", "--json")
    ended = autotune(*words, folder=tmp_path)
    assert ended.code == 0, ended.err
    sharing = [
        trial
        for trial in ended.document["trials"]
        if trial["candidate"]["packing"] != "none" or trial["candidate"]["padding_free"] == "on"
    ]
    probed = [trial for trial in sharing if trial["status"] != "vetoed"]
    assert bool(probed) == packs
    chosen = ended.document["recommended"]["candidate"]
    assert packs or (chosen["packing"], chosen["padding_free"]) == ("none", "off")
    assert ("share a row attend to each other" in ended.err) != packs
