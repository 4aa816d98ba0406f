"""The page in a real browser: charts, filters, an empty log, both themes, and two widths."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.core.documents.result import BaseFile
from autotune.units import GIB
from tests.reporting.examples import traced
from tests.reporting.pages import html
from tests.reporting.test_page_of_plan import planned

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None or DRIVER is None, reason="needs Debian's chromium and chromium-driver, which are not here"
    ),
]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of the page of a result in which there are figures for every chart."""
    result = traced()
    assert result.recommended is not None
    keys = {"gradient_checkpointing": {"gradient_checkpointing": True}}
    base = BaseFile("mine.yaml", keys, diff="--- a\n+++ b\n@@ -1 +1 @@\n-packing: false\n+packing: true\n")
    phased = replace(result.recommended, peaks={"generation": 9 * GIB, "micro-batch": 21 * GIB})
    file = tmp_path_factory.mktemp("page") / "report.html"
    file.write_text(html(replace(result, recommended=phased, base=base)), encoding="utf-8")
    return file.as_uri()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from selenium import webdriver
    from selenium.common.exceptions import WebDriverException

    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    profile = tmp_path_factory.mktemp("profile")
    for word in ("headless=new", "no-sandbox", "disable-gpu", "disable-background-networking", "disable-sync"):
        options.add_argument(f"--{word}")
    options.add_argument(f"--user-data-dir={profile}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    try:
        driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(str(DRIVER)))
    except WebDriverException as error:
        pytest.skip(f"chromium does not start here: {error.msg}")
    yield driver
    driver.quit()


@pytest.fixture(scope="module", params=[(1600, 1000), (400, 900)], ids=["wide", "narrow"])
def shown(request: pytest.FixtureRequest, browser: Any, page: str) -> Any:
    browser.set_window_size(*request.param)
    browser.get(page)
    return browser


@pytest.fixture
def reloaded(browser: Any, page: str) -> Iterator[None]:
    """Load the page again after a test that changes it."""
    yield
    browser.get(page)


def rows_shown(browser: Any) -> int:
    return int(
        browser.execute_script(
            "return [...document.querySelectorAll('#candidates tbody tr')].filter(r => !r.hidden).length"
        )
    )


def test_every_chart_is_drawn_and_nothing_is_logged(shown: Any) -> None:
    names = {element.get_attribute("id") for element in shown.find_elements("css selector", ".chart")}
    assert names == {"front", "step_recommended", "step_default"}
    for name in names:
        drawn = shown.find_elements("css selector", f"#{name} svg.main-svg")
        assert drawn, name
        assert drawn[0].size["width"] > 200
    assert shown.get_log("browser") == []


def test_bars_are_as_wide_as_their_share_of_a_table(shown: Any) -> None:
    script = """
    return [...document.querySelectorAll('td.bars span')].filter(bar => bar.checkVisibility()).map(bar =>
      [parseFloat(bar.style.width) / 100, bar.getBoundingClientRect(), bar.parentElement.clientWidth]);
    """
    bars = shown.execute_script(script)
    comparison, phases, choices, peak = 4, 2, 2, 22
    wide = shown.get_window_size()["width"] > 1000
    assert len(bars) == choices + (comparison + phases + peak if wide else 0)
    assert all(bar["height"] > 0 for _, bar, _ in bars)
    assert all(0.5 * share <= bar["width"] / cell <= share + 0.01 for share, bar, cell in bars)


