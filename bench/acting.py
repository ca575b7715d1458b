"""What it costs that the mount acts as its caller: the same calls by root, and by users with few and many groups.

In a directory of his own a user acts with his ids alone; in one that is another's, which he may use by a group, his
groups are read and taken as well. Each round has all clients in turn; medians of their rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter_ns
from typing import NamedTuple

from bench.support import compiled, volume
from tests.support.foreground_mount import trashd_mount
from tests.support.other_users import as_user

HE, OTHER, TEAM = 72_001, 72_002, 72_100
N_ROUNDS, N_ROUNDS_QUICK, N = 9, 3, 500


class Client(NamedTuple):
    """Who works, and whose directory it is."""

    name: str
    uid: int
    owner: int
    groups: tuple[int, ...]


CLIENTS = (
    Client("root", 0, 0, ()),
    Client("root, a user's directory", 0, OTHER, ()),
    *(Client(f"a user in {n} groups", HE, HE, tuple(range(TEAM, TEAM + n))) for n in (0, 3, 100)),
    *(Client(f"another's directory, by one of {n}", HE, OTHER, tuple(range(TEAM, TEAM + n))) for n in (3, 100)),
)


def timed(act: Callable[[str], object], names: Sequence[str]) -> float:
    """Microseconds for one."""
    began_ns = perf_counter_ns()
    for name in names:
        act(name)
    return (perf_counter_ns() - began_ns) / len(names) / 1000


def turn(directory: Path) -> dict[str, float]:
    """Each call, once for each of some files."""
    os.chdir(directory)
    files, moved, made = ([f"{sort}{i}" for i in range(N)] for sort in "fmd")
    found = {
        "create, close": timed(lambda name: os.close(os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY)), files),
        "open, close": timed(lambda name: os.close(os.open(name, os.O_RDONLY)), files),
        "chmod": timed(lambda name: os.chmod(name, 0o640), files),
        "rename": timed(lambda name: os.rename(name, f"m{name[1:]}"), files),
        "unlink": timed(os.unlink, moved),
        "mkdir": timed(os.mkdir, made),
        "rmdir": timed(os.rmdir, made),
    }
    os.chdir("/")
    return found


def rounds(top: Path, n_rounds: int) -> dict[str, dict[str, float]]:
    """Medians by client and call, in microseconds."""
    taken: dict[str, dict[str, list[float]]] = {client.name: {} for client in CLIENTS}
    for i, client in enumerate(CLIENTS):
        (top / str(i)).mkdir()
        os.chown(top / str(i), client.owner, TEAM)
        (top / str(i)).chmod(0o770)
    for _ in range(n_rounds):
        for i, client in enumerate(CLIENTS):
            directory = top / str(i)
            if client.uid:
                found = as_user(client.uid, lambda directory=directory: turn(directory), groups=client.groups)  # type: ignore[misc]
            else:
                found = turn(directory)
            for call, took_us in found.items():
                taken[client.name].setdefault(call, []).append(took_us)
    return {
        client: {call: round(statistics.median(took), 1) for call, took in calls.items()}
        for client, calls in taken.items()
    }


def main() -> None:
    """Print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", action="store_true", help="all figures, in microseconds")
    options = parser.parse_args()
    with compiled(), volume("tmpfs") as backing:
        source = backing / "source"
        source.mkdir()
        source.chmod(0o755)
        with trashd_mount(source, options=["coherence=exclusive"], limit_s=3600) as mounted:
            found = rounds(mounted.path, N_ROUNDS_QUICK if options.quick else N_ROUNDS)
    if options.json:
        print(json.dumps(found))
        return
    calls = list(next(iter(found.values())))
    print("| µs |", " | ".join(calls), "|")
    print("|---" * (len(calls) + 1) + "|")
    for client, took in found.items():
        print(f"| {client} |", " | ".join(f"{took[call]:.1f}" for call in calls), "|")


if __name__ == "__main__":
    main()
