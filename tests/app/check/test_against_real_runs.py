"""Traced verdicts agree with real runs above and below the memory limit: eleven configurations on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from autotune.core.documents.verdict import Outcome
from tests.app.check.beginning import SHORT, beginning
from tests.app.check.conftest import Checked

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

CPU = "use_cpu: true\nbf16: false\n"
BODIES = {
    "sft": ["", "packing: true\nmax_length: 128\nper_device_train_batch_size: 2\n", "gradient_checkpointing: false\n"],
    "dpo": ["", "use_peft: true\nlora_r: 8\nlora_target_modules: [q_proj, v_proj]\n"],
    "kto": [""],
    "reward": ["max_length: 64\n"],
    "grpo": [""],
    "rloo": ["optim: adafactor\n"],
    "online_dpo": [""],
    "distillation": [""],
}
# Without a cache of keys and values, each token of a completion takes a pass over all before it: 24 take minutes.
FEWER_TOKENS = {**SHORT, "online_dpo": SHORT["online_dpo"].replace("24", "8")}
CASES = [(trainer, body) for trainer, bodies in BODIES.items() for body in bodies]


def test_there_are_eleven() -> None:
    assert len(CASES) == 11


@pytest.mark.parametrize(("trainer", "body"), CASES)
def test_a_real_run_shows_what_was_foretold(
    trainer: str, body: str, larger: Path, rows: Callable[[str], Path], checked: Checked, tmp_path: Path
) -> None:
    file = tmp_path / "config.yaml"
    head = beginning(trainer, larger, rows(trainer), FEWER_TOKENS)
    file.write_text(head + CPU + body, encoding="utf-8")
    asked = {"config": str(file), "trainer": trainer}
    foretold = checked(**asked, gpu="cpu")
    assert foretold.need is not None, foretold.headline
    # As near to the limit as the stated error lets the verdict be one.
    for budget_bytes, outcome in (
        (foretold.need.most_bytes, Outcome.FITS),
        (foretold.need.least_bytes - 1, Outcome.DOES_NOT_FIT),
    ):
        assert checked(**asked, gpu="cpu", memory_budget=budget_bytes).outcome is outcome
        real = checked(**asked, probe=True, memory_budget=budget_bytes)
        assert real.outcome is outcome, real.headline
