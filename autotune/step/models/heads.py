"""Selects the class of a model by the head that a trainer trains, such as a language model head."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import transformers
from transformers.models.auto.auto_factory import _get_model_class
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from autotune.errors import InputError

_LANGUAGE_MODELS = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(), *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()}


@dataclass(frozen=True)
class Head:
    """The head that a trainer trains on a model's layers; it determines the class that TRL loads.

    Attributes:
        auto_class: transformers' auto class with which TRL loads the model; None: TRL loads the first architecture of
            the configuration.
        settings: fields of the configuration that TRL sets when it loads the model.
    """

    auto_class: type[Any] | None = None
    settings: Mapping[str, object] = field(default_factory=dict)

    def configured(self, config: Any, name: str) -> Any:
        """Return a copy of a configuration whose first architecture is the class that TRL loads.

        Args:
            name: the model's name, for messages.

        Raises:
            InputError: transformers has no such class for this model, or its weights have a head of another size.
        """
        architecture, config = self._architecture(config, name), copy.deepcopy(config)
        for setting, value in self.settings.items():
            saved = getattr(config, setting, value)
            if architecture in (config.architectures or ()) and saved != value:
                raise InputError(
                    f"{name} has a head of {setting}={saved}, and TRL loads it with {setting}={value}: that fails.",
                    hint=f"Give the language model that it was made from, or a model saved with {setting}={value}.",
                )
            setattr(config, setting, value)
        config.architectures = [architecture]
        return config

    def _architecture(self, config: Any, name: str) -> str:
        if self.auto_class is None:
            return _language_model(config, name)
        mapping = self.auto_class._model_mapping
        if type(config) not in mapping:
            raise InputError(
                f"{name} cannot be trained to score: transformers has no {self.auto_class.__name__} for models of type "
                f"{config.model_type}.",
                hint="Give a model of another family, such as llama, qwen3 or gemma3.",
            )
        return str(_get_model_class(config, mapping).__name__)


def _language_model(config: Any, name: str) -> str:
    names = config.architectures
    if not names or not isinstance(names, list):
        raise InputError(
            f"The configuration of {name} names no architecture.",
            hint='Add, for instance, "architectures": ["LlamaForCausalLM"] to its config.json; TRL needs it.',
        )
    if names[0] not in _LANGUAGE_MODELS or not hasattr(transformers, names[0]):
        raise InputError(
            f"{names[0]}, the architecture of {name}, is not a causal language model of transformers.",
            hint="Give a model whose architecture ends with ForCausalLM, or a newer transformers.",
        )
    return str(names[0])


LANGUAGE_MODEL = Head()
"""Predicts the next token."""
