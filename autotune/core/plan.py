"""The training plan: everything needed to build and launch a trainer, in the words of TRL's own command line."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Launch:
    """How the processes of a training are started.

    Attributes:
        processes: how many: the world size.
        accelerate: fields of the document that ``accelerate launch --config_file`` reads, beside the number of
            processes; empty for a single process or plain data parallelism.
        deepspeed: the document that ``deepspeed`` in the trainer's arguments names; empty where there is none.
    """

    processes: int = 1
    accelerate: Mapping[str, object] = field(default_factory=dict)
    deepspeed: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainingPlan:
    """One way to run a training, as a probe builds it and as the bundle hands it over.

    Attributes:
        trainer: its name, such as ``dpo``.
        args: fields of the trainer's configuration (``trl.DPOConfig``).
        model: fields of ``trl.ModelConfig``: ``dtype``, ``attn_implementation``, ``use_peft``, ``load_in_4bit``, ….
        truncate_to: tokens to which every row is cut before the trainer sees it, or None. Needed where a trainer
            refuses ``max_length`` (padding-free without packing).
        launch: how its processes are started.
    """

    trainer: str
    args: Mapping[str, object] = field(default_factory=dict)
    model: Mapping[str, object] = field(default_factory=dict)
    truncate_to: int | None = None
    launch: Launch = field(default_factory=Launch)

    @property
    def fingerprint(self) -> str:
        """Hash that is equal for plans that train in the same way."""
        parts: list[object] = [self.trainer, dict(self.args), dict(self.model), self.truncate_to]
        if self.launch != Launch():
            parts.append([self.launch.processes, dict(self.launch.accelerate), dict(self.launch.deepspeed)])
        document = json.dumps(parts, sort_keys=True)
        return hashlib.sha256(document.encode()).hexdigest()[:16]
