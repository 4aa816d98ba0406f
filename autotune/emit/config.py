"""``config.yaml``: what ``trl NAME --config`` runs without a change."""

from __future__ import annotations

from pathlib import Path

from autotune.core.yaml_text import yaml_text
from autotune.emit.arguments import launch_arguments, training_arguments
from autotune.emit.comment import filled
from autotune.emit.handover import Handover, provenance
from autotune.emit.launch import launch_keys
from autotune.emit.rows import TrainingRows
from autotune.emit.serving import SERVE, TRAIN, visible


def config_text(handover: Handover, rows: TrainingRows, directory: Path) -> str:
    """Return the YAML document, the user's own if the training changes one, with its provenance above as a comment."""
    plan = handover.plan
    if handover.base is not None and handover.base.text:
        body = handover.base.text
    else:
        document = {
            **({"env": dict(plan.env)} if plan.env else {}),
            **training_arguments(plan, handover.workload, rows),
            **launch_arguments(handover.hardware.processes, handover.threads),
            **launch_keys(plan, directory),
        }
        body = yaml_text(document)
    command = f"trl {plan.trainer} --config config.yaml"
    run = f"{SERVE} first, and then {TRAIN}, which runs: {command}" if handover.server is not None else command
    # In `env` of this file, it would take the place of what the user has set.
    several = (
        f"One process trains on one GPU, and TRL refuses to start it if several are visible: name one, as in "
        f"{visible([0])} {command}."
    )
    shown = [several] if handover.on_one_gpu and handover.server is None else []
    if handover.hardware.variables:
        # `env` of this file is read after torch, and with it OpenMP and oneDNN, is loaded.
        shown.append(f"For the memory and speed of the probes, run: {handover.hardware.variables} {command}")
    lines = [f"Run with: {run}", *shown, *provenance(handover, rows)]
    head = "\n".join(filled(line, "# ", "#   ") for line in lines)
    return f"{head}\n\n{body}"
