"""Users who are up to something: whatever they plant, forge, mount, move or make, root does only what they could."""

import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from fusefs.cli.main import run
from fusefs.core.errors import AuthorityLost, BadRecord, TrashdError, Untrusted
from fusefs.linux.kernel import Kernel
from fusefs.service.open_volume import Unproven, open_volume
from fusefs.store.orphans import ListedContainer
from fusefs.store.registry_lines import XATTR
from tests.support.group_members import FORGED, LIVE, N_LIVE, TEAM, forge_store, live
from tests.support.make_trees import Dir, make_tree, remove_tree_hard, snapshot
from tests.support.other_users import as_user, called_by
from tests.support.privileges import Credentials
from tests.support.real_filesystems import loop_volume, tmpfs_volume
from tests.support.store_verbs import (
    assert_silent,
    entries,
    folder_of,
    forge,
    init,
    init_as_of_old,
    opened,
    place,
    problems,
    raw,
    reap_now,
    recover_all,
    restore,
    swap,
)
from tests.support.two_users_store import ALICE, BOB, CANARY, canary_of, orphan_of, shared_store

pytestmark = pytest.mark.needs("root")


VOLUME = partial(shared_store, CANARY, alice=ALICE, bob=BOB)


# Forged records


@pytest.mark.parametrize("origin", ["../canary/job", "/etc", "a/../../etc", "a//b", ".", "a%00b", "%2e%2e/x", ""])
def test_a_forged_origin_that_climbs_is_no_record(volume: Path, origin: str) -> None:
    identifier = orphan_of(volume, ALICE)
    record = place(volume, identifier) / "record.json"
    honest = record.read_text()
    forge(record, origin=origin)
    [entry] = entries(volume)
    assert entry.problem
    with pytest.raises(BadRecord):
        restore(volume, identifier)
    record.write_text(honest)
    restore(volume, identifier)
    assert_silent(volume)


@pytest.mark.parametrize("origin", ["canary/job", "canary/new", "newname", "bob/job", "bob/new"])
def test_a_forged_origin_leads_nowhere_where_its_user_may_not_write(volume: Path, origin: str) -> None:
    identifier = orphan_of(volume, ALICE)
    forge(place(volume, identifier) / "record.json", origin=origin, fresh=None)
    before = canary_of(volume), snapshot(volume / "bob")
    with pytest.raises(TrashdError):
        restore(volume, identifier)
    assert (canary_of(volume), snapshot(volume / "bob")) == before
    assert (place(volume, identifier) / "tree" / "results").read_text() == "his own"
    assert not (volume / "newname").exists()
    assert_silent(volume)


def test_a_forged_fresh_identity_makes_no_directory_of_others_make_way(volume: Path) -> None:
    identifier = orphan_of(volume, ALICE)
    with Kernel().open_path(raw(volume / "canary" / "job")) as fd:
        identity = Kernel().identify(fd)._asdict()
    forge(place(volume, identifier) / "record.json", origin="canary/job", fresh=identity)
    before = canary_of(volume)
    with pytest.raises(TrashdError):
        restore(volume, identifier)
    assert canary_of(volume) == before
    assert_silent(volume)


def test_a_component_longer_than_any_name_is_an_error_like_others(volume: Path) -> None:
    identifier = orphan_of(volume, ALICE)
    forge(place(volume, identifier) / "record.json", origin="x" * 5000 + "/y")
    with pytest.raises(TrashdError) as caught:
        restore(volume, identifier)
    assert not isinstance(caught.value, AuthorityLost)
    assert_silent(volume)


def test_a_forged_uid_makes_nobody_else_the_asker(volume: Path) -> None:
    identifier = orphan_of(volume, ALICE)
    forge(place(volume, identifier) / "record.json", uid=0, owner=0)
    [entry] = entries(volume)
    assert entry.uid == ALICE
    assert as_user(BOB, lambda: entries(volume)) == []
    assert_silent(volume)


