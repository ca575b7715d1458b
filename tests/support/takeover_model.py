"""The store's transactions off local filesystems as a model, for `model_checker`: each call that a server sees.

Locks, leases and beats are left out, as if they never told the truth: a watcher may take a container over at any time.
What keeps live files is the order of the calls alone. Loops go through lists that they empty: what a program goes on
with must be in its variables.

V is the victim, `va` the file in it; F the fresh directory; U what somebody makes who finds the name missing, `uf` his
file. Whose directory it is that has a name is known as in the store: the record has the identities of V and F.
A is the container that has V; where root seizes it from a quarantine, A is the victim of root's own container R.

Whose process does a call makes no other difference: root's service works through a child of the owner's, whose calls
these are, and that it is the owner who is asked is the filesystem's to say.
"""

from collections.abc import Callable, Generator, Iterator, Mapping
from typing import NamedTuple

from tests.support.model_checker import Answer, Call, ModelDisk, Program, disk_of

STATES = ("stage", "orphans", "restoring", "reaping", "quarantine")
_N_TRIES = 4
_NONE = ("none", "ENOENT")
Steps = Generator[Call, Answer, str]


class Rules(NamedTuple):
    """What the store keeps to, and what happens without it.

    moves        what is taken over goes into a new container, not the container to another name; or else the old owner,
                 who has it open, leaves the victim in a transfer directory of a container whose record
                 is gone
    transfers    what others can see is renamed from or to a directory of its own, which is removed before anything is
                 decided by what is found; or else a late exchange puts the victim into a container that was given up
    in_turn      a takeover that ended half way is taken over, what lies in its own old container, too; or else the
                 victim stays there, and no record tells of it
    exclusive    a name that is missing is taken by mkdir before the fresh directory goes there; or else that replaces
                 what somebody made since the look
    by_identity  only the victim becomes `tree`, what is neither it nor fresh an orphan of its own; or else somebody's
                 directory is removed as if it were fresh
    one_way      what was in reaping/ is never given back, from quarantine neither; or else a reaper who has it open
                 deletes what is in view
    rechecks     a reaper reads the record again after its claim, and a process that pins an orphan finds out again
                 where it is; or else an orphan that was kept is deleted
    """

    moves: bool = True
    transfers: bool = True
    in_turn: bool = True
    exclusive: bool = True
    by_identity: bool = True
    one_way: bool = True
    rechecks: bool = True


def volume(state: str = "") -> ModelDisk:
    """A volume: the victim V with the file `va` in it is at P/job, or a container A of that state has it."""
    tree: dict[str, Mapping[str, str]] = {one: {} for one in STATES}
    tree |= {"/": {"P": "P", "store": "store"}, "store": {one: one for one in STATES}, "V": {"va": "va"}, "P": {}}
    if not state:
        return disk_of({**tree, "P": {"job": "V"}})
    return disk_of({**tree, "P": {"job": "F"}, "F": {}, state: {"id": "A"}, "A": {"record": "record", "tree": "V"}})


def _rename(old_dir: str, old: str, new_dir: str, new: str, how: str = "") -> Call:
    return Call("rename", (old_dir, old, new_dir, new, how))


def _call(what: str, *words: str) -> Call:
    return Call(what, words)


def _victim_of(box: str) -> str:
    """Whose place is `tree` in a container: what its record says."""
    return "A" if box[0] == "R" else "V"


def _is_fresh(thing: str) -> bool:
    return thing[0] in "FE"


class Container(NamedTuple):
    """One that a client works with: the state, its name there, and its directory, open."""

    state: str
    name: str
    box: str


def _dissolve(one: Container) -> Steps:
    yield _call("unlink", one.box, "record")
    return (yield _call("rmdir", one.state, one.name))


# The two fences.


def _listed(directory: str) -> Generator[Call, Answer, tuple[list[str], list[str]]]:
    """What a directory has, but for its old container and its record; and the transfer directories in it."""
    names = [name for name in (yield _call("list", directory)).split() if name not in ("ENOENT", "old")]
    return [name for name in names if name[:4] != "gate" and name[:6] != "record"], [
        name for name in names if name[:4] == "gate"
    ]


def _move_part(lower: str, part: str, box: str, rules: Rules) -> Steps:
    """Move what a directory has to a container, the victim as `tree`. What is neither it nor fresh came a second time,
    or late, and is somebody's; so may be what has its name there already: these get names of their own.
    """
    to = part
    if rules.by_identity:
        thing = yield _call("look", lower, part)
        if thing in _NONE:
            return "ok"
        to = "tree" if thing == _victim_of(box) else part if _is_fresh(thing) else f"late-{lower}-{part}"
        del thing
    while (there := (yield _call("look", box, to))) not in _NONE:
        to = f"late-{lower}-{part}" if to[:4] != "late" else to + "'"
    return "lost" if there == "ENOENT" else (yield _rename(lower, part, box, to))


