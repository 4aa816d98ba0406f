"""An edit changes only its key and keeps all comments and other bytes, or is refused."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.errors import InputError
from autotune.inspection.yaml_edit import Edit, apply_edits, unified_diff
from autotune.inspection.yaml_file import parse_yaml

PATH = Path("c.yaml")
WORDS = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lam", "mu")


def after(text: str, *edits: Edit) -> str:
    return apply_edits(parse_yaml(text, PATH), edits)


def drop(*path: str) -> Edit:
    return Edit(path)


def write(*path: str, **new: object) -> Edit:
    return Edit(path, new)


@pytest.mark.parametrize(
    ("text", "edit", "wanted"),
    [
        ("a: 1\n# up\nb: 2   # back\nc: 3\n", write("b", x=9), "a: 1\n# up\nx: 9   # back\nc: 3\n"),
        ("b: 2 # back\n", write("b", x=[1, "y"], z=0.5), "x: [1, y]\nz: 0.5 # back\n"),
        ("b:    'old'  # back\n", write("b", b="new"), "b:    new  # back\n"),
        ("a: 1\n# up\nb: 2  # back\nc: 3\n", drop("b"), "a: 1\n# up\n# back\nc: 3\n"),
        ("e:\n    a: 1 # one\n    b: 2 # two\n", drop("e", "a"), "e:\n    # one\n    b: 2 # two\n"),
        ("e:\n  a: 1 # one\nb: 2", drop("e", "a"), "e:\n  # one\n  {}\nb: 2"),
        ("a: 1\nb:  # h\n- x # i\n# j\n- y # k\n", drop("b"), "a: 1\n# h\n# i\n# j\n# k\n"),
        ("b:  # h\n- x # i\n- y # k\n", write("b", b=[1]), "# h\n# i\nb: [1] # k\n"),
        ("b: |  # h\n  # text\n  x\n\nc: 1\n", write("b", b=1), "# h\nb: 1\n\nc: 1\n"),
        ("b:\nc: 1\n", write("b", b=1), "b: 1\nc: 1\n"),
        ("{a: 1, b: 2, c: 3}", drop("b"), "a: 1\nc: 3"),
        ("{a: 1}", drop("b"), "{a: 1}"),
        ("e: {a: 1}  # x\n", drop("e", "a"), "e: {}  # x\n"),
        ("e: {}\n", write("e", "a", a=1), "e: {a: 1}\n"),
        ("e: {a: 1,}\n", write("e", "b", b=1), "e: {a: 1, b: 1}\n"),
        ("{a: 1,}", drop("a"), "{}"),
        ("e: {a: 1,  b: 2, c : 3 }\n", write("e", "b", b=9), "e: {a: 1, b: 9, c: 3}\n"),
        ("e: {a: 1, # x\n  b: 2}\n", write("e", "b", b=9), "# x\ne: {a: 1, b: 9}\n"),
        ("e: {a: 1, # x\n  b: 2}\n", drop("e", "b"), "# x\ne: {a: 1}\n"),
        ("{a: 1,  # x\n b: 2}", drop("a"), "# x\nb: 2"),
        ("e: {a: [1,  # x\n 2], b: 2}", write("e", "a", c=1), "# x\ne: {c: 1, b: 2}"),
        ("e: {a: 1  # x\n}\n", write("e", "b", b=1), "# x\ne: {a: 1, b: 1}\n"),
        ("e: {  # x\n  a: {c: 1}}\n", drop("e", "a", "c"), "# x\ne: {a: {}}\n"),
        ("e: {'a': [1], b: 2}\n", write("e", "a", x=None, y=True), "e: {x: null, y: true, b: 2}\n"),
        ("e: &e {a: {b: 1}, 'c': '1'}\n", write("e", "a", "b", d=1), "e: {a: {d: 1}, c: '1'}\n"),
        ("x: &x {a: 1}\ny: {<<: *x, a: 2}\n", drop("y", "a"), "x: &x {a: 1}\ny: {}\n"),
        ("a: 1", write("b", b=2), "a: 1\nb: 2"),
        ("a: 1\r\nb: 2  # back\r\nc: 3\r\n", write("b", x=1, y=2), "a: 1\r\nx: 1\r\ny: 2  # back\r\nc: 3\r\n"),
        ("a: 1\r\nb: 2 # back\r\n", drop("b"), "a: 1\r\n# back\r\n"),
        ("a: 1\nb: |+\n  x\n\n", write("c", c=1), "a: 1\nb: |+\n  x\n\nc: 1\n"),
        ("a: 1\n", write("e", "f", "g", g=1), "a: 1\ne: {f: {g: 1}}\n"),
        ("---\na: 1\n...\n", write("b", b=1), "---\na: 1\nb: 1\n...\n"),
        ("a: 1  # x\n# end\n", write("b", b=1), "a: 1  # x\nb: 1\n# end\n"),
        ("x: &x {a: 1}\ny: *x # y\n", write("y", z=2), "x: &x {a: 1}\nz: 2 # y\n"),
        ("a: 1\n", drop("b"), "a: 1\n"),
        ("a: 1\nb: 2\na: 3  # counts\n", write("a", a=4), "a: 1\nb: 2\na: 4  # counts\n"),
    ],
)
def test_an_edit_changes_its_key_and_nothing_else(text: str, edit: Edit, wanted: str) -> None:
    assert after(text, edit) == wanted


def test_several_edits_of_one_mapping_go_together() -> None:
    text = "max_length: 1\nold: 2 # two\nenv: {A: 1, B: 2}\n"
    edits = (drop("max_length"), write("old", max_length=2), drop("env", "A"), drop("env", "B"), write("env", "C", C=3))
    assert after(text, *edits) == "max_length: 2 # two\nenv: {C: 3}\n"
    assert after("a: 1\n", write("k", "x", x=1), write("k", "y", y=2)) == "a: 1\nk: {x: 1, y: 2}\n"
    assert after("k:\n  x: 1\n", write("a", a=1), write("k", "y", y=2)) == "k:\n  x: 1\n  y: 2\na: 1\n"


@pytest.mark.parametrize(
    ("text", "edit", "message"),
    [
        ("x: &x {a: 1}\ny: *x\n", drop("x"), "found undefined alias 'x'"),
        ("x: &x {a: 1}\ny: *x\n", write("x", "a", b=1), "found undefined alias 'x'"),
        ("x: &x\n  a: 1\ny: *x\n", write("x", "a", b=1), "an anchor, a merge or a text"),
        ("x: &x {a: 1}\ny: *x\n", write("y", "a", b=1), "line 2: .*the value of 'y' is not a mapping of its own"),
        ("x: &x {a: 1}\n<<: *x\n", write("a", b=1), "line 1: .*'a' comes from a merge"),
        ("a: 1\nb: 2\n", write("a", b=1), "'b' would be written, and is there already"),
        ("? a\n: 1\n", write("a", b=1), r"line 1: .*'\?' is before the key"),
        ("a: 1\n", write("a", "b", b=1), "the value of 'a' is not a mapping of its own"),
        ("a: |\n  x", write("b", b=1), "an anchor, a merge or a text of several lines"),
        ("a: 1\na: 2\n", drop("a"), "a repeated key, an anchor"),
    ],
)
def test_an_edit_that_cannot_be_made_is_refused(text: str, edit: Edit, message: str) -> None:
    with pytest.raises(InputError, match=message):
        after(text, edit)


def test_edits_of_one_key_are_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError, match="two edits of one key"):
        after("a: {b: 1}\n", drop("a"), write("a", "b", c=1))


@pytest.mark.parametrize(
    "value",
    [1e-05, 1e22, 0.1, -1, True, None, "yes", "1e-5", "1.0e-5", "", " x ", "a: b", "# no", "x # y", "ä\n\tz", "null",
     "[1", "'q'", '"', "%", "-", "é", "\u2028", "\x1b", "2001-01-01", "0o7", "=", "<<", [1, ["a,b"]],
     {"a": {"b": [None]}}, [], {}, "x" * 500, float("inf")],
)  # fmt: skip
def test_what_is_written_is_read_back_in_blocks_and_in_braces(value: object) -> None:
    for text, path in (("a: 1\nb: 2\n", ("a",)), ("e: {a: 1, b: 2}\n", ("e", "a"))):
        result = yaml.safe_load(after(text, Edit(path, {"new": value})))
        inner = result.get("e", result)
        assert inner == {"new": value, "b": 2}
        assert type(inner["new"]) is type(value)


def test_a_difference_is_shown_as_diff_shows_it() -> None:
    assert unified_diff("a: 1\nb: 2", "a: 1\nb: 3\n", "c.yaml") == (
        "--- c.yaml\n+++ c.yaml\n@@ -1,2 +1,2 @@\n a: 1\n-b: 2\n\\ No newline at end of file\n+b: 3\n"
    )
    assert unified_diff("a: 1\n", "a: 1\n", "c.yaml") == ""


class Generated:
    """A random document, its comments, and edits of it."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.comments = 0
        self.newline = self.random.choice(["\n", "\n", "\r\n"])
        self.indent = self.random.choice(["  ", "    "])
        names = self.random.sample(WORDS, self.random.randint(2, 8))
        self.text = self.newline.join(self._entries(names, "", 0))
        self.text += "" if self.random.random() < 0.2 else self.newline
        values = yaml.safe_load(self.text)
        self.edits = list(self._edits(values, ()))

    def _comment(self, chance: float = 0.4) -> str:
        if self.random.random() > chance:
            return ""
        self.comments += 1
        return f'# comment {self.comments}: it\'s "so"'

    def _entries(self, names: list[str], indent: str, depth: int) -> Iterator[str]:
        for name in names:
            above = self._comment(0.2)
            if above:
                yield f"{indent}{above}"
            if self.random.random() < 0.1:
                yield ""
            yield from self._entry(self._quoted(name), indent, depth)

    def _quoted(self, name: str) -> str:
        return self.random.choice([name, name, name, f'"{name}"', f"'{name}'"])

    def _entry(self, name: str, indent: str, depth: int) -> Iterator[str]:
        kind = self.random.choice(["plain", "plain", "plain", "flow", "sequence", "mapping", "block", "lines", "none"])
        behind = self._comment()
        behind = f"  {behind}" if behind else ""
        inner = indent + self.indent
        if kind == "plain":
            yield f"{indent}{name}:{' ' * self.random.randint(1, 3)}{self._scalar()}{behind}"
        elif kind == "flow":
            yield f"{indent}{name}: {self._flow()}{behind}"
        elif kind == "sequence":
            yield f"{indent}{name}:{behind}"
            at = self.random.choice([indent, inner])
            for _ in range(self.random.randint(1, 3)):
                comment = self._comment()
                yield f"{at}- {self._scalar()}{'  ' + comment if comment else ''}"
        elif kind == "mapping" and depth < 2:
            yield f"{indent}{name}:{behind}"
            yield from self._entries(self.random.sample(WORDS, self.random.randint(1, 3)), inner, depth + 1)
        elif kind == "block":
            yield f"{indent}{name}: {self.random.choice(['|', '>-', '|-'])}{behind}"
            yield f"{inner}text # no comment"
            yield f"{inner}more"
        elif kind == "lines":
            yield f"{indent}{name}: some words"
            yield f"{inner}go on{behind}"
        else:
            yield f"{indent}{name}:{behind}"

    def _scalar(self) -> str:
        return self.random.choice(
            ["1", "2.5", "1e-5", "on", "word", "two words", "'it''s # quoted'", '"a\\tb # c"', "null"]
        )

    def _flow(self) -> str:
        kind = self.random.choice(["mapping", "[1, two, {a: b}]", "[]"])
        if kind != "mapping":
            return kind
        names = self.random.sample(WORDS, self.random.randint(0, 3))
        pairs = ",".join(f"{self._apart()}{name}: {self._scalar()}" for name in names)
        return f"{{{pairs}{self._apart()}}}"

    def _apart(self) -> str:
        """Return what may stand between the entries of a mapping in braces: blanks, or a comment and a line end."""
        comment = self._comment(0.2)
        return f" {comment}{self.newline} " if comment else self.random.choice(["", " ", "  "])

    def _edits(self, values: dict[str, Any], path: tuple[str, ...]) -> Iterator[Edit]:
        for name, value in values.items():
            if isinstance(value, dict) and self.random.random() < 0.5:
                yield from self._edits(value, (*path, name))
            elif self.random.random() < 0.4:
                yield self._edit((*path, name))
        if self.random.random() < 0.3:
            yield Edit((*path, f"new_{self.random.randint(0, 99)}_"), {f"added_{len(path)}": self._value()})

    def _edit(self, path: tuple[str, ...]) -> Edit:
        kind = self.random.choice(["drop", "same", "one", "two"])
        new = "_".join(path)
        if kind == "drop":
            return Edit(path)
        if kind == "same":
            return Edit(path, {path[-1]: self._value()})
        return Edit(path, {f"{new}_{number}": self._value() for number in range(1 if kind == "one" else 2)})

    def _value(self) -> object:
        return self.random.choice([1e-05, 4096, True, None, "yes", "a # b", ["sigmoid", "x, y"], {"k": [1.0, "2"]}])


