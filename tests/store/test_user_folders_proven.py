"""A folder is proven if root registered it, where root alone makes names; what is not, none reaps for its user."""

import errno
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import product
from pathlib import Path

import pytest

from fusefs.cli.main import run
from fusefs.core.errors import Exit, NotProven, TrashdError
from fusefs.linux.kernel import Kernel
from fusefs.store.find_stores import folders_for_caller as folders_of
from fusefs.store.make_folder import inspect_new_folders
from fusefs.store.orphans import list_all_containers
from fusefs.store.registry_lines import StoreMaker
from fusefs.store.stage import SwapOptions
from fusefs.store.user_folders import NOT_MADE, NOT_REGISTERED, inspect_folders, open_user_folder
from tests.support.covering_sets import share_of
from tests.support.crash_scenarios import STRIDE, changing
from tests.support.group_members import FORGED, plant
from tests.support.make_trees import make_tree
from tests.support.other_users import as_user
from tests.support.real_filesystems import loop_volume, tmpfs_volume
from tests.support.shared_memory_children import code_of_child
from tests.support.store_verbs import (
    ActingAt,
    DyingAt,
    assert_silent,
    calls_of,
    entries,
    init,
    numbered_calls,
    opened,
    own,
    problems,
    raw,
    recover_all,
    swap,
    users_own,
)
from tests.support.two_users_store import ALICE, BOB, alices_volume, shared_store, throw
from tests.support.user_homes import forget_stores

pytestmark = pytest.mark.needs("root")

EXPIRED = SwapOptions(retention_s=0)
VOLUME = alices_volume
ZOE = 1003


def served(volume: Path) -> set[int]:
    with opened(volume) as store:
        return set(inspect_folders(store).inos)


def expired(volume: Path) -> str:
    def act() -> str:
        path = make_tree(volume / "alice" / os.urandom(4).hex(), {"results": "her own"})
        return str(swap(path, options=EXPIRED).id)

    return as_user(ALICE, act)


def reap(volume: Path) -> int:
    return run(["reap", "--volume", str(volume)])


# The way of a folder


def test_a_user_begins_without_root_and_is_proven_at_roots_next_look(volume: Path) -> None:
    folder = as_user(ALICE, lambda: throw(volume))
    assert folder == volume / f".trashd/new/{ALICE}"
    assert served(volume) == {0}
    recover_all(volume)
    assert served(volume) == {0, ALICE}
    assert os.listdir(volume / ".trashd/new") == []
    assert {Path(os.fsdecode(entry.path)).parents[2] for entry in entries(volume)} == {volume / ".trashd/u"}
    assert_silent(volume)


def test_the_registry_names_the_folder_and_only_root_writes_it(volume: Path) -> None:
    as_user(ALICE, lambda: throw(volume))
    recover_all(volume)
    noted = json.loads((volume / f".trashd/folders/{ALICE}").read_text())
    assert noted["folder"]["ino"] == (volume / f".trashd/u/{ALICE}").stat().st_ino
    for change in (
        (volume / ".trashd/folders/x").touch,
        lambda: (volume / f".trashd/folders/{ALICE}").write_text("{}"),
        (volume / ".trashd/u/x").mkdir,
        lambda: (volume / f".trashd/u/{ALICE}").rename(volume / ".trashd/new/x"),
        lambda: (volume / ".trashd/folders/.lock").open().close(),
    ):
        with pytest.raises(PermissionError):
            as_user(ALICE, change)


def test_what_is_in_the_place_of_a_registered_folder_is_not_proven(volume: Path) -> None:
    as_user(ALICE, lambda: throw(volume))
    recover_all(volume)
    folder = volume / f".trashd/u/{ALICE}"
    folder.rename(volume / "old")
    shutil.copytree(volume / "old", folder, copy_function=shutil.copy2)
    for path in (folder, *folder.rglob("*")):
        os.chown(path, ALICE, ALICE)
    assert served(volume) == {0}
    [problem] = problems_of_folders(volume)
    assert "not the directory that root registered" in problem


@pytest.mark.parametrize(
    ("made", "why"), [(StoreMaker.BY_ROOT, ""), (StoreMaker.COPY, NOT_REGISTERED), (StoreMaker.UNKNOWN, NOT_MADE)]
)
def test_of_several_folders_the_registered_one_is_used_and_proven_only_where_root_made_the_store(
    volume: Path, made: StoreMaker, why: str
) -> None:
    first = volume / f".trashd/u/{ALICE}"
    first.mkdir()
    as_user(ALICE, lambda: throw(volume))
    recover_all(volume)
    os.chown(first, ALICE, ALICE)
    first.chmod(0o700)
    with opened(volume) as store:
        store = store._replace(maker=made)
        alices = []
        for folder in (open_user_folder(store, ALICE), *folders_of(store)):
            assert folder is not None
            with folder:
                if folder.uid == ALICE:
                    alices.append((folder.name != first.name.encode(), folder.is_proven, folder.doubt))
    assert alices == [(True, not why, why)] * 2


