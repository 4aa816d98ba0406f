"""What accelerate's variables say of an engine, of its launcher or of the user's own, is what accelerate reads."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from accelerate.utils import FullyShardedDataParallelPlugin
from packaging.version import Version

from autotune.core.configuration import Configuration, ReadCommand
from autotune.core.documents.verdict import Severity
from autotune.errors import InputError, UnreadError
from autotune.inspection.command_line import read_command_line
from autotune.inspection.yaml_file import parse_yaml
from autotune.step.jobs.accelerate_launch import launch_parser
from autotune.userconfig.engine import check_documents, engine_args
from autotune.userconfig.fields import fields_of_kind
from autotune.userconfig.launch import DEEPSPEED_VARIABLES, RANK_VARIABLES, Launching, launching, read_document
from autotune.userconfig.launch_problems import launch_findings, mpi_findings
from autotune.userconfig.problems import value_findings
from autotune.userconfig.written import WrittenConfig
from tests.app.check.recording import Recording
from tests.app.check.starting import read_by_accelerate
from tests.step.plans import needs_deepspeed

NOTHING = Configuration("SFTConfig", {}, {})
STAGE: dict[str, object] = {"zero_optimization": {"stage": 2}}
SIZES = {"auto_wrap_policy": "SIZE_BASED_WRAP"}
COMPARED = (
    "activation_checkpointing", "auto_wrap_policy", "min_num_params", "reshard_after_forward", "state_dict_type",
    "transformer_cls_names_to_wrap",
)  # fmt: skip


def a_document(**keys: object) -> dict[str, Any]:
    """Return accelerate's document of FSDP2."""
    named = {"fsdp_version": 2, **{f"fsdp_{name}": value for name, value in keys.items()}}
    return {"distributed_type": "FSDP", "num_processes": 2, "num_machines": 1, "fsdp_config": named}


def handed_on(document: Mapping[str, object], folder: Path) -> dict[str, str]:
    """Return the variables of FSDP that accelerate's launcher sets."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    (folder / "accelerate.yaml").write_text(yaml.safe_dump(dict(document)), encoding="utf-8")
    words = ["--config_file", str(folder / "accelerate.yaml"), "--main_process_port", "0", "train.py"]
    arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    found = {name: value for name, value in prepare_multi_gpu_env(arguments).items() if name.startswith("FSDP_")}
    if "." in found.get("FSDP_MIN_NUM_PARAMS", ""):
        pytest.skip("this launcher of accelerate hands on a number that its plugin cannot read")
    return found


def by_trainer(fields: Mapping[str, Any], folder: Path) -> tuple[Any, Any]:
    """Return transformers' own document of FSDP, and the plugin that accelerate makes of it."""
    from transformers import TrainingArguments

    args = TrainingArguments(str(folder), use_cpu=True, **fields)
    return args.fsdp_config, FullyShardedDataParallelPlugin(**args.fsdp_plugin_args)


def assert_alike(one: Any, other: Any) -> None:
    """Assert that two plugins shard alike."""
    for name in COMPARED:
        assert getattr(one, name) == getattr(other, name), name
    assert type(one.cpu_offload) is type(other.cpu_offload)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (
            {"auto_wrap_policy": "transformer_based_wrap", "offload_params": "False"},
            {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
        ),
        (SIZES, {**SIZES, "min_num_params": 10**8}),
        (
            {**SIZES, "min_num_params": 5, "offload_params": "true"},
            {**SIZES, "min_num_params": 5, "cpu_offload": True},
        ),
        ({"state_dict_type": "sharded_state_dict"}, {"auto_wrap_policy": "NO_WRAP"}),
        # transformers has this key, and accelerate another one.
        ({"cpu_offload": True}, {"auto_wrap_policy": "NO_WRAP"}),
    ],
    ids=str,
)
def test_what_accelerate_s_launcher_makes_of_keys_of_fsdp_is_what_transformers_makes_of_them(
    given: dict[str, object], kept: dict[str, object], tmp_path: Path
) -> None:
    document = a_document(**given)
    with mock.patch.dict("os.environ", handed_on(document, tmp_path)):
        by_launcher = FullyShardedDataParallelPlugin()
    found: Any = engine_args(document, NOTHING, 2)
    assert found["fsdp_config"] == {"version": 2, "state_dict_type": "SHARDED_STATE_DICT", **kept}
    # transformers sets variables of its own.
    with mock.patch.dict("os.environ"):
        assert_alike(by_trainer(found, tmp_path)[1], by_launcher)


