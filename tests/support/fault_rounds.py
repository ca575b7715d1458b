"""Rounds of harm: a command of one node is killed, frozen or cut off at a call, others go on, and nothing may be lost.

A round is its seed's: the call at which it happens, spread evenly over all, and what others do meanwhile. What must
hold after it: what a user wrote into the name is in view or in an orphan; the tree is whole in one of these, unless a
reaper has begun on it; what a restore gave back is whole; and after a repair the checker says nothing."""

import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from fusefs.core.errors import Busy, NotFound
from fusefs.store.silent_nodes import DEFAULT_TAKEOVER_S
from tests.support.cluster_nodes import ClusterNode, ClusterNodes, NodeCommand
from tests.support.make_trees import Spec, make_tree
from tests.support.trashd_command import CommandResult

TREE: Spec = {"file": "old", "sub": {"deep": "older", "more": {}}}
WATCHED_LIMIT_S = 3 * DEFAULT_TAKEOVER_S
"""A minute and a half of silence, and before it the time after which caches tell of what is watched."""
_LIMIT_S = 30.0
_GLANCE_S = 0.05
_REFUSED_LOCK = re.compile(r"^.*/orphans/[^/\n]*: Input/output error\n *hint: .* another machine\n", re.MULTILINE)


def contents(path: Path) -> dict[str, str]:
    """Relative path and content of each file below a directory; empty if it is not there."""
    found: dict[str, str] = {}
    for directory, _, names in os.walk(path):
        for name in names:
            with suppress(FileNotFoundError):
                file = Path(directory, name)
                found[str(file.relative_to(path))] = file.read_text()
    return found


def names(path: Path) -> list[str] | None:
    """What a directory lists; None if it is not there."""
    try:
        return sorted(os.listdir(path))
    except FileNotFoundError:
        return None


def write(path: Path, content: str) -> bool:
    """Make a file, or change it; whether there was a directory for it."""
    try:
        path.write_text(content)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def wait_until(
    node: ClusterNode, read: Callable[[], Any], wanted: object, limit_s: float = _LIMIT_S, every_s: float = _GLANCE_S
) -> float:
    """Wait until a node reads a value; return how many seconds it took. Raises  AssertionError

    every_s  GlusterFS returns old contents for 20 s and more if a directory is listed many times a second (measured)
    """
    return node.run(partial(_wait_until, read, wanted, limit_s, every_s), limit_s + 30)


def _wait_until(read: Callable[[], object], wanted: object, limit_s: float, every_s: float) -> float:
    began_s = time.monotonic()
    while (value := read()) != wanted:
        assert time.monotonic() - began_s < limit_s, f"still {value!r}, and not {wanted!r}, after {limit_s} s"
        time.sleep(every_s)
    return time.monotonic() - began_s


def well(result: CommandResult) -> CommandResult:
    """Return the result of a command, which must have succeeded. Raises  AssertionError"""
    assert result.code == 0, result
    return result


def with_store(nodes: ClusterNodes) -> ClusterNodes:
    """Both nodes know the store of the volume."""
    well(nodes.a.trashd("init", nodes.a.volume))
    well(nodes.b.trashd("init", "--known", nodes.b.volume))  # where no attribute says that root made it
    for node in nodes[:2]:
        wait_until(node, partial(Path.exists, node.volume / ".trashd/volume.json"), True)
        wait_until(node, partial(_is_readable, node.volume / ".trashd/volume.json"), True)
    return nodes


def _is_readable(path: Path) -> bool:
    try:
        return bool(path.read_text())
    except OSError:
        return False


def tree(node: ClusterNode, name: str = "job", spec: Spec = TREE) -> Path:
    """A victim that a node makes; the other sees it."""
    return node.run(partial(make_tree, node.volume / name, spec))


def swapped(nodes: ClusterNodes, name: str = "job", words: Sequence[str] = ()) -> str:
    """The id of an orphan that A has made, of which B knows; more options for its swap."""
    victim = tree(nodes.a, name)
    (swap_result,) = well(nodes.a.trashd("swap", "--json", *words, victim)).objects()
    identifier = str(swap_result["id"])
    look = partial(_states, nodes.b.volume, identifier)
    wait_until(nodes.b, look, ["orphans"])
    return identifier


def states(node: ClusterNode, identifier: str) -> list[str]:
    """In which states a node sees a container, by its place."""
    return node.run(partial(_states, node.volume, identifier))


def _states(volume: Path, identifier: str) -> list[str]:
    return sorted(path.parent.name for path in volume.glob(f".trashd/u/*/*/{identifier}"))


