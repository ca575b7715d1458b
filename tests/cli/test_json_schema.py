"""docs/json.schema.json is made of the types that commands print; see also test_command_scenarios.py."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from build_docs.json_schema import JSON_VERSION, definition_of, schema, text
from tests.support.background_mounts import workbench
from tests.support.trashd_command import done_well

PUBLISHED = Path(__file__).parents[2] / "docs/json.schema.json"


def closed(node: Any) -> Any:
    """A schema that allows no key but its own: what is printed and not in it is found too."""
    if isinstance(node, list):
        return [closed(item) for item in node]
    if not isinstance(node, dict):
        return node
    told = {key: closed(item) for key, item in node.items()}
    return {**told, "additionalProperties": False} if "properties" in node and "required" in node else told


@cache
def _validator(command: str, *, is_closed: bool) -> Draft202012Validator:
    definitions = (closed(schema()) if is_closed else schema())["$defs"]
    return Draft202012Validator({"$ref": f"#/$defs/{definition_of(command)}", "$defs": definitions})


def complaints(command: str, told: object, *, is_closed: bool = True) -> list[str]:
    """What is not as the schema has it, of one object."""
    return [
        f"{error.json_path}: {error.message}" for error in _validator(command, is_closed=is_closed).iter_errors(told)
    ]


def test_what_is_published_is_what_the_types_say() -> None:
    assert PUBLISHED.read_text(encoding="utf-8") == text(), "make schema"


def test_it_is_a_schema_with_a_version() -> None:
    Draft202012Validator.check_schema(schema())
    assert schema()["version"] == JSON_VERSION


def test_later_versions_may_add_keys_and_take_none() -> None:
    told = {"id": "x", "retention_s": None, "expires_ns": None}
    assert complaints("keep", {**told, "a_new_one": 1}, is_closed=False) == []
    assert complaints("keep", {**told, "a_new_one": 1}) != []
    assert complaints("keep", {"id": "x", "retention_s": None}, is_closed=False) != []


@pytest.mark.needs("root", "fuse")
def test_what_is_told_of_an_end_of_a_mount_is_as_its_schema_says() -> None:
    with workbench() as bench:
        done_well("mount", bench / "source", bench / "target")
        (told,) = done_well("umount", "--json", bench / "target").objects()
    assert complaints("umount", told) == []
