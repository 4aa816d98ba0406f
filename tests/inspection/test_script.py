"""A script's source shows its TRL trainer, and whether its parser has other classes too."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.errors import InputError
from autotune.inspection.script import Script, read_script

IMPORTS = "from trl import ModelConfig, SFTConfig, SFTTrainer, ScriptArguments, TrlParser\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "train.py"


def read(path: Path, source: str) -> Script:
    path.write_text(source, encoding="utf-8")
    return read_script(str(path))


@pytest.mark.parametrize(
    ("source", "trainer", "unsupported"),
    [
        ("from trl import DPOConfig, DPOTrainer", "dpo", ""),
        ("import trl\ntrl.DPOTrainer(args=trl.DPOConfig())", "dpo", ""),
        ("from trl import DPOConfig, SFTTrainer", "sft", ""),
        ("from trl import DPOTrainer, SFTTrainer", None, ""),
        ("from mine import SFTConfig", "sft", ""),
        ("from trl.experimental.cpo import CPOConfig, CPOTrainer", None, "CPOTrainer"),
        ("from trl import CPOTrainer, SFTConfig", None, "CPOTrainer"),
        ("from trl.experimental.cpo import CPOConfig\nfrom trl import ModelConfig", None, "CPOConfig"),
        ("from trl import SFTTrainer\nfrom peft import LoraConfig\nclass MyTrainer(SFTTrainer): pass", "sft", ""),
        ("from trl.trainer.base import _BaseTrainer\nfrom transformers import Trainer, GenerationConfig", None, ""),
    ],
)
def test_the_trainer_is_the_one_whose_class_is_used(
    source: str, trainer: str | None, unsupported: str, path: Path
) -> None:
    found = read(path, source)
    assert (found.trainer, found.unsupported) == (trainer, unsupported)


@pytest.mark.parametrize("source", ["", "# This file has been moved.\n", '"""Only a docstring."""\n'])
def test_a_script_without_code_is_refused(source: str, path: Path) -> None:
    with pytest.raises(InputError, match=r"train\.py has no code"):
        read(path, source)


@pytest.mark.parametrize(
    ("source", "takes_more"),
    [
        (f"{IMPORTS}TrlParser((ScriptArguments, SFTConfig, ModelConfig)).parse_args_and_config()", False),
        (f"{IMPORTS}TrlParser(dataclass_types=[SFTConfig, ModelConfig])", False),
        (f"{IMPORTS}TrlParser(SFTConfig)", False),
        (f"{IMPORTS}from transformers import HfArgumentParser\nHfArgumentParser((SFTConfig, ModelConfig))", False),
        ("from trl import SFTConfig as Config, TrlParser\nTrlParser((Config,))", False),
        (f"{IMPORTS}TrlParser((ScriptArguments, SFTConfig, MyConfig))", True),
        (f"{IMPORTS}class SFTConfig(SFTConfig): mine: int = 1\nTrlParser((SFTConfig,))", True),
        ("from mine import SFTConfig\nfrom trl import TrlParser\nTrlParser((SFTConfig,))", True),
        (f"{IMPORTS}TrlParser(CLASSES)", True),
        (f"{IMPORTS}TrlParser((SFTConfig,))\nTrlParser((Mine,))", True),
        (f"{IMPORTS}TrlParser((SFTConfig,)).parse_args_and_config(return_remaining_strings=True)", True),
        (f"{IMPORTS}TrlParser((SFTConfig,)).add_argument('--mine')", True),
        (IMPORTS, True),
    ],
)
def test_a_script_takes_keys_of_its_own_unless_its_parser_has_classes_of_trl_alone(
    source: str, takes_more: bool, path: Path
) -> None:
    assert read(path, source).takes_more is takes_more
