"""The documents have every exit code, every key of the configuration and of the store's files, and no other."""

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusefs.core.config import CONFIG, HOOKS, METRICS, RULES, VOLUME, format_config
from fusefs.core.errors import EXIT_CODES, Exit, TrashdError
from fusefs.core.plan_rules import RULE
from fusefs.core.record import Record
from fusefs.core.record_decoding import decode_record
from fusefs.core.toml_reader import RemovedKey, Schema, Source, ValueKind
from fusefs.store.layout import Volume
from tests.support.read_configs import read_config

ROOT = Path(__file__).parents[2]
EXIT_CODES_PAGE = "docs/reference/exit-codes.md"
SIGNALS = [Exit.INTERRUPTED, Exit.TERMINATED]
"""A closed pipe's is told by no table: no reader is left."""


def read_table(name: str) -> list[tuple[str, str]]:
    """The code or codes of each row, and what they say."""
    text = (ROOT / name).read_text(encoding="utf-8")
    if name == EXIT_CODES_PAGE:
        rows = re.findall(r"^\| ([0-9, ]+) \| (.*) \|$", text, re.MULTILINE)
    else:
        rows = re.findall(r"^- `([0-9, ]+)`: (.*)$", text.partition("## Exit status\n")[2], re.MULTILINE)
    return [(codes, words) for codes, words in rows]


def kinds_of(error: type[TrashdError]) -> Iterator[type[TrashdError]]:
    yield error
    for kind in error.__subclasses__():
        yield from kinds_of(kind)


@pytest.mark.parametrize("name", [EXIT_CODES_PAGE, "docs/man/trashd.md"])
def test_every_code_is_told_in_order(name: str) -> None:
    told = [int(code) for codes, _words in read_table(name) for code in codes.split(",")]
    assert told == [*EXIT_CODES, *SIGNALS]


@pytest.mark.parametrize("name", [EXIT_CODES_PAGE, "docs/man/trashd.md"])
def test_no_code_is_told_as_another(name: str) -> None:
    for codes, words in read_table(name)[: len(EXIT_CODES)]:
        assert re.split(r"\W", words)[0] == re.split(r"\W", EXIT_CODES[int(codes)])[0]


def test_page_and_man_page_begin_alike() -> None:
    for one, other in zip(read_table(EXIT_CODES_PAGE), read_table("docs/man/trashd.md"), strict=True):
        assert re.split(r"\W+", one[1])[:2] == re.split(r"\W+", other[1])[:2]


def test_every_error_has_one_of_the_codes() -> None:
    assert {kind.exit_code for kind in kinds_of(TrashdError)} | {Exit.DONE} == set(EXIT_CODES)


def test_signals_have_the_codes_of_a_shell() -> None:
    assert [Exit.SIGNALLED + number for number in (2, 13, 15)] == [Exit.INTERRUPTED, Exit.PIPE, Exit.TERMINATED]


DOCUMENT = (Path(__file__).parents[2] / "docs/internals/store-format.md").read_text(encoding="utf-8")


def chapter(title: str) -> str:
    return DOCUMENT.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def keys_of_table(text: str) -> set[str]:
    rows = (line.split("|")[1] for line in text.splitlines() if line.startswith("| `"))
    return {key for row in rows for key in re.findall(r"`(\w+)`", row)}


def example() -> str:
    return chapter("record.json").partition("```json\n")[2].partition("```")[0]


def test_it_names_the_keys_of_a_record() -> None:
    named = keys_of_table(chapter("record.json")) | set(json.loads(example()))
    assert named == {"format", *Record._fields} - {"unknown"}


def test_its_record_is_one() -> None:
    record = decode_record(example().encode())
    assert record.id in DOCUMENT
    assert record.unknown == ()


def test_it_names_the_keys_of_volume_json() -> None:
    assert keys_of_table(chapter("volume.json")) == {"magic", "format", *Volume._fields}


DOCS = Path(__file__).parents[2] / "docs"
EXAMPLE = (DOCS / "config.example.toml").read_text(encoding="utf-8")
MAN = (DOCS / "man/trashd.conf.5.md").read_text(encoding="utf-8")
SECTIONS: dict[str, Schema] = {
    "Above all tables": {key: kind for key, kind in CONFIG.items() if isinstance(kind, ValueKind)},
    "`[defaults]`, and each `[[volume]]`": VOLUME,
    "`[hooks]`": HOOKS,
    "`[metrics]`": METRICS,
}
DEFAULTS = tomllib.loads(format_config(read_config([]), {}))
TABLES = {"`[hooks]`": "hooks", "`[metrics]`": "metrics", "`[defaults]`, and each `[[volume]]`": "defaults"}


def dotted(schema: Schema) -> Iterator[tuple[str, ValueKind]]:
    """Each key as a person types it, in the schema's order."""
    for key, kind in schema.items():
        if isinstance(kind, ValueKind):
            yield key, kind
        elif isinstance(kind, dict):
            yield from ((f"{key}.{inner}", found) for inner, found in dotted(kind))


@pytest.mark.parametrize("section", SECTIONS)
def test_the_manual_page_has_every_key_with_the_default_in_force(section: str) -> None:
    items = dict(re.findall(r"^- `([a-z_.]+)`: .* \[default: (.*)\]$", MAN, re.MULTILINE))
    in_force = DEFAULTS[TABLES[section]] if section in TABLES else DEFAULTS
    for key, kind in dotted(SECTIONS[section]):
        value = in_force
        for part in key.split("."):
            value = value[part]
        assert kind.read(tomllib.loads(f"x = {items[key]}")["x"]) == kind.read(value), key


def test_the_manual_page_has_no_other_key() -> None:
    tables = MAN.partition("\n## Top-level keys\n")[2].partition("\n## Examples\n")[0]
    keys = {key for schema in SECTIONS.values() for key, _kind in dotted(schema)}
    assert set(re.findall(r"^- `([a-z_.]+)`: ", tables, re.MULTILINE)) == {*keys, "id", "path"}


def test_the_manual_page_of_plans_has_every_key() -> None:
    text = (DOCS / "man/trashd-plan.5.md").read_text(encoding="utf-8")
    keys = [key for key, kind in RULE.items() if not isinstance(kind, RemovedKey)]
    assert sorted(re.findall(r"^- `([a-z_]+)`: ", text, re.MULTILINE)) == sorted(keys)


def test_rules_of_a_path_are_told() -> None:
    body = MAN.partition("\n## Rules for paths\n")[2].partition("\n## ")[0]
    assert [key for key in RULES if f"`{key}`" not in body] == []


def test_complete_example_of_the_page_is_right() -> None:
    for name in ("howto/run-the-reaper.md", "man/trashd.conf.5.md"):
        (text,) = re.findall(r"```toml\n(.*?)```", (DOCS / name).read_text(encoding="utf-8"), re.DOTALL)
        config = read_config([Source(name, text)])
        assert config.volumes[0].paths


@pytest.mark.parametrize("document", [EXAMPLE, MAN], ids=["example", "man page"])
def test_example_and_man_page_name_every_key(document: str) -> None:
    keys = {part for schema in SECTIONS.values() for key, _kind in dotted(schema) for part in key.split(".")}
    assert [key for key in sorted(keys) if not re.search(rf"\b{key}\b", document)] == []
