"""`trashd rm -0` of many: what is there no more, what is mounted, who else is at it, and a kill in the middle."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.real_filesystems import bind_mount
from tests.support.trashd_command import TRASHD, done_well, environment, trashd

pytestmark = pytest.mark.needs("root")

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