@pytest.mark.parametrize("method", ["exchange", "two-rename", "removed", "dropped", "sweep"])
@pytest.mark.parametrize("state", ["stage", "restoring"])
def test_recovery_by_a_forged_method_stays_within_its_users_authority(volume: Path, method: str, state: str) -> None:
    identifier = orphan_of(volume, ALICE)
    container = place(volume, identifier)
    origin = None if method == "dropped" else "canary/job"
    forge(container / "record.json", method=method, origin=origin, lent_mode=0o4555)
    container.rename(folder_of(volume, ALICE) / state / identifier)
    before = canary_of(volume)
    recover_all(volume)
    assert canary_of(volume) == before
    assert (place(volume, identifier) / "tree" / "results").read_text() == "his own"
    assert_silent(volume)


@pytest.mark.parametrize("state", ["stage", "restoring"])
def test_a_forged_loan_changes_no_mode_of_roots(volume: Path, state: str) -> None:
    identifier = orphan_of(volume, ALICE)
    container = place(volume, identifier)
    forge(container / "record.json", method="removed", lent_mode=0o4777, victim=None)
    remove_tree_hard(container / "tree")
    make_tree(container / "tree", Dir({}, mode=0o755))
    container.rename(folder_of(volume, ALICE) / state / identifier)
    assert recover_all(volume) != []
    assert snapshot(folder_of(volume, ALICE) / state / identifier / "tree")[0].mode & 0o7777 == 0o755


@pytest.mark.parametrize("field", ["lent_mode", "retention_s", "created_ns", "format", "method", "victim", "failures"])
@pytest.mark.parametrize("value", [-1, 1 << 80, "\x1b[31m", [[]], {"a": None}])
def test_a_field_of_nonsense_is_told_and_stops_nobody_else(volume: Path, field: str, value: object) -> None:
    identifier, other = orphan_of(volume, ALICE), orphan_of(volume, BOB)
    forge(place(volume, identifier) / "record.json", **{field: value})
    listed = {str(entry.id): entry for entry in entries(volume)}
    assert listed[identifier].problem
    assert listed[identifier].problem.isprintable()
    assert not listed[other].problem
    with pytest.raises(BadRecord):
        reap_now(volume, identifier)
    assert reap_now(volume, other).lost is None
    [problem] = problems(volume)
    assert identifier in problem.where


def test_the_longest_retention_that_can_be_written_can_be_read(volume: Path) -> None:
    identifier = orphan_of(volume, ALICE)
    forge(place(volume, identifier) / "record.json", retention_s=(1 << 63) - 1, created_ns=(1 << 63) - 1)
    [entry] = entries(volume)
    assert not entry.problem
    assert_silent(volume)


