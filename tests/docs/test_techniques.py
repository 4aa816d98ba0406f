"""``docs/techniques.md`` follows from the catalogue and the installed TRL, and covers TRL's guides."""

from __future__ import annotations

from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from autotune.techniques import catalogue
from autotune.techniques.base import Technique, facts
from autotune.techniques.versions import accepted_versions
from autotune.trainers import trainers
from tests.docs.guides import ELSEWHERE, GUIDES
from tests.docs.technique_table import NEWEST, document, missing_fields

PAGE = Path(__file__).resolve().parents[2] / "docs" / "techniques.md"
NAMED = {name for names in GUIDES.values() for name in names}


@pytest.mark.skipif(
    NEWEST["kernels"] not in SpecifierSet(accepted_versions("kernels")), reason="transformers needs other kernels"
)
def test_the_page_is_what_the_code_says() -> None:
    assert PAGE.read_text(encoding="utf-8") == document(), "run `make docs`"


@pytest.mark.parametrize("trainer", trainers())
def test_a_trainer_has_the_techniques_whose_fields_its_configuration_has(trainer: str) -> None:
    known = trainers()[trainer]
    expected = {
        technique.name
        for technique in catalogue()
        if not missing_fields(technique, trainer) and not facts(technique, trainer).without_effect
    }
    assert {technique.name for technique in known.techniques} == expected


@pytest.mark.parametrize("technique", catalogue(), ids=lambda technique: technique.name)
def test_what_a_technique_says_of_trainers_names_trainers_and_its_own_choices(technique: Technique) -> None:
    choices = {option.choice for option in technique.options}
    assert technique.by_trainer.keys() <= trainers().keys()
    for own in technique.by_trainer.values():
        assert {*own.refused, *own.ignored, *own.restricted} <= choices


def test_everything_that_the_guides_name_is_a_technique_or_has_a_reason() -> None:
    techniques = {technique.name for technique in catalogue()}
    assert techniques | set(ELSEWHERE) >= NAMED
    assert techniques.isdisjoint(ELSEWHERE), "it is a technique now: take it out of ELSEWHERE"
    assert set(ELSEWHERE) <= NAMED
