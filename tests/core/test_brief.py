"""The ``repr`` and the text of results are short."""

from __future__ import annotations

from autotune.api.probe import ProbeResult
from autotune.core.documents.verdict import Outcome, Verdict
from tests.reporting.examples import a_result
from tests.reporting.plans import a_plan
from tests.reporting.rents import a_rent


def test_a_shell_shows_of_a_result_what_is_short_and_names_the_rest() -> None:
    for value in (a_plan(), a_rent(), ProbeResult(a_result())):
        shown = repr(value)
        assert len(shown) < 5000
        assert shown.startswith(f"{type(value).__name__}(")
    assert "status=<RunStatus.FOUND: 'found'>" in repr(a_result())
    assert "trials" in repr(a_result()).partition("further: ")[2]
    assert "headline='fits', reason=''" in repr(Verdict(Outcome.FITS, "fits"))


def test_printing_a_result_gives_a_line_for_each_short_field() -> None:
    for value in (a_plan(), a_rent(), a_result()):
        first, *lines, last = str(value).splitlines()
        assert first == type(value).__name__
        assert max(map(len, lines)) < 160
        assert last.startswith("  further: ")
    assert "  dataset: 'rows of 1024 tokens'" in str(a_plan()).splitlines()


def test_printing_a_search_gives_its_report() -> None:
    found = ProbeResult(a_result())
    assert str(found) == found._repr_markdown_()


def test_a_notebook_shows_a_search_as_its_report() -> None:
    shown = ProbeResult(a_result())._repr_markdown_()
    assert shown.startswith("# ")
    assert "Train with `" in shown
