"""Reads a workload through child processes: model, tokenised dataset, and the self-test of attention for packing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from autotune.core.candidate import Choice
from autotune.core.events import Listener, StageStarted
from autotune.core.jobs.protocol import CheckPackingRequest, PrepareRequest
from autotune.core.machine import Machine
from autotune.core.workload import DatasetSource, ModelSource, PackingCheck, Rollouts, Workload
from autotune.inspection.machine import environment
from autotune.planning.tracing.cache import Cache, fingerprint, package_digest
from autotune.probing import JobServer, check_packing, prepare
from autotune.techniques import peft_config
from autotune.techniques.packing import NAME as PACKING
from autotune.trainers import find_trainer


@dataclass(frozen=True)
class WorkloadReader:
    """Reads a workload by jobs in a server's child processes.

    Attributes:
        directory: directory of the jobs' folders and the tokenised rows.
        most_seconds: time limit for reading and tokenising; None: no limit.
        only_lengths: whether only lengths are needed: rows are not saved, and smaller image limits are tried.
    """

    server: JobServer
    directory: Path
    listener: Listener
    most_seconds: float | None = None
    only_lengths: bool = False

    def read(
        self,
        trainer: str,
        model: ModelSource,
        dataset: DatasetSource,
        evaluation: DatasetSource | None = None,
        rollouts: Rollouts | None = None,
        peft: Choice = peft_config.NONE,
        teacher: ModelSource | None = None,
    ) -> Workload:
        """Return the workload, tokenised, with no attention checked yet.

        Args:
            evaluation: the rows that training is evaluated on, or None.
            rollouts: prompts and completions, or None.
            peft: the choice of ``peft_config``, which is checked against the model.
            teacher: the model that the trained one is to imitate, or None.

        Raises:
            InputError: the model, its teacher, the dataset or the PEFT configuration cannot be used.
        """
        self.listener(StageStarted(f"Reading {model.name} and tokenising {dataset.name}"))
        tokenized, evaluation_rows = (str(self.directory / name) for name in ("tokenized", "evaluation"))
        rollouts, adapter = rollouts or Rollouts(), peft_config.configuration(peft)
        rows = model, dataset, trainer, tokenized, evaluation, evaluation_rows
        request = PrepareRequest(*rows, rollouts, adapter, teacher, only_lengths=self.only_lengths)
        return prepare(self.server, request, self.directory / "prepare", self.most_seconds)

    def check_attention(
        self, workload: Workload, machine: Machine, attentions: Iterable[str], cache: Cache | None = None
    ) -> Workload:
        """Return the workload with the self-test's result for each attention implementation.

        It only has to run where TRL packs no rows: those with images, and those of trainers without ``packing``.

        Args:
            cache: reads and stores results; None: all implementations are tested.
        """
        identity = workload.trainer, workload.models_fingerprint, machine.hardware.name, environment(machine)
        knobs = {technique.name for technique in find_trainer(workload.trainer).techniques}
        packs = PACKING in knobs and not workload.has_images
        keys = {each: fingerprint("packing", each, packs, *identity, package_digest()) for each in attentions}
        kept = {each: cache.get(PackingCheck, key) for each, key in keys.items()} if cache is not None else {}
        checks = {each: found for each, found in kept.items() if found is not None}
        missing = tuple(each for each in keys if each not in checks)
        if missing:
            names = ", ".join(missing)
            aim = (
                f"packed documents do not attend to each other with {names}"
                if packs
                else f"the model runs with {names}"
            )
            self.listener(StageStarted(f"Checking that {aim}"))
            kind = machine.hardware.kind
            request = CheckPackingRequest(workload.trainer, workload.model_source, kind, missing, packs)
            found = check_packing(self.server, request, self.directory / "check_packing")
            checks |= {check.attention: check for check in found}
        for each in missing:
            # A failure before logits were compared may be a lack of memory, which the next run may have.
            decided = checks[each].max_difference is not None if packs else checks[each].supported
            if cache is not None and decided:
                cache.put(keys[each], checks[each])
        return replace(workload, packing_checks=checks)
