"""docs/json.md names each key that a command prints."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

GOLDEN = Path(__file__).with_name("golden")
DOCUMENT = (Path(__file__).parents[2] / "docs/json.md").read_text(encoding="utf-8")
NAMED = set(re.findall(r"`(\w+)`", DOCUMENT))
CONFIGURATION = "json-config-show.json"  # docs/config.md has its keys


def keys_of(value: Any) -> Iterator[str]:
    """All that are in it, however deep."""
    if isinstance(value, dict):
        yield from value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from keys_of(inner)


@pytest.mark.parametrize(
    "path", sorted(set(GOLDEN.glob("json-*")) - {GOLDEN / CONFIGURATION}), ids=lambda path: path.stem
)
def test_every_key_is_documented(path: Path) -> None:
    assert set(keys_of(json.loads(path.read_text(encoding="utf-8")))) <= NAMED
