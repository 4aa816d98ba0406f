"""The base class of trainer specifications, on which planning, probing and emission depend.

A trainer is two files. The specification is a subclass of :class:`Trainer` whose only instance is ``TRAINER`` in a
module of this package; it imports neither torch nor TRL. The adapter is a module of the same name in
:mod:`autotune.step.trainers`, used in child processes. Both, and a search space, add the trainer everywhere;
``tests/trainers`` checks every trainer against this contract.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, final

from autotune.core.candidate import Candidate, ReadTracking
from autotune.core.files.nested import lookup, merge
from autotune.core.plan import PASS_ROWS, TrainingPlan
from autotune.core.program import EVALUATE, SAVE, StepProgram
from autotune.core.setting import Setting
from autotune.core.workload import ModelProfile, Workload
from autotune.techniques import catalogue
from autotune.techniques.base import Technique, facts, illegal
from autotune.techniques.packing import NAME as PACKING
from autotune.techniques.pad_to_multiple_of import NAME as PAD
from autotune.techniques.padding_free import PaddingFree
from autotune.techniques.per_device_train_batch_size import ROWS
from autotune.trainers.micro_batches import MicroBatches

if TYPE_CHECKING:
    import pyarrow as pa

# Normal forms depend on one another (padding_free on packing, packing on max_length), without cycles; a test checks
# that a third pass changes nothing.
_NORMAL_PASSES = 2

_BALANCE = "router_aux_loss_coef"
# DeepSpeed creates a process group for a single process too.
_ENGINE = "args.deepspeed"
# The knobs that determine the width of a micro-batch without cutting rows.
_OF_WIDTH = (ROWS, PACKING, PaddingFree.name, PAD)
EVAL_STRATEGY = "epoch"
"""``eval_strategy`` of a plan with rows to evaluate on."""


class Trainer(MicroBatches):
    """One trainer of TRL. A subclass is one file, and its only instance is ``TRAINER``.

    In the order of use: the workload is read (``formats``, ``parts``, :meth:`document`), candidates are normalised and
    checked (:meth:`normal`, :meth:`illegal`) and converted to plans (:meth:`plan`), plans to micro-batches
    (:meth:`geometry`) and traces (:meth:`traced_plan`, :meth:`traced_rows`); :meth:`program` returns the phases,
    including the trainer's own (:meth:`phases`). The base classes have its declarations and its micro-batches.
    """

    @property
    def techniques(self) -> tuple[Technique, ...]:
        """The techniques of this trainer, sorted by name: those whose fields its configuration has, with an effect."""
        return _techniques_of(self)

    @final
    def program(self, plan: TrainingPlan) -> StepProgram:
        """Return the phases of a run of a plan: its own, evaluation if there is one, and saving."""
        return replace(self.phases(plan), after=(EVALUATE, SAVE) if plan.evaluates else (SAVE,))

    def phases(self, plan: TrainingPlan) -> StepProgram:
        """Return the phases up to the last step."""
        return StepProgram()

    def copied_rows(self, batch: pa.RecordBatch, length: int | None) -> pa.RecordBatch:
        """Return tokenised rows for the copy in a bundle, cut to ``length`` tokens.

        Raises:
            NotImplementedError: bundles have no copies of this trainer's rows.
        """
        raise NotImplementedError(f"{self.trainer_class} reads the user's own rows, and cuts and drops them itself")

    def runs_by_command(self, plan: TrainingPlan) -> bool:
        """Return whether ``trl NAME --config`` can train a plan: it has no key for a configuration in PEFT's JSON."""
        return self.has_command and not plan.peft

    def written_args(self, plan: TrainingPlan, keys: Collection[str] = ()) -> Mapping[str, object]:
        """Return the arguments of a plan for a file, which ``trl`` reads in one process before it starts the others.

        Args:
            keys: the keys of the user's own file, whose spelling is kept.
        """
        return plan.args

    def as_read(self, plan: TrainingPlan, keys: Mapping[str, object]) -> TrainingPlan:
        """Return a plan with the values that TRL's class computes from a file's keys and the number of processes.

        Raises:
            InputError: the class refuses that number of processes.
        """
        return plan

    def rule(self, candidate: Candidate, setting: Setting) -> str | None:
        """Return why this trainer does not support a candidate, or None; called after the techniques' rules."""
        return None

    def refused(self, plan: TrainingPlan, workload: Workload) -> str | None:
        """Return why a plan, also a user's own, cannot be trained or planned, or None.

        :meth:`rule` includes it if candidates may have such plans.
        """
        return None

    def unintended(self, candidate: Candidate, setting: Setting) -> str | None:
        """Return why the result of training with a candidate is certainly unintended, or None."""
        return None

    def loss_depends_on(
        self,
        args: Mapping[str, object],
        model: ModelProfile | None = None,
        processes: int = 1,
        columns: Collection[str] = (),
    ) -> Mapping[str, str]:
        """Return, by knob that is usually exact, how the loss depends on it.

        By default, a row's loss is independent of the other rows of its micro-batch, except for a load-balancing loss
        of experts, which is computed per micro-batch and averaged. NEFTune divides its noise by the root of a
        micro-batch's width (``neftune_post_forward_hook`` of transformers).

        Args:
            args: fields of the configuration; absent ones are at their defaults.
            model: None: it has no experts.
            processes: number of training processes.
            columns: the dataset's.
        """
        noise = args.get("neftune_noise_alpha")
        depends = dict.fromkeys(_OF_WIDTH, "NEFTune's noise depends on a micro-batch's width") if noise else {}
        if self.balances_experts(args, model):
            how = "the load-balancing loss of experts is computed for each micro-batch"
            depends |= dict.fromkeys((ROWS, PACKING), how)
        return {**depends, **self.own_loss(args)}

    def own_loss(self, args: Mapping[str, object]) -> Mapping[str, str]:
        """Return the part of :meth:`loss_depends_on` that comes from the loss of TRL's trainer."""
        return {}

    def balances_experts(self, args: Mapping[str, object], model: ModelProfile | None) -> bool:
        """Return whether a load-balancing loss of experts is added, by the configuration's or the model's weight."""
        weight = args.get(_BALANCE)
        weight = weight if weight is not None or model is None else model.router_aux_loss_coef
        return _BALANCE in self.fields and bool(weight)

    def defaults(self, setting: Setting) -> Candidate:
        """Return TRL's own choice of every technique, or the nearest one where that cannot run."""
        return Candidate({technique.name: technique.default(setting) for technique in self.techniques})

    def normal(self, candidate: Candidate, setting: Setting, knobs: Collection[str] | None = None) -> Candidate:
        """Return the representative of all candidates with the same plan.

        Args:
            knobs: knobs whose choices may be replaced; None: all.
        """
        techniques = [
            item
            for item in self.techniques
            if type(item).normal is not Technique.normal and (knobs is None or item.name in knobs)
        ]
        for _ in range(_NORMAL_PASSES):
            changed = {
                item.name: choice
                for item in techniques
                if (choice := item.normal(candidate[item.name], candidate, setting)) != candidate[item.name]
            }
            if not changed:
                break
            candidate = candidate.but(**changed)
        return candidate

    def illegal(self, candidate: Candidate, setting: Setting) -> str | None:
        """Return why a candidate may not be tried or recommended, or None if it may."""
        return next(filter(None, self.violations(candidate, setting)), None)

    def knobs_of_violated_rule(self, candidate: Candidate, setting: Setting) -> Collection[str]:
        """Return the knobs that the first violated rule reads; every knob if none is violated."""
        tracked = ReadTracking(candidate)
        for reason in self.violations(tracked, setting):
            if reason:
                return tracked.read
            tracked.read.clear()
        return candidate

    def violations(self, candidate: Candidate, setting: Setting) -> Iterator[str | None]:
        """Yield why a candidate violates a rule, or None, for each rule: the techniques', then the trainer's own."""
        for technique in self.techniques:
            yield illegal(technique, candidate, setting) if technique.name in candidate else None
        yield self.rule(candidate, setting) or self.unintended(candidate, setting)

    def plan(self, candidate: Candidate, setting: Setting) -> TrainingPlan:
        """Return the training plan of a candidate, with the entries and documents of a base."""
        hardware, base = setting.machine.hardware, setting.base
        tree: dict[str, Any] = {"args": {}, "model": {}, "env": {}, "peft": {}, "truncate_to": None}
        written: list[Mapping[str, object]] = [
            _entries_of(technique, candidate, setting)
            for technique in self.techniques
            if base is None or technique.name not in base.custom
        ]
        if base is not None:
            written.append(base.entries)
        in_group = hardware.processes > 1 or any(path.startswith(_ENGINE) for entries in written for path in entries)
        for path, value in self.device_args(hardware.kind, in_group=in_group).items():
            merge(tree, ("args", *path.split(".")), value)
        for entries in written:
            for path, value in entries.items():
                if path in setting.workload.absent:
                    continue
                merge(tree, path.split("."), value)
                for further, needed in self.also_set.get(path, {}).items() if value else ():
                    merge(tree, further.split("."), needed)
        if setting.workload.evaluation is not None:
            tree["args"]["eval_strategy"] = EVAL_STRATEGY
        for path, document in base.documents.items() if base is not None else ():
            # The document applies only to candidates with its engine.
            if lookup(tree, path.split(".")):
                merge(tree, path.split("."), document)
        return self.completed(TrainingPlan(self.name, **tree, launch=hardware.launch), setting.workload)

    def completed(self, plan: TrainingPlan, workload: Workload) -> TrainingPlan:
        """Return a plan with the entries that depend on the workload, such as a batch size capped at its rows."""
        rows = plan.number(PASS_ROWS)
        args = {PASS_ROWS: min(rows, workload.documents_trained)} if rows is not None else {}
        return replace(plan, args={**plan.args, **args})


