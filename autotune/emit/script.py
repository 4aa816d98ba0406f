"""``train.py``: the recommendation through TRL's Python API, for reading, changing and running."""

from __future__ import annotations

from collections.abc import Mapping
from string import Template

from autotune.core.bundle import Basis
from autotune.core.plan import TrainingPlan
from autotune.emit.arguments import PEFT_CONFIG, training_arguments
from autotune.emit.comment import filled, one_line
from autotune.emit.handover import Handover
from autotune.emit.launch import ACCELERATE, launches
from autotune.emit.provenance import provenance
from autotune.emit.rows import ROWS, TrainingRows
from autotune.emit.serving import training_gpus, visible
from autotune.trainers import Trainer, find_trainer

_PEFT_FROM_FILE = f'PeftConfig.from_peft_type(**json.loads((BUNDLE / "{PEFT_CONFIG}").read_text(encoding="utf-8")))'
_CLASSES = ("ModelConfig", "TrlParser")
_FUNCTIONS = ("get_peft_config", "get_quantization_config")
_EVALUATED = """\
        eval_dataset=dataset[dataset_args.dataset_test_split] if training_args.eval_strategy != "no" else None,
"""
_REWARD_FUNCTIONS = (
    "accuracy_reward", "get_soft_overlong_punishment", "reasoning_accuracy_reward", "think_format_reward"
)  # fmt: skip
_REWARD_PARTS = {
    "reward_class": ", RewardArguments",
    "reward_args": ", reward_args",
    "reward_funcs": "        reward_funcs=[reward_function(name) for name in reward_args.reward_funcs],\n",
}
_REWARDS = '''\
REWARDS = {
    "accuracy_reward": accuracy_reward,
    "get_soft_overlong_punishment": get_soft_overlong_punishment(max_completion_len=1280, soft_punish_cache=256),
    "reasoning_accuracy_reward": reasoning_accuracy_reward,
    "think_format_reward": think_format_reward,
}


@dataclass
class RewardArguments:
    """The reward functions: keys of REWARDS, or dotted paths from the directory that this script is started in."""

    reward_funcs: list[str] = field(default_factory=list)


def reward_function(name):
    """Return the reward function of a name."""
    if name in REWARDS:
        return REWARDS[name]
    sys.path.insert(0, str(Path.cwd()))
    module, _, function = name.rpartition(".")
    return getattr(importlib.import_module(module), function)


'''
_FIRST_GPU = """\
if "LOCAL_RANK" not in os.environ:
    # One process trains on one GPU, the first that is visible; a launcher gives each process its own.
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]"""
_WORDS = {Basis.MEASURED: "recommended", Basis.PLANNED: "planned"}
_UNMEASURED = {Basis.MEASURED: "", Basis.PLANNED: ", which measured nothing of it"}
_TRL = "trl"
# What a trainer is given that loads all that belongs to a model by its name, and what one is given that does not.
_BY_NAME = {
    "quantized": "",
    "loading": "",
    "loaded": "        quantization_config=get_quantization_config(model_args),\n",
}
_LOADED = {
    "quantized": '        "quantization_config": get_quantization_config(model_args),\n',
    "loading": """\
    name, kwargs = model_args.model_name_or_path, training_args.model_init_kwargs
    # With adapters, the model without them is the reference.
    reference = None if model_args.use_peft else AutoModelForCausalLM.from_pretrained(name, **kwargs)
""",
    "loaded": """\
        ref_model=reference,
        processing_class=AutoProcessor.from_pretrained(name, revision=model_args.model_revision),
""",
}
_ADAPTED = {
    **_LOADED,
    "loading": """\
    # The model without its adapters is the reference.
    name, reference = model_args.model_name_or_path, None
""",
}
# Type and attention are those of the model unless the configuration says otherwise, as in TRL's own script.
_TEACHER_LOADING = """\
    training_args.teacher_model_init_kwargs = {
        "revision": training_args.teacher_model_revision,
        "dtype": model_args.dtype,
        "attn_implementation": model_args.attn_implementation,
        "trust_remote_code": training_args.trust_remote_code,
        **(training_args.teacher_model_init_kwargs or {}),
    }
"""
_TEACHER = "        teacher_model=training_args.teacher_model_name_or_path,\n"
_SCRIPT = Template('''\
"""$title with TRL, $origin; stands on its own.

$usage

$provenance
"""

$standard
$imports

BUNDLE = Path(__file__).resolve().parent

RECOMMENDED = {
$arguments
}

${rewards}
def main() -> None:
    """Train, and save the model to `output_dir`."""
    parser = TrlParser(($config_class, ModelConfig, $rows_class$reward_class))
    parser.set_defaults_with_config(**RECOMMENDED)
    training_args, model_args, dataset_args$reward_args = parser.parse_args_and_config()
    training_args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "dtype": model_args.dtype,
        "attn_implementation": model_args.attn_implementation,
        "trust_remote_code": training_args.trust_remote_code,
$quantized        **(training_args.model_init_kwargs or {}),
    }
$teacher_loading    dataset = $dataset
$loading    trainer = $trainer_class(
        model=model_args.model_name_or_path,
$teacher        args=training_args,
$reward_funcs        train_dataset=dataset[$train_split],
$evaluated$loaded        peft_config=$peft_config,
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model(training_args.output_dir)


if __name__ == "__main__":
    main()
''')