def test_the_page_is_as_wide_as_the_window(shown: Any) -> None:
    width = shown.execute_script("return [document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert width[0] <= width[1]


def test_no_table_has_to_be_moved_sideways(shown: Any) -> None:
    tables = shown.find_elements("css selector", ".wide:has(table)")
    widths = [[int(one.get_property(side)) for side in ("scrollWidth", "clientWidth")] for one in tables]
    assert len(widths) == 5
    assert [needed for needed, given in widths if needed > given] == [], widths


@pytest.mark.usefixtures("reloaded")
def test_no_choice_is_broken_within_a_word(shown: Any) -> None:
    script = """
    const [changed, measured] = document.querySelectorAll('.stacked:has(td.bars) tbody tr:first-child td.words');
    changed.firstElementChild.textContent = 'adamw_torch_fused';
    measured.textContent = 'not measured: the trial or time limit was reached. '.repeat(4);
    return changed.firstElementChild.getClientRects().length;
    """
    assert shown.execute_script(script) == 1


def test_no_label_of_an_axis_lies_on_the_next(shown: Any) -> None:
    script = """
    const found = [];
    for (const axis of document.querySelectorAll('.chart .xaxislayer-above')) {
      const upright = tick => !/rotate\\((?!0,)/.test(tick.getAttribute('transform'));
      const boxes = [...axis.querySelectorAll('.xtick text')].filter(upright).map(tick => tick.getBoundingClientRect());
      boxes.sort((one, other) => one.left - other.left);
      const lies = boxes.some((box, place) => place && box.left < boxes[place - 1].right);
      if (lies) found.push(axis.closest('.chart').id);
    }
    return found;
    """
    assert shown.execute_script(script) == []


def test_the_label_of_the_budget_lies_on_no_candidate(shown: Any) -> None:
    script = """
    const label = document.querySelector('#front .annotation-text').getBoundingClientRect();
    const marks = [...document.querySelectorAll('#front .points path')].map(mark => mark.getBoundingClientRect());
    return marks.filter(mark => mark.left < label.right && label.left < mark.right
                                && mark.top < label.bottom && label.top < mark.bottom).length;
    """
    assert shown.execute_script(script) == 0


@pytest.mark.usefixtures("reloaded")
def test_filters_leave_the_trials_that_have_the_words_and_the_outcome(shown: Any) -> None:
    words, status = (shown.find_element("id", name) for name in ("words", "status"))
    assert rows_shown(shown) == 9
    words.send_keys("packing=bfd lora=r16")
    assert rows_shown(shown) == 3
    assert shown.find_element("id", "count").text == "3 shown"
    words.clear()
    words.send_keys(" ")
    status.send_keys("out of memory")
    assert rows_shown(shown) == 1


@pytest.mark.usefixtures("reloaded")
def test_the_charts_follow_the_theme_of_the_system(shown: Any) -> None:
    def ink(theme: str) -> str:
        features = [{"name": "prefers-color-scheme", "value": theme}]
        shown.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        # The change is heard of with the next frame.
        shown.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
        script = "return getComputedStyle(document.querySelector('#front .xtick text')).fill"
        return str(shown.execute_script(script))

    light = ink("light")
    assert ink("dark") != light
    assert ink("light") == light
    assert shown.get_log("browser") == []


def test_paper_has_each_table_and_difference_whole(browser: Any, page: str) -> None:
    # US letter within the margins that Chromium chooses.
    browser.set_window_size(740, 1000)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    browser.get(page)
    tables = "return [...document.querySelectorAll('.wide')].map(one => one.scrollWidth - one.clientWidth)"
    hidden = browser.execute_script(tables)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    assert hidden == [0] * 6


@pytest.mark.usefixtures("reloaded")
def test_the_page_of_a_plan_is_drawn_and_filtered_as_well(browser: Any, tmp_path: Path) -> None:
    file = tmp_path / "plan.html"
    file.write_text(html(planned()), encoding="utf-8")
    browser.get(file.as_uri())
    names = {element.get_attribute("id") for element in browser.find_elements("css selector", ".chart")}
    assert names == {"front", "step_recommended", "step_default"}
    assert all(browser.find_elements("css selector", f"#{name} svg.main-svg") for name in names)
    browser.find_element("id", "status").send_keys("does not fit")
    assert rows_shown(browser) == 1
    assert browser.get_log("browser") == []


def test_pictures_are_left_for_whoever_changed_the_page(shown: Any, tmp_path: Path) -> None:
    file = tmp_path / "page.png"
    assert shown.save_screenshot(str(file))
    assert file.stat().st_size > 10_000
