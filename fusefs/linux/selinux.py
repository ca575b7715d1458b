"""Whether this kernel labels files for SELinux."""

from __future__ import annotations

from pathlib import Path

_FILESYSTEMS = Path("/proc/filesystems")


def is_enabled() -> bool:
    """Whether SELinux is on, enforcing or not: then, and only then, the kernel has its filesystem.

    Source  selinuxfs: registered at boot, unless SELinux is compiled out, off by the command line, or not among the
            security modules in use; libselinux's is_selinux_enabled asks the same wherever it isn't mounted
    """
    try:
        return any(line.split()[-1:] == ["selinuxfs"] for line in _FILESYSTEMS.read_text().splitlines())
    except OSError:
        return False
