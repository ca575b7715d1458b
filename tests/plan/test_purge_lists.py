"""Purge lists: each user is told what of theirs goes, and no user chooses where the lists are written."""

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from fusefs.core.errors import Incomplete, NotFound, Refused
from fusefs.core.plan_rules import PurgeListsResult, PurgeNotice, Rule, SkippedRule
from fusefs.core.selection import Selection
from fusefs.core.toml_reader import ConfigKey
from fusefs.linux.fd import Fd
from fusefs.linux.kernel import Kernel
from fusefs.linux.user_ids import Subordinates, SubuidRange
from fusefs.plan.purge_lists import CountedPurges, _find_others, open_lists
from fusefs.plan.run_plan import PlanOptions, carry_out
from tests.support.other_users import as_user

KERNEL = Kernel()
ALICE, MALLORY = 12001, 12666
needs_root = pytest.mark.needs("root")


@pytest.fixture
def there(tmp_path: Path) -> Path:
    (tmp_path / "lists").mkdir(0o755)
    return tmp_path / "lists"


def published(directory: Path) -> dict[str, list[str]]:
    return {path.name: path.read_text().splitlines()[1:] for path in directory.iterdir()}


def test_each_user_has_a_list_of_his_own(tmp_path: Path) -> None:
    there = tmp_path / "lists"
    with open_lists(KERNEL, bytes(there), writes=True) as lists:
        lists.add(MALLORY, b"/scratch/a\tb\\\xff\n", 1_700_000_000 * 10**9)
        lists.add(ALICE, "/scratch/é".encode(), 1 << 70)
        lists.add(MALLORY, b"/scratch/c", 0)
        assert published(there) == {}
        assert lists.publish() == 2
    assert published(there) == {
        f"{MALLORY}.list": [
            "2023-11-14T22:13:20Z\t/scratch/a\\x09b\\\\\\xff\\x0a", "1970-01-01T00:00:00Z\t/scratch/c",
        ],
        f"{ALICE}.list": ["9999-12-31T23:59:59Z\t/scratch/é"],
    }  # fmt: skip


@needs_root
def test_list_is_its_users_and_nobody_elses(tmp_path: Path) -> None:
    with open_lists(KERNEL, bytes(tmp_path / "lists"), writes=True) as lists:
        lists.add(ALICE, b"/scratch/a", 0)
        lists.publish()
    st = (tmp_path / f"lists/{ALICE}.list").stat()
    assert (st.st_uid, st.st_gid, stat.S_IMODE(st.st_mode)) == (ALICE, os.getegid(), 0o640)


def test_user_who_is_called_like_anothers_number_takes_away_no_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fusefs.plan.purge_lists.user_name", lambda _uid: str(ALICE))
    with open_lists(KERNEL, bytes(tmp_path / "lists"), writes=True) as lists:
        for uid in (ALICE, MALLORY):
            lists.add(uid, b"/scratch/a", 0)
        assert lists.publish() == 2
    assert sorted(published(tmp_path / "lists")) == [f"{ALICE}.list", f"{MALLORY}.list"]


@pytest.mark.parametrize(("publishes", "listed"), [(True, MALLORY), (False, ALICE)])
def test_lists_take_the_place_of_all_old_ones_once_they_are_published(
    tmp_path: Path, listed: int, *, publishes: bool
) -> None:
    for uid in (ALICE, MALLORY):
        with open_lists(KERNEL, bytes(tmp_path / "lists"), writes=True) as lists:
            lists.add(uid, b"/scratch/a", 0)
            if publishes or uid == ALICE:
                lists.publish()
    assert list(published(tmp_path / "lists")) == [f"{listed}.list"]


def test_many_lines_of_many_users_are_all_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusefs.plan.purge_lists._BUFFER_MAX_BYTES", 100)
    with open_lists(KERNEL, bytes(tmp_path / "lists"), writes=True) as lists:
        for number in range(60):
            lists.add(MALLORY + number % 3, b"/scratch/%d" % number, 0)
        lists.publish()
    told = [line.rpartition("/")[2] for lines in published(tmp_path / "lists").values() for line in lines]
    assert sorted(map(int, told)) == list(range(60))


def test_lists_of_two_runs_at_once_are_never_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusefs.plan.purge_lists._BUFFER_MAX_BYTES", 1)
    path = bytes(tmp_path / "lists")
    with open_lists(KERNEL, path, writes=True) as one, open_lists(KERNEL, path, writes=True) as other:
        for number in range(3):
            one.add(MALLORY, b"/one/%d" % number, 0)
            other.add(MALLORY, b"/other/%d" % number, 0)
        assert one.publish() == 1
        with pytest.raises(FileNotFoundError):
            other.publish()
    (lines,) = published(tmp_path / "lists").values()
    assert [line.partition("\t")[2] for line in lines] == [f"/one/{number}" for number in range(3)]
    assert os.listdir(path) == [b"%d.list" % MALLORY]


