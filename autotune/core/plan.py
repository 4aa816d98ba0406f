"""The training plan: everything needed to build and launch a trainer, by the names of TRL's arguments."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil

from autotune.core.files.nested import lookup, mapping

NO_EVALUATION = "no"
"""``eval_strategy`` of a training without evaluation, the default of ``transformers.TrainingArguments``."""
SAVING, NO_CHECKPOINTS = "save_strategy", "no"
"""The field of ``transformers.TrainingArguments`` for when to save checkpoints, and its value for never."""

EVALUATED_ONCE = "eval_on_start"
"""The field of ``transformers.TrainingArguments`` by which a training evaluates before its first step; in a plan, it
evaluates only there."""
BEST_METRIC = "metric_for_best_model"
"""The field of ``transformers.TrainingArguments`` with the metric of evaluation that selects the best checkpoint."""

PASS_ROWS = "precompute_ref_batch_size"
"""TRL's field for the batch size of the reference model's pass over the dataset; null: that of a micro-batch."""


@dataclass(frozen=True)
class Launch:
    """The launch of a training's processes; the trainer's arguments select the engine that shards.

    Attributes:
        processes: the world size, over all machines.
        machines: number of machines, with equally many processes on each.
    """

    processes: int = 1
    machines: int = 1

    @property
    def per_machine(self) -> int:
        """Processes on each machine."""
        return -(-self.processes // self.machines)


EPOCHS = "num_train_epochs"
"""The field of ``transformers.TrainingArguments`` with the number of epochs."""
STEPS = "max_steps"
"""Its field with the number of optimizer steps, which counts instead of that of epochs if it is positive."""
_EPOCHS = 3.0
"""The default of :data:`EPOCHS`, which TRL's configurations keep."""
SHARING_SIZES = ("cp_size", "sp_size", "tp_size")
"""Sizes of accelerate's ``ParallelismConfig`` whose ranks train on the same micro-batch: each has a part of its tokens,
or of every layer."""
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""The variables with the settings of PyTorch's caching allocator, which reads the first of them that is set
(c10/cuda/CUDAAllocatorConfig.h). A plan sets both, since a shell or an image may have set either."""
MEASURED_VARIABLES = (
    "CUBLASLT_WORKSPACE_SIZE", "CUBLAS_WORKSPACE_CONFIG", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING",
    "CUDA_MODULE_LOADING", "NCCL_BUFFSIZE", "NCCL_MAX_NCHANNELS", "NCCL_MIN_NCHANNELS", "NCCL_NVLS_ENABLE",
    "NVIDIA_TF32_OVERRIDE", "PYTORCH_NO_CUDA_MEMORY_CACHING",
)  # fmt: skip
"""Further variables that change memory or speed on a GPU, and that are read when it is first used."""
EXPANDABLE_SEGMENTS = "expandable_segments:True"
"""The setting of the allocator by which its segments can grow."""
_HOST_SETTINGS = "pinned_"
"""Prefix of the settings of pinned host memory."""


def allocator_settings(env: Mapping[str, str]) -> str:
    """Return the settings of PyTorch's caching allocator in an environment; empty without any."""
    return next((env[name] for name in ALLOCATOR_VARIABLES if name in env), "")


def unsimulated_settings(variable: str) -> tuple[str, ...]:
    """Return the allocator's settings that change device memory and that traces do not simulate."""
    settings = (f"{name}:{value}" for name, value in _settings(variable).items() if name != "expandable_segments")
    return tuple(each for each in settings if each != "backend:native" and not each.startswith(_HOST_SETTINGS))


def _settings(variable: str) -> dict[str, str]:
    """Return the settings in the allocator's variable, as PyTorch's ``ConfigTokenizer`` parses it.

    White space is ignored, a list is in brackets, and the last value of a name counts (c10/core/AllocatorConfig.h).
    """
    return dict(re.findall(r"([^:,]+):(\[[^]]*\]|[^,]*)", "".join(variable.split())))


