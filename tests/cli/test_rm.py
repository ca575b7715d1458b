"""`trashd rm` of several: one orphan on each filesystem, whole or by name, and never more than each alone would be."""

import errno
import os
import subprocess
from pathlib import Path

import pytest

from fusefs.store import sweep_container
from tests.support.make_trees import Spec, make_tree, owned, snapshot
from tests.support.other_users import as_user
from tests.support.real_filesystems import bind_mount, tmpfs_volume
from tests.support.store_verbs import assert_silent, init
from tests.support.terminals import Terminal
from tests.support.trashd_command import TRASHD, done_well, environment, trashd

pytestmark = pytest.mark.needs("root")

USER = 65_534
TREE: Spec = {"file": "content", "below": {"deep": "more"}}
ODD = [b"new\nline", b"\xff\xfe", b"n" * 255, b" ", b"-r", b"\xe2\x80\xae", b"*"]


def ids(*volumes: Path) -> set[str]:
    words = [word for volume in volumes for word in ("--volume", str(volume))]
    return {one["id"] for one in done_well("list", "--json", *words).objects()}


def make(*paths: Path) -> list[object]:
    return [snapshot(make_tree(path, TREE)) for path in paths]


def test_one_command_is_one_orphan_on_each_filesystem(volume: Path) -> None:
    with tmpfs_volume() as other:
        init(other)
        paths = [volume / "a", volume / "b", other / "a", other / "above/b"]
        paths[3].parent.mkdir()
        before = make(*paths)
        rm_results = done_well("rm", "--json", *paths).objects()
        assert {one["path"]: one["id"] for one in rm_results}.keys() == set(map(str, paths))
        assert len(ids(volume, other)) == len({one["id"] for one in rm_results}) == 2
        assert not any(path.exists() for path in paths)
        for one in rm_results[:3]:
            done_well(*one["restore"].split()[1:])
        done_well("restore", paths[3])
        assert list(map(snapshot, paths)) == before
        assert not ids(volume, other), "an orphan of which all came back is none any more"
        assert_silent(other)


def test_a_single_one_is_an_orphan_as_it_is(volume: Path) -> None:
    path = volume / "a"
    (before,) = make(path)
    (one,) = done_well("rm", "--json", path).objects()
    assert one["method"] == "removed"
    done_well("restore", one["id"])
    assert snapshot(path) == before


def test_names_of_all_kinds_come_by_a_list(volume: Path) -> None:
    for name in ODD:
        Path(os.fsdecode(bytes(volume) + b"/" + name)).write_bytes(name)
    done_well("rm", "-0", cwd=volume, stdin=b"\0".join(ODD) + b"\0")
    assert os.listdir(volume) == [".trashd"]
    (orphan,) = ids(volume)
    done_well("restore", orphan)
    assert sorted(os.listdir(bytes(volume))) == sorted([b".trashd", *ODD])


def test_what_goes_with_another_is_no_error(volume: Path) -> None:
    (before,) = make(volume / "a")
    done_well("rm", "a", "a/below/deep", "a/file", "a", cwd=volume)
    (orphan,) = ids(volume)
    done_well("restore", orphan)
    assert snapshot(volume / "a") == before


def test_what_is_refused_is_told_and_the_rest_goes(volume: Path) -> None:
    make(volume / "a", volume / "b", volume / "with")
    (volume / "with/mount").mkdir()
    with bind_mount(volume / "with/mount", volume / "with/mount"):
        done = trashd("rm", "a", "missing", "with", "with/mount", ".trashd", ".", "b", cwd=volume)
        assert (volume / "with/file").exists()
    assert done.code == 13
    for name in ("missing", "with", "with/mount", ".trashd"):
        assert name in done.err
    assert not (volume / "a").exists()
    assert not (volume / "b").exists()
    assert len(ids(volume)) == 1


def test_a_directory_that_its_owner_may_not_write_to_goes_by_itself(volume: Path) -> None:
    """Alone its owner lends himself the permission; a sweep does not."""
    home = make_tree(volume / "home", {"closed": TREE, "other": TREE, "third": TREE})
    owned(home, USER)
    (home / "closed").chmod(0o500)
    before = snapshot(home)
    done = as_user(USER, lambda: trashd("rm", "closed", "other", "third", cwd=home))
    assert done.code == 0, done
    assert not os.listdir(home)
    as_user(USER, lambda: [done_well("restore", home / name) for name in ("closed", "other", "third")])
    assert snapshot(home) == before


def test_a_link_is_removed_itself_and_what_is_named_through_one_is_an_orphan_of_its_own(volume: Path) -> None:
    make(volume / "far", volume / "a", volume / "b")
    (volume / "link").symlink_to("far")
    done_well("rm", "link/file", "a", "link", "b", cwd=volume)
    assert sorted(os.listdir(volume)) == [".trashd", "far"]
    assert os.listdir(volume / "far") == ["below"]
    assert len(ids(volume)) == 2
    done_well("restore", volume / "link")
    assert (volume / "link").is_symlink()
    done_well("restore", volume / "link/file")
    assert (volume / "far/file").exists()


def test_what_rm_s_options_mean(volume: Path) -> None:
    make(volume / "full")
    (volume / "empty").mkdir()
    (volume / "f").touch()
    assert trashd("rm", "-f").code == 0
    assert trashd("rm", "-rf", volume / "missing").code == 0
    assert trashd("rm", volume / "missing").code == 5
    done = trashd("rm", "-dv", "full", "empty", "f", cwd=volume)
    assert done.code == 13
    assert "full" in done.err
    assert {name for name in ("empty", "f") if f"{volume / name}: removed" in done.out.splitlines()} == {"empty", "f"}
    assert sorted(os.listdir(volume)) == [".trashd", "full"]
    done_well("rm", "-r", "-d", "full", cwd=volume)


