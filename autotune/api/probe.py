"""The public function ``autotune.probe`` and its result: the document, and the winner as TRL objects."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.app.arguments import ProbeArguments
from autotune.app.probe import probe as search
from autotune.app.public import check_type, signature_from
from autotune.app.report import read_result, result_file
from autotune.core.documents.result import MeasuredCandidate, Result, Trial
from autotune.core.plan import TrainingPlan
from autotune.core.status import RunStatus
from autotune.emit.arguments import ACCELERATE_ARGUMENTS
from autotune.emit.document import json_text
from autotune.emit.rows import TrainingRows, training_rows
from autotune.errors import AutotuneError, InterruptedSearchError
from autotune.reporting.page.markdown import markdown_page
from autotune.reporting.probe import probe_report
from autotune.trainers import find_trainer
from autotune.units import plural

if TYPE_CHECKING:
    import datasets
    import peft
    import transformers

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProbeResult:
    """The outcome of a search.

    Attributes:
        document: the content of ``result.json``.
    """

    document: Result

    @classmethod
    def read(cls, directory: str | Path) -> ProbeResult:
        """Return the result of an earlier search, for example to train with it in another process.

        Args:
            directory: output directory of the search, or its ``result.json``.

        Raises:
            InputError: there is no result, or another version of autotune wrote it.
        """
        check_type("directory", directory, str | Path)
        return cls(read_result(result_file(directory)))

    @property
    def status(self) -> RunStatus:
        """``found``, ``nothing_fits``, ``failed``, ``undecided`` or ``interrupted``."""
        return self.document.status

    @property
    def recommended(self) -> MeasuredCandidate | None:
        """The fastest candidate that fits, or None."""
        return self.document.recommended

    @property
    def confirmed(self) -> bool:
        """Whether a longer run has confirmed the recommendation."""
        return self.document.confirmed

    @property
    def baseline(self) -> MeasuredCandidate | None:
        """TRL's default at the same global batch, or the user's own configuration; None if it was not measured."""
        return self.document.baseline

    @property
    def trials(self) -> tuple[Trial, ...]:
        """Every candidate that was probed or vetoed."""
        return self.document.trials

    @cached_property
    def config(self) -> transformers.TrainingArguments:
        """The recommended trainer configuration, such as a ``trl.DPOConfig``; ``trl`` is imported at the first access.

        It is one object: ``result.config.max_steps = 2`` changes the ``result.config`` that is passed to a trainer.
        A warning is logged if ``WORLD_SIZE`` differs from the number of probed processes, and if no longer run has
        confirmed the recommendation.

        Raises:
            AutotuneError: there is no recommendation.
        """
        plan, base = self._plan(), self.document.base
        probed, here = plan.launch.processes, os.environ.get("WORLD_SIZE", "1")
        if here != str(probed):
            _LOG.warning(
                "autotune: this configuration is for %s, but WORLD_SIZE is %s: the global batch size will differ. Load"
                " the result in a script that a launcher starts %d times, or probe with num_processes=%s.",
                *(plural(probed, "process", "processes"), here, probed, here),
            )
        if not self.confirmed:
            _LOG.warning(
                "autotune: no longer run has confirmed this configuration: its speed and memory are those of a short "
                "probe. Search again with resume=True."
            )
        if base is not None:
            # The user's unsearched fields, except those that accelerate's file sets.
            own = {name: value for name, value in base.args.items() if name not in ACCELERATE_ARGUMENTS}
            args = find_trainer(plan.trainer).written_args(plan, own)
            plan = replace(plan, args={**args, **own})
        return self._objects().config(plan)

    @property
    def peft_config(self) -> peft.PeftConfig | None:
        """PEFT configuration of the recommendation; None if all weights are trained.

        Raises:
            AutotuneError: there is no recommendation.
        """
        return self._objects().peft_config(self._plan())

    @property
    def quantization_config(self) -> transformers.BitsAndBytesConfig | None:
        """Quantisation of the recommendation, for the trainer's ``quantization_config``, or None.

        Raises:
            AutotuneError: there is no recommendation.
        """
        return self._objects().quantization_config(self._plan())

    @property
    def model_init_kwargs(self) -> dict[str, Any]:
        """Keyword arguments for ``from_pretrained`` with which the recommendation was measured.

        Raises:
            AutotuneError: there is no recommendation.
        """
        kwargs: dict[str, Any] = self._objects().model_init_kwargs(self._plan())
        return kwargs

    @property
    def env(self) -> Mapping[str, str]:
        """Environment variables with which the recommendation was measured; set them before a GPU is first used.

        Raises:
            AutotuneError: there is no recommendation.
        """
        return self._plan().env

    @property
    def train_dataset(self) -> datasets.Dataset:
        """The rows to train on: the dataset, or its copy in the bundle if rows had to be cut or were dropped.

        Raises:
            AutotuneError: there is no recommendation.
        """
        found = self._rows()
        return self._loaded(found, found.split, "train")

    @property
    def eval_dataset(self) -> datasets.Dataset | None:
        """The rows to evaluate on, cut like the training rows; None without evaluation.

        Raises:
            AutotuneError: there is no recommendation.
        """
        found = self._rows()
        split = found.split if found.test_size is not None and self._plan().evaluates else found.evaluated
        return self._loaded(found, split, "test") if split is not None else None

    def __str__(self) -> str:
        """Return the report as Markdown."""
        return self._repr_markdown_()

    def _repr_markdown_(self) -> str:
        """Return the report, which a notebook shows for the result."""
        return markdown_page(probe_report(self.document))

    def to_json(self) -> str:
        """Return the document of ``result.json``."""
        return json_text(self.document)

    def _recommended(self) -> MeasuredCandidate:
        if self.document.recommended is None:
            raise AutotuneError(
                f"There is no recommendation: the search ended with status {self.status.value}.",
                hint="Its report.html, or the result in a notebook, has the reasons.",
            )
        return self.document.recommended

    def _plan(self) -> TrainingPlan:
        plan, revision = self._recommended().plan, self.document.workload.model_source.revision
        return replace(plan, model={**plan.model, "model_revision": revision})

    def _rows(self) -> TrainingRows:
        return training_rows(self.document.workload, self._plan(), Path(self.document.output_directory))

    def _loaded(self, rows: TrainingRows, split: str, part: str) -> datasets.Dataset:
        """Return a split of the rows; if TRL splits it in two, its ``train`` or its ``test``."""
        loaded = self._objects().training_dataset(**rows.entry(split))
        if rows.test_size is None:
            return loaded
        # TRL's parts are random. With a seed, no row is in both.
        return loaded.train_test_split(test_size=rows.test_size, seed=0)[part]

    @staticmethod
    def _objects() -> Any:
        # Imported at first use, so that the user's process needs torch and TRL only here.
        return importlib.import_module("autotune.step.objects")


@signature_from(ProbeArguments)
def probe(args: ProbeArguments) -> ProbeResult:
    """Search for the fastest configuration that fits, by training steps in separate processes on this machine.

    Raises:
        InputError: an argument cannot be used.
        AutotuneError: probes cannot be started, or the study or bundle cannot be written.
        KeyboardInterrupt: Ctrl-C ended the search; the result so far is in its output directory.
    """
    document = search(args)
    if document.status is RunStatus.INTERRUPTED:
        folder = document.output_directory
        raise InterruptedSearchError(
            f"The result so far is autotune.ProbeResult.read({folder!r}); autotune.probe(…, resume=True) continues.",
            document,
        )
    return ProbeResult(document)
