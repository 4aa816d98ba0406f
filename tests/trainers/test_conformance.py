"""Conformance of every trainer: declarations, rows, plans, the baseline, and the bundle."""

from __future__ import annotations

import importlib
import json
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.core.candidate import Candidate
from autotune.core.documents.result import MeasuredCandidate, Result
from autotune.core.machine import Machine
from autotune.core.program import CONSTRUCTION, MICRO_BATCH, OPTIMIZER_STEP, SAVE
from autotune.core.rows.documents import Documents
from autotune.emit.bundle import config_text, script_text, write_bundle
from autotune.emit.figures import measured
from autotune.emit.launch import launch_keys
from autotune.emit.rows import training_rows
from autotune.errors import InputError
from autotune.inspection.space_file import default_file, load
from autotune.step.trainers import adapters
from autotune.trainers import trainers
from autotune.trainers.base import Trainer
from autotune.trainers.declared import DatasetFormat
from autotune.userconfig.edit import EditTarget, edited_text, edits_of
from autotune.userconfig.fields import fields_of_kind
from tests.app.bases import ROWS, a_base, disagreements, started
from tests.reporting.examples import a_result
from tests.settings import CPU, GPU, problem, separates, setting
from tests.trainers.prepared import Prepare, Prepared, prepared_rows
from tests.trainers.samples import TEXTS

EVERY = pytest.mark.parametrize("trainer", trainers().values(), ids=lambda item: item.name)
EVERY_FORMAT = pytest.mark.parametrize(
    ("trainer", "form"),
    [
        pytest.param(trainer, form, id=f"{trainer.name}-{form.name}")
        for trainer in trainers().values()
        for form in trainer.formats
    ],
)


def of_trl(name: str, trainer: str) -> Any:
    """Return the class of a name, from TRL or from its experimental part."""
    trl = importlib.import_module("trl")
    try:
        return getattr(trl, name)
    except AttributeError:
        return getattr(importlib.import_module(f"trl.experimental.{trainer}"), name)


def candidates_near(trainer: Trainer, baseline: Candidate) -> list[Candidate]:
    """Return the baseline, and all that differ from it in one documented choice."""
    here = setting()
    single = [
        baseline.but(**{item.name: item.parse(option.choice, here)})
        for item in trainer.techniques
        for option in item.options
    ]
    return [baseline, *single]


def test_every_specification_has_an_adapter_and_every_adapter_a_specification() -> None:
    assert set(adapters()) == set(trainers())


@EVERY
def test_its_file_is_called_as_it_is(trainer: Trainer) -> None:
    assert type(trainer).__module__ == f"autotune.trainers.{trainer.name}"
    assert type(adapters()[trainer.name]).__module__ == f"autotune.step.trainers.{trainer.name}"


@EVERY
def test_its_search_space_names_techniques_that_it_has(trainer: Trainer) -> None:
    file = load(default_file(trainer.name), trainer.name, trainer.techniques)
    named = {*file.choices, *(knob for recipe in file.recipes for knob in recipe)}
    assert file.choices
    assert named <= {item.name for item in trainer.techniques}
    # Otherwise it would be accepted as the space of any trainer.
    assert yaml.safe_load(default_file(trainer.name).read_text(encoding="utf-8"))["trainer"] == trainer.name


@EVERY
def test_its_classes_are_those_of_trl_that_its_adapter_builds(trainer: Trainer) -> None:
    known = adapters()[trainer.name]
    assert issubclass(known.config, of_trl(trainer.config_class, trainer.name))
    assert issubclass(known.trainer, of_trl(trainer.trainer_class, trainer.name))
    assert trainer.loads_adapters == (known.head.auto_class is not None)


@EVERY
def test_its_fields_are_those_that_trl_s_configuration_has_beside_those_of_all_trainers(trainer: Trainer) -> None:
    transformers = importlib.import_module("transformers")
    common = {field.name for field in fields(transformers.TrainingArguments)}
    assert trainer.fields == {field.name for field in fields(of_trl(trainer.config_class, trainer.name))} - common


@EVERY
def test_each_of_its_fields_means_one_thing_to_a_trace(trainer: Trainer) -> None:
    meant = trainer.config_fields
    written = {path.split(".")[1] for item in trainer.techniques for path in item.writes if path.startswith("args.")}
    said = [*meant.traced, *meant.without_effect, *meant.assumed]
    assert len(said) == len(set(said))
    assert set(said) <= trainer.fields
    # Fields of transformers' class are declared once for all trainers.
    assert meant.reading <= meant.traced | meant.without_effect | meant.assumed.keys() | fields_of_kind("training")
    # Techniques may write traced fields, and into a field that is a mapping, whose other keys mean nothing to a trace.
    assert not meant.assumed.keys() & written


