"""An engine in accelerate's or DeepSpeed's document has the same effect as in the trainer's own fields."""

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
from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin
from packaging.version import Version

from autotune.core.configuration import Configuration
from autotune.core.documents.verdict import Outcome, Severity
from autotune.core.plan import TrainingPlan
from autotune.emit.launch import ACCELERATE, launch_files
from autotune.errors import InputError, UnreadError
from autotune.userconfig.deepspeed import deepspeed_document
from autotune.userconfig.engine import check_documents, engine_args, without_engine
from autotune.userconfig.fsdp import loading_text
from autotune.userconfig.launch import Launching, read_document
from tests.app.check.conftest import Checked, Write
from tests.emit.test_launch import HERE
from tests.settings import plan_with
from tests.step.plans import needs_deepspeed

NOTHING = Configuration("SFTConfig", {}, {})


def zero(args: Mapping[str, object]) -> Mapping[str, Any]:
    """Return the section ``zero_optimization`` of DeepSpeed's document in arguments."""
    document: Any = args["deepspeed"]
    found: Mapping[str, Any] = document["zero_optimization"]
    return found


@pytest.mark.parametrize(("name", "stage"), [("zero1", 1), ("zero2", 2), ("zero3", 3)])
def test_trl_s_own_documents_of_deepspeed_are_read(name: str, stage: int) -> None:
    assert zero(engine_args(read_document(name), NOTHING))["stage"] == stage


def test_trl_s_own_documents_of_fsdp_are_read_or_refused() -> None:
    found = engine_args(read_document("fsdp2"), NOTHING)
    assert found["fsdp"] is True
    assert found["fsdp_config"] == {
        "version": 2, "reshard_after_forward": True, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"
    }  # fmt: skip
    with pytest.raises(UnreadError, match="fsdp_version: 2"):
        engine_args(read_document("fsdp1"), NOTHING)
    assert engine_args(read_document("multi_gpu"), NOTHING) == {}


def test_a_reference_that_zero3_gathers_whole_is_not_known() -> None:
    own: dict[str, object] = {"sync_ref_model": True}
    with pytest.raises(UnreadError, match="sync_ref_model with ZeRO-3"):
        engine_args(read_document("zero3"), Configuration("DPOConfig", own, {}))
    assert zero(engine_args(read_document("zero2"), Configuration("DPOConfig", own, {})))["stage"] == 2


def test_what_saves_no_host_memory_is_told_wherever_it_is_written() -> None:
    def said(document: Mapping[str, object], own: Mapping[str, object]) -> bool:
        return loading_text(document, Configuration("SFTConfig", own, {})) is not None

    assert said(read_document("fsdp2"), {})
    keys = {"cpu_ram_efficient_loading": "true"}
    assert said({}, {"fsdp": True, "fsdp_config": keys})
    # The trainer's own document comes first, and one without FSDP is read by nothing.
    assert not said(read_document("fsdp2"), {"fsdp": True, "fsdp_config": {}})
    assert not said({"distributed_type": "MULTI_GPU", "fsdp_config": keys}, {})
    assert not said(read_document("zero3"), {})


@pytest.mark.parametrize("choices", [{"sharding": "zero3", "offload": "both"}, {"sharding": "zero1"}], ids=str)
def test_what_is_handed_over_is_read_as_it_was_planned(choices: dict[str, str | int], tmp_path: Path) -> None:
    plan: TrainingPlan = plan_with(HERE, choices)
    for name, text in launch_files(plan, tmp_path).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    document = yaml.safe_load((tmp_path / ACCELERATE).read_text())
    assert engine_args(document, NOTHING)["deepspeed"] == plan.args["deepspeed"]


@pytest.mark.parametrize(
    "choices",
    [
        {"context_parallel": 4, "pad_to_multiple_of": 64},
        {"dp_replicate_size": 2},
        {"context_parallel": 2, "pad_to_multiple_of": 64, "dp_replicate_size": 4},
    ],
    ids=str,
)
def test_groups_of_processes_are_read_as_they_were_handed_over(choices: dict[str, str | int], tmp_path: Path) -> None:
    plan = plan_with(HERE, {"sharding": "fsdp2", **choices})
    document = yaml.safe_load(launch_files(plan, tmp_path)[ACCELERATE])
    own = Configuration("SFTConfig", {name: plan.args[name] for name in ("fsdp", "fsdp_config")}, {})
    found = engine_args(document, own)
    assert {"dp_shard_size": 1, **TrainingPlan("sft", found).parallelism} == {"dp_shard_size": 1, **plan.parallelism}
    assert TrainingPlan("sft", found, launch=plan.launch).data_ranks == plan.data_ranks