@dataclass(frozen=True)
class Completions:
    """The assumed lengths of generated completions, in tokens.

    Attributes:
        mean: mean length of a completion.
        widest: mean length of the longest completion of a generation batch.
    """

    mean: float
    widest: float


@dataclass(frozen=True)
class TrainingPlan:
    """The arguments of one training, the same for its probe, its trace and its bundle.

    Attributes:
        trainer: the trainer's name, such as ``dpo``.
        args: fields of the trainer's configuration (``trl.DPOConfig``); ``deepspeed`` and ``fsdp_config`` as mappings.
        model: fields of ``trl.ModelConfig``: ``dtype``, ``attn_implementation``, ``use_peft``, ``load_in_4bit``, ….
        truncate_to: tokens to which every row is cut before training, or None; needed if the trainer refuses
            ``max_length`` (padding-free without packing).
        launch: the launch of its processes.
        env: environment variables of the training process.
        peft: a configuration in PEFT's own JSON; empty if ``model`` configures the adapter.
        rewards: reward functions, as in TRL's ``reward_funcs``; empty for a trainer without them.
        completions: lengths of typical completions; None for a trainer that generates none.
    """

    trainer: str
    args: Mapping[str, object] = field(default_factory=dict)
    model: Mapping[str, object] = field(default_factory=dict)
    truncate_to: int | None = None
    launch: Launch = field(default_factory=Launch)
    env: Mapping[str, str] = field(default_factory=dict)
    peft: Mapping[str, object] = field(default_factory=dict)
    rewards: tuple[str, ...] = ()
    completions: Completions | None = None

    def at(self, path: str) -> tuple[object, ...]:
        """Return a tuple of the entry at a path such as ``args.FIELD``, or an empty tuple if there is none."""
        head, *names = path.split(".")
        return lookup(getattr(self, head), names)

    def entry(self, path: str) -> object:
        """Return the entry at a path such as ``args.FIELD``, or None if there is none."""
        return next(iter(self.at(path)), None)

    def count(self, field: str) -> int:
        """Return an argument that every plan of the trainer sets to a number."""
        return int(str(self.args[field]))

    def number(self, field: str) -> int | None:
        """Return an argument if it is a number, else None."""
        value = self.args.get(field)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    @property
    def rows(self) -> int:
        """Rows of a micro-batch."""
        return self.count("per_device_train_batch_size")

    @property
    def micro_batches(self) -> int:
        """Micro-batches of an optimizer step in one process; transformers' default is one."""
        return self.number("gradient_accumulation_steps") or 1

    @property
    def pad_multiple(self) -> int:
        """The length of a micro-batch is padded to a multiple of this; 1 without rounding."""
        return self.number("pad_to_multiple_of") or 1

    @property
    def cut_to(self) -> int | None:
        """Tokens to which sequences are cut, before training or by the trainer; None: they are not cut."""
        return self.truncate_to or self.number("max_length")

    @property
    def steps_per_generation(self) -> int:
        """Micro-batches of a generation batch; TRL's default is those of an optimizer step."""
        return self.number("steps_per_generation") or self.micro_batches

    @property
    def micro_batches_per_generation(self) -> int:
        """Number of micro-batches that train on one generation batch, all ``num_iterations`` included."""
        return self.steps_per_generation * (self.number("num_iterations") or 1)

    @property
    def generates_within_steps(self) -> bool:
        """Whether completions are also generated between the micro-batches of a step, when gradients exist."""
        return self.micro_batches_per_generation % self.micro_batches != 0

    @property
    def epochs(self) -> float:
        """Number of epochs; ``max_steps`` is ignored."""
        epochs = float(str(self.args.get(EPOCHS) or _EPOCHS))
        return epochs if epochs > 0 else _EPOCHS

    def epochs_of(self, rows: int) -> float:
        """Return the number of epochs on so many rows, packed if the trainer packs them; ``max_steps`` may end it."""
        steps = self.number(STEPS) or 0
        return steps / self.steps_of_epoch(rows) if steps > 0 else self.epochs

    def pass_share(self, rows: int) -> float:
        """Return the micro-batches of the reference model's pass over so many rows for each one of training."""
        return self.rows / (self.number(PASS_ROWS) or self.rows) / self.epochs_of(rows)

    def steps_of_epoch(self, rows: int, *, drops_last: bool = False) -> int:
        """Return the optimizer steps of an epoch; the last one may have fewer micro-batches, or smaller ones.

        Args:
            rows, drops_last: as for :meth:`rows_loaded`.
        """
        at_once = self.rows * self.data_ranks * self.micro_batches
        return max(1, ceil(self.rows_loaded(rows, drops_last=drops_last) / at_once))

    def rows_loaded(self, rows: int, *, drops_last: bool) -> int:
        """Return how many of the rows an epoch trains on.

        Args:
            rows: rows of the dataset, packed if the trainer packs them.
            drops_last: whether rows that do not fill a micro-batch of every process are dropped
                (``dataloader_drop_last``).
        """
        return rows - rows % (self.rows * self.data_ranks) if drops_last else rows

    def within_epoch(self, rows: int) -> TrainingPlan:
        """Return the plan with at most the rows and micro-batches that an epoch of so many rows has.

        accelerate repeats rows until each of several processes has a whole micro-batch.
        """
        at_once = min(self.rows, rows) if self.data_ranks == 1 else self.rows
        micro_batches = min(self.micro_batches, ceil(rows / (at_once * self.data_ranks)))
        if (at_once, micro_batches) == (self.rows, self.micro_batches):
            return self
        sizes = {"per_device_train_batch_size": at_once, "gradient_accumulation_steps": micro_batches}
        return replace(self, args={**self.args, **sizes})

    @property
    def in_group(self) -> bool:
        """Whether the training has a process group: with several processes, or with DeepSpeed."""
        return self.launch.processes > 1 or bool(self.args.get("deepspeed"))

    @property
    def expandable_segments(self) -> bool:
        """Whether the segments of PyTorch's caching allocator can grow."""
        return _settings(allocator_settings(self.env)).get("expandable_segments") == "True"

    @property
    def empties_cache(self) -> bool:
        """Whether the allocator's cache is emptied before the backward pass of every micro-batch.

        If it is emptied only in every n-th step, the peak of the steps between stays.
        """
        return self.args.get("torch_empty_cache_steps") == 1

    @property
    def parallelism(self) -> Mapping[str, object]:
        """The fields of accelerate's ``ParallelismConfig`` that the plan sets."""
        return mapping(self.args.get("parallelism_config"))

    @property
    def data_ranks(self) -> int:
        """Number of processes, or groups of processes that share rows, with micro-batches of their own."""
        ranks = self.launch.processes
        for name in SHARING_SIZES:
            size = self.parallelism.get(name)
            ranks //= size if isinstance(size, int) else 1
        return max(1, ranks)

    @property
    def evaluates(self) -> bool:
        """Whether the training evaluates."""
        return self.args.get("eval_strategy", NO_EVALUATION) != NO_EVALUATION

    @property
    def evaluates_once(self) -> bool:
        """Whether it does so before the first step alone, where the optimizer has no state."""
        return self.evaluates and bool(self.args.get(EVALUATED_ONCE))

    @property
    def saves_checkpoints(self) -> bool:
        """Whether checkpoints are saved; without them, TRL's scripts still save the model after training."""
        return self.args.get(SAVING) != NO_CHECKPOINTS

    @property
    def fingerprint(self) -> str:
        """Hash of everything in the plan that changes the training."""
        parts: list[object] = [self.trainer, dict(self.args), dict(self.model), self.truncate_to]
        if self.launch != Launch():
            parts.append([self.launch.processes, self.launch.machines])
        if self.env or self.peft:
            parts.append({"env": dict(self.env), "peft": dict(self.peft)})
        document = json.dumps(parts, sort_keys=True)
        return hashlib.sha256(document.encode()).hexdigest()[:16]
