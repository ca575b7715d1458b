"""A store whose volume.json says nothing: whoever would use it is refused and told what helps, and makes no other."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.make_trees import make_tree, snapshot
from tests.support.real_filesystems import tmpfs_volume
from tests.support.store_verbs import init
from tests.support.trashd_command import done_well, swapped, trashd
from tests.support.user_homes import ALICE, homes, trashd_as

pytestmark = pytest.mark.needs("root")

NO_STORE, INCOMPLETE = 6, 13
COMMANDS = (
    "swap d", "rm d/a.log", "sweep d --name *.log", "check d", "list --volume .", "list --volume d", "list", "du",
    "restore ID", "restore e", "restore --volume d ID", "undo", "keep ID", "reap ID", "reap --now --all --volume d",
    "reap --volume .", "doctor .", "doctor --repair .",
)  # fmt: skip


def cut_short(file: Path) -> None:
    os.truncate(file, 10)


def empty(file: Path) -> None:
    file.write_bytes(b"")


def of_others(file: Path) -> None:
    file.write_text('{"magic": "another program\'s"}')


@pytest.fixture(params=[cut_short, empty, of_others, Path.unlink], ids=lambda break_it: break_it.__name__)
def broken(volume: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """The id of an orphan in a volume whose store does not say any more which it is."""
    make_tree(volume / "d", {"a.log": "1"})
    make_tree(volume / "e", {"f": "2"})
    orphan = swapped(volume / "e")["id"]
    request.param(volume / ".trashd/volume.json")
    yield orphan
    done_well("init", volume)


@pytest.mark.quick("doctor")
def test_every_command_is_refused_and_says_what_helps(volume: Path, broken: str) -> None:
    before = snapshot(volume)
    for line in COMMANDS:
        done = trashd(*line.replace("ID", broken).split(), cwd=volume)
        assert done.code == (INCOMPLETE if line == "du" else NO_STORE), (line, done)
        told = done.out + done.err
        assert told.count("The trash store there is broken") == 1, (line, done)
        assert f"trashd init {volume}" in told, (line, done)
        assert snapshot(volume) == before, line


@pytest.mark.usefixtures("broken")
def test_doctor_names_it_without_being_led_there(volume: Path) -> None:
    done = trashd("doctor")
    assert done.code == 1
    assert f"{volume}/.trashd/volume.json" in done.out
    assert f"trashd init {volume}" in done.out


@pytest.mark.usefixtures("broken")
def test_other_volumes_are_listed_all_the_same() -> None:
    with tmpfs_volume() as other:
        init(other)
        make_tree(other / "job", {"f": ""})
        orphan = str(swapped(other / "job")["id"])
        done = trashd("list")
        assert (orphan[-12:] in done.out, done.code) == (True, NO_STORE), done
        done_well("reap", "--now", orphan)
        done_well("list", "--volume", other)


def test_a_users_own_is_his_trouble_and_not_roots() -> None:
    with homes(ALICE) as home:
        job = make_tree(home[ALICE] / "work", {"job": {"f": "x"}}) / "job"
        for path in (job.parent, job, job / "f"):
            os.chown(path, ALICE, ALICE)
        (home[ALICE].parent).chmod(0o755)
        assert trashd_as(ALICE, home[ALICE], "swap", job).code == 0
        (file,) = home[ALICE].rglob("volume.json")
        cut_short(file)
        assert trashd_as(ALICE, home[ALICE], "swap", job).code == NO_STORE
        assert trashd_as(ALICE, home[ALICE], "list").code == NO_STORE
        assert trashd("list").code == 0
        assert trashd_as(ALICE, home[ALICE], "init", file.parents[1]).code == 0
        assert trashd_as(ALICE, home[ALICE], "restore", job).code == 0
        assert (job / "f").read_text() == "x"


# Of another format


@pytest.fixture(params=[1, 3], ids="format {}".format)
def unknown(volume: Path, request: pytest.FixtureRequest) -> Iterator[int]:
    """The format that volume.json states, in a volume whose store holds an orphan of `e`."""
    make_tree(volume / "d", {"a.log": "1"})
    make_tree(volume / "e", {"f": "2"})
    swapped(volume / "e")
    file = volume / ".trashd/volume.json"
    text = file.read_text()
    file.write_text(json.dumps({**json.loads(text), "format": request.param}))
    yield request.param
    file.write_text(text)


def test_no_command_changes_a_store_of_an_unknown_format(volume: Path, unknown: int) -> None:
    before = snapshot(volume, with_times=True)
    for line in (*COMMANDS, "init ."):
        done = trashd(*line.replace("ID", "20261121").split(), cwd=volume)
        assert done.code == (INCOMPLETE if line == "du" else NO_STORE), (line, done)
        told = done.out + done.err
        assert f"{volume}/.trashd/volume.json has format {unknown}" in told, (line, done)
        assert f"mv {volume}/.trashd {volume}/.trashd-old" in told, (line, done)
        assert snapshot(volume, with_times=True) == before, line


def test_what_is_called_so_and_holds_no_users_folders_is_no_store() -> None:
    with tmpfs_volume() as volume:
        make_tree(volume / ".trashd", {"notes": ""})
        make_tree(volume / "d", {"e": {"f": ""}})
        done_well("swap", volume / "d/e")
        assert (volume / "d/.trashd/volume.json").exists()
