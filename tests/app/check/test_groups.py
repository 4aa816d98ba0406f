"""Groups of processes in accelerate's file are read, or refused, as by accelerate."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import yaml
from accelerate import ParallelismConfig
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType
from accelerate.utils.launch import prepare_multi_gpu_env

from autotune.core.configuration import Configuration
from autotune.core.plan import TrainingPlan
from autotune.errors import InputError, UnreadError
from autotune.step.objects import config
from autotune.userconfig.engine import engine_args, process_groups
from tests.contract.building import config_class

NOTHING = Configuration("SFTConfig", {}, {})
SIZES = ("dp_replicate_size", "dp_shard_size", "cp_size")
EVERY = [dict(zip(SIZES, sizes, strict=True)) for sizes in itertools.product((1, 2, 4, 8), repeat=3)]


def a_document(keys: Mapping[str, object], kind: str = "FSDP", **more: object) -> dict[str, object]:
    """Return accelerate's document, whose keys have its prefix."""
    fsdp = {"fsdp_config": {"fsdp_version": 2}} if kind == "FSDP" else {}
    sizes = {f"parallelism_config_{name}": value for name, value in keys.items()}
    return {"distributed_type": kind, **fsdp, "parallelism_config": sizes, **more}


def refused_by_accelerate(sizes: Mapping[str, int], processes: int, *, fsdp: bool) -> bool:
    kind = DistributedType.FSDP if fsdp else DistributedType.MULTI_GPU
    accelerator = SimpleNamespace(
        multi_device=True, num_processes=processes, is_fsdp2=fsdp, distributed_type=kind, is_main_process=False
    )
    try:
        ParallelismConfig(**sizes)._validate_accelerator(accelerator)
    except ValueError:
        return True
    return False


def refused(sizes: Mapping[str, int], processes: int, *, fsdp: bool) -> bool:
    given = {name: size for name, size in sizes.items() if size != 1}
    try:
        process_groups(given, a_document(sizes), "fsdp" if fsdp else "", processes)
    except InputError:
        return True
    return False


@pytest.mark.skipif(
    not refused_by_accelerate(dict.fromkeys(SIZES, 1), 8, fsdp=True),
    reason="this accelerate starts groups whose product is not the number of processes",
)
@pytest.mark.parametrize("processes", [2, 4, 8])
def test_sizes_are_refused_where_accelerate_refuses_them(processes: int) -> None:
    for sizes in EVERY:
        assert refused(sizes, processes, fsdp=True) == refused_by_accelerate(sizes, processes, fsdp=True), sizes
        # Rows are split with FSDP alone, which accelerate's state says (state.py, ``AcceleratorState``).
        if sizes["cp_size"] == sizes["dp_shard_size"] == 1:
            assert refused(sizes, processes, fsdp=False) == refused_by_accelerate(sizes, processes, fsdp=False), sizes