def _socket(record: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        here = os.open(record.parent, os.O_PATH)
        listener.bind(f"/proc/self/fd/{here}/{record.name}")
        os.close(here)


def _gigabyte(record: Path) -> None:
    (record.parents[5] / "alice" / "saved").rename(record)
    os.truncate(record, 1 << 30)


def _text(content: bytes, record: Path) -> None:
    record.write_bytes(content)


NO_RECORDS: dict[str, Callable[[Path], object]] = {
    "a FIFO": lambda record: os.mkfifo(record, 0o600),
    "a socket": _socket,
    "a link": lambda record: record.symlink_to(record.parents[5] / "canary/secret"),
    "a hard link": lambda record: record.hardlink_to(record.parents[5] / "canary/secret"),
    "a gigabyte": _gigabyte,
    "a directory": lambda record: record.mkdir(),
    "nothing": partial(_text, b""),
    "a list": partial(_text, b"[]"),
    "a deep list": partial(_text, b"[" * 60_000),
    "no UTF-8": partial(_text, b"\xff\xfe"),
    "an old format": partial(_text, b'{"format": 1}'),
    "a format": partial(_text, b'{"format": 2}'),
}


@pytest.mark.parametrize("kind", NO_RECORDS)
def test_what_is_no_record_is_told_and_kept(volume: Path, kind: str) -> None:
    identifier = orphan_of(volume, ALICE)
    record = place(volume, identifier) / "record.json"
    record.rename(volume / "alice" / "saved")
    NO_RECORDS[kind](record)
    if "link" not in kind:
        os.chown(record, ALICE, ALICE)
    before = canary_of(volume)
    [entry] = entries(volume)
    assert entry.problem
    for act in (lambda: restore(volume, identifier), lambda: reap_now(volume, identifier)):
        with pytest.raises(BadRecord):
            act()
    recover_all(volume)
    [problem] = problems(volume)
    assert identifier in problem.where
    assert canary_of(volume) == before
    assert (place(volume, identifier) / "tree" / "results").read_text() == "his own"


def test_a_record_of_another_container_is_no_record_of_this_one(volume: Path) -> None:
    first, second = orphan_of(volume, ALICE), ""
    (volume / "alice" / "job").rmdir()
    second = orphan_of(volume, ALICE)
    record = place(volume, second) / "record.json"
    record.write_text((place(volume, first) / "record.json").read_text())
    with pytest.raises(BadRecord, match="it contains the record of"):
        restore(volume, second)
    assert len(problems(volume)) == 1


def test_a_record_of_another_volume_is_no_record_of_this_one(volume: Path) -> None:
    identifier = orphan_of(volume, ALICE)
    forge(place(volume, identifier) / "record.json", volume="0" * 32)
    with pytest.raises(BadRecord, match="another volume"):
        restore(volume, identifier)
    assert len(problems(volume)) == 1


def test_unknown_keys_are_kept_when_a_record_is_rewritten(volume: Path) -> None:
    identifier = orphan_of(volume, ALICE)
    container = place(volume, identifier)
    forge(container / "record.json", colour={"of": ["later", 1.5]})
    make_tree(container / "tree" / "roots", {"stays": "x"})
    reap_now(volume, identifier)
    record = place(volume, identifier) / "record.json"
    assert '"partial": true' in record.read_text()
    assert '"colour"' in record.read_text()
    assert '"later"' in record.read_text()
    assert_silent(volume)


# Things planted where a folder or a store belongs


PLANTED: dict[str, Callable[[Path], object]] = {
    "a folder": lambda path: make_tree(path, {"orphans": {}}),
    "a file": lambda path: path.write_text("mine"),
    "a link": lambda path: path.symlink_to(path.parents[2] / "canary"),
}


@pytest.mark.parametrize("kind", PLANTED)
def test_a_planted_folder_is_passed_over_and_init_repairs_it(volume: Path, kind: str) -> None:
    as_user(BOB, lambda: [PLANTED[kind](folder_of(volume, ALICE)), None][1])
    before = canary_of(volume)
    identifier = orphan_of(volume, ALICE)
    [entry] = entries(volume)
    assert (entry.uid, entry.id) == (ALICE, identifier)
    assert [entry.id for entry in as_user(ALICE, lambda: entries(volume))] == [identifier]
    [problem] = problems(volume)
    assert "new/1001" in problem.where
    assert "uid 1002" in problem.what
    as_user(ALICE, lambda: restore(volume, identifier))
    assert (volume / "alice" / "job" / "results").read_text() == "his own"
    init(volume)
    recover_all(volume)
    assert canary_of(volume) == before
    assert not (volume / f".trashd/new/{ALICE}").exists()
    # A directory is told by its owner's name until its owner takes it away.
    assert all("new/1002." in problem.where for problem in problems(volume))


def listed(volume: Path) -> list[ListedContainer]:
    recover_all(volume)
    return entries(volume)


def test_root_does_not_use_a_users_store_and_says_so() -> None:
    with tmpfs_volume(options=("mode=1777",)) as volume:
        as_user(ALICE, lambda: init_as_of_old(volume))
        make_tree(volume / "job", {"a": "b"})
        with pytest.raises(Untrusted, match="owner 1001") as caught:
            swap(volume / "job")
        assert "trashd init --replace" in caught.value.hint
        assert (volume / "job" / "a").read_text() == "b"


@pytest.mark.parametrize(
    "litter",
    [
        lambda _store: None,
        lambda store: make_tree(store / "volume.json.new", {"in": "the way"}),
        lambda store: make_tree(store / "probe-a", {"in": "the way"}),
        lambda store: (store / "probe-b").write_text("in the way"),
        lambda store: (store / "CACHEDIR.TAG.new").symlink_to(store.parent / "canary"),
        lambda store: (store / "u" / "1002").symlink_to(store.parent / "canary"),
        lambda store: make_tree(store / "u" / "0", Dir({"orphans": Dir(mode=0o700)}, mode=0o700)),
    ],
)
def test_init_takes_over_a_users_store_and_keeps_his_orphans(litter: Callable[[Path], object]) -> None:
    with tmpfs_volume(options=("mode=1777",)) as volume:
        make_tree(volume / "canary", {"secret": "root's"})
        before = canary_of(volume)

        def make() -> str:
            make_tree(volume / "job", {"results": "his own"})
            init_as_of_old(volume)
            return str(swap(volume / "job").id)

        identifier = as_user(ALICE, make)
        record = folder_of(volume, ALICE) / "orphans" / identifier / "record.json"
        as_user(ALICE, lambda: litter(volume / ".trashd"))
        init(volume)
        init(volume)
        recover_all(volume)
        assert (volume / ".trashd").stat().st_uid == 0
        assert not record.exists()
        assert entries(volume) == []
        assert any(
            f"/u/{ALICE}" in problem.where and "its owner's next" in problem.what for problem in problems(volume)
        )
        assert [entry.id for entry in as_user(ALICE, lambda: listed(volume))] == [identifier]
        assert [entry.id for entry in listed(volume)] == [identifier]
        record = folder_of(volume, ALICE) / "orphans" / identifier / "record.json"
        assert record.stat().st_uid == ALICE
        assert record.is_relative_to(volume / ".trashd/u")
        assert canary_of(volume) == before
        # What else she put into her store is hers to take away.
        assert all("/old-" in problem.where for problem in problems(volume))


@pytest.mark.parametrize(
    "plant", [lambda path: path.symlink_to("../canary/secret"), os.mkfifo, os.mkdir, lambda path: path.write_text("{}")]
)
def test_init_puts_a_file_of_roots_where_a_user_planted_volume_json(plant: Callable[[Path], object]) -> None:
    with tmpfs_volume(options=("mode=1777",)) as volume:
        make_tree(volume / "canary", {"secret": "root's"})
        before = canary_of(volume)
        as_user(ALICE, lambda: init_as_of_old(volume))
        (volume / ".trashd" / "volume.json").unlink()
        as_user(ALICE, lambda: plant(volume / ".trashd" / "volume.json"))
        with pytest.raises(TrashdError):
            swap(volume / "canary")
        init(volume)
        assert (volume / ".trashd" / "volume.json").lstat().st_uid == 0
        assert canary_of(volume) == before
        as_user(ALICE, lambda: recover_all(volume))
        assert_silent(volume)


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
    output = "".join(capfd.readouterr())
    assert "there is no proof that root created this store" in output
    assert f"trashd init --replace {project}" in output


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
        assert not store.has_unknown_maker()


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
        with pytest.raises(FileNotFoundError, match="it was replaced by another directory"):
            init(project, Kernel(hook))
        assert not (project / ".trashd").exists()
        init(project)
    assert run(["init", str(project)]) == 0
    assert live(project) == N_LIVE
    assert all(any((path / "u").iterdir()) for path in given)
    assert given[0].stat().st_mode & 0o777 == 0o700, "a closed directory of root's stays closed"
    with opened(project) as store:
        assert not store.has_unknown_maker()
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
            assert moved.has_unknown_maker()
            assert copied.has_unknown_maker()


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
