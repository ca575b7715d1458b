"""docs/howto/recipes/tmp-cleanup.md: each old line leaves what its new one leaves."""

import os
import re
import shutil
import time
from pathlib import Path

import pytest

from tests.recipes.node import Node, only_orphan
from tests.support.recipe_pages import RecipePage

pytestmark = pytest.mark.needs("systemd")

RECIPE = RecipePage("tmp-cleanup")
LINES = re.findall(r"^\| `((?:find|tmpreaper) .+)` \| `(trashd sweep .+)` \|$", RECIPE.text, re.MULTILINE)
_DAY_S = 86_400
AGES_S = [60, 719 * 60 + 30, 721 * 60 + 30, 29.5 * _DAY_S, 30.5 * _DAY_S, 31.5 * _DAY_S, 400 * _DAY_S]
"""Around each limit of the table."""


def make_old_and_new(directory: Path) -> None:
    """Files, links and directories of all ages, large and small, some below a dot, an empty directory, odd names."""
    names = [b"a.tmp", b"b\n.tmp", b"-c", b"\xff\x1b[31m.tmp", b".hidden"]
    now_s = time.time()
    for number, age_s in enumerate(AGES_S):
        inside = os.fsencode(directory / f"d{number}")
        os.makedirs(inside + b"/empty")
        os.makedirs(inside + b"/deep/.er")
        for where in (b"", b"/deep", b"/deep/.er"):
            for name in names:
                path = inside + where + b"/" + name
                with open(path, "wb") as file:
                    file.truncate((2 << 20) * (name == b"a.tmp"))
                os.utime(path, (now_s - age_s,) * 2)
            os.symlink("/etc/hostname", inside + where + b"/link.tmp")
            os.utime(inside + where + b"/link.tmp", (now_s - age_s,) * 2, follow_symlinks=False)
        for where in (b"/deep/.er", b"/deep", b"/empty", b""):
            os.utime(inside + where, (now_s - age_s,) * 2)


def left(directory: Path) -> set[bytes]:
    top = os.fsencode(directory)
    return {os.path.relpath(os.path.join(at, name), top) for at, names, files in os.walk(top) for name in names + files}


def test_the_table_has_lines() -> None:
    assert len(LINES) == 6


@pytest.mark.parametrize(
    ("old", "new"),
    [pytest.param(*pair, marks=pytest.mark.needs("tmpreaper") if "tmpreaper" in pair[0] else ()) for pair in LINES],
)
def test_the_new_line_leaves_what_the_old_one_leaves(node: Node, old: str, new: str) -> None:
    there = node.volume("/scratch") / "in"
    node.root("trashd init /scratch")
    remains = []
    for line in (old, new):
        make_old_and_new(there)
        before = left(there)
        node.root(line)
        remains.append(left(there))
        shutil.rmtree(there)
    assert remains[0] == remains[1]
    assert set() < remains[1] < before


def test_cron_s_line_is_the_same_with_a_way_back(node: Node) -> None:
    there = node.volume("/scratch") / "in"
    node.root("trashd init /scratch")
    make_old_and_new(there)
    before = left(there)
    path, line = RECIPE.file("/etc/cron.d/scratch").text.splitlines()
    node.root(f"{path}; {line.removeprefix('30 3 * * * root ')}")
    assert left(there) < before
    node.root(f"trashd restore {only_orphan(node, '/scratch')}")
    assert left(there) == before


def test_a_plan_in_the_place_of_tmpfiles(node: Node) -> None:
    scratch = node.volume("/scratch")
    node.root("trashd init /scratch")
    RECIPE.put(node.system.root, "/etc/t")
    # No program can set a file's ctime: a second stands for a day here.
    node.root("sed -i 's/30d/1s/; $a trusts_atime = true' /etc/trashd/plan.d/scratch.toml")
    node.root("mkdir /scratch/tmp && touch /scratch/tmp/old")
    node.root("touch --date='1 hour' /scratch/tmp/young")
    node.root("until find /scratch/tmp/old ! -newerct '2 seconds ago' | grep .; do sleep 0.1; done")
    RECIPE.follow("A line of tmpfiles.d", node.run)
    assert left(scratch / "tmp") == {b"young"}
    assert (scratch / "tmp").stat().st_mode & 0o7777 == 0o1777
    node.root("systemctl disable --now trashd-sweep.timer && rm /etc/trashd/plan.d/scratch.toml")
