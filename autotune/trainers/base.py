"""The base class of trainer specifications, from which planning, probing and emission derive what they need.

A trainer is two files. The specification is a subclass of :class:`Trainer` whose only instance is ``TRAINER`` in a
module of this package; it needs neither torch nor TRL. The adapter is a module of the same name in
:mod:`autotune.step.trainers`, which the child processes use. Adding both, and a search space, adds the trainer
everywhere; ``tests/trainers`` checks every trainer against this contract.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, final

from autotune.core.batch_geometry import BatchGeometry, Layout, Shape
from autotune.core.candidate import Candidate, Watched
from autotune.core.documents import Document, Documents
from autotune.core.heaviest import Loads
from autotune.core.images import ImageProfile
from autotune.core.plan import TrainingPlan
from autotune.core.program import StepProgram, program
from autotune.core.setting import Setting
from autotune.core.workload import ModelProfile, Workload
from autotune.techniques.base import Technique, illegal
from autotune.techniques.packing import NAME as PACKING
from autotune.techniques.per_device_train_batch_size import ROWS
from autotune.techniques.traits import traced_micro_batches, without_sizes
from autotune.trainers.declared import ConfigFields, DatasetFormat
from autotune.trainers.entries import complete, entries_of, put
from autotune.trainers.geometry import (
    longest_of,
    micro_batches_of,
    multiple_of,
    optional_int_argument,
    padded,
    rows_of,
    widths,
)

if TYPE_CHECKING:
    import pyarrow as pa

# Normal forms may depend on one another (padding_free on packing, packing on max_length), but not in circles; two
# passes are enough for the present catalogue, and a test checks that a third changes nothing.
_NORMAL_PASSES = 2

_BALANCE = "router_aux_loss_coef"
EVALUATED = "epoch"
"""``eval_strategy`` of a plan with rows to evaluate on: each evaluation runs over all of them."""


class Trainer(ABC):
    """One trainer of TRL. A subclass is one file, and its only instance is ``TRAINER``.

    In the order in which they are used: the workload is read (``formats``, ``parts``, :meth:`document`), candidates are
    normalised and checked (:meth:`normal`, :meth:`illegal`) and become plans (:meth:`plan`), plans become micro-batches
    (:meth:`geometry`) and traces (:meth:`traced_plan`, :meth:`traced_rows`), and :meth:`program` names their phases,
    to which :meth:`phases` adds the trainer's own.

    Class attributes:
        name: its name in ``trl`` and ``--trainer``, such as ``dpo``.
        label: its name in messages, such as ``DPO``; TRL names its classes after it.
        title: its purpose, as the first words of a script.
        formats: dataset formats, in the order in which the trainer looks for them.
        optional_columns: columns that the trainer uses in any format if a dataset has them.
        parts: names of the parts of a row whose lengths are given, in the order of :meth:`document`'s argument.
        config_fields: the fields of its configuration, which determine the techniques that it has.
        stand_in: columns of a row that replaces data if lengths are given instead.
        ordered: whether micro-batches are blocks of successive rows of the dataset, instead of any rows.
        generates: whether it trains on completions that the model generates.
        scores: whether reward functions score these completions.
        has_teacher: whether it trains the model to imitate another one, which the user names.
        evaluates: whether TRL's trainer can be evaluated while training.
        has_command: whether there is a command ``trl NAME``.
        ignores_bias_buffers: whether TRL's script heeds ``ignore_bias_buffers``, on which no step depends.
        takes_images: whether it is probed and traced on rows with images.
        module: the module of TRL that its classes are imported from.
        loads_by_name: whether the trainer, given a model's name, also loads its tokenizer, its reference and quantised
            weights; else the script that builds it does.
        counted: name of the rows of a global batch, in the plural.
        peculiarities: differences of TRL's class from the other trainers and their cost, in sentences for reports.
        advice: by columns that a dataset may have in place of those of a format, the way to one, as a sentence.
        cpu_args, cuda_args: arguments that training on that device needs.
        also_set: by the path of a switch in a plan, such as ``model.use_peft``, the entries that this trainer also
            needs if the switch is on.
    """

    name: ClassVar[str]
    label: ClassVar[str]
    title: ClassVar[str]
    formats: ClassVar[tuple[DatasetFormat, ...]]
    optional_columns: ClassVar[tuple[str, ...]] = ()
    parts: ClassVar[tuple[str, ...]]
    config_fields: ClassVar[ConfigFields]
    stand_in: ClassVar[Mapping[str, object]]
    ordered: ClassVar[bool] = False
    generates: ClassVar[bool] = False
    scores: ClassVar[bool] = False
    has_teacher: ClassVar[bool] = False
    evaluates: ClassVar[bool] = True
    has_command: ClassVar[bool] = True
    ignores_bias_buffers: ClassVar[bool] = False
    takes_images: ClassVar[bool] = False
    module: ClassVar[str] = "trl"
    loads_by_name: ClassVar[bool] = True
    counted: ClassVar[str] = "documents"
    peculiarities: ClassVar[tuple[str, ...]] = ()
    advice: ClassVar[Mapping[tuple[str, ...], str]] = {}
    # transformers refuses bf16 without a GPU unless use_cpu is set (TrainingArguments).
    cpu_args: ClassVar[Mapping[str, object]] = {"use_cpu": True}
    # TRL's default, `device_map="auto"`, may put layers on the CPU where memory is short, instead of failing.
    cuda_args: ClassVar[Mapping[str, object]] = {"model_init_kwargs.device_map": None}
    also_set: ClassVar[Mapping[str, Mapping[str, object]]] = {}

    @property
    def config_class(self) -> str:
        """The name of TRL's class of its configuration, such as ``DPOConfig``."""
        return f"{self.label.replace(' ', '')}Config"

    @property
    def trainer_class(self) -> str:
        """The name of TRL's class, such as ``DPOTrainer``."""
        return f"{self.label.replace(' ', '')}Trainer"

    @property
    def fields(self) -> frozenset[str]:
        """The fields of its configuration that ``transformers.TrainingArguments`` lacks."""
        return self.config_fields.names

    @property
    def wanted_columns(self) -> str:
        """The columns that a dataset needs, in words."""
        return " | ".join(" and ".join(form.columns) for form in reversed(self.formats))

    @property
    def techniques(self) -> tuple[Technique, ...]:
        """The techniques that this trainer has: its configuration has all the fields that they write."""
        from autotune.trainers import techniques_of

        return techniques_of(self)

    @abstractmethod
    def document(self, lengths: tuple[Any, ...]) -> Document:
        """Return a row as a document: the maximum length at which it is kept, and the tokens of its sequences.

        Args:
            lengths: tokens of each of :attr:`parts`, before any cutting: numbers, or arrays with one for each row.
        """

    @abstractmethod
    def row_of(self, tokens: int) -> tuple[tuple[int, ...], int]:
        """Return a row whose longest sequence has ``tokens``: the lengths of its parts, and its trainable tokens."""

    def geometry(self, plan: TrainingPlan, documents: Documents) -> BatchGeometry:
        """Return the micro-batches and steps of a plan on a dataset.

        By default, rows are padded to the longest sequence of their micro-batch.
        """
        step = documents, rows_of(plan), micro_batches_of(plan), plan.data_ranks
        return padded(*step, optional_int_argument(plan, "max_length"), multiple_of(plan))

    def evaluated(self, plan: TrainingPlan, documents: Documents, rows: int) -> BatchGeometry:
        """Return the micro-batches of ``rows`` rows of a plan's evaluation on a dataset.

        TRL truncates, packs and pads these rows as it does those to train on; no gradients accumulate.
        """
        sizes = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": 1}
        return self.geometry(replace(plan, args={**plan.args, **sizes}), documents)

    def copies(self, plan: TrainingPlan) -> int:
        """Return the number of micro-batch rows for each row of the dataset."""
        return 1

    def rows_per_draw(self, plan: TrainingPlan) -> int:
        """Return how many rows of the dataset are drawn at once: those of a micro-batch, or of several."""
        return rows_of(plan)

    def rows_per_generation(self, plan: TrainingPlan) -> int:
        """Return how many rows of the dataset all processes complete at once; 1 if each is trained on by itself."""
        return 1

    @final
    def rows_of_epoch(self, plan: TrainingPlan, rows: int) -> int:
        """Return how many of the dataset's rows an epoch trains on: TRL leaves out a generation that is not full."""
        whole = self.rows_per_generation(plan)
        return rows // whole * whole or rows

    def widths(self, plan: TrainingPlan, documents: Documents) -> tuple[Sequence[int], Sequence[int]]:
        """Return the widths that micro-batches can have, and those of micro-batches without padding, ascending."""
        return widths(
            documents,
            longest_of(plan),
            multiple_of(plan),
            self.rows_per_draw(plan),
        )

    def loads(self, plan: TrainingPlan, images: ImageProfile, rows: int) -> Loads:
        """Return the sizes of rows with images that the memory of a micro-batch of ``rows`` of them depends on."""
        return images.loads

    def evaluated_copies(self, plan: TrainingPlan) -> int:
        """Return the number of micro-batch rows for each row in evaluation."""
        return self.copies(plan)

    def layout(self, plan: TrainingPlan, rows: int) -> Layout:
        """Return the layout of a micro-batch of ``rows`` rows that may differ in length.

        By default, it is padded: the sequences of a single row, such as two answers, may differ too.
        """
        return Layout.PADDED

    def sizes_at(self, layout: Layout, shape: Shape) -> Mapping[str, object]:
        """Return the arguments with which the trainer builds micro-batches of a shape from :meth:`traced_rows`.

        They replace all arguments by which techniques set sizes. By default, nothing is cut or dropped.
        """
        return {"max_length": int(shape.tokens), "pad_to_multiple_of": None}

    @abstractmethod
    def traced_rows(self, layout: Layout, shape: Shape, trainable: float) -> tuple[tuple[int, ...], ...]:
        """Return the rows, as tokens of their parts, of a micro-batch of a shape.

        Args:
            trainable: share of the dataset's tokens that the loss counts.
        """

    @final
    def program(self, plan: TrainingPlan) -> StepProgram:
        """Return the phases that a run of a plan goes through: its own, evaluation if there is one, and saving."""
        return self.phases(plan).ending(evaluates=plan.evaluates)

    def phases(self, plan: TrainingPlan) -> StepProgram:
        """Return the phases up to the last step."""
        return program()

    def cut_rows(self, batch: pa.RecordBatch, length: int) -> pa.RecordBatch:
        """Return tokenised rows cut to ``length`` tokens, for a plan that cuts them before the trainer sees them.

        Raises:
            NotImplementedError: no plan of this trainer cuts rows.
        """
        raise NotImplementedError(f"{self.trainer_class} cuts rows by itself")

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

    def untokenized_rows(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return tokenised rows as the user wrote them, for a dataset of which some rows are dropped.

        Raises:
            NotImplementedError: none are dropped before this trainer sees them.
        """
        raise NotImplementedError(f"no rows are dropped before {self.trainer_class} sees them")

    def rule(self, candidate: Candidate, setting: Setting) -> str | None:
        """Return why this trainer does not support a candidate, in words, or None; the techniques' rules come first."""
        return None

    def refused(self, plan: TrainingPlan, workload: Workload) -> str | None:
        """Return why a plan, which need not be a candidate's, cannot be trained or planned, in words, or None.

        It is a part of :meth:`rule`.
        """
        return None

    def unintended(self, candidate: Candidate, setting: Setting) -> str | None:
        """Return why the result of training with a candidate is certainly unintended, in words, or None."""
        return None

    def loss_depends_on(self, args: Mapping[str, object], model: ModelProfile | None = None) -> Mapping[str, str]:
        """Return how the loss depends on knobs that otherwise leave it as it is, in words, by their names.

        By default, rows do not depend on those beside them, unless a mixture of experts balances these: that loss is
        computed for each micro-batch, and its mean taken.

        Args:
            args: fields of the configuration; those that it lacks are at their defaults.
            model: None: it has no experts.
        """
        weight = args.get(_BALANCE)
        weight = weight if weight is not None or model is None else model.router_aux_loss_coef
        if _BALANCE not in self.fields or not weight:
            return {}
        return dict.fromkeys((ROWS, PACKING), "the loss that balances experts is computed for each micro-batch")

    def traced_plan(self, plan: TrainingPlan, layout: Layout, shape: Shape) -> TrainingPlan:
        """Return a plan for a trace at a shape, which replaces the plan's own sizes.

        Rows of the dataset are collated as the plan collates them, and a step has as many micro-batches as the plan's.
        """
        args, model = without_sizes(plan)
        at = self.sizes_at(layout, shape)
        sizes = {
            "per_device_train_batch_size": shape.rows,
            "per_device_eval_batch_size": shape.rows,
            "gradient_accumulation_steps": micro_batches_of(plan) if shape.chosen else traced_micro_batches(plan),
            **({name: plan.args[name] for name in at if name in plan.args} if shape.chosen else at),
        }
        return TrainingPlan(plan.trainer, {**args, **sizes}, model, launch=plan.launch, peft=plan.peft)

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
        known = (technique for technique in self.techniques if technique.name in candidate)
        reasons = (illegal(technique, candidate, setting) for technique in known)
        return next(filter(None, reasons), None) or self._illegal_together(candidate, setting)

    def knobs_of_violated_rule(self, candidate: Candidate, setting: Setting) -> Collection[str]:
        """Return the knobs that the first violated rule reads; every knob if none is violated."""
        watched = Watched(candidate)
        for technique in self.techniques:
            watched.read.clear()
            if technique.name in candidate and illegal(technique, watched, setting):
                return watched.read
        watched.read.clear()
        return watched.read if self._illegal_together(watched, setting) else candidate

    def _illegal_together(self, candidate: Candidate, setting: Setting) -> str | None:
        """Return why this trainer does not support the combination of these choices, or None."""
        return self.rule(candidate, setting) or self.unintended(candidate, setting)

    def plan(self, candidate: Candidate, setting: Setting) -> TrainingPlan:
        """Return the training plan of a candidate, with what a base adds to it."""
        hardware, base = setting.machine.hardware, setting.base
        device_args = self.cpu_args if hardware.kind == "cpu" else self.cuda_args
        tree: dict[str, Any] = {"args": {}, "model": {}, "env": {}, "peft": {}, "truncate_to": None}
        for path, value in device_args.items():
            put(tree, f"args.{path}", value)
        written = [
            entries_of(technique, candidate, setting)
            for technique in self.techniques
            if base is None or technique.name not in base.own
        ]
        for entries in (*written, base.entries if base is not None else {}):
            for path, value in entries.items():
                if path in setting.workload.absent:
                    continue
                put(tree, path, value)
                for further, needed in self.also_set.get(path, {}).items() if value else ():
                    put(tree, further, needed)
        if setting.workload.evaluation is not None:
            put(tree, "args.eval_strategy", EVALUATED)
        for path, document in base.documents.items() if base is not None else ():
            complete(tree, path, document)
        args, model, env, peft = tree["args"], tree["model"], tree["env"], tree["peft"]
        plan = TrainingPlan(self.name, args, model, tree["truncate_to"], hardware.launch, env, peft)
        return self.completed(plan, setting.workload)

    def completed(self, plan: TrainingPlan, workload: Workload) -> TrainingPlan:
        """Return a plan with the entries that follow from the workload."""
        return plan
