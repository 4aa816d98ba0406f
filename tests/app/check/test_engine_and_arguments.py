"""Engine documents and the trainer's arguments are combined as by transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import yaml
from packaging.version import Version

from autotune.core.configuration import Configuration, ReadCommand
from autotune.core.documents.verdict import Outcome, Severity
from autotune.errors import InputError, UnreadError
from autotune.inspection.command_line import read_command_line
from autotune.step.fields import plain
from autotune.userconfig.engine import as_launched, engine_args
from autotune.userconfig.launch import Launching, launching, read_document
from autotune.userconfig.launch_problems import precision_findings
from autotune.userconfig.written import WrittenConfig
from tests.app.check.conftest import Checked, Write
from tests.app.check.starting import read_by_accelerate
from tests.step.plans import needs_deepspeed

ZERO = {"distributed_type": "DEEPSPEED", "num_processes": 2, "num_machines": 1, "use_cpu": False}
STAGE = {"zero_optimization": {"stage": 2}}
SIZES = {"train_batch_size": 128, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 8}


def optimizer(**params: object) -> dict[str, object]:
    """Return the part of a document of DeepSpeed's for an optimizer."""
    return {"optimizer": {"type": "AdamW", "params": params}}


def configured(**args: Any) -> Configuration:
    """Return arguments as TRL's class resolves them."""
    from trl import SFTConfig

    values = vars(SFTConfig("out", use_cpu=True, report_to="none", **args))
    return Configuration("SFTConfig", {name: plain(value) for name, value in values.items()}, {})


