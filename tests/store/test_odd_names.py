"""Unexpected names, in a victim, a volume's path, after --to: what is told is safe to see and to paste."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fusefs.core.printable_names import shell_word
from tests.support.covering_sets import runs_every_case
from tests.support.interrupted_command import BROKEN, Ended, command_as
from tests.support.make_trees import Dir, make_tree
from tests.support.privileges import PEOPLE, Credentials
from tests.support.real_filesystems import tmpfs_volume
from tests.support.store_verbs import init, raw
from tests.support.trashd_command import TRASHD, environment

pytestmark = pytest.mark.needs("root")

UID = 1001
ROOT, ALICE = PEOPLE["root"], Credentials(UID, UID)
NAMES = [
    b"-\x1b[31m\x9b\x07\r\n\xff\xe2\x80\xae%s%n{0} '\"\\7$(id)`",
    b"\xff" * 255,
    b"\n",
    "ä".encode() * 127 + b"x",
    b"--help",
]
"""A newline, escapes for terminals, invalid UTF-8, 255 bytes, a leading dash, what formats and shells read."""
SAMPLE = slice(None if runs_every_case() else 2)
odd = pytest.mark.parametrize("name", NAMES[SAMPLE], ids=["all", "undecodable", "newline", "long", "option"][SAMPLE])
_NEVER = 1 << 30


class Place(NamedTuple):
    """A directory with an odd name that holds a store of root's, and Alice's home in it."""

    volume: Path
    name: bytes

    def at(self, *names: bytes) -> Path:
        return Path(os.fsdecode(b"/".join((raw(self.volume), *names))))

    def victim(self, uid: int = 0) -> Path:
        """A fresh tree of that name, below that user's directory."""
        path = self.at(b"alice" if uid else b"roots", self.name)
        shutil.rmtree(path, ignore_errors=True)
        make_tree(path, {self.name: "content"})
        for one in (path, *path.iterdir()):
            os.chown(one, uid, uid)
        return path

    def says(self, *words: str | bytes | Path, person: Credentials = ROOT) -> list[dict[str, Any]]:
        ended = tell(*words, "--json", person=person)
        assert ended.code == 0, (words, ended)
        return [json.loads(line) for line in ended.told.splitlines()]

    def swapped(self, person: Credentials = ROOT) -> str:
        (told,) = self.says("swap", self.victim(person.uid), person=person)
        return str(told["id"])


@pytest.fixture
def place(name: bytes) -> Iterator[Place]:
    with tmpfs_volume() as top:
        volume = Path(os.fsdecode(raw(top) + b"/" + name))
        make_tree(volume, {"alice": Dir(owner=(UID, UID)), "roots": {}})
        init(volume)
        yield Place(volume, name)


def tell(*words: str | bytes | Path, person: Credentials = ROOT) -> Ended:
    """A command as a user runs it, and what it says, which a terminal may see."""
    ended = command_as(person, [[os.fsdecode(word) for word in words]], _NEVER, lambda: None)
    assert ended.code != BROKEN, ended
    assert [c for c in ended.told if not c.isprintable() and c != "\n"] == [], (words, ended)
    return ended


def pasted(line: str, *more: str) -> int:
    """The exit code of a line that was printed, run by a shell."""
    bindir = os.path.dirname(TRASHD)
    env = environment({"PATH": f"{bindir}:{os.environ['PATH']}"})
    return subprocess.run(["bash", "-c", " ".join([line, *more])], env=env, cwd="/", check=False).returncode


@odd
@pytest.mark.parametrize("person", [ROOT, ALICE], ids=["root", "alice"])
def test_the_undo_line_works_as_it_is_printed(place: Place, person: Credentials) -> None:
    victim = place.victim(person.uid)
    ended = tell("swap", "--", victim, person=person)
    (line,) = [line.split(maxsplit=1)[1] for line in ended.told.splitlines() if line.startswith("  undo ")]
    assert os.listdir(victim) == []
    assert pasted(line) == 0
    assert (place.at(raw(victim)[len(raw(place.volume)) + 1 :], place.name)).read_text() == "content"


@odd
def test_every_path_that_json_says_can_be_taken_back_into_a_command(place: Place) -> None:
    victim = place.victim()
    (made,) = place.says("init", place.volume)
    assert raw(Path(os.path.dirname(made["path"]))) == raw(place.volume)
    (told,) = place.says("swap", victim)
    assert pasted(told["restore"], ">/dev/null") == 0
    identifier = place.swapped()
    (entry,) = place.says("list", "--volume", place.volume)
    assert os.path.samefile(entry["origin"], victim)
    assert os.path.isdir(os.path.join(entry["path"], "tree"))
    (told,) = place.says("restore", entry["id"], "--to", f"{os.path.dirname(entry['origin'])}/-to")
    assert (Path(told["path"]) / os.fsdecode(place.name)).read_text() == "content"
    assert identifier == told["id"]
    (seen,) = place.says("check", entry["origin"])
    assert raw(Path(seen["path"])) == raw(victim)


@odd
def test_the_volumes_that_two_copies_are_told_apart_by_can_be_pasted(place: Place) -> None:
    identifier = place.swapped()
    copy = place.at(b"roots", b"copy")
    shutil.copytree(place.volume / ".trashd", copy / ".trashd", symlinks=True)
    init(copy)
    ended = tell("keep", identifier)
    (hint,) = [line.rpartition("meant: ")[2] for line in ended.told.splitlines() if "meant: " in line]
    assert [pasted(f"trashd keep {one} {identifier} >/dev/null") for one in hint.split(" or ")] == [0, 0]


@odd
def test_a_shell_reads_back_exactly_the_bytes(name: bytes) -> None:
    word = shell_word(name)
    assert word.isprintable()
    got = subprocess.run(["bash", "-c", f"printf '%s' {word}x"], capture_output=True, check=True).stdout
    assert got == name + b"x"
