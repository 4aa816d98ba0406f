"""The traced memory of a candidate, compared with training it on a null GPU."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from autotune.units import MIB
from tests.nullgpu.machine import NEEDS_CUDA_BUILD, NullMachine, ended

pytestmark = NEEDS_CUDA_BUILD

BOTH = """
    import json, sys, tempfile
    from pathlib import Path
    from benchmarks.nullgpu.cases import Case
    from benchmarks.nullgpu.record import Record
    from benchmarks.nullgpu.run import run
    if __name__ == "__main__":
        given = json.loads(sys.argv[1])
        for name in {"lengths", "prompts"} & given.keys():
            given[name] = {int(length): number for length, number in given[name].items()}
        case = Case(**given)
        with tempfile.TemporaryDirectory() as folder:
            record = Record(Path(folder, "record.jsonl"))
            run([case], record, {"measured": "now", "traced": "now"})
        print(json.dumps(record.rows[case.name]))
"""


def both(machine: NullMachine, lengths: Mapping[int, int], **given: object) -> tuple[Any, Any]:
    """Return the figures of a trace and of a run of a case; by default SFT of a Llama with 4 rows."""
    case = {"trainer": "sft", "model": "llama", "lengths": dict(lengths), "rows": 4, **given}
    found = machine.run(BOTH, json.dumps(case))
    return found["traced"], found["measured"]


@pytest.mark.nightly
def test_a_plan_counts_no_padding_that_the_loss_leaves_out(machine: NullMachine) -> None:
    # The loss counts 2,500 of the 4,000 tokens of the worst micro-batch.
    traced, measured = both(machine, {1000: 1, 500: 7})
    assert traced["allocated"] == pytest.approx(measured["allocated"], rel=0.005)
    assert traced["reserved"] == pytest.approx(measured["reserved"], rel=0.05)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("lengths", "rows", "choices"),
    [
        ({1010: 2, 800: 20, 120: 40}, 1, {}),
        ({1010: 2, 800: 20, 120: 40}, 2, {}),
        ({1010: 2, 800: 20, 120: 40}, 4, {"gradient_checkpointing": "off"}),
        ({1010: 2, 800: 20, 120: 40}, 2, {"liger": "on"}),
        ({800: 40, 120: 400}, 2, {"packing": "bfd"}),
    ],
)
def test_a_plan_has_the_micro_batch_with_the_most_tokens_that_the_loss_counts(
    machine: NullMachine, lengths: dict[int, int], rows: int, choices: dict[str, str]
) -> None:
    prompts = {1010: 1000, 800: 10, 120: 110}
    traced, measured = both(machine, lengths, rows=rows, choices=choices, prompts=prompts)
    assert traced["allocated"] == pytest.approx(measured["allocated"], rel=0.01)


@pytest.mark.nightly
@pytest.mark.parametrize("liger", ["off", "on"])
def test_arguments_of_the_call_that_flex_attention_is_compiled_for_stay_allocated(
    machine: NullMachine, liger: str
) -> None:
    # Without Liger, queries and keys are cast in the compiled call; with it, the backward pass needs what was given.
    choices = {"attention": "flex_attention", "gradient_checkpointing": "off", "liger": liger}
    traced, measured = both(machine, {2000: 8}, choices=choices)
    # Where no cache of Inductor has the kernels, fewer of these arguments stay (0.4 % of the memory), and timing the
    # ways to compile them leaves 200 MiB in the allocator's cache.
    assert 0.999 * measured["allocated"] <= traced["allocated"] <= 1.005 * measured["allocated"]
    assert measured["reserved"] - 201 * MIB <= traced["reserved"] <= 1.01 * measured["reserved"]


@pytest.mark.nightly
def test_arguments_of_all_calls_that_flex_attention_is_compiled_for_stay_allocated(machine: NullMachine) -> None:
    # It is compiled for the worst micro-batch, for 1,500 tokens with padding, and for 2,000 without.
    choices = {"attention": "flex_attention", "gradient_checkpointing": "off"}
    traced, measured = both(machine, {2000: 6, 1500: 6, 1000: 4}, choices=choices)
    # The most that can be kept is promised.
    assert measured["allocated"] <= traced["allocated"] <= 1.01 * measured["allocated"]


@pytest.mark.nightly
def test_flex_attention_is_compiled_for_completions_of_equal_length_too(machine: NullMachine) -> None:
    # A generation batch is one prompt, without padding. Its rows are padded only where their completions differ.
    choices = {"attention": "flex_attention", "gradient_checkpointing": "off"}
    traced, measured = both(machine, {2000: 4, 1500: 4}, trainer="grpo", rows=8, choices=choices)
    assert measured["allocated"] <= traced["allocated"] <= 1.02 * measured["allocated"]


@pytest.mark.nightly
def test_fsdp2_clips_gradients_that_it_offloads(machine: NullMachine) -> None:
    traced, measured = both(machine, {500: 8}, choices={"sharding": "fsdp2", "offload": "both"}, processes=2)
    assert traced["allocated"] == pytest.approx(measured["allocated"], rel=0.005)


PICTURED = """
    import json, sys
    from pathlib import Path
    from autotune.app.planned import planned_machine
    from autotune.app.workload import WorkloadReader
    from autotune.core.events import ignore
    from autotune.inspection.dataset import dataset_source
    from autotune.inspection.model import model_source
    from autotune.probing import JobServer, probe
    from autotune.probing.tracing import ServerTracer
    from benchmarks.gpu.prepared import prepared
    from benchmarks.nullgpu.cases import Case
    from benchmarks.nullgpu.run import asked_of
    from tests.step.test_images_tokenised import of_pairs, rows_of
    from tests.vision import picture, write_small_vision_model
    if __name__ == "__main__":
        folder, gpu, trainer = Path(sys.argv[1]), "H100-80GB", sys.argv[3]
        wide = {"hidden_size": 512, "intermediate_size": 2048, "head_dim": 64, "num_attention_heads": 8}
        model = write_small_vision_model(folder / "model", sys.argv[2], weights=False, layers=6, language=wide)
        pictures = [[picture(90 + number, 60)] * (number % 4) for number in range(8)]
        (of_pairs if trainer == "dpo" else rows_of)(pictures).to_parquet(folder / "rows.parquet")
        with ServerTracer(1, ignore) as tracer:
            reader = WorkloadReader(tracer.server, folder, ignore)
            source = dataset_source(str(folder / "rows.parquet"))
            of = reader.read(trainer, model_source(str(model), "random"), source)
            case = Case(trainer, "of images", {of.longest: 8}, 4, json.loads(sys.argv[4]), gpu)
            asked = asked_of(case, prepared(case.scenario, of, planned_machine(gpu, 1)))
            traced = max(reply.own.replays[0].allocated_bytes for reply in tracer(asked.traces))
        with JobServer("cuda", threads=1, processes=1, jobs_module="benchmarks.nullgpu.preloaded") as server:
            print(json.dumps([traced, probe(server, asked.probe, folder / "probe", 400.0).peak_bytes]))