def problems_of_folders(volume: Path) -> list[str]:
    return [one.what for one in problems(volume) if "uid" in one.what and "reap" in one.what]


# What was not whole when root first inspected it


def make_private(folder: Path) -> None:
    """What `chmod -R go=` or a backup does, by the owner of it all."""
    for path in (folder, *folder.rglob("*")):
        os.chown(path, ALICE, ALICE)
        if path.is_dir():
            path.chmod(0o700)


@pytest.mark.parametrize("name", [f"{ALICE}", f"{ALICE}.0123456789ab"])
def test_who_gives_it_the_right_modes_later_makes_no_folder_of_it(volume: Path, name: str) -> None:
    planted = plant(volume, BOB, ALICE, name)
    recover_all(volume)
    make_private(planted)
    thesis = planted / "orphans" / FORGED / "tree/results/thesis.txt"
    for act in (lambda: recover_all(volume), lambda: init(volume), lambda: reap(volume)):
        act()
        assert thesis.exists()
    assert ALICE not in served(volume)
    with pytest.raises(NotProven):
        reap_as_root(volume, FORGED)
    assert thesis.exists()
    assert any("when root first inspected it" in what for what in problems_of_folders(volume))


def reap_as_root(volume: Path, identifier: str) -> None:
    """`trashd reap --now ID`, as the command does it."""
    from fusefs.core.results import Reaped
    from fusefs.reaper.reap import reap as reap_one
    from fusefs.store.orphans import call_in_folder, find_container

    volumes = [os.fsencode(volume)]
    entry = find_container(Kernel(), volumes, identifier)
    call_in_folder(Kernel(), volumes, entry, lambda folder, _seen: reap_one(folder, entry.id), Reaped, needs_proof=True)


def test_roots_first_look_goes_down_to_each_container(volume: Path) -> None:
    planted = plant(volume, BOB, ALICE, str(ALICE))
    make_private(planted)
    (planted / "orphans" / FORGED).chmod(0o775)
    assert reap(volume) == 0
    make_private(planted)
    assert reap(volume) == 0
    assert (planted / "orphans" / FORGED / "tree/results/thesis.txt").exists()
    assert ALICE not in served(volume)


def test_a_planter_fills_no_registry(volume: Path) -> None:
    for n in range(40):
        make_tree(volume / f".trashd/new/{ALICE}.{n:012x}", {})
        os.chown(volume / f".trashd/new/{ALICE}.{n:012x}", ALICE, ALICE)
    recover_all(volume)
    assert len(json.loads((volume / f".trashd/folders/{ALICE}").read_text())["refused"]) == 16
    as_user(ALICE, lambda: throw(volume))
    recover_all(volume)
    assert ALICE not in served(volume)
    assert any("root inspects no more" in what for what in problems_of_folders(volume))
    with opened(volume) as store:
        assert os.geteuid() == 0
        assert open_user_folder(store, ALICE) is not None


def test_her_own_command_works_in_what_is_not_proven(volume: Path) -> None:
    (volume / f".trashd/new/{ALICE}").mkdir(0o755)
    os.chown(volume / f".trashd/new/{ALICE}", ALICE, ALICE)
    recover_all(volume)
    (volume / f".trashd/new/{ALICE}").chmod(0o700)
    identifier = expired(volume)
    assert reap(volume) == 0
    assert [entry.id for entry in entries(volume)] == [identifier]
    assert as_user(ALICE, lambda: run(["reap", "--volume", str(volume)])) == 0
    assert entries(volume) == []


def test_where_strangers_are_not_refused_nothing_that_a_user_made_is_registered(volume: Path) -> None:
    path = volume / ".trashd/volume.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "strangers_refused": False}))
    identifier = expired(volume)
    assert reap(volume) == 0
    assert [entry.id for entry in entries(volume)] == [identifier]
    assert any("lets users move other users' files" in what for what in problems_of_folders(volume))
    assert served(volume) == {0}


