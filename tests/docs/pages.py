"""The project's pages of Markdown, parsed as GitHub does: their links and the names of their headings."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from urllib.parse import unquote

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parents[2]
# Folders that have no page, or pages of others: environments and what runs write.
_WITHOUT = {"build", "site-packages", "model-data-sft"}
_MARKDOWN = MarkdownIt("commonmark").enable(["table", "strikethrough"])
_NOT_IN_AN_ANCHOR = re.compile(r"[^\w\- ]")


def pages() -> list[Path]:
    """Return every page of the project."""
    found = [*ROOT.glob("*.md"), *(page for folder in _folders() for page in folder.rglob("*.md"))]
    return sorted(page for page in found if _WITHOUT.isdisjoint(page.relative_to(ROOT).parts))


def links(page: Path) -> list[str]:
    """Return the targets of a page's links and pictures."""
    inline = (child for token in _tokens(page) for child in token.children or ())
    found = (token.attrGet("href") or token.attrGet("src") for token in inline)
    return [unquote(str(target)) for target in found if target]


def code(page: Path) -> list[str]:
    """Return the texts of a page's code spans."""
    return [child.content for token in _tokens(page) for child in token.children or () if child.type == "code_inline"]


def python_of(page: Path) -> list[str]:
    """Return what a page has in Python: its blocks, and its calls of autotune in code spans."""
    blocks = [token.content for token in _tokens(page) if token.type == "fence" and token.info == "python"]
    return [*blocks, *(text.replace("…", "...") for text in code(page) if text.startswith("autotune.") and "(" in text)]


@cache
def anchors(page: Path) -> frozenset[str]:
    """Return the names that GitHub gives to a page's headings."""
    found: list[str] = []
    for title in _titles(page):
        name = _NOT_IN_AN_ANCHOR.sub("", title.strip().lower()).replace(" ", "-")
        found.append(f"{name}-{found.count(name)}" if name in found else name)
    return frozenset(found)


def _folders() -> Iterator[Path]:
    return (each for each in ROOT.iterdir() if each.is_dir() and each.name[0] not in "._" and each.name != "site")


@cache
def _tokens(page: Path) -> tuple[Token, ...]:
    return tuple(_MARKDOWN.parse(page.read_text(encoding="utf-8")))


def _titles(page: Path) -> Iterator[str]:
    tokens = _tokens(page)
    for token, following in itertools.pairwise(tokens):
        if token.type == "heading_open":
            yield "".join(child.content for child in following.children or () if child.type in ("text", "code_inline"))
