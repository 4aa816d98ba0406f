"""``train.py``: the recommendation through TRL's Python API, for reading, changing and running."""

from __future__ import annotations

import textwrap
from string import Template

from autotune.core.plan import TrainingPlan
from autotune.core.result import Choosable, Result
from autotune.emit.arguments import training_arguments
from autotune.emit.provenance import provenance
from autotune.emit.rewards import reward_expressions, reward_imports
from autotune.emit.rows import CUT_ROWS, TrainingRows
from autotune.trainers import Trainer, find_trainer

_WIDTH = 100
_CLASSES = ("DatasetMixtureConfig", "ModelConfig", "TrlParser")
_FUNCTIONS = ("get_dataset", "get_peft_config", "get_quantization_config")
_TRL = "trl"
# What a trainer is given that loads all that belongs to a model by its name, and what one is given that does not.
_BY_NAME = "        quantization_config=get_quantization_config(model_args),"
_QUANTIZED = """\
        "quantization_config": get_quantization_config(model_args),
"""
_LOADING = """\
    name, kwargs = model_args.model_name_or_path, training_args.model_init_kwargs
    # With adapters, the model without them is the reference.
    reference = None if model_args.use_peft else AutoModelForCausalLM.from_pretrained(name, **kwargs)
"""
_LOADED = """\
        ref_model=reference,
        processing_class=AutoProcessor.from_pretrained(name, revision=model_args.model_revision),"""
_SCRIPT = Template('''\
"""$title with TRL, as recommended by autotune; stands on its own.

    python train.py                  trains as recommended
    python train.py --max_steps 2    every argument of $command overrides what is recommended

$provenance
"""

$imports

BUNDLE = Path(__file__).resolve().parent

RECOMMENDED = {
$arguments
}


def main() -> None:
    """Train, and save the model to `output_dir`."""
    parser = TrlParser(($config_class, ModelConfig, DatasetMixtureConfig))
    parser.set_defaults_with_config(**RECOMMENDED)
    training_args, model_args, dataset_args = parser.parse_args_and_config()
    training_args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "dtype": model_args.dtype,
        "attn_implementation": model_args.attn_implementation,
        "trust_remote_code": training_args.trust_remote_code,
$quantized        **(training_args.model_init_kwargs or {}),
    }
$loading    trainer = $trainer_class(
        model=model_args.model_name_or_path,
        args=training_args,
        train_dataset=get_dataset(dataset_args)["train"],
$given
        peft_config=get_peft_config(model_args),
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model(training_args.output_dir)


if __name__ == "__main__":
    main()
''')


def script_text(result: Result, chosen: Choosable, rows: TrainingRows) -> str:
    """Return the script."""
    arguments = training_arguments(chosen.plan, result.workload, rows)
    expressions = {name: repr(value) for name, value in arguments.items()}
    if rows.in_bundle:
        file = repr(rows.data_files)
        expressions["datasets"] = expressions["datasets"].replace(file, f"str(BUNDLE / {CUT_ROWS!r})")
    sentences = provenance(result, chosen, rows)
    trainer = find_trainer(result.trainer)
    given = _BY_NAME if trainer.loads_by_name else _LOADED
    if chosen.plan.rewards:
        given = f"        reward_funcs={reward_expressions(chosen.plan.rewards)},\n{given}"
    command = f"`trl {trainer.name}`" if trainer.has_command else f"{trainer.config_class}"
    return _SCRIPT.substitute(
        title=trainer.title,
        command=command,
        imports=_imports(trainer, chosen.plan),
        given=given,
        quantized="" if trainer.loads_by_name else _QUANTIZED,
        loading="" if trainer.loads_by_name else _LOADING,
        config_class=trainer.config_class,
        trainer_class=trainer.trainer_class,
        provenance="\n".join(_docstring_lines(sentence) for sentence in sentences),
        arguments="\n".join(f"    {name!r}: {expression}," for name, expression in expressions.items()),
    )


def _imports(trainer: Trainer, plan: TrainingPlan) -> str:
    own = [trainer.config_class, trainer.trainer_class]
    here = own if trainer.module == _TRL else []
    names = [*sorted([*_CLASSES, *here]), *_FUNCTIONS]
    loads = [] if trainer.loads_by_name else ["from transformers import AutoModelForCausalLM, AutoProcessor"]
    elsewhere = [] if here else [f"from {trainer.module} import {', '.join(own)}"]
    rewards = reward_imports(plan.rewards)
    first = ["import sys"] if any("sys." in line for line in rewards) else []
    trl = ["from trl import (", *(f"    {name}," for name in names), ")"]
    return "\n".join([*first, "from pathlib import Path", "", *loads, *trl, *elsewhere, *rewards])


def _docstring_lines(sentence: str) -> str:
    escaped = sentence.replace("\\", "\\\\").replace('"""', r"\"\"\"")
    return textwrap.fill(escaped, _WIDTH, break_long_words=False, break_on_hyphens=False)
