from collections.abc import Callable, Mapping

from fusefs.core.fuse_protocol import Request
from fusefs.linux.fuse_ring import FuseRing
from fusefs.linux.io_uring import RingLayout
from fusefs.mount.requests.ring_servers import Later
from fusefs.mount.tables.tables_lock import Turn

class TurnsLock:
    def acquire(self) -> None: ...
    def release(self) -> None: ...
    def unshare(self) -> None: ...

class Core:
    def __init__(
        self,
        parts: Mapping[str, object],
        cells: memoryview,
        cell_of: Mapping[int, int],
        layout: tuple[int, int, int, int, int, int],
        device: int,
        root_fd: int,
        n_fds: int,
        top: int,
        root_dev: int,
        statx_flags: int,
        is_shared: bool,
        tells_xattrs: bool,
        hides_labels: bool,
        acts_as_others: bool,
        hides_trash: bool,
        lifetime_s: float,
        quick_ns: int,
        at_rest: bytes,
        no_capabilities: bytes,
    ) -> None: ...
    def forget(self, forgotten: Request, /) -> None: ...

class CoreRing:
    def __init__(
        self, core: Core, ring: FuseRing, turn: Turn, later: Later, fd: int, layout: RingLayout, /
    ) -> None: ...
    def enter(self, n_results: int, timeout_s: float, /) -> list[tuple[int, int]]: ...
    def add(self, token: int, address: int, queue: int, /) -> None: ...

class CoreDevice:
    def __init__(
        self,
        core: Core,
        turn: Turn,
        later: Later,
        lost: Callable[[int, int], None],
        memory: memoryview,
        wake_fd: int,
        rest_ms: int,
        /,
    ) -> None: ...
    def read(self, waits: bool, /) -> int: ...