@EVERY
def test_a_dataset_without_its_columns_is_refused_by_their_names(
    trainer: Trainer, small_model_directory: Path, tmp_path: Path
) -> None:
    rows = [{"unheard_of": "a b"}, {"unheard_of": "c d e"}]
    with pytest.raises(InputError, match="unheard_of") as raised:
        prepared_rows(trainer, rows, small_model_directory, tmp_path)
    for form in trainer.formats:
        for column in form.columns:
            assert column in raised.value.hint


@EVERY_FORMAT
def test_rows_of_a_format_are_tokenised_and_described(trainer: Trainer, form: DatasetFormat, prepared: Prepare) -> None:
    found = prepared(trainer, form.name)
    known, profile = found.adapter, found.reply.dataset
    assert profile.format == form.name
    assert set(found.rows.column_names) >= set(known.columns)
    lengths = known.lengths(found.rows)
    documents = len(TEXTS) * form.documents
    assert lengths.shape == (documents, len(trainer.parts))
    min_kept_length = known.min_kept_length(found.rows).tolist()
    said = [trainer.document(tuple(row)) for row in lengths.tolist()]
    counted = Counter((max(one[0], least), *one[1:]) for one, least in zip(said, min_kept_length, strict=True))
    assert Counter(dict(of_groups(profile.documents))) == counted
    # Long-tailed rows are required: with one length, most of this suite would be meaningless.
    assert len(counted) > len(TEXTS) // 4
    assert profile.documents.rows == documents
    # TRL's loader yields each prompt once, however many completions are generated.
    assert not trainer.generates or profile.documents.tokens == lengths[:, 0].sum()
    if trainer.ordered:
        assert profile.documents.in_order(None).tolist() == [
            [max(one[0], least), *one[1:]] for one, least in zip(said, min_kept_length, strict=True)
        ]
    assert profile.lengths.longest == max(max(document[1:]) for document in counted)
    assert profile.trainable_tokens == known.trainable(found.rows).sum() > 0


def of_groups(documents: Documents) -> list[tuple[tuple[int, ...], int]]:
    """Return each distinct document with its count."""
    return [(tuple(group), count) for count, *group in documents.groups.rows().tolist()]


@EVERY_FORMAT
def test_no_sequence_of_a_document_is_longer_than_its_row(
    trainer: Trainer, form: DatasetFormat, prepared: Prepare
) -> None:
    found = prepared(trainer, form.name)
    for parts in found.adapter.lengths(found.rows).tolist():
        needs, *sequences = trainer.document(tuple(parts))
        assert needs >= 1
        assert 0 < max(sequences) <= sum(parts)


@EVERY
def test_trl_s_default_is_legal(trainer: Trainer, prepared: Prepare) -> None:
    found = prepared(trainer, trainer.formats[-1].name)
    assert trainer.illegal(found.baseline, found.setting) is None


@EVERY
@pytest.mark.parametrize("machine", [CPU, GPU], ids=["cpu", "gpu"])
def test_its_shipped_recipes_are_legal_where_everything_is_allowed(
    trainer: Trainer, machine: Machine, prepared: Prepare
) -> None:
    found = prepared(trainer, trainer.formats[-1].name)
    checks = {name: separates(name) for name in ("sdpa", "flash_attention_2")}
    setting = replace(found.setting, machine=machine, workload=replace(found.workload, packing_checks=checks))
    here = problem(setting, trainer=trainer.name)
    assert [here.illegal(recipe) for recipe in here.recipes if here.illegal(recipe)] == []


@EVERY
def test_its_phases_have_names_of_their_own_and_come_in_order(trainer: Trainer) -> None:
    here = setting()
    baseline = trainer.defaults(here)
    for candidate in candidates_near(trainer, baseline):
        program = trainer.program(trainer.plan(candidate, here))
        assert len(set(program.names)) == len(program.names)
        assert program.after == (SAVE,)
        assert (program.phases[0], *program.phases[-3:]) == (CONSTRUCTION, MICRO_BATCH, OPTIMIZER_STEP, SAVE)


