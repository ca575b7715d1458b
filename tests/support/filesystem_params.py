"""The filesystems that one test after the other is run on, as parameters that say what the machine must have for it."""

import pytest

ON_DISK = [
    pytest.param("ext4", marks=pytest.mark.needs("loop")),
    pytest.param("xfs", marks=pytest.mark.needs("loop", "xfs")),
    pytest.param("btrfs", marks=pytest.mark.needs("loop", "btrfs")),
]
WITH_XFS = pytest.mark.parametrize(
    "volume", ["tmpfs", "ext4", pytest.param("xfs", marks=pytest.mark.needs("xfs"))], indirect=True, scope="module"
)
"""Of tests of the mount, whose `volume` is a tmpfs or an ext4 by itself."""
ALL_FILESYSTEMS = ["tmpfs", *ON_DISK]
