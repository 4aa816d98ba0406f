"""A check reads the rows that TRL's scripts load, and reports those that they cannot load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import load_dataset
from trl import DatasetMixtureConfig, get_dataset
from trl.scripts.utils import DatasetConfig

from autotune.core.configuration import MIXTURE, MODEL_CONFIG, Configuration, ReadCommand
from autotune.core.documents.verdict import Outcome, Severity
from autotune.core.workload import DatasetSource
from autotune.errors import InputError, UnreadError
from autotune.userconfig.sources import Sources, sources
from tests.app.check.conftest import Checked, Write
from tests.small import text_rows, write_rows

Find = Callable[..., Sources]
SEVERAL = """\
test_split_size: 0.25
eval_strategy: epoch
"""


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    texts = [["a b c"] * 6, ["a " * 40, "b"]]
    return [str(write_rows(tmp_path / f"{i}.jsonl", text_rows(each))) for i, each in enumerate(texts)]


@pytest.fixture
def find(model: Path) -> Find:
    def of(
        items: list[dict[str, Any]] | None = None,
        args: dict[str, Any] | None = None,
        given: Path | None = None,
        rows: str | None = None,
        **more: Any,
    ) -> Sources:
        mixture: dict[str, Any] = {name: more.pop(name) for name in ("streaming", "test_split_size") if name in more}
        values: dict[str, dict[str, Any]] = {
            MODEL_CONFIG: {"model_name_or_path": str(model)},
            MIXTURE: {"datasets": items or [], **mixture},
            "ScriptArguments": more,
        }
        read = ReadCommand({name: Configuration(name, each, {}) for name, each in values.items()})
        return sources(read, Configuration("SFTConfig", args or {}, {}), given, rows)

    return of


def entry(file: str, **more: object) -> dict[str, object]:
    return {"path": "json", "data_files": file, "split": "train", **more}


@pytest.mark.parametrize("more", [{}, {"dataset_config": "en", "dataset_streaming": True}], ids=["plain", "streamed"])
def test_a_name_that_is_too_long_for_a_file_is_told_in_a_sentence(find: Find, more: dict[str, object]) -> None:
    with pytest.raises(InputError, match="File name too long"):
        find(dataset_name="x" * 300, **more)


def test_a_model_in_place_of_the_configuration_s_may_be_a_path(find: Find, files: list[str], model: Path) -> None:
    assert find([entry(files[0])], given=model).model == find([entry(files[0])]).model


def test_a_single_file_is_as_with_the_option_dataset(find: Find, files: list[str]) -> None:
    found = find([entry(files[0])]).dataset
    assert (found.path, found.data_files, found.mixture) == ("json", files[0], ())


def test_rows_in_place_of_the_configuration_s_are_split_like_them(find: Find, files: list[str]) -> None:
    asked = {"test_split_size": 0.25, "args": {"eval_strategy": "epoch"}}
    found, own = find([entry(files[1])], rows=files[0], **asked), find([entry(files[0])], **asked)
    assert (found.dataset, found.evaluation) == (own.dataset, own.evaluation)


@pytest.mark.parametrize("path", ["text", "arrow"])
def test_a_file_of_text_or_of_arrow_is_too(find: Find, path: str, tmp_path: Path) -> None:
    file = tmp_path / {"text": "rows.txt", "arrow": "rows.arrow"}[path]
    file.write_text("a b\n")
    found = find([{**entry(str(file)), "path": path}]).dataset
    assert (found.path, found.data_files, found.mixture) == (path, str(file), ())


def test_several_entries_are_one_dataset(find: Find, files: list[str]) -> None:
    found = find([entry(file, columns=None) for file in files]).dataset
    assert found.name == " + ".join(files)
    assert found.places == tuple(files)
    assert found.mixture == tuple(entry(file) for file in files)


@pytest.mark.parametrize("more", [{"columns": ["text"]}, {"fraction": 1.0}, {"name": "own"}, {"data_dir": "d"}])
def test_an_entry_that_says_more_is_read_by_trl(find: Find, files: list[str], more: dict[str, object]) -> None:
    assert find([entry(files[0], **more)]).dataset.mixture == (entry(files[0], **more),)


@pytest.mark.parametrize("place", ["*.jsonl", "https://host/rows.jsonl", "hf://datasets/hub/id/rows.jsonl"])
@pytest.mark.parametrize("listed", [False, True])
def test_a_pattern_and_an_address_are_read_by_trl(
    find: Find, files: list[str], place: str, listed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(files[0]).parent)
    item = {**entry(place), "data_files": [place] if listed else place}
    assert find([item]).dataset.mixture == (item,)


def test_a_configuration_of_a_dataset_is_named_to_trl(find: Find) -> None:
    found = find(args={"eval_strategy": "steps"}, dataset_name="hub/id", dataset_config="en")
    assert found.dataset == DatasetSource("hub/id", "hub/id", config="en")
    assert found.evaluation == DatasetSource("hub/id (test)", "hub/id", split="test", config="en")
    assert find([{"path": "hub/id", "name": "en", "split": "train"}]).dataset == found.dataset


@pytest.mark.parametrize(("train", "test"), [("train", "train"), ("validation", "train")])
def test_a_split_to_evaluate_on_may_be_any_whole_split(find: Find, train: str, test: str, tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    for name in ("train", "validation"):
        write_rows(folder / f"{name}.jsonl", text_rows([name]))
    asked = {"dataset_train_split": train, "dataset_test_split": test, "args": {"eval_strategy": "epoch"}}
    found = find(dataset_name=str(folder), **asked)
    assert found.evaluation is not None
    assert found.dataset.all_splits
    # As in trl/scripts/sft.py.
    loaded = load_dataset(str(folder))
    for source, split in ((found.dataset, train), (found.evaluation, test)):
        assert load_dataset(source.path, split=source.split)["text"][:] == loaded[split]["text"][:] == [split]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"dataset_train_split": "sft"}, "dataset_train_split is sft"),
        (
            {"test_split_size": 0.1, "dataset_test_split": "dev", "args": {"eval_strategy": "steps"}},
            "dataset_test_split is dev",
        ),
        ({"args": {"eval_strategy": "steps"}}, "TRL fails with a KeyError"),
        ({"streaming": True}, "needs max_steps"),
        ({"streaming": True, "test_split_size": 0.1, "args": {"max_steps": 3}}, "fails with an AttributeError"),
        (
            {"streaming": True, "args": {"max_steps": 3, "precompute_ref_log_probs": True}},
            "refuses precompute_ref_log_probs",
        ),
    ],
)
def test_what_trl_s_scripts_end_with_is_told(find: Find, files: list[str], asked: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said) as raised:
        find([entry(file) for file in files], **asked)
    assert not isinstance(raised.value, UnreadError)


def test_shares_are_for_all_or_for_none(find: Find, files: list[str]) -> None:
    with pytest.raises(InputError, match="in all datasets or in none"):
        find([entry(files[0], fraction=0.5), entry(files[1])])
    with pytest.raises(InputError, match="fraction is 0 for all datasets"):
        find([entry(files[0], fraction=0), entry(files[1], fraction=0.0)])
    find([entry(files[0], fraction=0), entry(files[1], fraction=1)])


def test_a_file_is_no_name_of_a_dataset(find: Find, files: list[str]) -> None:
    with pytest.raises(InputError, match=r"dataset_name is the file .*, which TRL cannot load") as named:
        find(dataset_name=files[0])
    assert named.value.hint == f"Write datasets, with path: json and data_files: {files[0]}."
    with pytest.raises(InputError, match=r"path in datasets is the file .*, which TRL cannot load"):
        find([{"path": files[0], "split": "train"}])
    with pytest.raises(FileNotFoundError, match="Couldn't find any data file"):
        get_dataset(DatasetMixtureConfig([DatasetConfig(files[0])]))


def test_an_entry_without_a_split_is_refused(find: Find, files: list[str]) -> None:
    with pytest.raises(InputError, match="split in datasets is null"):
        find([{**entry(files[0]), "split": None}])
    with pytest.raises(ValueError, match="at least one split"):
        get_dataset(DatasetMixtureConfig([DatasetConfig("json", data_files=files[0], split=None)]))


def test_files_of_a_split_may_be_listed(find: Find, files: list[str]) -> None:
    of_splits = {"train": files, "test": files[0]}
    found = find([{**entry(files[0]), "data_files": of_splits}]).dataset
    assert (found.name, found.places) == (f"{files[0]} and 2 more", (*files, files[0]))
    rows = get_dataset(DatasetMixtureConfig([DatasetConfig("json", data_files=of_splits)]))["train"]
    assert len(rows) == 8


def test_broken_files_of_a_mixture_are_told(find: Find, files: list[str], tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(InputError, match=r"empty.jsonl is empty"):
        find([entry(files[0]), entry(str(tmp_path / "empty.jsonl"))])


@pytest.mark.parametrize("listed", [[], {}])
def test_an_entry_of_no_files_is_refused(find: Find, files: list[str], listed: object) -> None:
    with pytest.raises(InputError, match="data_files of json is empty"):
        find([entry(files[0]), {"path": "json", "data_files": listed}])


def test_streamed_rows_that_are_here_are_read_and_others_are_not(find: Find, files: list[str], tmp_path: Path) -> None:
    for place in (files[0], str(tmp_path / "*.jsonl")):
        assert find([entry(place)], streaming=True, args={"max_steps": 3}).streams
    with pytest.raises(UnreadError, match="streamed from another machine"):
        find([entry("https://host/rows.jsonl")], streaming=True, args={"max_steps": 3})
    assert find(dataset_name=str(tmp_path), dataset_streaming=True, args={"max_steps": 3}).streams
    with pytest.raises(UnreadError, match="streamed from another machine"):
        find(dataset_name="hub/id", dataset_streaming=True, args={"max_steps": 3})


def test_the_worst_micro_batch_of_a_mixture_is_of_all_its_files(
    write: Write, checked: Checked, files: list[str]
) -> None:
    file = write("sft", SEVERAL)
    listed = "".join(f"  - path: json\n    data_files: {name}\n" for name in files)
    head, _, tail = file.read_text(encoding="utf-8").partition("  - path: json\n")
    file.write_text(head + listed + tail.partition("\n")[2], encoding="utf-8")
    verdict = checked(config=str(file), trainer="sft", gpu="H100-80GB")
    told = "\n".join(item.message for item in verdict.findings)
    assert verdict.outcome is Outcome.FITS, told
    assert verdict.dataset == " + ".join(files)
    assert verdict.need is not None
    # Of 8 rows, 6 are trained on.
    assert (verdict.need.rows, verdict.need.tokens >= 40) == (6, True)
    assert "an epoch has 1 step." in told
    assert "test_split_size=0.25 sets aside random rows" in told


@pytest.mark.parametrize(
    "given",
    [
        {"dataset_name": "~/rows"},
        {"items": [{"path": "json", "data_files": "~/rows.jsonl"}]},
        {"items": [{"path": "~/rows"}]},
    ],
    ids=str,
)
def test_a_path_that_only_a_shell_would_expand_is_refused(find: Find, given: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="TRL does not expand ~"):
        find(given.pop("items", None), **given)


def test_a_model_whose_path_only_a_shell_would_expand_is_refused() -> None:
    with pytest.raises(InputError, match="model_name_or_path: ~/m is not found: TRL does not expand ~"):
        sources(of_model("~/m"), Configuration("SFTConfig", {}, {}))


def of_model(name: str, **more: object) -> ReadCommand:
    values: dict[str, dict[str, object]] = {
        MODEL_CONFIG: {"model_name_or_path": name, **more}, MIXTURE: {}, "ScriptArguments": {"dataset_name": "hub/id"}
    }  # fmt: skip
    return ReadCommand({kind: Configuration(kind, each, {}) for kind, each in values.items()})


def test_the_revision_is_that_of_the_model_by_which_trl_loads_it() -> None:
    read, plain = of_model("org/mine", model_revision="v1"), Configuration("SFTConfig", {}, {})
    loading = Configuration("SFTConfig", {"model_init_kwargs": {"revision": "v2"}}, {})
    assert sources(read, plain).model.revision == "v1"
    assert sources(read, loading).model.revision == "v2"
    assert sources(read, loading, name="org/other").model.revision == "main"


def test_a_part_of_a_split_is_no_split_to_train_on(find: Find) -> None:
    with pytest.raises(InputError, match=r"'train\[:1000\]' is not the name of a split.* an entry of datasets"):
        find(dataset_name="hub/id", dataset_train_split="train[:1000]")


def test_a_split_to_evaluate_on_matters_only_in_an_evaluation(find: Find, files: list[str]) -> None:
    asked: dict[str, Any] = {"test_split_size": 0.1, "dataset_test_split": "validation"}
    assert find([entry(files[0])], **asked).evaluation is None


MIXED = """\
dataset_mixture:
  datasets:
    - id: hub/id
      weight: 0.5
  test_split_size: 0.1
