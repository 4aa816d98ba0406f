"""The number of processes of a command is that of its launcher's own parser."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.app.arguments import CheckArguments
from autotune.app.check.task import Task
from autotune.app.check.verdict_cache import key_of
from autotune.app.planned import planned_machine
from autotune.core.configuration import Configuration
from autotune.core.documents.verdict import Outcome, Severity
from autotune.errors import InputError, UnreadError
from autotune.inspection.command_line import read_command_line
from autotune.inspection.yaml_file import parse_yaml
from autotune.step.jobs.accelerate_launch import read_launch
from autotune.userconfig.launch import launching, likely_gpus, likely_processes
from autotune.userconfig.launch_problems import launch_findings
from autotune.userconfig.written import WrittenConfig
from tests.app.check.conftest import Checked, Write
from tests.app.check.starting import started, with_keys
from tests.step.plans import needs_deepspeed


@pytest.mark.parametrize(
    ("words", "processes", "machines"),
    [
        ("--nnodes 2 --nproc-per-node 8", 16, 2),
        ("--nnodes=2 --nproc_per_node=8", 16, 2),
        ("--nnodes 2:2 --nproc_per_node 4 --rdzv_backend c10d", 8, 2),
        ("--standalone --nproc-per-node 4", 4, 1),
        ("--nproc_per 4 --nproc-per-node=2 --max-restarts 3", 2, 1),
        ("--nnodes 3", 3, 3),
        ("", 1, 1),
    ],
)
def test_torchrun_starts_so_many_on_each_machine(words: str, processes: int, machines: int, script: str) -> None:
    from torch.distributed.run import determine_local_world_size, get_args_parser, parse_min_max_nnodes

    read: Any = get_args_parser().parse_args([*words.split(), script])
    nodes = parse_min_max_nnodes(read.nnodes)
    assert (determine_local_world_size(read.nproc_per_node), nodes) == (processes // machines, (machines, machines))
    for program in ("torchrun", "python -u -m torch.distributed.run"):
        found = started(f"{program} {words}", script)
        assert (found.processes, found.machines, found.sets_processes) == (processes, machines, True)


@pytest.mark.parametrize("word", ["gpu", "auto", "cpu", "xpu"])
def test_of_what_torchrun_counts_itself_only_gpus_that_are_here_are_known(word: str, script: str) -> None:
    words = f"torchrun --nnodes 2 --nproc_per_node={word}"
    with pytest.raises(UnreadError, match=f"--nproc_per_node {word} .* Write the number"):
        started(words, script)
    if word in ("gpu", "auto"):
        assert started(words, script, gpus=4).processes == 8
        assert started(f"CUDA_VISIBLE_DEVICES=0 {words}", script, gpus=4).processes == 2
    else:
        with pytest.raises(UnreadError):
            started(words, script, gpus=4)


@pytest.mark.parametrize(
    ("words", "processes", "machines"),
    [
        ("--num_gpus 4", 4, 1),
        ("--num_gpus=8 --num_nodes=2 --hostfile hosts", 16, 2),
        ("--num_accelerators 4 --master_port 29500", 4, 1),
        ("--num_nodes 1 --num_gpus 2 --no_local_rank", 2, 1),
        ("--include localhost:0,1,1,3", 3, 1),
        ("-i localhost:0,1@worker-1:2,3", 4, 2),
    ],
)
@needs_deepspeed
def test_deepspeed_starts_so_many_on_each_machine(words: str, processes: int, machines: int, script: str) -> None:
    from deepspeed.launcher.runner import apply_num_nodes_and_gpus, parse_args, parse_inclusion_exclusion

    read: Any = parse_args([*words.split(), script])
    hosts = {"localhost": 8, **({"worker-1": 8} if machines == 2 else {})}
    slots = parse_inclusion_exclusion(hosts, read.include, read.exclude)
    slots = apply_num_nodes_and_gpus(slots, read.num_nodes, read.num_gpus)
    assert (sum(map(len, slots.values())), len(slots)) == (processes, machines)
    for program in ("deepspeed", "python -m deepspeed.launcher.runner"):
        found = started(f"{program} {words}", script)
        assert (found.processes, found.machines, found.sets_processes) == (processes, machines, True)


@pytest.mark.parametrize(
    ("words", "processes", "machines"),
    [
        ("--num_processes 16 --num_machines 2", 16, 2),
        ("--num-processes=4 --main_process_port 29501", 4, 1),
        ("--multi_gpu --num-machines 2 --num_processes=2", 2, 2),
    ],
)
def test_accelerate_counts_over_all_machines(words: str, processes: int, machines: int, script: str) -> None:
    from accelerate.commands.launch import launch_command_parser

    read: Any = launch_command_parser().parse_args([*words.split(), script])
    assert (read.num_processes, read.num_machines or 1) == (processes, machines)
    for program in ("accelerate launch", "python -m accelerate.commands.launch"):
        found = started(f"{program} {words}", script)
        assert (found.processes, found.machines, found.sets_processes) == (processes, machines, True)


def test_accelerate_has_no_short_word_for_the_number_of_processes(script: str) -> None:
    from accelerate.commands.launch import launch_command_parser

    assert "-n" not in {word for action in launch_command_parser()._actions for word in action.option_strings}
    with pytest.raises(InputError, match=r"accelerate has no -n\. .*--num_processes"):
        started("accelerate launch -n 4", script)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("torchrun --nnodes 1:4 --nproc_per_node 8", "With --nnodes 1:4, the number of machines is not known"),
        ("deepspeed --num_nodes 2", "Write --num_nodes and --num_gpus"),
        ("deepspeed --hostfile hosts --num_gpus 8", "Write --num_nodes and --num_gpus"),
        ("deepspeed --exclude worker-1:0", "Write --num_nodes and --num_gpus"),
        ("deepspeed --include worker-0@worker-1:0,2", "does not name the same number of GPUs for each machine"),
        ("accelerate launch --num_machines 2", "Write num_processes"),
        ("deepspeed --include worker-0", "does not name the same number of GPUs for each machine"),
    ],
)
def test_a_number_that_follows_from_the_machines_is_not_known(words: str, said: str, script: str) -> None:
    with pytest.raises(UnreadError, match=said):
        started(words, script)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("torchrun --nproc_per_node many", "'many' is not a number of processes"),
        ("torchrun --nnodes two", "'two' is not a number of machines"),
        ("torchrun --nproc_per_node", "expected one argument"),
        ("deepspeed --num_gpus four", "'four' is not a number of processes"),
        ("deepspeed --num_gpus 2 --include localhost:0", "DeepSpeed refuses --include together with --num_gpus"),
        ("accelerate launch --num_processes 3 --num_machines 2", "3 processes cannot be divided among 2 machines"),
        ("accelerate launch --num_processes 1 --num_machines 2", "1 process cannot be divided among 2 machines"),
    ],
)
def test_words_that_a_launcher_does_not_take_are_told(words: str, said: str, script: str) -> None:
    with pytest.raises(InputError, match=said) as caught:
        started(words, script)
    assert not isinstance(caught.value, UnreadError)


HANDED_ON = {"accelerate_config": "zero3", "num_processes": 4}


@pytest.mark.parametrize("words", ["torchrun", "deepspeed", "accelerate launch", "python"])
def test_only_trl_hands_on_what_a_file_says_of_the_launch(words: str, script: str) -> None:
    for each in ("trl/scripts/sft.py", script):
        written, read = with_keys(f"{words} {each}", **HANDED_ON)
        found = launching(written, read)
        assert (found.processes, found.document) == (1, {})
        said = [item for item in launch_findings(written, read, found) if item.severity is not Severity.NOTE]
        assert [(item.key, item.severity) for item in said] == [(key, Severity.SILENT) for key in HANDED_ON]
        assert [item.line for item in said] == [1, 2]
        ends = "TrlParser refuses it" if each == script else "has no effect"
        assert all(ends in item.message for item in said)
    written, read = with_keys("trl sft", **HANDED_ON)
    found = launching(written, read)
    assert (found.processes, found.document["distributed_type"]) == (4, "DEEPSPEED")
    assert not list(launch_findings(written, read, found))


def test_sections_of_accelerate_s_file_and_a_precision_without_effect_are_told(tmp_path: Path) -> None:
    document: dict[str, object] = {
        "distributed_type": "MULTI_GPU", "num_processes": 2, "num_machines": 1, "deepspeed_config": {},
        "fsdp_config": {"fsdp_version": 2}, "mixed_precision": "fp8",
    }  # fmt: skip
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(document), encoding="utf-8")
    written, read = with_keys("trl sft", accelerate_config=str(tmp_path / "own.yaml"))
    found = launching(written, read)
    assert found.precision == "fp8"
    for bf16 in (True, False):
        configurations = {"SFTConfig": Configuration("SFTConfig", {"bf16": bf16, "fp16": False}, {})}
        of_file = replace(read, configurations=configurations)
        told = [item.message for item in launch_findings(written, of_file, found) if item.severity is Severity.SILENT]
        assert "fsdp_config in accelerate's file has no effect without distributed_type: FSDP." in told[0]
        assert ["mixed_precision: fp8 has no effect" in message for message in told[1:]] == ([True] if bf16 else [])


def test_trl_s_scripts_drop_what_they_do_not_know_and_trl_s_parser_ends_at_it(tmp_path: Path) -> None:
    import trl
    from trl import ModelConfig, TrlParser

    file = tmp_path / "c.yaml"
    file.write_text("accelerate_config: zero3\n", encoding="utf-8")
    words = ["--config", str(file)]
    with pytest.raises(ValueError, match="accelerate_config"):
        TrlParser((ModelConfig,)).parse_args_and_config(words)
    assert len(TrlParser((ModelConfig,)).parse_args_and_config(words, fail_with_unknown_args=False)) == 1
    scripts = Path(trl.__file__).parent / "scripts"
    for name in ("sft", "dpo", "kto", "reward", "grpo", "rloo"):
        assert "parse_args_and_config(fail_with_unknown_args=False)" in (scripts / f"{name}.py").read_text("utf-8")


def test_a_key_that_trl_s_own_script_drops_ends_only_trl_s_command(write: Write, checked: Checked) -> None:
    file = ("--config", str(write("sft", "max_seq_length: 512\nmine: 1\n")))
    for start in ("torchrun trl/scripts/sft.py", "python -m trl.scripts.sft"):
        verdict = checked(command=(*start.split(), *file), fits=False)
        assert verdict.outcome is Outcome.READ
        assert [(item.key, item.severity) for item in verdict.findings] == [
            (key, Severity.SILENT) for key in ("max_seq_length", "mine")
        ]
        assert "write max_length: 512. TRL's script, which" in verdict.findings[0].message
        ends = checked(command=(*start.split(), *file, "--mine", "1"), fits=False)
        assert ends.outcome is Outcome.CANNOT_RUN
    assert checked(command=("trl", "sft", *file), fits=False).outcome is Outcome.CANNOT_RUN


def test_words_of_the_command_say_it_before_the_file(write: Write, checked: Checked, tmp_path: Path) -> None:
    (tmp_path / "launch.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 8\n", encoding="utf-8")
    file = write("sft", f"accelerate_config: {tmp_path / 'launch.yaml'}\nnum_processes: 4\n")
    words = ("--config", str(file), "--num_processes", "2")
    assert checked(command=("trl", "sft", *words), fits=False).processes == 2
    assert checked(command=("trl", "sft", *words[:2]), fits=False).processes == 4
    start = ("accelerate", "launch", "--num_processes", "3", "trl/scripts/sft.py")
    assert checked(command=(*start, *words[:2]), fits=False).processes == 3


def test_a_command_is_read_as_each_of_its_processes_reads_it(write: Write, checked: Checked) -> None:
    # Four completions of a prompt, in micro-batches of one.
    file = write("grpo", "per_device_train_batch_size: 1\ngradient_accumulation_steps: 1\nnum_processes: 8\n")
    end = ("trl/scripts/grpo.py", "--config", str(file))
    for words in ("accelerate launch --num_processes 8", "torchrun --nproc_per_node 8", "deepspeed --num_gpus 8"):
        verdict = checked(command=(*words.split(), *end), fits=False)
        assert (verdict.outcome, verdict.processes) == (Outcome.READ, 8), verdict.findings
    # `trl` reads it alone, and starts the eight if that went well.
    for words in ("trl grpo", "python trl/scripts/grpo.py"):
        verdict = checked(command=(*words.split(), *end[1:]), fits=False)
        assert verdict.outcome is Outcome.CANNOT_RUN
        assert any("must be divisible by" in item.message for item in verdict.findings)
    with file.open("a", encoding="utf-8") as text:
        text.write("generation_batch_size: 12\n")
    verdict = checked(command=("trl", "grpo", *end[1:]), fits=False)
    assert any("divisible by the global batch size (8)" in item.message for item in verdict.findings)
    file.write_text(file.read_text(encoding="utf-8").replace(": 12", ": 8"), encoding="utf-8")
    assert checked(command=("trl", "grpo", *end[1:]), fits=False).outcome is Outcome.READ


def test_only_a_check_for_this_machine_s_own_gpus_knows_how_many_there_are(write: Write, script: str) -> None:
    command = read_command_line(["torchrun", "--nproc_per_node=gpu", script, "--config", str(write("sft", ""))])
    written = WrittenConfig(command, None, "sft")
    four, eight = (planned_machine("H100-80GB", count) for count in (4, 8))
    assert Task(CheckArguments("config.yaml"), written, four, 0, 0.0).gpus == 4
    assert Task(CheckArguments("config.yaml", gpu="H100-80GB"), written, four, 0, 0.0).gpus is None
    assert Task(CheckArguments("config.yaml"), written, planned_machine("cpu"), 0, 0.0).gpus is None
    # The verdict is cached for this number.
    assert key_of(CheckArguments("config.yaml"), written, four) != key_of(CheckArguments("config.yaml"), written, eight)


def test_two_machines_of_torchrun_are_checked_as_two_machines(write: Write, checked: Checked, script: str) -> None:
    file = write("sft", "max_length: 64\nper_device_train_batch_size: 1\n")
    words = ("torchrun", "--nnodes", "2", "--nproc-per-node", "4", script, "--config", str(file))
    verdict = checked(command=words, gpu="H100-80GB")
    assert (verdict.outcome, verdict.processes, verdict.documents_per_step) == (Outcome.FITS, 8, 8), verdict.findings
    assert verdict.plan is not None
    assert verdict.plan.launch.machines == 2


def test_a_number_that_is_not_known_leaves_the_answer_open(write: Write, checked: Checked, script: str) -> None:
    words = ("torchrun", "--nproc_per_node=gpu", script, "--config", str(write("sft", "")))
    verdict = checked(command=words, gpu="H100-80GB")
    assert (verdict.outcome, verdict.exit_code) == (Outcome.UNKNOWN, 3)
    assert "--nproc_per_node gpu starts a process for each GPU of the training's machine" in verdict.reason
    read = checked(command=words, fits=False)
    assert read.outcome is Outcome.READ
    assert any(item.severity is Severity.NOTE and "Write the number" in item.message for item in read.findings)


FOR_TWO = "num_processes: 2\nnum_machines: 1\ndistributed_type: "


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ("num_processes: 8\n", "`distributed_type` must be specified"),
        ("distributed_type: MULTI_GPU\n", "manually pass in `--num_processes`"),
        ("distributed_type: MULTI_GPU\nnum_procs: 8\n", "unknown keys .*num_procs"),
        ("distributed_type: multi_gpu\nnum_processes: 8\n", "'multi_gpu' is not a valid DistributedType"),
        ("distributed_type: DDP\nnum_processes: 8\n", "'DDP' is not a valid DistributedType"),
        ("", "own.yaml is empty; a configuration is a YAML mapping"),
        (f"{FOR_TWO}MULTI_GPU\nmixed_precision: bfloat16\n", "Unknown mixed_precision mode: bfloat16"),
        (f"{FOR_TWO}DEEPSPEED\nmixed_precision: no\n", "mixed_precision is true or false in its file: .* Write 'no'"),
        (f"{FOR_TWO}DEEPSPEED\nmixed_precision: fp32\n", "Unknown mixed_precision mode: fp32"),
        (f"{FOR_TWO}'NO'\ndynamo_config: {{dynamo_backend: triton}}\n", "Unknown dynamo backend: TRITON"),
        (f"{FOR_TWO}FSDP\nfsdp_config: {{fsdp_version: 2, fsdp_sync_module_states: false}}\n", "set .*sync_module"),
    ],
)
def test_a_file_that_accelerate_refuses_is_refused(document: str, said: str, script: str, tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(document, encoding="utf-8")
    with pytest.raises(InputError, match=said):
        started(f"accelerate launch --config_file {tmp_path / 'own.yaml'}", script)


def test_accelerate_loads_no_file_that_is_larger_than_a_configuration(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(f"distributed_type: {'x' * 200_000}\n", encoding="utf-8")
    found = read_launch(["--config_file", str(tmp_path / "own.yaml")], 1, "")
    assert "a configuration has at most" in found.refused


@pytest.mark.parametrize("kind", ["NO", "'NO'", "MULTI_CPU"])
def test_a_file_by_which_accelerate_starts_one_process_is_for_one(kind: str, script: str, tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(f"distributed_type: {kind}\nnum_processes: 8\n", encoding="utf-8")
    found = started(f"accelerate launch --config_file {tmp_path / 'own.yaml'}", script)
    assert (found.processes, found.ignored_processes, found.document["distributed_type"]) == (1, 8, "NO")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--config_file zero2", "zero2 does not exist"),
        ("--multi_gpu True", "it takes True for the script"),
        ("--num_procs 2", "unrecognized arguments: --num_procs"),
        ("--multi_gpu --use_fsdp", "only use one of"),
    ],
)
def test_options_that_accelerate_refuses_are_refused(words: str, said: str, script: str) -> None:
    with pytest.raises(InputError, match=said):
        started(f"accelerate launch {words}", script)


def test_the_document_has_no_number_of_processes_where_trl_does_not_get_as_far_as_starting_them(
    write: Write, checked: Checked, script: str
) -> None:
    file = str(write("sft", "num_processes: 8\nmax_seq_len: 4\n"))
    assert checked(command=("trl", "sft", "--config", file), fits=False).processes is None
    launch = ("accelerate", "launch", "--num_processes", "8", script, "--config", str(write("sft", "max_length: x\n")))
    refused = checked(command=launch, fits=False)
    assert (refused.outcome, refused.processes) == (Outcome.CANNOT_RUN, 8)


def test_torchrun_takes_options_from_variables(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = started("PET_NPROC_PER_NODE=8 PET_NNODES=2 torchrun", script)
    assert (found.processes, found.machines) == (16, 2)
    monkeypatch.setenv("PET_NPROC_PER_NODE", "4")
    assert started("torchrun", script).processes == 4
    assert started("torchrun --nproc_per_node 2", script).processes == 2


@pytest.mark.parametrize(
    ("words", "processes"),
    [
        ("trl sft --config FILE", 4),
        ("trl sft --config FILE --num_processes 2", 2),
        ("trl sft --accelerate_config zero2", 8),
        ("accelerate launch --num_processes 3 trl/scripts/sft.py --config FILE", 3),
        ("torchrun --nproc_per_node 2 trl/scripts/sft.py", 2),
        ("python trl/scripts/sft.py --config FILE", 1),
        ("CUDA_VISIBLE_DEVICES=0,1,2 accelerate launch trl/scripts/sft.py", 3),
        ("CUDA_VISIBLE_DEVICES=0,1,2 torchrun --nproc_per_node gpu trl/scripts/sft.py", 3),
    ],
)
def test_the_number_of_processes_is_known_before_anything_is_imported(words: str, processes: int) -> None:
    file = parse_yaml("num_processes: 4\n", Path("FILE")) if "FILE" in words else None
    assert likely_processes(WrittenConfig(read_command_line(words.split()), file, "sft")) == processes


@pytest.mark.parametrize(
    ("words", "keys", "gpus"),
    [
        ("CUDA_VISIBLE_DEVICES=4,5,6,7 accelerate launch --num_processes 4 trl/scripts/sft.py", "", 8),
        ("CUDA_VISIBLE_DEVICES=0 torchrun --nproc_per_node 2 trl/scripts/sft.py", "", 2),
        ("CUDA_VISIBLE_DEVICES=GPU-4e554c python trl/scripts/sft.py", "", 1),
        ("accelerate launch --gpu_ids 4,5 --num_processes 2 trl/scripts/sft.py", "", 6),
        ("deepspeed --include localhost:4,5 trl/scripts/sft.py", "", 6),
        ("trl sft --config FILE", "env: {CUDA_VISIBLE_DEVICES: 1}\n", 2),
        ("trl sft --config FILE", "gpu_ids: 2\nnum_processes: 1\n", 3),
    ],
)
def test_the_gpus_of_a_command_are_known_by_their_numbers(words: str, keys: str, gpus: int) -> None:
    file = parse_yaml(keys, Path("FILE")) if keys else None
    assert likely_gpus(WrittenConfig(read_command_line(words.split()), file, "sft")) == gpus
