"""Writes a report as one self-contained HTML page: no network, no other file."""

from __future__ import annotations

from importlib.resources import files

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from autotune.reporting.document import Bar, Cell, Code, Document, Line, Medium, Tone
from autotune.reporting.page.charts import charts


def html_page(document: Document) -> str:
    """Return the page of a report; names, paths and errors of probes are escaped."""
    here = files(__package__)
    drawn = charts(document)
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False}
    environment.filters.update(part=_part, line=_line, mark=_mark)
    environment.tests["shown"] = lambda section: section.medium is not Medium.TERMINAL
    template = environment.from_string((here / "page.html").read_text(encoding="utf-8"))
    return template.render(
        document=document,
        verdict=document.verdict,
        good=document.verdict is not None and document.verdict.tone is Tone.GOOD,
        charts=drawn,
        figures={chart.name: chart.figure for chart in drawn},
        # These three are this package's and Plotly's files, so they are not escaped.
        style=Markup((here / "page.css").read_text(encoding="utf-8")),
        script=Markup((here / "page.js").read_text(encoding="utf-8")),
        plotly=Markup((files("plotly") / "package_data" / "plotly.min.js").read_text(encoding="utf-8")),
    )


def _part(part: Cell) -> Markup:
    if isinstance(part, Code):
        return Markup("<code>{}</code>").format(part.text)
    if not isinstance(part, Bar):
        return Markup("{}").format(part)
    if part.share is None:
        return Markup()
    share = 100 * min(1.0, max(0.0, part.share))
    return Markup('<span class="{}" style="width: {:.1f}%"></span>').format(part.role, share)


def _line(line: Line) -> Markup:
    return Markup(" ").join(map(_part, (line,) if isinstance(line, str) else line))


def _mark(line: str) -> str:
    """Return the class of a line of a difference."""
    return {"+": "added", "-": "removed", "@": "place"}.get(line[:1], "same")
