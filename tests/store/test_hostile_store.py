"""A store of root's that root never made: a mate made it of root's directories, and its modes are right by now."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fusefs.cli.main import run
from fusefs.linux.kernel import Kernel
from fusefs.service.open_volume import Unproven, open_volume
from fusefs.store.store_maker import XATTR
from tests.support.group_members import FORGED, LIVE, N_LIVE, TEAM, forge_store, live
from tests.support.make_trees import Dir, make_tree, snapshot
from tests.support.other_users import as_user, called_by
from tests.support.privileges import Credentials
from tests.support.real_filesystems import loop_volume, tmpfs_volume
from tests.support.store_verbs import assert_silent, entries, init, opened, problems, raw, recover_all, swap

pytestmark = pytest.mark.needs("root")

ALICE, BOB = 1001, 1002


@pytest.fixture
def project() -> Iterator[Path]:
    with tmpfs_volume() as path:
        yield forge_store(path, BOB, ALICE)


BY_ROOT = [
    ["list"],
    ["reap"],
    ["reap", "--all", "--now"],
    ["reap", "--now", FORGED],
    ["reap", "--force", "--yes", FORGED],
]


@pytest.mark.parametrize("words", BY_ROOT, ids=" ".join)
def test_no_command_of_roots_does_what_a_forged_store_says(project: Path, words: list[str]) -> None:
    before = snapshot(project / ".trashd/u", with_times=True)
    run([*words, "--volume", str(project)])
    assert snapshot(project / ".trashd/u", with_times=True) == before
    assert live(project) == N_LIVE


def has_no_new(store: Path) -> None:
    (store / "new").rmdir()


def has_no_registry(store: Path) -> None:
    shutil.rmtree(store / "folders")


LESS = [has_no_new, has_no_registry]


@pytest.mark.parametrize("lack", LESS)
def test_nothing_is_made_of_one_in_which_something_is_missing(project: Path, lack: Callable[[Path], None]) -> None:
    lack(project / ".trashd")
    before = snapshot(project / ".trashd", with_times=True)
    for words in (["list"], ["reap"], ["reap", "--all", "--now"]):
        run([*words, "--volume", str(project)])
    assert snapshot(project / ".trashd", with_times=True) == before


def test_doctor_repairs_nothing_in_it_and_says_what_helps(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = snapshot(project / ".trashd", with_times=True)
    run(["doctor", "--repair", str(project)])
    assert snapshot(project / ".trashd", with_times=True) == before
    told = "".join(capfd.readouterr())
    assert "nobody can tell that root made this store" in told
    assert f"trashd init --replace {project}" in told


def test_doctor_says_so_of_one_without_folders(project: Path) -> None:
    shutil.rmtree(project / ".trashd/u")
    (project / ".trashd/u").mkdir()
    [told] = problems(project)
    assert f"trashd init --replace {project}" in told.hint


def test_the_service_does_not_open_it(project: Path) -> None:
    with pytest.raises(Unproven):
        open_volume(Kernel(), raw(project))


def test_what_it_holds_is_listed_and_restored(project: Path) -> None:
    assert {entry.uid for entry in entries(project)} == {0, ALICE}
    place = project / f".trashd/u/{ALICE}/orphans/{FORGED}"
    (project / ".trashd/u/0/orphans" / FORGED).rename(project / "away")
    assert run(["restore", FORGED, "--to", str(project.parent / "back"), "--volume", str(project)]) == 0
    assert (project.parent / "back/live").read_bytes() == LIVE
    assert not place.exists()


def test_root_swaps_nothing_into_it(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make_tree(project / "job", {"results": "old"})
    assert run(["swap", str(project / "job")]) == 6
    assert f"trashd init --replace {project}" in capfd.readouterr().err
    assert (project / "job/results").read_text() == "old"


def test_init_makes_a_new_one_beside_which_nothing_of_the_forged_one_counts(project: Path) -> None:
    assert run(["init", str(project)]) == 6
    assert run(["init", "--replace", str(project)]) == 0
    for words in (["list"], ["reap"], ["reap", "--all", "--now"]):
        run([*words, "--volume", str(project)])
    assert live(project) == N_LIVE
    [old] = (project / ".trashd").glob("old-*")
    assert {path.name for path in (old / "u").iterdir()} == {"0", str(ALICE)}
    with opened(project) as store:
        assert not store.is_unknown()


def test_what_she_takes_out_of_it_goes_by_her_own_word_alone(project: Path) -> None:
    init(project)
    as_user(ALICE, lambda: run(["list", "--volume", str(project)]))
    for _ in range(2):
        run(["reap", "--volume", str(project)])
        as_user(ALICE, lambda: run(["reap", "--volume", str(project)]))
    assert live(project) == N_LIVE
    assert list((project / ".trashd").glob(f"old-*/u/{ALICE}")) == []
    assert [(entry.uid, entry.expires_ns) for entry in entries(project)] == [(ALICE, None)] * 2


def test_a_forged_store_that_her_pointer_leads_to_is_none_of_the_services(project: Path) -> None:
    volume = project.parent
    init(volume)
    make_tree(volume / "alice", Dir(owner=(ALICE, ALICE)))
    as_user(ALICE, lambda: make_tree(volume / "alice/job", {}))
    as_user(ALICE, lambda: str(swap(volume / "alice/job").id))
    recover_all(volume)
    folder = volume / f".trashd/u/{ALICE}"
    as_user(ALICE, lambda: (folder / "pointers/lower").write_text("project"))
    before = snapshot(project / ".trashd/u", with_times=True)
    for words in (["list"], ["reap"], ["reap", "--now", FORGED]):
        run([*words, "--volume", str(volume)])
    assert snapshot(project / ".trashd/u", with_times=True) == before


@pytest.mark.parametrize("most", [1, 100])
def test_a_directory_that_is_given_a_new_stores_name_while_it_is_made_is_none(project: Path, most: int) -> None:
    (project / ".trashd").rename(project / "filled")
    (project / "filled").chmod(0o700)
    given = list[Path]()
    make_tree(project / ".trashd.new-abandoned", {"file": "x"})

    def hook(call: str) -> None:
        for new in project.glob(".trashd.new-*"):
            if call == "openat2" and not any(new.iterdir()) and len(given) < most:
                new.rename(project / f"empty-{len(given)}")
                (project / "filled").rename(new) if not given else make_tree(new, {"u": {"file": "x"}})
                given.append(new)

    if most == 1:
        init(project, Kernel(hook))
    else:
        with pytest.raises(FileNotFoundError, match="another directory took its place"):
            init(project, Kernel(hook))
        assert not (project / ".trashd").exists()
        init(project)
    assert run(["init", str(project)]) == 0
    assert live(project) == N_LIVE
    assert all(any((path / "u").iterdir()) for path in given)
    assert given[0].stat().st_mode & 0o777 == 0o700, "a closed directory of root's stays closed"
    with opened(project) as store:
        assert not store.is_unknown()
    assert {entry.uid for entry in entries(project)} == set()


@pytest.mark.parametrize("filesystem", ["tmpfs", "ext4", "xfs", "btrfs"])
def test_nobody_but_root_can_note_that_root_made_a_store(filesystem: str) -> None:
    maps = ((0, BOB, 1), (1, 200_000, 65_536))
    people = [Credentials(BOB, BOB, (TEAM,)), Credentials(BOB, BOB, (TEAM,), maps=maps), Credentials(0, 0)]
    with tmpfs_volume() if filesystem == "tmpfs" else loop_volume(filesystem) as path:
        init(path)
        noted = os.getxattr(path / ".trashd", XATTR)
        make_tree(path / "his", Dir(mode=0o777, owner=(BOB, BOB)))
        for who in people:

            def note(where: Path = path / "his") -> None:
                with pytest.raises(PermissionError):
                    os.setxattr(where, XATTR, noted)

            called_by(who.be, note, "who forges")


def test_without_such_attributes_roots_registry_names_what_he_made() -> None:
    """Root who may set none believes it of no store that takes the place of the named one."""
    with tmpfs_volume() as path:
        (path / "roots").mkdir()
        make_tree(path / "job", {"results": "old"})
        init(path)
        swap(path / "job")
        os.removexattr(path / ".trashd", XATTR)
        (path / ".trashd").rename(path / "roots/.trashd")
        subprocess.run(["cp", "-a", path / "roots/.trashd", path], check=True)
        with opened(path / "roots") as moved, opened(path) as copied:
            assert moved.is_unknown()
            assert copied.is_unknown()


def test_root_keeps_by_his_word_a_copy_that_lost_the_note() -> None:
    with tmpfs_volume() as path, tmpfs_volume() as copy:
        init(path)
        make_tree(path / "job", {"results": "old"})
        thrown = swap(path / "job").id
        kept = "--preserve=mode,ownership,timestamps"
        subprocess.run(["cp", "-r", kept, path / ".trashd", copy], check=True)
        assert run(["swap", str(make_tree(copy / "job", {}))]) == 6
        assert run(["init", "--known", str(copy)]) == 0
        assert list(copy.glob(".trashd/old-*")) == []
        assert run(["reap", "--now", thrown, "--volume", str(copy)]) == 0
        assert_silent(copy)
