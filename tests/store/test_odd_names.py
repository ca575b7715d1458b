"""Names that break parsers, and trees deeper than any buffer: told safely, swapped, restored and reaped alike."""

import json
import os
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fusefs.core.errors import NotFound, TrashdError
from fusefs.core.printable_names import shell_word
from fusefs.linux.kernel import Kernel
from fusefs.store.stage import SwapOptions
from fusefs.store.swap import remove_path, swap_path
from tests.support.covering_sets import runs_every_case
from tests.support.interrupted_command import BROKEN, Ended, command_as
from tests.support.make_trees import (
    Dir,
    deep_chain,
    make_tree,
    snapshot,
    weird_names,
)
from tests.support.privileges import PEOPLE, Credentials
from tests.support.real_filesystems import tmpfs_volume
from tests.support.store_verbs import (
    assert_silent,
    entries,
    init,
    place,
    raw,
    reap_now,
    remove,
    restore,
    swap,
)
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
        return [json.loads(line) for line in ended.output.splitlines()]

    def swapped(self, person: Credentials = ROOT) -> str:
        (told,) = self.says("swap", self.victim(person.uid), person=person)
        return str(told["id"])


@pytest.fixture
def odd_place(name: bytes) -> Iterator[Place]:
    with tmpfs_volume() as top:
        volume = Path(os.fsdecode(raw(top) + b"/" + name))
        make_tree(volume, {"alice": Dir(owner=(UID, UID)), "roots": {}})
        init(volume)
        yield Place(volume, name)


def tell(*words: str | bytes | Path, person: Credentials = ROOT) -> Ended:
    """A command as a user runs it, and what it says, which a terminal may see."""
    ended = command_as(person, [[os.fsdecode(word) for word in words]], _NEVER, lambda: None)
    assert ended.code != BROKEN, ended
    assert [c for c in ended.output if not c.isprintable() and c != "\n"] == [], (words, ended)
    return ended


def pasted(line: str, *more: str) -> int:
    """The exit code of a line that was printed, run by a shell."""
    bindir = os.path.dirname(TRASHD)
    env = environment({"PATH": f"{bindir}:{os.environ['PATH']}"})
    return subprocess.run(["bash", "-c", " ".join([line, *more])], env=env, cwd="/", check=False).returncode


@odd
@pytest.mark.parametrize("person", [ROOT, ALICE], ids=["root", "alice"])
def test_the_undo_line_works_as_it_is_printed(odd_place: Place, person: Credentials) -> None:
    victim = odd_place.victim(person.uid)
    ended = tell("swap", "--", victim, person=person)
    (line,) = [line.split(maxsplit=1)[1] for line in ended.output.splitlines() if line.startswith("  undo ")]
    assert os.listdir(victim) == []
    assert pasted(line) == 0
    assert (odd_place.at(raw(victim)[len(raw(odd_place.volume)) + 1 :], odd_place.name)).read_text() == "content"


@odd
def test_every_path_that_json_says_can_be_taken_back_into_a_command(odd_place: Place) -> None:
    victim = odd_place.victim()
    (made,) = odd_place.says("init", odd_place.volume)
    assert raw(Path(os.path.dirname(made["path"]))) == raw(odd_place.volume)
    (told,) = odd_place.says("swap", victim)
    assert pasted(told["restore"], ">/dev/null") == 0
    identifier = odd_place.swapped()
    (entry,) = odd_place.says("list", "--volume", odd_place.volume)
    assert os.path.samefile(entry["origin"], victim)
    assert os.path.isdir(os.path.join(entry["path"], "tree"))
    (told,) = odd_place.says("restore", entry["id"], "--to", f"{os.path.dirname(entry['origin'])}/-to")
    assert (Path(told["path"]) / os.fsdecode(odd_place.name)).read_text() == "content"
    assert identifier == told["id"]
    (seen,) = odd_place.says("check", entry["origin"])
    assert raw(Path(seen["path"])) == raw(victim)


