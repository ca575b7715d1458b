"""A store of the first format becomes one of today: whole, whatever is killed; what was planted stays and is told."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fusefs.cli.main import run
from fusefs.core.errors import TrashdError
from fusefs.linux.kernel import Kernel
from fusefs.store.user_folders import take_census
from tests.support.crash_scenarios import EVERY_CALL, STRIDE
from tests.support.group_members import FORGED
from tests.support.make_trees import Dir, make_tree, snapshot
from tests.support.other_users import as_user
from tests.support.real_filesystems import loop_volume, tmpfs_volume
from tests.support.shared_store import ALICE, BOB
from tests.support.small_orphans import EXPIRED
from tests.support.store_calls import (
    DyingAt,
    FailingAt,
    assert_silent,
    entries,
    in_child,
    init,
    opened,
    problems,
    recover_all,
    restore,
    swap,
)
from tests.support.stored_samples import PLANTED, SOUND, unpack

pytestmark = pytest.mark.needs("root")


def make_before(volume: Path, sample: str) -> None:
    """A volume with a store as the version before made it."""
    unpack(sample, volume)
    make_tree(volume / "alice", Dir(owner=(ALICE, ALICE)))


@contextmanager
def sampled(sample: str) -> Iterator[Path]:
    with tmpfs_volume() as path:
        make_before(path, sample)
        yield path


def served(volume: Path) -> set[int]:
    """The users that root's service would serve."""
    with opened(volume) as store:
        return set(take_census(store).inos)


def ids(volume: Path) -> set[str]:
    """Of all orphans that root is shown."""
    return {entry.id for entry in entries(volume)}


def is_current(volume: Path) -> bool:
    """Whether it has today's format."""
    areas = [volume / ".trashd" / name for name in ("u", "new", "folders")]
    modes = [path.stat().st_mode & 0o7777 for path in areas if path.exists()]
    return modes == [0o755, 0o1777, 0o755] and b'"format": 2' in (volume / ".trashd/volume.json").read_bytes()


def test_roots_next_command_brings_it_up_to_date_and_proves_what_is_whole() -> None:
    with sampled(SOUND) as volume:
        before = {path.name for path in volume.glob(".trashd/u/*/orphans/*")}
        trees = {path.name: snapshot(path) for path in volume.glob(".trashd/u/*/orphans/*")}
        recover_all(volume)
        assert is_current(volume)
        assert served(volume) == {0, ALICE}
        assert ids(volume) == before
        assert {path.name: snapshot(path) for path in volume.glob(".trashd/u/*/orphans/*")} == trees
        assert os.listdir(volume / ".trashd/new") == []


def test_its_orphans_are_restored() -> None:
    with sampled(SOUND) as volume:
        recover_all(volume)
        [hers] = [entry for entry in entries(volume) if entry.uid == ALICE]
        as_user(ALICE, lambda: restore(volume, hers.id, to=volume / "alice/back"))
        assert (volume / "alice/back/results").read_text() == "her own"


def test_a_user_reads_it_and_works_in_it_before_root_comes() -> None:
    with sampled(SOUND) as volume:

        def act() -> set[str]:
            make_tree(volume / "alice/again", {"results": "hers"})
            swap(volume / "alice/again")
            return ids(volume)

        assert len(as_user(ALICE, act)) == 2
        assert not is_current(volume)
        recover_all(volume)
        assert len([entry for entry in entries(volume) if entry.uid == ALICE]) == 2
        assert served(volume) == {0, ALICE}


