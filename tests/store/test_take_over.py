"""What another node left on a shared filesystem: watched by our own clock, announced, and taken over when it is silent.

One tmpfs is taken for a shared one here, and its swap for one of another boot.
"""

import errno
import fcntl
import json
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from fusefs.cli.main import run
from fusefs.core.container_states import State
from fusefs.core.errors import WAY_OUT
from fusefs.linux import config_files
from fusefs.linux import kernel as kernel_module
from fusefs.linux.kernel import Kernel
from fusefs.linux.machine_identity import boot_id
from fusefs.linux.mountinfo import Mount
from fusefs.store import silent_nodes
from fusefs.store.check_swap import check_swap
from fusefs.store.silent_nodes import DEFAULT_TAKEOVER_S, takeover_s
from tests.support.make_trees import make_tree
from tests.support.other_users import as_user
from tests.support.real_filesystems import tmpfs_volume
from tests.support.store_verbs import (
    ActingBefore,
    DyingAt,
    assert_silent,
    die,
    entries,
    forge,
    in_child,
    init,
    opened,
    problems,
    raw,
    recover_all,
    swap,
    tmpfs_store,
)
from tests.support.two_users_store import ALICE

pytestmark = pytest.mark.needs("root")

OTHER_BOOT = str(uuid.UUID(int=1))
PART = DEFAULT_TAKEOVER_S / 3


class Later(Kernel):
    """This boot's clock, some seconds on."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def boot_ns(self) -> int:
        return super().boot_ns() + int(self.seconds * 1e9)


@pytest.fixture
def volume(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """One with a swap of another boot, killed when the exchange was done."""
    monkeypatch.setattr(kernel_module, "_LOCAL", frozenset())
    with tmpfs_store() as path:
        make_tree(path / "job", {"file": "content"})
        assert in_child(partial(swap, path / "job", Kernel(ActingBefore("rmdir", die)))) == DyingAt.EXIT_CODE
        forge(left(path) / "record.json", boot=OTHER_BOOT)
        yield path
        assert list((path / "job").iterdir()) == []
        assert_silent(path)


def left(volume: Path) -> Path:
    (path,) = volume.glob(".trashd/u/0/stage/*")
    return path


def notes(volume: Path) -> set[str]:
    """The kinds of notes in what was left."""
    return {name.split(".")[0] for name in os.listdir(left(volume)) if name.startswith(("watched", "announced"))}


def is_taken_over(volume: Path) -> bool:
    return [entry.state for entry in entries(volume)] == [State.ORPHANS]


def recover_after(volume: Path, *moments: float) -> list[str]:
    """What the last of the recoveries at those moments tells."""
    told: list[str] = []
    for seconds in moments:
        told = recover_all(volume, Later(seconds))
    return told


def finish(volume: Path) -> None:
    recover_after(volume, *(DEFAULT_TAKEOVER_S * n for n in range(4, 8)))
    assert is_taken_over(volume)


def test_at_the_first_look_nobody_is_told_to_withdraw(volume: Path) -> None:
    (told,) = recover_after(volume, 0)
    assert "may still be working on it" in told
    assert notes(volume) == {"watched"}
    finish(volume)


def test_after_a_third_of_the_time_it_is_announced(volume: Path) -> None:
    recover_after(volume, 0, PART + 1)
    assert notes(volume) == {"watched", "announced"}
    finish(volume)


def test_what_is_silent_for_the_whole_time_is_taken_over(volume: Path) -> None:
    assert recover_after(volume, 0, PART + 1, DEFAULT_TAKEOVER_S - 1) != []
    assert recover_after(volume, DEFAULT_TAKEOVER_S + 1) == []
    assert is_taken_over(volume)


def test_what_was_looked_at_long_ago_is_announced_before_it_is_taken_over(volume: Path) -> None:
    assert recover_after(volume, 0, 5 * DEFAULT_TAKEOVER_S) != []
    assert notes(volume) == {"watched", "announced"}
    assert recover_after(volume, 5 * DEFAULT_TAKEOVER_S + PART + 1) == []


def test_a_change_begins_the_watch_anew(volume: Path) -> None:
    recover_after(volume, 0, PART + 1)
    os.utime(left(volume) / "record.json")
    assert recover_after(volume, DEFAULT_TAKEOVER_S + 1) != []
    assert notes(volume) == {"watched"}
    finish(volume)


def test_another_boots_notes_say_nothing(volume: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recover_after(volume, 0, PART + 1)
    with monkeypatch.context() as patch:
        patch.setattr(silent_nodes, "boot_id", lambda: str(uuid.UUID(int=2)))
        assert recover_after(volume, DEFAULT_TAKEOVER_S + 1) != []
    assert recover_after(volume, DEFAULT_TAKEOVER_S + 1) == []


def test_a_note_that_makes_no_sense_is_none(volume: Path) -> None:
    recover_after(volume, 0)
    (note,) = left(volume).glob("watched.*")
    note.write_text("x" * 1000)
    assert recover_after(volume, DEFAULT_TAKEOVER_S + 1) != []
    finish(volume)


def test_doctor_waits_for_it(volume: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(silent_nodes, "takeover_s", lambda _volume: 0.3)
    assert run(["doctor", "--repair", "--wait", str(volume)]) == 0
    assert "another node may still be working on this volume; watching" in capfd.readouterr().err
    assert is_taken_over(volume)


def test_to_wait_is_for_repairs_alone(volume: Path) -> None:
    assert run(["doctor", "--wait", str(volume)]) == 2
    finish(volume)


def test_the_end_of_a_reap_that_was_killed_is_not_watched(volume: Path) -> None:
    """Nobody makes a container in reaping/: one without a record is empty, or its rmdir is refused."""
    finish(volume)
    (orphan,) = volume.glob(".trashd/u/0/orphans/*")
    (ended := volume / ".trashd/u/0/reaping" / f"{orphan.name[:-12]}{'0' * 12}").mkdir()
    assert recover_after(volume, 0) == []
    assert not ended.exists()


def test_what_has_no_record_yet_may_be_another_nodes(volume: Path) -> None:
    finish(volume)
    (orphan,) = volume.glob(".trashd/u/0/orphans/*")
    (begun := volume / ".trashd/u/0/stage" / f"{orphan.name[:-12]}{'0' * 12}").mkdir()
    (problem,) = problems(volume)
    assert "another node is writing it" in problem.what
    recover_after(volume, 0, PART + 1, DEFAULT_TAKEOVER_S - 1)
    assert begun.exists()
    recover_after(volume, DEFAULT_TAKEOVER_S + 1)
    assert not begun.exists()


def test_a_lock_of_a_boot_that_is_over_does_not_count(volume: Path) -> None:
    """A server may keep a dead client's for a day."""
    with (left(volume) / "record.json").open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        recover_after(volume, 0, PART + 1, DEFAULT_TAKEOVER_S + 1)
        assert not is_taken_over(volume)
        assert run(["doctor", "--repair", "--ended", OTHER_BOOT, str(volume)]) == 0
    assert is_taken_over(volume)


