"""What could not be reaped: the reasons, another try, the way back, and root's last word."""

import errno
import io
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from fusefs.core.container_states import State
from fusefs.core.errors import BadRecord, Busy, NotFound, Refused, UsageError
from fusefs.linux.kernel import Kernel
from fusefs.store.container import HeldContainer, hold
from fusefs.store.orphans import ListedContainer, opened_folder
from tests.support.make_trees import IMMUTABLE, Dir, flags_of, make_tree, set_flags, snapshot
from tests.support.other_users import as_user
from tests.support.real_filesystems import bind_mount, full, loop_volume, unmount
from tests.support.small_orphans import command, orphan_in
from tests.support.store_verbs import (
    assert_silent,
    entries,
    folder_of,
    forge,
    init,
    init_as_of_old,
    place,
    raw,
    recover_all,
)
from tests.support.two_users_store import ALICE, job_of, shared_store, stuck

pytestmark = pytest.mark.needs("root")


@pytest.fixture
def volume() -> Iterator[Path]:
    with shared_store(alice=ALICE) as path:
        yield path
        assert_silent(path)


def list_quarantine(volume: Path) -> int:
    return command(volume, "list", "--state", "quarantine")


def free(entry: ListedContainer) -> None:
    """Give Alice what root had made in her tree."""
    for name in ("tree/roots", "tree/roots/file"):
        os.chown(Path(os.fsdecode(entry.path)) / name, ALICE, ALICE)


# List


