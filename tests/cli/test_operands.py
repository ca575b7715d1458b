"""Operands that POSIX has utilities refuse: `.`, `..`, what ends in them, and a slash behind what is no directory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.make_trees import Symlink, make_tree, snapshot
from tests.support.run_sweep import names
from tests.support.store_verbs import assert_silent
from tests.support.trashd_command import CommandResult, done_well, swapped, trashd

DOTS = [".", "..", "./", "..//", "d/.", "d/..", "d/../.", "link/.", "d/e/.."]
VERBS = ["rm", "rm -rf", "rm --now", "swap", "swap --dry-run", "check", "restore"]


@pytest.fixture
def top(volume: Path) -> Path:
    return make_tree(volume / "top", {"d": {".b": "1", "e": {}}, "f": "2", "link": Symlink("d"), "gone": Symlink("x")})


def refused(done: CommandResult, path: str) -> bool:
    return done.code == 3 and f"Refused: {path}" in done.err


@pytest.mark.parametrize("verb", VERBS)
def test_dots_are_refused(top: Path, verb: str) -> None:
    before = snapshot(top.parent)
    assert [path for path in DOTS if not refused(trashd(*verb.split(), path, cwd=top), path)] == []
    assert snapshot(top.parent) == before


def test_a_glob_that_an_old_shell_expands_to_dots_takes_only_names(top: Path) -> None:
    done = trashd("rm", "-rf", "d/.", "d/..", "d/.b", cwd=top)
    assert (done.code, done.err.count("Refused")) == (13, 2)
    assert names(top) == {"d", "d/e", "f", "link", "gone"}


def test_dots_in_a_list_are_refused(top: Path) -> None:
    assert trashd("rm", "-0", cwd=top, stdin=b"d/..\0.\0f\0").code == 13
    done = trashd("sweep", ".", "--type", "f,d", "--delete", "-0", cwd=top, stdin=b".\0d/.\0d/..\0d/.b\0")
    assert (done.code, "ends in a dot: " in done.out) == (13, True), done
    assert names(top) == {"d", "d/e", "link", "gone"}


@pytest.mark.parametrize("path", ["f/", "link/", "gone/", "f//"])
def test_a_slash_behind_what_is_no_directory_is_refused(top: Path, path: str) -> None:
    before = snapshot(top)
    for verb in ("rm", "swap", "check"):
        done = trashd(verb, path, cwd=top)
        assert (done.code, "without the slash" in done.err) == (3, True), done
    trashd("rm", "-rf", path, cwd=top)  # as with rm(1), -f says nothing of a name that is not there
    assert snapshot(top) == before


def test_a_slash_behind_a_directory_is_not_refused(top: Path) -> None:
    for verb, path in (("swap", "d///"), ("rm", "d/")):
        done_well(verb, path, cwd=top)
        done_well("restore", "d/", cwd=top)
    assert (top / "d/.b").exists()


def test_a_slash_behind_what_was_no_directory_finds_no_orphan(top: Path) -> None:
    done_well("rm", "f", cwd=top)
    done_well("rm", "d", cwd=top)
    assert trashd("restore", "f/", cwd=top).code == 5
    assert trashd("restore", "d/.b/", cwd=top).code == 5
    done_well("restore", "f", cwd=top)
    done_well("restore", "d/.b", "--to", "b", cwd=top)


def test_a_listed_slash_means_a_directory(top: Path) -> None:
    words = ("sweep", top, "--type", "f,d,l", "--delete", "--recursive", "--from", "-")
    done = trashd(*words, cwd=top, stdin=b"f/\nlink/\nd/\n")
    assert (done.code, "1 match" in done.out) == (13, True)
    assert names(top) == {"f", "link", "gone"}


def test_a_destination_that_has_no_name_is_named(top: Path) -> None:
    identifier = swapped(top / "d")["id"]
    for to in ("/", "", "..", "new/.", "d/.."):
        done = trashd("restore", identifier, "--to", to, cwd=top)
        assert (done.code, f"Refused: {to or '--to'}" in done.err) == (3, True), done
    done_well("restore", identifier)
    assert_silent(top.parent)


def test_listed_paths_that_the_selection_leaves_out_are_counted(top: Path) -> None:
    listed = os.fsencode("f\0d\0d/.b\0link\0absent\0")
    done = trashd("sweep", ".", "--delete", "-0", "--from", "-", cwd=top, stdin=listed)
    assert (done.code, "1 path of the list does not match the selection" in done.out) == (13, True), done
    done = done_well("sweep", ".", "--delete", "-0", "--json", cwd=top, stdin=b"d\0d/e\0")
    assert done.objects()[0]["sums"]["n_unmatched"] == 2
