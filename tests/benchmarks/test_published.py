"""The comparison with public tables: complete data, a working training loop, and a page with its results."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autotune.inspection.gpus import find_gpu
from autotune.probing import JobServer
from benchmarks.published.operators import _CACHES, caches
from benchmarks.published.outcomes import outcome_of, outcomes_of
from benchmarks.published.render import errors, rendered
from benchmarks.published.rivals import rivals_rendered
from benchmarks.published.shapes import published
from benchmarks.published.tables import FOLDER, Outcome, Row, Table, load
from tests.virtual.alone import apart, found_by

TABLES = {
    "metamathqa": 63, "litgpt": 23, "xmem": 100, "fms": 16, "fsdp2": 2, "reports": 27, "swift": 3, "torchtitan": 2,
}  # fmt: skip
FULL = "full-finetuning/llama-3.2-3B-lr_0.00001"
LORA, FROZEN_HALF = "lora/llama-3.2-3B-rank32", "lora/llama-3.2-3B-rank32-lorafa"
SMALL = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
EMBEDDING, LAYER = 512 * 64, 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64


@pytest.mark.parametrize("card", ["Tesla_V100-PCIE-32GB", "NVIDIA_A100_80GB_PCIe"])
def test_a_published_card_for_pcie_is_predicted_as_one(card: str) -> None:
    row = published({"source": "", "row": "", "kind": "main", "hardware": f"1x {card}", "seconds_measured": "1"})
    speeds = find_gpu(row.gpu).speeds
    assert speeds is not None
    assert speeds.nvlink is None or speeds.bridged == 2


def test_the_rate_of_a_cache_is_that_of_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "gpu-small-kernels").mkdir()
    for card in _CACHES:
        lines = []
        for count in range(10_000, 1_000_000, 10_000):
            seconds = 16 * count / (4e12 if count <= 500_000 else 1e12) + 1e-6
            lines.append(f"{count} 0kB {16 * count / seconds / 1e9 / 2:.3f} {16 * count / seconds / 1e9:.3f}")
        (tmp_path / "gpu-small-kernels" / f"{card}_graph.txt").write_text("\n".join([*lines, "1010000 0kB"]))
    assert [row.split(" | ")[1:4] for row in caches(tmp_path)] == [["1.0", "4,000", "8.0"]] * len(_CACHES)


@pytest.mark.parametrize("name", TABLES)
def test_every_row_of_a_table_says_what_was_measured(name: str) -> None:
    table = load(name)
    assert len({row.name for row in table.rows}) == len(table.rows) == TABLES[name]
    assert all(row.published and set(row.published) <= set(table.figures) for row in table.rows)
    sizes = [size for row in table.rows for name, size in row.published.items() if name != "step"]
    assert all(size is None or 1e9 < size < 100e9 for size in sizes)
    assert table.calibrated_on in (None, *(row.name for row in table.rows))


def test_every_table_is_one_that_the_tests_know() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(TABLES)


def traced_rows() -> dict[str, Outcome]:
    """Trace a small model, and return what becomes of rows by their names; one has an adapter that does not exist."""
    table = load("metamathqa")
    lengths = {"average_lengths": [9, 7], "longest_lengths": [24, 16]}
    table = replace(table, loop={**table.loop, **lengths, "model": SMALL})
    rows = [row for row in table.rows if row.name in {FULL, LORA, FROZEN_HALF}]
    rows.append(Row("strange", {}, 0, {"adapter": {"peft_type": "NONE_SUCH"}}))
    return {row.name: outcome_of("metamathqa", table, row) for row in rows}


@pytest.fixture(scope="module")
def traced(job_server: JobServer) -> dict[str, Outcome]:
    return apart(job_server, traced_rows)


def test_the_loop_of_the_method_comparison_runs_on_a_small_model(traced: dict[str, Outcome]) -> None:
    full, lora, frozen_half = traced[FULL], traced[LORA], traced[FROZEN_HALF]
    assert (full.failure, lora.failure, frozen_half.failure) == ("", "", "")
    assert full.trainable == EMBEDDING + 2 * LAYER + 64  # tied: the head is the embedding
    assert lora.trainable == 2 * 32 * (64 + 64 + 64 + 32)
    assert frozen_half.trainable == 2 * 32 * (64 + 32)
    assert full.traced["allocated"] > lora.traced["allocated"] > frozen_half.traced["allocated"]
    assert all(found.traced["reserved"] > found.traced["allocated"] for found in (full, lora, frozen_half))


def traced_on_several_gpus() -> dict[str, Outcome]:
    """Trace small models on one rank of several, by the loops of two tables."""
    small = {**SMALL, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    fms, fsdp2 = load("fms"), load("fsdp2")
    rows = {row.name: row for row in fms.rows}
    mistral = {"Mistral-7B": {**fms.loop["models"]["Mistral-7B"], **SMALL}}
    loop = {**fms.loop, "models": mistral, "tokens": 64}
    table = replace(fms, loop=loop)
    found = {name: outcome_of("fms", table, rows[f"Mistral-7B, full, {name}, 4 rows"]) for name in ("1 GPU", "2 GPUs")}
    wide = {**small, "hidden_size": 512, "intermediate_size": 2048}
    whole = replace(fsdp2, loop={**fsdp2.loop, "model": {**wide, "num_hidden_layers": 8}})
    return {**found, "fsdp2": outcome_of("fsdp2", whole, fsdp2.rows[0])}


@pytest.mark.nightly
def test_the_loops_of_several_gpus_run_on_small_models(job_server: JobServer) -> None:
    traced = apart(job_server, traced_on_several_gpus)
    assert [outcome.failure for outcome in traced.values()] == ["", "", ""]
    alone, shared = (traced[name].traced for name in ("1 GPU", "2 GPUs"))
    assert 0.4 * alone["allocated"] < shared["allocated"] < alone["allocated"]
    assert alone["step"] > 0
    # Weights and two states in float32, of which each of eight ranks has its share.
    whole = traced["fsdp2"]
    assert whole.traced["reserved"] >= whole.traced["allocated"] > 12 * whole.trainable / 8


def test_a_row_that_cannot_be_traced_says_why(traced: dict[str, Outcome]) -> None:
    assert "NONE_SUCH" in traced["strange"].failure
    assert not traced["strange"].traced


def test_what_is_cached_at_the_end_of_a_phase_is_given_back(job_server: JobServer) -> None:
    script = """
