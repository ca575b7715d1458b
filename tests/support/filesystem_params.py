"""The filesystems that one test after the other is run on, as parameters that say what the machine must have for it."""

import pytest

ON_DISK = [
    pytest.param("ext4", marks=pytest.mark.needs("loop")),
    pytest.param("xfs", marks=pytest.mark.needs("loop", "xfs")),
    pytest.param("btrfs", marks=pytest.mark.needs("loop", "btrfs")),
]
ALL_FILESYSTEMS = ["tmpfs", *ON_DISK]