"""


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("family", "trainer", "choices"),
    [
        ("gemma3", "sft", {"gradient_checkpointing": "off"}),
        ("llava_next", "sft", {}),
        ("gemma3", "dpo", {"lora": "r16", "precision": "bfloat16"}),
    ],
)
def test_rows_with_images_allocate_what_is_traced(
    machine: NullMachine, tmp_path: Path, family: str, trainer: str, choices: Mapping[str, str]
) -> None:
    # Idefics 3 leaves out images of which all numbers are zero, as they are on a null GPU.
    traced, measured = machine.run(PICTURED, str(tmp_path), family, trainer, json.dumps(choices))
    assert traced == pytest.approx(measured, rel=0.005)


LOADED = """
    import json, sys, torch
    from pathlib import Path
    from tests.small import write_small_model
    from trl.trainer.utils import create_model_from_path
    write_small_model(Path(sys.argv[1]), hidden_size=512, intermediate_size=1536, num_hidden_layers=4)
    how = json.loads(sys.argv[2])
    kept = [create_model_from_path(sys.argv[1], dtype="float32", **how).to("cuda") for _ in range(2)]
    print(json.dumps([torch.cuda.memory_allocated(), torch.cuda.memory_reserved()]))
"""
BUILT = """
    import json, sys
    from transformers import AutoConfig
    from autotune.step.models.loading import virtual_model
    from autotune.virtual import trace
    from autotune.virtual.recording.replay import replay
    how = {"dtype": "float32", "attn_implementation": "sdpa", **json.loads(sys.argv[2])}
    config, kept = AutoConfig.from_pretrained(sys.argv[1]), []
    def build(device):
        kept.extend(virtual_model(config, how, None, device) for _ in range(2))
    found = replay(trace(build))
    print(json.dumps([found.peak_allocated_bytes, found.peak_reserved_bytes]))