def everywhere(nodes: ClusterNodes, name: str) -> list[dict[str, str]]:
    """What is at a name, and then what each orphan holds, as A sees it."""
    orphans = nodes.a.run(partial(_orphans, nodes.a.volume))
    return [nodes.a.run(partial(contents, nodes.a.volume / name)), *orphans]


def _orphans(volume: Path) -> list[dict[str, str]]:
    area = volume / ".trashd/u/0/orphans"
    return [contents(area / name / "tree") for name in names(area) or []]


def listed(node: ClusterNode) -> list[dict[str, Any]]:
    """`trashd list --json` of the volume."""
    return well(node.trashd("list", "--json", "--volume", node.volume)).objects()


def assert_quiet(nodes: ClusterNodes, seconds: float = _LIMIT_S, *, is_given_up: bool = False) -> None:
    """The checker has nothing to say on either node, once caches have forgotten what was.

    is_given_up  the server has given A's client up: ceph-fuse refuses locks of a file that it had locked then with EIO,
                 until it is mounted anew
    """
    for node in nodes[:2]:
        ends_at = time.monotonic() + seconds
        while (done := node.trashd("doctor", node.volume)).code:
            if is_given_up and node is nodes.a and not _REFUSED_LOCK.sub("", done.out):
                break
            assert time.monotonic() < ends_at, f"{node.name}: {done}"


def watch_unrecorded(nodes: ClusterNodes) -> None:
    """See off what was left before it had a record: nobody's word tells whose it is, so it is watched in any case."""
    if nodes.a.run(partial(_has_unrecorded, nodes.a.volume)):
        nodes.a.trashd("doctor", "--repair", "--wait", nodes.a.volume, limit_s=WATCHED_LIMIT_S)


def _has_unrecorded(volume: Path) -> bool:
    half_done = [path for part in ("stage", "restoring") for path in volume.glob(f".trashd/u/0/{part}/*")]
    return any(not (path / "record.json").exists() for path in half_done)


N_ROUNDS = int(os.environ.get("TRASHD_TEST_ROUNDS", "1"))
"""Of each verb on each filesystem; `make shared` and `make soak-shared` ask for more."""
FIRST_SEED = int(os.environ.get("TRASHD_TEST_FIRST_SEED", "2"))
"""Of the first round; the others count on from there. Rounds 0 and 1 wait for a minute and a half."""
OLD = {"file": "old", "sub/deep": "older"}
_CHANGING = frozenset(
    {"exchange", "rename", "renameat2", "mkdir", "rmdir", "create", "write", "unlink", "link", "flock", "fsync"}
)
_CLEAR = (NotFound.exit_code, Busy.exit_code)
_MENDED_LIMIT_S = 90.0
_CUT_LIMIT_S = 100.0
_ONE_IN_SO_MANY_UNRECORDED = 10
_GOLDEN = 0.618033988749895
"""Its multiples' fractions are spread evenly, those of each harm's seeds too: n rounds come to about n calls."""
_ONE_OF_SO_MANY, _LONG_S = 4, 12.0
"""Some are away until a server gives a client up, and its locks: GlusterFS's does after 5 s here."""


class Verb(Enum):
    """What is harmed."""

    SWAP = "swap"
    RESTORE = "restore"
    REAP = "reap"
    TAKE_OVER = "take over"


class Harm(Enum):
    """How: the command killed or frozen, or its node's client frozen, or cut off from the servers."""

    KILL = "kill"
    FREEZE = "freeze"
    FREEZE_CLIENT = "freeze its client"
    CUT = "cut"


class Round(NamedTuple):
    """What is to happen."""

    seed: int
    verb: Verb
    harm: Harm


class RoundResult(NamedTuple):
    """What happened: at which call, what others did meanwhile, by their exit codes, and how the command ended."""

    round: Round
    call: str
    meanwhile: tuple[str, ...]
    end: str


def take_over(node: ClusterNode, ended: ClusterNode) -> None:
    """Have a node take over what another one has left half done."""
    node.trashd("doctor", "--repair", "--ended", ended.boot, node.volume)


def take_over_words(node: ClusterNode, ended: ClusterNode) -> tuple[str | Path, ...]:
    """That, as words of a command that can be harmed itself."""
    return "doctor", "--repair", "--ended", ended.boot, node.volume


class _Scene(NamedTuple):
    """A directory of a name that no other round has, and its orphan, if it has been swapped."""

    name: str
    identifier: str | None


