"""The answer of a dry run, from recorded data of its processes; no command runs here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.app import dry_run as module
from autotune.app.dry_run import answer, dry_run
from autotune.core.documents.dry_run import (
    EXIT_CODES,
    CommandExit,
    DryRun,
    FailedAllocation,
    Loader,
    ProcessRecord,
    ScriptError,
    SourceLine,
    StepMemory,
    UnsupportedCall,
)
from autotune.core.events import ignore
from autotune.core.files.codec import decode, encode
from autotune.errors import InputError
from autotune.nullgpu.command import CommandResult
from autotune.units import GIB

OURS = SourceLine(
    "train.py", 42, "main", "loss.backward()", "transformers/models/llama/modeling_llama.py:80, in forward"
)
LARGEST = Loader("largest first", field="input_ids", unit="tokens", rows=100, largest=512)
DONE = CommandExit(0)
FAILED = CommandExit(1)


def span(step: int, gib: int = 10, device: int = 0) -> StepMemory:
    return StepMemory(step, device, f"card-{device}", gib * GIB, (gib + 1) * GIB, GIB, 24 * GIB)


def process(rank: int = 0, ranks: int = 1, steps: int = 3, **changes: Any) -> ProcessRecord:
    known = ProcessRecord(
        pid=100 + rank,
        rank=rank,
        local_ranks=ranks,
        uses_cuda=True,
        ended="stopped",
        steps=steps,
        spans=tuple(span(step, device=rank) for step in range(steps + 1)),
        loaders=(LARGEST,),
    )
    return replace(known, **changes)


def ran(
    *processes: ProcessRecord, ending: CommandExit = DONE, refused: tuple[UnsupportedCall, ...] = ()
) -> CommandResult:
    return CommandResult(ending, processes, refused)


OUT_OF_MEMORY = FailedAllocation(2, 0, 3 * GIB, 20 * GIB, 21 * GIB, 2 * GIB, OURS)
RAN_OUT = process(
    steps=1,
    ended="error",
    failed_allocations=(OUT_OF_MEMORY,),
    error=ScriptError("OutOfMemoryError", "CUDA out of memory.", True, OURS),
)
NO_FILE = ScriptError("FileNotFoundError", "no such file: 'rows.jsonl'", False, OURS)
BEFORE_CUDA = process(steps=0, uses_cuda=False, ended="error", spans=(), loaders=(), error=NO_FILE)


@pytest.mark.parametrize(
    ("given", "outcome", "reason"),
    [
        (ran(process()), "fits", ""),
        (ran(process(0, 2), process(1, 2)), "fits", ""),
        (ran(process(ended="finished", steps=2)), "fits", ""),
        (ran(process(loaders=(replace(LARGEST, order="as shuffled"),))), "fits the batches that ran", "shuffles them"),
        (ran(process(loaders=(LARGEST, Loader("as it is", "its dataset is iterated")))), "fits the batches that ran",
         "its dataset is iterated"),
        (ran(process(loaders=())), "fits the batches that ran", "no PyTorch DataLoader was used"),
        (ran(process(failed_allocations=(OUT_OF_MEMORY,))), "fits", ""),
        (ran(RAN_OUT, ending=FAILED), "does not fit", ""),
        # A launcher kills the other ranks, and one that a library has ended leaves no exception.
        (ran(process(0, 2, 1, ended=""), replace(RAN_OUT, rank=1, local_ranks=2), ending=FAILED), "does not fit", ""),
        (ran(process(ended="", steps=1, failed_allocations=(OUT_OF_MEMORY,)), ending=CommandExit(None, 6)),
         "does not fit", ""),
        # The script catches the error, and ends with a code of its own.
        (ran(process(ended="finished", steps=1, failed_allocations=(OUT_OF_MEMORY,)), ending=FAILED), "does not fit",
         ""),
        (ran(process(), refused=(UnsupportedCall("cudaStreamBeginCapture", "CUDA graphs"),)), "not known",
         "the script uses CUDA graphs (cudaStreamBeginCapture)"),
        (ran(process(steps=1, ended=""), ending=CommandExit(None, timed_out=True)), "not known",
         "--timeout ended it after 1 of 3 steps"),
        # The script caught the error of a failed allocation.
        (ran(process(steps=1, ended="", failed_allocations=(OUT_OF_MEMORY,)), ending=CommandExit(None, timed_out=True)),
         "not known", "--timeout ended it after 1 of 3 steps"),
        (ran(process(steps=1, ended="", failed_allocations=(OUT_OF_MEMORY,)), ending=CommandExit(None, 9)), "not known",
         "killed by signal 9"),
        # One rank ran out of memory, and the others waited for it until the time was up.
        (ran(process(0, 2, 1, ended=""), replace(RAN_OUT, rank=1, local_ranks=2),
             ending=CommandExit(None, timed_out=True)), "does not fit", ""),
        (ran(process(steps=1, ended="error", error=NO_FILE), ending=FAILED), "not known",
         "the script failed after 1 of 3 steps: FileNotFoundError: no such file"),
        # The launcher's own process comes first.
        (ran(replace(BEFORE_CUDA, pid=99, error=replace(NO_FILE, kind="CalledProcessError")),
             process(steps=1, ended="error", error=NO_FILE), ending=FAILED), "not known",
         "the script failed after 1 of 3 steps: FileNotFoundError"),
        (ran(process(steps=1, ended=""), ending=CommandExit(None, 9)), "not known", "killed by signal 9"),
        (ran(process(steps=0, spans=(span(0),), ended="finished")), "not known", "without a step of a PyTorch"),
        (ran(process(spans=())), "not known", "that of CUDA (cudaMallocAsync) is not followed"),
        (ran(), "not known", "used no GPU"),
        (ran(BEFORE_CUDA, ending=FAILED), "cannot run", "before it used memory of a GPU: FileNotFoundError"),
        (ran(replace(BEFORE_CUDA, uses_cuda=True), ending=FAILED), "cannot run", "FileNotFoundError"),
        (ran(ending=CommandExit(127)), "cannot run", "exit code 127"),
        (ran(replace(BEFORE_CUDA, local_ranks=4), ending=FAILED), "cannot run", "give --num-processes 4"),
    ],
)  # fmt: skip
def test_the_end_of_a_command_is_an_answer(given: CommandResult, outcome: str, reason: str) -> None:
    found = answer(given, 2, 3)
    assert (found.outcome, reason in found.reason) == (outcome, True), found.reason


def test_a_process_that_passes_on_an_error_does_not_hide_the_failed_allocation() -> None:
    """``torch.multiprocessing.spawn`` catches the error of a rank, and raises it in the parent."""
    passed_on = replace(BEFORE_CUDA, pid=99, error=ScriptError("ProcessRaisedException", "out of memory", True, OURS))
    rank = process(steps=1, ended="finished", failed_allocations=(OUT_OF_MEMORY,))
    assert answer(ran(passed_on, rank, ending=FAILED), 1, 3).failed == OUT_OF_MEMORY


def test_the_exit_codes_are_those_of_a_check() -> None:
    assert {outcome.value: code for outcome, code in EXIT_CODES.items()} == {
        "fits": 0,
        "does not fit": 1,
        "cannot run": 2,
        "fits the batches that ran": 3,
        "not known": 3,
    }


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a dry run whose command ends as it is given."""

    def of(given: CommandResult, command: tuple[str, ...] | str = ("python", "train.py"), **options: Any) -> DryRun:
        monkeypatch.setattr(module, "run", lambda *_, **__: given)
        known: dict[str, Any] = {
            "gpu": "24GiB", "num_processes": None, "steps": 3, "as_shuffled": False, "timeout": None,
        }  # fmt: skip
        return dry_run(command, **{**known, **options}, listener=ignore)

    return of


