"""Golden files in tests/cli/golden: what commands print is a promise.

After an intended change write them anew, read the difference, and commit it with the change:

    GOLDEN=write .ci/pytest tests/cli/test_command_scenarios.py
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parents[1] / "cli/golden"
ID = re.compile(r"\d{8}T\d{6}\.\d{3}Z-([A-Za-z0-9._-]*)-[0-9a-f]{12}")
CHANGING = {
    "session": "<session>", "created_ns": "<ns>", "expires_ns": "<ns>", "restorable_for_s": "<s>",
    "filesystem": "<filesystem>", "project": "<project>", "handle": "<handle>", "ino": "<ino>", "btime_ns": "<ns>",
    "missing": "<missing>",
}  # fmt: skip


def compare(name: str, text: str) -> None:
    """Compare a text with its golden file, or write the file."""
    path = GOLDEN / name
    if os.environ.get("GOLDEN") == "write":
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), f"{name} changed; if that is intended: {__doc__}"


def steady(value: Any, words: Mapping[str, str], key: str = "") -> Any:
    """A JSON value with what differs from run to run replaced by words for it."""
    match value:
        case dict():
            return {name: steady(item, words, name) for name, item in value.items()}
        case list() if key in CHANGING:
            return CHANGING[key]
        case list():
            return [steady(item, words) for item in value]
        case str() | int() if key in CHANGING and not isinstance(value, bool):
            return CHANGING[key]
        case str():
            if key == "id" and re.fullmatch("[0-9a-f]{32}", value):
                return "<volume id>"
            if key == "id" and re.fullmatch("[0-9a-f]{16}", value):
                return "<invocation>"
            for word, replacement in words.items():
                value = value.replace(word, replacement)
            return ID.sub(r"<id of \1>", value)
    return value
