"""The scenes of the battery, acted: root prepares them, a user's process looks and acts, root sees what is left."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import socket
import stat
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from tests.support.access_calls import ACTS, DIRECTORY, FD, FILE, GIVEN, LINK, NAME, PROC, PROGRAM, At
from tests.support.access_cases import AFTER, AT_ONCE, BEFORE, BY, DURING, LATER, AccessScene, acl_of
from tests.support.acls import ACCESS, DEFAULT
from tests.support.privileges import HE, OTHERS, PEOPLE, TEAM, Credentials

PAST_NS = 500_000_000 * 10**9
OLD_S = 1.1
"""After that nothing is believed any more that was told before, with coherence=shared."""
_NOTHING: Mapping[str, str] = MappingProxyType({})
_MESSAGE_BYTES = 1 << 20
_AT_ONCE = os.O_NONBLOCK | os.O_CLOEXEC


class Place(NamedTuple):
    """A directory as people use it, as it is behind that, and where root changes something meanwhile."""

    seen: Path
    behind: Path
    changed: Path

    def of(self, scene: AccessScene) -> Place:
        name = f"s{scene.number}"
        return Place(self.seen / name, self.behind / name, self.changed / name)


class Came(NamedTuple):
    """What came of a scene."""

    looked: tuple[str, ...]
    before: Mapping[str, str]  # what was there at the end of that, by path
    answer: str = ""
    left: Mapping[str, str] = _NOTHING
    shown: Mapping[str, str] = _NOTHING  # what root sees through the mount, where it isn't what is left


# What root does.


def prepare(scene: AccessScene, place: Place) -> None:
    top = place.behind if scene.is_made_behind else place.seen
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
    for path, owner, mode, acl in ((e, scene.e_owner, scene.e_mode, ""), (d, scene.d_owner, scene.d_mode, scene.d_acl)):
        os.chown(path, *owner)
        path.chmod(mode)
        if acl:
            os.setxattr(path, ACCESS, acl_of(acl, mode))
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


def look(top: Path, *, has_times: bool) -> dict[str, str]:
    """What is there: everything that may have been changed."""
    found: dict[str, str] = {}
    _look_at(top, ".", found, has_times=has_times)
    return found


def show(top: Path) -> dict[str, str]:
    """How it begins, for all who may see it: its owner, and what that user may."""
    found: dict[str, str] = {}
    _look_at(top, ".", found, has_times=None)
    return found


def _look_at(path: Path, name: str, found: dict[str, str], *, has_times: bool | None) -> None:
    st = path.lstat()
    size = f", {st.st_size} bytes" if stat.S_ISREG(st.st_mode) else f", device {st.st_rdev}" * bool(st.st_rdev)
    found[name] = f"{stat.filemode(st.st_mode)} {st.st_uid}:{st.st_gid}, {st.st_nlink} links{size}"
    if has_times is not None:
        found[name] += _more(path, st, has_times=has_times)
    if stat.S_ISDIR(st.st_mode):
        for child in sorted(os.listdir(path)):
            _look_at(path / child, f"{name}/{child}".removeprefix("./"), found, has_times=has_times)


def _more(path: Path, st: os.stat_result, *, has_times: bool) -> str:
    times = [st.st_mtime_ns, *((st.st_atime_ns,) if has_times else ())]
    told = [""]
    told.append(" ".join("now" if ns > 2 * PAST_NS else "as before" if ns == PAST_NS else str(ns) for ns in times))
    names = sorted(os.listxattr(path, follow_symlinks=False))
    told += [f"{one}={os.getxattr(path, one, follow_symlinks=False).hex()}" for one in names]
    if stat.S_ISREG(st.st_mode):
        told.append(repr(path.read_bytes()[:20]))
    elif stat.S_ISLNK(st.st_mode):
        told.append(f"to {os.readlink(path)}")
    return ", ".join(told)


# What a user does, in a process of their own.


def _said(call: Callable[[], object]) -> str:
    """An answer, or an error, in words."""
    try:
        return f"ok {result!r}" if (result := call()) is not None else "ok"
    except OSError as error:
        return error.strerror or str(error)
    except ValueError as error:  # there is nothing to map
        return str(error)


class _Actor:
    """A user's process, which keeps what it opened to the end of a scene."""

    def __init__(self, person: Credentials) -> None:
        self._person = person
        self._held: dict[str, int] = {}
        self._stacks: dict[str, ExitStack] = {}

    def look(self, scene: AccessScene, top: str, given: int) -> tuple[str, ...]:
        """Look at what there is, and hold what the act is to be done by."""
        stack = self._stacks[top] = ExitStack()
        d, f = top + "/d/", top + "/d/f"
        looks: dict[str, Callable[[], object]] = {
            "stat": lambda: os.lstat(f).st_uid,
            "list": lambda: sorted((one.name, one.stat(follow_symlinks=False).st_mode) for one in os.scandir(d)),
            "read": lambda: _read(f),
            "open": lambda: self._hold(stack, top + "open", os.open(f, os.O_RDONLY | _AT_ONCE)),
            "missing": lambda: os.lstat(d + "n").st_uid,
            "access": lambda: os.access(f, os.W_OK, effective_ids=True),
            "attributes": lambda: os.listxattr(f),
        }
        told = [_said(looks[one]) for one in scene.looks if one in looks]
        if scene.base != NAME:
            told.append("d " + _said(lambda: self._hold(stack, top + "d", os.open(d, os.O_PATH | _AT_ONCE))))
        if scene.by == GIVEN and given >= 0:
            self._hold(stack, top, given)
        elif scene.by == PROC:
            told.append("f " + _said(lambda: self._hold(stack, top, os.open(f, os.O_PATH | os.O_NOFOLLOW))))
        elif scene.by == FD:
            told.append("f " + _said(lambda: self._hold(stack, top, _open_somehow(f))))
        return tuple(told)

    def _hold(self, stack: ExitStack, key: str, fd: int) -> None:
        stack.callback(os.close, fd)
        self._held[key] = fd
        stack.callback(self._held.pop, key)

    def meddle(self, scene: AccessScene, top: str) -> str:
        """What a process is told that changes something meanwhile."""
        _, _, act = scene.change.partition(BY)
        return _said(lambda: ACTS[act].do(At(self._person, top + "/d/", top + "/e/", top + "/d/f")))

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
                return _said(lambda: ACTS[scene.act].do(At(self._person, d, top + "/e/", what, fd)))
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
            case "look":
                answer = actor.look(scene, top, *(fds or [-1]))
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

    def look(self, scene: AccessScene, top: Path, given: int) -> tuple[str, ...]:
        """How a process looks at things; given: an fd of root's for it, or -1."""
        return self._begin("look", scene.person, scene, top, given)()

    def meddle(self, scene: AccessScene, top: Path) -> tuple[str, ...]:
        """What a process is told that changes something."""
        return self._begin("meddle", scene.change.partition(BY)[0], scene, top)()

    def begin_act(self, scene: AccessScene, top: Path) -> Callable[[], str]:
        """Let it act; what waits for it, and returns what it is told."""
        told = self._begin("act", scene.person, scene, top)
        return lambda: told()[0]

    def _begin(
        self, step: str, who: str, scene: AccessScene, top: Path, given: int = -1
    ) -> Callable[[], tuple[str, ...]]:
        channel = self._channels.get(who)
        if channel is None:
            channel = self._channels[who] = self._stack.enter_context(_process(PEOPLE[who]))
        message = pickle.dumps((step, scene, str(top)))
        socket.send_fds(channel, [message], [given] if given >= 0 else [])

        def told() -> tuple[str, ...]:
            answer = channel.recv(_MESSAGE_BYTES)
            assert answer, f"{who} has died: {scene}"
            words: tuple[str, ...] = pickle.loads(answer)
            return words

        return told


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
    is_behind = any(place.changed != place.seen for place in places)
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
        shutil.rmtree(place.seen, ignore_errors=True)  # what was changed behind it may not be found
        shutil.rmtree(place.behind, ignore_errors=True)


