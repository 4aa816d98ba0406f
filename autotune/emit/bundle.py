"""Writes the bundle: the output directory of ``autotune probe``, or of a plan."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

from autotune.core.documents.bundle import Basis, PlannedBundle
from autotune.core.documents.result import Result, Timelines
from autotune.core.files.yaml_text import yaml_text
from autotune.core.status import RunStatus
from autotune.emit.arguments import PEFT_CONFIG, training_arguments
from autotune.emit.comment import one_line, wrap_comment
from autotune.emit.document import json_text
from autotune.emit.figures import measured
from autotune.emit.files import remove, write_text
from autotune.emit.handover import Handover, provenance
from autotune.emit.launch import ACCELERATE, DEEPSPEED, launch_files, launch_keys
from autotune.emit.rows import ROW_ARGUMENTS, TrainingRows, remove_rows, write_rows
from autotune.emit.serving import SERVE, TRAIN, shell_script, training_gpus, visible
from autotune.trainers import find_trainer

CONFIG = "config.yaml"
SCRIPT = "train.py"
RESULT = "result.json"
TIMELINE = "timeline.json"
PLAN = "plan.json"
UNFINISHED = "unfinished.json"
"""Marks the directory of a planned bundle while it is written, so that an unfinished one can be replaced."""
_SERVER_SCRIPTS = (SERVE, TRAIN)
_FIND_DIRECTORY = 'here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"'
"""Shell line that finds the script's own directory, wherever the script is started."""
_TRAINING_FILES = (CONFIG, SCRIPT, PEFT_CONFIG, ACCELERATE, DEEPSPEED, *_SERVER_SCRIPTS)
"""The files of a training, except its rows."""
_TEMPLATE = "train.py.jinja"
IGNORED_BUFFERS = "ignore_bias_buffers"
"""Argument of TRL's scripts; some of them ignore it."""


def write_bundle(result: Result, directory: Path) -> None:
    """Write ``result.json`` with its ``timeline.json``, and for a recommendation ``config.yaml``, ``train.py`` and the
    files that they need.

    ``config.yaml`` is missing if TRL's command line cannot run the plan.

    If nothing fits or every probe failed, an earlier run's configuration is removed; an undecided run keeps it.
    ``result.json`` is written last, so that if it exists, the files it refers to exist too.

    Raises:
        InputError: the directory cannot be made or written, or the disk is full.
    """
    if result.recommended is not None:
        _write_training(measured(result, result.recommended), directory)
    elif result.status in (RunStatus.NOTHING_FITS, RunStatus.FAILED):
        _remove_training(directory)
    if result.timelines != Timelines(None, None):
        write_text(directory / TIMELINE, json_text(result.timelines))
    else:
        remove(directory / TIMELINE)
    write_text(directory / RESULT, json_text(result))


def write_planned_bundle(document: PlannedBundle, handover: Handover, directory: Path) -> None:
    """Write the planned training with its files, and ``plan.json`` last.

    Raises:
        InputError: the directory cannot be made or written, or the disk is full.
    """
    write_text(directory / UNFINISHED, json.dumps({"basis": Basis.PLANNED}) + "\n")
    _write_training(handover, directory)
    write_text(directory / PLAN, json_text(document))
    remove(directory / UNFINISHED)


def remove_planned_bundle(directory: Path) -> None:
    """Remove an earlier planned bundle from a directory that gets no new one.

    Raises:
        InputError: a file cannot be removed.
    """
    _remove_training(directory)
    remove(directory / UNFINISHED)
    remove(directory / PLAN)


def _remove_training(directory: Path) -> None:
    for name in _TRAINING_FILES:
        remove(directory / name)
    remove_rows(directory)


def _write_training(handover: Handover, directory: Path) -> None:
    """Write the files of a training, and remove files that only an earlier training needed."""
    plan = handover.plan
    rows = write_rows(handover.workload, plan, directory)
    user_document = handover.base.launch if handover.base is not None else {}
    texts = {
        SCRIPT: script_text(handover, rows),
        **launch_files(plan, directory, user_document),
        **_server_scripts(handover),
    }
    if find_trainer(plan.trainer).runs_by_command(plan):
        texts[CONFIG] = config_text(handover, rows, directory)
    if plan.peft:
        texts[PEFT_CONFIG] = json.dumps(dict(plan.peft), indent=2) + "\n"
    for name in _TRAINING_FILES:
        if name in texts:
            write_text(directory / name, texts[name], executable=name in _SERVER_SCRIPTS)
        else:
            remove(directory / name)


def _server_scripts(handover: Handover) -> dict[str, str]:
    """Return the scripts of a vLLM server and of its training, by their names; none without a server."""
    split, plan, variables = handover.server, handover.plan, handover.hardware.variables
    if split is None:
        return {}
    start = f'python "$here/{SCRIPT}"'
    if find_trainer(plan.trainer).runs_by_command(plan):
        start = f'trl {plan.trainer} --config "$here/{CONFIG}"'
    elif plan.in_group:
        start = f'accelerate launch --config_file "$here/{ACCELERATE}" "$here/{SCRIPT}"'
    origin = f"{handover.basis.value.capitalize()} by autotune"
    serve = (
        f"{origin}: vLLM's server, which generates for {TRAIN}. Start it first, and end it when the training has ended."
    )
    train = f"{origin}: the training, which gets its completions from the server of {SERVE}."
    return {
        SERVE: shell_script(serve, split.serve),
        TRAIN: shell_script(train, f"{visible(training_gpus(split), variables)} {start}", _FIND_DIRECTORY),
    }


def config_text(handover: Handover, rows: TrainingRows, directory: Path) -> str:
    """Return the YAML document, or the user's edited one, with its provenance as a comment above."""
    plan, where = handover.plan, ""
    if handover.base is not None and handover.base.text:
        body = handover.base.text
        where = f", in the directory in which {handover.base.file} is used: relative paths start there"
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
    variables = handover.hardware.variables
    # In `env` of this file, it would override the user's own setting.
    one_gpu_note = (
        f"One process trains on one GPU, and TRL refuses to start it if several are visible: name one, as in "
        f"{visible([0], variables)} {command}."
    )
    notes = [one_gpu_note] if handover.on_one_gpu and handover.server is None else []
    if variables:
        # `env` of this file is read too late: after torch, OpenMP and oneDNN have been loaded.
        on_cpu = handover.hardware.kind == "cpu"
        aim = "For the memory and speed of the probes" if on_cpu else "For the order of the GPUs, which differ"
        notes.append(f"{aim}, run: {variables} {command}")
    lines = [f"Run with: {run}{where}", *notes, *provenance(handover, rows)]
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
        splits_off=rows.test_size is not None,
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