@pytest.mark.parametrize(
    ("keys", "kind", "said"),
    [
        ({"cp_size": 2}, "FSDP", r"for 2 processes \(cp_size=2\), but 8 processes are started"),
        ({"cp_size": 4, "dp_shard_size": 4}, "FSDP", r"for 16 processes \(dp_shard_size=4 x cp_size=4\), but 8"),
        ({"dp_replicate_size": 8}, "FSDP", "leaves FSDP no processes to shard among"),
        ({"dp_shard_size": 1}, "FSDP", "leaves FSDP no processes to shard among"),
        ({"cp_size": 4, "dp_replicate_size": 2}, "FSDP", "none to shard among"),
        ({"cp_size": 2, "dp_shard_size": 4}, "MULTI_GPU", "parallelism_config_cp_size: 2 needs FSDP2"),
        ({"cp_size": 0}, "FSDP", "parallelism_config_cp_size: 0 is not a group size"),
        ({"dp_shard_size": -1}, "FSDP", "parallelism_config_dp_shard_size: -1 is not a group size"),
        ({"dp_shard_size": "auto"}, "FSDP", "'auto' is not a group size"),
        ({"dp_shard_size": "8"}, "FSDP", "'8' is not a group size"),
        ({"dp_shard_size": True}, "FSDP", "True is not a group size"),
        ({"pp_size": 2}, "FSDP", "parallelism_config_pp_size under parallelism_config is a key that accelerate does"),
    ],
    ids=str,
)
def test_what_accelerate_would_not_start_is_told_by_its_key(keys: Mapping[str, object], kind: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        engine_args(a_document(keys, kind), NOTHING, 8)


@pytest.mark.parametrize(
    ("keys", "kind", "read"),
    [
        ({}, "FSDP", {}),
        ({"dp_shard_size": 8}, "FSDP", {"dp_shard_size": 8}),
        ({"cp_size": 8}, "FSDP", {"cp_size": 8}),
        ({"cp_size": 2, "dp_shard_size": 4, "tp_size": 1, "sp_size": None}, "FSDP", {"cp_size": 2, "dp_shard_size": 4}),
        ({"dp_replicate_size": 2, "dp_shard_size": 4}, "FSDP", {"dp_replicate_size": 2, "dp_shard_size": 4}),
        # Replicas of one process each are plain data parallelism.
        ({"dp_replicate_size": 8}, "MULTI_GPU", {}),
        ({"dp_replicate_size": 1}, "MULTI_GPU", {}),
    ],
    ids=str,
)
def test_sizes_that_make_all_processes_are_taken(
    keys: Mapping[str, object], kind: str, read: Mapping[str, int]
) -> None:
    assert engine_args(a_document(keys, kind), NOTHING, 8).get("parallelism_config", {}) == read


@pytest.mark.parametrize(
    ("keys", "kind", "said"),
    [
        ({"dp_shard_size": 8}, "MULTI_GPU", "dp_shard_size: 8 is not planned without FSDP"),
        ({"dp_replicate_size": 8}, "DEEPSPEED", "not planned with DeepSpeed"),
    ],
)
def test_of_what_is_not_known_what_it_trains_nothing_is_said(keys: Mapping[str, object], kind: str, said: str) -> None:
    with pytest.raises(UnreadError, match=said):
        engine_args(a_document(keys, kind), NOTHING, 8)


def test_a_mapping_in_the_trainer_s_own_file_is_refused_since_transformers_makes_no_object_of_it(
    tmp_path: Path,
) -> None:
    given = {"cp_size": 2, "dp_shard_size": 4}
    made = config_class("sft")(output_dir=str(tmp_path), use_cpu=True, bf16=False, parallelism_config=given)
    assert not hasattr(made.parallelism_config, "get_device_mesh")
    own = Configuration("SFTConfig", {"parallelism_config": given}, {"parallelism_config": None})
    with pytest.raises(InputError, match="parallelism_config cannot be in the trainer's own file"):
        engine_args({}, own, 8)


def test_accelerate_reads_no_key_without_the_prefix(tmp_path: Path) -> None:
    document = {"distributed_type": "MULTI_GPU", "num_processes": 8, "parallelism_config": {"cp_size": 2}}
    file = tmp_path / "accelerate.yaml"
    file.write_text(yaml.safe_dump({**document, "compute_environment": "LOCAL_MACHINE"}), encoding="utf-8")
    words = ["--config_file", str(file), "train.py"]
    arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    with mock.patch.dict(os.environ, prepare_multi_gpu_env(arguments)):
        assert ParallelismConfig().cp_size == 1
    with pytest.raises(InputError, match="cp_size under parallelism_config is a key that accelerate does not read"):
        engine_args(document, NOTHING, 8)
    with pytest.raises(InputError, match="'cp' is not a mapping"):
        engine_args({**document, "parallelism_config": "cp"}, NOTHING, 8)


@pytest.mark.parametrize(("size", "said"), [("tp_size", "loaded whole"), ("sp_size", "DeepSpeed gathers")])
def test_groups_of_which_no_step_is_traced_are_told(size: str, said: str) -> None:
    document = {"distributed_type": "MULTI_GPU", "parallelism_config": {f"parallelism_config_{size}": 2}}
    with pytest.raises(UnreadError, match=rf"parallelism_config_{size}: 2 is not planned: .*{said}"):
        engine_args(document, NOTHING)


def test_how_rows_are_exchanged_is_read_too(tmp_path: Path) -> None:
    keys = {"cp_size": 2, "cp_backend": "torch", "cp_comm_strategy": "alltoall", "tp_size": 1, "sp_size": 1}
    found = engine_args(a_document(keys), NOTHING)
    assert found["parallelism_config"] == {"cp_size": 2, "cp_comm_strategy": "alltoall"}
    made = config(TrainingPlan("sft", {**found, "output_dir": str(tmp_path), "use_cpu": True, "bf16": False}))
    assert made.parallelism_config.cp_handler.cp_comm_strategy == "alltoall"
