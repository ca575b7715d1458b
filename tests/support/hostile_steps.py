"""A hostile user in a team's directories, and what that user does there: plain calls, each as the kernel allows it."""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from fusefs.store.layout import FOLDERS
from tests.support.group_members import FORGED, expired_record
from tests.support.make_trees import Dir, File, Spec, make_tree
from tests.support.other_users import called_by
from tests.support.plain_twin import MARK, Exchange, Side, Step, Twins, make_places
from tests.support.privileges import Credentials
from tests.support.store_verbs import init

TEAM = 5000
N_SUBIDS, FIRST_SUBID = 65_536, 200_000
ROOT = Credentials(0, 0, is_capable=True)
ALICE = Credentials(1001, 65_534, (TEAM,))
BOB = Credentials(1002, 1002, (TEAM,))
CAROL = Credentials(1003, 1003)
PEOPLE: Mapping[str, Credentials] = {"alice": ALICE, "bob": BOB, "carol": CAROL}
MAPPED = BOB._replace(maps=((0, BOB.uid, 1), (1, FIRST_SUBID, N_SUBIDS)))
"""Bob as root of a user namespace with Bob's subordinate ids."""
_HELD = ("team", "team/project", "team/project/data", "team/project/data/open")


def _text(name: str) -> bytes:
    return f"{MARK}{name}".encode()


def _spec() -> dict[str, Dir]:
    """What is on the volume: a project of the team's as setgid directories and umask 002 make it, and homes."""
    hers, his, roots = (ALICE.uid, TEAM), (BOB.uid, TEAM), (0, TEAM)

    def shared(name: str, owner: tuple[int, int]) -> Dir:
        closed = Dir({"thesis": File(_text(f"{name}/results/thesis"), owner=owner)}, mode=0o755, owner=owner)
        private = Dir({"diary": File(_text(f"{name}/private/diary"), mode=0o600, owner=owner)}, mode=0o700, owner=owner)
        draft = File(_text(f"{name}/draft"), mode=0o664, owner=owner)
        empty = {name: Dir({}, 0o2775, owner) for name in ("open", "other")}
        return Dir({"results": closed, "private": private, "draft": draft, **empty}, 0o2775, owner)

    project: Spec = {
        "data": shared("data", hers),
        "live": shared("live", hers),
        "more": shared("more", hers),
        "roots": shared("roots", roots),
        "his": shared("his", his),
        "notes": File(b"{}", mode=0o664, owner=hers),
        "rootnotes": File(b"{}", mode=0o664, owner=roots),
    }
    own: Spec = {"job": {"a": _text("alice/job/a"), "sub": {"b": _text("alice/job/sub/b")}}}
    return {
        "team": Dir({"project": Dir(project, 0o2775, roots)}, 0o2775, roots),
        "alice": Dir(_owned(own, ALICE), owner=(ALICE.uid, ALICE.gid)),
        "bob": Dir({}, owner=(BOB.uid, BOB.gid)),
        "homes": Dir({"alice": Dir(_owned({"mail": _text("homes/alice/mail")}, ALICE), owner=(ALICE.uid, ALICE.gid))}),
        "srv": Dir({"conf": _text("srv/conf"), "secret": File(_text("srv/secret"), mode=0o600)}),
    }


def _owned(spec: Spec, person: Credentials) -> Spec:
    owner = (person.uid, person.gid)
    return {
        name: File(one, owner=owner) if isinstance(one, bytes) else Dir(_owned(one, person), owner=owner)
        for name, one in spec.items()
        if isinstance(one, bytes | Mapping)
    }


@contextmanager
def team(first: Path, plain: Path, hostile: Credentials) -> Iterator[Twins]:
    """Users and trees, alike on two empty volumes, of which the first has a store; the hostile one holds fds."""
    sides = (Side(first), Side(plain))
    try:
        for side in sides:
            for path in side.volume.iterdir():
                shutil.rmtree(path)
            for name, one in _spec().items():
                make_tree(side.volume / name, one)
            for where in _HELD:
                side.hold(where)
        called_by(hostile.be, partial(_may_open, [side.at(where) for side in sides for where in _HELD]), "who holds it")
        init(first)
        make_places(sides[1], PEOPLE)
        people = {name: hostile if one.uid == hostile.uid else one for name, one in PEOPLE.items()}
        yield Twins(sides[0], sides[1], people, hostile)
    finally:
        for side in sides:
            side.close()


def _may_open(paths: list[Path]) -> None:
    for path in paths:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECTORY))


# What the hostile user does


def move(source: str, target: str) -> Step:
    return lambda side: side.at(source).rename(side.at(target))


def make(where: str, mode: int = 0o777) -> Step:
    def step(side: Side) -> None:
        side.at(where).mkdir()
        side.at(where).chmod(mode)

    return step


def link(where: str, target: str) -> Step:
    return lambda side: side.at(where).symlink_to(side.volume / target)


def write(where: str, text: str) -> Step:
    return lambda side: side.at(where).write_text(text)


def set_mode(where: str, mode: int) -> Step:
    return lambda side: side.at(where).chmod(mode)


def remove(where: str) -> Step:
    return lambda side: side.at(where).unlink()


def _copy(source: str, target: str) -> Step:
    return lambda side: side.at(target).write_bytes(side.at(source).read_bytes())