def _move_parts(lower: str, parts: list[str], box: str, rules: Rules) -> Steps:
    while parts:
        if (yield from _move_part(lower, parts.pop(0), box, rules)) == "lost":
            return "lost"
    return "ok"


def empty_into(lower: str, upper: str, name: str, box: str, rules: Rules) -> Steps:
    """Move all that is in a directory into a container, and remove it; "ok" when it is no more.

    lower  the directory, which has that name in `upper`; transfer directories in it are emptied after it: their
           contents arrived later
    """
    tries = _N_TRIES
    while tries:
        tries -= 1
        parts, transfers = yield from _listed(lower)
        if (yield from _move_parts(lower, parts, box, rules)) != "ok":
            return "kept"
        while transfers:
            if (yield from _remove_transfer_directory(lower, transfers.pop(0), box, rules)) != "ok":
                return "kept"
        if name[:4] != "gate":
            yield _call("unlink", lower, "record.new")
            yield _call("unlink", lower, "record")
        if (yield _call("rmdir", upper, name)) in ("ok", "ENOENT"):
            return "ok"
    return "kept"


def _remove_transfer_directory(lower: str, name: str, box: str, rules: Rules) -> Steps:
    transfer = yield _call("look", lower, name)
    return "ok" if transfer in _NONE else (yield from empty_into(transfer, lower, name, box, rules))


def remove_transfer_directories(one: Container, rules: Rules) -> Steps:
    """What lies in transfer directories is the container's again, and no late call finds one of them from then on."""
    _, transfers = yield from _listed(one.box)
    while transfers:
        if (yield from _remove_transfer_directory(one.box, transfers.pop(0), one.box, rules)) != "ok":
            return "kept"
    return "ok"


def take_over(old: Container, who: str, rules: Rules, to: str = "") -> Generator[Call, Answer, Container | None]:
    """What `store/take_over.py` does; None: somebody else has it.

    to  the state in which it goes on
    """
    new = Container(to or old.state, f"id+{who}", f"{old.box}+{who}")
    if not rules.moves:
        answer = yield _rename(old.state, old.name, new.state, new.name)
        if answer != "ok":
            return None
        new = new._replace(box=old.box)
        return new if (yield from remove_transfer_directories(new, rules)) == "ok" else None
    made = yield _call("mkdir", new.state, new.name, new.box)
    if made in ("EIO", "EEXIST"):
        return None
    new = new._replace(box=made)
    if (yield _call("make", new.box, "record", "record")) != "record":
        return None
    answer = yield _rename(old.state, old.name, new.box, "old")
    if answer != "ok" and (yield _call("look", new.box, "old")) in _NONE:
        if answer != "EIO":
            yield from _dissolve(new)
        return None  # what comes late finds a container with a record, which is taken over in turn
    return new if (yield from end_old(new, rules)) == "ok" else None


def end_old(new: Container, rules: Rules) -> Steps:
    """Move all that lies in the old container into the new one, and remove it: no late call finds it from then on.

    It may have an old one itself, and so on: all are emptied, and the lowest is removed first.
    """
    chain = [new.box]
    while (below := (yield _call("look", chain[-1], "old"))) not in _NONE:
        chain.append(below)
        parts, _ = yield from _listed(below)
        if (yield from _move_parts(below, parts, new.box, rules)) != "ok":
            return "kept"
        if not rules.in_turn:
            break
    while len(chain) > 1:
        lower = chain.pop()
        is_pinned = rules.rechecks and (yield _call("look", lower, "record")) == "pinned"
        if is_pinned and (yield from _pin(new)) != "ok":
            return "kept"
        if (yield from empty_into(lower, chain[-1], "old", new.box, rules)) != "ok":
            return "kept"
    return "ok"


def _pin(one: Container) -> Steps:
    tries = _N_TRIES
    while (yield _call("look", one.box, "record")) != "pinned":
        if not tries:
            return "kept"
        tries -= 1
        yield _call("make", one.box, "record.new", "pinned")
        yield _rename(one.box, "record.new", one.box, "record")
    return "ok"


