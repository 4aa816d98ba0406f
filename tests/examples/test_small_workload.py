"""The small workload needs only Python, is reproducible, and has realistic row lengths."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import small_workload

from autotune.inspection.dataset import dataset_source
from autotune.inspection.model import model_source
from autotune.probing import JobServer
from tests.virtual.alone import found_by

SCRIPT = Path(small_workload.__file__)
CPU_SECONDS_AT_MOST = 20


def digests(directory: Path) -> dict[str, str]:
    files = (file for file in sorted(directory.rglob("*")) if file.is_file())
    return {str(file.relative_to(directory)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, job_server: JobServer) -> Path:
    directory = tmp_path_factory.mktemp("small")
    assert found_by(job_server, _SCRIPT.format(arguments=[str(SCRIPT), str(directory)])) == 1
    return directory


def texts(small: Path) -> list[str]:
    rows = [json.loads(line) for line in (small / "data.jsonl").read_text(encoding="utf-8").splitlines()]
    assert all(list(row) == ["text"] for row in rows)
    return [row["text"] for row in rows]


_SCRIPT = """
import runpy, sys
sys.argv = {arguments}
runpy.run_path(sys.argv[0], run_name="__main__")
print(sys.flags.hash_randomization)
"""


@pytest.mark.nightly
def test_another_run_builds_the_same_files(small: Path, tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Sets have another order in a process of the server's.
    subprocess.run([sys.executable, str(SCRIPT), str(tmp_path)], env={**os.environ, "PYTHONHASHSEED": "1"}, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < CPU_SECONDS_AT_MOST
    assert digests(tmp_path) == digests(small)


def test_autotune_takes_it_with_pretrained_weights_too(small: Path) -> None:
    assert model_source(str(small / "model"), "pretrained").name == str(small / "model")
    assert dataset_source(str(small / "data.jsonl")).path == "json"


def test_lengths_have_a_long_tail(small: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(small / "model")
    lengths = sorted(len(tokenizer(text)["input_ids"]) for text in texts(small))
    assert len(lengths) == small_workload.ROWS
    assert 10 <= lengths[0] <= 30
    assert 40 <= lengths[len(lengths) // 2] <= 120
    assert 500 <= lengths[-1] <= 1000
    assert sum(length > 256 for length in lengths) in range(20, 100)


def test_no_row_is_there_twice(small: Path) -> None:
    rows = texts(small)
    assert len(set(rows)) == len(rows)


def test_the_tokenizer_gives_back_every_row_and_knows_end_padding_and_turns(small: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(small / "model")
    for text in texts(small):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.eos_token_id != tokenizer.pad_token_id
    turns = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "That."}]
    expected = "<|im_start|>user\nWhat?<|im_end|>\n<|im_start|>assistant\nThat.<|im_end|>\n"
    assert tokenizer.apply_chat_template(turns, tokenize=False) == expected


def test_the_model_has_saved_weights_for_every_token(small: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, report = AutoModelForCausalLM.from_pretrained(small / "model", output_loading_info=True)
    assert not report["missing_keys"]
    assert model.get_input_embeddings().num_embeddings >= len(AutoTokenizer.from_pretrained(small / "model"))
