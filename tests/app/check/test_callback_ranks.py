"""With several processes, the callback stops all with the same message or lets all train; none waits forever."""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate import ParallelismConfig
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, TorchDynamoPlugin
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerControl, TrainerState
from trl import SFTConfig

import autotune
from autotune.api import preflight
from autotune.api.running import _deepspeed, _fsdp, launching_of
from autotune.app.arguments import CheckArguments
from autotune.app.check.check import check_object
from autotune.core.configuration import Configuration
from autotune.core.documents.verdict import Finding, Outcome, Remedy, Severity, Verdict, WillNotFit
from autotune.errors import AutotuneError, InputError, UnreadError
from autotune.userconfig.engine import as_launched, engine_args
from autotune.userconfig.launch import NOT_LAUNCHED, Launching
from autotune.userconfig.objects import configuration_of
from tests.small import long_tailed_texts, text_rows, write_rows, write_small_model

ROOT = Path(__file__).resolve().parents[3]


@dataclass
class FakeRankOfTwo:
    """One of two ranks that are threads of this process, and exchange by lists what real ranks send."""

    rank: int
    broadcast_so_far: list[Any] = field(default_factory=list)
    gathered_so_far: dict[int, Any] = field(default_factory=dict)
    met: threading.Barrier = field(default_factory=lambda: threading.Barrier(2, timeout=120))

    def other(self) -> FakeRankOfTwo:
        return FakeRankOfTwo(1 - self.rank, self.broadcast_so_far, self.gathered_so_far, self.met)

    def gather(self, own: Any) -> list[Any]:
        self.gathered_so_far[self.rank] = own
        self.met.wait()
        return [self.gathered_so_far[rank] for rank in range(2)]

    def broadcast(self, own: Any) -> Any:
        if self.rank == 0:
            self.broadcast_so_far.append(own)
        self.met.wait()
        return self.broadcast_so_far[-1]


@dataclass(frozen=True)
class Ended:
    """How both ranks ended, what they were checked by, and in how many checks."""

    errors: tuple[BaseException | None, BaseException | None]
    budgets: list[Any]


def both(monkeypatch: pytest.MonkeyPatch, check: Callable[[], Verdict], **options: Any) -> Ended:
    """Run the callback in both of two fake ranks, with a check that answers at once."""
    first = FakeRankOfTwo(0)
    here, budgets, free = threading.local(), list[Any](), {0: 9 << 30, 1: 3 << 30}

    def checked(*_: object) -> Verdict:
        budgets.append(_[-1])
        return check()

    monkeypatch.setattr(preflight, "ranks_of", lambda _: here.ranks)
    monkeypatch.setattr(preflight, "available_bytes", lambda *_: free[here.ranks.rank])
    monkeypatch.setattr(preflight.PreflightCallback, "_verdict", checked)
    errors: dict[int, BaseException | None] = {}

    def run(ranks: FakeRankOfTwo) -> None:
        here.ranks = ranks
        try:
            args = SimpleNamespace(world_size=2, process_index=ranks.rank, auto_find_batch_size=False)
            autotune.PreflightCallback(**options).on_train_begin(args, None, None)
            errors[ranks.rank] = None
        except BaseException as error:  # noqa: BLE001 what a thread raises is looked at by the test
            errors[ranks.rank] = error

    threads = [threading.Thread(target=run, args=(ranks,)) for ranks in (first, first.other())]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return Ended((errors[0], errors[1]), budgets)


def answer(outcome: Outcome) -> Verdict:
    return Verdict(outcome, f"{outcome.value}: 4 GiB of 3 GiB at the worst batch")


def test_both_are_stopped_by_the_message_of_one_check_with_the_least_memory_of_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended = both(monkeypatch, lambda: answer(Outcome.DOES_NOT_FIT))
    assert [type(error) for error in ended.errors] == [WillNotFit, WillNotFit]
    assert str(ended.errors[0]) == str(ended.errors[1])
    assert ended.budgets == [3 << 30]
    asked = both(monkeypatch, lambda: answer(Outcome.DOES_NOT_FIT), memory_budget="2GiB")
    assert asked.budgets == ["2GiB"]