@pytest.mark.parametrize(
    ("own", "launched", "variables", "changed"),
    [
        # transformers reads another key than accelerate.
        ({"offload_params": True}, None, {}, {}),
        ({"fsdp_offload_params": True, "ignored_modules": ".*head"}, None, {}, {}),
        ({"fsdp_cpu_offload": True}, None, {}, {"cpu_offload": True}),
        ({}, None, {"FSDP_OFFLOAD_PARAMS": "true"}, {"cpu_offload": True}),
        ({"cpu_offload": False}, None, {"FSDP_OFFLOAD_PARAMS": "1"}, {"cpu_offload": True}),
        ({}, None, {"FSDP_ACTIVATION_CHECKPOINTING": "true"}, {"activation_checkpointing": True}),
        ({"activation_checkpointing": False}, None, {"FSDP_ACTIVATION_CHECKPOINTING": "true"}, {}),
        (
            {},
            None,
            {"FSDP_TRANSFORMER_CLS_TO_WRAP": "LlamaMLP"},
            {"transformer_layer_cls_to_wrap": "LlamaMLP"},
        ),
        (SIZES, None, {"FSDP_MIN_NUM_PARAMS": "5000"}, {"min_num_params": 5000}),
        ({}, {"offload_params": True, "reshard_after_forward": False}, {}, {"cpu_offload": True}),
        ({"reshard_after_forward": False}, {"activation_checkpointing": True}, {}, {"activation_checkpointing": True}),
        # Without FSDP in accelerate's document, its launcher hands on nothing.
        ({}, {"distributed_type": "MULTI_GPU", "offload_params": True}, {}, {}),
    ],
    ids=str,
)
def test_accelerate_reads_keys_of_fsdp_that_the_trainer_s_own_document_leaves_open(
    own: dict[str, object],
    launched: dict[str, object] | None,
    variables: dict[str, str],
    changed: dict[str, object],
    tmp_path: Path,
) -> None:
    document: dict[str, Any] = {}
    if launched is not None:
        kind = {name: launched[name] for name in launched if name == "distributed_type"}
        keys = {name: value for name, value in launched.items() if name not in kind}
        document = {**a_document(auto_wrap_policy="TRANSFORMER_BASED_WRAP", **keys), **kind}
    sharded = document.get("distributed_type") == "FSDP"
    with mock.patch.dict("os.environ", {**(handed_on(document, tmp_path) if sharded else {}), **variables}):
        config, real = by_trainer({"fsdp": True, "fsdp_config": dict(own)}, tmp_path)
    read = Configuration("SFTConfig", {"fsdp": True, "fsdp_config": config}, {})
    found: Any = engine_args(document, read, 2, variables=variables)
    assert {name: found["fsdp_config"][name] for name in changed} == changed
    with mock.patch.dict("os.environ"):
        assert_alike(by_trainer(found, tmp_path)[1], real)


@pytest.mark.skipif(Version(version("transformers")) < Version("5.23"), reason="older transformers read other keys")
def test_the_keys_of_fsdp_that_transformers_reads_are_listed_and_others_are_told(tmp_path: Path) -> None:
    from transformers import TrainingArguments

    read: set[str] = set()

    for given in ({}, SIZES, {"xla": True}):
        with mock.patch.dict("os.environ"):
            document = Recording(given)
            TrainingArguments(str(tmp_path), use_cpu=True, fsdp=True, fsdp_config=document)
        read |= document.read
    assert read == fields_of_kind("fsdp", "read")

    def told(given: Mapping[str, object], **values: object) -> list[str]:
        written = WrittenConfig(read_command_line(["trl", "sft", "--config", "c.yaml"]), None, "sft")
        found = value_findings(written, {"fsdp": True, "fsdp_config": given, **values}, {})
        return [item.message.partition(":")[0] for item in found if item.severity is Severity.SILENT]

    unread: dict[str, object] = {"fsdp_offload_params": True, "use_orig_params": True, "fsdp_cpu_offload": True}
    assert told(unread) == [f"{name} in fsdp_config has no effect" for name in ("offload_params", "use_orig_params")]
    assert told(dict.fromkeys(read, 2)) == told(unread, fsdp=False) == told({**unread, "version": 1}) == []


def test_keys_of_accelerate_s_file_that_it_does_not_read_are_told() -> None:
    read = ReadCommand({"SFTConfig": NOTHING}, names=tuple(item.dest for item in launch_parser()._actions))
    written = WrittenConfig(read_command_line(["trl", "sft", "--config", "c.yaml"]), None, "sft")

    def told(document: Mapping[str, object]) -> list[str]:
        found = launch_findings(written, read, Launching(2, sets_processes=True, document=document))
        return [item.message.partition(":")[0] for item in found]

    keys = a_document(cpu_offload=True, offload_params=True, use_orig_params=True)
    assert told(keys) == ["fsdp_cpu_offload under fsdp_config has no effect"]
    keys["fsdp_config"] = {"version": 2, "cpu_offload": True}
    assert told(keys) == ["cpu_offload under fsdp_config has no effect"]
    zero = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 2, "offload_optimizer": "cpu"}}
    assert told(zero) == ["offload_optimizer under deepspeed_config has no effect"]
    for name in ("zero1", "zero2", "zero3", "fsdp1", "fsdp2", "multi_gpu", "single_gpu"):
        assert told(read_document(name)) == []


