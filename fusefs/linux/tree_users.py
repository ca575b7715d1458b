"""Holders of a tree: open fds, working and root directories, mappings of all processes that we may look at."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from fusefs.linux.mountinfo import FilesystemPath, Mount, below, find_place, read_mounts


class TreeHolder(NamedTuple):
    """One hold of one process.

    kind   fd, cwd, root, exe or map
    path   what it holds, relative to the tree; empty for the tree itself
    """

    pid: int
    uid: int
    command: str
    kind: str
    path: bytes


class Process(NamedTuple):
    """A process that we may look at, and what is mounted for it."""

    pid: str
    uid: int
    command: str
    mounts: list[Mount]


def processes() -> Iterator[Process]:
    """All processes that we may look at; those that end meanwhile are left out."""
    tables: dict[str, list[Mount]] = {}
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            namespace = os.readlink(f"/proc/{pid}/ns/mnt")
            if namespace not in tables:
                tables[namespace] = read_mounts(pid)
            uid = os.stat(f"/proc/{pid}").st_uid
            with open(f"/proc/{pid}/comm", "rb") as comm:
                command = comm.read().rstrip(b"\n").decode("utf-8", "backslashreplace")
        except OSError:
            continue
        yield Process(pid, uid, command, tables[namespace])


def find_holders(trees: list[FilesystemPath]) -> Iterator[tuple[FilesystemPath, TreeHolder]]:
    """Each hold on something in one of the trees.

    Links in /proc are read as text and mapped through the process's own mount table, so that bind mounts and
    containers are seen through. Processes that end meanwhile, or that we may not look at, are not found; nor are we.
    """
    for pid, uid, command, mounts in processes():
        if int(pid) == os.getpid():
            continue
        for kind, path in set(_links(pid)):
            place = find_place(path, mounts)
            for tree in trees:
                if place is not None and tree.holds(place):
                    yield tree, TreeHolder(int(pid), uid, command, kind, below(place.path, tree.path))


def serves_fuse(pid: int) -> bool:
    """Whether a process serves a FUSE mount: what it has open there is other processes', which are found too."""
    with suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                if os.readlink(f"/proc/{pid}/fd/{fd}") == "/dev/fuse":
                    return True
    return False


def _links(pid: str) -> Iterator[tuple[str, bytes]]:
    for kind in ("cwd", "root", "exe"):
        yield from _link(kind, f"/proc/{pid}/{kind}")
    try:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            yield from _link("fd", f"/proc/{pid}/fd/{fd}")
        with open(f"/proc/{pid}/maps", "rb") as lines:
            for line in lines:
                path = line.rstrip(b"\n").split(maxsplit=5)[5:]
                if path and path[0].startswith(b"/"):
                    yield "map", _alive(path[0].replace(b"\\012", b"\n"))
    except OSError:
        return


def _link(kind: str, link: str) -> Iterator[tuple[str, bytes]]:
    try:
        path = os.readlink(os.fsencode(link))
    except OSError:
        return
    if path.startswith(b"/"):
        yield kind, _alive(path)


def _alive(path: bytes) -> bytes:
    return path.removesuffix(b" (deleted)")
