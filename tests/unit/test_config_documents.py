"""docs/config.md tells of every key, with the default that it has, and why."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusefs.core.config import CONFIG, HOOKS, METRICS, RULES, VOLUME, tell_config
from fusefs.core.toml_reader import Schema, Source, ValueKind
from tests.support.read_configs import read_config

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "config.md").read_text(encoding="utf-8")
EXAMPLE = (DOCS / "config.example.toml").read_text(encoding="utf-8")
MAN = (DOCS / "man/config.md").read_text(encoding="utf-8")
SECTIONS: dict[str, Schema] = {
    "Above all tables": {key: kind for key, kind in CONFIG.items() if isinstance(kind, ValueKind)},
    "`[defaults]`, and each `[[volume]]`": VOLUME,
    "`[hooks]`": HOOKS,
    "`[metrics]`": METRICS,
}
DEFAULTS = tomllib.loads(tell_config(read_config([]), {}))
TABLES = {"`[hooks]`": "hooks", "`[metrics]`": "metrics", "`[defaults]`, and each `[[volume]]`": "defaults"}


def dotted(schema: Schema) -> Iterator[tuple[str, ValueKind]]:
    """Each key as a person types it, in the schema's order."""
    for key, kind in schema.items():
        if isinstance(kind, ValueKind):
            yield key, kind
        elif isinstance(kind, dict):
            yield from ((f"{key}.{inner}", found) for inner, found in dotted(kind))


def rows(section: str) -> dict[str, tuple[str, str]]:
    """The keys of a section's table, each with its default and its reason."""
    body = TEXT.partition(f"### {section}\n")[2].partition("\n#")[0]
    found = re.findall(r"^\| `([a-z_.]+)` \| `(.*?)` \| (.*) \|$", body, re.MULTILINE)
    return {key: (default, why) for key, default, why in found}


@pytest.mark.parametrize("section", SECTIONS)
def test_every_key_is_told_and_no_other(section: str) -> None:
    assert list(rows(section)) == [key for key, _kind in dotted(SECTIONS[section])]


@pytest.mark.parametrize("section", SECTIONS)
def test_every_default_is_the_one_in_force(section: str) -> None:
    kinds = dict(dotted(SECTIONS[section]))
    in_force = DEFAULTS[TABLES[section]] if section in TABLES else DEFAULTS
    for key, (default, why) in rows(section).items():
        value = in_force
        for part in key.split("."):
            value = value[part]
        assert kinds[key].read(tomllib.loads(f"x = {default}")["x"]) == kinds[key].read(value), key
        assert len(why) > 15


def test_rules_of_a_path_are_told() -> None:
    body = TEXT.partition("### `[[volume.rules]]`")[2].partition("\n### ")[0]
    assert [key for key in RULES if f"`{key}`" not in body] == []


def test_complete_example_of_the_page_is_right() -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL)
    config = read_config([Source("docs/config.md", text)])
    assert config.volumes[0].paths


@pytest.mark.parametrize("document", [EXAMPLE, MAN], ids=["example", "man page"])
def test_example_and_man_page_name_every_key(document: str) -> None:
    keys = {part for schema in SECTIONS.values() for key, _kind in dotted(schema) for part in key.split(".")}
    assert [key for key in sorted(keys) if not re.search(rf"\b{key}\b", document)] == []