@pytest.mark.parametrize("name", ["IGNORED_MODULES", "ACTIVATION_CHECKPOINTING_OFFLOAD"])
def test_a_variable_of_fsdp_that_is_not_traced_leaves_the_answer_open(name: str) -> None:
    own = Configuration("SFTConfig", {"fsdp": True, "fsdp_config": {}}, {})
    with pytest.raises(UnreadError, match=f"fsdp_{name.lower()} is not traced"):
        engine_args({}, own, 2, variables={f"FSDP_{name}": "true"})


@pytest.mark.parametrize(
    ("document", "variables", "backend", "refused"),
    [
        ({}, {}, None, True),
        ({}, {"ACCELERATE_USE_FSDP": "true"}, None, True),
        ({}, {"FSDP_OFFLOAD_PARAMS": "true"}, None, True),
        ({}, {"ACCELERATE_USE_FSDP": "True", "FSDP_OFFLOAD_PARAMS": "true"}, None, False),
        ({}, {"ACCELERATE_USE_FSDP": "true", "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"}, None, False),
        ({}, {}, "gloo", False),
        # Its launcher sets the variables by its own keys.
        (a_document(), {}, None, True),
        (a_document(offload_params=True), {}, None, False),
        (a_document(state_dict_type="FULL_STATE_DICT"), {}, None, False),
    ],
    ids=str,
)
def test_fsdp_offloads_only_with_a_backend_for_the_host(
    document: dict[str, object], variables: dict[str, str], backend: str | None, refused: bool
) -> None:
    def own(*, offloads: bool) -> Configuration:
        keys = {"fsdp": True, "fsdp_config": {"cpu_offload": offloads}, "ddp_backend": backend}
        return Configuration("SFTConfig", keys, {})

    started = Launching(2, document=document, variables=variables)
    with pytest.raises(InputError, match="Set ACCELERATE_USE_FSDP and") if refused else nullcontext():
        check_documents(started, own(offloads=True))
    check_documents(replace(started, processes=1, is_ranked=True), own(offloads=True))
    check_documents(Launching(2), own(offloads=False))
    # Variables alone offload, too.
    if "FSDP_OFFLOAD_PARAMS" in variables:
        with pytest.raises(InputError, match="Set ACCELERATE_USE_FSDP and") if refused else nullcontext():
            check_documents(started, own(offloads=False))


@pytest.mark.parametrize(
    ("kind", "values", "document"),
    [
        ("DEEPSPEED", {}, {"distributed_type": "MULTI_GPU"}),
        ("FSDP", {}, {"distributed_type": "MULTI_GPU"}),
        ("MEGATRON_LM", {}, {}),
        ("PARALLELISM_CONFIG", {"fsdp": True}, {"distributed_type": "MULTI_GPU"}),
        ("FSDP", {"fsdp": True}, {}),
        ("DEEPSPEED", {"deepspeed": STAGE}, {}),
        ("FSDP", {}, {"distributed_type": "FSDP"}),
        ("PARALLELISM_CONFIG", {}, {"parallelism_config": {"parallelism_config_dp_shard_size": 2}}),
    ],
    ids=str,
)
def test_an_engine_that_a_variable_alone_chooses_leaves_the_answer_open(
    kind: str, values: dict[str, object], document: dict[str, object]
) -> None:
    def started(value: str) -> Launching:
        return Launching(2, document=document, variables={f"ACCELERATE_USE_{kind}": value})

    config = Configuration("SFTConfig", values, {})
    check_documents(started("false"), config)
    in_files = {**values, **document, str(document.get("distributed_type")).lower(): True}
    alone = kind.lower() not in in_files
    with pytest.raises(UnreadError, match=f"ACCELERATE_USE_{kind} chooses an engine") if alone else nullcontext():
        check_documents(started("True"), config)


@pytest.mark.parametrize(
    ("words", "env", "precision"),
    [
        ("ACCELERATE_MIXED_PRECISION=fp16 torchrun", {}, "fp16"),
        ("ACCELERATE_MIXED_PRECISION=fp16 torchrun", {"ACCELERATE_MIXED_PRECISION": "bf16"}, "bf16"),
        # accelerate's launcher sets the variable, and TRL's parser the file's after it.
        ("ACCELERATE_MIXED_PRECISION=fp16 accelerate launch", {}, "no"),
        ("accelerate launch", {"ACCELERATE_MIXED_PRECISION": "bf16"}, "bf16"),
    ],
    ids=str,
)
def test_a_precision_in_a_variable_counts_unless_a_launcher_overrides_it(
    words: str, env: dict[str, str], precision: str
) -> None:
    written = started_by(words, env)
    assert launching(written, read_by_accelerate(written)).precision == precision


