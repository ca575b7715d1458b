"""Play the scenes: root prepares one, a user's process makes the early calls and the act, root reads what remains."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import shutil
import socket
import stat
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from tests.support.access_calls import ACTS, DIRECTORY, FD, FILE, GIVEN, KERNEL, LINK, NAME, PROC, PROGRAM, At
from tests.support.acls import ACCESS, DEFAULT, GROUP, GROUP_OBJ, MASK, NOBODY, OTHER, USER, USER_OBJ, acl
from tests.support.privileges import HE, MATE, OTHERS, PEOPLE, STRANGER, TEAM, Credentials

T = TypeVar("T")
Owner = tuple[int, int]
WEIGHTS = {"owner": 5, "owner in the team": 4, "team": 3, "team besides": 3, "stranger": 3, "root": 3}
"""Of people; of all others 1."""
OWNERS: Mapping[Owner, int] = MappingProxyType(
    {
        (HE, HE): 5, (HE, TEAM): 5, (OTHERS, TEAM): 3, (0, TEAM): 2, (0, 0): 2, (OTHERS, OTHERS): 2, (HE, 0): 1,
        (STRANGER, STRANGER): 1, (MATE, TEAM): 1, (MATE, HE): 1,
    }
)  # fmt: skip
FILE_MODES = {
    0o644: 4, 0o600: 3, 0o664: 3, 0o666: 2, 0o660: 2, 0o755: 2, 0o777: 2, 0o400: 1, 0o000: 1, 0o604: 1, 0o466: 1,
    0o711: 2, 0o4755: 2, 0o2755: 2, 0o2745: 1, 0o6777: 2, 0o4666: 1, 0o6766: 2, 0o2070: 1,
}  # fmt: skip
DIRECTORY_MODES = {
    0o755: 4, 0o777: 5, 0o1777: 4, 0o775: 2, 0o770: 2, 0o2775: 3, 0o3777: 2, 0o700: 1, 0o711: 1, 0o733: 1, 0o1770: 1,
    0o555: 1, 0o707: 1,
}  # fmt: skip
ACLS = {"": 8, "he rw": 2, "he none": 2, "he rwx, mask r": 2, "team rwx": 1, "team none": 1, "strangers rwx": 1}
"""The user that a named entry is for."""
EARLIER_CALLS = ("stat", "list", "read", "missing", "access", "attributes", "root's stat", "open")
CHANGES = {
    "none": 0,
    "f is root's": 3, "f is root's and closed": 2, "f is another's": 2, "f is his": 2, "f is the team's": 1,
    "f is closed": 2, "f is open": 2, "f is a set-ID program": 1, "f denies him": 1, "f lets him": 1,
    "f is replaced": 2, "f is away": 1, "f is gone": 1,
    "d is root's": 2, "d is root's and closed": 2, "d is sticky": 2, "d is open": 2, "d is his": 1, "d denies him": 1,
    "d is replaced": 1, "e is closed": 1,
}  # fmt: skip
BY = ": "
"""Between a user's name and the act, for a change that isn't root's."""
MEDDLING = tuple(
    name for name, act in ACTS.items() if NAME in act.by and act.reaches != KERNEL and name != "chown to nobody else"
)
"""What that is: not what can't be told from a write to come."""
BEFORE, AT_ONCE, LATER = "before he looked", "since he looked", "long since he looked"
DURING, AFTER = "while he acts", "when he has acted"
"""Not drawn: for races."""
AT_A_STROKE = frozenset(change for change in CHANGES if not change.endswith(("closed", "sticky", "him", "replaced")))
"""Changes of one system call."""


