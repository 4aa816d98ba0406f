"""Names on an unreachable hub are unknown; names that the hub does not have are errors."""

from __future__ import annotations

import errno
import re
from pathlib import Path
from unittest.mock import Mock

import pytest
from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError
from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from transformers import AutoConfig, AutoProcessor

from autotune.core.workload import DatasetSource, ModelSource
from autotune.errors import InputError, UnreadError
from autotune.step.data import dataset
from autotune.step.models import loading
from autotune.step.models.heads import LANGUAGE_MODEL
from autotune.trainers import find_trainer


@pytest.mark.parametrize(
    ("cause", "unreached"),
    [
        (LocalEntryNotFoundError("disabled"), True),
        (OfflineModeIsEnabled("offline"), True),
        (RepositoryNotFoundError("404 Client Error", response=Mock(status_code=404)), False),
        (GatedRepoError("401 Client Error", response=Mock(status_code=401)), True),
        (HfHubHTTPError("429 Client Error", response=Mock(status_code=429)), True),
        (HfHubHTTPError("503 Server Error", response=Mock(status_code=503)), True),
    ],
    ids=["no network", "offline", "404", "gated", "429", "503"],
)
def test_a_model_is_not_known_where_the_hub_cannot_be_reached(
    cause: Exception, unreached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError("We couldn't load it") from cause

    for each in (AutoConfig, AutoProcessor):
        monkeypatch.setattr(each, "from_pretrained", fails)
    with pytest.raises(InputError) as found:
        loading.load_config(ModelSource("no/such"), LANGUAGE_MODEL)
    assert isinstance(found.value, UnreadError) is unreached
    with pytest.raises(InputError) as found:
        loading.load_processor(ModelSource("no/such"), AutoProcessor)
    assert isinstance(found.value, UnreadError) is unreached


def test_an_adapter_on_the_hub_is_told_with_the_model_that_it_was_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "models--my--adapter" / "snapshots" / "a1"
    snapshot.mkdir(parents=True)
    (snapshot / "adapter_config.json").write_text('{"base_model_name_or_path": "my/base"}')
    refs = tmp_path / "models--my--adapter" / "refs"
    refs.mkdir()
    (refs / "main").write_text("a1")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(InputError, match=r"my/adapter holds a PEFT adapter, not a model\. It was trained on my/base"):
        loading.load_config(ModelSource("my/adapter"), LANGUAGE_MODEL)


@pytest.mark.parametrize(
    ("error", "unreached"),
    [
        (ConnectionError("Couldn't reach 'no/such' on the Hub"), True),
        (DatasetNotFoundError("404"), False),
        (FileNotFoundError("no/such"), False),
        (DatasetNotFoundError("Dataset 'no/such' is a gated dataset on the Hub."), True),
        (HfHubHTTPError("503 Server Error", response=Mock(status_code=503)), True),
    ],
    ids=["no network", "404", "no file", "gated", "503"],
)
def test_a_dataset_is_not_known_where_the_hub_cannot_be_reached(
    error: Exception, unreached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset, "load_dataset", Mock(side_effect=error))
    with pytest.raises(InputError, match="dataset no/such cannot be loaded") as found:
        dataset.load_rows(find_trainer("sft"), DatasetSource("no/such", "no/such"), None, ModelSource("m"))
    assert isinstance(found.value, UnreadError) is unreached
    assert re.search(r"[^.]\. Check the name;", str(found.value))


def test_a_full_disk_of_the_cache_is_not_taken_for_a_broken_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    error = DatasetGenerationError("An error occurred while generating the dataset")
    error.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(dataset, "load_dataset", Mock(side_effect=error))
    with pytest.raises(InputError, match="There is no space left for the cache of datasets"):
        dataset.load_rows(find_trainer("sft"), DatasetSource("rows", "json"), None, ModelSource("m"))