def test_the_trainer_s_own_file_comes_before_accelerate_s(tmp_path: Path) -> None:
    (tmp_path / "own.json").write_text(json.dumps({"zero_optimization": {"stage": 1}}), encoding="utf-8")
    own = Configuration("SFTConfig", {"deepspeed": str(tmp_path / "own.json")}, {"deepspeed": None})
    document = read_document("zero3")
    assert zero(engine_args(document, own))["stage"] == 1
    assert without_engine(own).values == {"deepspeed": None}
    with pytest.raises(InputError, match=r"absent\.json cannot be read"):
        engine_args({}, Configuration("SFTConfig", {"deepspeed": "absent.json"}, {}))


@needs_deepspeed
@pytest.mark.parametrize("given", [{}, {"gradient_clipping": 0.5}, {"gradient_clipping": 0}], ids=str)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_clips_as_accelerate_s_keys_have_it(
    stage: int, given: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    if given:
        # As accelerate's launcher hands it on (utils/launch.py, prepare_deepspeed_cmd_env).
        monkeypatch.setenv("ACCELERATE_GRADIENT_CLIPPING", str(given["gradient_clipping"]))
    wanted = DeepSpeedPlugin(zero_stage=stage).deepspeed_config
    document = {**read_document(f"zero{stage}"), "deepspeed_config": {"zero_stage": stage, **given}}
    found = deepspeed_document(document, NOTHING)
    assert found is not None
    assert found.get("gradient_clipping") == wanted.get("gradient_clipping")


def refused_by_accelerate(fields: list[str], monkeypatch: pytest.MonkeyPatch) -> bool:
    """Return whether accelerate refuses keys of its own file beside DeepSpeed's document."""
    # accelerate's launcher hands on which keys its file has (commands/launch.py, utils/launch.py).
    monkeypatch.setenv("ACCELERATE_CONFIG_DS_FIELDS", ",".join(fields))
    try:
        DeepSpeedPlugin._deepspeed_config_checks(SimpleNamespace())
    except ValueError:
        return True
    return False


@pytest.mark.parametrize(
    "given",
    [
        {}, {"deepspeed_multinode_launcher": "standard"}, {"zero3_init_flag": True}, {"zero_stage": 3},
        {"offload_optimizer_device": "none"}, {"offload_param_device": "cpu"}, {"gradient_clipping": 1.0},
        {"gradient_accumulation_steps": 1}, {"zero3_save_16bit_model": True}, {"offload_param_nvme_path": "/nvme"},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("own", [True, False])
def test_deepspeed_s_document_is_refused_beside_the_keys_that_accelerate_refuses(
    given: dict[str, object], precision: str | None, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = [*given, *(["mixed_precision"] if precision else [])]
    named = {} if own else {"deepspeed_config_file": "ds.json"}
    document = {"distributed_type": "DEEPSPEED", "deepspeed_config": {**given, **named}, "mixed_precision": precision}
    config = Configuration("SFTConfig", {"deepspeed": "ds.json"} if own else {}, {})
    if not refused_by_accelerate(fields, monkeypatch):
        check_documents(Launching(8, document=document, is_observed=True), config)
        return
    with pytest.raises(InputError, match=f"{'deepspeed' if own else 'deepspeed_config_file'} and .*{fields[-1]}"):
        check_documents(Launching(8, document=document, is_observed=True), config)
    # Without such a document, or without DeepSpeed, nothing is refused.
    check_documents(Launching(8, document={**document, "distributed_type": "MULTI_GPU"}, is_observed=True), config)
    check_documents(Launching(8, document={**document, "deepspeed_config": given}, is_observed=True), NOTHING)


def test_the_precision_is_that_of_the_words_where_they_say_it() -> None:
    document = {"distributed_type": "DEEPSPEED", "deepspeed_config": {}, "mixed_precision": "bf16"}
    config = Configuration("SFTConfig", {"deepspeed": "ds.json"}, {})
    check_documents(Launching(8, document=document, is_observed=True, precision_by_option=True), config)
    with pytest.raises(InputError, match="deepspeed and accelerate's own mixed_precision"):
        check_documents(Launching(8, document=document, is_observed=True), config)


def test_an_error_about_two_documents_has_the_line_of_the_trainer_s(write: Write, checked: Checked) -> None:
    file = write("sft", "accelerate_config: zero2\ndeepspeed: {zero_optimization: {stage: 3}}\n")
    verdict = checked(config=str(file), trainer="sft", fits=False)
    assert verdict.outcome is Outcome.CANNOT_RUN
    error = next(item for item in verdict.findings if item.severity is Severity.ERROR)
    assert (error.key, error.line) == ("deepspeed", 9)
    assert "zero_stage" in error.message


def test_an_engine_that_words_choose_leaves_the_answer_open(write: Write, checked: Checked) -> None:
    file = write("sft", "zero_stage: 3\nnum_processes: 8\n")
    verdict = checked(command=("trl", "sft", "--config", str(file), "--use_deepspeed"), gpu="H100-80GB")
    assert (verdict.outcome, verdict.exit_code) == (Outcome.UNKNOWN, 3)
    assert "--use_deepspeed" in verdict.reason
    host = write("sft", "deepspeed_hostfile: hosts\nnum_processes: 8\n")
    assert checked(config=str(host), trainer="sft", fits=False).outcome is Outcome.READ


@pytest.mark.nightly
@needs_deepspeed
def test_a_configuration_of_eight_processes_is_judged_by_what_the_worst_of_them_needs(
    write: Write, checked: Checked
) -> None:
    needs = {}
    for name in ("multi_gpu", "zero3"):
        file = write("sft", f"accelerate_config: {name}\nmax_length: 64\nper_device_train_batch_size: 1\n")
        verdict = checked(config=str(file), trainer="sft", gpu="H100-80GB")
        assert (verdict.outcome, verdict.processes) == (Outcome.FITS, 8), verdict.findings
        assert verdict.need is not None
        assert verdict.need.memory is not None
        needs[name] = verdict.need.memory.breakdown["optimizer state"]
    # Shards are rounded up to whole elements.
    assert needs["zero3"] == pytest.approx(needs["multi_gpu"] / 8, rel=0.1)


@pytest.mark.parametrize("storage", ["", pytest.param("bnb_4bit_quant_storage: bfloat16\n", marks=pytest.mark.nightly)])
def test_weights_in_4_bits_are_traced_with_fsdp2_whether_it_shares_them_out(
    storage: str, write: Write, checked: Checked
) -> None:
    adapters = f"use_peft: true\nload_in_4bit: true\ndtype: bfloat16\nmax_length: 64\n{storage}"
    file = write("sft", f"accelerate_config: fsdp2\nper_device_train_batch_size: 1\n{adapters}")
    verdict = checked(config=str(file), trainer="sft", gpu="H100-80GB")
    if not storage and Version(version("accelerate")) < Version("1.14"):
        assert verdict.outcome is Outcome.CANNOT_RUN, verdict.headline
        return
    assert verdict.outcome is Outcome.FITS, verdict.headline
    told = [item.message for item in verdict.findings if "sharding" in item.message]
    assert len(told) == (0 if storage else 1)
    assert all("each process holds the 4bit-nf4 weights whole" in message for message in told)


@pytest.mark.parametrize(
    ("engine", "own", "told"),
    [
        (
            "fsdp2",
            "optim: adamw_bnb_8bit\n",
            "optimizer=adamw_bnb_8bit: bitsandbytes cannot update the parameters that sharding=fsdp2 shards",
        ),
        ("fsdp2", "optim: adafactor\n", "optimizer=adafactor: transformers' adafactor adds the shards"),
        (
            "fsdp2",
            "optim: adagrad\n",
            "optimizer=adagrad: adagrad keeps state of the weights that sharding=fsdp2 replaces by shards",
        ),
        ("fsdp2", "optim: ademamix\n", "optimizer=ademamix: bitsandbytes cannot update the parameters that"),
        ("fsdp2", "use_peft: true\nload_in_8bit: true\n", "sharding=fsdp2: 8-bit weights lose their scales"),
        (
            "zero3",
            "activation_offloading: true\ngradient_checkpointing: false\n",
            "activation_offloading=on: TRL's fused head fails with sharding=zero3",
        ),
    ],
    ids=["bitsandbytes", "adafactor", "adagrad", "a family", "8 bits", "offloading"],
)
def test_choices_that_fail_beside_an_engine_are_errors(
    engine: str, own: str, told: str, write: Write, checked: Checked
) -> None:
    file = write("sft", f"accelerate_config: {engine}\nmax_length: 64\nper_device_train_batch_size: 1\n{own}")
    verdict = checked(config=str(file), trainer="sft", gpu="H100-80GB")
    assert verdict.outcome is Outcome.CANNOT_RUN
    errors = [item.message for item in verdict.findings if item.severity is Severity.ERROR]
    assert len(errors) == 1
    assert errors[0].startswith(told)


def test_fsdp_by_accelerate_wraps_no_layers_unless_its_file_does() -> None:
    document: dict[str, Any] = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}}
    found: Any = engine_args(document, NOTHING)["fsdp_config"]
    assert FullyShardedDataParallelPlugin(fsdp_version=2).auto_wrap_policy is None
    assert found["auto_wrap_policy"] == "NO_WRAP"
    # transformers' own default wraps.
    own: Any = engine_args(document, Configuration("SFTConfig", {"fsdp": True, "fsdp_config": {}}, {}))["fsdp_config"]
    assert "auto_wrap_policy" not in own
    document["fsdp_config"] |= {"fsdp_activation_checkpointing": True, "fsdp_activation_checkpointing_offload": True}
    with pytest.raises(UnreadError, match="fsdp_activation_checkpointing_offload is not traced"):
        engine_args(document, NOTHING)


def test_keys_of_fsdp_that_are_refused_or_change_its_shards_are_named() -> None:
    def document(**keys: object) -> dict[str, object]:
        return {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2, **keys}}

    with pytest.raises(ValueError, match="LOCAL_STATE_DICT"):
        FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="LOCAL_STATE_DICT")
    with pytest.raises(InputError, match=r"fsdp_state_dict_type: LOCAL_STATE_DICT .* Write SHARDED_STATE_DICT"):
        engine_args(document(fsdp_state_dict_type="LOCAL_STATE_DICT"), NOTHING, 2)
    with pytest.raises(UnreadError, match="fsdp_ignored_modules is not traced"):
        engine_args(document(fsdp_ignored_modules=".*experts"), NOTHING, 2)
    with pytest.raises(UnreadError, match="FSDP of a single process"):
        engine_args(document(), NOTHING, 1)


