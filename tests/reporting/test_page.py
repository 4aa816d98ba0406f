"""A report as HTML and Markdown: complete, self-contained, and safe with foreign names."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from autotune.core.documents.result import Result
from tests.reporting.examples import a_result, nothing_fits
from tests.reporting.pages import html, markdown

HOSTILE = "</script><script>alert('x')</script><img src=x onerror=alert(1)>"


class _Reader(HTMLParser):
    """Collects the elements of a page, the addresses that it loads from, and the handlers that it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.loaded: list[str] = []
        self.handlers: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self.loaded += [
            value or "" for name, value in attrs if name in ("src", "href") and not f"{value}".startswith("#")
        ]
        self.handlers += [name for name, _ in attrs if name.startswith("on")]


def hostile() -> Result:
    """Return a result in which everything that comes from outside would like to be a script."""
    result = a_result()
    workload, source = result.workload, f"{HOSTILE}.jsonl"
    trials = (replace(result.trials[0], reason=HOSTILE), *result.trials[1:])
    return replace(
        result,
        workload=replace(
            workload,
            model=replace(workload.model, name=HOSTILE, architecture=HOSTILE),
            dataset=replace(workload.dataset, name=source),
        ),
        trials=trials,
        notes=(HOSTILE,),
        output_directory=HOSTILE,
        environment={HOSTILE: HOSTILE},
        settings={"output": HOSTILE},
    )


def own(page: str) -> str:
    """Return the page without Plotly."""
    start, end = page.index("<script>", page.index('id="figures"')), page.rindex("<script>")
    return page[:start] + page[end:]


@pytest.mark.parametrize("result", [a_result(), nothing_fits(), hostile()], ids=["found", "nothing fits", "hostile"])
def test_a_page_loads_nothing_and_fits_in_a_mail(result: Result) -> None:
    page = html(result)
    assert len(page.encode()) < 6_000_000
    read = _Reader(own(page))
    assert read.loaded == []
    assert read.handlers == []
    assert "default-src 'none'" in page


def test_a_hostile_name_stays_a_name() -> None:
    plain, page = own(html(a_result())), own(html(hostile()))
    assert _Reader(page).elements.count("script") == _Reader(plain).elements.count("script") == 2
    assert "img" not in _Reader(page).elements
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert" in page


def test_the_figures_of_a_hostile_result_are_still_json() -> None:
    page = html(hostile())
    (figures,) = re.findall(r'<script type="application/json" id="figures">(.*?)</script>', page, flags=re.DOTALL)
    assert json.loads(figures).keys() >= {"front"}


def test_every_trial_has_its_row() -> None:
    assert own(html(a_result())).count("<tr data-status=") == len(a_result().trials)


def test_every_chart_has_its_text() -> None:
    page = own(html(a_result()))
    names = re.findall(r'class="chart" id="(\w+)"', page)
    assert names
    for name in names:
        assert f'aria-describedby="{name}-caption"' in page
        assert re.search(rf'<figcaption id="{name}-caption">\S', page)


def test_markdown_ends_with_the_arguments_of_the_search() -> None:
    assert markdown(a_result(settings={"base": "mine.yaml"})).endswith("\n- base: mine.yaml\n")


def test_markdown_leaves_code_as_it_is_but_for_the_bars_that_would_end_a_cell() -> None:
    result = a_result()
    piped = replace(result, contributions=(replace(result.contributions[0], choice="a|b"),))
    assert r"| `packing=a\|b` |" in markdown(piped)


def test_markdown_makes_no_html_of_a_hostile_name() -> None:
    outside_code = re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", markdown(hostile()))
    assert "<script" not in re.sub(r"\\.", "", outside_code)
    assert "<img" not in re.sub(r"\\.", "", outside_code)
