"""`trashd init`: what it makes and notes, and copies and others' stores, whatever call fails or is killed."""

import errno
import json
import os
import shutil
import subprocess
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fusefs.cli.main import run
from fusefs.core.errors import TrashdError
from fusefs.core.node_heartbeats import Heartbeat, encode_heartbeat, heartbeat_name
from fusefs.linux.kernel import Kernel
from fusefs.store.user_folders import inspect_folders
from tests.support.covering_sets import runs_every_case
from tests.support.crash_scenarios import changing
from tests.support.fuse_bad_rename import lying_volume
from tests.support.make_trees import Dir, make_tree, snapshot
from tests.support.other_users import as_user
from tests.support.real_filesystems import ALL_FILESYSTEMS, loop_volume, tmpfs_volume
from tests.support.shared_memory_children import code_of_child
from tests.support.small_orphans import EXPIRED, OTHER
from tests.support.store_verbs import (
    ENTRIES,
    ActingBefore,
    DyingAt,
    FailingAt,
    assert_silent,
    die,
    entries,
    in_child,
    init,
    init_as_of_old,
    numbered_calls,
    opened,
    recover_all,
    swap,
    users_own,
)
from tests.support.trashd_command import done_well
from tests.support.two_users_store import ALICE, BOB
from tests.support.user_homes import forget_stores

pytestmark = pytest.mark.needs("root")


BEAT = heartbeat_name("beta", str(uuid.UUID(int=7))).decode()


def facts(volume: Path) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads((volume / ".trashd/volume.json").read_text())
    return fields


def old_facts(volume: Path) -> dict[str, Any]:
    """What it said before there was this key."""
    return {key: one for key, one in facts(volume).items() if key != "noreplace"}


@pytest.mark.parametrize("filesystem", ALL_FILESYSTEMS)
def test_a_local_filesystem_proves_all(filesystem: str) -> None:
    with tmpfs_volume() if filesystem == "tmpfs" else loop_volume(filesystem) as volume:
        init(volume)
        proven = {key for key, value in facts(volume).items() if value is True}
        assert proven >= {"noreplace", "exchange", "strangers_refused", "unnamed"}
        assert sorted(os.listdir(volume / ".trashd")) == ENTRIES
        assert_silent(volume)


@pytest.mark.needs("fuse")
@pytest.mark.parametrize(
    ("mode", "spares"), [("honest", True), ("ignore", False), ("lie", False), ("einval", False), ("enosys", False)]
)
def test_a_filesystem_that_ignores_one_flag_is_not_believed_to_read_the_other(mode: str, spares: bool) -> None:
    with lying_volume(mode) as served:
        init(served.path)
        assert (facts(served.path)["noreplace"], facts(served.path)["exchange"]) == (spares, spares)
        assert_silent(served.path)


def test_a_store_of_before_is_proven_by_its_next_init_and_then_left() -> None:
    with tmpfs_volume() as volume:
        init(volume)
        path = volume / ".trashd/volume.json"
        path.write_text(json.dumps(old_facts(volume)))
        init(volume)
        assert facts(volume)["noreplace"] is True
        renewed = path.stat().st_mtime_ns
        init(volume)
        assert path.stat().st_mtime_ns == renewed


def test_a_swap_does_not_prove_anything_in_a_store_of_before() -> None:
    with tmpfs_volume() as volume:
        init(volume)
        path = volume / ".trashd/volume.json"
        path.write_text(json.dumps(old := old_facts(volume)))
        done_well("swap", make_tree(volume / "job", {"a": "1"}))
        assert facts(volume) == old


@pytest.mark.parametrize("call", ["exchange", "renameat2", "tmpfile", "strangers"])
def test_what_a_killed_trial_of_one_mount_left_the_next_init_removes(call: str) -> None:
    """None of it is set aside as planted."""
    with tmpfs_volume() as volume:
        init(volume)
        path = volume / ".trashd/volume.json"
        path.write_text(json.dumps({**facts(volume), "noreplace": None}))
        assert in_child(partial(init, volume, Kernel(ActingBefore(call, die)))) == DyingAt.EXIT_CODE
        init(volume)
        assert sorted(os.listdir(volume / ".trashd")) == ENTRIES
        assert facts(volume)["noreplace"] is True


# What a killed maker left beside a store


def test_init_takes_away_what_a_killed_copy_left() -> None:
    with tmpfs_volume() as volume:
        left = volume / ".trashd.new-copy-0123456789abcdef"
        left.mkdir(0o700)
        (left / "0123456789abcdef").touch()
        (left / "logs").mkdir(0o700)
        init(volume)
        assert not left.exists()


