"""The base class of trainer specifications, from which planning, probing and emission derive what they need.

A trainer is two files. The specification is a subclass of :class:`Trainer` whose only instance is ``TRAINER`` in a
module of this package; it needs neither torch nor TRL. The adapter is a module of the same name in
:mod:`autotune.step.trainers`, which the child processes use. Adding both, and a search space, adds the trainer
everywhere; ``tests/trainers`` checks every trainer against this contract.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, final

from autotune.core.candidate import Candidate, Watched
from autotune.core.nested import at, merge
from autotune.core.plan import PASS_ROWS, TrainingPlan
from autotune.core.program import EVALUATE, SAVE, StepProgram
from autotune.core.setting import Setting
from autotune.core.workload import ModelProfile, Workload
from autotune.techniques.base import Technique, illegal
from autotune.techniques.packing import NAME as PACKING
from autotune.techniques.pad_to_multiple_of import NAME as PAD
from autotune.techniques.padding_free import PaddingFree
from autotune.techniques.per_device_train_batch_size import ROWS
from autotune.trainers.micro_batches import MicroBatches

if TYPE_CHECKING:
    import pyarrow as pa

# Normal forms may depend on one another (padding_free on packing, packing on max_length), but not in circles; two
# passes are enough for the present catalogue, and a test checks that a third changes nothing.
_NORMAL_PASSES = 2

_BALANCE = "router_aux_loss_coef"
# DeepSpeed makes a group of a single process too.
_ENGINE = "args.deepspeed"
# The knobs that set the width of a micro-batch, as long as rows are not cut.
_OF_WIDTH = (ROWS, PACKING, PaddingFree.name, PAD)
EVALUATED = "epoch"
"""``eval_strategy`` of a plan with rows to evaluate on: each evaluation runs over all of them."""


class Trainer(MicroBatches):
    """One trainer of TRL. A subclass is one file, and its only instance is ``TRAINER``.

    In the order in which they are used: the workload is read (``formats``, ``parts``, :meth:`document`), candidates are
    normalised and checked (:meth:`normal`, :meth:`illegal`) and become plans (:meth:`plan`), plans become micro-batches
    (:meth:`geometry`) and traces (:meth:`traced_plan`, :meth:`traced_rows`), and :meth:`program` names their phases,
    to which :meth:`phases` adds the trainer's own. The base classes have what it declares and its micro-batches.
    """

    @property
    def techniques(self) -> tuple[Technique, ...]:
        """The techniques of this trainer: those whose fields its configuration has."""
        from autotune.trainers import techniques_of

        return techniques_of(self)

    @final
    def program(self, plan: TrainingPlan) -> StepProgram:
        """Return the phases that a run of a plan goes through: its own, evaluation if there is one, and saving."""
        return replace(self.phases(plan), after=(EVALUATE, SAVE) if plan.evaluates else (SAVE,))

    def phases(self, plan: TrainingPlan) -> StepProgram:
        """Return the phases up to the last step."""
        return StepProgram()

    def copied_rows(self, batch: pa.RecordBatch, length: int | None) -> pa.RecordBatch:
        """Return tokenised rows as a bundle has a copy of them: cut to ``length`` tokens, or as the user wrote them.

        Raises:
            NotImplementedError: no bundle has a copy of this trainer's rows.
        """
        raise NotImplementedError(f"{self.trainer_class} reads the user's own rows, and cuts and drops them by itself")

    def runs_by_command(self, plan: TrainingPlan) -> bool:
        """Return whether ``trl NAME --config`` trains by a plan: it has no key for a configuration in PEFT's JSON."""
        return self.has_command and not plan.peft

    def written_args(self, plan: TrainingPlan, keys: Collection[str] = ()) -> Mapping[str, object]:
        """Return the arguments of a plan as a file has them that every process reads, and ``trl`` before it starts any.

        Args:
            keys: those of the user's own file, whose words are kept.
        """
        return plan.args

    def as_read(self, plan: TrainingPlan, keys: Mapping[str, object]) -> TrainingPlan:
        """Return a plan of a file with what TRL's class computes from its keys and the number of the plan's processes.

        Raises:
            InputError: the class refuses so many.
        """
        return plan

    def rule(self, candidate: Candidate, setting: Setting) -> str | None:
        """Return why this trainer does not support a candidate, or None; called after the techniques' rules."""
        return None

    def refused(self, plan: TrainingPlan, workload: Workload) -> str | None:
        """Return why a plan, which need not be a candidate's, cannot be trained or planned, in words, or None.

        It is a part of :meth:`rule` where a candidate may have such a plan.
        """
        return None

    def refused_values(self, values: Mapping[str, object]) -> str | None:
        """Return why TRL's trainer refuses values that its configuration class takes, in words, or None.

        Args:
            values: fields of the configuration; those that it lacks are at their defaults.
        """
        return None

    def unintended(self, candidate: Candidate, setting: Setting) -> str | None:
        """Return why the result of training with a candidate is certainly unintended, in words, or None."""
        return None

    def loss_depends_on(
        self, args: Mapping[str, object], model: ModelProfile | None = None, processes: int = 1
    ) -> Mapping[str, str]:
        """Return how the loss depends on knobs that otherwise leave it as it is, in words, by their names.

        By default, a row's loss is independent of the other rows of its micro-batch, except for a load-balancing loss
        of experts, which is computed per micro-batch and averaged. NEFTune divides its noise by the root of a
        micro-batch's width (``neftune_post_forward_hook`` of transformers).

        Args:
            args: fields of the configuration; those that it lacks are at their defaults.
            model: None: it has no experts.
            processes: that train together.
        """
        noise = args.get("neftune_noise_alpha")
        found = dict.fromkeys(_OF_WIDTH, "NEFTune's noise depends on a micro-batch's width") if noise else {}
        if self.balances_experts(args, model):
            how = "the load-balancing loss of experts is computed for each micro-batch"
            found |= dict.fromkeys((ROWS, PACKING), how)
        return {**found, **self.own_loss(args)}

    def own_loss(self, args: Mapping[str, object]) -> Mapping[str, str]:
        """Return the part of :meth:`loss_depends_on` that comes from the loss of TRL's trainer."""
        return {}

    def balances_experts(self, args: Mapping[str, object], model: ModelProfile | None) -> bool:
        """Return whether a load-balancing loss of experts is added, by the configuration's or the model's weight."""
        weight = args.get(_BALANCE)
        weight = weight if weight is not None or model is None else model.router_aux_loss_coef
        return _BALANCE in self.fields and bool(weight)

    def normal(self, candidate: Candidate, setting: Setting, knobs: Collection[str] | None = None) -> Candidate:
        """Return the representative of all candidates with the same plan.

        Args:
            knobs: those whose choices may be replaced; None: all.
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
        """Return why a candidate may not be tried or recommended, in words, or None when it may."""
        return next(filter(None, self.violations(candidate, setting)), None)

    def knobs_of_violated_rule(self, candidate: Candidate, setting: Setting) -> Collection[str]:
        """Return the knobs that the first violated rule reads; every knob if none is violated."""
        watched = Watched(candidate)
        for reason in self.violations(watched, setting):
            if reason:
                return watched.read
            watched.read.clear()
        return candidate

    def violations(self, candidate: Candidate, setting: Setting) -> Iterator[str | None]:
        """Yield why a candidate violates a rule, or None, for each rule: the techniques', then the trainer's own."""
        for technique in self.techniques:
            yield illegal(technique, candidate, setting) if technique.name in candidate else None
        yield self.rule(candidate, setting) or self.unintended(candidate, setting)

    def plan(self, candidate: Candidate, setting: Setting) -> TrainingPlan:
        """Return the training plan of a candidate, with what a base adds to it."""
        hardware, base = setting.machine.hardware, setting.base
        tree: dict[str, Any] = {"args": {}, "model": {}, "env": {}, "peft": {}, "truncate_to": None}
        written: list[Mapping[str, object]] = [
            _entries_of(technique, candidate, setting)
            for technique in self.techniques
            if base is None or technique.name not in base.own
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
            tree["args"]["eval_strategy"] = EVALUATED
        for path, document in base.documents.items() if base is not None else ():
            # The document applies only to candidates with its engine.
            if at(tree, path.split(".")):
                merge(tree, path.split("."), document)
        return self.completed(TrainingPlan(self.name, **tree, launch=hardware.launch), setting.workload)

    def completed(self, plan: TrainingPlan, workload: Workload) -> TrainingPlan:
        """Return a plan with the entries that depend on the workload, such as passes capped at its rows."""
        asked = plan.number(PASS_ROWS)
        args = {PASS_ROWS: min(asked, workload.rows_trained)} if asked is not None else {}
        return replace(plan, args={**plan.args, **args})


def _entries_of(technique: Technique, candidate: Candidate, setting: Setting) -> Mapping[str, object]:
    """Return the plan entries of a technique in a candidate.

    If the user's own document has the choice, entries that the document omits stay absent.
    """
    choice, base = candidate[technique.name], setting.base
    entries = technique.plan(choice, candidate, setting)
    if base is None or not technique.identified_by or base.choices.get(technique.name) != choice:
        return entries
    own = tuple(f"{path}." for path in base.documents)
    return {
        path: value for path, value in entries.items() if path in technique.identified_by or not path.startswith(own)
    }
