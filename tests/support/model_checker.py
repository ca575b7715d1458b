"""A filesystem of a server, and all that may happen to the calls of its clients: for a model that is explored whole.

A client sends one call at a time. It takes effect, and is answered; or it takes effect and the answer is lost (the
client is told EIO); or it is told EIO first, and it takes effect at any later time, or never; or it is answered and
takes effect once more later, as a call that was sent again. A client may stop for good, or for any time, between two
calls: nothing orders what different clients do. A look may tell what was true at first, of a directory that the client
itself has not changed since.

What is explored is each order of all that; a state that was met is not explored again.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

Answer = str
"""What a call is told: an object's name, "ok", "none", or an errno's name in capitals."""
Program = Generator["Call", Answer, None]


class Call(NamedTuple):
    """One call: what, and its words. Directories are given as objects, as by an fd: wherever they are."""

    what: str
    words: tuple[str, ...]

    @property
    def directories(self) -> tuple[str, ...]:
        """In which it happens."""
        return self.words[:3:2] if self.what == "rename" else self.words[:1]


class ModelDisk(NamedTuple):
    """The server's state.

    names    of each directory that is there: what its names mean; sorted
    removed  directories that are not any more: nothing gets a name in them
    """

    names: tuple[tuple[str, tuple[tuple[str, str], ...]], ...]
    removed: frozenset[str] = frozenset()

    def of(self, directory: str) -> dict[str, str] | None:
        """The names in a directory; None if it is none, or not any more."""
        return next((dict(inside) for one, inside in self.names if one == directory), None)

    def with_names(self, changed: Mapping[str, Mapping[str, str] | None]) -> ModelDisk:
        """The state after a change. None: that directory is no more."""
        all_names = dict(self.names)
        for directory, inside in changed.items():
            if inside is None:
                del all_names[directory]
            else:
                all_names[directory] = tuple(sorted(inside.items()))
        gone = [directory for directory, inside in changed.items() if inside is None]
        return ModelDisk(tuple(sorted(all_names.items())), self.removed.union(gone))

    def place_of(self, thing: str) -> tuple[str, str] | None:
        """Directory and name that a thing has; None if it has none."""
        return next(((one, name) for one, inside in self.names for name, has in inside if has == thing), None)

    def is_below(self, thing: str, top: str = "/") -> bool:
        """Whether it is that directory, or a way leads to it from there."""
        while thing != top:
            place = self.place_of(thing)
            if place is None:
                return False
            thing = place[0]
        return True


def disk_of(tree: Mapping[str, Mapping[str, str]]) -> ModelDisk:
    return ModelDisk(()).with_names(tree)


def effect(disk: ModelDisk, call: Call) -> tuple[ModelDisk, Answer]:
    """What a call does, as POSIX has it."""
    return _EFFECTS[call.what](disk, *call.words)


def _read_name(disk: ModelDisk, directory: str, name: str) -> tuple[ModelDisk, Answer]:
    inside = disk.of(directory)
    return disk, "ENOENT" if inside is None else inside.get(name, "none")


def _list(disk: ModelDisk, directory: str) -> tuple[ModelDisk, Answer]:
    inside = disk.of(directory)
    return disk, "ENOENT" if inside is None else " ".join(sorted(inside))


def _make(disk: ModelDisk, directory: str, name: str, thing: str) -> tuple[ModelDisk, Answer]:
    """A file, whose content is what it is called."""
    inside = disk.of(directory)
    if inside is None:
        return disk, "ENOENT"
    if name in inside:
        return disk, "EEXIST"
    return disk.with_names({directory: {**inside, name: thing}}), thing


def _mkdir(disk: ModelDisk, directory: str, name: str, thing: str) -> tuple[ModelDisk, Answer]:
    while disk.of(thing) is not None or thing in disk.removed:
        thing += "'"  # sent again, it makes another
    made, answer = _make(disk, directory, name, thing)
    return (disk, answer) if made is disk else (made.with_names({thing: {}}), answer)


def _unlink(disk: ModelDisk, directory: str, name: str) -> tuple[ModelDisk, Answer]:
    inside = disk.of(directory)
    if inside is None or name not in inside:
        return disk, "ENOENT"
    if disk.of(inside[name]) is not None:
        return disk, "EISDIR"
    del inside[name]
    return disk.with_names({directory: inside}), "ok"


def _rmdir(disk: ModelDisk, directory: str, name: str) -> tuple[ModelDisk, Answer]:
    inside = disk.of(directory)
    if inside is None or name not in inside:
        return disk, "ENOENT"
    lower = disk.of(inside[name])
    if lower is None:
        return disk, "ENOTDIR"
    if lower:
        return disk, "ENOTEMPTY"
    gone = inside.pop(name)
    return disk.with_names({directory: inside, gone: None}), "ok"


def _rename(disk: ModelDisk, old_dir: str, old: str, new_dir: str, new: str, how: str = "") -> tuple[ModelDisk, Answer]:
    """how: empty, `free` (RENAME_NOREPLACE) or `exchange`"""
    source, target = disk.of(old_dir), disk.of(new_dir)
    if source is None or target is None or old not in source:
        return disk, "ENOENT"
    thing, there = source[old], target.get(new)
    if disk.is_below(new_dir, thing) or (how == "exchange" and there and disk.is_below(old_dir, there)):
        return disk, "EINVAL"
    if how == "exchange":
        if there is None:
            return disk, "ENOENT"
        both = {old_dir: source, new_dir: target} if old_dir != new_dir else {old_dir: source}
        both[old_dir][old], both[new_dir][new] = there, thing
        return disk.with_names(both), "ok"
    replaced: dict[str, None] = {}
    if there is not None:
        if how == "free":
            return disk, "EEXIST"
        lower = disk.of(there)
        if (lower is None) != (disk.of(thing) is None):
            return disk, "ENOTDIR"
        if lower:
            return disk, "ENOTEMPTY"
        if lower is not None:
            replaced = {there: None}
    del source[old]
    if old_dir == new_dir:
        source[new] = thing
        return disk.with_names({old_dir: source, **replaced}), "ok"
    target[new] = thing
    return disk.with_names({old_dir: source, new_dir: target, **replaced}), "ok"


_EFFECTS: dict[str, Callable[..., tuple[ModelDisk, Answer]]] = {
    "look": _read_name,
    "list": _list,
    "make": _make,
    "mkdir": _mkdir,
    "unlink": _unlink,
    "rmdir": _rmdir,
    "rename": _rename,
}
_READ_CALLS = ("look", "list")


class Faults(NamedTuple):
    """How many of each may happen in one history, beside that clients stop whenever they like."""

    lost: int = 0
    late: int = 0
    twice: int = 0
    stale: int = 0

    def less(self, name: str) -> Faults:
        return self._replace(**{name: getattr(self, name) - 1})


class Loss(Exception):
    """A history after which something is lost that must not be: the calls, one a line, and at last what is lost."""


State = tuple[int, ...]
"""Where a history has come to, by numbers: the server's disk, what is on its way, the faults that may happen still, and
where the program of each client is.
"""


class _Point(NamedTuple):
    """Where a program is: what it sends next (None: it has ended), and one way of answers that leads there.

    changed  the words of its calls that change something: of these directories its cache has nothing old
    """

    client: int
    call: Call | None
    answers: tuple[Answer, ...] = ()
    changed: frozenset[str] = frozenset()


class _Step(NamedTuple):
    """What a call may come to, by numbers as in a state.

    sent  the call, if it takes effect later
    """

    words: str
    disk: int
    point: int
    left: int
    sent: Call | None = None


T = TypeVar("T")


class _Numbered(Generic[T]):
    """Things that have a number each."""

    def __init__(self) -> None:
        self.all: list[T] = []
        self._numbers: dict[object, int] = {}

    def number(self, thing: T, key: object = None) -> int:
        """The thing's; things with the same key are one."""
        number = self._numbers.setdefault(thing if key is None else key, len(self.all))
        if number == len(self.all):
            self.all.append(thing)
        return number


