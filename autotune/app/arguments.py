"""Declares the arguments of the public functions; the commands' options derive from them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any, Literal

from autotune.app.public import Arguments, Checked, check_type
from autotune.confidential import hidden_values, hidden_words
from autotune.core.candidate import Choice
from autotune.core.effort import EffortName
from autotune.core.gpu import ALL_GPUS
from autotune.core.workload import Init
from autotune.errors import InputError
from autotune.inspection.command_line import launches
from autotune.inspection.paths import is_file
from autotune.trainers import DEFAULT
from autotune.units import parse_duration

AUTO: Literal["auto"] = "auto"
"""The word for a number of GPUs that the plan chooses."""
Auto = Literal["auto"]


# Options that are not named like their argument.
_SPELLED = {"fits": "--no-fit", "imports": "--import"}


def option(name: str, default: object = None) -> str:
    """Return the option of an argument; for an argument that is true by default, it is ``--no-…``."""
    return _SPELLED.get(name, f"--{'no-' if default is True else ''}{name.replace('_', '-')}")


def names(lists: str | Iterable[str]) -> tuple[str, ...]:
    """Return the names in comma-separated lists, or in one."""
    texts = [lists] if isinstance(lists, str) else lists
    return tuple(name.strip() for text in texts for name in text.split(",") if name.strip())


def time_limit(timeout: str | float | None) -> float | None:
    """Return a time limit in seconds; None: no limit.

    Raises:
        InputError: it is not a finite duration above 0.
    """
    seconds = parse_duration(timeout) if isinstance(timeout, str) else timeout
    if seconds is not None and not 0 < seconds < inf:
        raise InputError(f"A time-out of {seconds:g} seconds is not possible.", hint="It is above 0, and finite.")
    return seconds


def check_range(template: str, value: float | str | None, low: float = 1, high: float = inf) -> None:
    """Check that a number lies in a range.

    Args:
        template: subject of the message, such as ``A seed of {}``.
        value: None or a word such as ``auto`` passes.

    Raises:
        InputError: it lies outside.
    """
    if not isinstance(value, (int, float)) or low <= value <= high:
        return
    hint = f"It is at least {low}." if high == inf else f"It lies between {low} and {high:,}."
    raise InputError(f"{template.format(value)} is not possible.", hint=hint)


def command_words(command: str | Sequence[str]) -> tuple[str, ...]:
    """Return the words of a command, which may be one text.

    Raises:
        InputError: it has an unclosed quotation mark.
    """
    try:
        return tuple(shlex.split(command) if isinstance(command, str) else command)
    except ValueError as error:
        raise InputError(f"The command {command!r} cannot be split into words: {error}.") from error


@dataclass(frozen=True, kw_only=True)
class LengthsArguments(Arguments):
    """Arguments of :func:`autotune.lengths`.

    Args:
        model: hub id, local directory, or ``config.json``; its tokenizer and chat template are used.
        dataset: hub id, or a local file or directory: .jsonl, .json, .csv, .parquet, .arrow or .txt.
        split: split of ``dataset`` to read, or a part of it, such as ``train[:1000]``. None: train.
        dataset_config (NAME): configuration of ``dataset`` if it has several. None: the only one.
        trainer: TRL's trainer.
    """

    model: str | Path = field(kw_only=False)
    dataset: str | Path = field(kw_only=False)
    split: str | None = None
    dataset_config: str | None = None
    trainer: str = DEFAULT


@dataclass(frozen=True)
class CatalogueArguments(Checked):
    """Arguments of :func:`autotune.catalogue`.

    Args:
        trainer: TRL's trainer.
        device: device to list it for; ``auto`` uses a GPU if there is one.
    """

    trainer: str = DEFAULT
    device: Literal["auto", "cuda", "cpu"] = "auto"


@dataclass(frozen=True, kw_only=True)
class SearchArguments(Arguments):
    """Arguments of every search, by probes or by traces.

    Args:
        model: hub id, local directory, or ``config.json``; no weights are needed.
        dataset: hub id, or a local file or directory: .jsonl, .json, .csv, .parquet, .arrow or .txt.
        split: split of ``dataset`` to train on or, without evaluation, a part of it, such as ``train[:1000]``. None:
            train.
        dataset_config (NAME): configuration of ``dataset`` and ``eval_dataset`` if they have several, such as
            ``main`` of ``openai/gsm8k``. None: the only one.
        trainer: TRL's trainer.
        eval_dataset (DATASET): rows for evaluation during training: a hub id, or a local file or directory. None: those
            of ``dataset`` if ``eval_split`` is given.
        eval_split: split of ``eval_dataset``, or else of ``dataset``, for evaluation. None: the ``test`` split of
            ``eval_dataset``, or all rows of a file; no evaluation without ``eval_dataset``.
        reward_funcs (NAME[,NAME]): for trainers that generate completions: reward functions, as dotted paths such as
            ``my_rewards.length`` or TRL's names. None: a placeholder, ``get_soft_overlong_punishment``.
        completion_length (TOKENS|COLUMN): for trainers that generate completions: mean tokens per completion, or the
            column of ``dataset`` with typical completions. None: half of ``max_completion_length``.
        prompt_coverage: for trainers that generate completions: share of the prompts to keep, above 0 and up to 1, in
            training and in evaluation; the longest are dropped, since these trainers do not cut prompts. None: 1.
        teacher (MODEL): teacher model, needed for distillation, with the vocabulary of ``model``: hub id, local
            directory, or ``config.json``.
        num_processes: processes that train together, one per GPU.
        memory_budget (SIZE): memory that each process may use, such as ``24GiB`` or in bytes.
        global_batch_size: documents per optimizer step, over all processes: rows of the dataset, or completions for
            trainers that generate them in groups. None: 8 per process, TRL's default.
        max_length (TOKENS): length at which rows are cut or, by some trainers, dropped. None: several are searched,
            within the token coverage.
        token_coverage: smallest share of the dataset's tokens, and of those in the loss, to train on. None: 0.99.
        allow (KNOB[,KNOB]): knobs for which choices that change training are searched, too, such as ``lora``.
        fix (KNOB=VALUE): value of a knob in every candidate.
        exclude (KNOB[,KNOB]): knobs that stay at TRL's default.
        space (FILE): YAML file with the choices to search, such as a changed copy of one in ``search_spaces/``. None:
            the one that ships with autotune.
    """

    model: str | Path | None = field(default=None, kw_only=False)
    dataset: str | Path | None = field(default=None, kw_only=False)
    split: str | None = None
    dataset_config: str | None = None
    trainer: str | None = None
    eval_dataset: str | Path | None = None
    eval_split: str | None = None
    reward_funcs: Iterable[str] = ()
    completion_length: int | str | None = None
    prompt_coverage: float | None = None
    teacher: str | Path | None = None
    num_processes: int | Auto | None = None
    memory_budget: str | int | None = None
    global_batch_size: int | None = None
    max_length: int | None = None
    token_coverage: float | None = None
    allow: Iterable[str] = ()
    fix: Mapping[str, Choice] | None = None
    exclude: Iterable[str] = ()
    space: str | Path | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("reward_funcs", "allow", "exclude"):
            object.__setattr__(self, name, names(getattr(self, name)))
        object.__setattr__(self, "fix", dict(self.fix or {}) or None)

    @property
    def evaluates(self) -> bool:
        """Whether rows to evaluate on are named."""
        return self.eval_dataset is not None or self.eval_split is not None


@dataclass(frozen=True, kw_only=True)
class ProbeArguments(SearchArguments):
    """Arguments of :func:`autotune.probe`.

    Args:
        trainer: TRL's trainer. None: the default one, or that of ``base``.
        base (FILE): TRL configuration in YAML to start from, which may name model and dataset. Its values stay unless a
            change makes training faster or fit; comments and order are kept; the recommendation is compared with it.
            None: TRL's defaults.
        device: device to probe on; ``auto``: a GPU if there is one, and an error if it cannot be used; else the CPU.
        num_processes: processes that train together, one per GPU. On a CPU, each has an equal share of the memory.
            None: those of ``base``; without it, one on each visible GPU, or one on a CPU or with ``workers``.
        global_batch_size: documents per optimizer step, over all processes: rows of the dataset, or completions for
            trainers that generate them in groups. None: that of ``base``; without it, 8 per process, TRL's default.
        token_coverage: smallest share of the dataset's tokens, and of those in the loss, to train on. None: that of
            ``base``, or 0.99.
        workers: number of candidates to probe at the same time, in one study: each on its own ``num_processes``
            GPUs, or on an equal share of a CPU's cores and memory; the recommendation is then for such a share.
            ``auto``: as many as the GPUs allow, one on a CPU. None: one, on all visible GPUs together.
        memory_budget: memory that each process may use, such as ``24GiB`` or in bytes. None: the free memory.
        exclude: knobs that stay at TRL's default, or at the value of ``base``.
        margin: share of the budget, 0 to 0.5, that probes keep free for later training.
        effort: how long to search: ``quick``, ``normal`` or ``thorough``.
        trials: maximum number of probes. None: that of the effort.
        timeout (TIME): time until the result so far is written, such as ``10m`` or in seconds. None: no limit.
        init: initial weights: ``random`` ones need no checkpoint; ``pretrained`` loads it.
        seed: seed of the search and of the order of batches.
        storage (URL): URL of an Optuna storage, the same for all workers of a study: a database URL of Optuna,
            ``journal:///path`` for a journal on a file system, or ``grpc://host:port``. None: ``study.db`` in the
            output directory.
        study: name of the study in ``storage``. None: the output directory's name.
        resume: continue an interrupted study, or join the processes that search it.
        output (DIR): directory of the bundle. None: ``autotune-<model>-<dataset>``, or ``autotune-<base>``.
        plan: trace candidates before the first probe to predict memory and speed; otherwise more probes are needed.
    """

    base: str | Path | None = None
    device: Literal["auto", "cuda", "cpu"] = "auto"
    num_processes: int | None = None
    workers: int | Auto | None = None
    margin: float = 0.05
    effort: EffortName = "normal"
    trials: int | None = None
    timeout: str | float | None = None
    init: Init = "random"
    seed: int = 42
    storage: str | None = None
    study: str | None = None
    resume: bool = False
    output: str | Path | None = None
    plan: bool = True


@dataclass(frozen=True, kw_only=True)
class PlannedArguments(SearchArguments):
    """Arguments of every plan, for any GPU, present or not.

    Args:
        dataset: hub id, or a local file or directory: .jsonl, .json, .csv, .parquet, .arrow or .txt. None: rows of
            ``seq_len`` tokens.
        gpu (NAME|SIZE): name of a GPU, such as ``H100-80GB``, a size such as ``24GiB``, or ``cpu``. Names with commas
            between them, or ``all`` for those of the catalogue, are compared (in Python by :func:`autotune.rent`).
            None: this machine's.
        num_machines: machines, each with the same number of processes. None: one for every eight processes, and for a
            CPU always one.
        network (GBIT): total network rate of each machine in Gbit/s, in one direction, such as 3200 for eight links of
            400. None: communication is timed as if all GPUs were in one machine.
        seq_len (TOKENS): tokens of each row, instead of a dataset; the model then needs no tokenizer.
        memory_budget: memory that training may use on each GPU, such as ``24GiB`` or in bytes. None: all of it, but
            of this machine's, what other processes do not use now.
        prices (FILE): prices of an hour of one GPU, by name: a YAML file of lines such as ``H100-80GB: 2.99``, or a CSV
            file; in Python also a mapping. None: no cost is shown.
    """

    model: str | Path = field(kw_only=False)
    trainer: str = DEFAULT
    gpu: str | int | None = None
    num_machines: int | None = None
    network: float | None = None
    seq_len: int | None = None
    prices: str | Path | Mapping[str, float] | None = None


@dataclass(frozen=True, kw_only=True)
class PlanArguments(PlannedArguments):
    """Arguments of :func:`autotune.plan`.

    Args:
        num_processes: processes that train together, one per GPU. None: one, or one on each of this
            machine's GPUs.
        top: number of the best candidates to show; each was traced.
        explain: show how the estimate of one candidate is computed: the fastest that fits, or the baseline if nothing
            fits. Fix knobs to choose the candidate.
        timeout (TIME): time after which the search ends, such as ``2m`` or in seconds; the best so far are then
            traced with all layers. None: no limit.
        output (DIR): directory for a bundle of the fastest candidate predicted to fit, unmeasured. None: no files.
        server_gpus: number of the ``num_processes`` GPUs for a vLLM server; the others train. Needs ``vllm=server``,
            fixed or allowed. None: the server has GPUs of its own, which are not counted.
    """

    num_processes: int | None = None
    top: int = 20
    explain: bool = False
    timeout: str | float | None = None
    output: str | Path | None = None
    server_gpus: int | None = None


@dataclass(frozen=True, kw_only=True)
class RentArguments(PlannedArguments):
    """Arguments of :func:`autotune.rent`.

    Args:
        num_processes: total number of GPUs that train together; ``auto`` tries those of 1, 2, 4, 8, 16, 32 and 64 that
            divide the global batch: up to the first with which something fits, then as long as throughput per GPU
            rises. None: one, or one on each of this machine's GPUs.
    """

    gpu: str | int | None = ALL_GPUS
    num_processes: int | Auto | None = 1


def _is_command(text: str) -> bool:
    """Return whether a text is a command rather than the name of a file, which may also have spaces."""
    return not is_file(text) and any(map(launches, re.split(r"[\s'\"]", text)))


@dataclass(frozen=True, kw_only=True)
class CheckArguments(Arguments):
    """Arguments of :func:`autotune.check`.

    Args:
        config: a YAML file of TRL's; or the command that is about to run, as words or as one text; or a configuration
            of one of TRL's trainers, such as a ``trl.DPOConfig``, for which ``model`` and ``dataset`` have to be given.
        trainer: TRL's trainer. None: the one of the command or of the keys.
        model: hub id, local directory, or ``config.json``; no weights are needed. None: that of the configuration.
        dataset: hub id, or a local file or directory. None: that of the configuration.
        peft_config: the adapter, for a configuration object; only LoRA is supported.
        gpu (NAME|SIZE): name of a GPU, such as ``H100-80GB``, a size such as ``24GiB``, or ``cpu``. None: this
            machine's device.
        memory_budget (SIZE): memory that each process may use, such as ``24GiB`` or in bytes. None: all of the
            device, but of this machine's, what other processes do not use now.
        probe: run the worst micro-batches on this machine's device, instead of tracing them.
        timeout (TIME): time limit of that run, such as ``10m`` or in seconds; a run that reaches it leaves the answer
            unknown. None: no limit.
        imports: import the modules of the configuration's own reward functions, in separate processes.
        fits: check memory; otherwise the configuration is only read, and no device, model or dataset is needed.
        when_unsure: whether an answer that is too close to call, or unknown, passes or fails.
    """

    config: Any = field(kw_only=False)
    trainer: str | None = None
    model: str | Path | None = None
    dataset: str | Path | None = None
    peft_config: Any = None
    gpu: str | int | None = None
    memory_budget: str | int | None = None
    probe: bool = False
    timeout: str | float | None = None
    imports: bool = False
    fits: bool = True
    when_unsure: Literal["pass", "fail"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.config, str) and _is_command(self.config):
            object.__setattr__(self, "config", command_words(self.config))
        check_type("config", self.command, Sequence[str])

    @property
    def file(self) -> str | None:
        """The YAML file; None for a command or an object."""
        return str(self.config) if isinstance(self.config, (str, Path)) else None

    @property
    def command(self) -> tuple[str, ...]:
        """The words of a command; empty for a file or an object."""
        return tuple(self.config) if isinstance(self.config, Sequence) and self.file is None else ()

    @property
    def passes(self) -> bool | None:
        """Whether an answer that is too close to call, or unknown, passes; None: undecided."""
        return None if self.when_unsure is None else self.when_unsure == "pass"

    @property
    def settings(self) -> dict[str, object]:
        """The arguments that differ from their defaults, by name, without secrets; a configuration is named."""
        named = {**hidden_values({"config": self.file}), "command": hidden_words(self.command)}
        return {**super().settings, **{name: value for name, value in named.items() if value}}


@dataclass(frozen=True, kw_only=True)
class DryRunArguments(Arguments):
    """Arguments of :func:`autotune.dry_run`.

    Args:
        command: the training command, as words or as one text; on the command line after ``--``.
        gpu (NAME|SIZE): name of a GPU, such as ``H100-80GB``, or a size such as ``24GiB``. None: this machine's.
        num_processes: number of null GPUs. None: one for each process that the command starts.
        steps: number of optimizer steps to run.
        as_shuffled: keep the script's order of rows; otherwise each batch has the largest rows.
        timeout (TIME): time limit, such as ``10m`` or in seconds. None: no limit.
    """

    command: Sequence[str] = field(kw_only=False)
    gpu: str | int | None = None
    num_processes: int | None = None
    steps: int = 3
    as_shuffled: bool = False
    timeout: str | float | None = None
