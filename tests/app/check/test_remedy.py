"""A proposed change has the planned effect in the user's file, and frees weights if that is necessary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.app.check.remedy import Changed, Remedies
from autotune.core.configuration import Configuration
from autotune.core.documents.estimate import MemoryEstimate
from autotune.core.documents.verdict import Outcome
from autotune.core.machine import Machine
from autotune.core.plan import TrainingPlan
from autotune.inspection.space_file import default_file, load
from autotune.inspection.yaml_edit import Edit, apply_edits
from autotune.inspection.yaml_file import read_yaml
from autotune.planning.single import PlanTracer, SizedPlan
from autotune.techniques.sharding import ENGINE_FIELDS
from autotune.trainers import find_trainer
from autotune.units import GIB
from autotune.userconfig.candidate import as_candidate
from autotune.userconfig.engine import engine_args
from autotune.userconfig.keys import writable
from autotune.userconfig.launch import Launching, read_document
from tests.app.check.conftest import Checked, Write
from tests.settings import EIGHT, GPU, TWO, machine_with, plan_with, setting
from tests.small import write_small_model
from tests.step.plans import needs_deepspeed

WEIGHTS = 100 * GIB


class Weighed(PlanTracer):
    """Tells a need that is nothing but weights, so that only what takes them away helps."""

    def __init__(self) -> None:
        """Trace nothing."""

    def memory(self, sized: SizedPlan, *, whole: bool = False, varied: bool = False) -> MemoryEstimate:
        """Return what the plan needs."""
        needed, seconds = self.needed(sized.plan)
        return MemoryEstimate(needed, None, 0, {"parameter": needed}, 0, seconds, 0.0)

    def needed(self, plan: TrainingPlan) -> tuple[int, float | None]:
        """Return what a process has of the weights, and a time unless they are offloaded."""
        held = plan.args
        zero, fsdp = (
            _mapping(_mapping(held.get("deepspeed")).get("zero_optimization")),
            _mapping(held.get("fsdp_config")),
        )
        needed = WEIGHTS
        if zero.get("stage") == 3 or held.get("fsdp"):
            needed //= 8
        offloaded = bool(zero.get("offload_param") or fsdp.get("cpu_offload"))
        needed //= 4 if offloaded else 1
        needed //= 2 if fsdp.get("reshard_after_forward", True) else 1
        needed //= 2 if held.get("precompute_ref_log_probs") else 1
        return needed, None if offloaded else 1.0


@dataclass(frozen=True)
class File:
    """A file on its way through a check, with the document for accelerate that it is started by."""

    path: Path
    document: Mapping[str, object]
    machine: Machine = EIGHT
    trainer: str = "sft"
    model: Mapping[str, object] = field(default_factory=dict)

    @property
    def values(self) -> Mapping[str, Any]:
        return read_yaml(self.path).values

    @property
    def config(self) -> Configuration:
        return Configuration("", self.values, {})

    @property
    def plan(self) -> TrainingPlan:
        here = setting(machine=self.machine, global_batch_size=64)
        plain = plan_with(setting(machine=GPU), {}, self.trainer)
        engine = engine_args(self.document, self.config, self.machine.hardware.processes)
        own = {name: value for name, value in self.values.items() if name not in ENGINE_FIELDS}
        args, model = {**plain.args, **own, **engine}, {**plain.model, **self.model}
        return replace(plain, args=args, model=model, launch=here.machine.hardware.launch)

    @property
    def remedies(self) -> Remedies:
        here, trainer = setting(machine=self.machine, global_batch_size=64), find_trainer(self.trainer)
        here = replace(here, workload=replace(here.workload, trainer=self.trainer), checked=self.plan)
        space = load(default_file(self.trainer), self.trainer, trainer.techniques)
        started = Launching(self.machine.hardware.processes, document=self.document, is_observed=True)
        own = writable(self.values, self.config, started, on_cpu=self.machine.hardware.kind == "cpu")
        known = as_candidate(self.plan, trainer, here, space)
        return Remedies(self.plan, known, trainer, here, space, Weighed(), own)

    @property
    def changes(self) -> list[Mapping[str, object]]:
        """What the first change may be, entries of a plan by their path."""
        remedies = self.remedies
        return [entries for _, _, entries in remedies._changes(remedies.nearest.candidate)]

    @property
    def frees_weights(self) -> bool:
        """Whether there is a change where no process can hold all weights, however much there is otherwise."""
        return self.remedies.smallest(WEIGHTS, 0, heavy=True) is not None

    def with_change(self, changed: Changed) -> File:
        edits = [Edit(path, {path[-1]: value} if value is not None else None) for path, value in changed.keys.items()]
        self.path.write_text(apply_edits(read_yaml(self.path), edits), encoding="utf-8")
        return self


@pytest.fixture
def file(tmp_path: Path) -> Any:
    def written(own: Mapping[str, object], document: Mapping[str, object] | str = "multi_gpu", **more: Any) -> File:
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump({"max_length": 1024, **own}), encoding="utf-8")
        return File(path, read_document(document) if isinstance(document, str) else document, **more)

    return written


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


def engine(plan: TrainingPlan) -> dict[str, object]:
    return {name: plan.args[name] for name in ENGINE_FIELDS if name in plan.args}


def test_sharding_is_found_where_one_process_cannot_hold_the_weights(file: Any) -> None:
    mine = file({})
    changed = mine.remedies.smallest(20 * GIB, 0, heavy=True)
    assert changed is not None
    assert changed.memory.device_bytes <= 20 * GIB
    # Offloading needs less, and its speed is not known.
    assert changed.memory.step_seconds is not None
    after = mine.with_change(changed)
    # The file is read again as what was traced.
    assert Weighed().needed(after.plan)[0] == changed.memory.device_bytes
    assert engine(after.plan)


@pytest.mark.parametrize("name", ["fsdp2", "zero1", "zero2", "zero3"])
def test_an_engine_of_accelerate_s_document_is_not_changed_in_the_trainer_s_file(name: str, file: Any) -> None:
    mine = file({}, name)
    assert mine.remedies.smallest(WEIGHTS, 0, heavy=True) is None
    every = mine.changes
    assert every
    assert not [path for entries in every for path in entries if path.split(".")[1] in ENGINE_FIELDS]


def test_groups_of_processes_are_never_written_into_the_trainer_s_file(file: Any) -> None:
    long = {"fsdp": True, "fsdp_config": {"version": 2}, "pad_to_multiple_of": 64}
    sixteen = machine_with(EIGHT, processes=16, machines=2)
    mine = file(long, machine=sixteen)
    every = mine.changes
    assert every
    assert not [path for entries in every for path in entries if "parallelism_config" in path]
    # Nor is an engine that would not go with the groups of the document.
    groups = {**read_document("multi_gpu"), "parallelism_config": {"parallelism_config_dp_replicate_size": 8}}
    assert not file({}, groups).frees_weights


def test_a_document_in_the_file_keeps_what_it_says_beside_the_change(file: Any) -> None:
    own = {
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 7},
        "train_batch_size": "auto",
        "wall_clock_breakdown": True,
    }
    mine = file({"deepspeed": own})
    changed = mine.remedies.smallest(20 * GIB, 0, heavy=True)
    assert changed is not None
    assert changed.keys["deepspeed", "zero_optimization", "stage"] == 3
    after = mine.with_change(changed).plan.args["deepspeed"]
    assert after["zero_optimization"]["stage"] == 3
    assert after["zero_optimization"]["reduce_bucket_size"] == 7
    assert after["wall_clock_breakdown"] is True


def test_a_document_that_is_named_is_not_replaced_by_another(file: Any, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}}', encoding="utf-8")
    mine = file({"deepspeed": str(tmp_path / "ds.json")})
    assert not mine.frees_weights


def test_keys_of_fsdp_are_written_by_the_spelling_of_the_file(file: Any) -> None:
    own = {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_reshard_after_forward": False}
    mine = file({"fsdp": True, "fsdp_config": own})
    changed = mine.remedies.smallest(10 * GIB, 0)
    assert changed is not None
    assert changed.keys == {("fsdp_config", "fsdp_reshard_after_forward"): True}
    assert mine.with_change(changed).plan.args["fsdp_config"]["reshard_after_forward"] is True


@pytest.mark.parametrize(
    ("values", "path", "key"),
    [
        ({"activation_checkpointing": False}, "args.gradient_checkpointing", ("activation_checkpointing",)),
        ({"model_init_kwargs": {"dtype": "float32"}}, "model.dtype", ("model_init_kwargs", "dtype")),
        # TRL passes its own dtype as well, and transformers takes that.
        ({"model_init_kwargs": {"torch_dtype": "float32"}}, "model.dtype", ("dtype",)),
    ],
)
def test_a_key_is_written_under_the_name_that_counts_in_the_file(
    values: dict[str, Any], path: str, key: tuple[str, ...]
) -> None:
    own = writable(values, Configuration("", values, {}), Launching(), on_cpu=False)
    assert own.keys({path: "new"}) == {key: "new"}


def test_deepspeed_is_not_written_into_a_file_for_a_cpu(file: Any) -> None:
    mine = file({}, machine=machine_with(TWO, processes=8))
    every = mine.changes
    assert any("args.fsdp" in entries for entries in every)
    assert not [path for entries in every for path in entries if path.startswith("args.deepspeed")]


def test_adapters_over_weights_of_32_bits_free_half_of_them_in_one_process(file: Any) -> None:
    alone: dict[str, Any] = {"document": {}, "machine": GPU}
    assert file({}, **alone, model={"use_peft": True}).frees_weights
    assert not file({}, **alone, model={"use_peft": True, "dtype": "bfloat16"}).frees_weights


def test_one_process_frees_no_weights_unless_it_has_a_copy_of_them(file: Any) -> None:
    alone: dict[str, Any] = {"document": {}, "machine": GPU}
    assert not file({}, **alone).frees_weights
    mine = file({}, **alone, trainer="dpo")
    changed = mine.remedies.smallest(60 * GIB, 0, heavy=True)
    assert changed is not None
    assert changed.keys == {("precompute_ref_log_probs",): True}


def test_nothing_is_proposed_that_a_synchronised_reference_does_not_go_with(file: Any) -> None:
    def proposed(own: Mapping[str, object]) -> set[str]:
        return {path for entries in file(own, trainer="dpo").changes for path, value in entries.items() if value == 3}

    stage, precomputed = "args.deepspeed.zero_optimization.stage", ("precompute_ref_log_probs",)
    assert proposed({}) == {stage}
    assert proposed({"sync_ref_model": True}) == set()
    alone: dict[str, Any] = {"document": {}, "machine": GPU, "trainer": "dpo"}
    assert file({}, **alone).remedies.smallest(60 * GIB, 0, heavy=True).keys == {precomputed: True}
    assert file({"sync_ref_model": True}, **alone).remedies.smallest(60 * GIB, 0, heavy=True) is None


@pytest.mark.slow
@pytest.mark.nightly
@needs_deepspeed
def test_what_is_proposed_to_several_processes_fits_when_the_changed_file_is_checked(
    write: Write, checked: Checked, tmp_path: Path
) -> None:
    # Weights are most of what such a process holds, the context of its GPU included.
    sizes: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 12}
    large = write_small_model(tmp_path / "large", weights=False, **sizes)
    body = "accelerate_config: multi_gpu\nnum_processes: 16\nmax_length: 64\nper_device_train_batch_size: 1\n"
    path = write("sft", body)
    asked: dict[str, Any] = {"config": str(path), "trainer": "sft", "gpu": "H100-80GB", "model": str(large)}
    need = checked(**asked).need
    assert need is not None
    assert need.memory is not None
    # What no process can hold whole.
    budget_bytes = need.memory.context_bytes + round(0.9 * need.memory.breakdown["parameter"])
    verdict = checked(**asked, memory_budget=budget_bytes)
    assert (verdict.outcome, verdict.remedy is not None) == (Outcome.DOES_NOT_FIT, True), verdict.headline
    assert verdict.remedy is not None
    assert {"deepspeed", "fsdp"} & verdict.remedy.keys.keys()
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | dict(verdict.remedy.keys)), encoding="utf-8")
    after = checked(**asked, memory_budget=budget_bytes)
    assert after.outcome is Outcome.FITS, after.headline
    assert after.need is not None
    assert after.need.bytes == verdict.remedy.bytes
