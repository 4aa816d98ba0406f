"""``autotune plan`` on the command line: its output, its exit codes, and its error messages."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import autotune
from autotune.cli.boundary import run
from autotune.core.documents.estimate import Origin, Plan
from autotune.core.files.codec import decode
from autotune.core.gpu import Gpu
from autotune.core.jobs.traced import TraceRequest
from autotune.inspection.gpus import gpus
from autotune.probing.tracing import Untraceable
from tests.planning.stand_in import AnalyticTracer
from tests.reporting.pages import html
from tests.reporting.plans import DEFAULT, UNKNOWN, a_plan
from tests.small import write_small_model

POSITIONS = 64
# One way to train, so that a few traces show all there is.
FIXED = {
    "activation_offloading": "off", "attention": "sdpa", "gradient_checkpointing": "off", "liger": "off",
    "optimizer": "adamw_torch", "packing": "none", "pad_to_multiple_of": "none", "padding_free": "off",
    "precision": "float32", "allocator": "default", "torch_empty_cache_steps": "off",
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return write_small_model(folder, "llama", weights=False, max_position_embeddings=POSITIONS)


def fixing(**choices: str) -> list[str]:
    """Return the words that fix one way to train."""
    return [word for knob, choice in {**FIXED, **choices}.items() for word in ("--fix", f"{knob}={choice}")]


def plan(*words: object) -> int:
    """Run the command in this process and return its exit code."""
    return run(["autotune", "plan", *map(str, words)])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "autotune plan needs a MODEL. See autotune plan --help."),
        ("MODEL --seq-len -5", "A length of -5 tokens is not possible. It lies between 1 and 16,777,216."),
        ("MODEL --seq-len many", "invalid int value: 'many'"),
        ("MODEL --seq-len 8 --top 0", "A top of 0 candidates is not possible. It is at least 1."),
        (
            "MODEL --seq-len 8 --token-coverage 0.5",
            "--token-coverage has no effect on rows that are all --seq-len long.",
        ),
        ("MODEL --seq-len 8 --gpu RTX4O90", "'RTX4O90' is not a known GPU. Closest: RTX4090"),
        ("MODEL --seq-len 8 --gpu 24apples", "A size such as 24GiB works too."),
        ("nowhere/at/all --seq-len 8 --gpu T4", "nowhere/at/all"),
        ("MODEL nowhere.jsonl --gpu T4", "nowhere.jsonl"),
    ],
)
def test_bad_input_is_one_message_and_nothing_on_stdout(
    words: str, said: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(*(model if word == "MODEL" else word for word in words.split())) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert err.startswith("autotune: ")
    assert "Traceback" not in err


def test_without_a_gpu_here_one_has_to_be_named(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert plan(model, "--seq-len", 8) == 2
    err = capsys.readouterr().err
    assert "There is no GPU here" in err
    assert "--gpu list" in err


def test_the_catalogue_is_printed_with_every_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--gpu", "list") == 0
    out = capsys.readouterr().out
    assert all(gpu.name in out for gpu in gpus())


def test_the_catalogue_as_json_has_every_figure_and_its_source(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert plan("--gpu", "list", "--json") == 0
    read = [decode(Gpu, row) for row in json.loads(capfdbinary.readouterr().out)]
    assert tuple(read) == gpus()


@pytest.fixture
def found(api: Callable[..., None]) -> Callable[[Plan], dict[str, Any]]:
    """Replace the API's function by one that returns a plan; return the arguments of its calls."""

    def put(plan: Plan) -> dict[str, Any]:
        given: dict[str, Any] = {}

        def found_plan(**options: Any) -> Plan:
            given.update(options)
            return plan

        api(plan=found_plan)
        return given

    return put


@pytest.mark.parametrize(
    ("estimates", "code"),
    [(a_plan().estimates, 0), ((DEFAULT,), 1), ((UNKNOWN,), 1)],
    ids=["something fits", "nothing fits", "nothing is known"],
)
def test_the_exit_code_tells_whether_something_fits(
    estimates: Any, code: int, found: Callable[[Plan], dict[str, Any]]
) -> None:
    found(a_plan(estimates=estimates))
    assert plan("M", "--seq-len", 8) == code


