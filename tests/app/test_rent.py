"""``autotune.rent`` from Python: the GPUs that fit, the fastest, the cheapest, and how many are needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

import autotune
from autotune.core.candidate import Choice
from autotune.core.documents.rent import BILLION, Offer, Rent
from autotune.core.events import Event, Noted, StageStarted, Tracing
from autotune.errors import InputError
from autotune.inspection.gpus import find_gpu
from autotune.probing import JobServer
from autotune.reporting.rent import offer_text
from autotune.units import MIB
from tests.app.tracers import CrowdedTracer, FollowingTracer
from tests.settings import CPU, GPU, machine_with
from tests.small import long_tailed_texts, text_rows, write_rows, write_small_model
from tests.step.plans import needs_deepspeed

ONE_WAY: Mapping[str, Choice] = {
    "activation_offloading": "off", "attention": "sdpa", "gradient_checkpointing": "off", "liger": "off",
    "optimizer": "adamw_torch", "packing": "none", "pad_to_multiple_of": "none", "padding_free": "off",
    "precision": "float32", "allocator": "default", "torch_empty_cache_steps": "off", "sharding": "ddp",
}  # fmt: skip
UNSHARDED = {knob: choice for knob, choice in ONE_WAY.items() if knob != "sharding"}
# The optimizer's state does not fit, and the rest does.
TIGHT = "1200MiB"
WORDS = ("T4", "A100-80GB", "H100-SXM", "H200", "700MiB")
PRICES = {"T4": 0.1, "A100-80GB": 1.8, "H100": 4}
SHARDED: Mapping[str, Choice] = {**ONE_WAY, "sharding": "fsdp2", "dp_replicate_size": 1}
NETWORK = 400e9 / 8
"""Bytes per second of 400 Gbit/s."""
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    return str(write_small_model(folder, "llama", weights=False, max_position_embeddings=2048))


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", text_rows(long_tailed_texts(64))))


@pytest.fixture(scope="module", autouse=True)
def tracer(tmp_path_factory: pytest.TempPathFactory, job_server: JobServer) -> Iterator[FollowingTracer]:
    """Read the model once for all tests, and trace by a formula; the catalogue is small, and one GPU is too."""
    tracer, catalogue = FollowingTracer(), tuple(map(find_gpu, WORDS))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setattr("autotune.probing.tracing.ServerTracer.__call__", lambda _, requests: tracer(requests))
        patch.setattr("autotune.inspection.gpus.gpus", lambda: catalogue)
        patch.setattr("autotune.app.lengths.JobServer", lambda *_: nullcontext(job_server))
        yield tracer


@pytest.fixture(scope="module")
def table(model: str, rows: str) -> Rent:
    return autotune.rent(model, rows, fix=ONE_WAY, prices=PRICES)


def of(table: Rent, name: str) -> Offer:
    return next(offer for offer in table.offers if offer.gpu.name == name)


def test_what_fits_comes_first_by_cost_and_what_does_not_has_its_reason(table: Rent) -> None:
    assert [offer.gpu.name for offer in table.offers] == ["T4", "A100-80GB", "H100-SXM", "H200", "700MiB"]
    assert [offer.fits for offer in table.offers] == [True, True, True, True, False]
    assert "the least needs " in of(table, "700MiB").reason
    assert of(table, "700MiB").tokens_per_second is None


def test_the_cheapest_and_the_fastest_are_found(table: Rent) -> None:
    assert table.cheapest is of(table, "T4")
    assert table.fastest is of(table, "H200")


def test_the_cost_is_that_of_the_hours_of_all_gpus(table: Rent, model: str, rows: str) -> None:
    offer = of(table, "H100-SXM")
    assert offer.seconds is not None
    assert offer.cost == pytest.approx(4 * offer.seconds / 3600)
    assert of(table, "H200").cost is None
    assert "Without a price: H200, 700MiB." in table.notes
    pair = of(autotune.rent(model, rows, fix=ONE_WAY, prices=PRICES, num_processes=2), "H100-SXM")
    assert pair.seconds is not None
    assert pair.cost == pytest.approx(2 * 4 * pair.seconds / 3600)


def test_each_row_says_what_a_plan_for_that_gpu_says(table: Rent, model: str, rows: str) -> None:
    for name in ("T4", "H200"):
        plan, offer = autotune.plan(model, rows, gpu=name, fix=ONE_WAY), of(table, name)
        assert plan.fastest is not None
        assert offer.estimate is not None
        assert offer.estimate.candidate == plan.fastest.candidate
        assert offer.tokens_per_second == plan.fastest.tokens_per_second
        assert offer.estimate.memory == replace(plan.fastest.memory, varied_bytes=None)  # type: ignore[type-var]


def test_an_epoch_is_all_tokens_of_the_rows_at_that_rate(table: Rent, model: str, rows: str) -> None:
    whole = autotune.rent(model, rows, fix=ONE_WAY, token_coverage=1.0)
    tokens = autotune.lengths(model, rows).tokens
    for offer in whole.offers:
        if offer.seconds is not None and offer.tokens_per_second is not None:
            assert offer.seconds * offer.tokens_per_second == pytest.approx(tokens)
    without = autotune.rent(model, seq_len=64, fix=ONE_WAY)
    assert (table.unit, without.unit) == ("epoch", "billion tokens")
    fastest = without.fastest
    assert fastest is not None
    assert fastest.seconds == pytest.approx(BILLION / (fastest.tokens_per_second or 0))


def test_gpus_that_run_the_same_kernels_share_their_traces(model: str, tracer: FollowingTracer) -> None:
    before = len(tracer.requests)
    table = autotune.rent(model, seq_len=96, fix=ONE_WAY)
    run = len(tracer.requests) - before
    assert run == table.new_trace_count == table.trace_count
    # A smaller GPU may need a smaller candidate, and none is traced for a second GPU.
    assert len({(request.layers, request.worst) for request in tracer.requests[before:]}) == run
    assert run < len(table.offers)


def test_each_gpu_is_announced_and_then_told_of_so_that_an_interruption_loses_none(
    model: str, tracer: FollowingTracer, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[Event] = []
    told = lambda here, requests: here._listener(Tracing(0, len(requests))) or tracer(requests)  # noqa: E731
    monkeypatch.setattr("autotune.probing.tracing.ServerTracer.__call__", told)
    table = autotune.rent(model, seq_len=56, fix=ONE_WAY, listener=heard.append)
    texts = [event.text for event in heard if isinstance(event, StageStarted | Noted)]
    start = next(place for place, text in enumerate(texts) if "Planning" in text)
    stages, found = texts[start::2], texts[start + 1 :: 2]
    assert [stage.rpartition("(")[2] for stage in stages] == [f"{number} of 5)" for number in range(1, 6)]
    assert found == [f"{offer_text(of(table, name), table.unit)}." for name in WORDS]
    assert max(event.done for event in heard if isinstance(event, Tracing)) > 0


@pytest.mark.parametrize("several", ["all", "T4,H200"])
def test_a_plan_is_of_one_gpu(several: str, model: str) -> None:
    with pytest.raises(InputError, match=r"autotune\.rent compares several"):
        autotune.plan(model, seq_len=64, gpu=several)


def test_only_the_gpus_that_are_named_are_compared(table: Rent, model: str, rows: str) -> None:
    few = autotune.rent(model, rows, fix=ONE_WAY, prices=PRICES, gpu="h100, T4,H100-SXM")
    assert few.offers == (of(table, "T4"), of(table, "H100-SXM"))
    with pytest.raises(InputError, match="'T5' is not a known GPU"):
        autotune.rent(model, rows, gpu="T4,T5")


@pytest.mark.parametrize("processes", [1, 2])
def test_rates_are_those_of_all_gpus_together(processes: int, model: str) -> None:
    found = of(autotune.rent(model, seq_len=64, fix=ONE_WAY, num_processes=processes, global_batch_size=8), "T4")
    alone = of(autotune.rent(model, seq_len=64, fix=ONE_WAY, global_batch_size=8 // processes), "T4")
    assert found.tokens_per_second == pytest.approx(processes * (alone.tokens_per_second or 0))


def test_gpus_are_in_as_many_machines_as_are_asked_for(model: str) -> None:
    table = autotune.rent(model, seq_len=64, gpu="T4", fix=ONE_WAY, num_processes=9, num_machines=3)
    assert (table.num_processes, table.num_machines, table.offers[0].processes) == (9, 3, 9)


def test_no_number_of_gpus_means_one_of_a_kind_that_is_not_here(model: str) -> None:
    table = autotune.rent(model, seq_len=64, gpu="T4", fix=ONE_WAY, num_processes=None)
    assert (table.num_processes, table.offers[0].processes) == (1, 1)


def test_a_table_has_the_notes_that_a_plan_has_on_model_and_rows(model: str) -> None:
    table = autotune.rent(model, seq_len=4096, gpu="T4", fix=ONE_WAY)
    assert "Rows have up to 4,096 tokens, and the model was made for 2,048 positions." in table.notes


def test_auto_takes_the_fewest_gpus_that_fit(model: str) -> None:
    table = autotune.rent(model, seq_len=64, fix=ONE_WAY, num_processes="auto", global_batch_size=8)
    assert of(table, "T4").processes == 1
    small = of(table, "700MiB")
    assert small.fits
    assert small.processes > 1


def test_auto_shows_more_gpus_than_fit_where_each_trains_more_then(
    model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tracer = CrowdedTracer(lambda plan: plan.launch.processes > 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("autotune.probing.tracing.ServerTracer.__call__", lambda _, requests: tracer(requests))
    monkeypatch.setattr("autotune.inspection.gpus.gpus", lambda: tuple(map(find_gpu, ("T4", "H100-SXM"))))
    table = autotune.rent(model, seq_len=64, fix=ONE_WAY, prices=PRICES, num_processes="auto", global_batch_size=8)
    rows = {(offer.gpu.name, offer.processes): offer for offer in table.offers}
    # With four, each trains no more than with two.
    assert set(rows) == {("T4", 1), ("T4", 2), ("H100-SXM", 1), ("H100-SXM", 2)}
    one, two = rows["T4", 1], rows["T4", 2]
    gain = (two.rate_of_each or 0) / (one.rate_of_each or 1)
    assert gain > 2
    assert (two.cost or 0) == pytest.approx((one.cost or 0) / gain)
    assert table.cheapest is two
    alone = autotune.rent(model, seq_len=64, gpu="T4", fix=ONE_WAY, num_processes="auto", global_batch_size=8)
    assert [offer.processes for offer in alone.offers] == [1, 2, 4]


def test_what_is_found_for_more_gpus_is_traced_on_fewer_too(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tracer = CrowdedTracer(lambda plan: plan.rows <= 4)
    monkeypatch.setattr("autotune.probing.tracing.ServerTracer.__call__", lambda _, requests: tracer(requests))
    # TRL's default alone is searched, in micro-batches of eight rows on one GPU and of four on two.
    monkeypatch.setattr("autotune.app.rent._MAX_TRACED", 1)
    free = {knob: choice for knob, choice in ONE_WAY.items() if knob != "gradient_checkpointing"}
    table = autotune.rent(model, seq_len=300, gpu="T4", fix=free, num_processes="auto", global_batch_size=8)
    one, two, *_ = table.offers
    assert (one.processes, two.processes) == (1, 2)
    assert one.estimate is not None
    assert one.estimate.candidate["per_device_train_batch_size"] == 4
    assert (one.rate_of_each or 0) >= (two.rate_of_each or 0)


def test_auto_for_one_gpu_of_unknown_speed_shows_each_number_up_to_the_first_that_fits(model: str) -> None:
    table = autotune.rent(model, seq_len=64, gpu="700MiB", fix=ONE_WAY, num_processes="auto", global_batch_size=8)
    assert len(table.offers) > 1
    assert [offer.fits for offer in table.offers] == [*[False] * (len(table.offers) - 1), True]
    assert [offer.processes for offer in table.offers] == [1, 2, 4, 8][: len(table.offers)]
    assert any("can be divided among at most 8 GPUs" in note for note in table.notes)


@needs_deepspeed
def test_one_gpu_on_which_nothing_fits_offloads(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotune.inspection.gpus.gpus", lambda: tuple(map(find_gpu, ("T4", TIGHT))))
    table = autotune.rent(model, seq_len=64, fix=UNSHARDED, prices=PRICES)
    small = of(table, TIGHT)
    assert small.fits
    assert (small.processes, small.differences["sharding"], small.differences["offload"]) == (1, "zero2", "optimizer")
    plan = autotune.plan(model, seq_len=64, gpu=TIGHT, fix=UNSHARDED)
    assert plan.fastest is not None
    assert small.estimate is not None
    assert small.estimate.candidate == plan.fastest.candidate
    # No speed is known of it, so it is the last of what fits.
    assert (small.tokens_per_second, small.cost) == (None, None)
    assert table.offers[-1] is small
    assert all("sharding" not in offer.differences for offer in table.offers[:-1])
    assert [note for note in table.notes if TIGHT in note and "host memory that they need" in note]
    assert not [note for note in table.notes if "T4" in note and "host memory that they need" in note]


@needs_deepspeed
def test_what_offloads_is_traced_with_all_layers(tmp_path: Path, tracer: FollowingTracer) -> None:
    deep = str(write_small_model(tmp_path, "llama", weights=False, num_hidden_layers=12))
    before = len(tracer.requests)
    table = autotune.rent(deep, seq_len=64, fix=UNSHARDED, gpu="3600MiB")
    assert table.offers[0].differences["offload"] == "optimizer"
    assert 12 in {each.layers for each in tracer.requests[before:] if "offload_optimizer" in str(each.plan.args)}


@needs_deepspeed
def test_more_gpus_come_before_offloading(model: str) -> None:
    table = autotune.rent(model, seq_len=64, gpu=TIGHT, fix=UNSHARDED, num_processes="auto", global_batch_size=8)
    assert [offer.fits for offer in table.offers] == [False, True]
    assert not [note for note in table.notes if "offloading" in note]
    # Of a single document, no number beyond one can be tried.
    alone = autotune.rent(model, seq_len=64, gpu=TIGHT, fix=UNSHARDED, num_processes="auto", global_batch_size=1)
    assert [(offer.processes, offer.fits) for offer in alone.offers] == [(1, True)]


def test_a_choice_that_some_gpus_lack_is_the_reason_of_these_alone(model: str) -> None:
    table = autotune.rent(model, seq_len=64, fix={**ONE_WAY, "precision": "bfloat16"})
    assert "the GPU has no bf16" in of(table, "T4").reason
    # Nothing is predicted of it.
    assert not any("Not measured on T4" in note for note in table.notes)
    assert any("Not measured on A100-80GB" in note or "H100-SXM, H200" in note for note in table.notes)
    assert of(table, "H200").fits


def test_a_budget_holds_where_a_gpu_has_more(model: str) -> None:
    table = autotune.rent(model, seq_len=64, fix=ONE_WAY, memory_budget=700 * MIB)
    assert not any(offer.fits for offer in table.offers)


def test_every_gpu_of_a_table_is_in_machines_with_the_network(model: str, tracer: FollowingTracer) -> None:
    before, several = len(tracer.requests), {"num_processes": 16, "num_machines": 4, "global_batch_size": 16}
    table = autotune.rent(model, seq_len=64, fix=SHARDED, network=400, **several)  # type: ignore[arg-type]
    speeds = [request.gpu.speeds for request in tracer.requests[before:] if request.gpu is not None]
    speeds += [offer.gpu.speeds for offer in table.offers]
    assert {each.network for each in speeds if each is not None} == {NETWORK}
    assert any("a network of 400 Gbit/s" in note for note in table.notes)
    assert table.settings["network"] == 400


def test_of_the_numbers_that_are_tried_those_with_several_machines_have_it(model: str, tracer: FollowingTracer) -> None:
    before, fewest = len(tracer.requests), {"num_processes": "auto", "global_batch_size": 32}
    small = 150 * MIB
    autotune.rent(model, seq_len=64, gpu="T4", fix=SHARDED, memory_budget=small, network=400, **fewest)  # type: ignore[arg-type]
    networks = {
        request.plan.launch.processes: request.gpu.speeds.network
        for request in tracer.requests[before:]
        if request.gpu is not None and request.gpu.speeds is not None
    }
    assert {count for count in networks if count > 8} == {16, 32}
    assert all(network == (NETWORK if count > 8 else None) for count, network in networks.items())


def test_numbers_are_tried_in_as_many_machines_as_were_asked_for(model: str) -> None:
    asked = {"num_processes": "auto", "num_machines": 2, "global_batch_size": 8}
    table = autotune.rent(model, seq_len=64, gpu="T4", fix=SHARDED, **asked)  # type: ignore[arg-type]
    assert table.offers[0].processes == 2
    assert table.num_machines == 2


def test_more_gpus_of_this_machine_s_kind_than_a_machine_has_are_in_several(
    model: str, tracer: FollowingTracer, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = {"auto": GPU, "cpu": CPU}
    monkeypatch.setattr("autotune.app.planned.inspect_machine", lambda device, *_: here[device])
    before, asked = len(tracer.requests), {"num_processes": "auto", "global_batch_size": 32, "memory_budget": 150 * MIB}
    autotune.rent(model, seq_len=64, gpu=None, fix=SHARDED, **asked)  # type: ignore[arg-type]
    launches = {request.plan.launch for request in tracer.requests[before:]}
    assert {launch.processes: launch.machines for launch in launches} == {2: 1, 4: 1, 8: 1, 16: 2, 32: 4}


def test_all_gpus_of_this_machine_are_in_one_machine_as_in_a_plan(
    model: str, tracer: FollowingTracer, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = {"auto": machine_with(GPU, processes=16), "cpu": CPU}
    monkeypatch.setattr("autotune.app.planned.inspect_machine", lambda device, *_: here[device])
    before, asked = len(tracer.requests), {"num_processes": None, "global_batch_size": 16}
    table = autotune.rent(model, seq_len=64, gpu=None, fix=SHARDED, **asked)  # type: ignore[arg-type]
    assert (table.num_processes, table.num_machines) == (16, 1)
    assert {request.plan.launch.machines for request in tracer.requests[before:]} == {1}


def test_processes_on_a_cpu_are_in_this_machine_however_many_are_tried(model: str) -> None:
    asked = {"num_processes": "auto", "global_batch_size": 16}
    table = autotune.rent(model, seq_len=64, gpu="cpu", fix=ONE_WAY, **asked)  # type: ignore[arg-type]
    assert (table.offers[0].fits, table.num_machines) == (True, 1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"fix": {**ONE_WAY, "precision": "float64"}}, "float64"),
        ({"num_processes": 3, "global_batch_size": 8}, "A global batch of 8 documents cannot be reached with 3"),
        ({"num_processes": 8, "num_machines": 3}, "8 processes cannot be divided among 3 machines"),
        ({"num_processes": 0}, "A number of processes of 0 is not possible"),
        ({"prices": {"T5": 1.0}}, "'T5' is not a known GPU"),
        ({"prices": Path("nowhere.yaml")}, "nowhere.yaml does not exist"),
        ({"memory_budget": "0GiB"}, "'0GiB' is not a size"),
    ],
)
def test_what_can_be_used_on_no_gpu_is_one_message_before_anything_is_read(
    model: str, options: dict[str, object], said: str
) -> None:
    events: list[object] = []
    with pytest.raises(InputError, match=said):
        autotune.rent(model, seq_len=64, listener=events.append, **{"fix": ONE_WAY, **options})  # type: ignore[arg-type]
    assert events == []