@dataclass(frozen=True, slots=True)
class AccessScene:
    """One combination. Modes and ACLs are as root set them at the beginning."""

    number: int
    person: str
    act: str
    by: str  # how f is named
    base: str  # how d is
    kind: str  # of f
    mode: int
    owner: Owner
    acl: str
    d_mode: int
    d_owner: Owner
    d_acl: str
    d_default: bool  # d has a default ACL
    e_mode: int
    e_owner: Owner
    g_owner: Owner
    umask: int
    earlier_calls: tuple[str, ...]
    is_made_behind: bool
    change: str
    when: str

    def __str__(self) -> str:
        calls = ", ".join(self.earlier_calls) or "nothing"
        return (
            f"scene {self.number}: {self.person}: {self.act}, f by {self.by}, d by {self.base}, umask {self.umask:o}; "
            f"f: {self.kind} {_format_rights(self.mode, self.owner, self.acl)}; "
            f"d: {_format_rights(self.d_mode, self.d_owner, self.d_acl)}{', default ACL' * self.d_default}; "
            f"e: {_format_rights(self.e_mode, self.e_owner)}; g: {_format_rights(0o644, self.g_owner)}; "
            f"made {'behind' if self.is_made_behind else 'through'} the mount; looked at: {calls}"
            + ("" if self.change == "none" else f"; {self.change}, {self.when}")
        )


def _format_rights(mode: int, owner: Owner, acl: str = "") -> str:
    return f"{mode:04o} {owner[0]}:{owner[1]}" + (f" ACL {acl}" if acl else "")


def draw(number: int, *, has_changes: bool, acts: Sequence[str] = ()) -> AccessScene:
    """The scene of that number, always the same one.

    has_changes  root always changes something; else a user does sometimes
    acts         that any user may do; none: all
    """
    rng = random.Random(number)
    act = rng.choice(acts or list(ACTS))
    of = ACTS[act]
    by = rng.choice(of.by)
    kind = rng.choice(of.kinds)
    modes = DIRECTORY_MODES if kind == DIRECTORY else FILE_MODES
    d_owner = _one_of(rng, OWNERS)
    people = {name: WEIGHTS.get(name, 1) for name in PEOPLE}
    change = _one_of(rng, {**CHANGES, "none": 0 if has_changes else 30})
    meddling = [one for one in MEDDLING if not acts or one in acts]
    if meddling and not has_changes and rng.random() < 0.4:
        change = f"{_one_of(rng, people)}{BY}{rng.choice(meddling)}"
    return AccessScene(
        number,
        person=_one_of(rng, people),
        act=act,
        by=by,
        base=rng.choice((NAME, NAME, FD, "cwd")),
        kind=kind,
        mode=_one_of(rng, modes),
        owner=_one_of(rng, OWNERS),
        acl=_one_of(rng, ACLS) if kind in (FILE, DIRECTORY) else "",
        d_mode=_one_of(rng, DIRECTORY_MODES),
        d_owner=d_owner,
        d_acl=_one_of(rng, ACLS) if rng.random() < 0.3 else "",
        d_default=rng.random() < 0.2,
        e_mode=_one_of(rng, DIRECTORY_MODES),
        e_owner=rng.choice((d_owner, d_owner, (0, 0))),
        g_owner=_one_of(rng, OWNERS),
        umask=rng.choice((0, 0o022, 0o027)),
        earlier_calls=tuple(rng.sample(EARLIER_CALLS, rng.randint(0, 4))),
        is_made_behind=rng.random() < 0.5,
        change=change,
        when=rng.choice((BEFORE, AT_ONCE, AT_ONCE, LATER)),
    )


def _one_of(rng: random.Random, weights: Mapping[T, int]) -> T:
    return rng.choices(list(weights), list(weights.values()))[0]


def acl_of(name: str, mode: int) -> bytes:
    """A file's ACL, its owner's and others' rights those of the mode."""
    entries = [(USER_OBJ, mode >> 6 & 7, NOBODY), (GROUP_OBJ, mode >> 3 & 7, NOBODY), (OTHER, mode & 7, NOBODY)]
    whose, _, how = name.rpartition(" ") if "," not in name else name.partition(",")[0].rpartition(" ")
    tag, gid = (GROUP, TEAM) if whose == "team" else (USER, STRANGER if whose == "strangers" else HE)
    rights = sum(bit for letter, bit in (("r", 4), ("w", 2), ("x", 1)) if how != "none" and letter in how)
    entries.append((tag, rights, gid))
    entries.append((MASK, 4 if name.endswith("mask r") else 7, NOBODY))
    return acl(*sorted(entries))


