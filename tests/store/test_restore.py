"""Restore: the tree at its name, elsewhere or in part, merged where a sweep took it; nothing of others replaced."""

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path

import pytest

from fusefs.core.container_states import State
from fusefs.core.errors import NotADirectory, NotFound, Occupied, OtherFilesystem, TrashdError, UsageError
from fusefs.core.names import ContainerId, RelPath
from fusefs.core.record_decoding import decode_record
from fusefs.linux.kernel import Kernel
from fusefs.store.recover import RESCUED_RETENTION_S
from fusefs.store.restore import Restored
from tests.support.crash_scenarios import forbid_exchange
from tests.support.make_trees import Dir, deep_chain, make_tree, remove_tree_hard, snapshot
from tests.support.other_users import as_user
from tests.support.real_filesystems import tmpfs_volume
from tests.support.small_orphans import OTHER, orphan_in, victim_in
from tests.support.store_verbs import (
    ActingBefore,
    DyingAt,
    calls_of,
    die,
    entries,
    folder_of,
    in_child,
    init,
    place,
    reap_now,
    recover_all,
    remove,
    restore,
    swap,
    tree_of,
)
from tests.support.trash_without_walk import gather

pytestmark = pytest.mark.needs("root")


def test_restore_gives_the_name_back_to_anything_else_and_hints_at_to(volume: Path) -> None:
    job = victim_in(volume)
    swapped = swap(job)
    job.rmdir()
    make_tree(job, {"strange": "x"})
    with pytest.raises(Occupied) as caught:
        restore(volume, swapped.id)
    assert "--to" in caught.value.hint
    assert os.listdir(job) == ["strange"]
    assert [entry.state for entry in entries(volume)] == [State.ORPHANS]


def test_empty_directory_of_somebody_else_does_not_make_way(volume: Path) -> None:
    job = victim_in(volume)
    swapped = swap(job)
    job.rename(volume / "elsewhere")
    job.mkdir()
    with pytest.raises(Occupied):
        restore(volume, swapped.id)


def test_what_takes_the_name_during_a_restore_keeps_it(volume: Path) -> None:
    job = victim_in(volume)
    swapped = swap(job)

    def take_the_name() -> None:
        job.rmdir()
        make_tree(job, {"strange": "x"})

    with pytest.raises(Occupied):
        restore(volume, swapped.id, Kernel(ActingBefore("exchange", take_the_name)))
    assert os.listdir(job) == ["strange"]
    assert sorted(os.listdir(tree_of(swapped))) == ["a", "sub"]


@pytest.mark.parametrize("there", [{}, {"x": "y"}])
def test_restore_to_a_name_that_is_taken_is_refused(volume: Path, there: dict[str, str]) -> None:
    swapped = swap(victim_in(volume))
    make_tree(volume / "other", there)
    with pytest.raises(Occupied):
        restore(volume, swapped.id, to=volume / "other")
    assert sorted(os.listdir(tree_of(swapped))) == ["a", "sub"]


def test_directories_on_the_way_to_a_part_are_made_like_the_trees_own(volume: Path) -> None:
    job = make_tree(volume / "job", {"sub": Dir({"deep": Dir({"f": "x"}, mode=0o711)}, 0o750, (OTHER, OTHER))})
    swapped = swap(job)
    restore(volume, swapped.id, inside=b"sub/deep/f")
    made = [(job / path).stat() for path in ("sub", "sub/deep")]
    assert [(st.st_mode & 0o7777, st.st_uid) for st in made] == [(0o750, OTHER), (0o711, 0)]


def test_part_never_replaces_what_has_its_name(volume: Path) -> None:
    job = victim_in(volume)
    swapped = swap(job)
    (job / "a").write_text("new")
    with pytest.raises(Occupied):
        restore(volume, swapped.id, inside=b"a")
    assert ((job / "a").read_text(), (tree_of(swapped) / "a").read_text()) == ("new", "1")


@pytest.mark.parametrize(
    ("inside", "error"),
    [(b"absent", NotFound), (b"a/x", NotADirectory), (b"../x", UsageError), (b"/a", UsageError), (b"", UsageError)],
)
def test_part_that_is_not_there_or_climbs_is_refused(volume: Path, inside: bytes, error: type[Exception]) -> None:
    swapped = swap(victim_in(volume))
    with pytest.raises(error):
        restore(volume, swapped.id, inside=inside)
    assert [entry.state for entry in entries(volume)] == [State.ORPHANS]


