"""`trashd ls`, `cat` and `diff`: what an orphan holds, by id or path, for its owner and root alone."""

import os
import subprocess
from functools import partial
from pathlib import Path

import pytest

from tests.support.make_trees import Spec, make_tree, owned, snapshot
from tests.support.other_users import as_user
from tests.support.trashd_command import TRASHD, done_well, swapped, trashd

pytestmark = pytest.mark.needs("root")

USER, OTHER = 65_534, 12_345
TREE: Spec = {"file": "content", "below": {"deep": "more", "same": "same"}}


@pytest.fixture
def job(volume: Path) -> Path:
    return make_tree(volume / "job", TREE)


def fill(fresh: Path, spec: Spec) -> None:
    """Make in a directory that is there."""
    made = make_tree(fresh.parent / "made", spec)
    for path in made.iterdir():
        path.rename(fresh / path.name)
    made.rmdir()


def of_user(volume: Path) -> Path:
    return owned(make_tree(volume / "home", {"job": TREE}), USER) / "job"


@pytest.mark.quick("ls")
def test_a_directory_of_it_is_listed_by_id_and_by_path(volume: Path, job: Path) -> None:
    identifier = swapped(job)["id"]
    before = snapshot(volume)
    (top,) = {tuple(line.split()[-1] for line in done_well("ls", word).out.splitlines()) for word in (identifier, job)}
    assert top == ("below", "file")
    for word in (f"{identifier[-12:]}:below", f"{identifier}:/below/", job / "below"):
        assert [one["name"] for one in done_well("ls", "--json", word).objects()] == ["deep", "same"]
    (one,) = done_well("ls", "--json", f"{identifier}:file").objects()
    assert one["n_bytes"] == len("content")
    assert snapshot(volume) == before, "nothing is changed by a look"


def test_of_many_entries_those_that_are_meant_are_told(job: Path) -> None:
    for name in ("a.CSV", "b.csv", "c.csv"):
        (job / name).touch()
    identifier = swapped(job)["id"]
    told = done_well("ls", "--json", "--iname", "*.csv", "--first", "2", identifier).objects()
    assert [one["name"] for one in told] == ["a.CSV", "b.csv"]
    assert not done_well("ls", "--iname", "none", identifier).out
    assert trashd("ls", "--iname", "[[:none:]]", identifier).code == 2
    assert trashd("ls", "--first", "0", identifier).code == 2


@pytest.mark.quick("cat")
def test_a_file_of_it_is_printed_as_it_is(job: Path) -> None:
    content = bytes(range(256)) * 5000
    (job / "file").write_bytes(content)
    identifier = swapped(job)["id"]
    for word in (f"{identifier}:file", job / "file"):
        assert os.fsencode(done_well("cat", word).out) == content


@pytest.mark.quick("diff")
def test_what_differs_is_told_once_whatever_it_holds(job: Path) -> None:
    make_tree(job / "whole", TREE)
    (job / "link").symlink_to("here")
    swapped(job)
    make_tree(job / "fresh", TREE)
    make_tree(job / "below", {"deep": "less", "same": "same"})
    (job / "file").mkdir()
    (job / "link").symlink_to("there")
    told = {(one["path"], one["how"]) for one in done_well("diff", "--json", job).objects()}
    assert told == {
        ("file", "changed"), ("link", "changed"), ("below/deep", "changed"), ("whole", "gone"), ("fresh", "new"),
    }  # fmt: skip
    assert "changed: deep" not in done_well("diff", job / "below").out
    assert "changed: below/deep" in done_well("diff", job / "below").out


def test_of_what_was_swept_only_that_is_compared(job: Path) -> None:
    done_well("sweep", job, "--name", "deep")
    diff_results = done_well("diff", "--json", job).objects()
    assert [(one["path"], one["how"]) for one in diff_results] == [("below/deep", "gone")]
    (job / "below/deep").write_text("other")
    assert "changed: below/deep" in done_well("diff", job).out


def test_nothing_differs_from_what_was_copied(job: Path) -> None:
    swapped(job)
    fill(job, TREE)
    done = done_well("diff", job)
    assert not done.out
    assert "no differences" in done.err


@pytest.mark.parametrize("command", ["ls", "cat", "diff"])
def test_it_is_its_owners_and_roots(volume: Path, command: str) -> None:
    job = of_user(volume)
    identifier = as_user(USER, lambda: swapped(job)["id"])
    as_user(USER, lambda: fill(job, {"file": "new"}))
    part = "/file" if command == "cat" else ""
    for word in (f"{job}{part}", f"{identifier}:{part}"):
        own = as_user(USER, partial(done_well, command, word))
        assert own.out
        assert as_user(OTHER, partial(trashd, command, word)).code == 5
        assert done_well(command, "--user", str(USER), word).out == own.out
    assert trashd(command, f"{job}{part}").code == 3, "root says whose word counts"


def test_a_look_follows_no_link_and_waits_for_no_pipe(job: Path) -> None:
    (job / "link").symlink_to("/etc")
    os.mkfifo(job / "pipe")
    identifier = swapped(job)["id"]
    assert trashd("ls", f"{identifier}:link/passwd").code != 0
    assert trashd("cat", f"{identifier}:link").code == 3
    assert trashd("cat", f"{identifier}:pipe").code == 3
    assert trashd("ls", f"{identifier}:../../..").code == 2
    os.mkfifo(job / "pipe")
    assert trashd("diff", job).code == 0


def test_a_deep_tree_is_compared_to_its_end(job: Path) -> None:
    def deepen(at: Path) -> None:
        fd = os.open(at, os.O_DIRECTORY)
        for _ in range(1500):
            os.mkdir("d", dir_fd=fd)
            fd, above = os.open("d", os.O_DIRECTORY, dir_fd=fd), fd
            os.close(above)
        os.close(os.open("end", os.O_CREAT, dir_fd=fd))
        os.close(fd)

    deepen(job)
    swapped(job)
    fill(job, TREE)
    deepen(job)
    assert "no differences" in done_well("diff", job).err


@pytest.mark.parametrize(("written", "is_same"), [((), True), ((5, 1 << 37), False), ((0, 299 << 30), True)])
def test_of_sparse_files_only_the_data_is_compared(
    volume: Path, job: Path, written: tuple[int, ...], is_same: bool
) -> None:
    """Holes of 300 GiB, which take minutes to read. written: the offsets of a byte, in the orphan and there now"""
    swapped(job)
    orphan, *_ = (volume / ".trashd/u/0/orphans").iterdir()
    for tree, at in ((orphan / "tree", written[:1]), (job, written[1:])):
        with (tree / "sparse").open("wb") as file:
            file.truncate(300 << 30)
            for offset in at:
                file.seek(offset)
                file.write(b"x" if not is_same else b"\0")
    done = done_well("diff", orphan.name)
    assert ("changed: sparse" in done.out) != is_same


@pytest.mark.parametrize("is_roots", [True, False])
def test_a_pipe_that_is_closed_ends_cat_quietly(volume: Path, job: Path, is_roots: bool) -> None:
    victim = job if is_roots else of_user(volume)
    (victim / "file").write_bytes(bytes(1 << 20))
    pipe = f"{TRASHD} cat {swapped(victim)['id']}:file | head -c 10; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", pipe], capture_output=True, check=True)
    assert (done.stdout[10:], done.stderr) == (b"141\n", b"")