PAST_NS = 500_000_000 * 10**9
OLD_S = 1.1
"""After that nothing is believed any more that was told before, with coherence=shared."""
_NOTHING: Mapping[str, str] = MappingProxyType({})
_MESSAGE_BYTES = 1 << 20
_AT_ONCE = os.O_NONBLOCK | os.O_CLOEXEC


class Place(NamedTuple):
    """A directory as users see it, its backing directory, and the directory where root makes changes meanwhile."""

    mount_path: Path
    behind: Path
    changed: Path

    def of(self, scene: AccessScene) -> Place:
        name = f"s{scene.number}"
        return Place(self.mount_path / name, self.behind / name, self.changed / name)


class Came(NamedTuple):
    """The results of a scene."""

    early_results: tuple[str, ...]
    before: Mapping[str, str]  # the contents after the early calls, by path
    answer: str = ""
    left: Mapping[str, str] = _NOTHING
    shown: Mapping[str, str] = _NOTHING  # what root sees through the mount, where it isn't what is left


# What root does.


def prepare(scene: AccessScene, place: Place) -> None:
    top = place.behind if scene.is_made_behind else place.mount_path
    top.mkdir()
    d, e, f = top / "d", top / "e", top / "d/f"
    d.mkdir()
    e.mkdir()
    _make(scene, f)
    for g in (d / "g", e / "g"):
        g.write_bytes(b"g")
        os.chown(g, *scene.g_owner)
        g.chmod(0o644)
        os.utime(g, ns=(PAST_NS, PAST_NS))
    if scene.d_default:
        os.setxattr(d, DEFAULT, acl_of("he rwx, mask r", 0o775))
    for path, owner, mode, rwx in [(e, scene.e_owner, scene.e_mode, ""), (d, scene.d_owner, scene.d_mode, scene.d_acl)]:
        os.chown(path, *owner)
        path.chmod(mode)
        if rwx:
            os.setxattr(path, ACCESS, acl_of(rwx, mode))
        os.utime(path, ns=(PAST_NS, PAST_NS))


