"""A volume and its plain twin, on which there is no trashd: what becomes of a file there, users can do by plain calls.

The same people do the same on both with calls of their own. Where trashd acts on the first, the twin's asker does
what that user could do at that moment: `mv` into a directory of that user alone, or back. A fault is what is gone,
out of its owner's reach or readable by a user on the first, and never was, nor could have been made so, on the twin.
"""

import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from fusefs.linux import syscalls
from tests.support.other_users import called_by
from tests.support.privileges import Credentials

MARK = "content of "
"""How the content of each file begins that counts; what else it says is different in each."""
_AT_FDCWD = -100
_PARTS = ("stage", "orphans", "drop", "quarantine")


@dataclass
class Side:
    """One of the two: where it is, and the directories that a user has held open, by name."""

    volume: Path
    held: dict[str, int] = field(default_factory=dict)

    def at(self, where: str) -> Path:
        """A path from the volume's root, or, as `@NAME/path`, from a directory that is held.

        Raises  FileNotFoundError if it isn't held
        """
        name, _, below = where.partition("/")
        if name.startswith("@") and name[1:] not in self.held:
            raise FileNotFoundError(where)
        top = Path(f"/proc/self/fd/{self.held[name[1:]]}") if name.startswith("@") else self.volume / name
        return top / below if below else top

    def hold(self, where: str) -> None:
        """Have a directory open from now on, called by the last part of its path."""
        self.held[where.rpartition("/")[2]] = os.open(self.at(where), os.O_RDONLY | os.O_DIRECTORY)

    def close(self) -> None:
        while self.held:
            os.close(self.held.popitem()[1])


Step = Callable[[Side], object]
"""A call or two of a user's, on either side."""


@dataclass(frozen=True)
class Exchange:
    """A step: both names for each other's directory in one call."""

    one: str
    other: str

    def __call__(self, side: Side) -> None:
        first, second = os.fsencode(side.at(self.one)), os.fsencode(side.at(self.other))
        syscalls.renameat2(_AT_FDCWD, first, _AT_FDCWD, second, syscalls.RENAME_EXCHANGE)


@dataclass
class Twins:
    """Both, and what the plain one has shown so far.

    people         the users whose view is compared: all but root
    may_go         contents that a user gave away, or that the hostile one could have deleted by plain calls
    readable_once  by user, contents that this user could read at some time
    hidden         contents that their owner could not get at once
    made           the steps that the hostile one could make on the first one when last acting there
    """

    first: Side
    plain: Side
    people: Mapping[str, Credentials]
    hostile: Credentials
    may_go: set[str] = field(default_factory=set)
    readable_once: dict[str, set[str]] = field(default_factory=dict)
    hidden: set[str] = field(default_factory=set)
    made: Sequence[Step] = ()

    def __post_init__(self) -> None:
        self.note()

    def note(self) -> None:
        """Remember what the plain one shows now."""
        there = contents(self.plain)
        self.may_go |= could_delete(self.hostile, self.plain.volume)
        for name, person in self.people.items():
            seen = readable(person, self.plain, is_holder=person is self.hostile)
            self.readable_once.setdefault(name, set()).update(seen)
            self.hidden |= {one for one, uid in there.items() if person.has(uid)} - seen

    def act(self, side: Side, steps: Sequence[Step]) -> list[Step]:
        """Have the hostile one do something on one of them; what fails, fails.

        Returns  the steps but for exchanges that were made: to make them again would undo what was done
        """
        done = called_by(self.hostile.be, lambda: _try_all(side, steps), "the actor")
        if side is self.plain:
            self.note()
        else:
            self.made = [step for i, step in enumerate(steps) if i in done]
        return [step for i, step in enumerate(steps) if not (i in done and isinstance(step, Exchange))]

    def deletable(self, asker: Credentials, where: str) -> set[str]:
        """What an asker could delete at a place now."""
        return could_delete(asker, self.plain.at(where)) | could_delete(asker, self.first.at(where))

    def give(self, asker: Credentials, where: str, number: int, *, is_swap: bool) -> None:
        """On the plain one: an asker gives something away, which the asker could delete now, into an own directory.

        is_swap  an empty directory like it is made in its place
        """
        self.may_go |= self.deletable(asker, where)
        path = self.plain.at(where)

        def act() -> None:
            st = path.lstat()
            _mv(path, own_place(self.plain, asker, number))
            if is_swap:
                path.mkdir()
                if asker.uid == 0:
                    os.chown(path, st.st_uid, st.st_gid)
                path.chmod(stat.S_IMODE(st.st_mode))

        called_by(asker.be, lambda: _try_all(self.plain, [lambda _side: act()]), "the asker")
        self.note()

    def take_back(self, asker: Credentials, number: int, where: str) -> None:
        """On the plain one: an asker has back what was given away."""
        called_by(asker.be, lambda: _mv(own_place(self.plain, asker, number), self.plain.at(where)), "the asker")
        self.note()

    def keep_from_now(self, where: str) -> None:
        """What is at a place of the first one is in use again, and may not go."""
        self.may_go -= set(_files(self.first.at(where)))
        self.may_go |= could_delete(self.hostile, self.first.volume)

    def faults(self, before: Mapping[str, int]) -> list[str]:
        """What the first one shows that the plain one never did. before: contents and their owners, at the beginning"""
        there = contents(self.first)
        found = [f"gone: {one}" for one in sorted(before.keys() - there.keys() - self.may_go)]
        for name, person in self.people.items():
            seen = readable(person, self.first, is_holder=person is self.hostile)
            found += [f"{name} reads: {one}" for one in sorted(seen - self.readable_once[name])]
            own = {one for one, uid in there.items() if person.has(uid)}
            found += [f"out of the reach of {name}: {one}" for one in sorted(own - seen - self.hidden - self.may_go)]
        return found


