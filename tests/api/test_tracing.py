"""How traces are shared out among processes."""

from __future__ import annotations

from autotune.api.tracing import shared_out
from autotune.core.plan import TrainingPlan
from autotune.core.protocol import TraceRequest
from autotune.core.workload import ModelSource


def request(rows: int, **args: object) -> TraceRequest:
    plan = TrainingPlan("sft", {"per_device_train_batch_size": rows, "max_length": 64 * rows, **args}, {})
    return TraceRequest(plan, ModelSource("model"), "cuda", (64,) * rows)


def test_plans_that_differ_in_sizes_alone_share_a_process() -> None:
    requests = [request(1), request(1, use_liger_kernel=True), request(4), request(4, use_liger_kernel=True)]
    assert shared_out(requests, servers=2) == [[0, 2], [1, 3]]


def test_no_process_is_left_without_work_while_there_is_some() -> None:
    requests = [request(rows) for rows in (1, 2, 4)]
    assert sorted(shared_out(requests, servers=2)) == [[0, 1], [2]]
    assert sorted(shared_out(requests, servers=8)) == [[0], [1], [2]]


def test_the_longest_jobs_come_first() -> None:
    requests = [request(1, use_liger_kernel=True), request(1), request(2), request(4)]
    assert shared_out(requests, servers=1) == [[1, 2, 3], [0]]
