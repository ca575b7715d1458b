"""Where bench/listing.py lists: fresh volumes, and servers that need 1 ms for a look (tests/support/slowfs.c)."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from bench.support import volume
from tests.support.acls import ACCESS, GROUP_OBJ, MASK, NOBODY, OTHER, USER, USER_OBJ, acl
from tests.support.fuse_slow import Xattrs, slow_volume


class Server(NamedTuple):
    """What makes a slow server one of its kind.

    lifetime_s    how long names and attributes are believed that it told
    n_per_acl     of so many files one has an ACL; 0: none has
    delays_all    whether all that it is asked takes 1 ms, an extended attribute too; else lookups and getattrs alone
    """

    lifetime_s: float
    xattrs: Xattrs
    n_per_acl: int = 0
    delays_all: bool = True


SLOW = "slow"
"""Without extended attributes, as many a network's."""
N_PER_ACL = 10
_KINDS = (("a tenth", Xattrs.ALL, N_PER_ACL), ("absent", Xattrs.ALL, 0), ("unsupported", Xattrs.NONE, 0))
SERVERS = MappingProxyType(
    {SLOW: Server(1, Xattrs.NONE, delays_all=False)}
    | {f"{label}, {s} s": Server(s, xattrs, n) for s in (5, 0) for label, xattrs, n in _KINDS}
)
ABOUT_XATTRS = tuple(name for name in SERVERS if name != SLOW)
"""How many files have one, and for how long the server is believed."""
SOMEBODYS = acl((USER_OBJ, 6, NOBODY), (USER, 6, 1000), (GROUP_OBJ, 4, NOBODY), (MASK, 6, NOBODY), (OTHER, 4, NOBODY))


@contextlib.contextmanager
def scene(name: str, make: Callable[[Path], None]) -> Iterator[Path]:
    """A source in a fresh volume, filled; slow is of tmpfs, which is slow only where it is seen."""
    server = SERVERS.get(name)
    with volume("tmpfs" if server else name) as root:
        source = root / "source"
        make(source)
        if server and server.n_per_acl:
            for file in sorted(source.rglob("f[0-9]*"))[:: server.n_per_acl]:
                os.setxattr(file, ACCESS, SOMEBODYS)
        yield source


@contextlib.contextmanager
def serve_scene(name: str, source: Path, limit_s: float) -> Iterator[Path]:
    """Serve the source as slowly as the scene requires. Yields  its path there"""
    server = SERVERS.get(name)
    if server is None:
        yield source
        return
    with slow_volume(source, ttl_s=server.lifetime_s, xattrs=server.xattrs, limit_s=limit_s) as slow:
        slow.delay_all(is_all=server.delays_all)
        yield slow.path