def own_place(side: Side, asker: Credentials, number: int) -> Path:
    """Where a plain twin's asker puts what is given away: a directory like that of a store."""
    return side.volume / ".trashd/u" / str(asker.uid) / "orphans" / str(number) / "tree"


def make_places(side: Side, people: Mapping[str, Credentials]) -> None:
    """On a plain twin: what a store looks like to those who are up to something, with each one's own directory."""
    for name, mode in (("", 0o755), ("u", 0o755), ("new", 0o1777), ("folders", 0o755)):
        (side.volume / ".trashd" / name).mkdir()
        (side.volume / ".trashd" / name).chmod(mode)
    for person in (*people.values(), Credentials(0, 0)):
        folder = side.volume / ".trashd/u" / str(person.uid)
        for path in (folder, *(folder / part for part in _PARTS)):
            path.mkdir(mode=0o700)
            os.chown(path, person.uid, person.gid)


def _try_all(side: Side, steps: Sequence[Step]) -> set[int]:
    """Try all steps; return the numbers of those that succeeded."""
    made = set()
    for i, step in enumerate(steps):
        with suppress(OSError):
            step(side)
            made.add(i)
    return made


def _mv(source: Path, target: Path) -> None:
    """Move something to a free name, as its owner if need be with a mode lent; nothing if that is refused."""
    with suppress(OSError):
        target.parent.mkdir(mode=0o700, exist_ok=True)
        st = source.lstat()
        if stat.S_ISDIR(st.st_mode) and st.st_uid == os.geteuid():
            source.chmod(stat.S_IMODE(st.st_mode) | 0o700)
        if target.is_dir():
            target.rename(target.with_name(f"{target.name}.late"))  # what was made in its place meanwhile
        source.rename(target)


def _walk(top: str) -> Iterator[tuple[str, list[os.DirEntry[str]]]]:
    """Each directory at and below a path, and the regular files in it; what this process may not list, is passed over.

    Not os.walk, whose paths and stats took a third of the tests' processor time.
    """
    try:
        with os.scandir(top) as found:
            entries = list(found)
    except OSError:
        return
    yield top, [entry for entry in entries if entry.is_file(follow_symlinks=False)]
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(entry.path)


def _read(path: str) -> str:
    """The content of a file, if it counts; empty else. Raises  OSError"""
    with open(path, "rb", buffering=0) as file:
        text = file.readall().decode(errors="replace")
    return text if text.startswith(MARK) else ""


def _files(top: Path) -> Iterator[str]:
    """The contents that count of all files at and below a path, as root sees them."""
    if top.is_file() and not top.is_symlink():
        yield from filter(None, [_read(str(top))])
    for _, files in _walk(str(top)):
        yield from filter(None, (_read(file.path) for file in files))


def contents(side: Side) -> dict[str, int]:
    """The contents of all files that count on a side, with their owners."""
    return {
        text: file.stat(follow_symlinks=False).st_uid
        for _, files in _walk(str(side.volume))
        for file in files
        if (text := _read(file.path))
    }


def readable(person: Credentials, side: Side, *, is_holder: bool) -> set[str]:
    """Return the contents that a user can read below the volume's root and, for a holder, below the held fds."""
    tops = [str(side.volume), *(f"/proc/self/fd/{fd}" for fd in side.held.values() if is_holder)]

    def read_all() -> set[str]:
        found: set[str] = set()
        for file in (file for top in tops for _, files in _walk(top) for file in files):
            with suppress(OSError):
                found.add(_read(file.path))
        return found - {""}

    if not person.is_plain:
        return called_by(person.be, read_all, "the reader")
    with person.assume_ids():
        return read_all()


def could_delete(person: Credentials, top: Path) -> set[str]:
    """The contents at and below a path that a user could delete now, with unlink, and chmod of own directories.

    The way to them is not looked at: the user may have an old fd.
    """
    if top.is_file():
        return set(_files(top)) if _may_unlink_in(person, top.parent.lstat(), top.lstat()) else set()
    found: set[str] = set()
    for directory, files in _walk(str(top)):
        st = os.lstat(directory)
        found.update(_read(file.path) for file in files if _may_unlink_in(person, st, file.stat(follow_symlinks=False)))
    return found - {""}


def _may_unlink_in(person: Credentials, st: os.stat_result, entry: os.stat_result) -> bool:
    """Whether a user may unlink an entry of a directory, by what their stats are."""
    if person.uid == 0 or person.has(st.st_uid):
        return True
    if st.st_mode & stat.S_ISVTX and not person.has(entry.st_uid):
        return False
    bits = st.st_mode >> 3 if st.st_gid in (person.gid, *person.groups) else st.st_mode
    return bits & 3 == 3