def _make_transfer_directory(one: Container, who: str, rules: Rules, part: str = "", name: str = "") -> Steps:
    """A transfer directory; the container itself where there are none. EIO: not to be had

    part, name  what goes into it, if anything does: as the container has it, and as the transfer directory does
    """
    if not rules.transfers:
        if part != name:
            yield _rename(one.box, part, one.box, name)
        return one.box
    transfer = yield _call("mkdir", one.box, f"gate-{who}-{name}", f"G{one.box}{who}{name}")
    if transfer in ("EIO", "EEXIST", "ENOENT"):
        return "EIO"
    if part and (yield _rename(one.box, part, transfer, name)) != "ok":
        return "EIO"
    return transfer


# What a watcher, or a client that was told an error, does with what it has.


def sort_out(one: Container, rules: Rules, who: str) -> Generator[Call, Answer, Container | None]:
    """The container when its victim, if it has it, is `tree`. Two who emptied a transfer directory at
    once, and a call that came in between, may have given it another name: it is taken over once more, by its owner. A
    rename in here would do that too, and might come again when it is in use.
    """
    tries = "123"
    victim = _victim_of(one.box)
    while rules.by_identity and (yield _call("look", one.box, "tree")) != victim:
        parts, _ = yield from _listed(one.box)
        while parts and (yield _call("look", one.box, parts[0])) != victim:
            parts.pop(0)
        if not parts:
            break
        if not tries:
            return None
        again = yield from take_over(one, f"{who}{tries[0]}", rules)
        tries = tries[1:]
        if again is None:
            return None
        one = again
    return one


def settle_stage(container: Container, method: str, rules: Rules, who: str) -> Steps:
    """`core/container_states.decide_stage`, and what follows."""
    one = yield from sort_out(container, rules, who)
    if one is None:
        return "kept"
    tree = yield _call("look", one.box, "tree")
    if tree == "V" and method != "exchange":
        prepared = ["fresh", "new"]
        while prepared:
            part = prepared.pop(0)
            is_there = (yield _call("look", one.box, part)) not in _NONE
            if is_there and (yield from _place(one, "fresh", part, rules, who)) == "EIO":
                return "kept"
    if (yield from _clear(one, rules, who)) != "ok":
        return "kept"
    if tree == _victim_of(one.box):
        return (yield _rename("stage", one.name, "orphans", "id"))
    return (yield from _dissolve(one))


def _clear(one: Container, rules: Rules, who: str) -> Steps:
    """Leave nothing beside the victim: what was prepared is removed, and what else came in, or was written into since,
    becomes an orphan of its own.
    """
    parts, _ = yield from _listed(one.box)
    while parts:
        if (yield from _clear_part(one, parts.pop(0), rules, who)) != "ok":
            return "kept"
    return "ok"


def _clear_part(one: Container, part: str, rules: Rules, who: str) -> Steps:
    thing = yield _call("look", one.box, part)
    if thing in _NONE or (part == "tree" and thing == _victim_of(one.box)):
        return "ok"
    if not rules.by_identity or _is_fresh(thing):
        answer = yield _call("rmdir", one.box, part)
        if answer != "ENOTEMPTY":
            return "ok" if answer == "ENOENT" else answer
    return (yield from _keep(one, part, who))


def _keep(one: Container, part: str, who: str) -> Steps:
    """An orphan of its own of what lies in a container."""
    made = yield _call("mkdir", "orphans", f"kept-{part}+{who}", f"K{part}{who}")
    if made in ("EIO", "EEXIST"):
        return "kept"
    if (yield _call("make", made, "record", "record")) != "record":
        return "kept"
    return (yield _rename(one.box, part, made, "tree"))


def _place(one: Container, name: str, part: str, rules: Rules, who: str) -> Steps:
    """A directory to the victim's name, if that is free: what a server has no flag for, mkdir has.

    part  what the container has it as; in the transfer directory it has that name
    """
    if (yield from _take_name(rules, who)) != "ok":
        return "taken"
    transfer = yield from _make_transfer_directory(one, who, rules, part, name)
    if transfer == "EIO":
        return "EIO"
    yield _rename(transfer, name, "P", "job")
    return (yield from remove_transfer_directories(one, rules))


def _take_name(rules: Rules, who: str) -> Steps:
    """Take the victim's name by what replaces nothing; "taken" if something has it, or nobody knows."""
    if rules.exclusive:
        made = yield _call("mkdir", "P", "job", f"E{who}")
        return "ok" if made.startswith("E" + who) else "taken"
    there = yield _call("look", "P", "job")
    return "ok" if there == "none" else "taken"


