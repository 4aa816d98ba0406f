"""Settings made by hand for tests of rules that need no process: a workload, a machine, and both together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autotune.core.candidate import Choice
from autotune.core.machine import Hardware, Machine
from autotune.core.plan import TrainingPlan
from autotune.core.rows.images import ImageProfile
from autotune.core.rows.lengths import LengthDistribution
from autotune.core.rows.table import Table
from autotune.core.setting import Setting
from autotune.core.workload import (
    DatasetProfile,
    DatasetSource,
    ModelProfile,
    ModelSource,
    PackingCheck,
    Workload,
)
from autotune.inspection.space_file import default_file, load
from autotune.space import resolve
from autotune.trainers import find_trainer
from autotune.trainers.problem import TrainerProblem
from autotune.units import GIB

PACKAGES = {
    "torch": "2.13.0+cpu",
    "transformers": "5.23.0",
    "trl": "1.16.0",
    "accelerate": "1.15.0",
    "peft": "0.21.2",
    "datasets": "5.2.0",
    "optuna": "5.0.0",
    "bitsandbytes": "0.50.2",
}


def machine_with(machine: Machine, **hardware: Any) -> Machine:
    """Return a machine whose hardware differs in these figures."""
    return replace(machine, hardware=replace(machine.hardware, **hardware))


CPU = Machine(Hardware("cpu", "a CPU made by hand", 16 * GIB, cores=2), PACKAGES)
GPU = Machine(
    Hardware("cuda", "a GPU made by hand", 80 * GIB, compute_capability=(9, 0), cores=8, driver="580.1"),
    {**PACKAGES, "torch": "2.13.0", "liger-kernel": "0.8.5", "flash-attn": "2.9.0"},
)
TWO = Machine(Hardware("cpu", "a CPU made by hand", 8 * GIB, processes=2, cores=2), {**PACKAGES, "deepspeed": "0.19.8"})
"""A machine on which two processes train together."""
WITH_DEEPSPEED = replace(GPU, packages={**GPU.packages, "deepspeed": "0.19.8"})
EIGHT = machine_with(WITH_DEEPSPEED, processes=8)
"""A machine with eight GPUs."""
LENGTHS = {20: 50, 100: 40, 500: 9, 2000: 1}
"""100 rows, 11,500 tokens; 1024 tokens keep 91.5 % of them, and 99 % need 1885."""


PICTURED = 16
"""Tokens of each row of :func:`pictured_workload` up to the last one of its image."""


def separates(attention: str) -> PackingCheck:
    """Return a self-test that was passed."""
    return PackingCheck(attention, supported=True, separates=True, max_difference=1e-6, tolerance=1e-4)


def contaminates(attention: str) -> PackingCheck:
    """Return a self-test that was failed, as OPT's is."""
    reason = "logits differ by 6.1 (tolerance 0.0001)"
    return PackingCheck(attention, True, False, 6.1, 1e-4, reason)


def workload(
    *,
    trainer: str = "sft",
    lengths: Mapping[int, int] = LENGTHS,
    checks: tuple[PackingCheck, ...] = (separates("sdpa"), separates("eager")),
    **model: Any,
) -> Workload:
    """Return a workload that was never read from disk, with these fields of its model."""
    distribution = LengthDistribution(dict(lengths))
    modules = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    llama = ModelProfile(
        "/models/small", "llama", "LlamaForCausalLM", 1_000_000, 4, 512, 2048, modules, True, "model-fingerprint"
    )
    return Workload(
        trainer=trainer,
        model_source=ModelSource("/models/small"),
        dataset_source=DatasetSource("rows.jsonl", "json", "/data/rows.jsonl"),
        model=replace(llama, **model),
        dataset=DatasetProfile(
            "rows.jsonl", "text", ("text",), distribution, distribution.tokens, "/tokenized", "dataset-fingerprint"
        ),
        packing_checks={check.attention: check for check in checks},
    )


def pictured_workload(form: str = "messages") -> Workload:
    """Return a workload whose rows have an image each, in that format."""
    plain = workload()
    lengths = [tokens for tokens, count in plain.dataset.lengths.counts.items() for _ in range(count)]
    in_row, pixels, elements, ends = (LengthDistribution({size: len(lengths)}) for size in (1, 5400, 3072, PICTURED))
    rows = Table([lengths, lengths, lengths, [3072] * len(lengths)])
    images = ImageProfile(in_row, pixels, elements, ends, rows)
    return replace(plain, dataset=replace(plain.dataset, format=form, images=images))


def setting(
    *,
    machine: Machine = CPU,
    global_batch_size: int = 8,
    token_coverage: float = 0.99,
    allowed: frozenset[str] = frozenset(),
    of: Workload | None = None,
) -> Setting:
    """Return a setting on a machine made by hand."""
    return Setting(of or workload(), machine, global_batch_size, token_coverage, allowed)


def plan_with(here: Setting, choices: Mapping[str, Choice], trainer: str = "sft") -> TrainingPlan:
    """Return the plan of TRL's defaults with some other choices."""
    known = find_trainer(trainer)
    baseline = known.defaults(here)
    return known.plan(known.normal(baseline.but(**choices), here), here)


def problem(here: Setting, fixed: Mapping[str, Choice] | None = None, trainer: str = "sft") -> TrainerProblem:
    """Return the problem of the space that ships for a trainer."""
    known, here = find_trainer(trainer), replace(here, fixed=fixed or here.fixed)
    file = load(default_file(trainer), trainer, known.techniques)
    return TrainerProblem(known, resolve(file, known.techniques, here), here)