def test_fsdp_of_a_process_without_a_rank_is_refused_as_by_transformers(tmp_path: Path) -> None:
    from torch.nn import Linear
    from transformers import Trainer, TrainingArguments

    with mock.patch.dict("os.environ"), pytest.raises(ValueError, match="fsdp only works in distributed training"):
        Trainer(Linear(1, 1), TrainingArguments(str(tmp_path), use_cpu=True, fsdp=True))
    own = Configuration("SFTConfig", {"fsdp": True}, {})
    with pytest.raises(InputError, match="fsdp of a single process without a rank: transformers refuses it"):
        check_documents(Launching(1), own)
    # torchrun gives its single process a rank; nothing may have set the number of processes.
    for started in (Launching(1, is_ranked=True), Launching(1, is_guessed=True), Launching(2)):
        check_documents(started, own)


BEST = {"save_only_model": True, "load_best_model_at_end": True}


@pytest.mark.parametrize(
    ("document", "own", "refused"),
    [
        ("zero3", {"auto_find_batch_size": True}, "auto_find_batch_size with ZeRO-3"),
        ("zero2", {"auto_find_batch_size": True}, ""),
        ("zero2", {"fsdp": True}, "fsdp together with DeepSpeed"),
        ("zero2", BEST, "save_only_model and load_best_model_at_end with deepspeed"),
        ("fsdp2", BEST, "save_only_model and load_best_model_at_end with fsdp"),
        ("fsdp2", {"save_only_model": True}, ""),
        ("multi_gpu", BEST, ""),
    ],
    ids=str,
)
def test_what_transformers_refuses_beside_an_engine_is_told(
    document: str, own: dict[str, object], refused: str
) -> None:
    config = Configuration("SFTConfig", own, {})
    with pytest.raises(InputError, match=refused) if refused else nullcontext():
        engine_args(read_document(document), config)