@pytest.mark.needs("loop")
def test_a_subvolume_is_nobodys_folder() -> None:
    """A user may snapshot an own subvolume with others' directories in it, and openat2 stops at none."""
    with loop_volume("btrfs") as path:
        init(path)
        place = path / f".trashd/new/{ALICE}"
        subprocess.run(["btrfs", "-q", "subvolume", "create", str(place)], check=True)
        os.chown(place, ALICE, ALICE)
        place.chmod(0o700)
        recover_all(path)
        assert place.exists()
        assert ALICE not in served(path)
        [problem] = [one for one in problems(path) if one.where == str(place)]
        assert "subvolume" in problem.what


# Copies


def test_what_a_copy_holds_is_listed_and_reaped_by_nobody_until_root_vouches_for_it(volume: Path) -> None:
    identifier = expired(volume)
    recover_all(volume)
    with tmpfs_volume() as copy:
        subprocess.run(["cp", "-a", f"{volume}/.trashd", str(copy)], check=True)
        assert reap(copy) == 0
        assert [entry.id for entry in entries(copy)] == [identifier]
        assert served(copy) == set()
        init(copy)
        assert served(copy) == {0, ALICE}
        assert reap(copy) == 0
        assert entries(copy) == []


def test_one_more_name_of_volume_json_leaves_the_store_what_it_is(volume: Path) -> None:
    identifier = expired(volume)
    os.link(volume / ".trashd/volume.json", volume / "backup")
    before = (volume / "backup").read_bytes()
    assert [entry.id for entry in entries(volume)] == [identifier]
    init(volume)
    assert (volume / ".trashd/volume.json").read_bytes() == before


# While root moves it on


@pytest.mark.parametrize("is_first", [True, False])
def test_a_command_of_hers_beside_which_root_moves_her_folder_loses_nothing(volume: Path, is_first: bool) -> None:
    """Root's look comes before one of its calls, in her first command and in a later one."""

    def job() -> Path:
        return make_tree(volume / "alice" / os.urandom(4).hex(), {"results": "her own"})

    def forget() -> None:
        for path in (
            volume / f".trashd/u/{ALICE}",
            volume / f".trashd/new/{ALICE}",
            volume / f".trashd/folders/{ALICE}",
        ):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

    n_calls = as_user(ALICE, lambda: len(calls_of(lambda kernel: swap(job(), kernel))))
    read_fd, write_fd = os.pipe()
    done_fd, tell_fd = os.pipe()
    pid = os.fork()
    if pid == 0:  # root, who looks when she says so
        os.close(write_fd)
        while os.read(read_fd, 1):
            recover_all(volume)
            os.write(tell_fd, b"d")
        os._exit(0)

    def look() -> None:
        os.write(write_fd, b"l")
        os.read(done_fd, 1)

    try:
        for n in share_of(range(0, n_calls + 20, STRIDE), int(is_first), 2):
            forget()
            if not is_first:
                as_user(ALICE, lambda: throw(volume))
            n_before = len(entries(volume))
            as_user(ALICE, lambda n=n: swap(job(), Kernel(ActingAt(n, look))))  # type: ignore[misc]
            recover_all(volume)
            assert len(entries(volume)) == n_before + 1, f"at call {n}"
            folders = list(volume.glob(f".trashd/[un]*/{ALICE}*"))
            assert len(folders) == 1, f"at call {n}: {folders}"
    finally:
        os.close(write_fd)
        os.waitpid(pid, 0)


# Killed


def test_a_first_look_killed_at_any_call_is_finished_by_the_next(volume: Path) -> None:
    def forget() -> None:
        shutil.rmtree(volume / f".trashd/u/{ALICE}")
        (volume / f".trashd/folders/{ALICE}").unlink()

    expired(volume)
    numbers = changing(numbered_calls(partial(recover_all, volume)))
    for n in numbers:
        forget()
        identifier = expired(volume)
        code = code_of_child(lambda n=n: recover_all(volume, Kernel(DyingAt(n))))  # type: ignore[misc]
        recover_all(volume)
        assert served(volume) == {0, ALICE}, f"killed before call {n}"
        assert identifier in [entry.id for entry in entries(volume)], f"killed before call {n}"
        assert_silent(volume)
    assert code == 0
    assert len(numbers) > 5