@needs_root
@pytest.mark.parametrize(("uid", "mode"), [(MALLORY, 0o755), (0, 0o777), (0, 0o775)])
def test_directory_that_others_can_change_gets_no_lists(there: Path, uid: int, mode: int) -> None:
    there.chmod(mode)
    os.chown(there, uid, 0)
    with pytest.raises(Refused), open_lists(KERNEL, bytes(there), writes=False):
        pass


@needs_root
@pytest.mark.parametrize("writes", [True, False])
def test_lists_go_nowhere_below_a_users_directory(there: Path, *, writes: bool) -> None:
    """The user could put any directory of root's there, whose lists would be taken away."""
    os.chown(there.parent, MALLORY, MALLORY)
    (there / "sources.list").touch()
    with pytest.raises(Refused), open_lists(KERNEL, bytes(there), writes=writes):
        pass
    assert os.listdir(there) == ["sources.list"]


@needs_root
def test_a_users_link_on_the_way_to_the_lists_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    os.chown(tmp_path / "link", MALLORY, MALLORY, follow_symlinks=False)
    with pytest.raises(Refused), open_lists(KERNEL, bytes(tmp_path / "link/lists"), writes=True):
        pass
    assert os.listdir(tmp_path / "real") == []


def test_dry_run_makes_no_directory_for_lists(tmp_path: Path) -> None:
    with open_lists(KERNEL, bytes(tmp_path / "lists"), writes=False) as lists:
        lists.add(ALICE, b"/scratch/a", 0)
        assert type(lists) is CountedPurges
        assert (lists.publish(), lists.n_entries) == (1, 1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("writes", [True, False])
@pytest.mark.parametrize("content", ["", "deb http://deb.debian.org/debian stable main\n", "# trashd plan takes these"])
def test_list_of_somebody_else_is_refused_before_anything_is_done(there: Path, content: str, *, writes: bool) -> None:
    (there / "sources.list").write_text(content)
    with pytest.raises(Refused, match=r"sources\.list"), open_lists(KERNEL, bytes(there), writes=writes):
        pass
    assert (there / "sources.list").read_text() == content


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/etc/passwd", path)])
def test_what_is_no_file_is_no_list_of_ours(there: Path, make: Callable[[Path], None]) -> None:
    make(there / "a.list")
    with pytest.raises(Refused), open_lists(KERNEL, bytes(there), writes=True):
        pass
    assert os.listdir(there) == ["a.list"]


def test_list_that_somebody_else_puts_there_meanwhile_stays_as_all_others_do(tmp_path: Path) -> None:
    there = tmp_path / "lists"
    with open_lists(KERNEL, bytes(there), writes=True) as lists:
        lists.add(ALICE, b"/scratch/a", 0)
        (there / "sources.list").write_text("deb\n")
        with pytest.raises(Refused):
            lists.publish()
    assert os.listdir(there) == ["sources.list"]


def write_lists(there: Path, *uids: int) -> int:
    """Publish a list with one path for each user; how many there are."""
    with open_lists(KERNEL, bytes(there), writes=True) as lists:
        for uid in uids:
            lists.add(uid, b"/scratch/%d" % uid, 0)
        return lists.publish()


def write_into(directory: Fd, name: str, content: str) -> None:
    with open(os.open(name, os.O_WRONLY | os.O_TRUNC, dir_fd=directory), "w", encoding="utf-8") as file:
        file.write(content)


@needs_root
@pytest.mark.parametrize("content", ["", "mine now\n"])
@pytest.mark.parametrize("writes", [True, False])
@pytest.mark.parametrize("user", [MALLORY, 0])
def test_what_users_write_into_their_lists_ends_no_plan(there: Path, user: int, content: str, *, writes: bool) -> None:
    write_lists(there, ALICE, user)
    name = "root.list" if user == 0 else f"{user}.list"
    with Fd(os.open(there, os.O_PATH)) as fd:
        as_user(user, lambda: write_into(fd, name, content))
    with open_lists(KERNEL, bytes(there), writes=writes) as lists:
        assert lists.publish() == 0
    assert sorted(published(there)) == ([] if writes else [f"{ALICE}.list", name])


@needs_root
def test_a_user_may_look_at_the_systems_plan_whatever_their_list_has(there: Path) -> None:
    write_lists(there, ALICE)
    (there / f"{ALICE}.list").write_text("")
    with Fd(os.open(there, os.O_RDONLY)) as fd:
        as_user(ALICE, lambda: _find_others(KERNEL, fd, bytes(there)))


@needs_root
@pytest.mark.parametrize("make", [Path.touch, os.mkfifo, Path.mkdir])
def test_list_that_is_no_users_any_more_stays_and_is_told_after_all_others_are_written(
    there: Path, make: Callable[[Path], None]
) -> None:
    """As of an account that was removed, or has another name."""
    make(there / "gone.list")
    os.chown(there / "gone.list", MALLORY, MALLORY)
    with pytest.raises(Incomplete, match=r"gone\.list could not be replaced: not a purge list made by trashd") as error:
        write_lists(there, ALICE)
    assert error.value.exit_code == 13
    assert sorted(os.listdir(there)) == [f"{ALICE}.list", "gone.list"]


@needs_root
def test_untouched_list_that_is_no_users_any_more_goes(there: Path) -> None:
    write_lists(there, MALLORY)
    (there / f"{MALLORY}.list").rename(there / "gone.list")
    assert write_lists(there, ALICE) == 1
    assert os.listdir(there) == [f"{ALICE}.list"]


@needs_root
def test_user_whose_quota_is_used_up_keeps_no_other_from_a_list(there: Path) -> None:
    """The unit of systemd has no CAP_SYS_RESOURCE, which lets root pass quotas."""
    calls = []

    def first_refused(call: str) -> None:
        if call == "chown":
            calls.append(call)
            if len(calls) == 1:
                raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    write_lists(there, ALICE, MALLORY)
    with open_lists(Kernel(first_refused), bytes(there), writes=True) as lists:
        for uid in (MALLORY, ALICE, ALICE + 1):
            lists.add(uid, b"/scratch/new", 0)
        with pytest.raises(Incomplete, match=rf"{MALLORY}\.list could not be replaced: the user's disk quota"):
            lists.publish()
    told = {name: lines[0].rpartition("/")[2] for name, lines in published(there).items()}
    assert told == {f"{MALLORY}.list": str(MALLORY), f"{ALICE}.list": "new", f"{ALICE + 1}.list": "new"}


def test_a_full_list_says_how_many_more_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusefs.plan.purge_lists._MOST_BYTES", 5000)
    with open_lists(KERNEL, bytes(tmp_path / "lists"), writes=True) as lists:
        for number in range(1000):
            lists.add(MALLORY, b"/scratch/%d" % number, 0)
        lists.add(ALICE, b"/scratch/a", 0)
        assert (lists.publish(), lists.n_entries) == (2, 1001)
    *lines, last = published(tmp_path / "lists")[f"{MALLORY}.list"]
    assert 10 < len(lines) < 50
    assert last == f"# … and {1000 - len(lines)} more: this list has reached its size limit."
    assert len(published(tmp_path / "lists")[f"{ALICE}.list"]) == 1


def test_lists_of_subordinate_uids_are_bounded_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subordinates = Subordinates([SubuidRange(200_000, 65_536, MALLORY)])
    monkeypatch.setattr("fusefs.plan.purge_lists.read_subordinates", lambda: subordinates)
    monkeypatch.setattr("fusefs.plan.purge_lists._MOST_BYTES", 10 * 5000)
    with open_lists(KERNEL, bytes(tmp_path / "lists"), writes=True) as lists:
        for uid in (*range(200_000, 200_100), ALICE):
            lists.add(uid, b"/scratch/a", 0)
        assert 10 < lists.publish() < 20
    assert f"{ALICE}.list" in published(tmp_path / "lists")


@pytest.mark.parametrize("content", ["", "# trashd plan"])
def test_list_that_a_killed_run_began_is_taken_away(there: Path, content: str) -> None:
    (there / f"{MALLORY}.list.new").write_text(content)
    with open_lists(KERNEL, bytes(there), writes=True) as lists:
        lists.add(ALICE, b"/scratch/a", 0)
        lists.publish()
    assert list(published(there)) == [f"{ALICE}.list"]


@pytest.mark.parametrize("writes", [True, False])
def test_directory_in_none_is_not_found(tmp_path: Path, *, writes: bool) -> None:
    with pytest.raises(NotFound, match="none"), open_lists(KERNEL, bytes(tmp_path / "none/lists"), writes=writes):
        pass


@pytest.mark.parametrize("runs", [True, False])
def test_no_list_goes_after_a_directory_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, runs: bool
) -> None:
    def fail(*_: object) -> NoReturn:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    there = tmp_path / "lists"
    with open_lists(KERNEL, bytes(there), writes=True) as lists:
        lists.add(ALICE, b"/scratch/a", 0)
        lists.publish()
    before = published(there)
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr("fusefs.plan.run_plan.scope_of", fail)
    rule = Rule(
        ConfigKey("plan", "rule[1]"), bytes(tmp_path / "scratch"), Selection(), purge=PurgeNotice(bytes(there), 86_400)
    )
    failed, listed = carry_out(KERNEL, [rule], PlanOptions(runs, 0))
    assert isinstance(failed, SkippedRule)
    assert isinstance(listed, PurgeListsResult)
    assert (listed.error, listed.is_whole) == (None, False)
    assert published(there) == before
