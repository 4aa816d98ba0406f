"""The comparison of predictions with measurements on a CPU: real probes, real traces, real files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autotune.core.candidate import Candidate
from autotune.core.files.codec import decode
from autotune.core.status import ProbeStatus
from autotune.units import MIB
from benchmarks.gpu.accuracy import Outcome
from benchmarks.gpu.cases import Case, Scenario
from benchmarks.gpu.predicted import compare

TINY = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
    "pad_token_id": 1,
}
SCENARIO = Scenario("tiny", "model", {32: 64}, 4, 128, {"activation_offloading": "off"})


def case(rows: int, limit_bytes: int | None = None, **choices: str) -> Case:
    return Case("tiny", Candidate({"per_device_train_batch_size": rows, **choices}), limit_bytes)


GENERATING = Scenario(
    "tiny prompts", "model", {16: 32}, 8, None, {"max_completion_length": 16, "num_generations": 4}, "grpo"
)
CHECKPOINTED = case(4)
PACKED = case(2, packing="bfd", gradient_checkpointing="off")
TOO_LARGE = case(4, 4 * MIB)
IMPOSSIBLE = case(4, liger="on")
GENERATED = Case("tiny prompts", Candidate({"per_device_train_batch_size": 4}))
CASES = (PACKED, CHECKPOINTED, TOO_LARGE, IMPOSSIBLE, GENERATED)

# Traces take their time where others use the cores too.
SECONDS = 800.0
pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(SECONDS + 100)]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("results") / "device-predicted.json"


def outcome_of(file: Path, name: str) -> Outcome:
    cases = json.loads(file.read_text(encoding="utf-8"))["cases"]
    return next(decode(Outcome, one) for one in cases if one["name"] == name)


@pytest.fixture(scope="module")
def outcomes(file: Path) -> dict[str, Outcome]:
    scenarios = [SCENARIO, GENERATING]
    return {outcome.name: outcome for outcome in compare("cpu", {"model": TINY}, scenarios, CASES, file, SECONDS)}


def test_cases_are_measured_and_predicted_at_the_same_shape(outcomes: dict[str, Outcome]) -> None:
    for one, tokens in ((PACKED, 256), (CHECKPOINTED, 128)):
        found = outcomes[one.name]
        assert found.measured is not None
        assert found.measured.status is ProbeStatus.OK
        assert found.measured.worst_tokens == tokens
        assert found.same_shape("traced") is True
        assert found.predictions.keys() >= {"traced", "planned"}


def test_a_plan_of_few_traces_predicts_what_the_trace_of_the_case_does(outcomes: dict[str, Outcome]) -> None:
    for one in (PACKED, CHECKPOINTED):
        predicted = outcomes[one.name].predictions
        assert predicted["planned"].allocated_bytes == pytest.approx(predicted["traced"].allocated_bytes, rel=0.01)


def test_a_trainer_that_generates_is_measured_and_planned(outcomes: dict[str, Outcome]) -> None:
    found = outcomes[GENERATED.name]
    assert found.measured is not None
    assert (found.measured.status, found.measured.reason) == (ProbeStatus.OK, "")
    assert found.measured.worst_tokens == 4 * (16 + 16)
    assert found.predictions["planned"].allocated_bytes > 0


def test_what_runs_out_of_memory_is_compared_as_well(outcomes: dict[str, Outcome]) -> None:
    found = outcomes[TOO_LARGE.name]
    assert found.status == "out_of_memory", found.reasons
    assert found.limit_bytes == 4 * MIB
    assert not found.predictions["traced"].fits
    assert not found.predictions["planned"].fits


def test_what_cannot_be_done_here_has_its_reason_and_nothing_else(outcomes: dict[str, Outcome]) -> None:
    found = outcomes[IMPOSSIBLE.name]
    assert found.status == "not run"
    assert found.reasons == {"measured": "liger=on: its Triton kernels need a CUDA GPU"}
    assert not found.predictions


def test_both_files_have_every_case_in_order(outcomes: dict[str, Outcome], file: Path) -> None:
    document = json.loads(file.read_text(encoding="utf-8"))
    assert [one["name"] for one in document["cases"]] == [one.name for one in CASES] == list(outcomes)
    assert document["environment"]["torch"]
    measured = document["cases"][0]["measured"]
    known = outcomes[PACKED.name].measured
    assert known is not None
    assert (measured["peak_bytes"], measured["status"]) == (known.peak_bytes, "ok")
    page = file.with_suffix(".md").read_text(encoding="utf-8")
    for one in CASES:
        assert f"| {one.name} | {outcomes[one.name].status.replace('_', ' ')} |" in page


def test_what_is_not_predicted_is_measured_and_can_be_predicted_later(tmp_path: Path) -> None:
    file = tmp_path / "untraced.json"
    (found,) = compare("cpu", {"model": TINY}, [SCENARIO], [CHECKPOINTED], file, SECONDS, traced=False)
    assert found.measured is not None
    assert found.measured.ok, found.measured.reason
    assert found.predictions == {}
    assert found.choices == outcome_of(file, CHECKPOINTED.name).choices


def test_where_no_time_is_left_that_is_all_that_is_said(tmp_path: Path) -> None:
    file = tmp_path / "cut-off.json"
    found = compare("cpu", {"model": TINY}, [SCENARIO], CASES[:1], file, 0.0)[0]
    assert found.measured is None
    assert found.predictions == {}
    assert set(found.reasons.values()) == {"no time was left"}
    assert json.loads(file.read_text(encoding="utf-8"))["cases"][0]["reasons"] == dict(found.reasons)