def expected(values: dict[str, Any], edits: list[Edit], depth: int = 0) -> dict[str, Any]:
    """Apply edits to values, independently of the code; order counts."""
    result: dict[str, Any] = {}
    for name, value in values.items():
        inside = [edit for edit in edits if edit.path[depth] == name]
        exact = [edit for edit in inside if len(edit.path) == depth + 1]
        if exact:
            result.update(exact[0].write or {})
        else:
            result[name] = expected(value, inside, depth + 1) if inside else value
    for edit in edits:
        if len(edit.path) == depth + 1 and edit.path[depth] not in values:
            result.update(edit.write or {})
    return result


def listed(values: Any) -> Any:
    """Return values in which the order of keys counts, and types do."""
    if isinstance(values, dict):
        return [(key, listed(value)) for key, value in values.items()]
    return [listed(item) for item in values] if isinstance(values, list) else repr(values)


def untouched(document: Generated) -> Iterator[str]:
    """Yield the text of every key at the top without an edit, up to the next key."""
    file = parse_yaml(document.text, PATH)
    edited_keys = {edit.path[0] for edit in document.edits}
    starts = [file.line(name) or 0 for name in file.values]
    lines = document.text.splitlines(keepends=True)
    for name, start, stop in zip(file.values, starts, [*starts[1:], len(lines) + 1], strict=True):
        if name not in edited_keys:
            yield "".join(lines[start - 1 : stop - 1]).rstrip("\r\n")


def test_no_key_and_no_comment_is_lost_in_generated_documents() -> None:
    made = 0
    refused: list[str] = []
    for seed in range(200):
        document = Generated(seed)
        try:
            text = after(document.text, *document.edits)
        except InputError as error:
            refused.append(str(error))
            continue
        made += 1
        said = (seed, document.text, document.edits, text)
        before, left = (re.findall(r"# comment \d+: it's \"so\"", each) for each in (document.text, text))
        assert len(before) == document.comments
        assert left == before, said
        assert listed(yaml.safe_load(text)) == listed(expected(yaml.safe_load(document.text), document.edits)), said
        assert all(piece in text for piece in untouched(document)), said
    assert made > 150
    assert all("edited automatically" in message for message in refused)
