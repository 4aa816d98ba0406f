"""The second half of a check: whether a configuration that TRL accepts fits, and its silent behaviour."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from textwrap import shorten

from autotune.app.arguments import SearchArguments, time_limit
from autotune.app.check.need import CPU_PROCESS_BYTES, CheckAnswer, judge_by_probe, judge_by_study, judge_by_traces
from autotune.app.check.remedy import Remedies
from autotune.app.check.silent import checkpoint_findings, dispatch_findings, row_findings, silent_findings, strategy_of
from autotune.app.check.task import Task
from autotune.app.epoch import rows_of_epoch
from autotune.app.notes import host_notes, notes_on_assumptions
from autotune.app.options import MAX_TOKENS, Options, check_evaluation, checked_options
from autotune.app.planned import CPU, planned_machine, planned_workload
from autotune.app.requests import traces_of
from autotune.core.configuration import Built, Configuration, ReadCommand
from autotune.core.documents.verdict import Finding, Outcome, Remedy, Severity, Verdict, has_error
from autotune.core.events import TRACING, StageStarted
from autotune.core.files.nested import Key
from autotune.core.machine import Machine
from autotune.core.plan import Launch, TrainingPlan
from autotune.core.rows.batch_geometry import BatchGeometry
from autotune.core.setting import GLOBAL_BATCH, Setting
from autotune.core.workload import CUSTOM_CODE, Workload
from autotune.errors import AutotuneError, InputError, ProbeServerError, UnreadError, one_line
from autotune.inspection.command_line import options_of
from autotune.inspection.yaml_edit import Edit, apply_edits, unified_diff
from autotune.planning.single import PlanTracer, SizedPlan, UntraceableError, VllmError, trace_request, traced_depths
from autotune.planning.tracing.cache import Cache
from autotune.probing.jobs import build
from autotune.probing.server import JobServer
from autotune.probing.tracing import ServerTracer
from autotune.techniques.max_length import least_coverage
from autotune.techniques.offload import offload_variables
from autotune.techniques.packing import SEPARATING
from autotune.trainers.evaluation import whole_geometry
from autotune.units import plural
from autotune.userconfig.bundle import planned_findings
from autotune.userconfig.candidate import as_candidate, setting_of
from autotune.userconfig.engine import engine_args, without_engine
from autotune.userconfig.fields import UserPlan, with_nulls
from autotune.userconfig.fsdp import loading_text
from autotune.userconfig.keys import writable
from autotune.userconfig.launch import Launching
from autotune.userconfig.problems import build_findings, error_finding, finding, mentioned
from autotune.userconfig.reading import plan_of
from autotune.userconfig.sources import Rewards, Sources, rewards_of, sources, teacher_of

# A chat template may loop forever, while the user's job waits for the check.
_READING_SECONDS = 3600.0
_BUILDING_SECONDS = 240.0
_EXCERPT = 500
"""Characters of an error of a library that a message quotes at most."""
_SHRINKS = "auto_find_batch_size"
"""The field for accelerate's retries with smaller batches (``find_executable_batch_size``)."""
_ENDS_A_STEP = {
    # accelerate/utils/fsdp_utils.py; by default it takes ``_no_split_modules``, which some models have in part.
    "Could not find the transformer layer class": (
        "FSDP refuses the model unless transformer_layer_cls_to_wrap names the classes of its layers."
    ),
    # trl/trainer/grpo_trainer.py; before, smoke tests leave out what needs vLLM.
    "Unknown vLLM importance sampling level": "TRL has no such vllm_importance_sampling_mode: the first step fails.",
    # torch/amp/grad_scaler.py
    "Attempting to unscale FP16 gradients": "fp16 fails in the first step of weights in float16. Write dtype: float32.",
    # torch/distributed/fsdp/_fully_shard; accelerate's policy takes the list of layers for one that is large enough.
    "fully_shard does not support containers": (
        "FSDP2 cannot wrap layers by SIZE_BASED_WRAP. Write auto_wrap_policy: TRANSFORMER_BASED_WRAP."
    ),
    # torch/distributed/fsdp/_fully_shard/_fsdp_state.py (2.13)
    "is shared with a parameter already managed by another FSDP group": (
        "FSDP2 refuses a weight that two of its groups share, such as one of tied embeddings in lora_modules_to_save."
        " Leave lm_head and embed_tokens out of it, or train by DDP or ZeRO. A weight"
    ),
    # deepspeed/runtime/config.py, config_utils.py; a document of ZeRO-3 is read before.
    "DeepSpeedConfigError: ": "DeepSpeed refuses its document.",
    "validation error for DeepSpeed": "DeepSpeed refuses its document.",
    # autotune/virtual/patches/unsupported.py
    "CUDA does not scale gradients in bfloat16": (
        "fp16 fails in the first step of trained weights in bfloat16: those of dtype: bfloat16, or TRL's adapters on a"
        " quantised model. Write bf16: true instead or, for a GPU without bf16, bf16: false."
    ),
}
"""Beginnings of errors that only a step on a GPU has, each with its remedy."""


