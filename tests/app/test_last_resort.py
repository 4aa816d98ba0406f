"""One GPU offloads by ZeRO only if nothing else fits: the cost, the candidates and the notes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from autotune.app.offload import notes_on_offloading, notes_on_untried, with_last_resorts_if_nothing_fits
from autotune.app.problem import with_last_resorts
from autotune.core.jobs.traced import TraceRequest
from autotune.core.machine import Machine
from autotune.core.measurement import Measurement
from autotune.core.status import ProbeStatus
from autotune.inspection.gpus import find_gpu
from autotune.planning.evaluator import Evaluator
from autotune.planning.tracing.cache import Cache
from autotune.planning.tracing.store import Traces
from autotune.probing.tracing import Traced, Untraceable
from autotune.study.improvement import search_by_traces
from autotune.study.problem import Purpose, Record, SearchOutcome
from autotune.techniques import find
from autotune.techniques.sharding import zero_of
from autotune.trainers.problem import TrainerProblem
from autotune.units import GIB, MIB
from tests.app.test_outcome import outcome_of
from tests.app.test_predicted import traced
from tests.planning.stand_in import AnalyticTracer
from tests.settings import CPU, GPU, WITH_DEEPSPEED, problem, setting, workload

LAYERS = ("full",) * 4
# Weights and gradients of the stand-in's four layers are 800 MiB, and the optimizer's state as much again.
ENOUGH, TIGHT = 20 * GIB, 1800 * MIB


class OffloadingTracer(AnalyticTracer):
    """Answers by the formula, without the optimizer's state on the device where it is offloaded."""

    def __call__(self, requests: Sequence[TraceRequest]) -> Iterable[Traced]:
        answers = super().__call__([_without_state(request) for request in requests])
        self.requests[-len(requests) :] = requests
        return answers

    @property
    def sharded(self) -> list[TraceRequest]:
        """The requests with DeepSpeed."""
        return [request for request in self.requests if request.plan.args.get("deepspeed")]


def _without_state(request: TraceRequest) -> TraceRequest:
    document = request.plan.args.get("deepspeed")
    zero = document["zero_optimization"] if isinstance(document, Mapping) else {}
    return request if "offload_optimizer" not in zero else _with_sgd(request)


class PagingTracer(OffloadingTracer):
    """Answers as if paged optimizers, which are traced late, had no state on the device: then one of them fits."""

    def __call__(self, requests: Sequence[TraceRequest]) -> Iterable[Traced]:
        paged = [("paged" in str(request.plan.args["optim"]), request) for request in requests]
        return super().__call__([_with_sgd(request) if on_host else request for on_host, request in paged])


def _with_sgd(request: TraceRequest) -> TraceRequest:
    return replace(request, plan=replace(request.plan, args={**request.plan.args, "optim": "sgd"}))


def here(machine: Machine = WITH_DEEPSPEED) -> TrainerProblem:
    """Return the shipped space with most of its knobs fixed."""
    fixed: dict[str, str | int] = {
        "max_length": 64,
        "attention": "sdpa",
        "liger": "off",
        "packing": "none",
        "padding_free": "off",
    }
    fixed |= {"allocator": "default", "pad_to_multiple_of": "none", "hub_kernels": "off"}
    return problem(setting(machine=machine, of=workload(lengths={64: 8}, layer_kinds=LAYERS)), fixed)


def searched(of: TrainerProblem, tracer: AnalyticTracer, folder: Path, budget_bytes: int) -> Evaluator:
    """Return an evaluator after the search of a plan."""
    evaluator = Evaluator(of, find_gpu("H100-80GB"), budget_bytes, Traces(tracer, Cache(folder), "model", {}))
    search_by_traces(of, evaluator)
    return evaluator