def _make(scene: AccessScene, f: Path) -> None:
    match scene.kind:
        case "file":
            if scene.act == "execute":
                shutil.copyfile(PROGRAM, f)
            else:
                f.write_bytes(b"f of him")
        case "directory":
            f.mkdir()
        case "link":
            f.symlink_to("g")
        case "fifo":
            os.mkfifo(f)
        case "device":
            os.mknod(f, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    os.chown(f, *scene.owner, follow_symlinks=False)
    if scene.kind != LINK:
        f.chmod(scene.mode)
    if scene.kind in (FILE, DIRECTORY):
        os.setxattr(f, "user.old", b"1")
        if scene.acl:
            os.setxattr(f, ACCESS, acl_of(scene.acl, scene.mode))
    os.utime(f, ns=(PAST_NS, PAST_NS), follow_symlinks=False)


def change(scene: AccessScene, top: Path) -> None:
    what, _, how = scene.change.partition(" ")
    path = {"f": top / "d/f", "d": top / "d", "e": top / "e"}[what]
    mode = path.lstat().st_mode & 0o7777
    match how:
        case "is root's":
            os.chown(path, 0, 0, follow_symlinks=False)
        case "is root's and closed":
            os.chown(path, 0, 0, follow_symlinks=False)
            _chmod(scene, path, 0o700)
        case "is another's":
            os.chown(path, OTHERS, OTHERS, follow_symlinks=False)
        case "is his":
            os.chown(path, HE, HE, follow_symlinks=False)
        case "is the team's":
            os.chown(path, -1, TEAM, follow_symlinks=False)
        case "is closed":
            _chmod(scene, path, 0)
        case "is open":
            _chmod(scene, path, 0o777)
        case "is sticky":
            os.chown(path, 0, 0)
            _chmod(scene, path, 0o1777)
        case "is a set-ID program":
            _chmod(scene, path, 0o6755)
        case "denies him" if scene.kind in (FILE, DIRECTORY) or what != "f":
            os.setxattr(path, ACCESS, acl_of("he none", mode & 0o700))
        case "lets him" if scene.kind in (FILE, DIRECTORY) or what != "f":
            os.setxattr(path, ACCESS, acl_of("he rwx", mode))
        case "is replaced":
            path.rename(top / "away")
            if what == "d":
                path.mkdir(0o755)
                path = path / "f"
            path.write_bytes(b"root's secret")
            path.chmod(0o600)
        case "is away":
            path.rename(top / "away")
        case "is gone":
            path.rmdir() if scene.kind == DIRECTORY else path.unlink()


def _chmod(scene: AccessScene, path: Path, mode: int) -> None:
    if path.name != "f" or scene.kind != LINK:
        path.chmod(mode)


def read_contents(top: Path, *, has_times: bool) -> dict[str, str]:
    """Return the attributes and contents of all files below a directory, by path: all that an act can change."""
    contents: dict[str, str] = {}
    _read_entry(top, ".", contents, has_times=has_times)
    return contents


def show(top: Path) -> dict[str, str]:
    """Return the mode, owner and size of all files below a directory, by path."""
    contents: dict[str, str] = {}
    _read_entry(top, ".", contents, has_times=None)
    return contents


def _read_entry(path: Path, name: str, contents: dict[str, str], *, has_times: bool | None) -> None:
    st = path.lstat()
    size = f", {st.st_size} bytes" if stat.S_ISREG(st.st_mode) else f", device {st.st_rdev}" * bool(st.st_rdev)
    contents[name] = f"{stat.filemode(st.st_mode)} {st.st_uid}:{st.st_gid}, {st.st_nlink} links{size}"
    if has_times is not None:
        contents[name] += _more(path, st, has_times=has_times)
    if stat.S_ISDIR(st.st_mode):
        for child in sorted(os.listdir(path)):
            _read_entry(path / child, f"{name}/{child}".removeprefix("./"), contents, has_times=has_times)


def _more(path: Path, st: os.stat_result, *, has_times: bool) -> str:
    times = [st.st_mtime_ns, *((st.st_atime_ns,) if has_times else ())]
    fields = [""]
    fields.append(" ".join("now" if ns > 2 * PAST_NS else "as before" if ns == PAST_NS else str(ns) for ns in times))
    names = sorted(os.listxattr(path, follow_symlinks=False))
    fields += [f"{one}={os.getxattr(path, one, follow_symlinks=False).hex()}" for one in names]
    if stat.S_ISREG(st.st_mode):
        fields.append(repr(path.read_bytes()[:20]))
    elif stat.S_ISLNK(st.st_mode):
        fields.append(f"to {os.readlink(path)}")
    return ", ".join(fields)


# What a user does, in a process of their own.


def _format_result(call: Callable[[], object]) -> str:
    """Call a function; return its result or its error as text."""
    try:
        return f"ok {result!r}" if (result := call()) is not None else "ok"
    except OSError as error:
        return error.strerror or str(error)
    except ValueError as error:  # there is nothing to map
        return str(error)


class _Actor:
    """A user's process, which keeps the fds that it opened until the end of a scene."""

    def __init__(self, person: Credentials) -> None:
        self._person = person
        self._held: dict[str, int] = {}
        self._stacks: dict[str, ExitStack] = {}

    def make_early_calls(self, scene: AccessScene, top: str, given: int) -> tuple[str, ...]:
        """Make the early calls of a scene, and open the fds that the act needs. Returns  the results as text"""
        stack = self._stacks[top] = ExitStack()
        d, f = top + "/d/", top + "/d/f"
        calls: dict[str, Callable[[], object]] = {
            "stat": lambda: os.lstat(f).st_uid,
            "list": lambda: sorted((one.name, one.stat(follow_symlinks=False).st_mode) for one in os.scandir(d)),
            "read": lambda: _read(f),
            "open": lambda: self._hold(stack, top + "open", os.open(f, os.O_RDONLY | _AT_ONCE)),
            "missing": lambda: os.lstat(d + "n").st_uid,
            "access": lambda: os.access(f, os.W_OK, effective_ids=True),
            "attributes": lambda: os.listxattr(f),
        }
        results = [_format_result(calls[one]) for one in scene.earlier_calls if one in calls]
        if scene.base != NAME:
            results.append(
                "d " + _format_result(lambda: self._hold(stack, top + "d", os.open(d, os.O_PATH | _AT_ONCE)))
            )
        if scene.by == GIVEN and given >= 0:
            self._hold(stack, top, given)
        elif scene.by == PROC:
            results.append("f " + _format_result(lambda: self._hold(stack, top, os.open(f, os.O_PATH | os.O_NOFOLLOW))))
        elif scene.by == FD:
            results.append("f " + _format_result(lambda: self._hold(stack, top, _open_somehow(f))))
        return tuple(results)

    def _hold(self, stack: ExitStack, key: str, fd: int) -> None:
        stack.callback(os.close, fd)
        self._held[key] = fd
        stack.callback(self._held.pop, key)

    def meddle(self, scene: AccessScene, top: str) -> str:
        """Make the change of a scene that another user makes meanwhile; return its result as text."""
        _, _, act = scene.change.partition(BY)
        return _format_result(lambda: ACTS[act].do(At(self._person, top + "/d/", top + "/e/", top + "/d/f")))

    def act(self, scene: AccessScene, top: str) -> str:
        with self._stacks.pop(top):
            d = top + "/d/"
            if scene.base != NAME:
                if top + "d" not in self._held:
                    return "no d"
                d = f"/proc/self/fd/{self._held[top + 'd']}/"
            fd = self._held.get(top, -1)
            if scene.by != NAME and fd < 0:
                return "no f"
            what: str | int = d + "f"
            if scene.by == PROC:
                what = f"/proc/self/fd/{fd}"
            elif scene.by != NAME:
                what = fd
            before = os.umask(scene.umask)
            try:
                return _format_result(lambda: ACTS[scene.act].do(At(self._person, d, top + "/e/", what, fd)))
            finally:
                os.umask(before)


def _read(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | _AT_ONCE)
    try:
        return os.read(fd, 3)
    finally:
        os.close(fd)


def _open_somehow(path: str) -> int:
    """For as much as the user may."""
    for flags in (os.O_RDWR, os.O_WRONLY):
        with contextlib.suppress(OSError):
            return os.open(path, flags | _AT_ONCE)
    return os.open(path, os.O_RDONLY | _AT_ONCE)


def _serve(person: Credentials, channel: socket.socket) -> None:
    person.be()
    actor = _Actor(person)
    while True:
        message, fds, _, _ = socket.recv_fds(channel, _MESSAGE_BYTES, 1)
        if not message:
            return
        step, scene, top = pickle.loads(message)
        match step:
            case "early calls":
                answer = actor.make_early_calls(scene, top, *(fds or [-1]))
            case "meddle":
                answer = (actor.meddle(scene, top),)
            case _:
                answer = (actor.act(scene, top),)
        channel.send(pickle.dumps(answer))


class Actors:
    """A process for each of the people that scenes have, as long as it is used."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._channels: dict[str, socket.socket] = {}

    def make_early_calls(self, scene: AccessScene, top: Path, given: int) -> tuple[str, ...]:
        """Have a process make the early calls of a scene; given: an fd of root's to pass to it, or -1."""
        return self._begin("early calls", scene.person, scene, top, given)()

    def meddle(self, scene: AccessScene, top: Path) -> tuple[str, ...]:
        """Have a process make the change of a scene; return its result."""
        return self._begin("meddle", scene.change.partition(BY)[0], scene, top)()

    def begin_act(self, scene: AccessScene, top: Path) -> Callable[[], str]:
        """Start the act; return a function that waits for the act and returns its result."""
        receive = self._begin("act", scene.person, scene, top)
        return lambda: receive()[0]

    def _begin(
        self, step: str, who: str, scene: AccessScene, top: Path, given: int = -1
    ) -> Callable[[], tuple[str, ...]]:
        channel = self._channels.get(who)
        if channel is None:
            channel = self._channels[who] = self._stack.enter_context(_process(PEOPLE[who]))
        message = pickle.dumps((step, scene, str(top)))
        socket.send_fds(channel, [message], [given] if given >= 0 else [])

        def receive() -> tuple[str, ...]:
            answer = channel.recv(_MESSAGE_BYTES)
            assert answer, f"{who} has died: {scene}"
            words: tuple[str, ...] = pickle.loads(answer)
            return words

        return receive


@contextmanager
def _process(person: Credentials) -> Iterator[socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        try:
            ours.close()
            _serve(person, theirs)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        os.waitpid(pid, 0)


# Both.


def play(
    scenes: Sequence[AccessScene], places: Sequence[Place], actors: Actors
) -> Iterator[tuple[AccessScene, list[Came]]]:
    """Every scene in all of the places, what came of it in their order; those of LATER end after all others.

    Nothing of them is left.
    """
    for place in places:
        place.behind.mkdir()
    late = []
    is_behind = any(place.changed != place.mount_path for place in places)
    for scene in scenes:
        begun = [begin(scene, place, actors) for place in places]
        if scene.when == LATER and is_behind:
            late.append((scene, begun))
        else:
            yield scene, [end(scene, *both, actors) for both in zip(places, begun, strict=True)]
    if late:
        time.sleep(OLD_S)
    for scene, begun in late:
        yield scene, [end(scene, *both, actors) for both in zip(places, begun, strict=True)]
    for place in places:
        shutil.rmtree(place.mount_path, ignore_errors=True)  # what was changed behind it may not be found
        shutil.rmtree(place.behind, ignore_errors=True)


def begin(scene: AccessScene, place: Place, actors: Actors) -> Came:
    """All but the act."""
    at = place.of(scene)
    prepare(scene, at)
    meddled = _changed(scene, at, actors) if scene.when == BEFORE else ()
    if "root's stat" in scene.earlier_calls:
        for path in (at.mount_path / "d/f", at.mount_path / "d", at.mount_path / "e"):
            with contextlib.suppress(OSError):
                path.lstat()
    given = -1
    if scene.by == GIVEN:
        with contextlib.suppress(OSError):
            given = os.open(at.mount_path / "d/f", (os.O_RDONLY if scene.kind == DIRECTORY else os.O_RDWR) | _AT_ONCE)
    early_results = actors.make_early_calls(scene, at.mount_path, given)
    if given >= 0:
        os.close(given)
    if scene.when in (AT_ONCE, LATER):
        meddled = _changed(scene, at, actors)
    return Came(meddled + early_results, read_contents(at.behind, has_times=ACTS[scene.act].sets_times))


def _changed(scene: AccessScene, at: Place, actors: Actors) -> tuple[str, ...]:
    """Make the change of a scene; return the result if a user made it, nothing if root did."""
    if BY in scene.change:
        return actors.meddle(scene, at.changed)
    if scene.change != "none":
        change(scene, at.changed)
    return ()


def end(scene: AccessScene, place: Place, begun: Came, actors: Actors) -> Came:
    """The act; and root's change at the same time, or after it, if it is to be so."""
    at = place.of(scene)
    receive = actors.begin_act(scene, at.mount_path)
    if scene.when == AFTER:
        receive = partial(str, receive())
    if scene.when in (DURING, AFTER):
        with contextlib.suppress(FileNotFoundError):  # it has another name by now, or none
            change(scene, at.changed)
    answer = receive()
    left = read_contents(at.behind, has_times=ACTS[scene.act].sets_times)
    if at.changed != at.mount_path or at.mount_path == at.behind:
        return begun._replace(answer=answer, left=left)
    shown = show(at.mount_path)
    unlike = {path: how for path, how in shown.items() if not left.get(path, "").startswith(how)}
    return begun._replace(answer=answer, left=left, shown={**unlike, **dict.fromkeys(left.keys() - shown.keys(), "-")})