def rounds(verb: Verb, n: int = N_ROUNDS, first_seed: int = FIRST_SEED) -> list[Round]:
    """So many, of each harm in turn."""
    harms = list(Harm)
    return [Round(seed, verb, harms[seed % len(harms)]) for seed in range(first_seed, first_seed + n)]


def calls_of(nodes: ClusterNodes, verb: Verb) -> list[str]:
    """The names of the calls that a verb makes, for rounds to choose from."""
    scene = _set_up(nodes, verb, f"sample-{verb.name.lower()}")
    return nodes.a.calls(*_words(nodes, verb, scene))


def play(nodes: ClusterNodes, this: Round, calls: Sequence[str]) -> RoundResult:
    """Play a round, and see that nothing was lost. Raises  AssertionError with what had happened"""
    random = Random(f"{nodes.filesystem} {this.verb.value} {this.seed}")
    scene = _set_up(nodes, this.verb, f"{this.verb.name.lower()}-{this.seed}")
    n = _chosen(calls, this.seed)
    result = RoundResult(this, f"{n}: {' '.join(calls[max(n - 3, 0) : n])} † {' '.join(calls[n : n + 2])}", (), "")
    try:
        running = nodes.a.start(*_words(nodes, this.verb, scene), hold_at=n)
        is_held = running.is_held()
        meanwhile = _harmed(nodes, this, scene, running, random) if is_held else ()
        ended = running.end(_CUT_LIMIT_S)
        result = result._replace(meanwhile=meanwhile, end=f"{ended.code} {ended.err[:300]!r}")
        _settle(nodes, scene, is_given_up=_is_given_up(nodes, this))
        _assert_nothing_lost(nodes, scene, this, result)
    except BaseException as error:
        error.add_note(f"{nodes.filesystem}: {result}")
        raise
    return result


def _chosen(calls: Sequence[str], seed: int) -> int:
    """A call that changes something; one in ten among all, also those before the first record has its name.

    What has none may be any node's, which no word of a boot's end tells of: it is watched for a minute and a half.
    """
    changing = [number for number, call in enumerate(calls) if call in _CHANGING]
    recorded = [number for number in changing if number > calls.index("rename")]
    among = recorded if (seed + 1) % _ONE_IN_SO_MANY_UNRECORDED else changing
    return among[int((seed + 0.5) * _GOLDEN % 1 * len(among))]


def _set_up(nodes: ClusterNodes, verb: Verb, name: str) -> _Scene:
    if verb in (Verb.RESTORE, Verb.REAP):
        return _Scene(name, swapped(nodes, name))
    victim = tree(nodes.a, name)
    wait_until(nodes.b, partial(contents, victim), OLD)
    if verb is Verb.TAKE_OVER:
        # B has left it half done: what A takes over is B's.
        running = nodes.b.start("swap", victim, hold_at=0, call=last_rename(nodes))
        if running.is_held():
            running.kill()
        running.end()
        wait_until(nodes.a, partial(_is_staged, nodes.a.volume), True)
    return _Scene(name, None)


def last_rename(nodes: ClusterNodes) -> str:
    """The call by which the fresh directory gets the name."""
    return "exchange" if nodes.filesystem == "juicefs" else "renameat2"


def _is_staged(volume: Path) -> bool:
    return any(path.name == "record.json" for path in volume.glob(".trashd/u/0/stage/*/*"))


def _words(nodes: ClusterNodes, verb: Verb, scene: _Scene) -> tuple[str | Path, ...]:
    volume = nodes.a.volume
    match verb:
        case Verb.SWAP:
            return "swap", volume / scene.name
        case Verb.RESTORE:
            return "restore", "--volume", volume, str(scene.identifier)
        case Verb.REAP:
            return "reap", "--now", "--volume", volume, str(scene.identifier)
        case Verb.TAKE_OVER:
            return take_over_words(nodes.a, nodes.b)


def _harmed(nodes: ClusterNodes, this: Round, scene: _Scene, running: NodeCommand, random: Random) -> tuple[str, ...]:
    """Do the harm, let others act, and let go; the command runs on, or is dead."""
    match this.harm:
        case Harm.KILL:
            running.kill()
            return _meanwhile(nodes, this, scene, random)
        case Harm.FREEZE:
            acted = _meanwhile(nodes, this, scene, random)
            running.thaw()
            return acted
        case Harm.FREEZE_CLIENT:
            return _while_away(nodes, this, scene, running, random, (nodes.a.freeze, nodes.a.thaw))
        case Harm.CUT:
            return _while_away(nodes, this, scene, running, random, (nodes.a.cut, nodes.a.mend))


