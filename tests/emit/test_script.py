"""``train.py`` loads the measured training, and uses only the measured part of the machine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest

from autotune.core.machine import Hardware
from autotune.core.plan import Launch, TrainingPlan
from autotune.core.workload import DatasetSource, Workload
from autotune.emit.bundle import write_bundle
from autotune.inspection.cuda import BY_ADDRESS
from tests.emit.bundles import recommending, text_of
from tests.reporting.examples import a_workload
from tests.small import text_rows, write_rows

GPU = "CUDA_VISIBLE_DEVICES"


def script_of(
    plan: TrainingPlan, folder: Path, hardware: Hardware | None = None, workload: Workload | None = None
) -> str:
    """Return the script of a run that recommends a plan."""
    given = {"hardware": hardware, "workload": workload}
    write_bundle(recommending(plan, **{name: each for name, each in given.items() if each is not None}), folder)
    return (folder / "train.py").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("peft", "loads"), [({}, True), ({"peft_type": "IA3"}, False)], ids=["TRL's arguments", "PEFT's own file"]
)
def test_a_reference_is_loaded_only_where_no_adapter_can_be_switched_off(
    peft: dict[str, object], loads: bool, tmp_path: Path
) -> None:
    plan = TrainingPlan("online_dpo", {"use_cpu": True}, {"use_peft": True}, peft=peft)
    script = script_of(plan, tmp_path)
    assert ("AutoModelForCausalLM.from_pretrained" in script) == loads
    assert ("AutoModelForCausalLM" in script) == loads
    compile(script, "train.py", "exec")


def test_the_script_does_not_promise_to_take_the_arguments_of_the_data(tmp_path: Path) -> None:
    script = script_of(TrainingPlan("sft", {"use_cpu": True}), tmp_path)
    assert "every argument of `trl sft` but those of the data overrides what is recommended" in script


def seen(script: str, variables: Mapping[str, str]) -> str | None:
    """Return which GPUs a script shows to the libraries that it imports."""
    before, _, _ = script.partition("from trl import")
    with mock.patch.dict(os.environ, variables, clear=True), mock.patch.object(sys, "argv", ["train.py"]):
        exec(compile(before, "train.py", "exec"), {})
        return os.environ.get(GPU)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "0"),
        ({GPU: "3"}, "3"),
        ({GPU: "GPU-8932f937,GPU-4f5a"}, "GPU-8932f937"),
        ({GPU: ""}, ""),
        # A launcher of several processes gives each its own GPU.
        ({"LOCAL_RANK": "1"}, None),
        ({GPU: "2,3", "LOCAL_RANK": "1"}, "2,3"),
    ],
    ids=str,
)
def test_one_process_sees_the_first_visible_gpu_alone(
    variables: Mapping[str, str], expected: str | None, tmp_path: Path
) -> None:
    assert seen(script_of(TrainingPlan("sft"), tmp_path), variables) == expected


def test_the_script_ends_trackers_and_the_group_of_processes_after_it_has_saved(tmp_path: Path) -> None:
    script = script_of(TrainingPlan("sft"), tmp_path)
    assert script.index("trainer.save_model(") < script.index("trainer.end()")


@pytest.mark.parametrize("size", [None, 0.25], ids=["a split to evaluate on", "rows split off"])
def test_the_script_trains_and_evaluates_on_rows_of_the_named_configuration(size: float | None, tmp_path: Path) -> None:
    texts = {"train": list("abcdefgh"), "test": list("xy"), "other": list("z")}
    for name, listed in texts.items():
        write_rows(tmp_path / f"{name}.jsonl", text_rows(listed))
    files = ([{"split": split, "path": f"{split}.jsonl"} for split in ("train", "test")], "other.jsonl")
    names = zip(("mine", "default"), files, strict=True)
    card = json.dumps({"configs": [{"config_name": name, "data_files": each} for name, each in names]})
    (tmp_path / "README.md").write_text(f"---\n{card}\n---\n", encoding="utf-8")
    source, of = DatasetSource("rows", str(tmp_path), config="mine", test_size=size), a_workload()
    evaluated = replace(source, split="train" if size else "test")
    of = replace(of, dataset_source=source, evaluation_source=evaluated, evaluation=of.dataset)
    plan = TrainingPlan("sft", {"use_cpu": True, "bf16": False, "eval_strategy": "epoch"})
    script, trainer = script_of(plan, tmp_path / "bundle", workload=of), mock.MagicMock()
    space = {"__name__": "script", "__file__": str(tmp_path / "bundle" / "train.py")}
    exec(compile(script, "train.py", "exec"), space)
    with mock.patch.dict(space, {"SFTTrainer": trainer}), mock.patch.object(sys, "argv", ["train.py"]):
        space["main"]()  # type: ignore[operator]  # a function of the script
    trained, seen = (trainer.call_args.kwargs[f"{part}_dataset"]["text"][:] for part in ("train", "eval"))
    assert (trained, seen) == (texts["train"], texts["test"]) if size is None else len(seen) == 2
    assert size is None or sorted(trained + seen) == texts["train"]


def test_an_argument_that_trl_no_longer_has_is_named_and_not_passed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = script_of(TrainingPlan("sft", {"use_cpu": True, "gone_since": 1}), tmp_path)
    with mock.patch.object(sys, "argv", ["train.py"]), pytest.raises(SystemExit):
        exec(compile(script, "train.py", "exec"), {"__name__": "__main__", "__file__": str(tmp_path / "train.py")})
    assert "this version of TRL has no --gone_since 1" in capsys.readouterr().err


def test_processes_of_a_group_and_of_a_cpu_see_what_they_are_shown(tmp_path: Path) -> None:
    offloading = TrainingPlan("sft", {"deepspeed": {"zero_optimization": {"stage": 2}}})
    cpu = Hardware("cpu", "CPU", 2**33)
    for plan, hardware in (
        (TrainingPlan("sft", launch=Launch(2)), None),
        (offloading, None),
        (TrainingPlan("sft"), cpu),
    ):
        assert seen(script_of(plan, tmp_path, hardware), {GPU: "2,3"}) == "2,3"


def test_the_configuration_says_how_one_gpu_is_named_where_several_are_visible(tmp_path: Path) -> None:
    script_of(TrainingPlan("sft"), tmp_path)
    said = text_of(tmp_path / "config.yaml")
    assert "name one, as in CUDA_VISIBLE_DEVICES=0 trl sft --config config.yaml" in said
    script_of(TrainingPlan("sft", launch=Launch(2)), tmp_path)
    assert GPU not in (tmp_path / "config.yaml").read_text(encoding="utf-8")


def test_gpus_that_differ_are_counted_by_their_address_in_the_configuration_and_the_script(tmp_path: Path) -> None:
    mixed = Hardware("cuda", "Large GPU", 2**33, variables=BY_ADDRESS)
    script = script_of(TrainingPlan("sft"), tmp_path, mixed)
    said = text_of(tmp_path / "config.yaml")
    assert f"name one, as in {BY_ADDRESS} CUDA_VISIBLE_DEVICES=0 trl sft --config config.yaml" in said
    assert "'CUDA_DEVICE_ORDER': 'PCI_BUS_ID'," in script


def test_the_threads_of_a_cpu_wait_as_in_the_probes_unless_the_user_has_said_how(tmp_path: Path) -> None:
    script = script_of(
        TrainingPlan("sft"), tmp_path, Hardware("cpu", "CPU", 2**33, variables="OMP_WAIT_POLICY=PASSIVE")
    )
    before, _, _ = script.partition("from datasets import")
    before, _, _ = before.partition("from trl import")
    # Where torch has brought it along, without the rest of torch.
    package = find_spec("torch")
    assert package is not None
    assert package.origin is not None
    brought = next(Path(package.origin).parent.glob("lib/libgomp*"), None)
    loading = f"import ctypes; ctypes.CDLL({str(brought)!r})" if brought is not None else "import torch"

    def spins(**own: str) -> str:
        """Return how often the OpenMP that torch has loaded looks whether it may go on, before a thread sleeps."""
        kept = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
        command = [sys.executable, "-c", f"__file__ = 'train.py'\n{before}\n{loading}"]
        environment = {**kept, "OMP_DISPLAY_ENV": "VERBOSE", **own}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        found = re.search("GOMP_SPINCOUNT = '(.*)'", done.stderr)
        if found is None:
            pytest.skip("this torch has another OpenMP than GNU's")
        return found.group(1)

    assert spins() == "0"
    assert spins(OMP_WAIT_POLICY="ACTIVE") != "0"
    said = text_of(tmp_path / "config.yaml")
    assert "For the memory and speed of the probes, run: OMP_WAIT_POLICY=PASSIVE trl sft --config config.yaml" in said
    assert "1 process, OMP_WAIT_POLICY=PASSIVE, with" in said


def test_a_script_starts_anew_with_the_variables_that_the_c_library_reads_at_the_start(tmp_path: Path) -> None:
    hardware = Hardware("cpu", "CPU", 2**33, variables="MALLOC_TRIM_THRESHOLD_=1099511627776")
    script = script_of(TrainingPlan("sft"), tmp_path, hardware)
    before, _, _ = script.partition("from datasets import")
    before, _, _ = before.partition("from trl import")
    # The kernel keeps what a process was started with.
    environment = "open('/proc/self/environ').read().split('\\0')"
    shown = f"print([line for line in {environment} if 'MALLOC_TRIM' in line], sys.argv[1:])"
    (tmp_path / "start.py").write_text(f"{before}\n{shown}\n", encoding="utf-8")

    def started(**own: str) -> str:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC")}
        command = [sys.executable, "-u", str(tmp_path / "start.py"), "--max_steps", "2"]
        return subprocess.run(command, env=kept | own, capture_output=True, text=True, check=True).stdout.strip()

    assert started() == "['MALLOC_TRIM_THRESHOLD_=1099511627776'] ['--max_steps', '2']"
    assert started(MALLOC_TRIM_THRESHOLD_="512") == "['MALLOC_TRIM_THRESHOLD_=512'] ['--max_steps', '2']"
