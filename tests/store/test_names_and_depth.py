"""Names that break parsers, and trees and paths deeper than any buffer: swapped, removed, restored, reaped alike."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fusefs.core.errors import NotFound, TrashdError
from fusefs.linux.kernel import Kernel
from fusefs.store.stage import SwapOptions
from fusefs.store.swap import remove_path, swap_path
from tests.support.covering_sets import runs_every_case
from tests.support.make_trees import (
    deep_chain,
    make_tree,
    snapshot,
    weird_names,
)
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

pytestmark = pytest.mark.needs("root")

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
