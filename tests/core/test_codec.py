"""Dataclasses become JSON documents and back, without changes."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields

import pytest

from autotune.core.candidate import Candidate
from autotune.core.files.codec import DecodeError, decode, encode
from autotune.core.gpu import Gpu
from autotune.core.jobs.protocol import ProbeRequest
from autotune.core.measurement import Measurement, OutOfMemory, Schedule
from autotune.core.plan import TrainingPlan
from autotune.core.program import BACKWARD
from autotune.core.rows.lengths import LengthDistribution
from autotune.core.setting import Base
from autotune.core.status import ProbeStatus
from autotune.core.workload import DatasetSource, ModelSource, Rollouts, Workload
from autotune.techniques.base import CrashReason
from tests.settings import workload


def test_a_request_survives_the_way_through_json() -> None:
    request = ProbeRequest(
        plan=TrainingPlan("sft", {"bf16": True, "max_length": None}, {"lora_target_modules": ["q_proj"]}, 64),
        model=ModelSource("/models/small"),
        device="cpu",
        tokenized_directory="/tokenized",
        schedule=Schedule(),
        limit_bytes=10,
    )
    assert decode(ProbeRequest, json.loads(json.dumps(encode(request)))) == request


def test_a_measurement_survives_with_its_enumerations_and_nested_parts() -> None:
    shown = Measurement(ProbeStatus.OUT_OF_MEMORY, "too big", out_of_memory=OutOfMemory(BACKWARD, 1, None, 3))
    assert decode(Measurement, json.loads(json.dumps(encode(shown)))) == shown


def test_lengths_keep_their_numbers_as_keys() -> None:
    sent = workload()
    back = decode(Workload, json.loads(json.dumps(encode(sent))))
    assert back.dataset.lengths == LengthDistribution(sent.dataset.lengths.counts)


def test_a_candidate_is_a_plain_object() -> None:
    candidate = Candidate({"packing": "bfd", "max_length": 512})
    assert encode(candidate) == {"packing": "bfd", "max_length": 512}
    assert decode(Candidate, {"packing": "bfd", "max_length": 512}) == candidate


def test_enumerations_become_their_values() -> None:
    assert encode([1, None, 0.5, ProbeStatus.OK]) == [1, None, 0.5, "ok"]
    assert type(encode([ProbeStatus.OK])[0]) is str


def test_a_reason_of_a_class_of_its_own_becomes_text() -> None:
    document = encode(Measurement(ProbeStatus.VETOED, CrashReason("training fails")))
    assert (document["reason"], type(document["reason"])) == ("training fails", str)


@pytest.mark.parametrize(
    ("document", "place"),
    [
        ({}, "missing required field `status`"),
        ({"status": "fine"}, r"Invalid enum value 'fine' - at `\$\.status`"),
        ({"status": "ok", "peak_bytes": "many"}, r"Expected `int \| null`, got `str` - at `\$\.peak_bytes`"),
        (["ok"], "Expected `object`, got `array`"),
    ],
)
def test_a_document_of_another_shape_is_refused_with_its_place(document: object, place: str) -> None:
    with pytest.raises(DecodeError, match=place):
        decode(Measurement, document)


def test_what_fingerprints_are_made_of_has_no_sets_whose_order_differs_between_processes() -> None:
    parts = (Workload, Base, TrainingPlan, Gpu, ModelSource, DatasetSource, Rollouts)
    assert not [
        f"{kind.__name__}.{field.name}" for kind in parts for field in fields(kind) if "set[" in str(field.type)
    ]


_FIRST_DECODED_BY_THREADS = """
import sys, threading
from dataclasses import make_dataclass
from autotune.core.files.codec import decode

sys.setswitchinterval(1e-6)
for _ in range(8):
    inner = make_dataclass("Inner", [(f"figure_{n}", int) for n in range(30)])
    outer = make_dataclass("Outer", [(f"part_{n}", inner) for n in range(30)])
    document = {f"part_{n}": {f"figure_{m}": m for m in range(30)} for n in range(30)}
    found, ready = [], threading.Barrier(4)
    def run(kind):
        ready.wait()
        found.append(decode(kind, document if kind is outer else document["part_0"]))
    threads = [threading.Thread(target=run, args=(kind,)) for kind in (outer, inner, outer, inner)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
"""


def test_threads_may_decode_a_type_for_the_first_time_at_once() -> None:
    # msgspec 0.22 describes a type in a cache that other threads read before it is filled: a segmentation fault ends
    # the process.
    done = subprocess.run([sys.executable, "-c", _FIRST_DECODED_BY_THREADS], check=False, timeout=120)

    assert done.returncode == 0
