"""What tests of several nodes do again and again; what runs in a node can be pickled: any `ClusterNode` can do it."""

import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from fusefs.store.take_over import UNKNOWN_S
from tests.support.cluster_nodes import ClusterNode, ClusterNodes
from tests.support.make_trees import Spec, make_tree
from tests.support.trashd_command import CommandResult

TREE: Spec = {"file": "old", "sub": {"deep": "older", "more": {}}}
WATCHED_LIMIT_S = 3 * UNKNOWN_S
"""A minute and a half of silence, and before it the time after which caches tell of what is watched."""
_LIMIT_S = 30.0
_GLANCE_S = 0.05
_REFUSED_LOCK = re.compile(
    r"^.*/orphans/[^/\n]*: The kernel refused: .*: Input/output error\n *hint: .* another machine\n", re.MULTILINE
)


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
    node: ClusterNode, look: Callable[[], Any], wanted: object, limit_s: float = _LIMIT_S, every_s: float = _GLANCE_S
) -> float:
    """Wait until a node sees something; how long it took. Raises  AssertionError

    every_s  GlusterFS tells for 20 s and more what was before if a directory is listed many times a second (measured)
    """
    return node.run(partial(_wait_until, look, wanted, limit_s, every_s), limit_s + 30)


def _wait_until(look: Callable[[], object], wanted: object, limit_s: float, every_s: float) -> float:
    began_s = time.monotonic()
    while (seen := look()) != wanted:
        assert time.monotonic() - began_s < limit_s, f"still {seen!r}, and not {wanted!r}, after {limit_s} s"
        time.sleep(every_s)
    return time.monotonic() - began_s


def well(done: CommandResult) -> CommandResult:
    """What a command said that had to succeed."""
    assert done.code == 0, done
    return done


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
    (told,) = well(nodes.a.trashd("swap", "--json", *words, victim)).objects()
    identifier = str(told["id"])
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
