"""Help texts and JSON outputs are promises: golden files in tests/cli/golden/.

After a change that is meant, write them anew, look at the difference, and commit it with the change:

    GOLDEN=write .ci/pytest tests/cli/test_golden.py
"""

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.make_trees import IMMUTABLE, make_tree, set_flags
from tests.support.trashd_command import Done, done_well, swapped, trashd

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


Act = Callable[[Path, Path], Done]


def told_init(volume: Path, _victim: Path) -> Done:
    return done_well("init", "--json", volume)


def told_swap(_volume: Path, victim: Path) -> Done:
    return done_well("swap", "--json", victim)


def told_swap_now(_volume: Path, victim: Path) -> Done:
    return done_well("swap", "--json", "--now", victim)


def told_rm(_volume: Path, victim: Path) -> Done:
    return done_well("rm", "--json", victim)


def told_check(_volume: Path, victim: Path) -> Done:
    return done_well("check", "--json", victim)


def told_check_refused(_volume: Path, victim: Path) -> Done:
    return trashd("check", "--json", victim / "file")


def told_holders(_volume: Path, victim: Path) -> Done:
    return done_well("holders", "--json", victim)


def told_list(volume: Path, victim: Path) -> Done:
    swapped(victim, "--note", "a note")
    return done_well("list", "--json", "--volume", volume)


def told_restore(volume: Path, victim: Path) -> Done:
    return done_well("restore", "--json", "--volume", volume, swapped(victim)["id"])


def told_keep(volume: Path, victim: Path) -> Done:
    return done_well("keep", "--json", "--volume", volume, swapped(victim, "--keep-for", "2h")["id"])


def told_config_check(volume: Path, _victim: Path) -> Done:
    draft = volume / "config.toml"
    draft.write_text('[defaults]\nretension = "1h"\n', encoding="utf-8")
    done = trashd("config", "check", "--json", draft)
    draft.unlink()
    return done


def told_reap(volume: Path, victim: Path) -> Done:
    return done_well("reap", "--json", "--now", "--volume", volume, swapped(victim)["id"])


def quarantined(volume: Path, victim: Path) -> str:
    """The id of what could not be reaped."""
    set_flags(victim / "file", IMMUTABLE)
    identifier = str(swapped(victim, "--note", "a note")["id"])
    assert trashd("reap", "--now", "--volume", volume, identifier).code == 13
    return identifier


def told_list_quarantined(volume: Path, victim: Path) -> Done:
    quarantined(volume, victim)
    return done_well("list", "--json", "--volume", volume)


def told_reap_quarantined(volume: Path, victim: Path) -> Done:
    return trashd("reap", "--json", "--volume", volume, quarantined(volume, victim))


def told_restore_quarantined(volume: Path, victim: Path) -> Done:
    return done_well("restore", "--json", "--volume", volume, quarantined(volume, victim))


def told_reap_force(volume: Path, victim: Path) -> Done:
    return done_well("reap", "--force", "--yes", "--json", "--volume", volume, quarantined(volume, victim))


def told_plan(volume: Path, victim: Path) -> Done:
    plan = volume / "plan.toml"
    where = f'[[rule]]\ndirectory = "{victim}"\n'
    plan.write_text(
        f'{where}name = "*"\n{where}older = "9d"\n{where.replace("victim", "none")}older = "9d"\n'
        f'purgelist = {{ directory = "{volume}/lists", ahead = "1d" }}\n',
        encoding="utf-8",
    )
    done = trashd("plan", "apply", "--json", plan)
    plan.unlink()
    return done


def told_doctor(volume: Path, _victim: Path) -> Done:
    stray = volume / ".trashd/u/0/orphans/stray"
    stray.mkdir()
    done = trashd("doctor", "--json", volume)
    stray.rmdir()
    return done


def told_error(volume: Path, _victim: Path) -> Done:
    done = trashd("swap", "--json", volume / "missing")
    return done._replace(out=done.err)


@pytest.mark.needs("root")
@pytest.mark.parametrize(
    "act",
    [
        told_init, told_swap, told_swap_now, told_rm, told_check, told_check_refused, told_holders, told_list,
        told_restore, told_keep, told_config_check, told_reap, told_list_quarantined, told_reap_quarantined,
        told_restore_quarantined, told_reap_force, told_plan, told_doctor, told_error,
    ],
    ids=lambda act: act.__name__.removeprefix("told_"),
)  # fmt: skip
@pytest.mark.quick("swap", "rm", "check", "holders", "list", "restore", "keep", "reap", "plan", "doctor")
def test_json_is_as_promised(volume: Path, act: Act) -> None:
    victim = make_tree(volume / "victim", {"file": "content"})
    objects = [steady(told, {str(volume): "<volume>"}) for told in act(volume, victim).objects()]
    name = act.__name__.removeprefix("told_").replace("_", "-")
    compare(f"json-{name}.json", json.dumps(objects, indent=1) + "\n")
