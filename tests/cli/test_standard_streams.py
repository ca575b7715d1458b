"""Standard streams that are closed, or full: every command does what it would have done."""

from __future__ import annotations

import subprocess
from pathlib import Path

import click
import pytest

from fusefs.cli.group import trashd as group
from fusefs.core.errors import UsageError
from tests.support.make_trees import make_tree
from tests.support.trashd_command import TRASHD, environment, swapped, trashd

pytestmark = pytest.mark.needs("root")

WORDS = {
    "swap": "{victim}", "rm": "{victim} missing", "undo": "", "list": "--volume {volume}",
    "browse": "--volume {volume}", "du": "--volume {volume}",
    "ls": "--volume {volume} {id}", "cat": "--volume {volume} {id}:file", "diff": "--volume {volume} {id}",
    "restore": "--volume {volume} {id} --to {top}/back", "keep": "--volume {volume} {id}",
    "reap": "--volume {volume} --now {id}", "check": "{victim}", "holders": "--volume {volume} {id}",
    "sweep": "{victim} --name file", "plan": "show {top}/plan.toml", "status": "",
    "doctor": "{volume}", "init": "{volume}", "mount": "--explain {volume} {volume}", "umount": "{volume}",
    "service": "status", "pause": "{volume}", "resume": "{volume}",
    "config": "show",
}  # fmt: skip
STREAMS = ("", "<&- >&- 2>&-", "2>/dev/full")
PLAN = """
[[rule]]
directory = "{}"
name = "file"
"""


def code_of(top: Path, command: str, redirected: str) -> int:
    """Its exit code with the streams so; it may not end by an error of ours."""
    top.mkdir()
    victim, orphan = make_tree(top / "victim", {"file": "x"}), make_tree(top / "orphan", {"file": "y"})
    (top / "plan.toml").write_text(PLAN.format(victim))
    words = WORDS[command].format(top=top, volume=top.parent, victim=victim, id=swapped(orphan)["id"])
    if not redirected:
        plain = trashd(command, *words.split(), cwd=top)
        assert "Traceback" not in plain.err
        return plain.code
    line = f"{TRASHD} {command} {words} </dev/null >/dev/null 2>{top}/told {redirected}"
    done = subprocess.run(["sh", "-c", line], env=environment({}), cwd=top, check=False)
    assert "Traceback" not in (top / "told").read_text()
    return done.returncode


def test_every_command_is_tried() -> None:
    assert sorted(WORDS) == sorted(group.list_commands(click.Context(group)))


@pytest.mark.parametrize("command", WORDS)
def test_a_command_does_the_same_whatever_its_streams_are(volume: Path, command: str) -> None:
    codes = [code_of(volume / str(number), command, redirected) for number, redirected in enumerate(STREAMS)]
    assert codes == [codes[0], UsageError.exit_code if command == "cat" else codes[0], codes[0]]


def test_what_can_not_be_told_stops_nothing(volume: Path) -> None:
    victim = make_tree(volume / "victim", {"file": "x"})
    done = subprocess.run(["sh", "-c", f"exec {TRASHD} swap missing {victim} 2>/dev/full"], cwd=volume, check=False)
    assert (done.returncode, list(victim.iterdir())) == (13, [])