def test_the_list_tells_why(volume: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entry = stuck(volume)
    assert [(f.name, f.errno, f.call) for f in entry.failures] == [(b"tree/roots/file", errno.EACCES, "unlink")]
    assert list_quarantine(volume) == 0
    head, row, reason = capsys.readouterr().out.splitlines()
    assert head.split()[0] == "ID"
    assert row.split()[0] == entry.id[-12:]
    assert f" {ALICE} quarantine (partly deleted) {volume}/alice/job" in " ".join(row.split())
    assert reason == "  unlink tree/roots/file: Permission denied"


def test_the_list_shows_the_first_reasons_and_says_that_there_are_more(
    volume: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = stuck(volume)
    record = Path(os.fsdecode(entry.path)) / "record.json"
    forge(record, failures=[{"name": f"tree/{n}", "errno": errno.EIO, "call": "unlink"} for n in range(5)])
    list_quarantine(volume)
    *_, third, more = capsys.readouterr().out.splitlines()
    assert third == "  unlink tree/2: Input/output error"
    assert more == "  and 2 more (--json lists up to 50)"


def test_forged_reasons_neither_break_the_list_nor_move_the_cursor(
    volume: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = stuck(volume)
    forged = {"name": "%1B[2J", "errno": 2**62, "call": "\x1b[2J"}
    forge(Path(os.fsdecode(entry.path)) / "record.json", failures=[forged])
    list_quarantine(volume)
    output = capsys.readouterr().out
    assert "\x1b" not in output
    assert f"error {2**62}" in output


# Retry


def test_a_reap_of_all_leaves_what_is_in_quarantine(volume: Path) -> None:
    entry = stuck(volume)
    free(entry)
    assert as_user(ALICE, partial(command, volume, "reap", "--all", "--now")) == 0
    assert [one.id for one in entries(volume)] == [entry.id]


@pytest.mark.parametrize("words", [(), ("--all", "--now"), ("--free=1G",), ("ID", "--wait")])
def test_force_goes_with_nothing_but_an_id(volume: Path, words: tuple[str, ...]) -> None:
    entry = stuck(volume)
    words = tuple(entry.id if word == "ID" else word for word in words)
    assert command(volume, "reap", "--force", "--yes", *words) == UsageError.exit_code
    assert place(volume, entry.id).exists()


def test_a_dry_run_with_force_deletes_nothing_and_asks_nothing(
    volume: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = stuck(volume)
    assert command(volume, "reap", "--force", "--dry-run", entry.id) == 0
    assert f"would be deleted: {entry.id}" in capsys.readouterr().out
    assert place(volume, entry.id).exists()


@pytest.mark.parametrize("words", [(), ("list",), ("delete", "ID")])
def test_the_removed_command_names_those_that_replace_it(
    words: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    assert command_of("quarantine", *words) == UsageError.exit_code
    assert "list --state quarantine, reap ID, reap --force ID or restore ID" in capfd.readouterr().err


# Restore


@pytest.mark.parametrize("to", [None, "left"])
def test_a_restore_brings_back_what_is_left(volume: Path, to: str | None) -> None:
    entry = stuck(volume)
    assert command(volume, "restore", entry.id, *(("--to", str(volume / to)) if to else ())) == 0
    assert os.listdir(volume / (to or "alice/job")) == ["roots"]
    assert entries(volume) == []


# Delete


def delete(volume: Path, *identifiers: str) -> int:
    return command(volume, "reap", "--force", "--yes", *identifiers)


def test_root_deletes_what_is_immutable_or_append_only(volume: Path) -> None:
    append_only = 0x20
    entry = stuck(volume)
    tree = Path(os.fsdecode(entry.path)) / "tree"
    make_tree(tree / "closed", {"sub": {"log": "x"}, "file": "x"})
    set_flags(tree / "closed/sub/log", append_only)
    set_flags(tree / "closed/file", IMMUTABLE)
    set_flags(tree / "closed/sub", append_only)
    set_flags(tree / "closed", IMMUTABLE)
    assert delete(volume, entry.id) == 0
    assert entries(volume) == []


def test_a_file_that_has_a_name_outside_keeps_its_flags_and_its_content(volume: Path) -> None:
    outside = make_tree(volume / "spared", {"log": "x"}) / "log"
    entry = stuck(volume)
    (Path(os.fsdecode(entry.path)) / "tree/roots/log").hardlink_to(outside)
    set_flags(outside, IMMUTABLE)
    delete(volume, entry.id)
    assert flags_of(outside) & IMMUTABLE
    assert outside.read_text() == "x"
    set_flags(outside, IMMUTABLE, on=False)


def test_nothing_of_roots_comes_to_be_in_the_users_folder(volume: Path) -> None:
    entry = stuck(volume)
    (folder_of(volume, ALICE) / "reaping").rmdir()
    assert delete(volume, entry.id) == 0
    found = [path.stat().st_uid for path in folder_of(volume, ALICE).rglob("*")]
    assert set(found) == {ALICE}


def test_what_root_can_not_delete_either_is_roots_then(volume: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_tree(volume / "spared", {"file": "x"})
    entry = stuck(volume)
    inside = Path(os.fsdecode(entry.path)) / "tree/roots/mount"
    inside.mkdir()
    with bind_mount(volume / "spared", inside):
        assert delete(volume, entry.id) == 13
        (left,) = entries(volume)
        assert (left.uid, left.state) == (0, State.QUARANTINE)
        assert left.id in capsys.readouterr().out
        moved = Path(os.fsdecode(left.path)) / "tree/tree/roots/mount"
        assert (moved / "file").read_text() == "x"
        unmount(moved)  # it went with its directory
    assert delete(volume, left.id) == 0
    assert entries(volume) == []
    assert (volume / "spared/file").read_text() == "x"


def test_its_owner_deletes_what_he_may_and_no_more(volume: Path) -> None:
    entry = stuck(volume)
    assert as_user(ALICE, partial(delete, volume, entry.id)) == 13
    assert (Path(os.fsdecode(entry.path)) / "tree/roots/file").read_text() == "root's"
    free(entry)
    assert as_user(ALICE, partial(delete, volume, entry.id)) == 0
    assert entries(volume) == []


def test_one_wrong_id_stops_it_before_anything_is_deleted(volume: Path) -> None:
    entry = stuck(volume)
    assert delete(volume, entry.id, "missing") == NotFound.exit_code
    assert delete(volume, entry.id, orphan_in(volume).id) == Refused.exit_code
    assert (Path(os.fsdecode(entry.path)) / "tree/roots/file").read_text() == "root's"


def test_what_has_no_readable_record_is_kept(volume: Path) -> None:
    entry = stuck(volume)
    record = Path(os.fsdecode(entry.path)) / "record.json"
    text = record.read_text()
    record.write_text("{}")
    assert delete(volume, entry.id) == BadRecord.exit_code
    record.write_text(text)
    assert place(volume, entry.id).exists()


def test_several_are_deleted_each_once(volume: Path) -> None:
    first = stuck(volume)
    job_of(volume, ALICE).rename(volume / "alice/first")
    second = stuck(volume)
    assert delete(volume, first.id, second.id, first.id) == 0
    assert entries(volume) == []


def test_nobody_there_to_be_asked_is_a_wrong_command_line(volume: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = stuck(volume)
    monkeypatch.setattr("fusefs.cli.reap.can_confirm", lambda: False)
    assert command(volume, "reap", "--force", entry.id) == UsageError.exit_code
    assert place(volume, entry.id).exists()


@pytest.mark.parametrize(("typed", "code"), [("y\n", 0), ("n\n", Refused.exit_code), ("\n", Refused.exit_code)])
def test_on_a_terminal_it_asks_first(
    volume: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], typed: str, code: int
) -> None:
    entry = stuck(volume)
    monkeypatch.setattr("fusefs.cli.reap.can_confirm", lambda: True)
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    assert command(volume, "reap", "--force", entry.id) == code
    assert f"{entry.id}  {ALICE}  {volume}/alice/job" in capsys.readouterr().err
    assert len(entries(volume)) == (0 if code == 0 else 1)


def test_a_deletion_loses_to_whoever_is_at_work(volume: Path) -> None:
    entry = stuck(volume)
    with opened_folder(Kernel(), [raw(volume)], entry) as folder:
        held = hold(folder, State.QUARANTINE, entry.id)
        assert isinstance(held, HeldContainer)
        with held:
            assert delete(volume, entry.id) == Busy.exit_code
    assert place(volume, entry.id) == Path(os.fsdecode(entry.path))


def test_a_store_that_root_does_not_trust_is_told_with_the_way_out(
    volume: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = stuck(volume)
    lower = volume / "alice"
    os.rename(volume / ".trashd/u/1001", volume / "kept")
    as_user(ALICE, partial(init_as_of_old, lower))
    os.rename(Path(volume / "kept"), volume / ".trashd/u/1001")
    (volume / ".trashd/u/1001/quarantine" / entry.id).rename(lower / ".trashd/u/1001/quarantine" / entry.id)
    pointer = volume / ".trashd/u/1001/pointers/lower"
    pointer.write_text("alice")
    os.chown(pointer, ALICE, ALICE)
    assert delete(volume, entry.id) == 6
    assert f"trashd init --replace {lower}" in capsys.readouterr().err
    before = snapshot(lower / ".trashd/u/1001/quarantine")
    assert command_of("init", "--replace", str(lower)) == 0
    as_user(ALICE, partial(recover_all, volume))
    assert snapshot(lower / ".trashd/new/1001/quarantine") == before
    assert delete(volume, entry.id) == 0
    assert entries(volume) == []


def command_of(*words: str) -> int:
    from fusefs.cli.main import run

    return run([*words])


@pytest.mark.needs("loop")
@pytest.mark.parametrize("filesystem", ["ext4", pytest.param("xfs", marks=pytest.mark.needs("xfs"))])
def test_a_deletion_needs_no_room_on_a_full_volume(filesystem: str) -> None:
    with loop_volume(filesystem) as path:
        init(path)
        make_tree(path / "alice", Dir(owner=(ALICE, ALICE)))
        entry = stuck(path)
        with full(path):
            assert delete(path, entry.id) == 0
        assert entries(path) == []
        assert recover_all(path) == []  # it gave its reserve, which comes back when there is room
        assert_silent(path)