def test_a_folder_that_root_makes_is_whole_and_proven_whenever_he_is_killed(volume: Path) -> None:
    from fusefs.store.make_folder import make_folder_as_root

    def act(kernel: Kernel) -> None:
        with opened(volume) as store:
            make_folder_as_root(store._replace(kernel=kernel), ALICE).fd.close()

    act(Kernel())
    shutil.rmtree(volume / f".trashd/u/{ALICE}")
    numbers = changing(numbered_calls(act))
    for n in numbers:
        shutil.rmtree(volume / f".trashd/u/{ALICE}")
        code = code_of_child(lambda n=n: act(Kernel(DyingAt(n))))  # type: ignore[misc]
        with opened(volume) as store:
            make_folder_as_root(store, ALICE).fd.close()
        assert served(volume) == {0, ALICE}, f"killed before call {n}"
        assert sorted(os.listdir(volume / ".trashd/u")) == ["0", str(ALICE)], f"killed before call {n}"
        assert_silent(volume)
    assert code == 0
    assert len(numbers) > 10


def test_own_is_proven_in_a_users_own_store() -> None:
    with tmpfs_volume(options=("mode=1777",)) as path:
        as_user(ALICE, lambda: init(path))
        assert oct((users_own(path, ALICE) / "u").stat().st_mode & 0o7777) == "0o755"
        assert not (users_own(path, ALICE) / "new").exists()

        def is_proven() -> bool:
            with own(path) as folder:
                return folder.is_proven

        assert as_user(ALICE, is_proven)


# What her user does while root looks


def by_link(path: Path) -> None:
    path.symlink_to("/etc")


def by_file(path: Path) -> None:
    path.write_text("mine")


def by_nothing(_path: Path) -> None:
    pass


MADE = {"link": by_link, "file": by_file, "nothing": by_nothing}
BY_BOB = list(product(("", "orphans", "orphans/ID"), MADE))
"""In the place of what Bob puts something else, and what."""


def exchange(path: Path, make: Callable[[Path], None]) -> None:
    """Put something else in the place of what is there, unless root has moved it by now."""
    with suppress(FileNotFoundError):
        path.rename(path.with_name("aside"))
        make(path)


def swap_new(path: Path) -> None:
    swap(make_tree(path, {}))


def root_looks(volume: Path, kernel: Kernel) -> None:
    with opened(volume) as store:
        inspect_new_folders(store._replace(kernel=kernel))


@pytest.mark.parametrize("number", range(len(BY_BOB)), ids=lambda number: "-".join(map(str, BY_BOB[number])))
@pytest.mark.parametrize("act", [root_looks, init])
def test_what_bob_does_while_root_looks_keeps_nobody_from_being_registered(
    act: Callable[[Path, Kernel], None], number: int
) -> None:
    """Root looks at Bob first, and before each of its calls Bob puts something else in the place of what is his."""
    part, made = BY_BOB[number]
    with looked_at() as (volume, _):
        n_calls = len(calls_of(partial(act, volume)))
    for n in share_of(range(0, n_calls, STRIDE), number, len(BY_BOB)):
        with looked_at() as (volume, identifier):
            his = volume / ".trashd/new" / str(BOB) / part.replace("ID", identifier)
            act(volume, Kernel(ActingAt(n, partial(as_user, BOB, partial(exchange, his, MADE[made])))))
            assert ZOE in served(volume), n


@contextmanager
def looked_at() -> Iterator[tuple[Path, str]]:
    """A store in which root has not looked at Bob and Zoe, and the id of Bob's orphan."""
    forget_stores()
    with shared_store(alice=ALICE, zoe=ZOE, bob=BOB) as volume:
        for uid, name in ((BOB, "bob"), (ZOE, "zoe")):
            as_user(uid, partial(swap_new, volume / name / "job"))
        yield volume, next((volume / ".trashd/new" / str(BOB) / "orphans").iterdir()).name


class BadBlocks(Kernel):
    """What is in directories of Bob's can't be looked at."""

    def stat(self, dir_fd: int, name: bytes) -> os.stat_result:
        """As Kernel has it."""
        if os.fstat(dir_fd).st_uid == BOB:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().stat(dir_fd, name)


def test_what_can_not_be_read_of_bobs_is_told_and_the_others_are_looked_at() -> None:
    with shared_store(alice=ALICE, zoe=ZOE, bob=BOB) as volume:
        for uid, name in ((BOB, "bob"), (ZOE, "zoe")):
            as_user(uid, partial(swap_new, volume / name / "job"))
        recover_all(volume)
        kernel, lost = BadBlocks(), list[TrashdError]()
        with opened(volume) as store:
            census = inspect_folders(store._replace(kernel=kernel))
        assert ZOE in census.inos
        assert [one.uid for one in census.unread] == [BOB]
        assert {entry.uid for entry in list_all_containers(kernel, [raw(volume)], lost)} == {ZOE}
        assert [error.exit_code for error in lost] == [Exit.INCOMPLETE]
