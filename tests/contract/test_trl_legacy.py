"""Contract with TRL: it refuses the removed keys of the legacy table, and accepts their replacements."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.version import Version

from autotune.core.files.nested import mapping
from autotune.inspection.legacy import SHARED, legacy_of
from tests.contract.building import config_class
from tests.inspection.released import RECORDED, TRAINERS
from tests.inspection.test_legacy import rows

ENV = "env"
# Values of keys whose field has no default that could stand for one.
VALUES: Mapping[str, Any] = {
    "use_liger": True,
    "rpo_alpha": 0.5,
    "vllm_guided_decoding_regex": "a+",
    "vllm_max_model_len": 256,
    "vllm_importance_sampling_cap": 2.0,
    "reward_model_path": "a/model",
    "response_length": 53,
    "exp_name": "a name",
    "dispatch_batches": True,
    "split_batches": True,
    "gradient_checkpointing_use_reentrant": True,
    "adafactor": True,
    "bnb_4bit_use_double_quant": True,
    "group_by_length": True,
    "include_inputs_for_metrics": True,
    "push_to_hub_model_id": "a/model",
    "push_to_hub_token": "token",
    "torchdynamo": "inductor",
    "warmup_ratio": 0.1,
    "no_cuda": True,
    "use_transformers_paged": True,
    "hub_model_revision": "v1.0",
    "preprocessing_num_workers": 4,
    "target_modules": "all-linear",
    "use_flash_attention_2": True,
    "wandb_entity": "an entity",
    "wandb_project": "a project",
}


def classes(trainer: str) -> tuple[Any, ...]:
    """Return what the command of a trainer parses, its own configuration second."""
    import trl
    from trl.scripts.grpo import GRPOScriptArguments
    from trl.scripts.rloo import RLOOScriptArguments
    from trl.scripts.utils import DatasetMixtureConfig, ScriptArguments

    script = {"grpo": GRPOScriptArguments, "rloo": RLOOScriptArguments}.get(trainer, ScriptArguments)
    return script, config_class(trainer), trl.ModelConfig, DatasetMixtureConfig


def fields(trainer: str) -> dict[str, Any]:
    return {field.name: field for kind in classes(trainer) for field in dataclasses.fields(kind)}


def known_rows() -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yield the rows of the table, but for those on what only a later release than the installed one lost."""
    for section, key, row in rows():
        installed = version("transformers" if section == "transformers" else "trl")
        if Version(row.get("gone", "0")) <= Version(installed):
            yield section, key, row


def rows_of(trainer: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    return ((key, row) for section, key, row in known_rows() if section in {trainer, *SHARED})


def parsed(trainer: str, values: Mapping[str, object], directory: Path) -> dict[str, Any]:
    """Return a configuration as TRL's own parser reads it."""
    from trl import TrlParser

    file = directory / "c.yaml"
    file.write_text(yaml.safe_dump({"output_dir": str(directory), "bf16": False, "use_cpu": True, **values}))
    configs = TrlParser(classes(trainer)).parse_args_and_config(["--config", str(file)])
    return {name: value for config in configs for name, value in vars(config).items()}


@pytest.mark.parametrize("trainer", TRAINERS)
def test_what_went_or_never_was_is_no_field_and_what_is_still_taken_is_one(trainer: str) -> None:
    known = fields(trainer)
    went = {key for key, row in rows_of(trainer) if {"gone", "never"} & row.keys()}
    taken = {key for key, row in rows_of(trainer) if "since" in row or ("values" in row and "gone" not in row)}
    assert went & known.keys() == set()
    assert taken <= known.keys()


@pytest.mark.parametrize("trainer", TRAINERS)
def test_every_field_of_a_recorded_release_is_there_or_in_the_table(trainer: str) -> None:
    known = fields(trainer)
    recorded = {
        name
        for section in (trainer, "model", "script", "transformers")
        for name, (first, _) in RECORDED["fields"][section].items()
        # The installed release may be older than the newest that was recorded.
        if Version(first) <= Version(version("transformers" if section == "transformers" else "trl"))
    }
    assert {name for name in recorded - known.keys() if legacy_of(trainer, name, "a value") is None} == set()


def replacements() -> Iterator[tuple[str, str, Any]]:
    for section, key, row in known_rows():
        trainer = section if section in TRAINERS else "sft"
        if row.get("write"):
            yield trainer, key, None
        yield from ((trainer, key, value) for value, more in row.get("values", {}).items() if more.get("write"))


@pytest.mark.parametrize(("trainer", "key", "value"), list(replacements()))
def test_what_the_table_says_to_write_is_taken_by_trl_s_parser(
    trainer: str, key: str, value: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # TRL's parser sets the variables under `env`.
    monkeypatch.setattr(os, "environ", os.environ.copy())
    known = fields(trainer)
    if value is None:
        row = next(row for name, row in rows_of(trainer) if name == key and row.get("write"))
        target = next(iter(row["write"]))
        value = VALUES[key] if key in VALUES else known[target].default
    found = legacy_of(trainer, key, value)
    assert found is not None
    assert found.write
    assert found.write.keys() <= {*known, ENV}
    result = parsed(trainer, found.write, tmp_path)
    assert mapping(found.write.get(ENV)).items() <= os.environ.items()
    for name, wanted in ((name, wanted) for name, wanted in found.write.items() if name != ENV):
        got = result[name]
        held = (
            {part: getattr(got, part) for part in wanted}
            if isinstance(wanted, dict) and name.endswith("config")
            else got
        )
        assert held in (wanted, [wanted]), "a loss may become a list of losses"
        choices = known[name].metadata.get("choices")
        assert choices is None or wanted in choices


@pytest.mark.parametrize("trainer", TRAINERS)
def test_values_that_went_are_no_choices(trainer: str) -> None:
    known = fields(trainer)
    for key, row in rows_of(trainer):
        for value, more in row.get("values", {}).items():
            if "gone" in more:
                assert value not in (known[key].metadata.get("choices") or ())


@pytest.mark.parametrize(
    ("trainer", "values"),
    [
        ("sft", {"packing_strategy": "bfd-requeue"}),
        ("sft", {"loss_type": "chunked_nll"}),
        ("grpo", {"use_transformers_paged": True}),
        ("rloo", {"use_transformers_paged": True}),
        ("grpo", {"vllm_importance_sampling_cap": 2.5}),
    ],
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_what_is_deprecated_does_what_is_to_be_written(trainer: str, values: Mapping[str, Any], tmp_path: Path) -> None:
    ((key, value),) = values.items()
    found = legacy_of(trainer, key, value)
    assert found is not None
    assert found.accepted
    assert found.write
    before, after = parsed(trainer, values, tmp_path), parsed(trainer, found.write, tmp_path)
    assert {name for name in before if before[name] != after[name]} - {"distributed_state"} <= {key}
