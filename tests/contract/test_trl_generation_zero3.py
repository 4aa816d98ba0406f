"""Contract with TRL and DeepSpeed: generation that gathers weights layer by layer, and the training step after it.

Each trains on the CPU, with DeepSpeed's real engine and as its only rank, in a process of its own.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.ranks import trained_alone
from tests.small import write_small_model
from tests.step.test_ranks import needs_deepspeed

ABSENT = "The size of tensor a (0) must match"
OUT_OF_ORDER = "tracing error at step 0"
# More elements than the model has: all weights are prefetched.
AHEAD = 10_000_000
_SCRIPT = """
import sys
from pathlib import Path

from tests.contract.ranks import alone
from tests.contract.building import built
from tests.step.plans import zero

name, model, folder, bucket = sys.argv[1:]
alone(Path(folder))
stage = zero(3, stage3_prefetch_bucket_size=int(bucket), stage3_param_persistence_threshold=0)
fields = {"gradient_checkpointing": False, "max_steps": 2, "ds3_gather_for_generation": False, **stage}
built(name, Path(model), Path(folder) / "out", **fields).train()
"""
pytestmark = [pytest.mark.slow, pytest.mark.nightly, needs_deepspeed]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose output head has a weight of its own."""
    return write_small_model(tmp_path_factory.mktemp("model"), "llama", tie_word_embeddings=False)


def test_grpo_fails_where_weights_are_prefetched(model: Path, tmp_path: Path) -> None:
    done = trained_alone(_SCRIPT, "grpo", str(model), str(tmp_path), str(AHEAD))
    # Where this trains, a release has mended it: what `sharding` says of prefetching can go. A single rank uses a
    # weight that is not there; two ranks stop as they partition it.
    assert ABSENT in done.stderr[done.stderr.rindex("Traceback") :]


def test_grpo_trains_where_none_are_prefetched(model: Path, tmp_path: Path) -> None:
    done = trained_alone(_SCRIPT, "grpo", str(model), str(tmp_path), "0")
    assert done.returncode == 0, done.stderr[-2000:]


def test_rloo_fails_where_none_are_prefetched(model: Path, tmp_path: Path) -> None:
    done = trained_alone(_SCRIPT, "rloo", str(model), str(tmp_path), "0")
    # Where this trains, a release has mended it: the restriction of `ds3_gather_for_generation` can go.
    assert OUT_OF_ORDER in done.stderr[done.stderr.rindex("Traceback") :]
