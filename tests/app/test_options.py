"""Options are checked before anything is started, and each refusal names the option."""

from __future__ import annotations

import re
from datetime import timedelta
from math import nan
from typing import Any, get_args

import pytest

from autotune.app.arguments import (
    CatalogueArguments,
    CheckArguments,
    PlanArguments,
    ProbeArguments,
    RentArguments,
    time_limit,
)
from autotune.app.options import Options, probe_options
from autotune.core.effort import EFFORTS, EffortName
from autotune.errors import InputError
from autotune.inspection.machine import memory_budget
from autotune.units import GIB
from tests.settings import GPU


def options(**changes: Any) -> Options:
    return probe_options(ProbeArguments(**changes))


def test_nothing_has_to_be_said() -> None:
    assert options().token_coverage == 0.99
    assert ProbeArguments().effort == "normal"
    assert time_limit(ProbeArguments().timeout) is None


def test_an_effort_is_one_of_those_that_there_are() -> None:
    assert get_args(EffortName) == tuple(EFFORTS)


def test_a_fixed_choice_is_thereby_allowed() -> None:
    assert options(fix={"lora": "r16"}).allowed == {"lora"}


def test_max_length_is_short_for_fixing_it() -> None:
    assert options(max_length=2048).fixed == {"max_length": 2048}
    assert options(max_length=2048, fix={"max_length": "2048"}).fixed == {"max_length": 2048}


def test_a_timeout_is_said_in_words_or_seconds_and_a_budget_may_be_in_plain_bytes() -> None:
    assert (time_limit("1h30m"), time_limit(90.0), time_limit("600")) == (5400, 90, 600)
    assert memory_budget("25769803776", GPU.hardware) == 24 * GIB


def test_a_list_may_be_one_text_as_on_the_command_line() -> None:
    found = options(allow="lora, precision", exclude="liger")
    assert (found.allowed, found.excluded) == ({"lora", "precision"}, {"liger"})
    assert options(trainer="grpo", reward_funcs="a.b,c.d").rollouts.rewards == ("a.b", "c.d")


@pytest.mark.parametrize("seed", [-1, 1 << 31])
def test_a_seed_that_numpy_does_not_take_is_refused(seed: int) -> None:
    with pytest.raises(InputError, match=f"A seed of {seed} is not possible. It lies between 0 and 2,147,483,647."):
        options(seed=seed)


def test_a_length_that_is_no_decimal_number_is_the_name_of_a_column() -> None:
    for name in ("²", "--5"):
        assert options(trainer="grpo", completion_length=name).rollouts.column == name


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        (ProbeArguments, {"workers": "two"}, "workers cannot be 'two'. It is a whole number or auto."),
        (ProbeArguments, {"init": "zeros"}, "init cannot be 'zeros'. It is random or pretrained."),
        (
            RentArguments,
            {"model": "m", "num_processes": "all"},
            "num_processes cannot be 'all'. It is a whole number or auto.",
        ),
        (
            CheckArguments,
            {"config": "a.yaml", "when_unsure": "stop"},
            "when_unsure cannot be 'stop'. It is pass or fail.",
        ),
        (CatalogueArguments, {"device": "gpu"}, "device cannot be 'gpu'. It is auto, cuda or cpu."),
    ],
)
def test_a_word_that_an_argument_does_not_have_is_refused_with_those_it_has(
    kind: Any, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        kind(**given)


class Dataset:
    """Prints its rows, as ``datasets.Dataset`` prints its columns."""

    def __repr__(self) -> str:
        return "a secret row"


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        (PlanArguments, {"global_batch_size": "8"}, "global_batch_size cannot be '8'. It is a whole number."),
        (PlanArguments, {"top": "3"}, "top cannot be '3'. It is a whole number."),
        (PlanArguments, {"top": True}, "top cannot be True. It is a whole number."),
        (PlanArguments, {"explain": 1}, "explain cannot be 1. It is True or False."),
        (PlanArguments, {"gpu": 24.5}, "gpu cannot be 24.5. It is a text or a whole number."),
        (PlanArguments, {"fix": "lora=r8"}, "fix cannot be 'lora=r8'. It is a dictionary."),
        (PlanArguments, {"allow": 3}, "allow cannot be 3. It is a list."),
        (PlanArguments, {"allow": ["lora", 3]}, "An item of allow cannot be 3. It is a text."),
        (PlanArguments, {"allow": iter(["lora", 3])}, "An item of allow cannot be 3. It is a text."),
        (PlanArguments, {"fix": {3: "r8"}}, "A key of fix cannot be 3. It is a text."),
        (CheckArguments, {"config": ["trl", 3]}, "An item of config cannot be 3. It is a text."),
        (PlanArguments, {"model": None}, "model cannot be None. It is a text or a path."),
        (PlanArguments, {"listener": 3}, "listener cannot be 3. It is a function."),
        (
            PlanArguments,
            {"trainer": Dataset},
            "trainer cannot be the class Dataset. It is a text. Give its name, such as 'sft'.",
        ),
        (
            ProbeArguments,
            {"timeout": timedelta(minutes=1)},
            "timeout cannot be an object of the class timedelta. It is a text or a number.",
        ),
        (
            ProbeArguments,
            {"base": Dataset()},
            "base cannot be an object of the class Dataset. It is a text or a path. Give its YAML file.",
        ),
    ],
)
def test_an_argument_of_another_type_is_refused_by_name_and_no_object_is_printed(
    kind: Any, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError) as raised:
        kind(**{**({"model": "m"} if kind is PlanArguments else {}), **given})
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("model", "Write it with `model.save_pretrained(DIR)` and `tokenizer.save_pretrained(DIR)`, and give DIR."),
        ("teacher", "Write it with `model.save_pretrained(DIR)` and `tokenizer.save_pretrained(DIR)`, and give DIR."),
        ("dataset", "Write the rows to a file, as with `dataset.to_parquet('rows.parquet')`, and give its name."),
        ("eval_dataset", "Write the rows to a file, as with `dataset.to_parquet('rows.parquet')`, and give its name."),
    ],
)
def test_for_an_object_in_place_of_a_name_the_refusal_has_how_to_write_it(name: str, remedy: str) -> None:
    given: dict[str, Any] = {name: Dataset()}
    with pytest.raises(InputError) as raised:
        ProbeArguments(**given)
    assert str(raised.value) == f"{name} cannot be an object of the class Dataset. It is a text or a path. {remedy}"