import json, torch
from autotune.virtual import phase
from benchmarks.published.measure import shown_by

def run(device):
    kept = torch.empty(10 << 20, dtype=torch.uint8, device=device)
    for name, size in (("first", 100 << 20), ("second", 120 << 20)):
        with phase(name):
            block = torch.empty(size, dtype=torch.uint8, device=device)
            del block

shown = shown_by(run, (8, 0))
print(json.dumps([shown.allocated_bytes, shown.peak_allocated_bytes, shown.peak_reserved_bytes]))
"""
    allocated, peak_allocated, peak_reserved = found_by(job_server, script)
    assert allocated == {"first": 10 << 20, "second": 10 << 20}
    assert (peak_allocated, peak_reserved) == (130 << 20, 130 << 20)


def small_table() -> tuple[Table, list[tuple[Row, Outcome]]]:
    table = replace(load("litgpt"), calibrated_on="fitted", memory_bytes=40_000_000_000)
    found = [
        (Row("fitted", {"allocated": 10_000_000_000}, 7), Outcome({"allocated": 10_000_000_000}, 7)),
        (Row("low", {"allocated": 10_000_000_000}, 7), Outcome({"allocated": 9_500_000_000}, 8)),
        (Row("high", {"allocated": 10_000_000_000}, 7), Outcome({"allocated": 10_100_000_000}, 7)),
        (Row("large", {"allocated": None}, 7), Outcome({"allocated": 41_000_000_000}, 7)),
        (Row("strange", {"allocated": 10_000_000_000}, 7), Outcome(failure="UnknownShapeError: a | b")),
    ]
    return table, found


def test_errors_are_relative_to_what_was_published_and_leave_out_the_row_that_was_fitted_to() -> None:
    table, found = small_table()
    assert errors(table, found, "allocated") == {"low": pytest.approx(-0.05), "high": pytest.approx(0.01)}


def test_the_report_has_every_row_and_how_the_errors_lie() -> None:
    table, found = small_table()
    lines = rendered(table, found, "torch 0").splitlines()
    assert "| fitted | 10.00 GB | 10.00 GB | +0.00% | calibrated on |" in lines
    assert "| low | 10.00 GB | 9.50 GB | -5.00% | 8 trainable parameters, published 7 |" in lines
    assert "| large | out of memory | 41.00 GB | — | traced not to fit |" in lines
    assert "| strange | 10.00 GB | — | — | not traced: UnknownShapeError: a / b |" in lines
    assert any("2 rows, median error 3.00%" in line and "worst -5.00% (low)" in line for line in lines)


SMALL_GPT = {"model_type": "gpt2", "n_positions": 64, "n_embd": 64, "n_head": 4, "n_layer": 2, "vocab_size": 512}


def test_the_configurations_of_xmems_models_have_the_parameters_of_those() -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    table = load("xmem")
    published = {row.settings["model"]: row.trainable for row in table.rows}
    assert published.keys() == table.loop["models"].keys()
    for name, described in table.loop["models"].items():
        kind = AutoModelForSeq2SeqLM if described["model_type"] == "t5" else AutoModelForCausalLM
        with torch.device("meta"):
            model = kind.from_config(AutoConfig.for_model(**described))
        assert model.num_parameters() == published[name], name


@pytest.mark.nightly
def test_the_loop_of_xmem_says_what_is_reserved_and_whether_that_fits() -> None:
    table = load("xmem")
    loop = {**table.loop, "tokens": 32, "models": {"small": SMALL_GPT, "T5-small": table.loop["models"]["T5-small"]}}
    memory = {"memory_bytes": {"large": 8 << 30, "small": (512 << 20) + (4 << 20)}}
    base = {"model": "small", "optimizer": "AdamW", "rows": 4}
    rows = [
        Row("fits", {}, 0, {**base, "gpu": "large"}),
        Row("does not", {}, 0, {**base, "gpu": "small"}),
        Row("momentum", {}, 0, {**base, "gpu": "large", "optimizer": "SGD"}),
    ]
    fits, does_not, without = outcomes_of("xmem", replace(table, loop={**loop, **memory}), rows, 1)

    assert (fits.failure, does_not.failure, without.failure) == ("", "", "")
    assert fits.trainable == 2 * (12 * 64 * 64 + 13 * 64) + 2 * 64 + (512 + 64) * 64
    assert (fits.traced["fits"], does_not.traced["fits"]) == (1, 0)
    assert fits.traced["reserved"] == does_not.traced["reserved"] > 4 << 20
    assert fits.traced["varied"] >= 0
    # The optimizer that is made before the model is moved has its state.
    assert without.traced["reserved"] <= fits.traced["reserved"]


def test_the_report_has_what_each_estimator_said_and_how_runs_lie_in_what_is_stated() -> None:
    def row(name: str, measured: int | None, xmem: int, *, told: bool) -> Row:
        rivals = {"xMem": {"bytes": xmem, "out_of_memory": told, "seconds": 20.0}, "SchedTune": {"bytes": 2 * xmem}}
        return Row(name, {"reserved": measured}, 7, {"rivals": rivals})

    def traced(reserved: int, *, fits: bool, varied: int = 0) -> Outcome:
        return Outcome({"reserved": reserved, "fits": int(fits), "varied": varied, "random": 0}, 7, "", 2.0)

    giga = 1_000_000_000
    found = [
        (row("near", 10 * giga, 9 * giga, told=False), traced(10 * giga, fits=True)),
        (row("varied", 12 * giga, 9 * giga, told=True), traced(10 * giga, fits=True, varied=giga)),
        (row("beyond", 12 * giga, 9 * giga, told=False), traced(10 * giga, fits=True)),
        (row("large", None, 9 * giga, told=False), traced(20 * giga, fits=False)),
    ]
    lines = rivals_rendered(load("xmem"), found, "torch 0").splitlines()

    assert "| autotune | 3 | 16.67% | 16.67% | -16.67% | 33% | 1 of 1 | 0 | 2.0 |" in lines
    assert "| xMem | 3 | 25.00% | 25.00% | -25.00% | 0% | 0 of 1 | 1 | 20.0 |" in lines
    assert any("2 of 3 runs lie inside, the worst 8.33% outside" in line for line in lines)
    assert "| varied | 12.00 GB | 10.00 GB | -16.67% | +1.00 GB | yes | -25.0%, out of memory | — | — | +50.0% | 2.0, 20.0, — |" in lines  # fmt: skip  # noqa: E501
    assert any(line.startswith("| large | out of memory | 20.00 GB, out of memory |  |") for line in lines)