def settle_restoring(container: Container, method: str, rules: Rules, who: str) -> Steps:
    """`decide_restoring`, and what follows."""
    one = yield from sort_out(container, rules, who)
    if one is None:
        return "kept"
    tree = yield _call("look", one.box, "tree")
    if tree == "V" and method != "exchange" and (yield _call("look", one.box, "fresh")) not in _NONE:
        if (yield from _place(one, "tree", "tree", rules, who)) == "EIO":
            return "kept"
        tree = yield _call("look", one.box, "tree")
    if (yield from _clear(one, rules, who)) != "ok":
        return "kept"
    if tree == "V":
        return (yield _rename("restoring", one.name, "orphans", "id"))
    return (yield from _dissolve(one))


def settle_reaping(one: Container, _method: str, rules: Rules, _who: str) -> Steps:
    record = yield _call("look", one.box, "record")
    if record in _NONE:
        return "lost"  # somebody took it over
    if rules.rechecks and record == "pinned":
        return (yield _rename("reaping", one.name, "orphans", "id"))
    answer = yield from _delete_tree(one.box)
    if answer == "EIO":
        return (yield _rename("reaping", one.name, "quarantine", one.name))
    return answer if answer == "kept" else (yield from _dissolve(one))


def _delete_tree(box: str) -> Steps:
    """Delete the victim of a container: by what is open, as it comes."""
    tree = yield _call("look", box, "tree")
    if tree == "V" and (yield _call("unlink", "V", "va")) == "EIO":
        return "EIO"
    if tree == "A":
        if (yield from _delete_tree("A")) != "ok":
            return "kept"
        yield _call("unlink", "A", "record")
    if tree in ("V", "A") and (yield _call("rmdir", box, "tree")) != "ok":
        return "kept"
    return "ok"


_SETTLES: dict[str, Callable[[Container, str, Rules, str], Steps]] = {
    "stage": settle_stage,
    "restoring": settle_restoring,
    "reaping": settle_reaping,
}


# Clients.


def swapper(method: str, rules: Rules) -> Callable[[], Program]:
    """`trashd swap P/job`. What is prepared has a name of its own: a mkdir that comes again makes no `tree`."""

    def swap() -> Program:
        one = Container("stage", "id", "A")
        yield _call("mkdir", "stage", "id", "A")
        if (yield _call("mkdir", "A", "new", "F")) != "F":
            return
        if (yield _call("make", "A", "record", "record")) != "record":
            return
        transfer = yield from _make_transfer_directory(
            one, "a", rules, "new", "tree" if method == "exchange" else "fresh"
        )
        if transfer == "EIO":
            return
        if method == "exchange":
            yield _rename(transfer, "tree", "P", "job", "exchange")
        elif (yield _rename("P", "job", transfer, "tree")) == "ok" and (yield from _take_name(rules, "a")) == "ok":
            yield _rename(transfer, "fresh", "P", "job")
        if (yield from remove_transfer_directories(one, rules)) == "ok":
            yield from settle_stage(one, method, rules, "a")

    return swap


def restorer(source: str, method: str, rules: Rules) -> Callable[[], Program]:
    """`trashd restore ID`."""

    def restore() -> Program:
        container = (yield _call("list", source)).split()
        if not container:
            return
        box = yield _call("look", source, container[0])
        if box in _NONE:
            return
        one = yield from take_over(Container(source, container[0], box), "r", rules, "restoring")
        if one is None:
            return
        if method == "exchange":
            transfer = yield from _make_transfer_directory(one, "r", rules, "tree", "tree")
            if transfer == "EIO":
                return
            yield _rename(transfer, "tree", "P", "job", "exchange")
        else:
            transfer = yield from _make_transfer_directory(one, "r", rules)
            if transfer == "EIO":
                return
            yield _rename("P", "job", transfer, "fresh")
        if (yield from remove_transfer_directories(one, rules)) == "ok":
            yield from settle_restoring(one, method, rules, "r")

    return restore


def reaper(rules: Rules, source: str = "orphans") -> Callable[[], Program]:
    """`trashd reap`, or, from quarantine, what tries again."""

    def reap() -> Program:
        name = f"id+{source[0]}"
        answer = yield _rename(source, "id", "reaping", name)
        box = yield _call("look", "reaping", name)
        if answer in ("ok", "EIO") and box not in _NONE:
            yield from settle_reaping(Container("reaping", name, box), "", rules, "")

    return reap


