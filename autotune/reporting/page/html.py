"""Writes a report as one page of HTML that needs nothing beside it: no network, no other file."""

from __future__ import annotations

import json
from importlib.resources import files

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from autotune.reporting.comparison import costs_title
from autotune.reporting.page.charts import charts
from autotune.reporting.page.values import Values


def html_page(shown: Values) -> str:
    """Return the page of values. Whatever comes from outside is escaped: names, paths, and errors of probes."""
    here, drawn = files(__package__), charts(shown)
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((here / "page.html").read_text(encoding="utf-8"))
    return template.render(
        shown=shown,
        charts=drawn,
        table=shown.table,
        bar=_bar,
        mark=_mark,
        costs_title=costs_title,
        figures=_in_a_script({chart.name: chart.figure for chart in drawn}),
        # These three are our own and Plotly's: nothing in them comes from outside.
        style=Markup((here / "page.css").read_text(encoding="utf-8")),
        script=Markup((here / "page.js").read_text(encoding="utf-8")),
        plotly=Markup((files("plotly") / "package_data" / "plotly.min.js").read_text(encoding="utf-8")),
    )


def _bar(share: float | None, role: str) -> Markup:
    if share is None:
        return Markup()
    return Markup('<span class="{}" style="width: {:.1f}%"></span>').format(role, 100 * min(1.0, max(0.0, share)))


def _mark(line: str) -> str:
    """Return the class of a line of a difference."""
    return {"+": "added", "-": "removed", "@": "place"}.get(line[:1], "same")


def _in_a_script(document: object) -> Markup:
    """Return JSON that ends no script: outside of strings it has no such characters, inside it may write them so."""
    text = json.dumps(document, allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)
