"""Keys of DeepSpeed's document that DeepSpeed ignores are told, and those that it refuses are errors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version

from autotune.core.configuration import Configuration
from autotune.core.documents.verdict import Outcome, Severity
from autotune.inspection.command_line import read_command_line
from autotune.userconfig.fields import fields_of_kind
from autotune.userconfig.launch import Launching
from autotune.userconfig.launch_problems import deepspeed_findings
from autotune.userconfig.written import WrittenConfig
from tests.app.check.conftest import Checked, Write
from tests.app.check.recording import Recording
from tests.step.plans import needs_deepspeed

WRITTEN = WrittenConfig(read_command_line(["trl", "sft", "--config", "c.yaml"]), None, "sft")
SECOND: dict[str, object] = {"zero_optimization": {"stage": 2}}
ELSEWHERE = frozenset({
    "data_parallel_size", "msamp", "sequence_parallel_size",
})  # fmt: skip
"""Listed keys that deepspeed.initialize or accelerate read, and DeepSpeed's class of its document does not."""


def told(own: Mapping[str, object] | str | None, document: Mapping[str, object] | None = None) -> list[str]:
    """Return what is told of the keys of a document of the trainer's, or of accelerate's."""
    config = Configuration("SFTConfig", {"deepspeed": own}, {})
    found = list(deepspeed_findings(WRITTEN, Launching(2, document=document or {}), config))
    assert all(item.severity is Severity.SILENT for item in found)
    return [item.message for item in found]


@needs_deepspeed
def test_the_keys_that_deepspeed_reads_are_listed() -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    document = Recording(train_batch_size=1)
    DeepSpeedConfig(document)
    read = document.read
    assert not read - fields_of_kind("deepspeed", "read")
    if Version(version("deepspeed")) >= Version("0.19"):
        assert fields_of_kind("deepspeed", "read") - read == ELSEWHERE


def test_keys_that_deepspeed_ignores_are_told_with_the_nearest_that_it_reads(tmp_path: Path) -> None:
    assert told(None) == told(SECOND) == told({**SECOND, "_comment": "mine", "//": "too"}) == []
    misspelt = {"zero_optimisation": {"stage": 3}, "gradient_cliping": 1.0, "mine": 1}
    [zero, clipping, own] = told({**SECOND, **misspelt})
    assert zero.startswith("zero_optimisation in DeepSpeed's document has no effect")
    assert zero.endswith("Did you mean zero_optimization?")
    assert clipping.endswith("Did you mean gradient_clipping?")
    assert own == "mine in DeepSpeed's document has no effect: DeepSpeed reads no such key."
    file = tmp_path / "zero.json"
    file.write_text(json.dumps(misspelt), encoding="utf-8")
    assert told(str(file)) == [zero, clipping, own]
    named = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": str(file)}}
    assert told(None, named) == [zero, clipping, own]
    assert told(None, {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3}}) == []


@pytest.mark.slow
@needs_deepspeed
@pytest.mark.parametrize(
    ("document", "name"),
    [
        ({"zero_optimization": {"stge": 3}}, "stge"),
        ({"zero_optimization": {"stage": 3, "offload_optimiser": {"device": "cpu"}}}, "offload_optimiser"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"devise": "cpu"}}}, "devise"),
        ({**SECOND, "bf16": {"enable": True}}, "enable"),
    ],
    ids=["stage", "section", "device", "precision"],
)
def test_keys_that_deepspeed_refuses_in_a_section_are_errors(
    document: dict[str, object], name: str, write: Write, checked: Checked
) -> None:
    file = write("sft", f"num_processes: 2\nmax_length: 64\ndeepspeed: {json.dumps(document)}\n")
    verdict = checked(config=str(file), trainer="sft", gpu="H100-80GB")
    assert verdict.outcome is Outcome.CANNOT_RUN, verdict.headline
    [error] = [item.message for item in verdict.findings if item.severity is Severity.ERROR]
    # Of ZeRO-3, transformers reads the document before the first step, when TRL builds the trainer.
    assert error.startswith(("DeepSpeed refuses its document.", "TRL refuses it: "))
    assert f"{name} Extra inputs are not permitted" in error