def seizer(rules: Rules) -> Callable[[], Program]:
    """Root makes an orphan of root's of what lies in a user's quarantine (store/as_owner.py)."""

    def seize() -> Program:
        if (yield _call("look", "quarantine", "id")) in _NONE:
            return
        one = Container("stage", "root", "R")
        yield _call("mkdir", "stage", "root", "R")
        if (yield _call("make", "R", "record", "record")) != "record":
            return
        transfer = yield from _make_transfer_directory(one, "s", rules)
        if transfer == "EIO":
            return
        yield _rename("quarantine", "id", transfer, "tree")
        if (yield from remove_transfer_directories(one, rules)) == "ok":
            yield from settle_stage(one, "exchange", rules, "s")

    return seize


def pinner(rules: Rules) -> Callable[[], Program]:
    """`trashd keep ID`: "kept" is marked by a file of that name."""

    def keep() -> Program:
        box = yield _call("look", "orphans", "id")
        if box in _NONE:
            return
        one = Container("orphans", "id", box)
        if rules.rechecks:
            taken = yield from take_over(one, "p", rules, "restoring")
            if taken is None:
                return
            one = taken
        if (yield _call("make", one.box, "record.new", "pinned")) != "pinned":
            return
        if (yield _rename(one.box, "record.new", one.box, "record")) != "ok":
            return
        if rules.rechecks and (yield _rename("restoring", one.name, "orphans", "id")) != "ok":
            return
        yield _call("make", "P", "told", "kept")

    return keep


def watcher(state: str, method: str, who: str, rules: Rules) -> Callable[[], Program]:
    """Takes over what it finds in a state."""

    def watch() -> Program:
        names = (yield _call("list", state)).split()
        while names:
            name = names.pop(0)
            box = yield _call("look", state, name)
            if box in _NONE or (yield _call("look", box, "record")) in _NONE:
                continue
            mine = yield from take_over(Container(state, name, box), who, rules)
            if mine is not None:
                yield from _SETTLES[state](mine, method, rules, who)

    watch.__name__ = f"watch_{who}"
    return watch


def user() -> Program:
    """Somebody who works in P/job, and makes it if it is not there."""
    top = yield _call("look", "P", "job")
    if top == "none":
        top = yield _call("mkdir", "P", "job", "U")
    if top not in ("EEXIST", "EIO", "ENOENT"):
        yield _call("make", top, "uf", "uf")


# What must not be lost.


def afterwards(method: str, rules: Rules) -> list[Callable[[], Program]]:
    """Watchers who come when all others have stopped for good."""
    return [watcher(state, method, f"z{number}", rules) for number in range(3) for state in ("stage", "restoring")]


def why_stuck(disk: ModelDisk, *, is_named: bool) -> str:
    """What these leave undone.

    is_named  the name is to mean something
    """
    if is_named and disk.of("P") and "job" not in (disk.of("P") or {}):
        return "the name is missing for good"
    return next(filter(None, (_why_left(thing, disk) for thing in "VU")), "")


def _why_left(thing: str, disk: ModelDisk) -> str:
    place = disk.place_of(thing)
    if place is None or place == ("P", "job"):
        return ""
    chain = list(_above(thing, disk))
    if chain[-1] == "reaping":  # the next reap takes it over
        return "" if "record" in (disk.of(chain[-2]) or {}) else f"{thing} is in {chain}, and no record tells of it"
    box, name = place
    if name != "tree" or "record" not in (disk.of(box) or {}):
        return f"{thing} is {name} in {box}, and no record tells of it"
    above = disk.place_of(box)
    if above is not None and above[1] == "tree":
        return _why_left(box, disk)
    return (
        "" if above is not None and above[0] in ("orphans", "reaping", "quarantine") else f"{thing} is left in {above}"
    )


def _above(thing: str, disk: ModelDisk) -> Iterator[str]:
    """The directories that something is in, up to that of a state."""
    while thing not in STATES and (place := disk.place_of(thing)) is not None:
        thing = place[0]
        yield thing


def why_lost(before: ModelDisk, after: ModelDisk, *, counts_empty: bool = True) -> str:
    """What a call took from somebody.

    counts_empty  an empty directory of the user's is something, too
    """
    for thing in ("uf", "U"):
        if before.is_below(thing) and not after.is_below(thing) and (counts_empty or before.of(thing) != {}):
            return f"{thing} is lost"
    if before.is_below("V") and not after.is_below("V") and after.place_of("va") is not None:
        return "V is lost"
    if before.place_of("va") is not None and after.place_of("va") is None:
        if before.is_below("V", "P"):
            return "va is deleted in what is in view"
        if before.place_of("kept") is not None:
            return "va is deleted in what was kept"
    return ""