def test_both_train_and_one_of_them_says_why(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert both(monkeypatch, lambda: answer(Outcome.FITS)).errors == (None, None)
    assert [record.message for record in caplog.records] == ["autotune: fits: 4 GiB of 3 GiB at the worst batch"]


def test_what_ends_the_training_is_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    found = Finding(Severity.ERROR, "dispatch_batches ends the training.")
    verdict = Verdict(Outcome.CANNOT_RUN, "cannot run: 1 thing is wrong", reason="1 thing is wrong", findings=(found,))
    assert both(monkeypatch, lambda: verdict).errors == (None, None)
    assert [record.message for record in caplog.records] == [f"autotune: {verdict.headline}. {found.message}"]


def test_a_warning_names_what_to_do(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def warned(check: Callable[[], Verdict]) -> str:
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert both(monkeypatch, check).errors == (None, None)
        return caplog.records[0].message

    def refuse() -> Verdict:
        raise InputError("Some of the model's weights are frozen, which is not traced.")

    close = answer(Outcome.TOO_CLOSE)
    fitting = replace(close, remedy=Remedy({"gradient_checkpointing": True}, "", 1, 1))
    dry_run = "`autotune dry-run -- COMMAND` runs the training itself for three steps on null GPUs, without a GPU."
    assert warned(lambda: close) == f"autotune: {close.headline}. Free memory, or train on smaller micro-batches."
    assert warned(lambda: fitting) == f"autotune: {close.headline}. It would fit with gradient_checkpointing: true."
    assert warned(lambda: answer(Outcome.UNKNOWN)).endswith(dry_run)
    assert (
        warned(refuse) == f"autotune cannot check this training: Some of the model's weights are frozen, which is"
        f" not traced. {dry_run}"
    )


def test_what_cannot_be_checked_trains_in_both_or_in_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Verdict:
        raise InputError("A IA3Config is not supported.", hint="peft.LoraConfig is.")

    assert both(monkeypatch, refuse).errors == (None, None)
    ended = both(monkeypatch, refuse, when_unsure="fail")
    assert [str(error) for error in ended.errors] == ["A IA3Config is not supported. peft.LoraConfig is."] * 2


@pytest.mark.parametrize("failure", [RuntimeError("a bug"), KeyboardInterrupt()], ids=["bug", "Ctrl-C"])
def test_a_check_that_fails_ends_both(failure: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Verdict:
        raise failure

    first, second = both(monkeypatch, fail).errors
    assert first is failure
    assert isinstance(second, AutotuneError)
    assert "The check in the first process of this training failed" in str(second)


def test_what_accelerate_has_made_of_fsdp_is_read_back() -> None:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, reshard_after_forward=True, cpu_offload=True, auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    )  # fmt: skip
    document = {"distributed_type": "FSDP", "fsdp_config": _fsdp(plugin)}
    assert engine_args(document, Configuration("SFTConfig", {}, {})) == {
        "fsdp": True,
        "fsdp_config": {
            "version": 2, "reshard_after_forward": True, "cpu_offload": True,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "state_dict_type": "SHARDED_STATE_DICT",
        },
    }  # fmt: skip


def test_what_no_trace_has_of_fsdp_is_read_back() -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, ignored_modules=".*experts")
    document = {"distributed_type": "FSDP", "fsdp_config": _fsdp(plugin)}
    with pytest.raises(UnreadError, match="fsdp_ignored_modules is not traced"):
        engine_args(document, Configuration("SFTConfig", {}, {}))


def test_the_groups_of_a_training_that_runs_are_read_back() -> None:
    state = SimpleNamespace(
        distributed_type=DistributedType.FSDP,
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=True),
        parallelism_config=ParallelismConfig(dp_replicate_size=2, dp_shard_size=4),
        dynamo_plugin=TorchDynamoPlugin(),
    )
    found = launching_of(SimpleNamespace(world_size=8, mixed_precision="no"), state)
    args = engine_args(found.document, Configuration("SFTConfig", {}, {}), found.processes)
    assert args["parallelism_config"] == {"dp_replicate_size": 2, "dp_shard_size": 4}


