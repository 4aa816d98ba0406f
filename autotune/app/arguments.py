"""The arguments of the public functions with their descriptions, which are the options of the commands as well."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from autotune.app.public import Arguments
from autotune.confidential import hidden_values, hidden_words
from autotune.core.candidate import Choice
from autotune.core.workload import Init
from autotune.trainers import DEFAULT
from autotune.units import parse_duration

ALL = "all"
"""The word for every GPU of the catalogue."""
AUTO: Literal["auto"] = "auto"
"""The word for as many GPUs as a plan finds worth it."""
Auto = Literal["auto"]


@dataclass(frozen=True, kw_only=True)
class LengthsArguments(Arguments):
    """Arguments of :func:`autotune.lengths`.

    Args:
        model: hub id, local directory, or ``config.json``; its tokenizer and chat template are used.
        dataset: hub id, or a local file or directory: .jsonl, .json, .csv or .parquet.
        trainer: TRL's trainer.
    """

    model: str = field(kw_only=False)
    dataset: str = field(kw_only=False)
    trainer: str = DEFAULT


@dataclass(frozen=True)
class CatalogueArguments:
    """Arguments of :func:`autotune.catalogue`.

    Args:
        trainer: TRL's trainer.
        device: for which device; ``auto`` takes a GPU where there is one.
    """

    trainer: str = DEFAULT
    device: Literal["auto", "cuda", "cpu"] = "auto"


@dataclass(frozen=True, kw_only=True)
class SearchArguments(Arguments):
    """Arguments of every search, by probes or by traces.

    Args:
        model: hub id, local directory, or ``config.json``; no weights are needed.
        dataset: hub id, or a local file or directory: .jsonl, .json, .csv or .parquet.
        trainer: TRL's trainer.
        eval_dataset: rows that training is evaluated on, named like ``dataset``. None: a split of that, or none.
        eval_split: split of ``eval_dataset``, or of ``dataset``, that training is evaluated on. None: no evaluation or,
            with ``eval_dataset``, its ``test`` split, and all of a file.
        reward_funcs: for trainers that generate completions: reward functions, as dotted paths such as
            ``my_rewards.length`` or in TRL's own names. None: one of TRL's that costs nothing.
        completion_length: mean tokens of their completions, or the column of ``dataset`` that holds typical ones. None:
            half of ``max_completion_length``.
        prompt_coverage: share of the prompts, above 0 and up to 1, that those trainers keep, of training and of
            evaluation each: the longest are dropped, since these trainers cut none. None: 1.
        teacher: for distillation: the model to imitate, named like ``model``, with the same vocabulary.
        num_processes: processes that train together, each on a GPU of its own.
        memory_budget: memory that each process may need, such as ``24GiB`` or in bytes.
        global_batch_size: documents per optimizer step, which are rows of the dataset however they are packed. None: 8
            per process, as TRL's defaults give.
        max_length: tokens to which rows are cut, or over which the trainer drops them. None: every choice of the space,
            within the token coverage.
        token_coverage: share of the dataset's tokens that must be trained on. None: 0.99.
        allow: knobs whose training-changing choices are considered too, such as ``lora``.
        fix: by knob, the only choice to consider.
        exclude: knobs that stay at TRL's default.
        space: a space file instead of the one that ships with autotune.
    """

    model: str | None = field(default=None, kw_only=False)
    dataset: str | None = field(default=None, kw_only=False)
    trainer: str | None = None
    eval_dataset: str | None = None
    eval_split: str | None = None
    reward_funcs: Iterable[str] = ()
    completion_length: int | str | None = None
    prompt_coverage: float | None = None
    teacher: str | None = None
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
        for name in ("reward_funcs", "allow", "exclude"):
            # A generator can be read only once.
            object.__setattr__(self, name, tuple(getattr(self, name)))

    @property
    def evaluates(self) -> bool:
        """Whether rows to evaluate on are named."""
        return self.eval_dataset is not None or self.eval_split is not None


@dataclass(frozen=True, kw_only=True)
class ProbeArguments(SearchArguments):
    """Arguments of :func:`autotune.probe`.

    Args:
        trainer: TRL's trainer. None: the default one, or that of ``base``.
        base: a configuration of TRL's in YAML to start from, which may name model and dataset: what it says stays, and
            only what makes it faster or fit changes, comments and order kept; the recommendation is compared with it.
            None: TRL's defaults.
        device: ``auto`` takes a GPU where there is one.
        num_processes: processes that train together, each on a GPU of its own. On a CPU, each has an equal share of the
            memory. None: one on each visible GPU, or one on a CPU; with ``workers``: one.
        workers: how many probe at the same time, from one study: each on ``num_processes`` GPUs of its own, or on an
            equal part of a CPU's cores and memory, which is then what the recommendation is for. ``auto``: as many as
            the GPUs are enough for, one on a CPU. None: one, on all visible GPUs together.
        memory_budget: memory that each process may need, such as ``24GiB`` or in bytes. None: what others leave free.
        margin: share of the budget, 0 to 0.5, that is kept free while probing, so that the promise has room.
        effort: how long to look: ``quick``, ``normal`` or ``thorough``.
        trials: probes at the most. None: as the effort says.
        timeout: for the whole search, such as ``10m`` or in seconds. None: no limit.
        init: ``random`` needs no weights; ``pretrained`` loads them.
        seed: of the search and of the order of batches.
        storage: URL of an Optuna storage, the same for all workers of a study: a database as Optuna takes it,
            ``journal:///path`` for a journal on a file system, or ``grpc://host:port``. None: ``study.db`` in the
            output directory.
        study: name of the study in it. None: the output directory's name.
        resume: continue the study that is there, or join the processes that search it.
        output: directory of the bundle. None: ``autotune-<model>-<dataset>``, or ``autotune-<base>``.
        plan: trace steps before the first probe, to spare probes; otherwise all is found out by probing.
    """

    base: str | Path | None = None
    device: Literal["auto", "cuda", "cpu"] = "auto"
    num_processes: int | None = None
    workers: int | Auto | None = None
    margin: float = 0.05
    effort: str = "normal"
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
    """Arguments of every plan, for GPUs that need not be here.

    Args:
        dataset: hub id, or a local file or directory: .jsonl, .json, .csv or .parquet. None: rows of ``seq_len``
            tokens.
        gpu: name of a GPU, such as ``H100-80GB``, a size such as ``24GiB``, or ``cpu``; ``all``, which is for
            :func:`autotune.rent`, compares those of the catalogue. None: this machine's.
        num_machines: machines that the processes are in, equally. None: as few as have eight each.
        network: Gbit/s that each of several machines sends to the others in all, in one direction, such as 3200 for
            eight links of 400. None: not known, and communication is timed as if all GPUs were in one machine.
        seq_len: tokens of each row, where there is no dataset; the model needs no tokenizer then.
        memory_budget: memory that training may need on each GPU, such as ``24GiB`` or in bytes. None: all of it.
    """

    model: str = field(kw_only=False)
    trainer: str = DEFAULT
    gpu: str | None = None
    num_machines: int | None = None
    network: float | None = None
    seq_len: int | None = None


@dataclass(frozen=True, kw_only=True)
class PlanArguments(PlannedArguments):
    """Arguments of :func:`autotune.plan`.

    Args:
        num_processes: processes that train together, each on a GPU of its own. None: one, or one on each of this
            machine's GPUs.
        top: how many of the best candidates are shown, each of which was traced.
        explain: show how the estimate of one candidate came about: of the fastest that fits, or of the baseline where
            nothing does. Fix knobs to choose the candidate.
        output: directory of a bundle of the fastest that is predicted to fit, in which nothing is measured. None: no
            files.
        server_gpus: GPUs of ``num_processes`` on which a vLLM server generates; the others train. ``vllm=server`` is
            fixed then, and has to be fixed or allowed by the user. None: such a server has further GPUs.
    """

    num_processes: int | None = None
    top: int = 20
    explain: bool = False
    output: str | Path | None = None
    server_gpus: int | None = None


@dataclass(frozen=True, kw_only=True)
class RentArguments(PlannedArguments):
    """Arguments of :func:`autotune.rent`.

    Args:
        num_processes: GPUs that train together, in all; ``auto``: the fewest of 1, 2, 4, 8, 16, 32 and 64 with which
            something fits, of those that divide the global batch, and more as long as each of them then trains more
            tokens. None: one, or one on each of this machine's GPUs.
        prices: of an hour of one GPU, by its name; or a YAML or CSV file of them. None: nothing is said of cost.
    """

    gpu: str | None = ALL
    num_processes: int | Auto = 1
    prices: str | Path | Mapping[str, float] | None = None


@dataclass(frozen=True, kw_only=True)
class CheckArguments(Arguments):
    """Arguments of :func:`autotune.check`.

    Args:
        config: a YAML file of TRL's; or the words of the command that is about to run; or a configuration of one of
            TRL's trainers, such as a ``trl.DPOConfig``, for which ``model`` and ``dataset`` have to be given.
        trainer: TRL's trainer. None: as the command or the keys say.
        model: hub id, local directory, or ``config.json``; no weights are needed. None: as the configuration says.
        dataset: hub id, or a local file or directory. None: as the configuration says.
        peft_config: what is trained, for a configuration object; LoRA alone is understood.
        gpu: name of a GPU, such as ``H100-80GB``, a size such as ``24GiB``, or ``cpu``. None: this machine's device.
        memory_budget: memory that the training may need, such as ``24GiB`` or in bytes. None: all of the device.
        probe: run the worst micro-batches on this machine's device, instead of tracing them.
        timeout: time after which that run is ended, such as ``10m`` or in seconds; the answer is not known then. None:
            no limit.
        imports: import the modules of the configuration's own reward functions, in processes of their own.
        fits: say if it fits; otherwise the configuration is only read, and no device, model or dataset is needed.
        when_unsure: what an answer that is too close to call, or not known, counts as.
    """

    config: Any = field(kw_only=False)
    trainer: str | None = None
    model: str | None = None
    dataset: str | None = None
    peft_config: Any = None
    gpu: str | None = None
    memory_budget: str | int | None = None
    probe: bool = False
    timeout: str | float | None = None
    imports: bool = False
    fits: bool = True
    when_unsure: Literal["pass", "fail"] | None = None

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
        """What an answer that is too close to call, or unknown, counts as; None: neither."""
        return None if self.when_unsure is None else self.when_unsure == "pass"

    @property
    def timeout_seconds(self) -> float | None:
        """Time after which a real run is ended.

        Raises:
            InputError: it is no duration.
        """
        return parse_duration(self.timeout) if isinstance(self.timeout, str) else self.timeout

    @property
    def settings(self) -> dict[str, object]:
        """What was asked for, by name, without what is secret."""
        given = {name: value for name, value in vars(self).items() if name not in ("listener", "peft_config")}
        shown = {**hidden_values({**given, "config": self.file}), "command": hidden_words(self.command)}
        return {name: value for name, value in shown.items() if value not in (None, (), False)}


@dataclass(frozen=True, kw_only=True)
class DryRunArguments(Arguments):
    """Arguments of :func:`autotune.dry_run`.

    Args:
        command: its words, such as ``["accelerate", "launch", "train.py"]``.
        gpu: name of a GPU, such as ``H100-80GB``, or a size such as ``24GiB``. None: this machine's.
        num_processes: how many GPUs there are. None: one for each process that the command says it starts.
        steps: optimizer steps after which it ends.
        as_shuffled: leave rows in the order of the script; otherwise each batch has the largest of them.
        timeout: time after which it is ended, such as ``10m`` or in seconds. None: no limit.
    """

    command: Sequence[str] = field(kw_only=False)
    gpu: str | None = None
    num_processes: int | None = None
    steps: int = 3
    as_shuffled: bool = False
    timeout: str | float | None = None
