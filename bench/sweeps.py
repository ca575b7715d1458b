"""What sweeps are compared on: the trees, what each subject runs, and what has to be left afterwards."""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from bench.support import TRASHD, program

OURS = "trashd"
DELETE, PLUS, XARGS, EACH = "find -delete", "find -exec +", "find | xargs", "find -exec ;"
BARE = "bare loop"
"""In C, two processes: what the system calls take, and no rival."""
TOP, TARGET, LIST = "top", "target", "list"
PER_DIRECTORY = 1000
OLD_NS = 10**18
"""In 2001."""
Command = Sequence[str | Path]


class Limit(NamedTuple):
    """Our median is to be at most that many times a rival's, or the best one's if none is named."""

    times: float
    rival: str | None = None
    on_ext4: bool = True
    elsewhere: bool = True


class Job(NamedTuple):
    """One thing to do.

    make       makes the tree in a volume, with so many files
    commands   of each subject, for the root of a volume
    remaining  returns how many of so many files remain
    """

    description: str
    n_files: int
    make: Callable[[Path, int], None]
    commands: Mapping[str, Callable[[Path], Command]]
    remaining: Callable[[int], int]
    limits: tuple[Limit, ...]


def make_files(
    directory: Path, n_files: int, *, is_odd: Callable[[int], bool] = lambda number: number % 2 == 1
) -> None:
    """Files of which those with an odd number match: by name, by size, and by age."""
    directory.mkdir(parents=True)
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for number in range(n_files):
            matches = is_odd(number)
            name = f"file{number:07}.{'log' if matches else 'dat'}"
            file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644, dir_fd=fd)
            if matches:
                os.truncate(file, 2 << 20)  # a hole: it takes no space
                os.utime(file, ns=(OLD_NS, OLD_NS))
            os.close(file)
    finally:
        os.close(fd)


def make_tree(root: Path, n_files: int) -> None:
    """Directories of a thousand files each, half of which match; and their list."""
    names = []
    for number in range(n_files // PER_DIRECTORY):
        make_files(root / TOP / f"d{number:04}", PER_DIRECTORY)
        names += [f"d{number:04}/file{at:07}.log" for at in range(1, PER_DIRECTORY, 2)]
    (root / LIST).write_text("".join(f"{name}\0" for name in names), encoding="ascii")


def make_flat(root: Path, n_files: int) -> None:
    """One directory in which all match, and an empty one beside it."""
    make_files(root / TOP, n_files, is_odd=lambda _number: True)
    (root / TARGET).mkdir()


def make_flat_list(root: Path, n_files: int) -> None:
    """One directory of empty files, their list as find tells it, and an empty one beside it."""
    make_files(root / TOP, n_files, is_odd=lambda _number: False)
    (root / TARGET).mkdir()
    (root / LIST).write_text("".join(f"{name}\0" for name in os.listdir(root / TOP)), encoding="ascii")


def make_linked(root: Path, n_files: int) -> None:
    """One directory with that many names of few files."""
    (root / TOP).mkdir()
    fd = os.open(root / TOP, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for number in range(n_files):
            name = f"file{number:07}.log"
            if number % 30_000 == 0:
                first = name
                os.close(os.open(name, os.O_WRONLY | os.O_CREAT, 0o644, dir_fd=fd))
            else:
                os.link(first, name, src_dir_fd=fd, dst_dir_fd=fd)
    finally:
        os.close(fd)


def shell(text: str, root: Path) -> Command:
    """A pipeline, in the volume."""
    return ["bash", "-o", "pipefail", "-c", f'cd "$0" && {text}', root]


def sweeping(*words: str, root: Path) -> Command:
    """Our command there."""
    return [TRASHD, "sweep", root / TOP, *words]


def deleting(ours: Sequence[str], test: str, bare: str) -> Mapping[str, Callable[[Path], Command]]:
    """Who deletes what is chosen."""
    return MappingProxyType(
        {
            OURS: partial(_sweep_command, ours),
            DELETE: partial(shell, f"find {TOP} -type f {test} -delete"),
            XARGS: partial(shell, f"find {TOP} -type f {test} -print0 | xargs -0 -P2 rm"),
            PLUS: partial(shell, f"find {TOP} -type f {test} -exec rm {{}} +"),
            BARE: partial(_bare, bare),
        }
    )


def _bare(job: str, root: Path) -> Command:
    return [program(Path(__file__).with_name("bare_sweep.c")), root / TOP, job, "2"]


def _sweep_command(words: Sequence[str], root: Path) -> Command:
    """Return our command; a word that begins with two slashes is a path in the volume."""
    return sweeping(*(str(root / word[2:]) if word.startswith("//") else word for word in words), root=root)


def half(n_files: int) -> int:
    """Of the files of a tree, those that don't match."""
    return n_files - n_files // 2


NAME = ("--name", "*.log")
_DELETE = (Limit(0.8), Limit(1.15, BARE))
"""The second where the bare loop is slower than 0.8 of the best rival."""
JOBS = MappingProxyType[str, Job](
    {
        "name": Job(
            "by name", 200_000, make_tree, deleting([*NAME, "--delete"], "-name '*.log'", "name"), half, _DELETE
        ),
        "size": Job(
            "by size", 200_000, make_tree, deleting(["--size", "+1M", "--delete"], "-size +1M", "size"), half, _DELETE
        ),
        "age": Job(
            "by age", 200_000, make_tree,
            deleting(["--older", "@1100000000", "--delete"], "! -newermt @1100000000", "age"),
            half, _DELETE,
        ),
        "each": Job(
            "a process each", 20_000, make_tree,
            {
                OURS: partial(_sweep_command, [*NAME, "--delete"]),
                EACH: partial(shell, f"find {TOP} -name '*.log' -exec rm {{}} ';'"),
            },
            half, (Limit(1 / 30, EACH),),
        ),
        "list": Job(
            "from a list", 114_000, make_tree,
            {
                OURS: partial(shell, f"cd {TOP} && '{TRASHD}' sweep . -0 --from ../{LIST} --delete"),
                "xargs rm": partial(shell, f"cd {TOP} && xargs -0 rm < ../{LIST}"),
            },
            half, (),
        ),
        "rm": Job(
            "rm of a list", 57_000, make_flat_list,
            {
                OURS: partial(shell, f"cd {TOP} && '{TRASHD}' rm -0 < ../{LIST}"),
                "xargs rm": partial(shell, f"cd {TOP} && xargs -0 rm < ../{LIST}"),
                "xargs mv": partial(shell, f"cd {TOP} && xargs -0 mv -t ../{TARGET} < ../{LIST}"),
            },
            lambda _n_files: 0, (Limit(2.0, "xargs rm"),),
        ),
        "move": Job(
            "moved", 500_000, make_flat,
            {
                OURS: partial(_sweep_command, [*NAME, "--move-to", f"//{TARGET}"]),
                PLUS: partial(shell, f"find {TOP} -type f -exec mv -t {TARGET} {{}} +"),
                XARGS: partial(shell, f"find {TOP} -type f -print0 | xargs -0 -P0 mv -t {TARGET}"),
            },
            lambda _n_files: 0, (Limit(0.9, PLUS), Limit(1.1, XARGS)),
        ),
        "trash": Job(
            "trashed", 200_000, make_tree, {OURS: partial(_sweep_command, [*NAME])}, half, ()
        ),
        "memory": Job(
            "one directory", 5_000_000, make_linked,
            {OURS: partial(_sweep_command, [*NAME, "--delete"])},
            lambda _n_files: 0, (),
        ),
    }
)  # fmt: skip