def test_what_fits_is_shown_with_what_is_spare_on_the_fullest_gpu(answered: Any) -> None:
    found = answered(ran(process(0, 2), process(1, 2, spans=(span(0, device=1), span(2, 15, 1)))), num_processes=2)
    assert found.headline == "fits: at most 17.00 GiB of 24.00 GiB used"
    assert (found.used_bytes, found.spare_bytes) == (17 * GIB, 7 * GIB)
    assert found.exit_code == 0
    assert any("largest of 100 rows, up to 512 tokens (input_ids" in note for note in found.notes)
    assert decode(DryRun, encode(found)) == found


def test_what_runs_out_is_shown_with_its_line_and_what_lacked(answered: Any) -> None:
    found = answered(ran(RAN_OUT, ending=FAILED))
    assert found.headline == "does not fit: out of memory in step 2 at train.py:42, 3.00 GiB requested"
    assert (found.used_bytes, found.spare_bytes) == (25 * GIB, -GIB)
    assert found.exit_code == 1


def test_a_library_that_does_not_name_the_size_of_its_request_is_given_none(answered: Any) -> None:
    found = answered(ran(replace(RAN_OUT, failed_allocations=()), ending=FAILED))
    assert found.headline == "does not fit: out of memory in step 2 at train.py:42"
    assert (found.used_bytes, found.spare_bytes) == (12 * GIB, 12 * GIB)


