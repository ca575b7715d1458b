"""Restore of what a sweep took: merged into the directory that it came from, and nothing of others replaced by it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path

import pytest

from fusefs.core.container_states import State
from fusefs.core.errors import NotADirectory, NotFound, Occupied, TrashdError
from fusefs.core.names import ContainerId
from fusefs.linux.kernel import Kernel
from fusefs.store.restore import Restored
from tests.support.make_trees import Dir, make_tree, remove_tree_hard, snapshot
from tests.support.other_users import as_user
from tests.support.store_verbs import ActingBefore, entries, init, place, restore
from tests.support.trash_without_walk import gather

pytestmark = pytest.mark.needs("root")

SPEC = Dir(
    {
        "a.log": b"1",
        "keep": b"stays",
        "logs": Dir({"b.log": b"2", "c.log": b"3", "deep": Dir({"d.log": b"4"}, mode=0o710)}, mode=0o2750),
        "gone": {"e.log": b"5"},
    },
    mode=0o751,
)
MALLORY = 12666
LOGS = ["a.log", "logs/b.log", "logs/c.log", "logs/deep/d.log", "gone/e.log"]


def swept(directory: Path, names: list[str] = LOGS) -> ContainerId:
    gathered = gather(directory, names)
    assert gathered.refused == ()
    assert gathered.orphan is not None
    return gathered.orphan


def left_in(done: Restored) -> list[tuple[bytes, int]]:
    return sorted((one.name, one.errno) for one in done.left)


@pytest.fixture
def logs(volume: Path) -> Path:
    return make_tree(volume / "logs", SPEC)


def test_directory_that_is_missing_comes_whole_as_it_was(volume: Path, logs: Path) -> None:
    before = snapshot(logs / "gone")
    orphan = swept(logs)
    (logs / "gone").rmdir()
    restore(volume, orphan)
    assert snapshot(logs / "gone") == before


def test_swept_directory_that_is_gone_itself_comes_whole(volume: Path, logs: Path) -> None:
    (logs / "keep").unlink()
    before = snapshot(logs)
    orphan = swept(logs)
    for path in ("logs/deep", "logs", "gone", "."):
        (logs / path).resolve().rmdir()
    restore(volume, orphan)
    assert snapshot(logs) == before


def test_what_has_its_name_taken_stays_and_is_told_and_comes_back_later(volume: Path, logs: Path) -> None:
    orphan = swept(logs)
    (logs / "a.log").write_bytes(b"new")
    (logs / "logs/deep/d.log").mkdir()
    done = restore(volume, orphan)
    assert left_in(done) == [(b"a.log", errno.EEXIST), (b"logs/deep/d.log", errno.EEXIST)]
    assert done.n_left == 2
    assert (logs / "a.log").read_bytes() == b"new"
    assert (logs / "logs/b.log").read_bytes() == b"2"
    (entry,) = entries(volume)
    assert (entry.id, entry.state, entry.partial) == (orphan, State.ORPHANS, False)
    (logs / "a.log").unlink()
    (logs / "logs/deep/d.log").rmdir()
    assert restore(volume, orphan).n_left == 0
    assert ((logs / "a.log").read_bytes(), (logs / "logs/deep/d.log").read_bytes()) == (b"1", b"4")
    assert entries(volume) == []


def test_file_in_the_place_of_a_directory_is_no_way(volume: Path, logs: Path) -> None:
    orphan = swept(logs)
    (logs / "gone").rmdir()
    (logs / "gone").symlink_to("/")
    assert left_in(restore(volume, orphan)) == [(b"gone", errno.EEXIST)]
    (logs / "gone").unlink()
    restore(volume, orphan)
    assert (logs / "gone/e.log").read_bytes() == b"5"


def test_anything_else_at_the_name_of_the_swept_directory_keeps_it(volume: Path, logs: Path) -> None:
    orphan = swept(logs)
    os.rename(logs, volume / "moved")
    logs.write_bytes(b"a file")
    with pytest.raises((Occupied, NotADirectory)):
        restore(volume, orphan)
    assert place(volume, orphan).parent.name == "orphans"


def test_directory_above_that_is_gone_asks_for_another_place(volume: Path) -> None:
    logs = make_tree(volume / "above", {"logs": SPEC}) / "logs"
    orphan = swept(logs)
    os.rename(volume / "above", volume / "elsewhere")
    with pytest.raises(NotFound) as caught:
        restore(volume, orphan)
    assert "--to" in caught.value.hint
    restore(volume, orphan, to=volume / "back")
    assert (volume / "back/logs/deep/d.log").read_bytes() == b"4"


def test_part_that_is_a_directory_is_merged_into_the_one_that_is_there(volume: Path, logs: Path) -> None:
    orphan = swept(logs)
    (logs / "logs/c.log").write_bytes(b"new")
    done = restore(volume, orphan, inside=b"logs")
    assert left_in(done) == [(b"logs/c.log", errno.EEXIST)]
    assert (logs / "logs/deep/d.log").read_bytes() == b"4"
    assert not (logs / "a.log").exists()


def test_last_part_takes_the_container_along(volume: Path, logs: Path) -> None:
    before = snapshot(logs)
    orphan = swept(logs, ["logs/deep/d.log"])
    restore(volume, orphan, inside=b"logs/deep/d.log")
    assert entries(volume) == []
    assert snapshot(logs) == before


def test_way_to_a_part_is_made_like_the_tree(volume: Path, logs: Path) -> None:
    before = snapshot(logs / "logs/deep")
    orphan = swept(logs)
    os.rename(logs, volume / "moved")
    restore(volume, orphan, inside=b"logs/deep/d.log")
    assert snapshot(logs / "logs/deep") == before
    assert (logs.stat().st_mode, (logs / "logs").stat().st_mode) == (
        (volume / "moved").stat().st_mode,
        (volume / "moved/logs").stat().st_mode,
    )


def test_mallory_gets_no_directory_by_exchanging_one_on_the_way_to_a_part(volume: Path) -> None:
    """A user owns the place, and has a directory of root's in it, which is put where one like the user's is to come."""
    spec = Dir({"a": Dir({"file": b"", "more": b""}, 0o755, (MALLORY, MALLORY))}, 0o755, (MALLORY, MALLORY))
    home = make_tree(volume / "home", spec)
    make_tree(home / "secret", Dir({"key": b""}, 0o700))

    def exchange() -> None:
        if (home / "secret").exists() and (home / "a").exists():
            os.rename(home / "a", home / "aside")
            os.rename(home / "secret", home / "a")

    for call in ("mkdir", "openat2", "chown", "chmod", "renameat2"):
        for number in count(1):
            orphan = swept(home, ["a/file"])
            os.rename(home / "a", volume / "real")
            calls = count()
            hook = partial(_at, call, number, calls, partial(as_user, MALLORY, exchange))
            with suppress(TrashdError):
                restore(volume, orphan, Kernel(hook), inside=b"a/file")
            secret = next(path for path in (home / "secret", home / "a") if (path / "key").exists())
            assert (secret.stat().st_uid, secret.stat().st_mode & 0o777) == (0, 0o700)
            is_over = next(calls) < number
            remove_tree_hard(volume / "home")
            remove_tree_hard(volume / "real")
            for entry in entries(volume):
                restore(volume, entry.id, to=volume / "rest")
                remove_tree_hard(volume / "rest")
            home = make_tree(volume / "home", spec)
            make_tree(home / "secret", Dir({"key": b""}, 0o700))
            if is_over:
                break


def _at(wanted: str, number: int, calls: Iterator[int], act: Callable[[], object], call: str) -> None:
    """Act before the so-manieth call of a kind."""
    if call == wanted and next(calls) == number - 1:
        act()


def test_part_that_is_not_there_makes_nothing(volume: Path, logs: Path) -> None:
    orphan = swept(logs)
    os.rename(logs, volume / "moved")
    with pytest.raises(NotFound):
        restore(volume, orphan, inside=b"logs/nothing")
    assert not logs.exists()
    assert place(volume, orphan).parent.name == "orphans"


def test_name_that_is_taken_while_it_is_restored_keeps_what_took_it(volume: Path, logs: Path) -> None:
    orphan = swept(logs, ["a.log"])
    kernel = Kernel(ActingBefore("renameat2", partial((logs / "a.log").write_bytes, b"new")))
    # Its claim is a plain rename; the first renameat2 is that of the file.
    done = restore(volume, orphan, kernel)
    assert left_in(done) == [(b"a.log", errno.EEXIST)]
    assert (logs / "a.log").read_bytes() == b"new"


def test_directory_that_is_removed_while_it_is_merged_leaves_what_belongs_there(volume: Path, logs: Path) -> None:
    orphan = swept(logs, ["gone/e.log", "a.log"])
    moves = iter([lambda: None, lambda: None, (logs / "gone").rmdir])
    kernel = Kernel(lambda call: next(moves, lambda: None)() if call == "renameat2" else None)
    done = restore(volume, orphan, kernel)
    back = [(logs / "gone/e.log").exists(), done.n_left == 1]
    assert back in ([True, False], [False, True])
    if done.n_left:
        assert restore(volume, orphan).n_left == 0
    assert (logs / "gone/e.log").read_bytes() == b"5"


def test_link_that_takes_a_directorys_place_is_not_followed(volume: Path, logs: Path) -> None:
    orphan = swept(logs, ["logs/b.log"])
    (volume / "aside").mkdir()

    def swap_in() -> None:
        os.rename(logs / "logs", volume / "real")
        (logs / "logs").symlink_to(volume / "aside")

    done = restore(volume, orphan, Kernel(ActingBefore("getdents", swap_in)))
    assert done.n_left == 1
    assert os.listdir(volume / "aside") == []


def test_half_reaped_sweep_says_so_and_gives_what_is_left(volume: Path, logs: Path) -> None:
    orphan = swept(logs)
    folder = place(volume, orphan).parent.parent
    os.rename(folder / "orphans" / orphan, folder / "reaping" / orphan)
    (folder / "reaping" / orphan / "tree/a.log").unlink()
    done = restore(volume, orphan)
    assert done.partial
    assert (logs / "logs/b.log").read_bytes() == b"2"
    assert entries(volume) == []


def test_root_restores_a_users_sweep_as_that_user(volume: Path) -> None:
    home = make_tree(volume / "home", {"job": SPEC})
    for path in (home, *home.rglob("*")):
        os.lchown(path, 1000, 1000)
    orphan = as_user(1000, lambda: swept(home / "job"))
    (home / "job/a.log").write_bytes(b"new")
    os.chown(home / "job/logs", 0, 0)
    done = restore(volume, orphan)
    refused = [(b"logs/" + name, errno.EACCES) for name in (b"b.log", b"c.log", b"deep")]
    assert left_in(done) == [(b"a.log", errno.EEXIST), *refused]
    assert (home / "job/gone/e.log").stat().st_uid == 1000


def test_store_in_the_swept_directory_itself_is_told_by_its_path(tmp_path: Path) -> None:
    init(tmp_path)
    make_tree(tmp_path / "sub", {"x": b"1"})
    orphan = swept(tmp_path, ["sub/x"])
    (entry,) = entries(tmp_path)
    assert entry.origin == bytes(tmp_path)
    restore(tmp_path, orphan, inside=b"sub/x")
    assert (tmp_path / "sub/x").read_bytes() == b"1"
