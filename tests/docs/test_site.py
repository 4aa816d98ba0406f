"""Every page of the project: its links work, the site has it, and the site's check finds differences from GitHub."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

import autotune
from docs.site.check import faults
from tests.docs.pages import ROOT, anchors, links, pages

NAVIGATION = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
SHOWN = "<html><body><article><h1>Title<a class='headerlink' href='#t'>¶</a></h1>{}</article></body></html>"


def test_the_navigation_has_every_page() -> None:
    names = [page.relative_to(ROOT).as_posix().removeprefix("docs/site/pages/") for page in pages()]
    assert [name for name in names if not re.search(rf" {re.escape(name)}$", NAVIGATION, re.MULTILINE)] == []


def test_the_reference_has_every_public_name() -> None:
    page = (ROOT / "docs" / "site" / "pages" / "api.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^::: autotune\.(\w+)$", page, re.MULTILINE)) == sorted(autotune.__all__)


@pytest.mark.parametrize(
    ("source", "shown", "expected"),
    [
        pytest.param("Words", "<p>Words</p>", [], id="the same"),
        pytest.param("Words\n- item", "<p>Words - item</p>", ["shown as"], id="a list as text"),
        pytest.param("- a\n  - b", "<ul><li>a</li><li>b</li></ul>", ["shown as"], id="a list within a list as one"),
        pytest.param("Words", "<p><a href='gone/'>Words</a></p>", ["broken link gone/"], id="a broken link"),
        pytest.param(
            "Words", "<p><a href='#gone'>Words</a></p>", ["broken link #gone"], id="a heading that is not there"
        ),
        pytest.param(
            "", "<img src='https://host/a.png'>", ["loads https://host/a.png"], id="a picture of another host"
        ),
    ],
)
def test_the_check_finds(source: str, shown: str, expected: list[str], tmp_path: Path) -> None:
    site, root = tmp_path / "site", tmp_path
    site.mkdir()
    (root / "README.md").write_text(f"# Title\n\n{source}\n", encoding="utf-8")
    anchored = SHOWN.format(shown).replace("<h1>", "<h1 id='t'>")
    (site / "index.html").write_text(anchored, encoding="utf-8")

    found = faults(site, root)

    assert len(found) == len(expected)
    assert all(words in fault for words, fault in zip(expected, found, strict=True))


def test_every_link_leads_somewhere() -> None:
    broken = []
    for page, link in [(each, link) for each in pages() for link in links(each)]:
        path, _, anchor = link.partition("#")
        if "://" in link or path.startswith("mailto:"):
            continue
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append((page, link))
    assert broken == []


def test_no_item_is_in_a_list_only_on_github() -> None:
    # The site's Markdown wants four spaces before an item within an item.
    for page in pages():
        lines = page.read_text(encoding="utf-8").splitlines()
        items = [token for token in MarkdownIt().parse("\n".join(lines)) if token.type == "list_item_open"]
        nested = [lines[token.map[0]] for token in items if token.map and token.level > 1]
        assert [line for line in nested if not line.startswith("    ")] == [], page


def test_a_page_has_the_anchors_that_github_gives_to_its_headings(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    lines = [
        "# `result.json`, schema 1",
        "## A [link](x) & more",
        "```",
        "# no heading",
        "```",
        "## A link  more",
        "# max_length",
    ]
    page.write_text("\n".join(lines))
    assert anchors(page) == {"resultjson-schema-1", "a-link--more", "a-link--more-1", "max_length"}