def test_weights_alone_are_saved_by_fsdp_where_they_are_gathered() -> None:
    # transformers compares the same text (Trainer.create_accelerator_and_postprocess).
    assert "SHARDED_STATE_DICT" in str(FullyShardedDataParallelPlugin(fsdp_version=2).state_dict_type)
    keys = {"fsdp_version": 2, "fsdp_auto_wrap_policy": "NO_WRAP"}
    document: dict[str, Any] = {"distributed_type": "FSDP", "fsdp_config": keys}
    alone = Configuration("SFTConfig", {"save_only_model": True}, {})
    with pytest.raises(InputError, match=r"fsdp_state_dict_type: SHARDED_STATE_DICT.* Write .*FULL_STATE_DICT"):
        engine_args(document, alone)
    keys["fsdp_state_dict_type"] = "FULL_STATE_DICT"
    assert engine_args(document, alone)["fsdp"] is True
    # transformers' own default is another one.
    own = {"save_only_model": True, "fsdp": True, "fsdp_config": {"version": 2}}
    assert engine_args({}, Configuration("SFTConfig", own, {}))["fsdp"] is True
    own["fsdp_config"] = {"state_dict_type": "SHARDED_STATE_DICT"}
    with pytest.raises(InputError, match="save_only_model with"):
        engine_args({}, Configuration("SFTConfig", own, {}))


def test_what_trains_by_another_engine_is_not_taken_for_replicas() -> None:
    with pytest.raises(UnreadError, match="distributed_type: MEGATRON_LM is not supported"):
        engine_args({"distributed_type": "MEGATRON_LM", "num_processes": 8}, NOTHING)


def test_a_relative_document_of_deepspeed_leads_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 1}}), encoding="utf-8")
    document = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "ds.json"}}
    with pytest.raises(InputError, match=r"ds\.json cannot be read"):
        engine_args(document, NOTHING)
    monkeypatch.chdir(tmp_path)
    assert zero(engine_args(document, NOTHING))["stage"] == 1