def test_deepspeed_of_a_single_process_is_checked_as_it_trains(
    small_model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = SimpleNamespace(deepspeed_config={"zero_optimization": {"stage": 3}})
    state = SimpleNamespace(
        distributed_type=DistributedType.DEEPSPEED, deepspeed_plugin=plugin, dynamo_plugin=TorchDynamoPlugin()
    )
    trainer = SimpleNamespace(accelerator=SimpleNamespace(state=state), is_deepspeed_enabled=True)
    launched: list[Launching] = []

    def checked(_: object, given: Launching, **__: object) -> Verdict:
        launched.append(given)
        return answer(Outcome.FITS)

    monkeypatch.setattr(preflight, "_trainer_of", lambda _: trainer)
    monkeypatch.setattr(preflight, "check_object", checked)
    file = write_rows(tmp_path / "rows.jsonl", text_rows(long_tailed_texts(16)))
    autotune.PreflightCallback(dataset=file).on_train_begin(
        SFTConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none"),
        TrainerState(),
        TrainerControl(),
        model=AutoModelForCausalLM.from_pretrained(small_model_directory),
        processing_class=AutoTokenizer.from_pretrained(small_model_directory),
    )
    [found] = launched
    args: Any = engine_args(found.document, Configuration("SFTConfig", {}, {}), found.processes)
    assert args["deepspeed"]["zero_optimization"]["stage"] == 3


def test_a_precision_and_a_compiler_that_only_accelerate_s_launcher_sets_are_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")
    state = SimpleNamespace(distributed_type=DistributedType.NO, dynamo_plugin=TorchDynamoPlugin())
    args = SFTConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none")
    found = launching_of(args, state)
    assert (found.precision, found.dynamo) == ("bf16", "inductor")
    assert as_launched(configuration_of(args), replace(found, dynamo="no")).values["bf16"]
    verdict = check_object(CheckArguments(args, model="model", dataset="rows.jsonl"), found)
    assert verdict.outcome is Outcome.UNKNOWN
    assert "dynamo_backend: inductor compiles the model" in verdict.reason


def test_processes_whose_trainer_was_not_found_are_not_taken_for_one() -> None:
    assert launching_of(SimpleNamespace(world_size=1), None) == NOT_LAUNCHED
    with pytest.raises(InputError, match="The trainer of these 2 processes was not found"):
        launching_of(SimpleNamespace(world_size=2), None)


def test_the_sizes_in_a_document_of_deepspeed_follow_from_the_trainer_again() -> None:
    filled = {"train_batch_size": 8, "steps_per_print": float("inf"), "zero_optimization": {"stage": 2}}
    found = _deepspeed(filled)
    assert found["train_batch_size"] == found["gradient_accumulation_steps"] == "auto"
    assert "steps_per_print" not in found
    assert found["zero_optimization"] == {"stage": 2}


SCRIPT = """
import sys
from datasets import load_dataset
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer
import autotune

model, rows, out, budget = sys.argv[1:]
args = SFTConfig(
    output_dir=out, use_cpu=True, bf16=False, report_to="none", max_steps=2, max_length=32, save_strategy="no",
    per_device_train_batch_size=2,
)
SFTTrainer(
    model=model, args=args, processing_class=AutoTokenizer.from_pretrained(model),
    train_dataset=load_dataset("json", data_files=rows, split="train"),
    callbacks=[autotune.PreflightCallback(memory_budget=budget)],
).train()
print("TRAINED", args.process_index, flush=True)
"""


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize(("budget", "trains"), [("1MiB", False), ("4GiB", True)])
def test_two_real_ranks_are_stopped_together_or_train(budget: str, trains: bool, tmp_path: Path) -> None:
    model = write_small_model(tmp_path / "model", "llama")
    rows = write_rows(tmp_path / "rows.jsonl", text_rows(long_tailed_texts(16)))
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    assert importlib.util.find_spec("torch.distributed.run") is not None
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--redirects=3", "--log-dir=logs"]
    given = [str(model), str(rows), str(tmp_path / "out"), budget]
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, *words, str(tmp_path / "train.py"), *given],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    logs = [
        "".join(file.read_text() for file in sorted(tmp_path.glob(f"logs/*/attempt_0/{rank}/*.log"))) for rank in (0, 1)
    ]
    assert (done.returncode == 0) is trains, "\n".join([done.stderr, *logs])
    if trains:
        assert [f"TRAINED {rank}" in log for rank, log in enumerate(logs)] == [True, True]
        return
    lines = [next(line for line in log.splitlines() if "WillNotFit" in line) for log in logs]
    said = [line.removeprefix(f"[rank{rank}]: ") for rank, line in enumerate(lines)]
    assert said[0] == said[1]
    assert "does not fit" in said[0]
    assert "1.00 MiB" in said[0]
