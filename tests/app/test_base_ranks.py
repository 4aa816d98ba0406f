"""A search from a configuration of several processes keeps the engine's document, and searches its choices."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from autotune.app import probe
from autotune.app.arguments import ProbeArguments
from autotune.app.output import Output
from autotune.app.search import Run
from autotune.core.candidate import Candidate
from autotune.core.machine import Machine
from autotune.core.plan import Launch, TrainingPlan
from autotune.emit.launch import ACCELERATE, DEEPSPEED, accelerate_document, launch_files
from autotune.errors import InputError
from autotune.trainers import find_trainer
from autotune.userconfig.edit import EditTarget, edited_text, edits_of, values_after
from tests.app.bases import Started, a_base, started
from tests.emit.test_launch import LONG
from tests.settings import EIGHT, TWO, WITH_DEEPSPEED, machine_with, workload

SIZES = "per_device_train_batch_size: 2\ngradient_accumulation_steps: 3\n"
ZERO2: Mapping[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 2,
        "overlap_comm": True,
        "reduce_bucket_size": 1_000_000,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
    },
}
ACCELERATE_ZERO2 = {"distributed_type": "DEEPSPEED", "num_processes": 2, "mixed_precision": "bf16", "debug": True}
FSDP2 = {
    "distributed_type": "FSDP",
    "num_processes": 2,
    "fsdp_config": {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": False,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_state_dict_type": "FULL_STATE_DICT",
        # Of FSDP's first version, and read by neither library.
        "fsdp_use_orig_params": True,
    },
}

ALLTOALL = {"parallelism_config_cp_size": 2, "parallelism_config_cp_comm_strategy": "alltoall"}


def searched(folder: Path, text: str, machine: Machine = TWO, **options: Any) -> Started:
    """Return a search, for two processes by default, that starts from a configuration."""
    return started(a_base(folder, SIZES + text), machine=machine, **options)


def with_zero2(folder: Path, document: Mapping[str, object] = ZERO2, **options: Any) -> Started:
    """Return a search that starts from a file of DeepSpeed's, which accelerate's names."""
    (folder / "ds.json").write_text(json.dumps(document), encoding="utf-8")
    return with_accelerate(
        folder, {**ACCELERATE_ZERO2, "deepspeed_config": {"deepspeed_config_file": str(folder / "ds.json")}}, **options
    )


def with_accelerate(folder: Path, document: Mapping[str, object], further: str = "", **options: Any) -> Started:
    (folder / "accelerate.yaml").write_text(yaml.safe_dump(dict(document)), encoding="utf-8")
    return searched(folder, f"accelerate_config: {folder / 'accelerate.yaml'}  # how we start\n{further}", **options)


def handed_over(search: Started, candidate: Candidate, folder: Path) -> dict[str, Any]:
    """Return the documents of the bundle for a candidate, by their names."""
    trainer, setting = search.problem.trainer, search.problem.setting
    plan = trainer.plan(search.problem.normal(candidate), setting)
    wanted = EditTarget(plan, frozenset(search.options.fixed), bundle=folder)
    text = edited_text(search.base, edits_of(search.base, wanted, trainer, setting))
    files = launch_files(plan, folder, search.base.launching.document)
    found = {
        name: json.loads(content) if name == DEEPSPEED else yaml.safe_load(content) for name, content in files.items()
    }
    return {**found, "config.yaml": yaml.safe_load(text)}


def test_the_global_batch_is_that_of_all_processes_of_the_file(tmp_path: Path) -> None:
    assert searched(tmp_path, "num_processes: 2\n").problem.setting.global_batch_size == 12
    # Without launch keys, each of the requested processes trains by the file.
    assert searched(tmp_path, "").problem.setting.global_batch_size == 12
    fewer = searched(tmp_path, "num_processes: 4\n")
    assert fewer.problem.setting.global_batch_size == 24
    assert fewer.plan.args["gradient_accumulation_steps"] == 6
    with pytest.raises(InputError, match=r"A step of .* has 1 document, which 2 processes cannot divide"):
        started(a_base(tmp_path, "per_device_train_batch_size: 1\nnum_processes: 1\n"), machine=TWO)


@pytest.mark.parametrize("further", ["", "steps_per_generation: 4\n", "generation_batch_size: 16\n"])
def test_what_becomes_of_the_file_can_be_read_in_one_process_as_trl_does_first(further: str, tmp_path: Path) -> None:
    sizes = "num_generations: 4\nper_device_train_batch_size: 2\ngradient_accumulation_steps: 4\nnum_processes: 2\n"
    base = a_base(tmp_path, f"{sizes}{further}", "grpo")
    search = started(base, of=workload(trainer="grpo"), machine=TWO, allow={"steps_per_generation"})
    problem = search.problem
    assert problem.illegal(problem.baseline) is None
    # Two processes have a whole group together.
    half = problem.normal(problem.baseline.but(per_device_train_batch_size=1, steps_per_generation="step/4"))
    assert problem.illegal(half) is None
    wanted = EditTarget(problem.trainer.plan(half, problem.setting))
    values = values_after(base, edits_of(base, wanted, problem.trainer, problem.setting))
    assert (values["generation_batch_size"], values["per_device_train_batch_size"]) == (4, 1)
    assert values.get("steps_per_generation") is None
    text = "".join(f"{name}: {value}\n" for name, value in values.items() if isinstance(value, int))
    read = a_base(tmp_path, text, "grpo", "after.yaml").config.values
    assert (read["generation_batch_size"], read["steps_per_generation"]) == (4, 2)
    assert (read["generation_batch_size"], read["num_generations"]) == (4, 4)


def test_the_processes_have_the_threads_of_the_probes_unless_the_file_says_how_many(tmp_path: Path) -> None:
    search = with_zero2(tmp_path)
    assert handed_over(search, search.problem.baseline, tmp_path)["config.yaml"]["env"] == {"OMP_NUM_THREADS": "1"}
    search = searched(tmp_path, "num_cpu_threads_per_process: 2\n")
    assert "env" not in handed_over(search, search.problem.baseline, tmp_path)["config.yaml"]
    search = searched(tmp_path, "env: {OMP_NUM_THREADS: 3}\n")
    assert handed_over(search, search.problem.baseline, tmp_path)["config.yaml"]["env"] == {"OMP_NUM_THREADS": 3}


@pytest.mark.parametrize(("processes", "kept"), [(1, False), (2, True), (4, False)])
def test_the_gpus_of_another_number_of_processes_are_left_to_the_machine(
    processes: int, kept: bool, tmp_path: Path
) -> None:
    own = {"distributed_type": "MULTI_GPU", "num_processes": 2, "gpu_ids": "2,3"}
    document = accelerate_document(TrainingPlan("sft", launch=Launch(processes)), tmp_path, own)
    assert ("gpu_ids" in document) is kept
    assert document["num_processes"] == processes


def test_a_bundle_compiles_by_torch_compile_alone(tmp_path: Path) -> None:
    search = with_accelerate(
        tmp_path, {**FSDP2, "dynamo_config": {"dynamo_backend": "INDUCTOR"}}, further="torch_compile: true\n"
    )
    found = handed_over(search, search.problem.baseline, tmp_path)
    assert "dynamo_config" not in found[ACCELERATE]
    assert found["config.yaml"]["torch_compile"] is True


def test_a_base_that_is_refused_once_it_is_edited_costs_no_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise InputError("4 processes on each machine, and CUDA_VISIBLE_DEVICES names 2 GPUs.")

    monkeypatch.setattr(probe, "edited_base", refused)
    search = searched(tmp_path, "num_processes: 2\n")
    outcome: Any = SimpleNamespace(winner=SimpleNamespace(candidate=search.problem.baseline))
    server: Any = None
    run = Run(ProbeArguments(base=search.base.name), search.problem, server, Output(tmp_path / "out"), 0)
    file, notes = probe._edited_file(run, search.base, outcome)
    assert file is not None
    assert not file.text
    assert "CUDA_VISIBLE_DEVICES names 2 GPUs. The bundle has the recommendation alone" in notes[-1]


def test_the_document_of_deepspeed_is_that_of_the_baseline(tmp_path: Path) -> None:
    search = with_zero2(tmp_path)
    baseline = search.problem.baseline
    assert (baseline["sharding"], baseline["offload"]) == ("zero2", "optimizer")
    # What follows from the trainer's arguments is searched, and so written as `auto`.
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    # accelerate adds the precision that the document lacks.
    added = {"fp16": {"enabled": "auto"}}
    assert search.plan.args["deepspeed"] == {**ZERO2, **added, **dict.fromkeys(sizes, "auto")}
    assert search.plan.launch.processes == 2
    assert set(search.problem.choices["sharding"]) == {"zero2", "ddp", "zero1", "zero3", "fsdp2"}
    assert search.problem.illegal(baseline) is None


def test_other_choices_keep_what_the_document_says_beside_them(tmp_path: Path) -> None:
    problem = with_zero2(tmp_path).problem
    other = problem.trainer.plan(problem.baseline.but(sharding="zero3", offload="none"), problem.setting)
    document: Any = other.args["deepspeed"]
    assert document["zero_optimization"]["stage"] == 3
    assert document["zero_optimization"]["overlap_comm"] is True
    assert document["zero_optimization"]["reduce_bucket_size"] == 1_000_000
    assert "device" not in document["zero_optimization"]["offload_optimizer"]
    assert document["zero_optimization"]["stage3_prefetch_bucket_size"] == "auto"
    for sharding in ("ddp", "fsdp2"):
        plan = problem.trainer.plan(
            problem.normal(problem.baseline.but(sharding=sharding, offload="none")), problem.setting
        )
        assert "deepspeed" not in plan.args


def test_the_bundle_has_the_user_s_keys_and_another_choice(tmp_path: Path) -> None:
    search = with_zero2(tmp_path)
    out = tmp_path / "bundle"
    found = handed_over(search, search.problem.baseline.but(sharding="zero3"), out)
    assert found["config.yaml"]["accelerate_config"] == str(out / ACCELERATE)
    assert found[ACCELERATE]["debug"] is True
    # The trainer's arguments set it.
    assert "mixed_precision" not in found[ACCELERATE]
    assert found[ACCELERATE]["deepspeed_config"]["deepspeed_config_file"] == str(out / DEEPSPEED)
    assert found[ACCELERATE]["num_processes"] == 2
    zero = found[DEEPSPEED]["zero_optimization"]
    assert (zero["stage"], zero["reduce_bucket_size"]) == (3, 1_000_000)
    assert zero["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    alone = handed_over(search, search.problem.baseline.but(sharding="ddp", offload="none"), out)
    assert alone[ACCELERATE]["distributed_type"] == "MULTI_GPU"
    assert "deepspeed_config" not in alone[ACCELERATE]
    assert DEEPSPEED not in alone


def test_fsdp_of_accelerate_becomes_the_trainer_s_own_with_all_its_keys(tmp_path: Path) -> None:
    search = with_accelerate(tmp_path, FSDP2)
    assert (search.problem.baseline["sharding"], search.problem.baseline["reshard_after_forward"]) == ("fsdp2", "off")
    found = handed_over(search, search.problem.baseline.but(reshard_after_forward="on"), tmp_path / "bundle")
    assert found["config.yaml"]["fsdp"] is True
    assert found["config.yaml"]["fsdp_config"] == {
        "version": 2, "reshard_after_forward": True, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "state_dict_type": "FULL_STATE_DICT",
    }  # fmt: skip
    assert found[ACCELERATE]["distributed_type"] == "MULTI_GPU"
    assert "fsdp_config" not in found[ACCELERATE]


def test_fsdp_that_offloads_keeps_the_variables_that_accelerate_s_launcher_sets(tmp_path: Path) -> None:
    keys = {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "offload_params": True}
    document = {**FSDP2, "fsdp_config": {f"fsdp_{name}": value for name, value in keys.items()}}
    two = machine_with(EIGHT, processes=2)
    search = with_accelerate(tmp_path, document, machine=two)
    assert search.problem.baseline["offload"] == "both"
    assert search.plan.env["ACCELERATE_USE_FSDP"] == "true"
    found = handed_over(search, search.problem.baseline, tmp_path / "bundle")["config.yaml"]
    assert found["fsdp_config"]["cpu_offload"] is True
    assert found["env"].items() >= {"ACCELERATE_USE_FSDP": "true", "FSDP_OFFLOAD_PARAMS": "true"}.items()
    other = handed_over(search, search.problem.baseline.but(offload="none"), tmp_path / "bundle")["config.yaml"]
    assert "ACCELERATE_USE_FSDP" not in other["env"]
    # The variables alone offload what the trainer's own document shards.
    text = "fsdp: true\nenv: {ACCELERATE_USE_FSDP: 'true', FSDP_OFFLOAD_PARAMS: 'true'}\nnum_processes: 2\n"
    assert searched(tmp_path, text, two).problem.baseline["offload"] == "both"


def test_fsdp_is_a_base_of_several_processes_alone(tmp_path: Path) -> None:
    base = a_base(tmp_path, f"{SIZES}fsdp: true\n")
    with pytest.raises(InputError, match=r"mine\.yaml shards by FSDP, and one process has nothing to shard"):
        started(base)
    assert started(base, machine=TWO).problem.baseline["sharding"] == "fsdp2"
    alone = started(base, fix={"sharding": "ddp"})
    assert alone.problem.illegal(alone.problem.baseline) is None
    assert not alone.plan.args.get("fsdp")


def test_gradients_summed_in_each_micro_batch_are_a_key_beside_the_user_s_own(tmp_path: Path) -> None:
    text = "fsdp: true\naccelerator_config: {even_batches: false}  # ours\nnum_processes: 2\n"
    search = searched(tmp_path, text)
    found = handed_over(search, search.problem.baseline.but(sync_each_batch="on"), tmp_path / "bundle")
    synced = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    assert found["config.yaml"]["accelerator_config"] == {"even_batches": False, **synced}
    for engine in ("fsdp: true\n", ""):
        own = searched(tmp_path, f"{engine}accelerator_config: {json.dumps(synced)}\nnum_processes: 2\n")
        assert own.problem.baseline["sync_each_batch"] == "on"
        assert own.plan.args["accelerator_config"] == synced
        assert own.problem.illegal(own.problem.baseline) is None


def test_groups_of_processes_are_those_of_the_file(tmp_path: Path) -> None:
    sizes = {"dp_replicate_size": 2, "dp_shard_size": 2}
    given = {f"parallelism_config_{name}": size for name, size in sizes.items()}
    four = machine_with(TWO, processes=4)
    document = {**FSDP2, "num_processes": 4, "parallelism_config": given}
    search = with_accelerate(tmp_path, document, machine=four)
    assert search.problem.baseline["dp_replicate_size"] == 2
    assert search.plan.args["parallelism_config"] == sizes
    found = handed_over(search, search.problem.baseline, tmp_path / "bundle")
    assert found[ACCELERATE]["parallelism_config"] == given


def test_another_number_of_processes_has_other_shards_of_the_same_groups(tmp_path: Path) -> None:
    sizes = {"parallelism_config_cp_size": 2, "parallelism_config_dp_shard_size": 4}
    document = {**FSDP2, "num_processes": 8, "parallelism_config": sizes}
    long: dict[str, Any] = {"further": "pad_to_multiple_of: 64\nmax_length: 9000\n", "of": LONG}
    four = machine_with(EIGHT, processes=4)
    for machine, shards, rows in ((EIGHT, 4, 2), (four, 2, 2)):
        search = with_accelerate(tmp_path, document, machine=machine, **long)
        assert search.problem.setting.global_batch_size == 24
        assert search.plan.args["parallelism_config"] == {"cp_size": 2, "dp_shard_size": shards}
        assert search.problem.baseline["per_device_train_batch_size"] == rows
        assert search.problem.illegal(search.problem.baseline) is None
    # Of 24 documents each of 8 processes trains on 3, which 2 rows do not divide.
    whole = with_accelerate(tmp_path, document, machine=EIGHT, fix={"context_parallel": 1}, **long)
    assert "parallelism_config" not in whole.plan.args
    assert whole.problem.illegal(whole.problem.baseline) is None


def test_an_engine_in_the_file_itself_moves_where_it_can_be_started_from(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(ZERO2), encoding="utf-8")
    search = searched(tmp_path, f"deepspeed: {tmp_path / 'ds.json'}\nnum_processes: 2\n")
    found = handed_over(search, search.problem.baseline, tmp_path / "bundle")
    assert found["config.yaml"]["deepspeed"] is None
    assert found["config.yaml"]["num_processes"] == 2
    assert found[DEEPSPEED]["zero_optimization"] == ZERO2["zero_optimization"]
    own = searched(
        tmp_path, "fsdp: true\nfsdp_config: {version: 2, reshard_after_forward: true}  # ours\nnum_processes: 2\n"
    )
    same = handed_over(own, own.problem.baseline, tmp_path / "bundle")
    assert same["config.yaml"]["fsdp_config"] == {"version": 2, "reshard_after_forward": True}
    moved = handed_over(own, own.problem.baseline.but(sharding="ddp"), tmp_path / "bundle")
    assert not moved["config.yaml"]["fsdp"]


def test_the_numbers_of_live_parameters_are_a_choice_or_held(tmp_path: Path) -> None:
    def zero3(live: object, reuse: object) -> Mapping[str, object]:
        keys = {"stage": 3, "stage3_max_live_parameters": live, "stage3_max_reuse_distance": reuse}
        return {"zero_optimization": keys}

    same = with_zero2(tmp_path, zero3(2e5, 2e5)).problem
    assert same.baseline["stage3_max_live_parameters"] == 200_000
    held = with_zero2(tmp_path, zero3(2e5, 1e5))
    assert held.start.base.custom == ("stage3_max_live_parameters",)
    assert held.plan.args["deepspeed"]["zero_optimization"]["stage3_max_reuse_distance"] == 100_000  # type: ignore[index]


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({**ZERO2, "optimizer": {"type": "AdamW"}}, "optimizer in DeepSpeed's document"),
        ({**ZERO2, "train_micro_batch_size_per_gpu": 7}, r"train_micro_batch_size_per_gpu: 7, .* give 2"),
        ({**ZERO2, "bf16": {"enabled": False}, "fp16": {"enabled": True}}, "bf16.enabled: False"),
        ({"zero_optimization": {"stage": 0}}, "zero_optimization.stage: 0"),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
            "zero_optimization.offload_param.device: nvme",
        ),
    ],
    ids=lambda value: "" if isinstance(value, str) else None,
)
def test_what_cannot_be_honoured_is_refused_by_its_key(
    document: Mapping[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=f"mine.yaml: .*{message}"):
        with_zero2(tmp_path, document)


def test_a_precision_by_which_accelerate_overrules_the_file_is_refused(tmp_path: Path) -> None:
    document = {**FSDP2, "mixed_precision": "bf16"}
    with pytest.raises(InputError, match=r"mine.yaml: mixed_precision: bf16 .* Write bf16: true"):
        with_accelerate(tmp_path, document, "bf16: false\n")
    assert with_accelerate(tmp_path, document).plan.args["bf16"]


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({**ACCELERATE_ZERO2, "num_machines": 2}, "num_machines: 2"),
        ({"distributed_type": "MEGATRON_LM", "num_processes": 2}, "distributed_type: MEGATRON_LM"),
        ({**FSDP2, "parallelism_config": {"parallelism_config_tp_size": 2}}, "parallelism_config_tp_size: 2"),
        ({**FSDP2, "parallelism_config": {"parallelism_config_dp_shard_size": 4}}, "but 2 processes are started"),
        ({**FSDP2, "parallelism_config": ALLTOALL}, "cp_comm_strategy: alltoall"),
        ({**FSDP2, "fsdp_config": {"fsdp_version": 1}}, "fsdp_version: 2"),
        ({**FSDP2, "dynamo_config": {"dynamo_backend": "INDUCTOR"}}, "dynamo_backend: inductor compiles the model"),
        (
            {**FSDP2, "fsdp_config": {"fsdp_version": 2, "fsdp_activation_checkpointing": True}},
            "gradient_checkpointing",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_accelerate_s_document_asks_in_vain_is_refused(
    document: Mapping[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError) as raised:
        with_accelerate(tmp_path, document)
    assert message in str(raised.value)


def test_a_plan_of_one_process_is_as_it_was(tmp_path: Path) -> None:
    search = started(a_base(tmp_path, SIZES), machine=WITH_DEEPSPEED)
    assert find_trainer("sft").plan(search.problem.baseline, search.problem.setting).launch.processes == 1
    assert search.problem.choices["sharding"] == ("ddp",)