def test_json_is_all_that_is_on_stdout_with_the_estimates_of_the_table_or_on_request_all(
    found: Callable[[Plan], dict[str, Any]], capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    whole = a_plan()
    assert "all" not in found(whole)
    plan("M", "--seq-len", 8, "--top", 1, "--json")
    shown = decode(Plan, json.loads(capfdbinary.readouterr().out))
    assert (shown.estimates, shown.fastest) == (whole.estimates[:1], whole.fastest)
    assert shown.counts is not None
    assert shown.counts.candidates == len(whole.estimates) > 1
    assert replace(shown, estimates=whole.estimates, counts=None) == whole
    plan("M", "--seq-len", 8, "--top", 1, "--json", "--all")
    assert decode(Plan, json.loads(capfdbinary.readouterr().out)) == whole


def test_the_counts_of_a_summary_add_up() -> None:
    counts = a_plan(estimates=(*a_plan().estimates, DEFAULT, UNKNOWN)).summary(1).counts
    assert counts is not None
    assert counts.fitting + counts.too_large + counts.unknown == counts.candidates
    assert min(counts.fitting, counts.too_large, counts.unknown) > 0


def test_all_is_for_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("M", "--seq-len", 8, "--all") == 2
    assert "--all is for --json." in capsys.readouterr().err


def test_a_page_is_written_beside_what_is_shown(
    found: Callable[[Plan], dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = found(a_plan())
    assert plan("M", "--seq-len", 8, "--html", tmp_path / "plan.html", "--json") == 0
    assert "html" not in given
    assert (tmp_path / "plan.html").read_text(encoding="utf-8") == html(a_plan())
    shown = capsys.readouterr()
    assert json.loads(shown.out)["model"] == a_plan().model
    assert shown.err.splitlines()[-1] == f"wrote {tmp_path / 'plan.html'}"


def test_top_says_how_many_are_traced_on_their_own_and_shown(
    found: Callable[[Plan], dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    given = found(a_plan())
    plan("M", "--seq-len", 8, "--top", 1)
    assert given["top"] == 1
    out = capsys.readouterr().out
    assert "9,000" in out
    assert "8,000" not in out


@pytest.fixture(scope="module")
def asked(model: Path, small_dataset_file: Path) -> tuple[object, ...]:
    """What the first of the runs below and those after it ask."""
    return (model, small_dataset_file, "--gpu", "RTX4090", *fixing())


@pytest.fixture(scope="module")
def first(asked: Sequence[object], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Plan]:
    """A real plan of a real dataset; and the cache that it left."""
    cache = tmp_path_factory.mktemp("cache")
    model, dataset, _, gpu, *_ = map(str, asked)
    with mock.patch.dict(os.environ, XDG_CACHE_HOME=str(cache)):
        return cache, autotune.plan(model, dataset, gpu=gpu, fix=FIXED)


@pytest.mark.slow
def test_a_dataset_is_planned_from_traces(first: tuple[Path, Plan]) -> None:
    _, plan = first
    assert plan.new_trace_count == plan.trace_count > 0
    assert {estimate.origin for estimate in plan.estimates} == {Origin.TRACED}
    best = plan.fastest
    assert best is not None
    assert best.tokens_per_second is not None
    assert best.memory is not None
    assert best.spare_bytes == plan.budget_bytes - best.memory.device_bytes
    known = [(item.candidate, item.memory.peak_bytes) for item in plan.estimates if item.memory is not None]
    rows, rising = "per_device_train_batch_size", []
    for (fewer, peak), (more, larger) in itertools.permutations(known, 2):
        if more.differences(fewer).keys() == {rows} and int(fewer[rows]) < int(more[rows]):
            rising.append(peak < larger)
    assert rising
    assert all(rising)


@pytest.mark.slow
def test_output_to_a_pipe_is_plain_and_keeps_to_its_width(
    first: tuple[Path, Plan],
    asked: Sequence[object],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(first[0]))
    monkeypatch.setenv("COLUMNS", "60")
    assert plan(*asked) == 0
    out = capfd.readouterr().out
    assert "\x1b" not in out
    assert max(len(line.rstrip()) for line in out.splitlines()) <= 60
    assert "The fastest that fits: " in out
    assert "…" not in out


class Unwilling:
    """Traces nothing."""

    def __call__(self, requests: Sequence[TraceRequest]) -> Iterable[Untraceable]:
        """Answer that there is an operator that has no shape."""
        return [Untraceable("aten.nonzero gives a shape that depends on data") for _ in requests]


def put_tracer(monkeypatch: pytest.MonkeyPatch, tracer: Any) -> None:
    """Put a tracer in the place of the one that runs processes."""
    monkeypatch.setattr("autotune.probing.tracing.ServerTracer.__call__", lambda _, requests: tracer(requests))


@pytest.mark.slow
def test_a_cache_that_cannot_be_written_and_rows_that_are_too_long_are_said(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    in_the_way = tmp_path / "autotune"
    in_the_way.write_text("", encoding="utf-8")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    put_tracer(monkeypatch, AnalyticTracer())
    assert plan(model, "--seq-len", 2 * POSITIONS, "--gpu", "24GiB", *fixing(per_device_train_batch_size="2")) == 0
    out = " ".join(capsys.readouterr().out.split())
    said = f"Traces are not cached: {in_the_way} cannot be written: it is not a directory."
    # A long path is broken in its middle.
    assert said.replace(" ", "") in out.replace(" ", "")
    assert "Rows have up to 128 tokens, and the model was made for 64 positions." in out
    assert "1 candidate: 1 fitting." in out
    assert "The speed of 24GiB is not known" in out


@pytest.mark.slow
def test_rows_of_one_length_are_planned_from_a_configuration_alone(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    bare = tmp_path / "llama8b.json"
    shutil.copy(model / "config.json", bare)
    words = ("--seq-len", 32, "--gpu", "RTX4090", *fixing(per_device_train_batch_size="2"), "--json")
    alone, whole = (
        decode(Plan, json.loads(capfdbinary.readouterr().out)) for source in (bare, model) if plan(source, *words) == 0
    )
    assert alone.model == str(bare)
    assert alone.estimates == whole.estimates


@pytest.mark.slow
def test_what_cannot_be_traced_is_left_to_a_probe_with_the_operator_named(
    first: tuple[Path, Plan],
    asked: Sequence[object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(first[0], tmp_path, dirs_exist_ok=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    put_tracer(monkeypatch, Unwilling())
    # Another length, so that the traces in the cache are of no use.
    assert plan(*asked, "--max-length", 20) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "Nothing can be predicted here: autotune probe shows whether it trains." in out
    assert "unknown: aten.nonzero gives a shape that depends on data" in out
    assert "memory at peak" not in out