def test_id_may_be_cut_short_as_long_as_it_is_unique(volume: Path) -> None:
    first, second = swap(victim_in(volume)), remove(victim_in(volume, "other"))
    with pytest.raises(UsageError, match="could be"):
        restore(volume, first.id[:4])
    restore(volume, second.id[-12:])
    restore(volume, first.id[:30])
    assert entries(volume) == []


def test_another_filesystem_is_called_that_and_the_orphan_stays(volume: Path) -> None:
    swapped = orphan_in(volume)
    with tmpfs_volume() as other, pytest.raises(OtherFilesystem) as caught:
        restore(volume, swapped.id, to=other / "job")
    assert f"below {volume}" in caught.value.hint
    assert [entry.state for entry in entries(volume)] == [State.ORPHANS]


# What a killed reap leaves


@pytest.mark.parametrize("call", ["write", "fsync", "rename", "renameat2"])
def test_restore_killed_on_its_way_from_a_reap_knows_that_the_tree_is_not_whole(volume: Path, call: str) -> None:
    swapped = orphan_in(volume)
    in_child(lambda: reap_now(volume, swapped.id, Kernel(ActingBefore("rmdir", die))))
    killed = in_child(partial(restore, volume, swapped.id, Kernel(ActingBefore(call, die))))
    assert killed == DyingAt.EXIT_CODE
    recover_all(volume)
    assert restore(volume, swapped.id, to=volume / "elsewhere").partial


def test_nothing_that_was_moved_up_by_a_killed_reap_is_lost_by_a_restore(volume: Path) -> None:
    swapped = swap(deep_chain(volume / "job", 300))  # a reap holds open about 100 of them, and renames the rest up
    in_child(lambda: reap_now(volume, swapped.id, Kernel(ActingBefore("rmdir", die))))
    restored = restore(volume, swapped.id)
    assert restored.partial
    assert any("structure" in warning for warning in restored.warnings)
    (kept,) = entries(volume)
    assert kept.expires_ns == kept.created_ns + RESCUED_RETENTION_S * 10**9
    found = subprocess.run(["find", os.fsdecode(kept.path) + "/tree", "-name", "leaf"], capture_output=True, check=True)
    assert found.stdout.count(b"leaf\n") == 1


ALICE = 1000


def parts_of(volume: Path, orphan: ContainerId) -> tuple[RelPath, ...]:
    return decode_record((folder_of(volume, 0) / "orphans" / orphan / "record.json").read_bytes()).parts


@pytest.mark.quick("restore")
@pytest.mark.parametrize("exchange", [True, False])
@pytest.mark.parametrize("inside", ["a", "sub/b", "sub"])
def test_the_whole_has_a_part_that_was_restored_before(volume: Path, inside: str, *, exchange: bool) -> None:
    if not exchange:
        forbid_exchange(volume)
    job = victim_in(volume)
    swapped = swap(job)
    restore(volume, swapped.id, inside=inside.encode())
    assert parts_of(volume, swapped.id) == (inside.encode(),)
    done = restore(volume, swapped.id)
    assert (done.rescued, done.warnings) == (None, ())
    assert ((job / "a").read_text(), (job / "sub/b").read_text()) == ("1", "2")
    assert sorted(os.listdir(job)) == ["a", "sub"]
    assert entries(volume) == []


def test_the_part_is_as_it_is_now_and_all_else_becomes_an_orphan(volume: Path) -> None:
    job = victim_in(volume)
    swapped = swap(job)
    restore(volume, swapped.id, inside=b"sub/b")
    (job / "sub/b.new").write_text("newer")
    (job / "sub/b.new").rename(job / "sub/b")
    (job / "sub/other").write_text("not of it")
    done = restore(volume, swapped.id)
    assert (job / "sub/b").read_text() == "newer"
    assert sorted(os.listdir(job / "sub")) == ["b", "link"]
    (kept,) = entries(volume)
    assert kept.id == done.rescued
    kept_tree = Path(os.fsdecode(kept.path)) / "tree"
    assert (kept_tree / "sub/other").read_text() == "not of it"
    assert os.listdir(kept_tree / "sub") == ["other"]


def test_a_part_that_was_removed_since_stays_removed(volume: Path) -> None:
    job = victim_in(volume)
    swapped = swap(job)
    restore(volume, swapped.id, inside=b"a")
    (job / "a").unlink()
    assert restore(volume, swapped.id).rescued is None
    assert os.listdir(job) == ["sub"]


