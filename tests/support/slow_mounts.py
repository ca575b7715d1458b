"""A mount of a slow filesystem, which counts itself what it is asked, and a directory in it that has many files."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.support.foreground_mount import Mounted, trashd_mount, until
from tests.support.fuse_slow import SlowVolume, Xattrs, slow_volume
from tests.support.make_trees import fill
from tests.support.real_filesystems import tmpfs_volume

SLOW = "backing=slow"
N = 1000
LIMIT_S = 60.0


class SlowMount(NamedTuple):
    """The volume, its mount, and the directory."""

    volume: SlowVolume
    mounted: Mounted
    name: str = "flat"

    @property
    def top(self) -> Path:
        return self.mounted.path / self.name

    @property
    def backing(self) -> Path:
        return self.volume.backing / self.name

    def count_requests(self) -> dict[str, int]:
        """Wait until no prefetch runs; return how many requests the slow filesystem has had, by operation."""
        began_ns = time.time_ns()
        os.statvfs(self.mounted.path)  # after each operation, and until nothing is fetched, there are new numbers

        def rests() -> bool:
            stats = self.mounted.stats()
            return stats.updated_ns > began_ns and not stats.gauges["n_prefetches"] and not self.volume.n_under_way

        rested, stats = until(rests, LIMIT_S), self.mounted.stats()
        late_ms = (began_ns - stats.updated_ns) / 1e6
        assert rested, f"numbers {late_ms} ms too old, {stats.gauges}, {self.volume.n_under_way} under way below"
        return {name: n for name, n in self.volume.n_messages.items() if name != "statfs"}

    def count_requests_since(self, before: dict[str, int]) -> dict[str, int]:
        now = self.count_requests()
        return {name: n - before.get(name, 0) for name, n in now.items() if n != before.get(name, 0)}

    def count_entry_requests(self) -> int:
        """Return how many lookup and getattr requests the slow filesystem has had."""
        counts = self.count_requests()
        return counts.get("lookup", 0) + counts.get("getattr", 0)

    def forget_all(self) -> None:
        """Let the kernel forget what it knows of both filesystems, so that only the daemon remembers."""
        self.mounted.forget_all()
        self.volume.forget_all()


@contextmanager
def slow_mount(
    *options: str,
    n: int = N,
    make: Callable[[Path, int], object] = fill,
    delay_us: int = 100,
    ttl_s: float = 1000,
    xattrs: Xattrs = Xattrs.ALL,
    limit_s: float = 90,
) -> Iterator[SlowMount]:
    """make: what makes the directory, with n files. For the rest see slow_volume and trashd_mount."""
    with tmpfs_volume(options=["nr_inodes=50000"]) as source:
        make(source / "flat", n)
        point = source.with_name("mounted")
        own = ["coherence=exclusive", *options]
        with (
            slow_volume(source, delay_us, ttl_s, xattrs=xattrs, limit_s=limit_s + 10) as volume,
            trashd_mount(volume.path, point, own, limit_s=limit_s) as mounted,
        ):
            yield SlowMount(volume, mounted)
