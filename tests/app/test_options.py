"""What a user may ask for is checked before anything is started, and each refusal names the thing."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.app.arguments import ProbeArguments
from autotune.app.options import Options, probe_options
from autotune.errors import InputError

ASKED: dict[str, Any] = {
    "trainer": "sft",
    "device": "auto",
    "margin": 0.05,
    "global_batch_size": None,
    "max_length": None,
    "token_coverage": None,
    "allow": (),
    "fix": {},
    "exclude": (),
    "space": None,
    "effort": "normal",
    "trials": None,
    "timeout": None,
    "seed": 42,
}


def options(**changes: Any) -> Options:
    return probe_options(ProbeArguments(**{**ASKED, **changes}))


def test_nothing_has_to_be_said() -> None:
    found = options()
    assert found.token_coverage == 0.99
    assert found.effort.name == "normal"
    assert found.timeout_seconds is None


def test_a_fixed_choice_is_thereby_allowed() -> None:
    assert options(fix={"lora": "r16"}).allowed == {"lora"}


def test_max_length_is_short_for_fixing_it() -> None:
    assert options(max_length=2048).wishes.fixed == {"max_length": 2048}
    assert options(max_length=2048, fix={"max_length": "2048"}).wishes.fixed == {"max_length": 2048}


def test_a_timeout_is_said_in_words_or_seconds() -> None:
    assert options(timeout="1h30m").timeout_seconds == 5400
    assert options(timeout=90.0).timeout_seconds == 90


def test_reading_and_tracing_take_their_time_from_the_limit_of_the_search() -> None:
    assert options(timeout=90.0).after(30).timeout_seconds == 60
    assert options(timeout=90.0).after(100).timeout_seconds == 0
    assert options().after(30).timeout_seconds is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trainer": "ppo"}, "no trainer 'ppo'"),
        ({"device": "tpu"}, "no device 'tpu'"),
        ({"effort": "heroic"}, "no effort 'heroic'"),
        ({"margin": 0.9}, "margin of 0.9"),
        ({"token_coverage": 1.5}, "token coverage of 1.5"),
        ({"global_batch_size": 0}, "global batch size of 0"),
        ({"max_length": -5}, "maximum length of -5"),
        ({"trials": 0}, "trials of 0"),
        ({"timeout": "soon"}, "'soon' is not a duration"),
        ({"timeout": -1.0}, "A time-out of -1 seconds is not possible"),
        ({"max_length": 512, "token_coverage": 0.9}, "contradict each other"),
        ({"max_length": 512, "fix": {"max_length": 1024}}, "contradicts --fix max_length=1024"),
        ({"fix": {"packin": "bfd"}}, "Did you mean 'packing'"),
        ({"fix": {"packing": "bfdd"}}, "Did you mean 'bfd'"),
        ({"allow": ["lorra"]}, "Did you mean 'lora'"),
        ({"exclude": ["ligr"]}, "Did you mean 'liger'"),
        ({"exclude": ["lora"], "fix": {"lora": "r8"}}, "both fixed and excluded"),
        ({"space": "nowhere.yaml"}, "nowhere.yaml does not exist"),
        ({"prompt_coverage": 0.99}, "SFT generates no completions, so it takes no --prompt-coverage"),
        ({"reward_funcs": ["a.b"]}, "SFT has no reward functions, so it takes no --reward-funcs"),
        ({"teacher": "some/model"}, "SFT has no teacher, so it takes no --teacher"),
        ({"trainer": "grpo", "prompt_coverage": 0.0}, "prompt coverage of 0.0"),
        ({"trainer": "rloo", "prompt_coverage": 1.01}, "prompt coverage of 1.01"),
    ],
)
def test_what_cannot_be_used_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        options(**changes)