def test_where_both_have_the_name_both_copies_are_kept_and_reported(volume: Path) -> None:
    job = victim_in(volume)
    swapped = swap(job)
    restore(volume, swapped.id, inside=b"a")
    (tree_of(swapped) / "a").write_text("written late into the old tree")
    done = restore(volume, swapped.id)
    assert (job / "a").read_text() == "written late into the old tree"
    (kept,) = entries(volume)
    assert kept.id == done.rescued
    assert (Path(os.fsdecode(kept.path)) / "tree/a").read_text() == "1"
    assert [warning for warning in done.warnings if "a (File exists)" in warning]


def test_a_part_restored_elsewhere_is_not_of_the_fresh_directory(volume: Path) -> None:
    job = victim_in(volume)
    swapped = swap(job)
    restore(volume, swapped.id, inside=b"a", to=volume / "other")
    assert parts_of(volume, swapped.id) == ()
    restore(volume, swapped.id)
    assert (os.listdir(job), (volume / "other").read_text()) == (["sub"], "1")


def test_the_whole_elsewhere_leaves_the_part_where_it_was_restored(volume: Path) -> None:
    job = victim_in(volume)
    swapped = swap(job)
    restore(volume, swapped.id, inside=b"a")
    restore(volume, swapped.id, to=volume / "other")
    assert (os.listdir(job), os.listdir(volume / "other")) == (["a"], ["sub"])


def test_a_link_in_the_place_of_a_directory_on_the_way_leads_nowhere(volume: Path) -> None:
    job = victim_in(volume)
    swapped = swap(job)
    restore(volume, swapped.id, inside=b"sub/b")
    make_tree(volume / "others", {"b": "of others"})
    (job / "sub").rename(volume / "moved")
    (job / "sub").symlink_to(volume / "others")
    done = restore(volume, swapped.id)
    assert (volume / "others/b").read_text() == "of others"
    assert os.listdir(job / "sub") == ["link"]
    assert done.rescued is not None


def test_a_users_own_directory_that_may_not_be_changed_keeps_the_part_in_an_orphan(volume: Path) -> None:
    home = volume / "home"
    home.mkdir()
    os.chown(home, ALICE, ALICE)

    def act() -> tuple[bool, list[str]]:
        job = make_tree(home / "job", {"sub": {"b": "2", "c": "3"}})
        swapped = swap(job)
        restore(volume, swapped.id, inside=b"sub/b")
        (job / "sub").chmod(0o555)
        done = restore(volume, swapped.id)
        return done.rescued is not None, [*done.warnings]

    is_rescued, warnings = as_user(ALICE, act)
    assert is_rescued
    assert [warning for warning in warnings if "sub/b (Permission denied)" in warning]
    assert os.listdir(home / "job/sub") == ["c"]


def test_more_parts_than_a_record_has_room_for_are_restored_and_said(volume: Path) -> None:
    job = make_tree(volume / "job", {f"{n:03}" + "x" * 240: "x" for n in range(160)})
    names = sorted(os.listdir(job))
    swapped = swap(job)
    told = [restore(volume, swapped.id, inside=os.fsencode(name)).warnings for name in names]
    assert (told[0], len(told[-1])) == ((), 1)
    done = restore(volume, swapped.id)
    assert done.rescued is not None
    assert 0 < len(os.listdir(job)) < len(names)


def test_what_was_removed_leaves_a_name_that_only_one_of_the_two_can_have(volume: Path) -> None:
    """`rm` leaves no fresh directory: nothing is noted."""
    removed = remove(victim_in(volume))
    restore(volume, removed.id, inside=b"a")
    assert parts_of(volume, removed.id) == ()


def test_a_restore_of_a_part_writes_its_record_once(volume: Path) -> None:
    swapped = swap(victim_in(volume))
    calls = calls_of(lambda kernel: partial(restore, volume, swapped.id)(kernel, inside=b"a"))
    assert calls.count("write") == 1


def test_a_part_named_twice_is_noted_once(volume: Path) -> None:
    job = victim_in(volume)
    swapped = swap(job)
    for _ in range(2):
        restore(volume, swapped.id, Kernel(), inside=b"a")
        (job / "a").rename(tree_of(swapped) / "a")
    assert parts_of(volume, swapped.id) == (b"a",)


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