def _while_away(
    nodes: ClusterNodes,
    this: Round,
    scene: _Scene,
    running: NodeCommand,
    random: Random,
    ways: tuple[Callable[[], None], Callable[[], None]],
) -> tuple[str, ...]:
    """The command goes into its call while nothing of its node arrives; what it has sent is late."""
    leave, come_back = ways
    leave()
    try:
        running.thaw()
        acted = _meanwhile(nodes, this, scene, random)
        if not random.randrange(_ONE_OF_SO_MANY):
            time.sleep(_LONG_S)
            return (*acted, "long", *_meanwhile(nodes, this, scene, random))
        return acted
    finally:
        come_back()


def _meanwhile(nodes: ClusterNodes, this: Round, scene: _Scene, random: Random) -> tuple[str, ...]:
    """What B and its users do; each word is an act and how it ended."""
    node = nodes.b
    name = node.volume / scene.name
    acts: dict[str, Callable[[], object]] = {
        "write": lambda: node.run(partial(_write_live, name, this.seed)),
        "list": lambda: _outcome(node.trashd("list", "--volume", node.volume)),
        "doctor": lambda: _outcome(node.trashd("doctor", "--repair", node.volume)),
    }
    if scene.identifier is not None:
        words = "restore", "--volume", node.volume, str(scene.identifier)
        acts["restore"] = lambda: _outcome(node.trashd(*words))
    acts["take over"] = lambda: take_over(node, nodes.a)
    chosen = random.sample(sorted(acts), random.randint(1, len(acts)))
    return tuple(f"{act} {acts[act]()}" for act in chosen)


def _outcome(result: CommandResult) -> str:
    """Format the exit code, with the output if the code alone is unclear."""
    return str(result.code) if result.code in (0, *_CLEAR) else f"{result.code} {(result.err or result.out)[:300]!r}"


def _write_live(name: Path, seed: int) -> str:
    """A user finds the name missing or empty, and writes into it; a tree that is there is left alone."""
    found = names(name)
    if found is None:
        try:
            name.mkdir()
        except OSError as error:
            return f"mkdir: {error.strerror}"
    elif found:
        return "has a tree"
    return f"live {write(name / 'live', f'live {seed}')}"


def _is_given_up(nodes: ClusterNodes, this: Round) -> bool:
    """Whether the server may have ended the session of A's client, as others waited for what that held."""
    return nodes.filesystem == "cephfs" and this.harm in (Harm.FREEZE_CLIENT, Harm.CUT)


def _settle(nodes: ClusterNodes, scene: _Scene, *, is_given_up: bool) -> None:
    """The mounts work again, and what is half done is over."""
    for node in nodes[:2]:
        wait_until(node, partial(_works, node.volume), True, _MENDED_LIMIT_S)
    nodes.a.trashd("doctor", "--repair", nodes.a.volume)
    take_over(nodes.b, nodes.a)
    take_over(nodes.a, nodes.b)
    if scene.identifier is not None and "reaping" in states(nodes.a, scene.identifier):
        nodes.a.trashd("reap", "--volume", nodes.a.volume)
    watch_unrecorded(nodes)
    assert_quiet(nodes, is_given_up=is_given_up)


def _works(volume: Path) -> bool:
    try:
        return bool(os.listdir(volume))
    except OSError:
        return False


def _assert_nothing_lost(nodes: ClusterNodes, scene: _Scene, this: Round, result: RoundResult) -> None:
    _, *orphans = found = everywhere(nodes, scene.name)
    if any(act == "write live True" for act in result.meanwhile):
        assert any(one.get("live") == f"live {this.seed}" for one in found), f"live file lost: {found}"
    is_whole = any(OLD.items() <= one.items() for one in found)
    was_given_back = "restore 0" in result.meanwhile or (this.verb is Verb.RESTORE and result.end.startswith("0 "))
    if this.verb is Verb.REAP and not was_given_back:
        assert is_whole or not any("file" in one for one in found), f"half a tree: {found}"
        return
    assert is_whole, f"tree lost: {found}"
    name_is_there = nodes.a.run(partial(names, nodes.a.volume / scene.name)) is not None
    assert name_is_there or OLD in orphans, "neither name nor orphan"


def clear(nodes: ClusterNodes) -> None:
    """Rounds that come find no orphan of those that were."""
    well(nodes.b.trashd("reap", "--all", "--now", "--yes", "--volume", nodes.b.volume))