def started_by(words: str, env: Mapping[str, str]) -> WrittenConfig:
    """Return a command that is started so, whose file has these variables."""
    command = read_command_line([*words.split(), "trl/scripts/sft.py", "--config", "c.yaml"])
    return WrittenConfig(command, parse_yaml(yaml.safe_dump({"env": dict(env)}), Path("c.yaml")), "sft")


@pytest.mark.parametrize(
    ("words", "env", "on_cpu"),
    [
        ("ACCELERATE_USE_CPU=1 python", {}, True),
        ("ACCELERATE_USE_CPU=False python", {}, False),
        ("python", {"ACCELERATE_USE_CPU": "true"}, True),
        # accelerate's launcher sets it for a single process, and hands it on to several.
        ("ACCELERATE_USE_CPU=true accelerate launch", {}, False),
        ("accelerate launch", {"ACCELERATE_USE_CPU": "yes"}, True),
        ("ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes 2", {}, True),
    ],
    ids=str,
)
def test_the_cpu_in_a_variable_counts_unless_a_launcher_overrides_it(
    words: str, env: dict[str, str], on_cpu: bool
) -> None:
    written = started_by(words, env)
    assert launching(written, read_by_accelerate(written)).on_cpu is on_cpu


def test_variables_of_the_shell_reach_processes_unless_accelerate_s_launcher_sets_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell = {"FSDP_OFFLOAD_PARAMS": "true", "ACCELERATE_USE_PARALLELISM_CONFIG": "true"}
    for name, value in {**shell, "MY_OWN": "1"}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(a_document()), encoding="utf-8")
    of_file = {"FSDP_IGNORED_MODULES": "x"}

    def found(words: str) -> Mapping[str, str]:
        written = started_by(words, of_file)
        every = launching(written, read_by_accelerate(written)).variables
        return {name: value for name, value in every.items() if name in (*shell, *of_file, "MY_OWN")}

    assert found("torchrun --nproc_per_node 2") == {**shell, **of_file}
    assert found("accelerate launch --multi_gpu --num_processes 2") == {**shell, **of_file}
    of_launcher = found(f"accelerate launch --config_file {tmp_path / 'own.yaml'}")
    assert of_launcher == {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", **of_file}


@needs_deepspeed
def test_accelerate_s_launcher_sets_the_variables_of_its_file_s_keys_of_deepspeed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env

    keys = {"distributed_type": "DEEPSPEED", "num_processes": 2, "deepspeed_config": {"zero_stage": 3}}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(keys), encoding="utf-8")
    shell = dict.fromkeys(DEEPSPEED_VARIABLES, "1")
    for name, value in shell.items():
        monkeypatch.setenv(name, value)
    words = ["--config_file", str(tmp_path / "own.yaml"), "--main_process_port", "0", "train.py"]
    arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    # `accelerate.commands.launch.deepspeed_launcher`
    arguments.deepspeed_fields_from_accelerate_config = "zero_stage"
    set_by_launcher = prepare_deepspeed_cmd_env(arguments)[1]
    kept = {name for name in shell if set_by_launcher[name] == shell[name]}
    assert shell.keys() - kept == {"ACCELERATE_DEEPSPEED_ZERO_STAGE"}
    written = started_by(f"accelerate launch --config_file {tmp_path / 'own.yaml'}", {})
    assert launching(written, read_by_accelerate(written)).variables.keys() & shell.keys() == kept


@pytest.mark.parametrize(
    ("words", "env", "ranked"),
    [
        ("python", {}, False),
        ("accelerate launch", {}, False),
        pytest.param("accelerate launch --use_deepspeed --num_processes 1", {}, True, marks=needs_deepspeed),
        ("accelerate launch --multi_gpu --num_processes 2", {}, True),
        ("torchrun", {}, True),
        ("deepspeed --num_gpus 1", {}, True),
        ("python", dict.fromkeys(RANK_VARIABLES, "0"), True),
        ("python", {"RANK": "0"}, False),
    ],
    ids=str,
)
def test_deepspeed_of_a_process_without_a_rank_looks_for_mpi(
    words: str, env: dict[str, str], ranked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autotune.userconfig.launch_problems.find_spec", lambda _: None)
    for name in RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    written = started_by(words, env)
    started = launching(written, read_by_accelerate(written))
    own = Configuration("SFTConfig", {"deepspeed": STAGE}, {})
    for here, severity in ((True, Severity.ERROR), (False, Severity.NOTE)):
        assert [item.severity for item in mpi_findings(written, started, own, here=here)] == [severity] * (not ranked)
        assert not list(mpi_findings(written, started, NOTHING, here=here))