def deepspeed_of(document: Mapping[str, Any], folder: Path, **args: Any) -> Any:
    """Return the document of DeepSpeed with which transformers trains by accelerate's real launcher."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env
    from transformers.integrations.deepspeed import propagate_args_to_deepspeed
    from trl import SFTConfig

    file = folder / "accelerate.yaml"
    file.write_text(yaml.safe_dump(dict(document)), encoding="utf-8")
    words = launch_command_parser().parse_args(["--config_file", str(file), "train.py"])
    words, _, _ = _validate_launch_command(words)
    words.deepspeed_fields_from_accelerate_config = ""
    with mock.patch("accelerate.utils.launch.is_port_in_use", return_value=False):
        _, env = prepare_deepspeed_cmd_env(words)
    with (
        mock.patch.dict("os.environ", {name: value for name, value in env.items() if name.startswith("ACCELERATE_")}),
        mock.patch.object(SFTConfig, "world_size", 2),
    ):
        config: Any = SFTConfig("out", use_cpu=True, report_to="none", **args)
        accelerator = SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=config.deepspeed_plugin))
        propagate_args_to_deepspeed(accelerator, config)
        if config.auto_find_batch_size:
            # `Trainer._update_auto_batch_size` does it again.
            propagate_args_to_deepspeed(accelerator, config, auto_find_batch_size=True)
    return config.deepspeed_plugin.hf_ds_config


@needs_deepspeed
@pytest.mark.parametrize(
    ("section", "written", "args", "key"),
    [
        ({"zero_stage": 1, "gradient_accumulation_steps": 1}, None, {"gradient_accumulation_steps": 4}, "accumulation"),
        ({"zero_stage": 1, "gradient_accumulation_steps": 4}, None, {"gradient_accumulation_steps": 4}, ""),
        ({"zero_stage": 2}, None, {"gradient_accumulation_steps": 4}, ""),
        ({"zero_stage": 2, "gradient_clipping": 0.5}, None, {}, "gradient_clipping"),
        ({"zero_stage": 2, "gradient_clipping": 0.5}, None, {"max_grad_norm": 0.5}, ""),
        ({}, STAGE, {"gradient_accumulation_steps": 4}, "gradient_accumulation_steps: 1"),
        ({}, STAGE, {}, ""),
        ({}, {**STAGE, **SIZES}, {"gradient_accumulation_steps": 8}, ""),
        ({}, {**STAGE, **SIZES}, {"gradient_accumulation_steps": 4}, "train_batch_size: 128"),
        ({}, {**STAGE, "train_batch_size": 8}, {}, "train_batch_size: 8"),
        ({}, {**STAGE, "bf16": {"enabled": True}}, {"bf16": False}, "bf16.enabled: True"),
        ({}, {**STAGE, "bf16": {"enabled": True}}, {}, ""),
        ({}, {**STAGE, "gradient_clipping": None}, {}, ""),
        ({}, {**STAGE, **optimizer(lr=1e-4)}, {"learning_rate": 2e-5}, "optimizer.params.lr: 0.0001"),
        ({}, {**STAGE, **optimizer(lr=1e-4)}, {"learning_rate": 1e-4}, ""),
        ({}, {**STAGE, **optimizer(betas=[0.9, 0.95])}, {}, "optimizer.params.betas"),
        ({}, {**STAGE, **optimizer(betas=[0.9, 0.95])}, {"adam_beta2": 0.95}, ""),
        ({}, {**STAGE, **optimizer(weight_decay=0.1)}, {}, "optimizer.params.weight_decay"),
        ({}, {**STAGE, "scheduler": {"params": {"warmup_max_lr": 1.0}}}, {}, "scheduler.params.warmup_max_lr"),
        ({}, {**STAGE, "train_batch_size": 8}, {"auto_find_batch_size": True}, ""),
    ],
    ids=str,
)
def test_numbers_of_deepspeed_s_document_agree_with_the_arguments_or_end_the_run(
    section: dict[str, object], written: dict[str, object] | None, args: dict[str, Any], key: str, tmp_path: Path
) -> None:
    if written is not None:
        (tmp_path / "ds.json").write_text(json.dumps(written), encoding="utf-8")
        section = {**section, "deepspeed_config_file": str(tmp_path / "ds.json")}
    document = {**ZERO, "deepspeed_config": section}
    assert bool(deepspeed_of(document, tmp_path, **args).mismatches) is bool(key)
    if key:
        with pytest.raises(InputError, match=f"{key}.* transformers refuses the contradiction"):
            engine_args(document, configured(**args), 2)
        return
    found: Any = engine_args(document, configured(**args), 2)["deepspeed"]
    assert {found[name] for name in SIZES} == {"auto"}


@needs_deepspeed
@pytest.mark.parametrize(
    ("params", "args", "key"),
    [
        ({"total_num_steps": 100, "warmup_num_steps": 10}, {"warmup_steps": 10}, ""),
        ({"total_num_steps": 50}, {}, "total_num_steps: 50"),
        ({"warmup_num_steps": 10}, {}, "warmup_num_steps: 10"),
        pytest.param(
            {"warmup_num_steps": 1},
            {},
            "",
            marks=pytest.mark.skipif(
                Version(version("transformers")) < Version("5.23"), reason="older transformers may need 0 there"
            ),
        ),
        ({"warmup_num_steps": 10}, {"warmup_steps": 0.1}, ""),
    ],
    ids=str,
)
def test_numbers_of_deepspeed_s_scheduler_agree_with_the_arguments_or_end_the_run(
    params: dict[str, int], args: dict[str, Any], key: str
) -> None:
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig, unset_hf_deepspeed_config
    from trl import SFTConfig

    steps = 100
    document = {**STAGE, "scheduler": {"type": "WarmupDecayLR", "params": params}}
    given = SFTConfig("out", use_cpu=True, report_to="none", max_steps=steps, **args)
    try:
        own = HfTrainerDeepSpeedConfig(document)
        with pytest.raises(ValueError, match="mismatch") if key else nullcontext():
            own.trainer_config_finalize(given, SimpleNamespace(), steps)
    finally:
        unset_hf_deepspeed_config()
    config = configured(max_steps=steps, **args)
    config = Configuration(config.kind, {**config.values, "deepspeed": document}, {})
    if key:
        with pytest.raises(InputError, match=f"{key}.* transformers refuses the contradiction"):
            engine_args({}, config, 2)
        return
    # A trace and a probe train for fewer steps.
    found: Any = engine_args({}, config, 2)["deepspeed"]
    assert found["scheduler"]["params"] == dict.fromkeys(params, "auto")


@needs_deepspeed
@pytest.mark.parametrize("args", [{}, {"bf16": False, "fp16": True}, {"bf16": False}], ids=str)
def test_a_precision_that_deepspeed_s_document_lacks_is_the_trainer_s(args: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(STAGE), encoding="utf-8")
    document = {**ZERO, "deepspeed_config": {"deepspeed_config_file": str(tmp_path / "ds.json")}}
    trained, config = deepspeed_of(document, tmp_path, **args).config, configured(**args)
    found: Any = engine_args(document, config, 2)["deepspeed"]
    for name in ("bf16", "fp16"):
        assert trained[name]["enabled"] is config.values[name]
        assert found[name] == {"enabled": "auto"}


@needs_deepspeed
@pytest.mark.parametrize("own", [{}, {"bf16": {"enabled": "auto"}}, {"fp16": {"enabled": "auto"}}], ids=str)
def test_a_launcher_s_precision_counts_where_the_trainer_s_own_document_lacks_it(own: dict[str, object]) -> None:
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config
    from trl import SFTConfig

    document = {**STAGE, **own}
    try:
        with (
            mock.patch.dict("os.environ", {"ACCELERATE_MIXED_PRECISION": "bf16"}),
            mock.patch.object(SFTConfig, "world_size", 2),
        ):
            real: Any = SFTConfig("out", use_cpu=True, report_to="none", bf16=False, deepspeed=document)
        # As `AcceleratorState` does with the precision that Trainer passes on.
        real.deepspeed_plugin.set_mixed_precision(real.mixed_precision)
        trains = real.deepspeed_plugin.deepspeed_config["bf16"]["enabled"]
    finally:
        unset_hf_deepspeed_config()
    config = configured(bf16=False)
    config = Configuration(config.kind, {**config.values, "deepspeed": document}, {})
    for kind in ("MULTI_GPU", "DEEPSPEED"):
        started = Launching(2, precision="bf16", document={"distributed_type": kind})
        assert as_launched(config, started).values["bf16"] is trains


def test_a_document_of_the_trainer_s_own_says_nothing_of_what_it_leaves_out(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({**STAGE, "train_batch_size": 512}), encoding="utf-8")
    own = configured(gradient_accumulation_steps=4)
    own = Configuration(own.kind, {**own.values, "deepspeed": str(tmp_path / "ds.json")}, {})
    # Nothing sets the number of processes.
    found: Any = engine_args({}, own, 1)["deepspeed"]
    assert {found[name] for name in SIZES} == {"auto"}
    with pytest.raises(InputError, match="train_batch_size: 512"):
        engine_args({}, own, 2)
    assert engine_args({}, own, 16)


def test_a_disk_that_deepspeed_offloads_to_leaves_the_answer_open() -> None:
    part = {"offload_optimizer": {"device": "nvme", "nvme_path": "/disk"}}
    own = Configuration("SFTConfig", {"deepspeed": {"zero_optimization": {"stage": 3, **part}}}, {})
    launched = {**ZERO, "deepspeed_config": {"zero_stage": 3, "offload_param_device": "nvme"}}
    for document, config, key in (({}, own, "offload_optimizer"), (launched, configured(), "offload_param")):
        with pytest.raises(UnreadError, match=f"zero_optimization.{key}.device: nvme is neither traced nor probed"):
            engine_args(document, config, 2)


def test_trl_s_own_zero1_takes_one_micro_batch(write: Write, checked: Checked) -> None:
    assert engine_args(read_document("zero1"), configured(), 8)
    file = write("sft", "accelerate_config: zero1\ngradient_accumulation_steps: 4\n")
    verdict = checked(config=str(file), trainer="sft", gpu="H100-80GB")
    assert verdict.outcome is Outcome.CANNOT_RUN
    [error] = [item for item in verdict.findings if item.severity is Severity.ERROR]
    assert (error.key, Path(error.file).name, error.line) == ("gradient_accumulation_steps", "config.yaml", 9)
    assert error.message == (
        "DeepSpeed's document has gradient_accumulation_steps: 1, and the trainer's own arguments give 4: transformers"
        " refuses the contradiction. Write auto instead; in accelerate's file, a missing gradient_accumulation_steps"
        " counts as 1."
    )


def test_all_contradictions_of_a_document_are_reported_without_a_model(
    write: Write, checked: Checked, tmp_path: Path
) -> None:
    document = {**STAGE, "gradient_clipping": 0.5, "bf16": {"enabled": True}, "optimizer": {"params": {"lr": 1}}}
    (tmp_path / "ds.json").write_text(json.dumps(document, indent=2), encoding="utf-8")
    section = {**ZERO, "deepspeed_config": {"deepspeed_config_file": str(tmp_path / "ds.json")}}
    (tmp_path / "accelerate.yaml").write_text(yaml.safe_dump(section), encoding="utf-8")
    own = "gradient_accumulation_steps: 4\nbf16: false\nfp16: true\n"
    file = write("sft", f"accelerate_config: {tmp_path / 'accelerate.yaml'}\n{own}")
    verdict = checked(config=str(file), trainer="sft", fits=False)
    assert (verdict.outcome, verdict.processes) == (Outcome.CANNOT_RUN, 2)
    [error] = [item.message for item in verdict.findings if item.severity is Severity.ERROR]
    contradictions = "gradient_accumulation_steps: 1", "gradient_clipping: 0.5", "bf16.enabled: True"
    assert all(each in error for each in (*contradictions, "optimizer.params.lr: 1"))


def by(words: str, document: Mapping[str, object], folder: Path) -> Launching:
    """Return how a command starts a training by a document for accelerate."""
    (folder / "launch.yaml").write_text(yaml.safe_dump(dict(document)), encoding="utf-8")
    command = read_command_line(
        [*words.replace("FILE", str(folder / "launch.yaml")).split(), "trl/scripts/sft.py", "--config", "c.yaml"]
    )
    written = WrittenConfig(command, None, "sft")
    return launching(written, read_by_accelerate(written))


@pytest.mark.parametrize(
    ("words", "precision"),
    [
        ("accelerate launch --config_file FILE", "bf16"),
        ("accelerate launch --config_file FILE --mixed_precision fp16", "fp16"),
        ("accelerate launch --config_file FILE --mixed_precision no", "no"),
        ("accelerate launch", "no"),
        ("torchrun", "no"),
    ],
)
def test_a_precision_that_accelerate_hands_on_counts_where_both_arguments_are_false(
    words: str, precision: str, tmp_path: Path
) -> None:
    started = by(words, {"distributed_type": "MULTI_GPU", "num_processes": 2, "mixed_precision": "bf16"}, tmp_path)
    assert started.precision == precision
    with mock.patch.dict("os.environ", {"ACCELERATE_MIXED_PRECISION": precision}):
        for args in ({"bf16": False}, {"bf16": False, "fp16": True}, {}):
            config = configured(**args)
            found = as_launched(config, started)
            trains = next((name for name in ("fp16", "bf16") if found.values[name]), "no")
            assert trains == config.values["mixed_precision"]
            told = list(
                precision_findings(WrittenConfig(read_command_line(["trl", "sft"]), None, "sft"), reads(config), found)
            )
            assert bool(told) is (found is not config)
            assert all(f"{precision} is false here" in item.message for item in told)


def reads(config: Configuration) -> ReadCommand:
    return ReadCommand({config.kind: config})


def test_a_precision_that_is_not_traced_leaves_the_answer_open() -> None:
    with pytest.raises(UnreadError, match="mixed_precision: fp8"):
        as_launched(configured(bf16=False), Launching(precision="fp8"))
    assert as_launched(configured(), Launching(precision="fp8")).values["bf16"]


@pytest.mark.parametrize(
    ("kind", "words"),
    [("MULTI_GPU", ""), ("NO", ""), ("NO", "--dynamo_backend inductor"), ("DEEPSPEED", "")],
    ids=str,
)
def test_a_model_that_accelerate_alone_compiles_leaves_the_answer_open(kind: str, words: str, tmp_path: Path) -> None:
    own = {} if words else {"dynamo_config": {"dynamo_backend": "INDUCTOR"}}
    document = {"distributed_type": kind, "num_processes": 1 if kind == "NO" else 2, **own}
    started = by(f"accelerate launch --config_file FILE {words}", document, tmp_path)
    as_launched(Configuration("SFTConfig", {"torch_compile": True}, {}), started)
    # Its launcher of DeepSpeed passes no backend on.
    with nullcontext() if kind == "DEEPSPEED" else pytest.raises(UnreadError, match="dynamo_backend: inductor"):
        as_launched(configured(), started)


@needs_deepspeed
def test_deepspeed_by_accelerate_s_own_document_ends_where_the_precisions_differ(tmp_path: Path) -> None:
    document = {**ZERO, "deepspeed_config": {"zero_stage": 2}, "mixed_precision": "bf16"}
    assert deepspeed_of(document, tmp_path, bf16=False).mismatches
    started = by("accelerate launch --config_file FILE", document, tmp_path)
    with pytest.raises(InputError, match=r"mixed_precision: bf16 .* refuses the contradiction. Write bf16: true"):
        as_launched(configured(bf16=False), started)
    assert not deepspeed_of(document, tmp_path).mismatches
    # The trainer's own document has a precision of its own.
    own = configured(bf16=False)
    own = Configuration(own.kind, {**own.values, "deepspeed": {"bf16": {"enabled": "auto"}}}, {})
    assert as_launched(own, started) is own
