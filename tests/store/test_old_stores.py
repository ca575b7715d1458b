"""Root's init of a store that is a copy or another user's: whatever call fails or is killed, no orphan is lost."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from fusefs.cli.main import run
from fusefs.core.errors import TrashdError
from fusefs.linux.kernel import Kernel
from fusefs.store.standing import take_census
from tests.support.covering_sets import runs_every_case
from tests.support.crash_scenarios import changing
from tests.support.make_trees import Dir, make_tree, snapshot
from tests.support.other_users import as_user
from tests.support.real_filesystems import tmpfs_volume
from tests.support.shared_memory_children import code_of_child
from tests.support.small_orphans import EXPIRED
from tests.support.store_verbs import (
    DyingAt,
    FailingAt,
    assert_silent,
    entries,
    init,
    init_as_of_old,
    numbered_calls,
    opened,
    recover_all,
    swap,
    users_own,
)
from tests.support.two_users_store import ALICE, BOB
from tests.support.user_homes import forget_stores

pytestmark = pytest.mark.needs("root")


def served(volume: Path) -> set[int]:
    with opened(volume) as store:
        return set(take_census(store).inos)


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
            told = "".join(capfd.readouterr())
            assert f"/u/{ALICE}: not used as a folder of uid {ALICE}: it waits for its owner's next command" in told
            assert "takes it out by his next command here: trashd list" in told
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
