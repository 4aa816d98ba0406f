"""``peft_config``: any PEFT method, configured by a file of PEFT's own JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotune.core.candidate import Candidate, Choice
from autotune.core.files.json_text import read_json
from autotune.core.setting import Setting
from autotune.errors import InputError
from autotune.techniques import lora
from autotune.techniques.base import Effect, Option, Technique
from autotune.techniques.trace_impact import TraceImpact

NONE = lora.NONE
# A saved adapter's file has inference_mode, which would freeze it.
_OF_SAVED_ADAPTERS = ("inference_mode",)

_JSON = re.compile(r"\{.*\}", re.DOTALL)


class PeftConfig(Technique):
    """A PEFT configuration, for adapters without keys on TRL's command line.

    A choice is the configuration itself, as JSON, so that a study does not depend on a file that may change.
    """

    summary = "Trains an adapter of any PEFT method, configured by PEFT's JSON file."
    options = (
        Option(NONE, "the adapter that lora chooses, or none"),
        Option('{"peft_type":"IA3"}', "the JSON itself, or the name of its file", Effect.CHANGES_TRAINING, _JSON),
    )
    needs = "`--fix peft_config=FILE.json`, with a `peft_type`; the bundle then has train.py only"
    changes = "only the parameters of the PEFT method are trained"
    writes = frozenset({"peft"})
    impact = TraceImpact(patches_libraries=False, in_plan=lambda plan: lora.adapts_layers(plan.peft))

    def parse(self, text: Choice, setting: Setting | None = None) -> Choice:
        """Return ``none``, or the configuration as JSON with sorted keys.

        Raises:
            InputError: the file cannot be read, or holds no PEFT configuration.
        """
        spelling = str(text)
        if spelling == NONE:
            return NONE
        try:
            content = spelling if spelling.startswith("{") else Path(spelling).expanduser().read_text(encoding="utf-8")
            document = read_json(content)
        except (OSError, RuntimeError) as error:  # RuntimeError: a home directory of no user
            raise self._refusal(spelling, f"the file cannot be read ({getattr(error, 'strerror', error)})") from error
        except ValueError as error:
            raise self._refusal(spelling, f"it is not JSON ({error})") from error
        if not isinstance(document, dict) or not isinstance(document.get("peft_type"), str):
            raise self._refusal(spelling, "it has no key peft_type")
        kept = {name: value for name, value in document.items() if name not in _OF_SAVED_ADAPTERS}
        return json.dumps(kept, sort_keys=True, separators=(",", ":"))

    def _refusal(self, spelling: str, reason: str) -> InputError:
        return InputError(
            f"{spelling!r} is not a choice of {self.name}: {reason}.",
            hint="Give a file such as the adapter_config.json that PEFT saves with an adapter.",
        )

    def conflict(self, choice: Choice, candidate: Candidate, setting: Setting) -> str | None:
        """Return a reason with ``lora``, which would be a second adapter."""
        if choice != NONE and candidate["lora"] != NONE:
            return "lora is another adapter than that of peft_config"
        return None

    def plan(self, choice: Choice, candidate: Candidate, setting: Setting) -> Mapping[str, object]:
        """See :class:`Technique`."""
        return {"peft": configuration(choice)}


def trains_adapters_in_float32(candidate: Candidate, setting: Setting) -> bool:
    """Return whether only LoRA adapters are trained, which PEFT keeps in float32 (``cast_adapter_dtype``).

    Fully trained modules, biases and token embeddings keep the type of the weights.
    """
    document = configuration(candidate.get(PeftConfig.name, NONE))
    beside = document.get("modules_to_save") or document.get("trainable_token_indices")
    whole = beside or document.get("bias", NONE) != NONE or lora.trains_whole_modules(setting)
    return not whole and (candidate["lora"] != lora.NONE or document.get("peft_type") == "LORA")


def configuration(choice: Choice) -> dict[str, Any]:
    """Return the configuration that a choice is, empty for ``none``."""
    return {} if choice == NONE else dict(read_json(str(choice)))