@pytest.mark.parametrize("command", [["list"], ["reap"], ["reap", "--all", "--now"]])
def test_what_was_planted_and_chmodded_is_told_and_reaped_by_nobody(
    command: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    with sampled(PLANTED) as volume:
        folder = next(volume.glob(f".trashd/u/{ALICE}"))
        before = snapshot(folder, with_times=True)
        for _ in range(2):
            run([*command, "--volume", str(volume)])
            assert is_current(volume)
            assert served(volume) == {0}
            assert snapshot(volume / f".trashd/new/{ALICE}", with_times=True) == before
        assert "its owner's when root first saw it" in "".join(capfd.readouterr())
        for path in (volume / f".trashd/new/{ALICE}").rglob("*"):
            path.chmod(path.stat().st_mode & 0o700)
        run([*command, "--volume", str(volume)])
        assert (volume / f".trashd/new/{ALICE}/orphans/{FORGED}/tree/results/thesis.txt").exists()
        assert any("when root first saw it" in problem.what for problem in problems(volume))


@pytest.mark.long
@pytest.mark.parametrize("act", [recover_all, init], ids=["tend", "init"])
def test_killed_at_any_call_it_is_finished_by_the_next_command(act: object) -> None:
    assert callable(act)
    with tmpfs_volume() as volume:
        for n in range(0, 2000, STRIDE):
            shutil.rmtree(volume / ".trashd", ignore_errors=True)
            shutil.rmtree(volume / "alice", ignore_errors=True)
            make_before(volume, SOUND)
            before = {path.name for path in volume.glob(".trashd/u/*/orphans/*")}
            code = in_child(lambda n=n: act(volume, Kernel(DyingAt(n))))  # type: ignore[misc]
            with opened(volume):
                pass  # whatever happened, there is a store
            assert len(as_user(ALICE, lambda: ids(volume))) == 1, f"killed before call {n}"
            recover_all(volume)
            assert is_current(volume), f"killed before call {n}"
            assert ids(volume) == before, f"killed before call {n}"
            assert served(volume) == {0, ALICE}, f"killed before call {n}"
            if code == 0:
                break
        assert n > 60


def _of_before(volume: Path) -> None:
    make_before(volume, SOUND)


def _copied(volume: Path) -> None:
    """A store of today's at another place than it was made at."""
    make_before(volume, SOUND)
    init(volume)
    (volume / ".trashd").rename(volume / "made")
    subprocess.run(["cp", "-a", str(volume / "made"), str(volume / ".trashd")], check=True)
    shutil.rmtree(volume / "made")


def _hers(volume: Path) -> None:
    """One that a user made, with her orphan in it."""
    volume.chmod(0o1777)

    def begin() -> None:
        make_tree(volume / "job", {"results": "her own"})
        swap(volume / "job")

    as_user(ALICE, begin)


@pytest.mark.parametrize(
    ("begin", "act"), [(_of_before, recover_all), (_of_before, init), (_copied, init), (_hers, init)]
)
def test_whatever_call_fails_is_told_as_what_it_is_and_the_next_command_finishes(
    begin: Callable[[Path], None], act: Callable[[Path, Kernel], object]
) -> None:
    with tmpfs_volume() as volume:
        for n in range(0, 2000, 1 if EVERY_CALL else 17):
            for path in volume.iterdir():
                shutil.rmtree(path)
            begin(volume)
            before, volume_id = {path.name for path in volume.glob(".trashd/*/*/orphans/*")}, id_of(volume)
            hook, n_fds, told = FailingAt(n, errno.EIO), len(os.listdir("/proc/self/fd")), errno.EIO
            try:
                act(volume, Kernel(hook))
            except (OSError, TrashdError) as error:
                told = error.errno or 0
            assert told == errno.EIO, f"{hook.failed} failed, call {n}"
            assert len(os.listdir("/proc/self/fd")) == n_fds, f"{hook.failed} failed, call {n}"
            init(volume)
            as_user(ALICE, lambda: recover_all(volume))
            recover_all(volume)
            assert is_current(volume), f"{hook.failed} failed, call {n}"
            assert (ids(volume), id_of(volume)) == (before, volume_id), f"{hook.failed} failed, call {n}"
            assert served(volume) == {0, ALICE}, f"{hook.failed} failed, call {n}"
            if hook.left >= 0:
                break
        assert n > 60


def id_of(volume: Path) -> str:
    return str(json.loads((volume / ".trashd/volume.json").read_text())["id"])


def test_a_repair_brings_it_up_to_date_and_then_looks(capfd: pytest.CaptureFixture[str]) -> None:
    with sampled(PLANTED) as volume:
        run(["doctor", "--repair", str(volume)])
        then = capfd.readouterr().out
        run(["doctor", str(volume)])
        assert is_current(volume)
        assert capfd.readouterr().out == then


@pytest.mark.needs("loop")
@pytest.mark.parametrize("filesystem", ["ext4", "xfs", "btrfs"])
def test_it_is_brought_up_to_date_on_disks(filesystem: str) -> None:
    with loop_volume(filesystem) as volume:
        make_before(volume, SOUND)
        init(volume)
        assert is_current(volume)
        assert served(volume) == {0, ALICE}


def test_a_users_own_store_is_closed_by_his_next_first_command_or_list() -> None:
    with tmpfs_volume(options=("mode=1777",)) as volume:
        as_user(ALICE, lambda: init(volume))
        store = volume / ".trashd"
        text = (store / "volume.json").read_text().replace('"format": 2', '"format": 1')
        as_user(ALICE, lambda: (store / "volume.json").write_text(text))
        (store / "u").chmod(0o1777)
        as_user(ALICE, lambda: recover_all(volume))
        assert (store / "u").stat().st_mode & 0o7777 == 0o755
        as_user(ALICE, lambda: assert_silent(volume))


def test_in_a_users_own_store_he_alone_is_served() -> None:
    """A folder that a user made there when all could: no command takes it for that user's, not even that user's own."""
    with tmpfs_volume(options=("mode=1777",)) as volume:
        make_tree(volume / "alice", Dir({"job": Dir({"a": "1"}, owner=(ALICE, ALICE))}, owner=(ALICE, ALICE)))
        as_user(ALICE, lambda: init(volume))
        as_user(ALICE, lambda: [swap(volume / "alice/job", options=EXPIRED), None][1])
        users = volume / ".trashd/u"
        subprocess.run(["cp", "-a", str(users / str(ALICE)), str(users / str(BOB))], check=True)
        subprocess.run(["chown", "-R", str(BOB), str(users / str(BOB))], check=True)
        before = snapshot(users / str(BOB), with_times=True)
        for uid in (0, BOB, ALICE):
            as_user(uid, lambda: [run([word, "--volume", str(volume)]) for word in ("list", "reap")])
        assert os.listdir(users / str(ALICE) / "orphans") == []
        assert snapshot(users / str(BOB), with_times=True) == before


# Taking over


def test_until_its_owner_comes_list_and_doctor_tell_of_what_was_set_aside(capfd: pytest.CaptureFixture[str]) -> None:
    with tmpfs_volume() as volume:
        _hers(volume)
        init(volume)
        for words in (["list", "--volume"], ["doctor"]):
            run([*words, str(volume)])
            told = "".join(capfd.readouterr())
            assert f"/u/{ALICE}: not used as a folder of uid {ALICE}: it waits for its owner's next command" in told
            assert "takes it out by his next command here: trashd list" in told
        as_user(ALICE, lambda: run(["list", "--volume", str(volume)]))
        assert "waits" not in "".join(capfd.readouterr())
        run(["list", "--volume", str(volume)])
        assert "waits" not in "".join(capfd.readouterr())


@pytest.mark.long
def test_taking_over_killed_at_any_call_strands_nothing() -> None:
    with tmpfs_volume(options=("mode=1777",)) as volume:

        def begin() -> str:
            make_tree(volume / "job", {"results": "his own"})
            return str(swap(volume / "job").id)

        for n in range(0, 2000, STRIDE):
            for path in volume.iterdir():
                shutil.rmtree(path)
            identifier = as_user(ALICE, begin)
            code = in_child(lambda n=n: init(volume, Kernel(DyingAt(n))))  # type: ignore[misc]
            init(volume)
            as_user(ALICE, lambda: recover_all(volume))
            recover_all(volume)
            assert ids(volume) == {identifier}, f"killed before call {n}"
            assert served(volume) == {0, ALICE}, f"killed before call {n}"
            assert [path.name for path in volume.iterdir() if path.name.startswith(".")] == [".trashd"]
            assert list(volume.glob(".trashd/old-*")) == []
            assert_silent(volume)
            if code == 0:
                break
        assert n > 60
