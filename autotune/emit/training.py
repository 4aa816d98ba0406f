"""Writes ``config.yaml`` for ``trl NAME --config``, and ``train.py``, the same training through TRL's Python API."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from autotune.core.bundle import Basis
from autotune.core.yaml_text import yaml_text
from autotune.emit.arguments import PEFT_CONFIG, training_arguments
from autotune.emit.comment import one_line, wrap_comment
from autotune.emit.handover import Handover, provenance
from autotune.emit.launch import ACCELERATE, launch_keys
from autotune.emit.rows import ROW_ARGUMENTS, TrainingRows
from autotune.emit.serving import SERVE, TRAIN, training_gpus, visible
from autotune.trainers import find_trainer

_TEMPLATE = "train.py.jinja"
IGNORED_BUFFERS = "ignore_bias_buffers"
"""Argument of TRL's scripts; some of them ignore it."""


def config_text(handover: Handover, rows: TrainingRows, directory: Path) -> str:
    """Return the YAML document, or the user's edited one, with its provenance as a comment above."""
    plan = handover.plan
    if handover.base is not None and handover.base.text:
        body = handover.base.text
    else:
        document = {
            **({"env": dict(handover.env)} if handover.env else {}),
            **training_arguments(plan, handover.workload, rows),
            # By default, `accelerate launch` starts one process per visible GPU, which multiplies the global batch.
            "num_processes": handover.hardware.processes,
            **launch_keys(plan, directory),
        }
        body = yaml_text(document)
    command = f"trl {plan.trainer} --config config.yaml"
    run = f"{SERVE} first, and then {TRAIN}, which runs: {command}" if handover.server is not None else command
    # In `env` of this file, it would override the user's own setting.
    one_gpu_note = (
        f"One process trains on one GPU, and TRL refuses to start it if several are visible: name one, as in "
        f"{visible([0])} {command}."
    )
    notes = [one_gpu_note] if handover.on_one_gpu and handover.server is None else []
    if handover.hardware.variables:
        # `env` of this file is read too late: after torch, OpenMP and oneDNN have been loaded.
        notes.append(f"For the memory and speed of the probes, run: {handover.hardware.variables} {command}")
    lines = [f"Run with: {run}", *notes, *provenance(handover, rows)]
    head = "\n".join(wrap_comment(line, "# ", "#   ") for line in lines)
    return f"{head}\n\n{body}"


def script_text(handover: Handover, rows: TrainingRows) -> str:
    """Return the script."""
    # Templates are loaded only to write a bundle.
    from jinja2 import Environment, StrictUndefined

    plan, base, env = handover.plan, handover.base, handover.env
    trainer, ignores_bias_buffers = find_trainer(plan.trainer), False
    arguments = training_arguments(plan, handover.workload, rows)
    if base is not None and base.text:
        # The user's own keys for TRL's command; the script loads the rows itself.
        user_arguments = {**base.further, **base.args}
        remaining = {name: value for name, value in user_arguments.items() if name not in ROW_ARGUMENTS}
        # The script handles it like TRL's own script; the classes that it parses need not have the field.
        ignores_bias_buffers = bool(remaining.pop(IGNORED_BUFFERS, False)) and trainer.ignores_bias_buffers
        arguments = {**remaining, "model_name_or_path": arguments["model_name_or_path"], **rows.arguments()}
        env = base.env
    expressions = {name: repr(value) for name, value in arguments.items()}
    if rows.in_bundle:
        path = f"str(BUNDLE / {rows.in_bundle!r})"
        expressions |= {
            name: expressions[name].replace(repr(rows.place), path) for name in rows.arguments() if name in expressions
        }
    evaluates = rows.evaluated is not None
    rows_class = "ScriptArguments" if evaluates else "DatasetMixtureConfig"
    trainer_classes = (trainer.config_class, trainer.trainer_class) if trainer.module == "trl" else ()
    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters["literal"] = repr
    template = environment.from_string((files(__package__) / _TEMPLATE).read_text(encoding="utf-8"))
    return template.render(
        handover=handover,
        plan=plan,
        trainer=trainer,
        evaluates=evaluates,
        ignores_bias_buffers=ignores_bias_buffers,
        env=env,
        changes_environment=env or handover.on_one_gpu or handover.hardware.environment,
        expressions=expressions,
        rows_class=rows_class,
        classes=sorted(("ModelConfig", "TrlParser", rows_class, *trainer_classes)),
        word="planned" if handover.basis is Basis.PLANNED else "recommended",
        is_planned=handover.basis is Basis.PLANNED,
        start=f"accelerate launch --config_file {ACCELERATE}" if plan.in_group else "python",
        command=f"`trl {trainer.name}` but those of the data" if trainer.has_command else trainer.config_class,
        provenance="\n".join(_docstring_lines(sentence) for sentence in provenance(handover, rows)),
        peft_file=PEFT_CONFIG,
        visible=visible,
        training_gpus=training_gpus,
    )


def _docstring_lines(sentence: str) -> str:
    return wrap_comment(one_line(sentence).replace("\\", "\\\\").replace('"""', r"\"\"\""))