def test_a_directory_of_roots_that_a_user_names_like_a_copy_in_the_making_keeps_what_it_has() -> None:
    with tmpfs_volume() as volume:
        os.chown(volume, BOB, BOB)
        for mode in (0o700, 0o755):
            secret = make_tree(volume / "secret", Dir({"key": b"1", "more": {"key": b"2"}}, mode))
            before = snapshot(secret)
            named = volume / f".trashd.new-copy-{mode}"
            as_user(BOB, partial(os.rename, secret, named))
            init(volume)
            assert snapshot(named) == before


# The beats of nodes in a store


def beats_in(volume: Path) -> Path:
    nodes = volume / ".trashd/nodes"
    nodes.mkdir(0o700)
    (nodes / BEAT).write_bytes(encode_heartbeat(Heartbeat(started_ns=1, n=1, version="0", phase="idle")))
    return nodes


def test_beats_are_left_where_they_are(volume: Path) -> None:
    nodes = beats_in(volume)
    init(volume)
    assert_silent(volume)
    assert [path.name for path in nodes.iterdir()] == [BEAT]


def test_what_is_no_directory_of_roots_alone_makes_way(volume: Path) -> None:
    nodes = volume / ".trashd/nodes"
    nodes.symlink_to("/etc")
    init(volume)
    assert not nodes.is_symlink()
    for mode, owner in ((0o777, 0), (0o700, OTHER)):
        make_tree(nodes, {"theirs": "1"})
        nodes.chmod(mode)
        os.chown(nodes, owner, owner)
        init(volume)
        assert not nodes.exists()
    kept = [path.read_text() for path in (volume / ".trashd").glob("nodes.planted-*/theirs")]
    assert kept == ["1", "1"]


def test_an_old_stores_beats_go_with_it_and_what_else_is_there_stays() -> None:
    for others in ((), ("precious",)):
        with tmpfs_volume() as volume:
            init(volume)
            nodes = beats_in(volume)
            (volume / ".trashd/reaper.lock").touch()
            shutil.rmtree(volume / ".trashd/u/0")
            for name in others:
                (nodes / name).touch()
            (volume / ".trashd").chmod(0o777)
            init(volume)
            init(volume)
            left = [path.name for path in volume.glob(".trashd/old-*/nodes/*")]
            assert left == list(others)
            assert bool(list(volume.glob(".trashd/old-*"))) is bool(others)


# What it makes


@pytest.mark.quick("init")
def test_init_leaves_a_magic_file_with_a_random_id(volume: Path) -> None:
    fields = json.loads((volume / ".trashd/volume.json").read_bytes())
    assert (fields["magic"], fields["format"], fields["exchange"]) == ("trashd", 2, True)
    with tmpfs_volume() as other:
        init(other)
        assert json.loads((other / ".trashd/volume.json").read_bytes())["id"] != fields["id"]
        assert_silent(other)


def test_init_tells_backup_programs_to_stay_out(volume: Path) -> None:
    tag = (volume / ".trashd/CACHEDIR.TAG").read_bytes()
    assert tag.startswith(b"Signature: 8a477f597d28d172789f06886806bc55\n")


def test_store_is_open_to_all_and_each_folder_to_its_user_alone(volume: Path) -> None:
    names = (".trashd", ".trashd/folders", ".trashd/new", ".trashd/u", ".trashd/u/0")
    assert [(volume / name).stat().st_mode & 0o7777 for name in names] == [0o755, 0o755, 0o1777, 0o755, 0o700]


def served(volume: Path) -> set[int]:
    with opened(volume) as store:
        return set(inspect_folders(store).inos)


def ids(volume: Path) -> set[str]:
    return {entry.id for entry in entries(volume)}


def _copied(volume: Path) -> None:
    """A store of today's at another place than it was made at."""
    init(volume)
    make_tree(volume / "alice", Dir({"job": Dir({"results": "her own"}, owner=(ALICE, ALICE))}, owner=(ALICE, ALICE)))
    as_user(ALICE, lambda: [swap(volume / "alice/job"), None][1])
    recover_all(volume)
    (volume / ".trashd").rename(volume / "made")
    subprocess.run(["cp", "-a", str(volume / "made"), str(volume / ".trashd")], check=True)
    shutil.rmtree(volume / "made")