def test_who_waits_for_what_another_boot_has_locked_is_told_how_to_have_it(
    volume: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(silent_nodes, "takeover_s", lambda _volume: 0.3)
    with (left(volume) / "record.json").open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert run(["doctor", "--repair", "--wait", str(volume)]) == 0
        output = capfd.readouterr().err
        assert "holds its lock" in output
        assert f"doctor --repair --ended {OTHER_BOOT}" in output
        assert not is_taken_over(volume)
    finish(volume)


def test_who_does_not_wait_is_told_nothing_of_what_another_boot_has_locked(volume: Path) -> None:
    with (left(volume) / "record.json").open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert recover_after(volume, 0, DEFAULT_TAKEOVER_S + 1) == []
    finish(volume)


def test_of_what_a_mount_refuses_nobody_is_advised_to_give_it_up(
    volume: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It may be the mount of this machine alone that does so."""

    def lock(_kernel: Kernel, _fd: int) -> bool:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(Kernel, "lock", lock)
        assert run(["doctor", str(volume)]) == 1
    output = capfd.readouterr().out
    assert "Input/output error" in output
    assert "try another machine" in output
    assert WAY_OUT not in output
    finish(volume)


def test_a_lock_of_this_boot_counts_whatever_is_said(volume: Path) -> None:
    forge(left(volume) / "record.json", boot=boot_id())
    with (left(volume) / "record.json").open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        run(["doctor", "--repair", "--ended", boot_id(), str(volume)])
        assert not is_taken_over(volume)
    assert recover_all(volume) == []
    assert is_taken_over(volume)


# How long that is


@contextmanager
def configured(monkeypatch: pytest.MonkeyPatch, text: str) -> Iterator[Path]:
    """The system's configuration, readable by all, and the directory that it is in."""
    with tmpfs_volume() as directory:
        (directory / "config.toml").write_text(text)
        monkeypatch.setattr(config_files, "SYSTEM_DIR", raw(directory))
        yield directory


def takeover_of(volume: Path, **changed: object) -> float:
    """That of its store, some of which is changed."""
    with opened(volume) as store:
        return takeover_s(store._replace(**changed))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fstype", "seconds"), [("ceph", 90), ("fuse.glusterfs", 90), ("fuse.sshfs", 90), ("nfs4", 180), ("lustre", 180)]
)
def test_without_a_configuration_the_type_of_the_filesystem_decides(
    monkeypatch: pytest.MonkeyPatch, fstype: str, seconds: int
) -> None:
    mount = Mount(1, 0, b"0:1", b"/", b"/mnt", fstype.encode(), b"", b"")
    with tmpfs_store() as volume, configured(monkeypatch, ""):
        monkeypatch.setattr(silent_nodes, "find_mount", lambda *_: mount)
        assert takeover_of(volume) == seconds


def test_the_configuration_decides_for_a_volume(monkeypatch: pytest.MonkeyPatch) -> None:
    with tmpfs_store() as volume, tmpfs_store() as other:
        text = f'defaults.takeover_s = 40\n[[volume]]\npath = "{volume}"\ntakeover_s = 300\n'
        with configured(monkeypatch, text):
            assert (takeover_of(volume), takeover_of(other)) == (300, 40)


def test_a_users_command_takes_the_longer_time_of_the_systems_and_the_users_configuration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "/nowhere")
    with (
        tmpfs_store() as volume,
        configured(monkeypatch, "defaults.takeover_s = 40\n") as system,
        tmpfs_volume() as home,
    ):
        assert as_user(ALICE, partial(takeover_of, volume)) == 40
        (home / "trashd").mkdir()
        (home / "trashd/config.toml").write_text("defaults.takeover_s = 20\n")
        monkeypatch.setenv("XDG_CONFIG_HOME", str(home))
        assert as_user(ALICE, partial(takeover_of, volume)) == 40
        (home / "trashd/config.toml").write_text("defaults.takeover_s = 200\n")
        assert as_user(ALICE, partial(takeover_of, volume)) == 200
        (system / "config.toml").write_text("defaults.takeover_s = 300\n")
        assert as_user(ALICE, partial(takeover_of, volume)) == 300


