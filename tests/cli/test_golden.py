"""Help texts and JSON outputs are promises: golden files in tests/cli/golden/.

After a change that is meant, write them anew, look at the difference, and commit it with the change:

    GOLDEN=write .ci/pytest tests/cli/test_golden.py tests/cli/test_json_schema.py
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.trashd_command import done_well

GOLDEN = Path(__file__).with_name("golden")
COMMANDS = (
    "init", "swap", "rm", "sweep", "plan", "check", "holders", "list", "restore", "keep", "reap", "mount",
    "undo", "browse", "du", "ls", "cat", "diff", "umount",
    "status", "pause", "resume", "service", "reaper", "config", "doctor",
)  # fmt: skip
PLAN = ("plan show", "plan apply")
CONFIG = ("config check", "config show")
SERVICE = ("service run", "service install", "service status", "service uninstall")
ID = re.compile(r"\d{8}T\d{6}\.\d{3}Z-([A-Za-z0-9._-]*)-[0-9a-f]{12}")
CHANGING = {
    "session": "<session>", "created_ns": "<ns>", "expires_ns": "<ns>", "restorable_for_s": "<s>",
    "filesystem": "<filesystem>", "project": "<project>", "handle": "<handle>", "ino": "<ino>", "btime_ns": "<ns>",
    "missing": "<missing>",
}  # fmt: skip


def compare(name: str, text: str) -> None:
    """Hold a text against its golden file, or make it that."""
    path = GOLDEN / name
    if os.environ.get("GOLDEN") == "write":
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), f"{name} changed; if that is meant: {__doc__}"


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


@pytest.mark.parametrize("command", ["", *COMMANDS, *PLAN, *CONFIG, *SERVICE])
def test_help_is_as_promised(command: str) -> None:
    compare(f"help-{command.replace(' ', '-') or 'trashd'}.txt", done_well(*command.split(), "--help").out)
