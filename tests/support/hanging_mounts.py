"""A mount of a filesystem of which one name hangs when it is told to, and clients that wait for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tests.support.background_processes import clients
from tests.support.foreground_mount import Mounted, trashd_mount
from tests.support.fuse_slow import SlowVolume, slow_volume
from tests.support.real_filesystems import tmpfs_volume
from tests.support.trashd_command import TRASHD

N_FILES = 50
"""In each directory, besides a link."""


class HangingMount(NamedTuple):
    """A mount, and a directory with some others in it: through the mount, and behind it."""

    volume: SlowVolume
    mounted: Mounted
    top: Path
    behind: Path

    def own_directory(self, name: str) -> HangingMount:
        """For a test alone."""
        fill(self.behind / name)
        return self._replace(top=self.top / name, behind=self.behind / name)

    @contextmanager
    def hanging(self, *acts: Callable[[Path], object]) -> Iterator[list[int]]:
        """Clients that wait for what is called stuck, until the end of the block at most."""
        self.volume.hang("stuck")
        try:
            with clients([partial(act, self.top) for act in acts]) as pids:
                self.volume.wait_until_hung()
                yield pids
        finally:
            self.volume.go_on()


@contextmanager
def hanging_mount(
    backing: str,
    *,
    coherence: str = "exclusive",
    expect_end: bool = False,
    limit_s: float = 90,
    command: tuple[str, ...] = (TRASHD,),
) -> Iterator[HangingMount]:
    """backing: slow, or local: then it answers at once. For the rest see trashd_mount."""
    delay_us, ttl_s = (200, 1.0) if backing == "slow" else (0, 0.0)
    with tmpfs_volume() as source, slow_volume(source, delay_us, ttl_s, limit_s=limit_s + 10) as volume:
        fill(source)
        with trashd_mount(
            volume.path,
            source.with_name("mounted"),
            [f"coherence={coherence}", f"backing={backing}"],
            limit_s=limit_s,
            expect_end=expect_end,
            command=command,
        ) as mounted:
            try:
                yield HangingMount(volume, mounted, mounted.path, source)
            finally:
                volume.go_on()  # before it is checked whether the daemon is as it was


def fill(top: Path) -> None:
    for name in ("stuck", "free", "also"):
        (top / name).mkdir(parents=True)
        for i in range(N_FILES):
            (top / name / f"{name}-{i}").write_bytes(b"content")
        (top / name / f"{name}-link").symlink_to("target")
