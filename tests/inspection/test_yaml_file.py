"""A configuration is read as by TRL, with a line for every key; a hostile file is refused quickly."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import yaml

from autotune.confidential import PLACEHOLDER as SHOWN
from autotune.core.files.json_text import MAX_DEPTH
from autotune.errors import InputError
from autotune.inspection.yaml_file import MAX_BYTES, MAX_NODES, Node, YamlFile, check_unique, parse_yaml, read_yaml
from autotune.inspection.yaml_secrets import mask_secrets

HOSTILE_SECONDS = 1.0
"""Of processor time. A file at a limit takes half of it on the slowest machine that was tried."""


def read(tmp_path: Path, text: str | bytes) -> YamlFile:
    file = tmp_path / "c.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_yaml(file)


def refused(tmp_path: Path, text: str | bytes) -> str:
    with pytest.raises(InputError) as caught:
        read(tmp_path, text)
    return str(caught.value).replace(f"{tmp_path}{os.sep}", "")


def inside(mapping: Node, key: str) -> Node:
    """Return the value of a key."""
    found = mapping.entry(key)
    assert found is not None
    return found[1].resolved()


def line(mapping: Node, key: str) -> int:
    """Return the line of a key."""
    found = mapping.entry(key)
    assert found is not None
    return found[0].line


def test_values_are_those_that_trl_reads(tmp_path: Path) -> None:
    text = "learning_rate: 1e-5\nbf16: on\nwarmup: 0o7\nbase: &base {a: 1}\nother: {<<: *base, b: 2}\nempty:\n"
    file = read(tmp_path, text)
    assert file.values == yaml.safe_load(text)
    assert file.values["learning_rate"] == "1e-5"
    assert file.values["bf16"] is True
    assert file.values["other"] == {"a": 1, "b": 2}


def test_every_key_has_a_line_nested_ones_and_those_of_sequences_too(tmp_path: Path) -> None:
    text = "# head\na: 1\nenv:\n  X: 1\n  Y:\n    2\ndatasets:\n- path: json\n  split: train\n- path: csv\n"
    file = read(tmp_path, text)
    assert [file.line("a"), file.line("env"), line(inside(file.root, "env"), "X")] == [2, 3, 4]
    first, second = inside(file.root, "datasets").items
    assert [line(first, "split"), second.line, line(second, "path")] == [9, 10, 10]
    assert line(inside(file.root, "env"), "Y") == 5
    assert file.line("b") is None


def test_a_key_that_is_merged_or_behind_an_alias_has_the_line_where_it_is_written(tmp_path: Path) -> None:
    file = read(tmp_path, "base: &base\n  a: 1\nenv: *base\nother:\n  <<: [*base]\n  b: 2\n")
    env, other = (inside(file.root, key) for key in ("env", "other"))
    assert [line(env, "a"), line(other, "a"), line(other, "b")] == [2, 2, 6]


@pytest.mark.parametrize("end", ["\r\n", "\r", "\n"])
def test_lines_count_whatever_ends_them(tmp_path: Path, end: str) -> None:
    file = read(tmp_path, f"\ufeffa: 1{end}{end}b: |{end}  x{end}c: 2")
    assert file.line("c") == 5
    assert file.values == {"a": 1, "b": "x\n", "c": 2}
    assert file.text.startswith("a: 1")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: [1\nc: 2\n", "c.yaml, line 3: while parsing a flow sequence: expected ',' or ']'"),
        ("a: 1\n\tb: 1\n", "c.yaml, line 2: while scanning for the next token"),
        ("a: &a {b: 1}\nc:\n  <<: *a\n  <<: *a\n", "c.yaml, line 4: a mapping has two merges."),
        (
            "a: !!python/object/apply:os.system [id]\n",
            "line 1: the tag 'tag:yaml.org,2002:python/object/apply:os.system'",
        ),
        ("a: !mine 1\n", "line 1: the tag '!mine' is not loaded."),
        ("b: 1\nyes: 1\n", "line 2: the key means True, which is not a string."),
        ("env: {1: 2}\n", "line 1: the key means 1, which is not a string."),
        ("? [a]\n: 1\n", "line 1: a key is a collection."),
        ("- a\n", "c.yaml holds a list; a configuration is a YAML mapping."),
        ("text\n", "c.yaml holds a single value;"),
        ("", "c.yaml is empty;"),
        ("#!/bin/bash\ntrl sft\n", "c.yaml is a script for a shell. Give its training command after --."),
        ("# only a comment\n", "c.yaml is empty;"),
        ("a: 1\n---\nb: 2\n", "line 2: expected a single document in the stream: but found another document."),
        ("a: 1\nb: \xe4\n".encode("latin-1"), "c.yaml, line 2: it is not UTF-8."),
        ("a: 2001-99-99\n", "line 1: '2001-99-99' cannot be read as timestamp."),
        (f"a: {'9' * 5000}\n", "cannot be read as int."),
        ("a: *b\n", "line 1: found undefined alias 'b'."),
        ("a: &a [*a]\n", "line 1: the anchor 'a' holds itself."),
        ("a: 1\n<<: 3\n", "line 2: expected a mapping or list of mappings for merging"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_with_its_line(tmp_path: Path, text: str | bytes, message: str) -> None:
    assert message in refused(tmp_path, text)


def test_of_a_key_that_is_there_twice_the_last_one_counts(tmp_path: Path) -> None:
    file = read(tmp_path, "a: 1\nb: {x: 1,\n  x: 2}\na: 3\n")
    assert file.values == {"a": 3, "b": {"x": 2}} == yaml.safe_load(file.text)
    assert (file.line("a"), file.line("b", "x")) == (4, 3)
    assert [(key.key, key.line, first.line) for key, first in file.root.repeated_keys()] == [("a", 4, 1), ("x", 3, 2)]
    with pytest.raises(InputError, match=r"c\.yaml, line 4: 'a' is there twice; line 1 has it too"):
        check_unique(file.root, file.path)


def test_a_file_that_is_not_there_is_a_directory_or_no_file_is_said_to_be_so(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for name, message in {"none.yaml": "does not exist", "": "is a directory", "fifo": "is not a regular file"}.items():
        with pytest.raises(InputError, match=message):
            read_yaml(tmp_path / name)
    with pytest.raises(InputError, match="cannot be read"):
        read_yaml(Path("a\0b"))


def test_numbers_may_be_keys_of_nested_mappings(tmp_path: Path) -> None:
    assert read(tmp_path, "model_init_kwargs: {max_memory: {0: 20GiB}}\n").values["model_init_kwargs"] == {
        "max_memory": {0: "20GiB"}
    }


def bomb() -> str:
    levels = [f"k{level}: &k{level} [{', '.join([f'*k{level - 1}'] * 9)}]\n" for level in range(1, 30)]
    return "k0: &k0 [x]\n" + "".join(levels)


def merge_bomb() -> str:
    levels = [f"k{level}: &k{level} {{<<: [{', '.join([f'*k{level - 1}'] * 9)}]}}\n" for level in range(1, 30)]
    return "k0: &k0 {x: 1}\n" + "".join(levels)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\n" * 2_000_000, f"a configuration has at most {MAX_BYTES:,}"),
        (bomb(), f"there are more than {MAX_NODES:,} keys and values, aliases expanded"),
        (merge_bomb(), f"there are more than {MAX_NODES:,} keys and values, aliases expanded"),
        (f"a: [{'1,' * 60_000}]", f"there are more than {MAX_NODES:,} keys and values"),
        (f"a: {'[' * 100_000}", f"more than {MAX_DEPTH} collections are inside one another"),
        (f"a: {'{b: ' * 25_000}", f"more than {MAX_DEPTH} collections"),
        ("- " * 60_000, f"more than {MAX_DEPTH} collections"),
        ("".join(f"{' ' * level}a:\n" for level in range(400)), f"more than {MAX_DEPTH} collections"),
        ("? " * 60_000, ""),
        (f"a: {'&a ' * 40_000}", ""),
        (f'a: "{chr(92)}' + "x" * 100_000, ""),
        (f"a: '{'x ' * 60_000}", ""),
        (f"a: {'1:' * 60_000}1", ""),
        (f"{'k' * 120_000}: 1\n? {'k' * 5_000}\n", ""),
        ("%" * 100_000, ""),
        ("a: \x1b]0;owned\x07\n", "the character U+001B is not allowed"),
    ],
)
def test_a_hostile_file_ends_within_a_second(tmp_path: Path, text: str, message: str) -> None:
    before = time.process_time()
    try:
        read(tmp_path, text)
        said = ""
    except InputError as error:
        said = str(error)
    assert time.process_time() - before < HOSTILE_SECONDS
    assert message in said
    assert len(said) < 1000


def test_the_deepest_and_the_largest_that_is_allowed_is_read(tmp_path: Path) -> None:
    deep = "a: " + "[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1)
    assert read(tmp_path, deep).line("a") == 1
    wide = "a: [" + ", ".join("1" for _ in range(MAX_NODES - 3)) + "]"
    assert len(read(tmp_path, wide).values["a"]) == MAX_NODES - 3


def test_messages_carry_no_terminal_escapes(tmp_path: Path) -> None:
    file = tmp_path / "\x1b[31mred\n.yaml"
    file.write_text('"\\e[2J": 1\n"\\e[2J": 2\n')
    with pytest.raises(InputError) as caught:
        check_unique(read_yaml(file).root, file)
    assert str(caught.value).isprintable()
    assert "\\x1b[31mred\\n.yaml, line 2: '\\x1b[2J' is there twice" in str(caught.value)


SECRET = "planted0secret"


def without(text: str) -> YamlFile:
    """Return a configuration as it is withheld, which has as many lines as before."""
    found = mask_secrets(parse_yaml(text, Path("c.yaml")))
    assert SECRET not in found.text
    assert SECRET not in repr(found.values)
    assert found.text.count("\n") == text.count("\n")
    assert yaml.safe_load(found.text) == found.values
    return found


@pytest.mark.parametrize(
    ("text", "values"),
    [
        (f"hub_token: {SECRET}  # mine\nseed: 1\n", {"hub_token": SHOWN, "seed": 1}),
        (f"hub_token: '{SECRET}'\r\nseed: 1\r\n", {"hub_token": SHOWN, "seed": 1}),
        (f"env: {{HF_TOKEN: {SECRET}, A: b}}\n", {"env": {"HF_TOKEN": SHOWN, "A": "b"}}),
        (f"env:\n  HF_TOKEN: {SECRET}\n  A: b\n", {"env": {"HF_TOKEN": SHOWN, "A": "b"}}),
        (f"hub_token: |\n  {SECRET}\n  more\n\nseed: 1\n", {"hub_token": SHOWN, "seed": 1}),
        (f"hub_token:\n  {SECRET}\n  more\nseed: 1", {"hub_token": SHOWN, "seed": 1}),
        (f"hub_token: &t {SECRET}\nenv: {{HF_TOKEN: *t}}\n", {"hub_token": SHOWN, "env": {"HF_TOKEN": SHOWN}}),
        (f"run_name: &t {SECRET}\nhub_token: *t\n", {"run_name": SHOWN, "hub_token": SHOWN}),
        (f"hub_token: !!str {SECRET}\n", {"hub_token": SHOWN}),
        ("password: 12345678\n", {"password": SHOWN}),
        (f"credentials:\n  - {SECRET}\n  - {{a: {SECRET}}}\n", {"credentials": [SHOWN, {"a": SHOWN}]}),
        (f"datasets: [{{data_files: 'https://me:{SECRET}@h/r'}}]\n", {"datasets": [{"data_files": "https://***@h/r"}]}),
        (f"data: https://h/r?a=1&token={SECRET}\n", {"data": "https://h/r?a=1&token=***"}),
        (f"kwargs: '{{\"token\": \"{SECRET}\"}}'\n", {"kwargs": '{"token": "***"}'}),
        (f"# hub_token: {SECRET}\nseed: 1  # token={SECRET}\n", {"seed": 1}),
        (f"notes: |  # token={SECRET}\n  text\nseed: 1\n", {"notes": "text\n", "seed": 1}),
        (f"notes: &n >-  # token={SECRET}\n  text\nmore: *n\n", {"notes": "text", "more": "text"}),
        (f"hub_token: {SECRET}\nseed: 1\n# as {SECRET} is old", {"hub_token": SHOWN, "seed": 1}),
        (f"a: &e\n  HF_TOKEN: {SECRET}\nb:\n  <<: *e\n", {"a": {"HF_TOKEN": SHOWN}, "b": {"HF_TOKEN": SHOWN}}),
    ],
)  # fmt: skip
def test_what_is_secret_is_not_there(text: str, values: object) -> None:
    assert without(text).values == values


def test_what_is_not_secret_stays_as_it_is() -> None:
    text = "eos_token: </s>  # the token\nhub_token: null\npush_to_hub: true\nenv: {WANDB_PROJECT: a}\nhub_token_: ''\n"
    file = parse_yaml(text, Path("c.yaml"))
    assert mask_secrets(file) is file