"""


def test_a_mixture_as_open_r1_writes_it_is_told_with_what_trl_reads(write: Write, checked: Checked) -> None:
    verdict = checked(config=str(write("sft", MIXED)), trainer="sft", fits=False)
    (found,) = (item for item in verdict.findings if item.severity is Severity.ERROR)
    assert (verdict.outcome, found.line) == (Outcome.CANNOT_RUN, 8)
    assert "It is open-r1's. Write its datasets as entries of datasets, with path for id" in found.message


def test_a_mixture_may_be_a_key_of_a_script(write: Write, checked: Checked, script: str) -> None:
    Path(script).write_text("from trl import SFTConfig, SFTTrainer, TrlParser\nTrlParser((Own,))\n", encoding="utf-8")
    verdict = checked(command=("python", script, "--config", str(write("sft", MIXED))), fits=False)
    assert verdict.outcome is Outcome.READ
    assert any("has such an argument. No release of TRL" in item.message for item in verdict.findings)


@pytest.mark.parametrize("item", ["{id: hub/id, split: train}", "{name: en}", "hub/id"])
def test_an_entry_that_trl_cannot_read_is_told_with_the_keys_that_it_reads(
    item: str, write: Write, checked: Checked
) -> None:
    file = write("sft", "learning_rate: fast\n")
    head, _, rest = file.read_text(encoding="utf-8").partition("  - path: json\n")
    file.write_text(f"{head}  - {item}\n{rest.partition(chr(10))[2]}", encoding="utf-8")
    verdict = checked(config=str(file), trainer="sft", fits=False)
    wrong, other = (item for item in verdict.findings if item.severity is Severity.ERROR)
    assert (verdict.outcome, wrong.line, other.line) == (Outcome.CANNOT_RUN, 3, 7)
    assert "takes a list, each item a mapping with path, name, data_dir, data_files, split, " in wrong.message


def test_kto_trains_on_a_dataset_of_one_row(write: Write, checked: Checked, tmp_path: Path) -> None:
    row = {"prompt": "a b", "completion": " c d", "label": True}
    rows = str(write_rows(tmp_path / "row.jsonl", [row]))
    verdict = checked(config=str(write("kto", "")), trainer="kto", gpu="H100-80GB", dataset=rows)
    assert verdict.outcome is Outcome.FITS, verdict.findings


def test_a_length_at_which_no_row_is_evaluated_is_told_with_one_that_keeps_some(
    write: Write, checked: Checked, tmp_path: Path
) -> None:
    (tmp_path / "rows").mkdir()
    for split, words in (("train", 2), ("test", 200)):
        pair = {"chosen": "a " * words, "rejected": "b " * words}
        write_rows(tmp_path / "rows" / f"{split}.jsonl", [pair] * 4)
    file = write("reward", f"dataset_name: {tmp_path / 'rows'}\neval_strategy: epoch\nmax_length: 64\n")
    head, _, rest = file.read_text(encoding="utf-8").partition("datasets:\n")
    file.write_text(head + rest.partition("data_files")[2].partition("\n")[2], encoding="utf-8")
    verdict = checked(config=str(file), trainer="reward", gpu="H100-80GB")
    (found,) = (item for item in verdict.findings if item.severity is Severity.ERROR)
    assert (verdict.outcome, found.line) == (Outcome.CANNOT_RUN, 7)
    assert "leaves none of the 4 rows of the evaluation; 202 or more keep some. An evaluation of no" in found.message