@pytest.mark.parametrize("hide", [lambda file: file.chmod(0o600), lambda file: file.write_text("poll = 1")])
def test_a_configuration_that_the_caller_can_not_read_leaves_the_default(
    monkeypatch: pytest.MonkeyPatch, hide: Callable[[Path], object]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "/nowhere")
    with tmpfs_store() as volume, configured(monkeypatch, "defaults.takeover_s = 40\n") as system:
        hide(system / "config.toml")
        assert as_user(ALICE, partial(takeover_of, volume)) == DEFAULT_TAKEOVER_S


def test_the_services_configuration_decides_in_its_children(monkeypatch: pytest.MonkeyPatch) -> None:
    with tmpfs_store() as volume, configured(monkeypatch, "defaults.takeover_s = 40\n"):
        assert (takeover_of(volume, takeover_s=50), takeover_of(volume, takeover_s=0)) == (50, DEFAULT_TAKEOVER_S)


def test_it_is_at_least_three_times_as_long_as_caches_were_seen_to_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    with tmpfs_store() as volume, configured(monkeypatch, "defaults.takeover_s = 40\n"):
        file = volume / ".trashd/volume.json"
        of_0_3_0 = {"shared_locks": True, "handles": False, "birth_times": False, "cache_s": 100.5}
        file.write_text(json.dumps({**json.loads(file.read_text()), **of_0_3_0}))
        assert takeover_of(volume) == 301.5


def test_an_init_that_writes_volume_json_anew_keeps_that_time() -> None:
    with tmpfs_store() as volume:
        file = volume / ".trashd/volume.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "cache_s": 100.5, "noreplace": None}))
        init(volume)
        fields = json.loads(file.read_text())
        assert (fields["noreplace"], fields["cache_s"]) == (True, 100.5)


def test_check_prints_it_for_a_shared_filesystem_alone(volume: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (volume / "victim").mkdir()
    assert check_swap(Kernel(), raw(volume / "victim")).takeover_s == DEFAULT_TAKEOVER_S
    monkeypatch.undo()
    assert check_swap(Kernel(), raw(volume / "victim")).takeover_s is None
    monkeypatch.setattr(kernel_module, "_LOCAL", frozenset())
    finish(volume)