def script_text(given: Handover, rows: TrainingRows) -> str:
    """Return the script."""
    plan, base = given.plan, given.base
    arguments = training_arguments(plan, given.workload, rows)
    env = plan.env
    if base is not None and base.text:
        # What TRL's command reads from the user's own file; its rows are loaded as the script does.
        own = {**base.further, **base.args}
        kept = {name: value for name, value in own.items() if name not in ROWS}
        arguments = {**kept, "model_name_or_path": arguments["model_name_or_path"], **rows.arguments()}
        env = base.env
    expressions = {name: repr(value) for name, value in arguments.items()}
    if rows.in_bundle:
        here = f"str(BUNDLE / {rows.in_bundle!r})"
        expressions |= {
            name: expressions[name].replace(repr(rows.place), here) for name in rows.arguments() if name in expressions
        }
    evaluates = rows.evaluated is not None
    sentences = provenance(given, rows)
    trainer = find_trainer(plan.trainer)
    command = f"`trl {trainer.name}`" if trainer.has_command else f"{trainer.config_class}"
    return _SCRIPT.substitute(
        **(_BY_NAME if trainer.loads_by_name else _ADAPTED if plan.peft else _LOADED),
        **_rewards(scores=bool(plan.rewards)),
        teacher_loading=_TEACHER_LOADING if trainer.has_teacher else "",
        teacher=_TEACHER if trainer.has_teacher else "",
        standard=_standard(given, env),
        title=trainer.title,
        origin=f"as {_WORDS[given.basis]} by autotune{_UNMEASURED[given.basis]}",
        usage=_usage(given, command),
        peft_config=_PEFT_FROM_FILE if plan.peft else "get_peft_config(model_args)",
        imports=_imports(trainer, plan, evaluates=evaluates),
        rows_class="ScriptArguments" if evaluates else "DatasetMixtureConfig",
        dataset="load_dataset(dataset_args.dataset_name)" if evaluates else "get_dataset(dataset_args)",
        train_split="dataset_args.dataset_train_split" if evaluates else '"train"',
        evaluated=_EVALUATED if evaluates else "",
        config_class=trainer.config_class,
        trainer_class=trainer.trainer_class,
        provenance="\n".join(_docstring_lines(sentence) for sentence in sentences),
        arguments="\n".join(f"    {name!r}: {expression}," for name, expression in expressions.items()),
    )


def _usage(given: Handover, command: str) -> str:
    start = f"accelerate launch --config_file {ACCELERATE}" if launches(given.plan) else "python"
    word = _WORDS[given.basis]
    first, second = f"{start} train.py", f"{start} train.py --max_steps 2"
    shown = f"    export {visible(training_gpus(given.server))}\n" if given.server is not None else ""
    return (
        f"{shown}    {first:{len(second)}}    trains as {word}\n"
        f"    {second}    every argument of {command} overrides what is {word}"
    )


def _standard(given: Handover, env: Mapping[str, str]) -> str:
    """Return the first imports, and the variables that have to be set before torch is imported."""
    plan, first_gpu, cpu = given.plan, given.on_one_gpu, given.hardware.environment
    wanted = {"importlib": plan.rewards, "json": plan.peft, "os": env or first_gpu or cpu, "sys": plan.rewards}
    lines = [f"import {name}" for name, needed in wanted.items() if needed]
    lines += ["from dataclasses import dataclass, field"] if plan.rewards else []
    variables = [f"os.environ[{name!r}] = {value!r}" for name, value in env.items()]
    if cpu:
        variables.append("# As in the probes; torch reads them when it is imported.")
        variables += [f"os.environ.setdefault({name!r}, {value!r})" for name, value in cpu.items()]
    variables += [_FIRST_GPU] if first_gpu else []
    return "\n".join([*lines, "from pathlib import Path", "", *variables, *([""] if variables else [])])


def _rewards(*, scores: bool) -> dict[str, str]:
    """Return the parts of the script that have to do with reward functions."""
    if not scores:
        return {"rewards": "", **dict.fromkeys(_REWARD_PARTS, "")}
    return {"rewards": _REWARDS, **_REWARD_PARTS}


def _imports(trainer: Trainer, plan: TrainingPlan, *, evaluates: bool) -> str:
    rows_class, functions = ("ScriptArguments", ()) if evaluates else ("DatasetMixtureConfig", ("get_dataset",))
    own = [trainer.config_class, trainer.trainer_class]
    classes = sorted([*_CLASSES, rows_class, *(own if trainer.module == _TRL else [])])
    first = ["from datasets import load_dataset"] if evaluates else []
    first += ["from peft import PeftConfig"] if plan.peft else []
    if not trainer.loads_by_name:
        reference = "" if plan.peft else "AutoModelForCausalLM, "
        first.append(f"from transformers import {reference}AutoProcessor")
    apart = [f"from {trainer.module} import {', '.join(own)}"] if trainer.module != _TRL else []
    names = (*classes, *functions, *(name for name in _FUNCTIONS if not (plan.peft and name == "get_peft_config")))
    rewards = (*(f"    {name}," for name in _REWARD_FUNCTIONS), ")") if plan.rewards else ()
    last = ["from trl.rewards import (", *rewards] if rewards else []
    return "\n".join([*first, "from trl import (", *(f"    {name}," for name in names), ")", *apart, *last])


def _docstring_lines(sentence: str) -> str:
    return filled(one_line(sentence).replace("\\", "\\\\").replace('"""', r"\"\"\""))
