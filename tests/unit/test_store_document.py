"""docs/store-format.md names each key that the store's files have, and no other."""

from __future__ import annotations

import json
import re
from pathlib import Path

from fusefs.core.record import Record
from fusefs.core.record_decoding import decode
from fusefs.store.layout import Volume

DOCUMENT = (Path(__file__).parents[2] / "docs/store-format.md").read_text(encoding="utf-8")


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
    record = decode(example().encode())
    assert record.id in DOCUMENT
    assert record.unknown == ()


def test_it_names_the_keys_of_volume_json() -> None:
    assert keys_of_table(chapter("volume.json")) == {"magic", "format", *Volume._fields}