def test_none_is_the_default_of_an_argument_that_has_no_other_use_for_it() -> None:
    unset: dict[str, Any] = dict.fromkeys(("allow", "trainer", "top"))
    asked = PlanArguments("m", **unset)
    assert (asked.allow, asked.trainer, asked.top) == ((), "sft", 20)
    assert PlanArguments("m", gpu=None, num_processes=None).gpu is None


def test_a_generator_of_names_is_read_once() -> None:
    assert options(allow=(name for name in ("lora", "precision"))).allowed == {"lora", "precision"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trainer": "ppo"}, "no trainer 'ppo'"),
        ({"device": "tpu"}, "device cannot be 'tpu'. It is auto, cuda or cpu"),
        ({"effort": "heroic"}, "effort cannot be 'heroic'. It is quick, normal or thorough"),
        ({"margin": 0.9}, "margin of 0.9"),
        ({"token_coverage": 1.5}, "token coverage of 1.5"),
        ({"global_batch_size": 0}, "global batch size of 0"),
        ({"max_length": -5}, "maximum length of -5"),
        ({"trials": 0}, "trials of 0"),
        ({"timeout": "soon"}, "'soon' is not a duration"),
        ({"timeout": -1.0}, "A time-out of -1 seconds is not possible"),
        ({"timeout": nan}, "A time-out of nan seconds is not possible"),
        ({"max_length": 512, "token_coverage": 0.9}, "--max-length and --token-coverage contradict each other"),
        ({"fix": {"max_length": "512"}, "token_coverage": 0.9}, "--fix max_length and --token-coverage contradict"),
        ({"max_length": 512, "fix": {"max_length": 1024}}, "contradicts --fix max_length=1024. Give one of them."),
        ({"fix": {"packin": "bfd"}}, "Did you mean 'packing'"),
        ({"fix": {"packing": "bfdd"}}, "Did you mean 'bfd'"),
        (
            {"trainer": "online_dpo", "fix": {"max_completion_length": 32}},
            "no knob 'max_completion_length' for this trainer. The knobs are .*max_new_tokens",
        ),
        ({"allow": ["lorra"]}, "Did you mean 'lora'"),
        ({"exclude": ["ligr"]}, "Did you mean 'liger'"),
        ({"exclude": ["lora"], "fix": {"lora": "r8"}}, "both fixed and excluded"),
        ({"space": "nowhere.yaml"}, "nowhere.yaml does not exist"),
        ({"prompt_coverage": 0.99}, "SFT generates no completions, so it takes no --prompt-coverage"),
        ({"reward_funcs": ["a.b"]}, "SFT has no reward functions, so it takes no --reward-funcs"),
        ({"teacher": "some/model"}, "SFT has no teacher, so it takes no --teacher"),
        ({"trainer": "grpo", "prompt_coverage": 0.0}, "prompt coverage of 0.0"),
        ({"trainer": "rloo", "max_length": 512}, "RLOO cuts no prompts, so it takes no --max-length"),
        ({"trainer": "rloo", "prompt_coverage": 1.01}, "prompt coverage of 1.01"),
    ],
)
def test_what_cannot_be_used_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        options(**changes)


def test_the_settings_of_a_check_are_what_differs_from_the_defaults_and_what_is_checked() -> None:
    assert CheckArguments("mine.yaml").settings == {"config": "mine.yaml"}
    given = CheckArguments(("trl", "sft", "--config", "mine.yaml"), fits=False, gpu="T4").settings
    assert given == {"command": ("trl", "sft", "--config", "mine.yaml"), "fits": False, "gpu": "T4"}