def plant(source: str, tree: str, target: str) -> list[Step]:
    """A directory of a user's, filled like a folder of a store with an orphan to be reaped, to a name in one."""
    container = f"{source}/orphans/{FORGED}"

    def forge(side: Side) -> None:
        record = expired_record(side.volume, side.at(tree))
        side.at("team/project/notes").write_bytes(record)

    parts = [make(f"{source}/{os.fsdecode(part)}") for part in FOLDERS]
    filled = [*parts, make(container), forge, move("team/project/notes", f"{container}/record.json")]
    return [*filled, move(tree, f"{container}/tree"), move(source, target)]


def of_hers(act: Callable[[Path], object]) -> Step:
    """Something with each tree that lies in the acting user's folder."""

    def step(side: Side) -> None:
        for tree in side.volume.glob(f".trashd/*/{os.getuid()}*/*/*/tree"):
            with suppress(OSError):
                act(tree)

    return step


def change_owner(where: str, uid: int) -> Step:
    """chown, by the numbers of the user namespace."""
    return lambda side: os.chown(side.at(where), uid, uid)


def _replace(tree: Path) -> None:
    tree.rename(tree.with_name("aside"))
    tree.symlink_to(tree.parents[6] / "srv")


def _exchange(tree: Path) -> None:
    tree.rename(tree.with_name("aside"))
    tree.parents[6].joinpath("alice/job").rename(tree)


def _take(tree: Path) -> None:
    tree.rename(tree.parents[6] / "alice/taken")


LIVE, DATA = "team/project/live", "team/project/data"
_LIKE_A_STORE = [
    move("team/project/roots/open", "team/project/roots/u"),
    move("team/project/roots/other", "team/project/roots/new"),
    _copy(".trashd/volume.json", "team/project/rootnotes"),
    move("team/project/rootnotes", "team/project/roots/volume.json"),
]
OF_A_MATE: Mapping[str, list[Step]] = {
    "plants u": plant(LIVE, "team/project/more", f".trashd/u/{ALICE.uid}"),
    "plants new": plant(LIVE, "team/project/more", f".trashd/new/{ALICE.uid}"),
    "plants another": plant(LIVE, "team/project/more", f".trashd/new/{ALICE.uid}.0123456789ab"),
    "plants another u": plant(LIVE, "team/project/more", f".trashd/u/{ALICE.uid}.0123456789ab"),
    "plants root's": plant("team/project/roots", "team/project/more", ".trashd/new/0"),
    "moves in": [move(LIVE, "@data/came-in"), move("team/project/more", "@open/came-in")],
    "exchanges in": [Exchange(LIVE, "@data/open"), Exchange("team/project/more", "@data/other")],
    "moves files in": [move(f"{LIVE}/draft", "@data/came-in"), move("team/project/roots/draft", "@open/draft")],
    "takes out": [move("@data/open", "team/project/his/taken"), link("@data/open", "srv")],
    "goes up": [move("@data/../record.json", "@data/open/record"), move("@data/..", "team/project/container")],
    "renames above": [move("team/project", "team/away"), make("team/project"), link(DATA, "srv")],
    "exchanges above": [move("team/project", "team/away"), move("team/away/live", "team/project")],
    "exchanges": [move(DATA, "team/project/old"), move(LIVE, DATA)],
    "links": [move(DATA, "team/project/old"), link(DATA, "srv"), link("@open/srv", "srv")],
    "fills": [make(f"{DATA}/his"), write(f"{DATA}/his/text", f"{MARK}filled in"), move(LIVE, f"{DATA}/live")],
    "opens": [set_mode("team/project/his", 0o777), move("@data/open", "team/project/his/open")],
    "makes a store": [*_LIKE_A_STORE, move("team/project/roots", "team/project/.trashd")],
    "moves a store in": [
        *_LIKE_A_STORE,
        move(LIVE, f"team/project/roots/u/{ALICE.uid}"),
        move("team/project/roots", "@data/.trashd"),
    ],
}
OF_THE_OWNER: Mapping[str, list[Step]] = {
    "replaces by a link": [of_hers(_replace)],
    "replaces by another": [of_hers(_exchange)],
    "takes it": [of_hers(_take)],
}
OF_THE_MAPPED: Mapping[str, list[Step]] = {
    "plants for a number of his": [
        make("bob/folder"),
        *plant("bob/folder", "team/project/more", "bob/filled"),
        *(set_mode(f"bob/filled/{os.fsdecode(part)}", 0o700) for part in FOLDERS),
        *(change_owner(f"bob/filled/{os.fsdecode(part)}", 1) for part in FOLDERS),
        set_mode("bob/filled", 0o700),
        change_owner("bob/filled", 1),
        move("bob/filled", f".trashd/u/{FIRST_SUBID}"),
        move("bob/filled", f".trashd/new/{FIRST_SUBID}"),
    ],
    "takes what is hers": [
        *(change_owner(where, 0) for where in (DATA, LIVE, "alice", f".trashd/u/{ALICE.uid}", "homes/alice")),
        *(set_mode(where, 0o777) for where in (DATA, "@data", "alice", f".trashd/u/{ALICE.uid}", "srv/secret")),
        change_owner("team/project/his", 1),
        set_mode("team/project/his", 0o777),
    ],
    "gives what is his away": [
        make("team/project/mine"), change_owner("team/project/mine", 1), move(LIVE, "team/project/mine/live"),
        set_mode("team/project/mine", 0o700), move(DATA, "team/project/mine/data"), move("@data/draft", "@open/draft"),
    ],
}  # fmt: skip
