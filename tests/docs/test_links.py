"""Every link from one page of the project to another, or to a file, leads there, and to a heading that exists."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.pages import ROOT, anchors, links, pages


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    broken = []
    for link in links(page):
        path, _, anchor = link.partition("#")
        if "://" in link or path.startswith("mailto:"):
            continue
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


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