@odd
def test_the_volumes_that_two_copies_are_told_apart_by_can_be_pasted(odd_place: Place) -> None:
    identifier = odd_place.swapped()
    copy = odd_place.at(b"roots", b"copy")
    shutil.copytree(odd_place.volume / ".trashd", copy / ".trashd", symlinks=True)
    init(copy)
    ended = tell("keep", identifier)
    (hint,) = [
        line.rpartition("select one with ")[2] for line in ended.output.splitlines() if "select one with " in line
    ]
    assert [pasted(f"trashd keep {one} {identifier} >/dev/null") for one in hint.split(" or ")] == [0, 0]


@odd
def test_a_shell_reads_back_exactly_the_bytes(name: bytes) -> None:
    word = shell_word(name)
    assert word.isprintable()
    got = subprocess.run(["bash", "-c", f"printf '%s' {word}x"], capture_output=True, check=True).stdout
    assert got == name + b"x"


N_DEEP = 10_000 if runs_every_case() else 2_500


@pytest.fixture
def volume() -> Iterator[Path]:
    """A volume with a store; what is left in it may be too deep for rmtree, and goes with the mount."""
    with tmpfs_volume() as path:
        init(path)
        yield path


def at(directory: Path, name: bytes) -> Path:
    return Path(os.fsdecode(raw(directory) + b"/" + name))


# Names


@pytest.mark.parametrize("name", weird_names())
def test_any_name_is_swapped_removed_restored_whole_or_in_part_and_reaped(volume: Path, name: bytes) -> None:
    victim = at(volume, name)
    before = snapshot(make_tree(victim, {name: "content", "sub": {name: {name: "deep"}}}))
    swapped = swap(victim)
    assert os.listdir(victim) == []
    [entry] = entries(volume)
    assert entry.origin == raw(victim)
    restore(volume, swapped.id)
    assert snapshot(victim) == before
    removed = remove(victim)
    assert not victim.exists()
    restore(volume, removed.id, inside=b"sub/" + name + b"/" + name)
    assert at(at(at(victim, b"sub"), name), name).read_text() == "deep"
    assert reap_now(volume, removed.id).report.n_failed == 0
    assert entries(volume) == []
    assert_silent(volume)