def test_requests_that_the_script_survived_are_noted(answered: Any) -> None:
    found = answered(ran(process(failed_allocations=(OUT_OF_MEMORY,))))
    assert any("1 request for memory failed" in note for note in found.notes)


def test_a_command_in_one_text_is_split_as_a_shell_does(answered: Any) -> None:
    assert answered(ran(process()), "python 'my train.py'").command == ("python", "my train.py")


def test_text_is_no_sure_measure_of_tokens_and_the_result_says_so(answered: Any) -> None:
    found = answered(ran(process(loaders=(replace(LARGEST, unit="bytes of text"),))))
    assert any("need not have the most tokens" in note for note in found.notes)


def test_what_is_secret_is_in_no_part_of_the_result(answered: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    token, password, key = "hf_" + "a" * 34, "correct-horse", "battery-staple"
    monkeypatch.setenv("WANDB_API_KEY", key)
    error = ScriptError("RuntimeError", f"cannot log in with {token} and {password} and {key}", False, OURS)
    line = replace(OURS, text=f'login(token="{token}")')
    refused = replace(OUT_OF_MEMORY, place=line)
    failed = replace(process(ended="error", error=replace(error, place=line), failed_allocations=(refused,)), steps=1)
    command = ("python", "train.py", "--hub_token", token, "--db-password", password)
    found = answered(ran(failed, ending=FAILED), command)
    shown = str(encode(found))
    assert token not in shown
    assert password not in shown
    assert key not in shown
    assert "cannot log in with ***" in found.reason


@pytest.mark.parametrize(
    ("command", "count"),
    [
        ("python train.py", 1),
        ("torchrun --nproc-per-node 2 train.py", 2),
        ("accelerate launch --num_processes 4 --multi_gpu train.py", 4),
        ("accelerate launch --config_file two.yaml train.py", 2),
        ("trl sft --config trl.yaml", 2),
        ("trl sft --model_name_or_path m --num_processes 3", 3),
        ("bash run.sh", 1),
    ],
)
def test_there_are_as_many_gpus_as_the_command_starts_processes(
    answered: Any, command: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("import trl\n")
    Path("two.yaml").write_text("distributed_type: FSDP\nnum_processes: 2\n")
    Path("trl.yaml").write_text("accelerate_config: two.yaml\n")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert answered(ran(process()), tuple(command.split())).gpus == count


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        ((), {}, "There is no command to run"),
        (("python", "x.py"), {"steps": 0}, "--steps 0 is not possible"),
        (("python", "x.py"), {"num_processes": 17}, "17 null GPUs are not possible"),
        (("python", "x.py"), {"timeout": "soon"}, "'soon' is not a duration"),
        (("python", "x.py"), {"gpu": "H1000"}, "'H1000' is not a known GPU"),
        (("python", "x.py"), {"gpu": None}, "There is no GPU here"),
    ],
)
def test_what_cannot_be_used_is_told(
    answered: Any, command: tuple[str, ...], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        answered(ran(), command, **options)