def test_of_many_each_is_named_if_that_is_wanted(volume: Path) -> None:
    names = [f"{number}" for number in range(30)]
    for name in names:
        (volume / name).touch()
    assert "30 removed" in done_well("rm", *names, cwd=volume).out
    done_well("undo", "--volume", volume)
    assert done_well("rm", "-v", *names, cwd=volume).out.count(": removed") == 30


def test_it_asks_before_each(volume: Path) -> None:
    make(volume / "a", volume / "b")
    assert trashd("rm", "-i", volume / "a").code == 2, "nobody can be asked"
    assert trashd("rm", "-if", volume / "a").code == 2
    terminal = Terminal("rm", "-i", "a", "b", cwd=volume)
    terminal.type("y\nn\n")
    assert terminal.end() == 0, terminal.output
    assert not (volume / "a").exists()
    assert (volume / "b").exists()


def test_nobody_is_asked_about_what_is_refused_anyway(volume: Path) -> None:
    make(volume / "full")
    (volume / "b").touch()
    terminal = Terminal("rm", "-id", "full", "b", cwd=volume)
    terminal.type("y\n")
    assert (terminal.end(), terminal.output.count("Remove "), (volume / "full").exists()) == (13, 1, True)
    assert not (volume / "b").exists()


def test_now_reaps_all_of_it(volume: Path) -> None:
    make(volume / "a", volume / "b")
    done_well("rm", "--now", "a", "b", cwd=volume)
    assert not ids(volume)
    assert os.listdir(volume) == [".trashd"]


N_MANY = 3000


@pytest.fixture
def top(volume: Path) -> Path:
    (volume / "top").mkdir()
    return volume / "top"


def fill(top: Path, n: int) -> list[str]:
    """Files that hold their own names."""
    names = [f"f{number}" for number in range(n)]
    for name in names:
        (top / name).write_text(name)
    return names


def listed(names: list[str]) -> bytes:
    return os.fsencode("".join(f"{name}\0" for name in names))


def begun(names: list[str], top: Path) -> subprocess.Popen[str]:
    """The command, which reads all names before it begins."""
    process = subprocess.Popen(
        [TRASHD, "rm", "-0", "--json"], cwd=top, env=environment({}), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert process.stdin is not None
    process.stdin.write("".join(f"{name}\0" for name in names))
    return process


def orphans(volume: Path) -> list[str]:
    return [one["id"] for one in done_well("list", "--json", "--volume", volume).objects()]


def assert_all_come_back(volume: Path, top: Path, names: list[str]) -> None:
    for orphan in orphans(volume):
        done_well("restore", "--volume", volume, orphan)
    assert sorted(os.listdir(top)) == sorted(names)
    assert all((top / name).read_text() == name for name in names)
    assert not orphans(volume)


def test_what_is_mounted_on_a_name_in_the_middle_stays_and_the_rest_goes(volume: Path, top: Path) -> None:
    names = fill(top, N_MANY)
    (volume / "mounted").write_text("mounted")
    with bind_mount(volume / "mounted", top / "f1500"):
        done = trashd("rm", "-0", cwd=top, stdin=listed(names))
        assert (done.code, os.listdir(top)) == (13, ["f1500"])
        assert "f1500" in done.err
    assert_all_come_back(volume, top, names)


def test_what_is_missing_is_told_and_the_rest_goes(volume: Path, top: Path) -> None:
    names = fill(top, 30)
    (top / "d").mkdir()
    done = trashd("rm", "-0", cwd=top, stdin=listed([*names[:15], "d", "d/none", "none", *names[15:]]))
    assert (done.code, os.listdir(top)) == (13, []), done
    assert "31 removed" in done.out
    assert "d/none" in done.err
    assert len(orphans(volume)) == 1


def test_what_is_missing_is_no_error_if_forced(volume: Path, top: Path) -> None:
    names = fill(top, 30)
    done_well("rm", "-f0", cwd=top, stdin=listed([*names[:15], "none", "d/none", *names[15:]]))
    assert os.listdir(top) == []
    assert_all_come_back(volume, top, names)


def test_two_with_the_same_list_share_it(volume: Path, top: Path) -> None:
    names = fill(top, N_MANY)
    both = [begun(names, top), begun(names, top)]
    for process in both:
        assert process.stdin is not None
        process.stdin.close()
        process.stdin = None
    told = [process.communicate()[0].splitlines() for process in both]
    assert os.listdir(top) == []
    done = [line for lines in told for line in lines if '"method"' in line]
    assert len(done) == N_MANY, "each is told by whoever took it, and by nobody else"
    assert_all_come_back(volume, top, names)


def test_killed_in_the_middle_all_are_in_place_or_come_back(volume: Path, top: Path) -> None:
    names = fill(top, 20_000)
    with begun(names, top) as process:
        assert process.stdin is not None
        process.stdin.close()
        while len(os.listdir(top)) == len(names) and process.poll() is None:
            pass
        process.kill()
    assert_all_come_back(volume, top, names)


def test_what_cannot_be_flushed_is_said_by_its_exit_code(volume: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flush_nothing(_held: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    make(volume / "a", volume / "b")
    monkeypatch.setattr(sweep_container, "flush", flush_nothing)
    done = trashd("rm", "-r", volume / "a", volume / "b")
    assert (done.code, "Input/output error at the end" in done.err) == (10, True), done
