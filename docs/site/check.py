"""Checks a built site: its pages show what GitHub shows of the same Markdown, and load nothing from another host."""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from markdown_it import MarkdownIt

_BLOCKS = ("p", "li", "td", "th", "pre", "h1", "h2", "h3", "h4", "h5", "h6")
_LISTS = ("ul", "ol", "blockquote")
_LOADED = {"img": "src", "script": "src", "link": "href", "iframe": "src", "source": "src"}
_URL_IN_STYLE = re.compile(r"url\(\s*['\"]?((?:https?:)?//[^)'\"]+)|@import\s+['\"]((?:https?:)?//[^'\"]+)")


class Page(HTMLParser):
    """What a page of HTML shows and loads.

    Attributes:
        blocks: paragraphs, items, cells, headings and blocks of code, each with the depth of lists that it is in.
        loaded: the addresses of what a browser loads to show the page.
        links: those of links.
        anchors: the names of its elements.
    """

    def __init__(self, text: str, only: str | None = None) -> None:
        super().__init__()
        self.blocks: list[tuple[str, int, str]] = []
        self.loaded: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self._only = only
        self._inside = only is None
        self._hidden = 0
        self._depth = 0
        self._open: list[str] = []
        self._words: list[str] = []
        self.feed(text)
        self.close()
        self._end()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what starts."""
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if given.get(name)}
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        if tag in _LOADED and given.get(_LOADED[tag]) and given.get("rel") != "canonical":
            self.loaded.append(given[_LOADED[tag]])
        if tag == self._only:
            self._inside = True
        self._hidden += tag == "a" and "headerlink" in given.get("class", "")
        self._depth += tag in _LISTS
        if tag in _BLOCKS or tag in _LISTS:
            self._end()
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        """Note what ends."""
        if tag in self._open:
            self._end()
            while self._open.pop() != tag:
                pass
        self._depth -= tag in _LISTS
        if tag == "a":
            self._hidden = 0
        if tag == self._only:
            self._end()
            self._inside = False

    def handle_data(self, data: str) -> None:
        """Note text."""
        if self._inside and not self._hidden:
            self._words.append(data)

    def _end(self) -> None:
        shown = " ".join("".join(self._words).split())
        self._words.clear()
        if shown:
            # Whether an item's text is a paragraph depends on empty lines between items, and shows hardly.
            block = next((tag for tag in reversed(self._open) if tag != "p"), "p")
            self.blocks.append((block if block not in _LISTS else "p", self._depth, shown))


def differences(page: Path, built: Path) -> list[str]:
    """Return what a built page shows otherwise than GitHub shows its source."""
    there = MarkdownIt("commonmark").enable(["table", "strikethrough"]).render(page.read_text(encoding="utf-8"))
    expected, found = Page(there).blocks, Page(built.read_text(encoding="utf-8"), "article").blocks
    if expected == found:
        return []
    place = next((n for n, pair in enumerate(zip(expected, found, strict=False)) if pair[0] != pair[1]), -1)
    return [f"{page}: shown as {found[place : place + 1]}, on GitHub as {expected[place : place + 1]}"]


def faults(site: Path, root: Path) -> list[str]:
    """Return what is wrong with a built site: broken links, what other hosts would send, pages unlike GitHub's."""
    built = {file: Page(file.read_text(encoding="utf-8")) for file in sorted(site.rglob("*.html"))}
    found = []
    for file, page in built.items():
        name = file.relative_to(site)
        found += [f"{name} loads {address}" for address in page.loaded if urlsplit(address).netloc]
        # The page for what is not found has addresses from the site's root, wherever that will be.
        links = () if file.name == "404.html" else page.links
        found += [f"{name} has the broken link {link}" for link in links if not _leads(link, file, built)]
        sources = (root / name.parent / "README.md", root / f"{name.parent}.md")
        source = next((path for path in sources if path.is_file()), None)
        found += differences(source, file) if source is not None and file.name == "index.html" else []
    for style in site.rglob("*.css"):
        addresses = _URL_IN_STYLE.findall(style.read_text(encoding="utf-8"))
        found += [f"{style.relative_to(site)} loads {address}" for pair in addresses for address in pair if address]
    return found


def _leads(link: str, file: Path, built: dict[Path, Page]) -> bool:
    address = urlsplit(link)
    if address.scheme or address.netloc:
        return True
    target = (file.parent / unquote(address.path)).resolve() if address.path else file
    target = target / "index.html" if target.is_dir() else target
    named = not address.fragment or target not in built or unquote(address.fragment) in built[target].anchors
    return target.is_file() and named


def main() -> None:
    """Check the site that the command line names."""
    found = faults(Path(sys.argv[1]).resolve(), Path.cwd())
    print("\n".join(found) or "the site is as it should be")
    raise SystemExit(bool(found))


if __name__ == "__main__":
    main()
