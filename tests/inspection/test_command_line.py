"""A training command is parsed without running any of it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from autotune.errors import InputError, UnreadError
from autotune.inspection.command_line import _ALIASES, _WITHOUT_MAIN, options_of, read_command_line

SCRIPT = """\
import os
from trl import DPOConfig, DPOTrainer, ModelConfig, {parser}
os.makedirs({trace!r})
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "train.py"
    file.write_text(SCRIPT.format(parser="TrlParser", trace=str(tmp_path / "ran")), encoding="utf-8")
    return file


def test_a_command_of_trl_says_its_trainer_and_its_file() -> None:
    found = read_command_line(["trl", "dpo", "--config", "c.yaml", "--max_length", "4096"])
    assert (found.trainer, found.config) == ("dpo", Path("c.yaml"))
    assert found.words == ("--config", "c.yaml", "--max_length", "4096")


def test_variables_and_wrappers_before_it_are_set_aside() -> None:
    found = read_command_line(["PYTORCH_ALLOC_CONF=expandable_segments:True", "srun", "-n1", "bin/trl", "kto"])
    assert found.trainer == "kto"
    assert found.env == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def test_a_script_is_parsed_for_the_trainer_that_it_uses_and_not_run(script: Path, tmp_path: Path) -> None:
    words = ["accelerate", "launch", "--config_file", "zero3.yaml", str(script), "--config", "c.yaml"]
    found = read_command_line(words)
    assert (found.trainer, found.script, found.parser) == ("dpo", str(script), "TrlParser")
    assert found.launch == ("--config_file", "zero3.yaml")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("start", [["python"], ["python3.12", "-u"], ["torchrun", "--nproc_per_node", "2"]])
def test_a_script_may_be_started_in_several_ways(start: list[str], script: Path) -> None:
    assert read_command_line([*start, str(script), "--config=c.yaml"]).config == Path("c.yaml")


def test_trl_s_own_scripts_are_known_by_their_place() -> None:
    found = read_command_line(["accelerate", "launch", "site-packages/trl/scripts/reward.py", "--config", "c.yaml"])
    assert (found.trainer, found.script) == ("reward", None)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["make", "train"], "make train is not a command that trains with TRL"),
        (["trl", "env"], "`trl env` trains nothing"),
        (["trl"], "trains nothing"),
        (["trl", "ppo"], "since release 1.13"),
        (["trl", "online_dpo"], "TRL has no command `trl online_dpo`"),
        (["trl", "orpo"], "autotune does not support `trl orpo`"),
        (["accelerate", "config"], "`accelerate config` starts no training"),
        (["accelerate", "launch", "--num_processes", "2"], "There is no script"),
        (["python", "nowhere.py"], "nowhere.py cannot be read"),
        (["bash", "-c", "trl 'sft"], "The text for the shell cannot be read: No closing quotation"),
        (["python", "-m", "trl", "sft"], "Python cannot run trl as a module"),
        (["python", "-m", "trl.cli", "sft"], "Python cannot run trl.cli as a module"),
        (["python", "-m", "accelerate", "launch", "train.py"], "Python cannot run accelerate as a module"),
    ],
)
def test_what_trains_nothing_is_refused_with_its_name(words: list[str], said: str) -> None:
    with pytest.raises(InputError, match=said):
        read_command_line(words)


def test_a_script_that_is_no_python_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("def (", encoding="utf-8")
    with pytest.raises(InputError, match="is not Python"):
        read_command_line(["python", str(file)])


def test_the_options_of_a_launcher_are_read_with_their_values_whatever_their_form() -> None:
    words = ("--num_processes", "2", "--multi-gpu", "--mixed_precision=bf16", "-m", "x", "--main_process_port", "-1")
    assert options_of((*words, "--cpu")) == {
        "num_processes": "2", "multi_gpu": True, "mixed_precision": "bf16", "main_process_port": "-1", "cpu": True,
    }  # fmt: skip


def test_all_values_of_an_option_are_read() -> None:
    assert options_of(("--loss_type", "sigmoid", "sft", "--beta=0.1", "stray")) == {
        "loss_type": ["sigmoid", "sft"], "beta": "0.1",
    }  # fmt: skip


@pytest.mark.parametrize(
    "words",
    [
        "uv run --with trl trl sft --config c.yaml",
        "uvx --from trl trl sft --config c.yaml",
        "conda run -n trl trl sft --config c.yaml",
        "srun --job-name trl accelerate launch trl/scripts/sft.py --config c.yaml",
    ],
)
def test_the_value_of_an_option_before_it_is_not_taken_for_the_command(words: str) -> None:
    found = read_command_line(words.split())
    assert (found.trainer, found.words) == ("sft", ("--config", "c.yaml"))


@pytest.mark.parametrize(
    "start",
    [
        "python -u -m accelerate.commands.launch",
        "python -m accelerate.commands.accelerate_cli launch",
        "accelerate-launch",
    ],
)
def test_the_options_of_a_launcher_begin_behind_its_other_name(start: str) -> None:
    found = read_command_line([*start.split(), "--num_processes", "2", "trl/scripts/sft.py"])
    assert (found.launcher, found.launch) == ("accelerate", ("--num_processes", "2"))