def _entries_of(technique: Technique, candidate: Candidate, setting: Setting) -> Mapping[str, object]:
    """Return the plan entries of a technique in a candidate.

    If the user's own engine document has the choice, entries that it omits stay absent.
    """
    choice, base = candidate[technique.name], setting.base
    entries = technique.plan(choice, candidate, setting)
    if base is None or not technique.identified_by or base.choices.get(technique.name) != choice:
        return entries
    own = tuple(f"{path}." for path in base.documents)
    return {
        path: value for path, value in entries.items() if path in technique.identified_by or not path.startswith(own)
    }


@cache
def _techniques_of(trainer: Trainer) -> tuple[Technique, ...]:
    # Trainers are imported by the package, and import this module.
    from autotune.trainers import trainers

    # A field that no trainer declares belongs to ``transformers.TrainingArguments``, which all trainers have.
    own = frozenset().union(*(item.fields for item in (*trainers().values(), trainer)))
    return tuple(
        technique
        for technique in catalogue()
        if not facts(technique, trainer.name).without_effect and _arguments(technique) & own <= trainer.fields
    )


def _arguments(technique: Technique) -> frozenset[str]:
    """Return the fields of a trainer's configuration that a technique writes."""
    return frozenset(path.split(".")[1] for path in technique.writes if path.startswith("args."))
