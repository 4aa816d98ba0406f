"""The training plan: everything needed to build a trainer, in the words of TRL's own command line."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class TrainingPlan:
    """One way to run a training, as a probe builds it and as the bundle hands it over.

    Attributes:
        trainer: name of the trainer, such as ``sft``.
        args: fields of the trainer's configuration (``trl.SFTConfig``).
        model: fields of ``trl.ModelConfig``: ``dtype``, ``attn_implementation``, ``use_peft``, ``load_in_4bit``, ….
        truncate_to: tokens to which every row is cut before the trainer sees it, or None. Needed where a trainer
            refuses ``max_length`` (padding-free without packing).
    """

    trainer: str
    args: Mapping[str, object] = field(default_factory=dict)
    model: Mapping[str, object] = field(default_factory=dict)
    truncate_to: int | None = None

    @property
    def fingerprint(self) -> str:
        """Hash that is equal for plans that train in the same way."""
        document = json.dumps([self.trainer, dict(self.args), dict(self.model), self.truncate_to], sort_keys=True)
        return hashlib.sha256(document.encode()).hexdigest()[:16]