@EVERY
def test_its_adapter_names_methods_of_trl_s_trainer_for_phases_that_it_has(trainer: Trainer) -> None:
    here, known = setting(), adapters()[trainer.name]
    baseline = trainer.defaults(here)
    plans = [trainer.plan(candidate, here) for candidate in candidates_near(trainer, baseline)]
    phases = {name for plan in plans for name in trainer.program(plan).names}
    assert set(known.methods) <= phases
    assert all(callable(getattr(known.trainer_class(plans[0]), method)) for method in known.methods.values())


def handed_over(found: Prepared, tmp_path: Path) -> tuple[Result, MeasuredCandidate]:
    """Return a result that recommends a trainer's baseline."""
    result = replace(a_result(), trainer=found.trainer.name, workload=found.setting.workload)
    assert result.recommended is not None
    plan = found.trainer.plan(found.baseline, found.setting)
    chosen = replace(result.recommended, candidate=found.baseline, plan=plan)
    return replace(result, recommended=chosen), chosen


@EVERY
def test_its_script_compiles_and_names_its_classes(trainer: Trainer, prepared: Prepare, tmp_path: Path) -> None:
    result, chosen = handed_over(prepared(trainer, trainer.formats[-1].name), tmp_path)
    text = script_text(measured(result, chosen), training_rows(result.workload, chosen.plan, tmp_path))
    code = compile(text, "train.py", "exec")
    assert {trainer.config_class, trainer.trainer_class} <= set(code.co_names)
    # What is left out leaves no gap.
    assert "\n\n\n\n" not in text


@EVERY
def test_its_configuration_names_only_fields_that_trl_s_parser_knows(
    trainer: Trainer, prepared: Prepare, tmp_path: Path
) -> None:
    result, chosen = handed_over(prepared(trainer, trainer.formats[-1].name), tmp_path)
    if not trainer.runs_by_command(chosen.plan):
        write_bundle(result, tmp_path / "bundle")
        assert sorted(file.name for file in (tmp_path / "bundle").iterdir()) == ["result.json", "train.py"]
        return
    given = measured(result, chosen)
    text = config_text(given, training_rows(result.workload, chosen.plan, tmp_path), tmp_path)
    launched = {"num_processes", *launch_keys(chosen.plan, tmp_path)}
    document = {name: value for name, value in yaml.safe_load(text).items() if name not in launched}
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump({**document, "output_dir": str(tmp_path)}), encoding="utf-8")
    config = of_trl(trainer.config_class, trainer.name)
    script = importlib.import_module(f"trl.scripts.{trainer.name}").make_parser()
    _, arguments, model, dataset = script.parse_args_and_config(["--config", str(file)], fail_with_unknown_args=True)
    assert isinstance(arguments, config)
    assert model.model_name_or_path == result.workload.model_source.name
    assert [item.path for item in dataset.datasets] == ["json"]
    plain = {name: value for name, value in chosen.plan.args.items() if not isinstance(value, dict)}
    assert json.dumps({name: getattr(arguments, name) for name in plain}) == json.dumps(plain)


BASE = """\
learning_rate: 1e-5  # mine
max_grad_norm: 0.5
optim: adafactor
gradient_checkpointing: false
per_device_train_batch_size: 8
gradient_accumulation_steps: 3
"""


@EVERY
@pytest.mark.parametrize("adapter", ["", "use_peft: true\nlora_r: 4\nlora_target_modules: [q_proj, v_proj]\n"])
def test_the_baseline_trains_as_trl_does_by_the_file(
    trainer: Trainer, adapter: str, prepared: Prepare, tmp_path: Path
) -> None:
    workload = prepared(trainer, trainer.formats[0].name).setting.workload
    base = a_base(tmp_path, BASE + adapter, trainer.name)
    search = started(base, of=workload)
    assert disagreements(base, search.plan) == {}
    documents = workload.dataset.documents
    assert trainer.geometry(search.plan, documents) == trainer.geometry(
        trainer.completed(base.plan, workload), documents
    )
    assert search.problem.choices["optimizer"] == ("adafactor",)
    other = search.problem.normal(search.problem.baseline.but(gradient_checkpointing="on"))
    plan = trainer.plan(other, search.problem.setting)
    text = edited_text(base, edits_of(base, EditTarget(plan), trainer, search.problem.setting))
    assert "learning_rate: 1e-5  # mine\n" in text
    assert disagreements(a_base(tmp_path, text.removeprefix(ROWS), trainer.name, "after.yaml"), plan) == {}
