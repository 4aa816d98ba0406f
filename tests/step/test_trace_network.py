"""The job ``trace`` for processes on several machines: the bytes sent over the network, and their time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from autotune.core.gpu import Gpu
from autotune.core.jobs.traced import TraceReply
from autotune.inspection.gpus import find_gpu
from autotune.probing import JobServer, trace
from tests.small import VOCABULARY, write_small_model
from tests.step.plans import fsdp2
from tests.step.test_trace_ranks import INNER, LAYERS, PARAMETERS, RANKS, WIDTH, a_plan, a_request, in_step

MACHINES = 2
A100 = find_gpu("A100-80GB")
# Bytes per second: far slower than any link within a machine, between, and far faster.
SLOW, MIDDLE, FAST = 1e6, 1e9, 1e20
NETWORKS = (None, SLOW, MIDDLE, FAST)
pytestmark = pytest.mark.slow

Times = Callable[[Mapping[str, object]], dict[float | None, float]]


@pytest.fixture(scope="module")
def times(job_server: JobServer, tmp_path_factory: pytest.TempPathFactory) -> Times:
    """A function that traces a plan on two machines once, and returns its time of communication by the network."""
    folder = tmp_path_factory.mktemp("network")
    model = write_small_model(
        folder / "model", weights=False, num_hidden_layers=LAYERS, hidden_size=WIDTH, intermediate_size=INNER
    )

    def found(args: Mapping[str, object]) -> dict[float | None, float]:
        request = a_request(a_plan(args, machines=MACHINES), model)
        others = tuple(A100.networked(network) for network in NETWORKS)
        reply = trace(job_server, replace(request, gpu=others[0], others=others[1:]), folder / _name(args))
        return {network: _communication(reply, gpu) for network, gpu in zip(NETWORKS, others, strict=True)}

    return found


def _name(args: Mapping[str, object]) -> str:
    return "-".join(sorted(args)) or "ddp"


def _communication(reply: TraceReply, gpu: Gpu) -> float:
    (figures,) = (figures for figures in reply.gpus if figures.are_of(gpu))
    return sum(time.communication_seconds for time in in_step(reply, figures))


def test_replicas_on_two_machines_send_their_sum_once(times: Times) -> None:
    found = times({})
    assert found[SLOW] == pytest.approx(4 * PARAMETERS / SLOW, rel=0.02)
    assert found[None] == found[FAST] < found[MIDDLE] < found[SLOW]


def test_shards_of_one_machine_are_gathered_within_it_and_all_its_ranks_share_the_network(times: Times) -> None:
    per_machine = RANKS // MACHINES
    sizes: dict[str, Any] = {"dp_replicate_size": MACHINES, "dp_shard_size": per_machine}
    apart, together = times({**fsdp2(), "parallelism_config": sizes}), times(fsdp2())
    # Each of four ranks adds a quarter of the gradients, in bfloat16, to that of its counterpart in the other machine.
    assert apart[SLOW] == pytest.approx(2 * PARAMETERS / SLOW, rel=0.02)
    # With shards on both machines, rings go through the network: weights for both passes, and gradients. The tail (the
    # words and a norm) is kept after the forward pass.
    tail = (VOCABULARY + 1) * WIDTH
    assert together[SLOW] == pytest.approx((RANKS - 1) / RANKS * 2 * (3 * PARAMETERS - tail) / SLOW, rel=0.02)
    assert apart[None] == apart[FAST] < apart[MIDDLE] < apart[SLOW]
    assert together[None] == together[FAST] < together[MIDDLE] < together[SLOW]
