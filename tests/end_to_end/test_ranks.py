"""``autotune probe --num-processes 2`` to ``trl NAME --config``: two ranks train with the unchanged bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.end_to_end.runs import autotune, by_trl, train
from tests.small import long_tailed_texts, preference_rows, write_rows
from tests.step.plans import needs_deepspeed

pytestmark = pytest.mark.slow

ROWS = 64
GLOBAL_BATCH = 8
STEPS = 2


def rows_of(trainer: str, folder: Path) -> Path:
    """Return a file of rows for a trainer."""
    texts = long_tailed_texts(ROWS, longest_words=40)
    rows = {
        "sft": [{"text": text} for text in texts],
        "dpo": preference_rows(texts),
        "grpo": [{"prompt": text} for text in texts],
    }
    return write_rows(folder / "rows.jsonl", rows[trainer])


@pytest.mark.parametrize(
    ("trainer", "fixed", "stage"),
    [
        pytest.param("sft", ["sharding=zero2", "offload=optimizer"], 2, marks=[pytest.mark.nightly, needs_deepspeed]),
        pytest.param("sft", ["sharding=ddp"], None, marks=pytest.mark.nightly),
        pytest.param("sft", ["sharding=zero3"], 3, marks=[pytest.mark.nightly, needs_deepspeed]),
        pytest.param("dpo", ["sharding=ddp"], None, marks=pytest.mark.nightly),
        pytest.param("dpo", ["sharding=zero2"], 2, marks=[pytest.mark.nightly, needs_deepspeed]),
        pytest.param("dpo", ["sharding=zero2", "offload=optimizer"], 2, marks=[pytest.mark.nightly, needs_deepspeed]),
        pytest.param("dpo", ["sharding=zero3"], 3, marks=[pytest.mark.nightly, needs_deepspeed]),
        pytest.param("grpo", ["sharding=zero3"], 3, marks=[pytest.mark.nightly, needs_deepspeed]),
        pytest.param(
            "grpo",
            ["sharding=zero3", "ds3_gather_for_generation=off"],
            3,
            marks=[pytest.mark.nightly, needs_deepspeed],
        ),
    ],
    ids=str,
)
def test_the_bundle_trains_with_the_engine_and_the_documents_that_were_probed(
    trainer: str, fixed: list[str], stage: int | None, small_model_directory: Path, tmp_path: Path
) -> None:
    wanted = [word for choice in (*fixed, "per_device_train_batch_size=2") for word in ("--fix", choice)]
    further = ["--fix", "max_completion_length=16", "--fix", "num_generations=2"] if trainer == "grpo" else []
    words = ["--trainer", trainer, "--num-processes", "2", "--device", "cpu", "--effort", "quick", "--trials", "1"]
    words += ["--no-plan", "--global-batch-size", str(GLOBAL_BATCH), "--token-coverage", "0.5", *wanted, *further]
    data = rows_of(trainer, tmp_path)
    found = autotune("probe", small_model_directory, data, *words, "--output", "bundle", "--json", folder=tmp_path)
    assert found.code == 0, found.err
    assert found.document["confirmed"]
    bundle = tmp_path / "bundle"
    more = ("--save_strategy", "steps", "--save_steps", str(STEPS))
    # The values are read from the written files.
    train(by_trl(trainer, bundle / "config.yaml"), bundle, *more, may_abort_at_exit=True)
    output = bundle / yaml.safe_load((bundle / "config.yaml").read_text())["output_dir"]
    # The last that TRL's command does.
    assert (output / "training_args.bin").exists()
    assert (output / "model.safetensors").exists()
    checkpoint = output / f"checkpoint-{STEPS}"
    assert stages_of(checkpoint) == ({0: stage, 1: stage} if stage is not None else {})
    state: dict[str, Any] = yaml.safe_load((checkpoint / "trainer_state.json").read_text())
    rows = GLOBAL_BATCH // 2 if trainer == "grpo" else GLOBAL_BATCH
    assert state["epoch"] == pytest.approx(STEPS * rows / ROWS, rel=0.1)


def stages_of(checkpoint: Path) -> dict[int, int]:
    """Return the stage of ZeRO by the rank that saved its share of the optimizer's state; empty without DeepSpeed."""
    found = {}
    for file in checkpoint.rglob("*zero_pp_rank_*_optim_states.pt"):
        rank = int(file.name.partition("zero_pp_rank_")[2].partition("_")[0])
        document = torch.load(file, weights_only=False)
        found[rank] = int(document["optimizer_state_dict"]["zero_stage"])
    return found
