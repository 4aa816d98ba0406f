"""Tokenises rows as TRL does, by building the real trainer around the smallest possible model."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from jinja2 import TemplateError

from autotune.core.plan import TrainingPlan
from autotune.core.protocol import PrepareRequest
from autotune.core.workload import CHAT_TEMPLATE, DroppedRows
from autotune.errors import InputError, one_line
from autotune.step.data.dataset import LoadedRows
from autotune.step.models.loading import model_class
from autotune.step.models.shrink import FEWEST_BUILT, shrunken_model
from autotune.step.objects import config
from autotune.step.rows import distribution
from autotune.step.trainers import adapter
from autotune.trainers import find_trainer


def tokenized(request: PrepareRequest, model_config: Any, processor: Any, loaded: LoadedRows, folder: Path) -> Dataset:
    """Return the dataset's rows with the columns of the trainer's adapter, neither truncated nor packed.

    Raises:
        InputError: the chat template raises an error for a row, or TRL finds no answers of which to compute the loss.
    """
    architecture = model_class(model_config)
    known = adapter(request.trainer)

    def small_model() -> Any:
        return shrunken_model(architecture, model_config, layers=FEWEST_BUILT)

    reading = request.dataset.reading
    plan = TrainingPlan(trainer=request.trainer, args={**known.tokenizing, **reading})
    arguments = config(plan, output_dir=str(folder), report_to="none", disable_tqdm=True, model_init_kwargs=None)
    try:
        with known.building(small_model):
            trainer = known.trainer(
                model=small_model(),
                args=arguments,
                train_dataset=loaded.rows,
                processing_class=processor,
                **known.arguments(plan),
            )
    except Exception as error:
        if isinstance(error, TemplateError) or _raised_in(error, _TEMPLATE_CODE):
            template = reading.get(CHAT_TEMPLATE) or f"of {request.model.name}"
            raise InputError(
                f"The chat template {template} refuses a row of {request.dataset.name}: {error}",
                hint="Look for messages whose roles or order the template does not know.",
            ) from error
        if reading.get(_ANSWERS) and isinstance(error, (ValueError, RuntimeError)):
            raise InputError(f"TRL refuses {request.dataset.name} with {_ANSWERS}: {one_line(error)}") from error
        if _raised_in(error, _MAPPING):
            raise InputError(
                f"TRL cannot read a row of {request.dataset.name}: {type(error).__name__}: {one_line(error)}.",
                hint="Look for rows that differ from the first: null in messages, or numbers in place of text.",
            ) from error
        raise
    return known.tokenized(trainer, request.rollouts, request.dataset.name)


def _raised_in(error: Exception, code: str) -> bool:
    """Whether an error comes from a file, or from what that calls."""
    return any(frame.filename.endswith(code) for frame in traceback.extract_tb(error.__traceback__))


_ANSWERS = "assistant_only_loss"
_TEMPLATE_CODE = "<template>"
"""Name of a template's code where it was read from no file (``Environment.from_string`` of Jinja). It may fail to add
null to text."""
_MAPPING = "datasets/arrow_dataset.py"
"""The file that calls TRL's functions of rows."""
_FEWEST = 2
"""Fewest prompts that a share of them may keep."""
_NAMED = 10
"""Most rows that are named; the others are counted."""


def covered(rows: Dataset, request: PrepareRequest) -> tuple[Dataset, DroppedRows | None]:
    """Return tokenised rows without the longest prompts, as the request's coverage allows, and the dropped rows.

    The longest prompt that is kept is the shortest of which it is true that at least the share ``prompt_coverage`` of
    all prompts is no longer. Prompts of equal length are kept or dropped together.

    Raises:
        InputError: too few are left.
    """
    share = request.rollouts.prompt_coverage
    if share >= 1:
        return rows, None
    prompts = adapter(request.trainer).lengths(rows)[:, find_trainer(request.trainer).parts.index("prompt")]
    cut = distribution(prompts).quantile(share)
    kept, longer = np.flatnonzero(prompts <= cut), np.flatnonzero(prompts > cut)
    if not len(longer):
        return rows, None
    if len(kept) < _FEWEST:
        raise InputError(
            f"--prompt-coverage {share:g} keeps {len(kept)} of the {len(rows)} prompts of {request.dataset.name}.",
            hint="Give a larger share.",
        )
    longest = longer[np.argsort(-prompts[longer], kind="stable")][:_NAMED]
    named = zip((longest + 1).tolist(), prompts[longest].tolist(), strict=True)
    return rows.select(kept), DroppedRows(len(longer), cut, tuple(named))
