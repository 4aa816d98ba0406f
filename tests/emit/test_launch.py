"""accelerate, DeepSpeed and transformers read the files that start a plan's processes."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from accelerate import ParallelismConfig
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from trl.cli.accelerate_config import resolve_accelerate_config_argument

from autotune.core.candidate import Choice
from autotune.core.plan import Launch, TrainingPlan
from autotune.emit.arguments import thread_variables, training_arguments
from autotune.emit.figures import measured
from autotune.emit.handover import provenance
from autotune.emit.launch import ACCELERATE, DEEPSPEED, accelerate_document, launch_files
from autotune.emit.rows import training_rows
from autotune.techniques import find
from autotune.trainers import find_trainer
from tests.reporting.examples import a_result
from tests.settings import EIGHT, TWO, machine_with, plan_with, problem, setting, workload
from tests.step.plans import needs_deepspeed

SIXTEEN = machine_with(EIGHT, processes=16)
LONG = workload(lengths={100: 50, 9000: 1})
HERE = setting(machine=SIXTEEN, global_batch_size=64, token_coverage=0.0, of=LONG)
KNOBS = (
    "sharding", "offload", "reshard_after_forward", "stage3_max_live_parameters", "pad_to_multiple_of",
    "context_parallel", "dp_replicate_size",
)  # fmt: skip


def legal() -> Iterator[Mapping[str, Choice]]:
    """Yield every legal combination of the shipped choices for several processes."""
    known, found = find_trainer("sft"), problem(HERE)
    seen = set()
    for combination in itertools.product(*(found.space.choices[knob] for knob in KNOBS)):
        candidate = known.normal(found.baseline.but(**dict(zip(KNOBS, combination, strict=True))), HERE)
        chosen = {knob: candidate[knob] for knob in KNOBS}
        if (chosen["context_parallel"] == 1) == (chosen["pad_to_multiple_of"] != "none"):
            # Rounding changes nothing of how processes start; rows that are split need it.
            continue
        if known.illegal(candidate, HERE) is None and tuple(chosen.values()) not in seen:
            seen.add(tuple(chosen.values()))
            yield chosen


LEGAL = list(legal())
EVERY = pytest.mark.parametrize("choices", LEGAL, ids=lambda chosen: ",".join(map(str, chosen.values())))


def written(plan: TrainingPlan, folder: Path) -> dict[str, Any]:
    """Return the documents of the files that are written for a plan, by their names."""
    files = launch_files(plan, folder)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return {name: yaml.safe_load(text) if name == ACCELERATE else json.loads(text) for name, text in files.items()}


def test_groups_are_searched_with_fsdp2_as_far_as_accelerate_takes_them() -> None:
    found = {(chosen["context_parallel"], chosen["dp_replicate_size"]) for chosen in LEGAL}
    # Eight processes to a row in two replicas would leave one of sixteen to shard, and in four a half.
    assert found == {(shared, groups) for shared in (1, 2, 4, 8) for groups in (1, 2, 4)} - {(8, 2), (8, 4), (4, 4)}
    assert {chosen["sharding"] for chosen in LEGAL if chosen["context_parallel"] != 1} == {"fsdp2"}


def test_every_engine_and_every_way_to_offload_is_searched() -> None:
    assert {(chosen["sharding"], chosen["offload"]) for chosen in LEGAL} == {
        ("ddp", "none"), ("zero1", "none"), ("zero1", "optimizer"), ("zero2", "none"), ("zero2", "optimizer"),
        ("zero3", "none"), ("zero3", "optimizer"), ("zero3", "parameters"), ("zero3", "both"),
        ("fsdp2", "none"), ("fsdp2", "both"),
    }  # fmt: skip


@EVERY
def test_accelerate_reads_its_file_as_it_is_meant(choices: Mapping[str, Choice], tmp_path: Path) -> None:
    plan = plan_with(HERE, choices)
    documents = written(plan, tmp_path)
    read = load_config_from_file(str(tmp_path / ACCELERATE))
    assert read.num_processes == plan.launch.processes == 16
    shared = str(choices["sharding"]).startswith("zero")
    assert read.distributed_type == ("DEEPSPEED" if shared else "MULTI_GPU")
    assert (DEEPSPEED in documents) == shared
    if shared:
        assert json.loads(Path(read.deepspeed_config["deepspeed_config_file"]).read_text()) == plan.args["deepspeed"]


@pytest.mark.parametrize("sharding", ["ddp", "fsdp2", "zero2"])
def test_each_process_gets_the_threads_of_a_probe(sharding: str, tmp_path: Path) -> None:
    written(plan_with(HERE, {"sharding": sharding}), tmp_path)
    words = ["--config_file", str(tmp_path / ACCELERATE), "train.py"]
    # As trl does with the variables of its own file.
    with mock.patch.dict(os.environ, thread_variables(12)):
        arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))
        arguments.deepspeed_fields_from_accelerate_config = ""
        by_deepspeed = arguments.use_deepspeed
        environment = prepare_deepspeed_cmd_env(arguments)[1] if by_deepspeed else prepare_multi_gpu_env(arguments)
    assert environment["OMP_NUM_THREADS"] == "12"


@EVERY
def test_accelerate_launch_hands_the_sizes_of_groups_on(choices: Mapping[str, Choice], tmp_path: Path) -> None:
    plan = plan_with(HERE, choices)
    written(plan, tmp_path)
    # As trl does with the key of its own file.
    words = resolve_accelerate_config_argument(["--accelerate_config", str(tmp_path / ACCELERATE)])
    arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args([*words, "train.py"]))
    assert arguments.use_deepspeed == str(choices["sharding"]).startswith("zero")
    if arguments.use_deepspeed or (choices["context_parallel"], choices["dp_replicate_size"]) == (1, 1):
        assert not arguments.use_parallelism_config
        return
    environment = prepare_multi_gpu_env(arguments)
    with mock.patch.dict(os.environ, environment):
        # What an Accelerator makes where it finds this variable.
        assert os.environ["ACCELERATE_USE_PARALLELISM_CONFIG"] == "true"
        sizes = ParallelismConfig()
    assert sizes.total_size == plan.launch.processes
    assert (sizes.cp_size, sizes.dp_replicate_size) == (choices["context_parallel"], choices["dp_replicate_size"])
    assert sizes.data_parallel_size == plan.data_ranks
    # It repeats nothing of trl's own file.
    assert "parallelism_config" not in training_arguments(plan, LONG, training_rows(LONG, plan, tmp_path))


@EVERY
def test_transformers_reads_what_the_trainer_is_given(choices: Mapping[str, Choice], tmp_path: Path) -> None:
    from transformers import TrainingArguments

    plan = plan_with(HERE, choices)
    given = {name: plan.args[name] for name in ("fsdp", "fsdp_config") if name in plan.args}
    read = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, bf16=False, **given)
    if choices["sharding"] != "fsdp2":
        assert not read.fsdp
        return
    assert read.fsdp_plugin_args["fsdp_version"] == 2
    assert read.fsdp_plugin_args["reshard_after_forward"] == (choices["reshard_after_forward"] == "on")
    assert read.fsdp_plugin_args.get("cpu_offload", False) == (choices["offload"] == "both")


@needs_deepspeed
@pytest.mark.parametrize(
    "choices",
    [chosen for chosen in LEGAL if str(chosen["sharding"]).startswith("zero")],
    ids=str,
)
def test_deepspeed_reads_its_document_once_transformers_has_filled_it_in(
    choices: Mapping[str, Choice], tmp_path: Path
) -> None:
    reader: Any = importlib.import_module("deepspeed.runtime.config")
    from transformers import LlamaConfig, TrainingArguments
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    documents = written(plan_with(HERE, choices), tmp_path)
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    model = type("Model", (), {"config": LlamaConfig(hidden_size=64)})()
    filled = HfTrainerDeepSpeedConfig(documents[DEEPSPEED])
    filled.trainer_config_process(arguments)
    filled.trainer_config_finalize(arguments, model, 10)
    assert "auto" not in json.dumps(filled.config)
    read = reader.DeepSpeedConfig(filled.config).zero_config
    assert read.stage == int(str(choices["sharding"])[-1])
    assert (read.offload_optimizer is not None) == (choices["offload"] in ("optimizer", "both"))
    assert (read.offload_param is not None) == (choices["offload"] in ("parameters", "both"))
    most = int(find("stage3_max_live_parameters", find_trainer("sft").techniques).trl_default)
    assert read.max_live_parameters == min(most, int(choices["stage3_max_live_parameters"]))


@needs_deepspeed
def test_on_each_of_several_machines_accelerate_starts_ranks_of_one_group(tmp_path: Path) -> None:
    machines = machine_with(SIXTEEN, machines=2)
    plan = plan_with(setting(machine=machines, global_batch_size=64, of=LONG), {"sharding": "zero3"})
    written(plan, tmp_path)
    words = ["--config_file", str(tmp_path / ACCELERATE), "--machine_rank", "1", "--main_process_ip", "10.0.0.1"]
    arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args([*words, "train.py"]))
    # What `accelerate launch` notes for DeepSpeed's own checks.
    arguments.deepspeed_fields_from_accelerate_config = ""
    command, _ = prepare_deepspeed_cmd_env(arguments)
    # With pdsh there is a command, which starts what is on this machine alone where it finds no file of hosts.
    assert command is None
    assert (int(arguments.nnodes), int(arguments.nproc_per_node), int(arguments.node_rank)) == (2, 8, 1)
    assert arguments.rdzv_endpoint.startswith("10.0.0.1:")


def test_the_user_s_own_launcher_and_leaf_modules_stay(tmp_path: Path) -> None:
    machines = machine_with(SIXTEEN, machines=2)
    plan = plan_with(setting(machine=machines, global_batch_size=64, of=LONG), {"sharding": "zero2"})
    own = {
        "deepspeed_multinode_launcher": "pdsh", "deepspeed_hostfile": "/hosts",
        "deepspeed_moe_layer_cls_names": "MixtralSparseMoeBlock",
    }  # fmt: skip
    document = accelerate_document(plan, tmp_path, {"deepspeed_config": own})["deepspeed_config"]
    assert isinstance(document, Mapping)
    assert document.items() >= own.items()


@pytest.mark.parametrize("own", [{"mixed_precision": "bf16"}, {"fp16": True}], ids=str)
@pytest.mark.parametrize("sharding", ["ddp", "fsdp2", pytest.param("zero2", marks=needs_deepspeed)])
def test_the_precision_is_that_of_the_plan_whatever_the_user_s_own_file_says(
    sharding: str, own: Mapping[str, object], tmp_path: Path
) -> None:
    plan = plan_with(setting(machine=TWO), {"sharding": sharding, "precision": "float32"})
    for name, text in launch_files(plan, tmp_path, own).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    words = ["--config_file", str(tmp_path / ACCELERATE), "train.py"]
    arguments, _, of_file = _validate_launch_command(launch_command_parser().parse_args(words))
    assert arguments.mixed_precision == "no"
    # accelerate refuses keys of its file together with DeepSpeed's own document.
    assert not of_file


def test_one_process_without_deepspeed_needs_no_file(tmp_path: Path) -> None:
    assert launch_files(plan_with(setting(), {}), tmp_path) == {}


def test_one_process_that_offloads_is_started_with_deepspeed(tmp_path: Path) -> None:
    alone = setting(machine=machine_with(EIGHT, processes=1))
    documents = written(plan_with(alone, {"sharding": "zero2", "offload": "optimizer"}), tmp_path)
    assert documents[ACCELERATE]["distributed_type"] == "DEEPSPEED"
    assert documents[ACCELERATE]["num_processes"] == 1


def test_the_processes_of_several_machines_are_all_counted(tmp_path: Path) -> None:
    plan = replace(plan_with(setting(machine=TWO), {}), launch=Launch(processes=16, machines=2))
    assert {"num_processes": 16, "num_machines": 2}.items() <= written(plan, tmp_path)[ACCELERATE].items()


def test_a_bundle_says_that_accelerate_has_no_fsdp_on_a_cpu(tmp_path: Path) -> None:
    result = a_result()
    assert result.recommended is not None
    plan = plan_with(setting(machine=TWO), {"sharding": "fsdp2"})
    chosen = replace(result.recommended, plan=plan)
    rows = training_rows(result.workload, plan, tmp_path)
    cpu, gpu = (replace(result, hardware=machine.hardware) for machine in (TWO, EIGHT))
    said = "trl trains with DDP there"
    assert said in " ".join(provenance(measured(cpu, chosen), rows))
    assert said not in " ".join(provenance(measured(gpu, chosen), rows))
    # With sizes of groups, accelerate refuses a CPU (ParallelismConfig._validate_accelerator).
    split = replace(chosen, plan=replace(plan, args={**plan.args, "parallelism_config": {"dp_shard_size": 2}}))
    assert "trl refuses the groups of processes there" in " ".join(provenance(measured(cpu, split), rows))