@pytest.mark.parametrize(
    ("words", "launcher", "launch"),
    [
        ("srun --job-name python accelerate launch", "accelerate", ()),
        ("srun --job-name torchrun accelerate launch --cpu", "accelerate", ("--cpu",)),
        ("srun --job-name python --unbuffered torchrun --nnodes 2", "torchrun", ("--nnodes", "2")),
        ("srun --job-name deepspeed --nodes 2 python -W ignore", "", ("-W", "ignore")),
    ],
)
def test_a_job_that_is_named_like_a_launcher_is_not_taken_for_it(
    words: str, launcher: str, launch: tuple[str, ...]
) -> None:
    found = read_command_line([*words.split(), "trl/scripts/sft.py"])
    assert (found.launcher, found.launch) == (launcher, launch)


def test_trl_s_own_program_is_a_module_too() -> None:
    found = read_command_line(["python", "-m", "trl.cli.main", "sft", "--config", "c.yaml"])
    assert (found.trainer, found.launcher, found.words) == ("sft", "trl", ("--config", "c.yaml"))


@pytest.mark.parametrize("module", sorted(_ALIASES.keys() - {"accelerate-launch"}))
def test_a_launcher_s_module_is_one_that_python_runs(module: str) -> None:
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    assert 'if __name__ == "__main__":' in Path(spec.origin).read_text(encoding="utf-8")


@pytest.mark.parametrize("module", sorted(_WITHOUT_MAIN))
def test_python_runs_no_launcher_s_package(module: str) -> None:
    assert find_spec(module) is None or find_spec(f"{module}.__main__") is None


def test_the_value_of_a_launcher_s_option_is_not_taken_for_a_launcher(script: Path) -> None:
    found = read_command_line(["accelerate", "launch", "--config_file", "deepspeed", str(script)])
    assert (found.launcher, found.launch) == ("accelerate", ("--config_file", "deepspeed"))


@pytest.mark.parametrize(
    ("words", "launcher", "launch"),
    [
        ("python -m trl.scripts.rloo", "", ("-m",)),
        ("python -u -m trl.scripts.rloo", "", ("-u", "-m")),
        ("torchrun --nproc_per_node 2 -m trl.scripts.rloo", "torchrun", ("--nproc_per_node", "2", "-m")),
        ("accelerate launch -m trl.scripts.rloo", "accelerate", ("-m",)),
        ("deepspeed --num_gpus 2 --module trl.scripts.rloo", "deepspeed", ("--num_gpus", "2", "--module")),
    ],
)
def test_a_module_of_trl_s_scripts_is_that_script(words: str, launcher: str, launch: tuple[str, ...]) -> None:
    found = read_command_line([*words.split(), "--config", "c.yaml"])
    assert (found.trainer, found.script, found.words) == ("rloo", None, ("--config", "c.yaml"))
    assert (found.launcher, found.launch) == (launcher, launch)


def test_another_module_is_the_file_of_that_name(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(script.parent)
    package = script.parent / "mine"
    package.mkdir()
    for name in ("train.py", "__main__.py"):
        (package / name).write_text(script.read_text(encoding="utf-8"), encoding="utf-8")
    assert read_command_line(["torchrun", "-m", "mine.train"]).script == "mine/train.py"
    assert read_command_line(["python", "-m", "mine"]).script == "mine/__main__.py"


def test_a_module_that_is_not_here_may_train_nevertheless() -> None:
    with pytest.raises(
        UnreadError, match=r"There is no nowhere/train\.py here, so the module nowhere\.train cannot be"
    ):
        read_command_line(["accelerate", "launch", "-m", "nowhere.train"])


@pytest.mark.parametrize(
    "words",
    [
        ["bash", "-c", "trl sft --config c.yaml"],
        ["srun", "--job-name", "sh", "/bin/bash", "-lc", "trl sft --config c.yaml"],
        ["bash", "--login", "-euc", "cd trl && source env.sh && cd ..; trl sft --config c.yaml 2>&1 | tee log"],
        ["sh", "-c", "  trl sft \\\n --config c.yaml > log 2>&1\necho python done.py"],
        ["bash", "-c", "bash -c 'trl sft --config c.yaml'"],
    ],
)
def test_the_text_that_a_shell_is_given_is_read(words: list[str]) -> None:
    found = read_command_line(words)
    assert (found.trainer, found.words) == ("sft", ("--config", "c.yaml"))


def test_a_command_in_another_directory_is_not_read_by_the_files_of_this_one(tmp_path: Path) -> None:
    words = ["bash", "-c", f"export A=1; cd {tmp_path}/runs && trl sft --config c.yaml"]
    with pytest.raises(UnreadError, match=r"changes to the directory .*/runs.* Run autotune there"):
        read_command_line(words)
    assert read_command_line(words, anywhere=True).words == ("--config", "c.yaml")
    here = ["bash", "-c", f"cd {Path.cwd()} && trl sft --config c.yaml; cd {tmp_path} && python -m done"]
    assert read_command_line(here).words == ("--config", "c.yaml")


def test_variables_that_are_set_in_the_text_for_a_shell_are_those_of_the_command() -> None:
    found = read_command_line(["A=1", "bash", "-c", "export B=2; C=3 trl sft --run_name 'a && b'"])
    assert found.env == {"A": "1", "B": "2", "C": "3"}
    assert found.words == ("--run_name", "a && b")