"""


@pytest.mark.nightly
@pytest.mark.parametrize("how", [{}, {"device_map": {"": 0}}, {"device_map": None}])
def test_two_models_that_are_loaded_reserve_what_is_traced(
    machine: NullMachine, tmp_path: Path, how: Mapping[str, Any]
) -> None:
    # Where layers are spread over devices by their free memory, a number is allocated on each device before. Threads
    # that read weights would allocate them in an order of chance.
    model = str(tmp_path / "model")
    loaded = machine.run(LOADED, model, json.dumps(how), HF_DEACTIVATE_ASYNC_LOAD="1")
    variables = machine.environment()
    del variables["NULLGPU_DEVICE"]
    with machine.start(BUILT, model, json.dumps(how), variables=variables) as process:
        assert ended(process) == loaded


# Blocks of rising sizes fit into none that was freed before, and some of those keep a small tensor.
RISING = """
    import json, sys, torch
    def rise(device):
        kept = []
        for number in range(1, 9):
            freed = torch.empty(number * 30 << 20, dtype=torch.uint8, device=device)
            kept.append(torch.empty(3 << 20, dtype=torch.uint8, device=device))
            del freed
            if number % 3 == 0:
                kept.append(torch.empty(25 << 20, dtype=torch.uint8, device=device))
"""
RISING_FOR_REAL = (
    RISING
    + """
    found, total = [], torch.cuda.mem_get_info()[1]
    for limit in (total, int(sys.argv[1])):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.set_per_process_memory_fraction(min(1.0, (limit + 1) / total))
        rise("cuda")
        found.append([torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()])
    print(json.dumps(found))
"""
)
RISING_IN_A_TRACE = (
    RISING
    + """
    from autotune.virtual import trace
    from autotune.virtual.recording.replay import replay, short_of_memory
    traced = trace(rise)
    free = replay(traced)
    short = short_of_memory(free, lambda limit_bytes: replay(traced, limit_bytes=limit_bytes))
    print(json.dumps([[each.peak_allocated_bytes, each.peak_reserved_bytes] for each in (free, short)]))
"""
)


def test_pytorchs_allocator_gets_by_with_what_a_device_needs_that_is_short_of_memory(machine: NullMachine) -> None:
    variables = machine.environment()
    del variables["NULLGPU_DEVICE"]
    with machine.start(RISING_IN_A_TRACE, variables=variables) as process:
        traced = ended(process)
    free, short = traced
    assert short[1] < 0.6 * free[1]
    assert machine.run(RISING_FOR_REAL, str(short[1])) == traced


# Both sides of the comparison run this on a list of head sizes, masks, and whether there are gradients.
ATTENDED = """
    import json, sys
    from itertools import product
    import torch
    from torch.nn import functional
    BATCH, HEADS, SHARED, TOKENS = 8, 8, 2, 512
    def attend(device, head, masked, trained):
        q, k, v = (
            torch.empty(BATCH, TOKENS, heads, head, dtype=torch.bfloat16, device=device)
            .transpose(1, 2).requires_grad_(trained)
            for heads in (HEADS, SHARED, SHARED)
        )
        mask = torch.zeros(BATCH, 1, TOKENS, TOKENS, dtype=q.dtype, device=device) if masked else None
        out = functional.scaled_dot_product_attention(q, k, v, mask, is_causal=not masked, enable_gqa=True)
        if trained:
            out.backward(torch.empty_like(out))
    CASES = list(product((64, 192, 256), (False, True), (False, True)))
"""
ATTENDED_FOR_REAL = (
    ATTENDED
    + """
    from torch.utils._python_dispatch import TorchDispatchMode
    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(str(func))
            return func(*args, **(kwargs or {}))
    found = []
    for case in CASES:
        names = []
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with Seen():
            attend("cuda", *case)
        found.append([[name for name in names if "dot_product" in name], torch.cuda.max_memory_allocated() - before])
    print(json.dumps(found))
"""
)
ATTENDED_IN_A_TRACE = (
    ATTENDED
    + """
    from autotune.virtual import trace
    from autotune.virtual.recording.replay import replay
    found, capability = [], tuple(json.loads(sys.argv[1]))
    for case in CASES:
        traced = trace(lambda device: attend(device, *case), capability=capability)
        names = [operator.name for operator in traced.operators if "dot_product" in operator.name]
        found.append([names, replay(traced, capability=capability).peak_allocated_bytes])
    print(json.dumps(found))
"""
)


@pytest.mark.parametrize(
    ("gpu", "capability"), [("H100-80GB", [9, 0]), pytest.param("B200", [10, 0], marks=pytest.mark.nightly)]
)
def test_attention_runs_the_kernels_and_allocates_the_bytes_that_are_traced(
    machine: NullMachine, gpu: str, capability: list[int]
) -> None:
    variables = machine.environment()
    del variables["NULLGPU_DEVICE"]
    with machine.start(ATTENDED_IN_A_TRACE, json.dumps(capability), variables=variables) as process:
        traced = ended(process)
    measured = machine.run(ATTENDED_FOR_REAL, gpu=gpu)
    # Where no fused operator runs, products take cuBLAS's workspace.
    fused = [case for case in zip(traced, measured, strict=True) if case[1][0]]
    assert [each[0] for each in traced] == [each[0] for each in measured]
    assert [each[0] for each in fused] == [each[1] for each in fused]
