"""Adds the repository's own pages to the site, each at its path there, so that links work as on GitHub."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

PAGES = (
    "*.md",
    "docs/*.md",
    "autotune/nullgpu/README.md",
    "benchmarks/**/*.md",
    "examples/README.md",
    "examples/*/README.md",
)
REPORTS = "examples/build/*/found/report.html"
_LINK = re.compile(r"\]\(([^)#:\s]+)")
_LISTED = "<!-- reports -->"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages, the files that they link, and the reports of examples that were run."""
    root = Path(config.config_file_path).parent
    for pattern in PAGES:
        for page in sorted(root.glob(pattern)):
            _add(files, config, root, page)
            for link in _LINK.findall(page.read_text(encoding="utf-8")):
                linked = (page.parent / link).resolve()
                if linked.is_file() and linked.suffix != ".md":
                    _add(files, config, root, linked)
    for report in sorted(root.glob(REPORTS)):
        _add(files, config, root, report)
    return files


def on_page_markdown(markdown: str, page: Page, files: Files, **_: object) -> str:
    """List the reports, and leave the tables of benchmarks out of the search, which would find nothing else."""
    name = page.file.src_uri
    if name.startswith("benchmarks/") and not name.endswith("README.md"):
        page.meta["search"] = {"exclude": True}
    reports = [Path(file.src_uri) for file in files if Path(file.src_uri).match(REPORTS)]
    rows = [f"| [{report.parts[2]}](examples/{report.parts[2]}/README.md) | [report]({report}) |" for report in reports]
    return markdown.replace(_LISTED, "\n".join(["| example | its report |", "|---|---|", *rows]))


def _add(files: Files, config: MkDocsConfig, root: Path, file: Path) -> None:
    name = file.relative_to(root).as_posix()
    if files.get_file_from_path(name) is None:
        files.append(File(name, str(root), config.site_dir, config.use_directory_urls))