class Explorer:
    """All histories of some clients, the shortest first."""

    def __init__(
        self,
        programs: Sequence[Callable[[], Program]],
        disk: ModelDisk,
        faults: Faults,
        why_lost: Callable[[ModelDisk, ModelDisk], str],
        afterwards: Sequence[Callable[[], Program]] = (),
        why_stuck: Callable[[ModelDisk], str] = lambda _: "",
    ) -> None:
        """Begin.

        why_lost    told a disk, and what it became by one call; what is lost by that, or ""
        afterwards  who come, one after the other, if all stop now and nothing that is on its way arrives
        why_stuck   told what these leave; what is wrong with it
        """
        self._programs = [*programs, *afterwards]
        self._afterwards = range(len(programs), len(self._programs))
        self._why_lost = why_lost
        self._why_stuck = why_stuck
        self._disks: _Numbered[ModelDisk] = _Numbered()
        self._ways: _Numbered[tuple[Call, ...]] = _Numbered()
        self._faults: _Numbered[Faults] = _Numbered()
        self._points: _Numbered[_Point] = _Numbered()
        self._effects: dict[tuple[int, Call], tuple[int, Answer]] = {}
        self._after: dict[tuple[int, Answer], int] = {}
        self._steps: dict[tuple[int, int, int], list[_Step]] = {}
        self._arrivals: dict[tuple[int, int], list[tuple[str, int, int]]] = {}
        self._ways_with: dict[tuple[int, int, Call | None], int] = {}
        self._runs: dict[tuple[int, int], int] = {}
        self._has_stale = faults.stale > 0
        points = [self._point(client, ()) for client in range(len(programs))]
        self._begins = [self._point(client, ()) for client in self._afterwards]
        self._first: State = (self._disks.number(disk), self._ways.number(()), self._faults.number(faults), *points)

    def explore(self) -> int:
        """How many states there are. Raises  Loss, with a shortest history that leads to one"""
        came_from: dict[State, State] = {self._first: self._first}
        todo = deque([self._first])
        fine: set[tuple[int, int]] = set()
        while todo:
            state = todo.popleft()
            for _, new in self._next(state):
                if (change := (state[0], new[0])) not in fine and new[0] != state[0]:
                    if why := self._why(*change):
                        raise Loss("\n".join([*self._history(state, came_from), self._words_of(state, new), why]))
                    fine.add(change)
                if new not in came_from:
                    came_from[new] = state
                    todo.append(new)
        return len(came_from)

    def _history(self, state: State, came_from: Mapping[State, State]) -> list[str]:
        words: list[str] = []
        while state != self._first:
            words.append(self._words_of(came_from[state], state))
            state = came_from[state]
        return words[::-1]

    def _words_of(self, state: State, new: State) -> str:
        return next(words for words, one in self._next(state) if one == new)

    def _why(self, before: int, after: int) -> str:
        if why := self._why_lost(self._disks.all[before], self._disks.all[after]):
            return why
        disk = after
        for begin in self._begins:
            disk = self._finish_alone(disk, begin)
        return self._why_stuck(self._disks.all[disk])

    def _finish_alone(self, disk: int, point: int) -> int:
        """Run a client from there to its end, with no other client and no faults; return the disk."""
        key = (disk, point)
        if key not in self._runs:
            call = self._points.all[point].call
            if call is not None:
                disk, answer = self._effect(disk, call)
                disk = self._finish_alone(disk, self._point_after(point, answer))
            self._runs[key] = disk
        return self._runs[key]

    def _next(self, state: State) -> Iterator[tuple[str, State]]:
        disk, way, left, *points = state
        for words, new_disk, new_way in self._arriving(disk, way):
            yield words, (new_disk, new_way, left, *points)
        for client, point in enumerate(points):
            for step in self._steps_of(disk, point, left):
                points[client] = step.point
                yield step.words, (step.disk, self._way_with(step.disk, way, step.sent), step.left, *points)
            points[client] = point

    def _arriving(self, disk: int, way: int) -> list[tuple[str, int, int]]:
        """What takes effect late: words, the disk after it, and what is on its way still."""
        if (disk, way) not in self._arrivals:
            calls = self._ways.all[way]
            arrivals = self._arrivals[disk, way] = []
            for number, call in enumerate(calls):
                new_disk, answer = self._effect(disk, call)
                rest = calls[:number] + calls[number + 1 :]
                arrivals.append((f"late: {_words(call)} -> {answer}", new_disk, self._way(new_disk, rest)))
        return self._arrivals[disk, way]

    def _way_with(self, disk: int, way: int, sent: Call | None) -> int:
        if not way and sent is None:
            return way
        key = (disk, way, sent)
        if key not in self._ways_with:
            calls = self._ways.all[way]
            self._ways_with[key] = self._way(disk, calls if sent is None else (*calls, sent))
        return self._ways_with[key]

    def _way(self, disk: int, calls: tuple[Call, ...]) -> int:
        """What is on its way; what is to happen in a removed directory never will."""
        removed = self._disks.all[disk].removed
        return self._ways.number(tuple(sorted(call for call in calls if removed.isdisjoint(call.directories))))

    def _steps_of(self, disk: int, point: int, left: int) -> list[_Step]:
        key = (disk, point, left)
        if key not in self._steps:
            call = self._points.all[point].call
            self._steps[key] = [] if call is None else list(self._sent(disk, point, call, left))
        return self._steps[key]

    def _sent(self, disk: int, point: int, call: Call, left: int) -> Iterator[_Step]:
        client, _, _, changed = self._points.all[point]
        who = f"{self._programs[client].__name__}: {_words(call)}"
        new, answer = self._effect(disk, call)
        yield _Step(f"{who} -> {answer}", new, self._point_after(point, answer), left)
        faults = self._faults.all[left]

        def less(name: str) -> int:
            return self._faults.number(faults.less(name))

        if call.what in _READ_CALLS:
            was_there = self._disks.all[0].of(call.words[0]) is not None
            if faults.stale and was_there and call.words[0] not in changed:
                old = self._effect(0, call)[1]
                if old != answer:
                    yield _Step(
                        f"{who} -> {answer}, told {old} (stale)", new, self._point_after(point, old), less("stale")
                    )
            return
        if faults.lost and new != disk:
            yield _Step(f"{who} -> {answer}, told EIO (lost)", new, self._point_after(point, "EIO"), less("lost"))
        if faults.late:
            yield _Step(f"{who}, told EIO (late)", disk, self._point_after(point, "EIO"), less("late"), call)
        if faults.twice and new != disk:
            yield _Step(f"{who} -> {answer}, sent again", new, self._point_after(point, answer), less("twice"), call)

    def _effect(self, disk: int, call: Call) -> tuple[int, Answer]:
        if (disk, call) not in self._effects:
            new, answer = effect(self._disks.all[disk], call)
            self._effects[disk, call] = self._disks.number(new), answer
        return self._effects[disk, call]

    def _point_after(self, point: int, answer: Answer) -> int:
        """Return where a client is when its call got that answer."""
        if (point, answer) not in self._after:
            client, _, answers, _ = self._points.all[point]
            self._after[point, answer] = self._point(client, (*answers, answer))
        return self._after[point, answer]

    def _point(self, client: int, answers: tuple[Answer, ...]) -> int:
        """Where a client is after those answers: two ways to the same place with the same variables are one."""
        program = self._programs[client]()
        changed: set[str] = set()
        try:
            call = next(program)
            for answer in answers:
                if self._has_stale and call.what not in _READ_CALLS:
                    changed.update(call.words)
                call = program.send(answer)
        except StopIteration:
            return self._points.number(_Point(client, None), (client,))
        point = _Point(client, call, answers, frozenset(changed))
        return self._points.number(point, (client, point.changed, *_frames(program)))


def _frames(program: Program) -> Iterator[object]:
    """Where a program is, and what its variables are: they must be all that it goes on with."""
    at: Any = program
    while at is not None and at.gi_frame is not None:
        if any(isinstance(one, Iterator) and not isinstance(one, Generator) for one in gc.get_referents(at)):
            raise TypeError(f"{at.__qualname__} goes through what no variable has: `while todo: todo.pop(0)`")
        yield at.gi_frame.f_lasti
        yield repr(
            sorted((name, value) for name, value in at.gi_frame.f_locals.items() if not isinstance(value, Generator))
        )
        at = at.gi_yieldfrom


def _words(call: Call) -> str:
    return " ".join((call.what, *call.words))


def run_alone(disk: ModelDisk, program: Program, n_calls: int) -> ModelDisk:
    """The disk after so many calls of a client that is alone, and killed then."""
    answer = None
    for _ in range(n_calls):
        try:
            call = next(program) if answer is None else program.send(answer)
        except StopIteration:
            break
        disk, answer = effect(disk, call)
    return disk