def test_where_something_fits_without_nothing_is_traced_for_it(tmp_path: Path) -> None:
    tracer, narrow = OffloadingTracer(), here()
    evaluator = searched(narrow, tracer, tmp_path, ENOUGH)
    before = len(tracer.requests)
    assert narrow.choices["sharding"] == ("ddp",)
    assert with_last_resorts_if_nothing_fits(evaluator) is evaluator
    assert len(tracer.requests) == before


def test_where_nothing_does_few_candidates_are_traced_and_one_of_them_fits(tmp_path: Path) -> None:
    tracer, narrow = OffloadingTracer(), here()
    evaluator = searched(narrow, tracer, tmp_path, TIGHT)
    assert not any(found.fits for found in evaluator.ranked())
    before = len(tracer.requests)
    found = with_last_resorts_if_nothing_fits(evaluator)
    wide = found.problem
    assert len(tracer.requests) == before + len(tracer.sharded)
    # At most two candidates with each of five combinations of choices, at two to four points.
    assert 0 < len(tracer.sharded) <= 5 * 2 * 4
    assert {request.plan.launch.processes for request in tracer.sharded} == {1}
    best = found.ranked()[0]
    assert best.fits
    assert (best.candidate["sharding"], best.candidate["offload"]) in {("zero2", "optimizer"), ("zero3", "optimizer"),
                                                                       ("zero3", "both")}  # fmt: skip
    # The optimizer then runs on the host, of which no speed is known.
    assert best.tokens_per_second is None
    assert all(wide.illegal(estimate.candidate) is None for estimate in found.ranked() if estimate.fits)
    assert "ZeRO-2 and ZeRO-3 with offload" in " ".join(notes_on_offloading(wide))
    # What was traced before is still known.
    assert {each.candidate for each in evaluator.ranked()} < {each.candidate for each in found.ranked()}


def test_once_a_candidate_fits_no_other_is_traced_with_the_same_offloading(tmp_path: Path) -> None:
    found = with_last_resorts_if_nothing_fits(searched(here(), OffloadingTracer(), tmp_path, TIGHT))
    fitting = [each for each in found.ranked() if each.candidate["sharding"] != "ddp" and each.fits]
    same = [(each.candidate["sharding"], each.candidate["offload"]) for each in fitting]
    assert len(set(same)) == len(same) > 1


def test_what_keeps_more_on_the_device_than_there_is_room_for_is_not_traced(tmp_path: Path) -> None:
    tracer = OffloadingTracer()
    evaluator = searched(here(), tracer, tmp_path, 150 * MIB)
    parts = [each.memory.breakdown for each in evaluator.ranked() if each.memory is not None]
    # Half of the weights is too much already.
    assert min(each["parameter"] for each in parts) > 2 * 150 * MIB
    with_last_resorts_if_nothing_fits(evaluator)
    offloaded = [zero_of(request.plan) for request in tracer.sharded]
    assert offloaded
    assert all("offload_param" in zero for zero in offloaded)


def test_a_search_tries_what_should_fit_first(tmp_path: Path) -> None:
    tracer = OffloadingTracer()
    predictions = traced(tmp_path, tracer, here(), limit_bytes=TIGHT)
    assert predictions.evaluator is not None
    assert set(predictions.evaluator.problem.choices["sharding"]) == {"ddp", "zero2", "zero3"}
    assert predictions.predictor is not None
    for recipe in predictions.evaluator.problem.recipes[:3]:
        prediction = predictions.predictor.predict(recipe)
        assert prediction is not None
        assert prediction.need_bytes <= TIGHT
    # Sharding among one process is nothing.
    alone = predictions.evaluator.problem.baseline.but(sharding="zero2", offload="none")
    assert "does nothing without offload" in str(predictions.evaluator.problem.illegal(alone))
    assert any("offload" in note for note in predictions.notes())


