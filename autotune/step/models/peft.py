"""Builds a PEFT configuration from PEFT's own JSON in a plan, and checks that it fits a model."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

from peft import PeftConfig, get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

from autotune.errors import InputError
from autotune.step.models.loading import meta_model, model_class


def peft_from_json(document: Mapping[str, Any]) -> PeftConfig:
    """Return the configuration that a document with a key ``peft_type`` describes.

    Raises:
        InputError: PEFT has no such method, the method has no such key, or PEFT refuses a value.
    """
    method = str(document.get("peft_type"))
    kind = PEFT_TYPE_TO_CONFIG_MAPPING.get(method)
    if kind is None:
        known = ", ".join(sorted(str(getattr(name, "value", name)) for name in PEFT_TYPE_TO_CONFIG_MAPPING))
        raise InputError(f"peft_config: PEFT has no method {method!r}.", hint=f"Its methods are {known}.")
    fields = [field.name for field in dataclasses.fields(kind)]
    unknown = sorted(document.keys() - set(fields))
    if unknown:
        raise InputError(f"peft_config: {method} has no key {unknown[0]!r}.", hint=f"Its keys are {', '.join(fields)}.")
    try:
        return PeftConfig.from_peft_type(**document)
    except (TypeError, ValueError) as error:
        raise InputError(f"peft_config: PEFT refuses it: {error}") from error


def check_peft(document: Mapping[str, Any], config: Any) -> None:
    """Check that PEFT can apply a configuration to a model; nothing is allocated.

    Args:
        config: configuration of the model, as ``AutoConfig`` gives it.

    Raises:
        InputError: as for :func:`peft_from_json`; or the model lacks a module that it names.
    """
    wanted = peft_from_json(document)
    try:
        with warnings.catch_warnings(action="ignore"):
            get_peft_model(meta_model(model_class(config), config), wanted)
    except ValueError as error:
        raise InputError(f"peft_config: it does not fit {config.model_type}: {error}") from error
    except (TypeError, NotImplementedError, RuntimeError, AttributeError):
        # Some methods compute with the weights, which are meta tensors here; a probe shows whether they work.
        return