@pytest.mark.parametrize("path", [b"job/../job", b"./job", b"job/", b"job///", b"other/../job"])
def test_dots_and_slashes_name_what_they_mean(volume: Path, path: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tree(volume / "work", {"job": {"a": "b"}, "other": {}})
    monkeypatch.chdir(volume / "work")
    swapped = swap_path(Kernel(), path, SwapOptions())
    assert swapped.path == raw(volume / "work" / "job")
    restore(volume, swapped.id)
    assert (volume / "work" / "job" / "a").read_text() == "b"
    assert_silent(volume)


@pytest.mark.parametrize(
    "path", [b"", b"missing", b"missing/x", b"x" * 256, b"a\n\x1b[31m", b"/" + b"d/" * 3000 + b"x"]
)
def test_a_path_that_is_not_there_is_told_with_its_name_harmless(volume: Path, path: bytes) -> None:
    for verb in (swap_path, remove_path):
        with pytest.raises(TrashdError) as caught:
            verb(Kernel(), path, SwapOptions())
        assert caught.value.message().isprintable()
        assert path not in (b"missing", b"missing/x") or isinstance(caught.value, NotFound)
    assert_silent(volume)


def test_no_control_character_of_a_record_reaches_the_terminal(volume: Path) -> None:
    make_tree(volume / "job", {})
    record = place(volume, swap(volume / "job").id) / "record.json"
    fields = json.loads(record.read_text())
    evil = "\x1b[31m\x9b\r\n\u202e"
    for change in ({"note": evil}, {"method": evil}, {"origin": evil}, {"host": evil * 200}, {evil: 1, "format": evil}):
        record.write_text(json.dumps({**fields, **change}))
        for command in ("list", "doctor"):
            where = ("--volume", os.fspath(volume)) if command == "list" else (os.fspath(volume),)
            done = run(command, *where)
            assert_printable(done.stdout + done.stderr)


def run(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    code = "import sys; from fusefs.cli.main import main; sys.exit(main())"
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, check=False, timeout=60)


def assert_printable(output: bytes) -> None:
    text = output.decode()
    assert [c for c in text if not c.isprintable() and c != "\n"] == []


# Depth


@pytest.mark.parametrize("verb", [swap, remove])
def test_thousands_of_levels_go_and_come_back(volume: Path, verb: Callable[[Path], object]) -> None:
    before = snapshot(deep_chain(volume / "deep", N_DEEP))
    verb(volume / "deep")
    [entry] = entries(volume)
    restore(volume, entry.id)
    assert snapshot(volume / "deep") == before
    assert_silent(volume)


def test_a_part_thousands_of_levels_down_is_restored(volume: Path) -> None:
    before = snapshot(deep_chain(volume / "deep", N_DEEP))
    identifier = swap(volume / "deep").id
    restore(volume, identifier, inside=b"d/" * N_DEEP + b"leaf")
    assert snapshot(volume / "deep") == before
    assert_silent(volume)


def deepest(top: Path, n_levels: int, name: bytes) -> bytes:
    return raw(top) + (b"/" + name) * n_levels


@pytest.mark.parametrize("verb", [swap_path, remove_path])
@pytest.mark.parametrize(("n_levels", "name"), [(N_DEEP, b"d"), (40, b"n" * 255)])
def test_a_victim_below_path_max_goes_and_comes_back(
    volume: Path, verb: Callable[[Kernel, bytes, SwapOptions], object], n_levels: int, name: bytes
) -> None:
    before = snapshot(deep_chain(volume / "deep", n_levels, name=name))
    verb(Kernel(), deepest(volume / "deep", n_levels, name), SwapOptions())
    assert snapshot(volume / "deep") != before
    [entry] = entries(volume)
    assert entry.origin == deepest(volume / "deep", n_levels, name)
    restore(volume, entry.id)
    assert snapshot(volume / "deep") == before
    assert_silent(volume)


def test_a_victim_below_path_max_is_named_from_the_working_directory(volume: Path) -> None:
    before = snapshot(deep_chain(volume / "deep", 40, name=b"n" * 255))
    here = os.open(".", os.O_RDONLY)
    try:
        for name in ("deep", *["n" * 255] * 39):
            os.chdir(volume if name == "deep" else ".")
            os.chdir(name)
        swapped = swap_path(Kernel(), b"n" * 255, SwapOptions())
    finally:
        os.fchdir(here)
        os.close(here)
    assert swapped.path == deepest(volume / "deep", 40, b"n" * 255)
    restore(volume, swapped.id)
    assert snapshot(volume / "deep") == before
    assert_silent(volume)


def test_an_origin_too_long_for_a_record_is_a_clear_error(volume: Path) -> None:
    name = b"\xff" * 255
    before = snapshot(deep_chain(volume / "deep", 100, name=name))
    for verb in (swap_path, remove_path):
        with pytest.raises(TrashdError, match="too long"):
            verb(Kernel(), deepest(volume / "deep", 100, name), SwapOptions())
    assert snapshot(volume / "deep") == before
    assert_silent(volume)


# What is in the tree


@pytest.mark.parametrize("kind", ["file", "link", "broken", "fifo", "device", "socket"])
def test_what_is_no_directory_is_removed_and_restored(volume: Path, kind: str) -> None:
    path = volume / "thing"
    match kind:
        case "file":
            path.write_text("content")
        case "link" | "broken":
            path.symlink_to(".trashd" if kind == "link" else "nowhere")
        case "fifo":
            os.mkfifo(path)
        case "device":
            os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3))
        case _:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(os.fspath(path))
    before = snapshot(path)
    identifier = remove(path).id
    assert not os.path.lexists(path)
    restore(volume, identifier)
    assert snapshot(path) == before
    identifier = remove(path).id
    assert reap_now(volume, identifier).report.n_failed == 0
    assert entries(volume) == []
    assert_silent(volume)