@dataclass(frozen=True)
class Fitting:
    """Checks whether a configuration fits that TRL accepts; :meth:`verdict` is the result.

    Attributes:
        read: the command as TRL's parser reads it.
        config: the trainer's configuration.
        findings: the findings so far.
        prepared: whether TRL's trainer has prepared the rows already.
        evaluated: file of the trainer's own rows to evaluate on, or None.
    """

    task: Task
    read: ReadCommand
    config: Configuration
    launching: Launching
    findings: tuple[Finding, ...]
    tracer: ServerTracer
    cache: Cache
    prepared: bool = False
    evaluated: Path | None = None

    @cached_property
    def user(self) -> UserPlan:
        """The training plan of the configuration, without its sharding."""
        config = without_engine(self.config) if self.launching.is_observed else self.config
        return plan_of(self.task.written, self.read, config)

    @cached_property
    def planned(self) -> Machine:
        """The machine to check for, with one device for each process of the training."""
        assert self.task.target is not None
        machine, launching = self.task.target, self.launching
        hardware = replace(machine.hardware, processes=launching.processes, machines=launching.machines)
        return replace(machine, hardware=hardware)

    def verdict(self) -> Verdict:
        """Return whether the configuration fits, or why that is not known or the training cannot run."""
        try:
            return self._verdict()
        except UnreadError as error:
            return self.task.unknown(error, self.findings)
        except InputError as error:
            # Findings on the keys are reported even if memory cannot be checked.
            return self.task.wrong((*self.findings, error_finding(self.task.written, error)))
        except ProbeServerError:
            raise
        except AutotuneError as error:
            # A job was killed, timed out or failed, which proves nothing about the memory.
            return self.task.unknown(error, self.findings)

    def _verdict(self) -> Verdict:
        task, trainer, planned, user = self.task, self.task.trainer, self.planned, self.user
        try:
            named, rewards, options, asked, workload = self._inputs()
        except InputError as error:
            script = task.written.command.script
            needs_code = self.config.values.get("trust_remote_code") and CUSTOM_CODE in error.message
            if isinstance(error, UnreadError) or (script is None and not needs_code):
                raise
            own = "" if needs_code else f" {script} may train differently, so the answer is not known."
            raise UnreadError(f"{error.message}{own}", hint="" if needs_code else error.hint) from error
        # transformers drops no streamed rows (``Trainer._get_dataloader``).
        drops_last = self.config.values.get("dataloader_drop_last") is True and not named.streams
        plan, geometry = self._of_epoch(asked, workload, drops_last=drops_last)
        setting = setting_of(plan, trainer, workload, planned, max(1, round(geometry.documents)))
        setting = replace(setting, checked=plan)
        explicit = with_nulls(plan, self.config)
        built = self._built(with_nulls(asked, self.config), geometry, setting)
        nearest = as_candidate(plan, trainer, setting, options.file)
        keys_set = {**task.written.given, **dict.fromkeys(item.key for item in self.read.overrides)}
        silent = [*silent_findings(plan, geometry, trainer, setting, nearest, keys_set, drops_last=drops_last)]
        silent += row_findings(named.dataset, trainer, streams=named.streams)
        silent += checkpoint_findings(plan, self.config)
        # TRL turns it off for streamed rows.
        silent += [] if named.streams else dispatch_findings(plan, geometry, trainer, workload, self.config)
        if self.config.values.get(_SHRINKS):
            message = "After running out of memory, training continues with micro-batch and global batch 10 % smaller."
            silent += [Finding(Severity.SILENT, message, _SHRINKS)]
        loading = loading_text(self.launching.document, self.config) if self.launching.processes > 1 else None
        silent += [Finding(Severity.SILENT, loading, "fsdp_config")] if loading is not None else []
        if task.written.file is not None:
            silent += planned_findings(self.config, plan, task.written.file.path.parent)
        found = (*self.findings, *self._with_lines(silent))
        found = (*found, *build_findings(task.written, built, found, here=task.arguments.gpu is None))
        found += tuple(Finding(Severity.NOTE, f"Assumed: {assumption}.") for assumption in user.assumptions)
        if rewards is not None and (sentence := rewards.sentence(probed=task.arguments.probe)):
            found += (finding(task.written, Severity.NOTE, "reward_funcs", sentence),)
        answer, remedy = None, None
        if not has_error(found):
            steps = PlanTracer(traces_of(workload, planned, self.tracer, self.cache), setting, planned.gpu)
            answer = self._answer(SizedPlan(explicit, geometry), steps, workload)
            memory = answer.need.memory if answer.need is not None else None
            texts = [*notes_on_assumptions(memory.assumptions if memory is not None else ())]
            texts += host_notes(memory if planned.gpu is not None else None, plan.launch, planned.host_bytes)
            found += tuple(Finding(Severity.NOTE, text) for text in texts)
            entries = writable(task.written.values, self.config, self.launching, on_cpu=planned.gpu is None)
            remedy = self._remedy(answer, Remedies(plan, nearest, trainer, setting, options.file, steps, entries))
        verdict = task.wrong(found)
        if answer is not None:
            verdict = task.verdict(answer.outcome, found, reason=answer.reason, need=answer.need)
        return replace(
            verdict,
            model=named.model.name,
            dataset=workload.dataset.name,
            plan=asked,
            documents_per_step=geometry.documents,
            remedy=remedy,
            cacheable=not workload.names_images,
        )

    def _inputs(self) -> tuple[Sources, Rewards | None, Options, TrainingPlan, Workload]:
        """Return the model, rows and rewards as TRL's own script finds them, and the plan with the workload.

        Raises:
            InputError: one of them is missing or cannot be used.
        """
        task, trainer = self.task, self.task.trainer
        named = sources(self.read, self.config, task.arguments.model, task.arguments.dataset)
        evaluation = named.evaluation and replace(named.evaluation, prepared=self.prepared)
        if evaluation is not None and self.evaluated is not None:
            evaluation = replace(evaluation, name=str(self.evaluated), data_files=str(self.evaluated))
        named = replace(named, dataset=replace(named.dataset, prepared=self.prepared), evaluation=evaluation)
        check_evaluation(trainer, evaluates=named.evaluation is not None)
        teacher = teacher_of(self.config) if trainer.has_teacher else None
        options = replace(checked_options(SearchArguments(trainer=trainer.name)), teacher=teacher)
        rewards = None
        if trainer.scores:
            own, imports = task.written.own_command, task.arguments.imports
            rewards = rewards_of(self.read, self.config, by_command=own, imports=imports)
            options = replace(options, rollouts=replace(options.rollouts, rewards=rewards.built))
        return named, rewards, options, *self._workload(named, options)

    def _of_epoch(
        self, plan: TrainingPlan, workload: Workload, *, drops_last: bool
    ) -> tuple[TrainingPlan, BatchGeometry]:
        """Return a plan, with no more rows and micro-batches in a step than an epoch has, and its geometry.

        Raises:
            UnreadError: a micro-batch has too many tokens.
        """
        longest = plan.cut_to or workload.longest
        longest = longest if plan.args.get("packing") else min(workload.longest, longest)
        if plan.rows * longest > MAX_TOKENS:
            each = f"{plural(plan.rows, 'row')} of up to {plural(longest, 'token')}"
            raise UnreadError(f"A micro-batch of {each} is too large to trace: the limit is {MAX_TOKENS:,} tokens.")
        trainer = self.task.trainer
        geometry = whole_geometry(trainer, plan, workload)
        if trainer.generates or drops_last:
            return plan, geometry
        plan = plan.within_epoch(max(trainer.fewest_rows, rows_of_epoch(plan, geometry, trainer, workload)))
        return plan, whole_geometry(trainer, plan, workload)

    def _remedy(self, answer: CheckAnswer, remedies: Remedies) -> Remedy | None:
        """Return the smallest change that makes the training fit, if it does not or may not."""
        need, budget_bytes, on_cpu = answer.need, self.task.budget_bytes, self.planned.gpu is None
        over = answer.outcome is Outcome.TOO_CLOSE and need is not None and need.bytes > budget_bytes
        if answer.outcome is not Outcome.DOES_NOT_FIT and not over:
            return None
        self.task.arguments.listener(StageStarted("Looking for the smallest change that fits"))
        setting, coverage = remedies.setting, least_coverage(remedies.nearest.candidate, remedies.setting)
        kept = replace(setting, token_coverage=coverage, allowed=setting.allowed - {GLOBAL_BATCH})
        extra_bytes, now = CPU_PROCESS_BYTES if on_cpu else 0, need.memory if need is not None else None
        stays = now.breakdown.get("parameter", 0) + now.context_bytes if now is not None else 0
        heavy = stays + extra_bytes > budget_bytes
        changed = replace(remedies, setting=kept).smallest(budget_bytes, extra_bytes, heavy=heavy)
        if changed is None:
            return None
        memory, slower = changed.memory, None
        if now is not None and now.step_seconds and memory.step_seconds:
            slower = memory.step_seconds / now.step_seconds
        keys = {".".join(path): value for path, value in changed.keys.items()}
        return Remedy(keys, self._diff(changed.keys), memory.device_bytes, memory.most_bytes + extra_bytes, slower)

    def _built(self, plan: TrainingPlan, geometry: BatchGeometry, setting: Setting) -> Built:
        """Return the messages of TRL's trainer for the plan's own sizes."""
        layers = traced_depths(setting.workload.model.layer_kinds)[0]
        request = trace_request(plan, geometry.layout, geometry.worst, layers, setting, self.planned.gpu)
        request = replace(request, plan=plan)
        return build(self.tracer.server, request, self.tracer.new_folder(), _BUILDING_SECONDS)

    def _workload(self, named: Sources, options: Options) -> tuple[TrainingPlan, Workload]:
        plan, trainer, tracer, listener = self.user.plan, self.task.trainer, self.tracer, self.task.arguments.listener
        attention = str(plan.model.get("attn_implementation") or "sdpa")
        technique = next(item for item in trainer.techniques if item.name == "attention")
        packs = bool(plan.args.get("padding_free")) or strategy_of(plan) in SEPARATING
        here = planned_machine(CPU)
        wanted = (attention,) if packs and technique.unavailable(attention, here) is None else ()
        workload = planned_workload(
            options,
            named.model,
            named.dataset,
            tracer,
            # A module of rewards may have changed since.
            None if self.task.arguments.probe or self.task.arguments.imports else self.cache,
            listener,
            named.evaluation,
            checked=wanted,
            most_seconds=_READING_SECONDS,
        )
        started = self.launching
        engine = engine_args(started.document, self.config, started.processes, variables=started.variables)
        args = {**plan.args, **engine}
        env = {**plan.env, **offload_variables(args)}
        plan = replace(plan, args=args, launch=Launch(started.processes, started.machines), env=env)
        return trainer.completed(plan, workload), workload

    def _answer(self, sized: SizedPlan, steps: PlanTracer, workload: Workload) -> CheckAnswer:
        planned = self.planned
        budget_bytes, file = self.task.budget_bytes, self.task.written.file
        if self.task.arguments.probe:
            self.task.arguments.listener(StageStarted("Running the worst micro-batches"))
            hardware = planned.hardware
            with JobServer(hardware.kind, threads=hardware.threads, processes=hardware.processes) as server:
                folder, seconds = self.tracer.new_folder(), time_limit(self.task.arguments.timeout)
                return judge_by_probe(sized, workload, planned, budget_bytes, server, folder, seconds)
        if file is not None:
            known = judge_by_study(self.config, sized, file.path.parent, workload, planned, budget_bytes)
            if known is not None:
                return known
        self.task.arguments.listener(TRACING)
        try:
            return judge_by_traces(steps, sized, planned, budget_bytes)
        except UntraceableError as error:
            for beginning, remedy in _ENDS_A_STEP.items():
                _, ended, rest = str(error).partition(beginning)
                if ended:
                    # Some quote the whole model.
                    raise InputError(f"{remedy} {shorten(ended + rest, _EXCERPT)}") from error
            return CheckAnswer(Outcome.UNKNOWN, None, f"its step cannot be traced: {one_line(error)}")
        except VllmError as error:
            return CheckAnswer(Outcome.CANNOT_RUN, None, str(error))

    def _diff(self, keys: Mapping[Key, object]) -> str:
        """Return the change of the file; empty if options of the command override it, or it cannot be edited."""
        file = self.task.written.file
        options = options_of(self.task.written.command.words)
        if file is None or any(path[0] in options for path in keys):
            return ""
        edits = [Edit(path, {path[-1]: value} if value is not None else None) for path, value in keys.items()]
        try:
            return unified_diff(file.text, apply_edits(file, edits), str(file.path))
        except InputError:
            return ""

    def _with_lines(self, findings: Iterable[Finding]) -> Iterable[Finding]:
        for item in findings:
            own = item.severity is not Severity.NOTE
            key = item.key or (mentioned(self.task.written, item.message) if own else "")
            line = self.task.written.line(key) if key else None
            yield item if line is None else replace(item, key=key, line=line, file=self.task.written.place)