def begin(scene: AccessScene, place: Place, actors: Actors) -> Came:
    """All but the act."""
    at = place.of(scene)
    prepare(scene, at)
    meddled = _changed(scene, at, actors) if scene.when == BEFORE else ()
    if "root's stat" in scene.looks:
        for path in (at.seen / "d/f", at.seen / "d", at.seen / "e"):
            with contextlib.suppress(OSError):
                path.lstat()
    given = -1
    if scene.by == GIVEN:
        with contextlib.suppress(OSError):
            given = os.open(at.seen / "d/f", (os.O_RDONLY if scene.kind == DIRECTORY else os.O_RDWR) | _AT_ONCE)
    looked = actors.look(scene, at.seen, given)
    if given >= 0:
        os.close(given)
    if scene.when in (AT_ONCE, LATER):
        meddled = _changed(scene, at, actors)
    return Came(meddled + looked, look(at.behind, has_times=ACTS[scene.act].sets_times))


def _changed(scene: AccessScene, at: Place, actors: Actors) -> tuple[str, ...]:
    """What a process is told that changes something, if it isn't root's."""
    if BY in scene.change:
        return actors.meddle(scene, at.changed)
    if scene.change != "none":
        change(scene, at.changed)
    return ()


def end(scene: AccessScene, place: Place, begun: Came, actors: Actors) -> Came:
    """The act; and root's change at the same time, or after it, if it is to be so."""
    at = place.of(scene)
    told = actors.begin_act(scene, at.seen)
    if scene.when == AFTER:
        told = partial(str, told())
    if scene.when in (DURING, AFTER):
        with contextlib.suppress(FileNotFoundError):  # it has another name by now, or none
            change(scene, at.changed)
    answer = told()
    left = look(at.behind, has_times=ACTS[scene.act].sets_times)
    if at.changed != at.seen or at.seen == at.behind:
        return begun._replace(answer=answer, left=left)
    shown = show(at.seen)
    unlike = {path: how for path, how in shown.items() if not left.get(path, "").startswith(how)}
    return begun._replace(answer=answer, left=left, shown={**unlike, **dict.fromkeys(left.keys() - shown.keys(), "-")})