def test_a_search_that_is_cut_short_does_not_show_that_nothing_fits(tmp_path: Path) -> None:
    evaluator = searched(here(), OffloadingTracer(), tmp_path, TIGHT)
    assert with_last_resorts_if_nothing_fits(evaluator, decided=False) is evaluator
    tracer = PagingTracer()
    predictions = traced(tmp_path / "b", tracer, here(), limit_bytes=TIGHT, seconds=0.0)
    assert not tracer.sharded
    assert predictions.evaluator is not None
    assert predictions.evaluator.problem.choices["sharding"] == ("ddp",)


def test_what_cannot_be_traced_does_not_keep_a_search_from_concluding(tmp_path: Path) -> None:
    class Partly(OffloadingTracer):
        """Cannot trace paged optimizers."""

        def __call__(self, requests: Sequence[TraceRequest]) -> Iterable[Traced]:
            answers = super().__call__(requests)
            return [
                Untraceable("no kernel") if "paged" in str(request.plan.args["optim"]) else answer
                for request, answer in zip(requests, answers, strict=True)
            ]

    evaluator = searched(here(), Partly(), tmp_path, TIGHT)
    assert evaluator.untraceable
    assert with_last_resorts_if_nothing_fits(evaluator).ranked()[0].fits


def test_without_deepspeed_it_is_said_how_to_install_it(tmp_path: Path) -> None:
    narrow = here(GPU)
    evaluator = searched(narrow, AnalyticTracer(), tmp_path, TIGHT)
    found = with_last_resorts_if_nothing_fits(evaluator).problem
    assert found.choices == narrow.choices
    said = {(item.knob, item.choice): item.reason for item in found.space.left_out}
    assert "pip install 'deepspeed>=" in said["sharding", "zero2"]
    assert "pip install 'deepspeed>=" in said["offload", "optimizer"]
    assert list(notes_on_offloading(found)) == []


def test_a_cpu_has_nothing_to_offload_to(tmp_path: Path) -> None:
    machine = replace(CPU, packages=WITH_DEEPSPEED.packages)
    narrow = here(machine)
    evaluator = searched(narrow, AnalyticTracer(), tmp_path, TIGHT)
    assert with_last_resorts_if_nothing_fits(evaluator) is evaluator
    for knob, choice in (("sharding", "zero2"), ("offload", "optimizer")):
        reason = find(knob, narrow.trainer.techniques).unavailable(choice, machine)
        assert reason is not None
        assert "a CPU has no other memory to offload to" in reason


def ran_out(of: TrainerProblem, status: ProbeStatus = ProbeStatus.OUT_OF_MEMORY) -> SearchOutcome:
    """Return a search in which the baseline alone was probed."""
    return outcome_of(Record(0, of.baseline, Purpose.BASELINE, Measurement(status)))


def test_a_search_without_predictions_says_that_it_did_not_offload() -> None:
    narrow = here()
    (said,) = notes_on_untried(narrow, ran_out(narrow))
    assert said.endswith("Search with --fix sharding=zero2 --fix offload=optimizer.")
    fixed = problem(narrow.setting, {"sharding": "zero2", "offload": "optimizer"})
    assert fixed.illegal(fixed.baseline) is None
    (absent,) = notes_on_untried(here(GPU), ran_out(here(GPU)))
    assert "pip install 'deepspeed>=" in absent


def test_it_says_so_only_where_memory_is_what_failed_and_there_is_another_to_offload_to() -> None:
    narrow, cpu = here(), here(replace(CPU, packages=WITH_DEEPSPEED.packages))
    wide = with_last_resorts(narrow)
    assert wide is not narrow
    chosen = problem(narrow.setting, {"sharding": "ddp"})
    for searched, outcome in (
        (narrow, ran_out(narrow, ProbeStatus.TIMEOUT)),
        (narrow, replace(ran_out(narrow), winner=ran_out(narrow, ProbeStatus.OK).records[0])),
        (wide, ran_out(wide)),
        (cpu, ran_out(cpu)),
        (chosen, ran_out(chosen)),
    ):
        assert list(notes_on_untried(searched, outcome)) == []
