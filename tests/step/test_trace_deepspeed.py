"""The native operators of DeepSpeed that are traced, and those that are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune.core.jobs.traced import TraceReply
from autotune.errors import AutotuneError
from autotune.probing import JobServer, trace
from autotune.probing.jobs import build
from tests.small import write_small_model
from tests.step.plans import needs_deepspeed, zero
from tests.step.test_trace_ranks import INNER, LAYERS, PARAMETERS, WIDTH, a_plan, a_request, at_rest, in_step

pytestmark = [pytest.mark.slow, needs_deepspeed]
FUSED = "adamw_torch_fused"
Traced = Callable[[dict[str, Any]], TraceReply]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes: dict[str, Any] = {"num_hidden_layers": LAYERS, "hidden_size": WIDTH, "intermediate_size": INNER}
    return write_small_model(tmp_path_factory.mktemp("deepspeed") / "model", weights=False, **sizes)


@pytest.fixture(scope="module")
def traced(traced_once: Any, model: Path) -> Traced:
    """A function that traces a plan with some arguments, once."""
    return lambda args: traced_once(a_request(a_plan(args), model))


def with_deepspeeds_adam(stage: int) -> dict[str, Any]:
    """Return the arguments of ZeRO with the optimizer that transformers' guide names in DeepSpeed's document."""
    engine = zero(stage)
    params = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
    return {"deepspeed": {**engine["deepspeed"], "optimizer": {"type": "AdamW", "params": params}}}


@pytest.mark.nightly
@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeeds_own_adam_holds_and_takes_what_pytorchs_fused_one_does(traced: Traced, stage: int) -> None:
    own, fused = traced(with_deepspeeds_adam(stage)), traced({**zero(stage), "optim": FUSED})
    # Each of PyTorch's optimizers has a count of steps for each tensor.
    assert sum(at_rest(own).values()) == pytest.approx(sum(at_rest(fused).values()), rel=0.001)
    assert own.device.bytes == pytest.approx(fused.device.bytes, rel=0.001)
    seconds = [sum(time.elementwise_seconds for time in in_step(reply, reply.own)) for reply in (own, fused)]
    assert seconds[0] == pytest.approx(seconds[1], rel=0.01)


def test_functions_that_deepspeed_compiles_and_no_step_runs_are_no_assumption_of_a_trace(
    job_server: JobServer, model: Path, tmp_path: Path
) -> None:
    first_in_its_process = trace(job_server, a_request(a_plan(zero(1)), model), tmp_path / "traced")
    assert not any("compiled" in assumed for assumed in first_in_its_process.assumptions)


@pytest.mark.parametrize(
    "engine",
    [
        zero(3, zero_quantized_weights=True),
        pytest.param(zero(3, offload_optimizer={"device": "nvme", "nvme_path": "/tmp"}), marks=pytest.mark.nightly),
        {"deepspeed": {**zero(2)["deepspeed"], "optimizer": {"type": "Lion"}}},
    ],
    ids=["quantised", "nvme", "lion"],
)
def test_what_needs_another_native_operator_of_deepspeed_is_refused(
    job_server: JobServer, model: Path, tmp_path: Path, engine: dict[str, Any]
) -> None:
    request = a_request(a_plan(engine), model)
    with pytest.raises(AutotuneError, match="zero_quantized_weights"):
        trace(job_server, request, tmp_path / "traced")
    # Not by TRL or DeepSpeed: on GPUs it may run.
    assert not build(job_server, request, tmp_path / "built").refused


@pytest.mark.nightly
def test_a_trace_leaves_deepspeeds_reports_out(traced: Traced, tmp_path: Path) -> None:
    reports = {
        "csv_monitor": {"enabled": True, "output_path": str(tmp_path / "reports")}, "comms_logger": {"enabled": True},
        "wall_clock_breakdown": True, "flops_profiler": {"enabled": True}, "wandb": {"enabled": True},
    }  # fmt: skip
    without, with_them = (
        traced({"deepspeed": {**zero(2)["deepspeed"], **more}, "optim": FUSED}) for more in ({}, reports)
    )
    assert with_them.sections == without.sections
    assert not (tmp_path / "reports").exists()


@pytest.mark.nightly
def test_weights_shared_a_second_time_among_fewer_ranks_are_weights(traced: Traced) -> None:
    # Otherwise all weights of so small a model stay gathered.
    names = ("stage3_param_persistence_threshold", "stage3_max_live_parameters", "stage3_max_reuse_distance")
    ranks = 4
    held = [
        traced(zero(3, **dict.fromkeys(names, 0), **more)).device.categories["parameter"]
        for more in ({}, {"zero_hpz_partition_size": ranks})
    ]
    assert held[1] - held[0] == 2 * PARAMETERS // ranks


def test_the_only_rank_of_zero2_is_traced_once(job_server: JobServer, model: Path, tmp_path: Path) -> None:
    found = trace(job_server, a_request(a_plan(zero(2), processes=1), model), tmp_path / "traced")
    # In bytes per parameter: in bf16, and the optimizer's copy in float32.
    assert at_rest(found)["parameter"] == pytest.approx((2 + 4) * PARAMETERS, rel=0.01)