def _hers(volume: Path) -> None:
    """One that a user made, with her orphan in it."""
    volume.chmod(0o1777)

    def begin() -> None:
        make_tree(volume / "job", {"results": "her own"})
        init_as_of_old(volume)
        swap(volume / "job")

    as_user(ALICE, begin)


def wipe(volume: Path) -> None:
    """Remove all, and forget the stores, or each command looks for those before it."""
    forget_stores()
    for path in volume.iterdir():
        shutil.rmtree(path)


@pytest.mark.parametrize("begin", [_copied, _hers])
def test_whatever_call_fails_is_told_as_what_it_is_and_the_next_command_finishes(begin: Callable[[Path], None]) -> None:
    with tmpfs_volume() as volume:
        for n in range(0, 2000, 1 if runs_every_case() else 17):
            wipe(volume)
            begin(volume)
            before, volume_id = {path.name for path in volume.glob(".trashd/*/*/orphans/*")}, id_of(volume)
            hook, n_fds, told = FailingAt(n, errno.EIO), len(os.listdir("/proc/self/fd")), errno.EIO
            try:
                init(volume, Kernel(hook))
            except (OSError, TrashdError) as error:
                told = error.errno or 0
            assert told == errno.EIO, f"{hook.failed} failed, call {n}"
            assert len(os.listdir("/proc/self/fd")) == n_fds, f"{hook.failed} failed, call {n}"
            init(volume)
            as_user(ALICE, lambda: recover_all(volume))
            recover_all(volume)
            assert (ids(volume), id_of(volume)) == (before, volume_id), f"{hook.failed} failed, call {n}"
            assert served(volume) == {0, ALICE}, f"{hook.failed} failed, call {n}"
            if hook.left >= 0:
                break
        assert n > 60


def id_of(volume: Path) -> str:
    return str(json.loads((volume / ".trashd/volume.json").read_text())["id"])


def test_in_a_users_own_store_he_alone_is_served() -> None:
    """A folder that a user made there when all could: no command takes it for that user's, not even that user's own."""
    with tmpfs_volume(options=("mode=1777",)) as volume:
        make_tree(volume / "alice", Dir({"job": Dir({"a": "1"}, owner=(ALICE, ALICE))}, owner=(ALICE, ALICE)))
        as_user(ALICE, lambda: init(volume))
        as_user(ALICE, lambda: [swap(volume / "alice/job", options=EXPIRED), None][1])
        users = users_own(volume, ALICE) / "u"
        subprocess.run(["cp", "-a", str(users / str(ALICE)), str(users / str(BOB))], check=True)
        subprocess.run(["chown", "-R", str(BOB), str(users / str(BOB))], check=True)
        before = snapshot(users / str(BOB), with_times=True)
        for uid in (0, BOB, ALICE):
            as_user(uid, lambda: [run([word, "--volume", str(volume)]) for word in ("list", "reap")])
        assert os.listdir(users / str(ALICE) / "orphans") == []
        assert snapshot(users / str(BOB), with_times=True) == before


def test_until_its_owner_comes_list_and_doctor_tell_of_what_was_set_aside(capfd: pytest.CaptureFixture[str]) -> None:
    with tmpfs_volume() as volume:
        _hers(volume)
        init(volume)
        for words in (["list", "--volume"], ["doctor"]):
            run([*words, str(volume)])
            output = "".join(capfd.readouterr())
            assert f"/u/{ALICE}: not used as uid {ALICE}'s directory: its owner's next command moves it" in output
            assert "next command here, such as trashd list, moves it to the new store" in output
        as_user(ALICE, lambda: run(["list", "--volume", str(volume)]))
        assert "waits" not in "".join(capfd.readouterr())
        run(["list", "--volume", str(volume)])
        assert "waits" not in "".join(capfd.readouterr())


def test_taking_over_killed_at_any_call_strands_nothing() -> None:
    with tmpfs_volume() as volume:
        _hers(volume)
        for n in changing(numbered_calls(partial(init, volume))):
            wipe(volume)
            _hers(volume)
            [identifier] = as_user(ALICE, lambda: ids(volume))
            code = code_of_child(lambda n=n: init(volume, Kernel(DyingAt(n))))  # type: ignore[misc]
            init(volume)
            as_user(ALICE, lambda: recover_all(volume))
            recover_all(volume)
            assert ids(volume) == {identifier}, f"killed before call {n}"
            assert served(volume) == {0, ALICE}, f"killed before call {n}"
            assert [path.name for path in volume.iterdir() if path.name.startswith(".")] == [".trashd"]
            assert list(volume.glob(".trashd/old-*")) == []
            assert_silent(volume)
        assert code == 0
