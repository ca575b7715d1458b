"""Whether the kernel labels files."""

import os
import subprocess
from pathlib import Path

import pytest

from fusefs.linux import xattrs


@pytest.mark.needs("root")
def test_it_is_on_iff_its_filesystem_can_be_mounted() -> None:
    done = subprocess.run(
        ["unshare", "--mount", "mount", "-t", "selinuxfs", "none", "/mnt"],
        env=dict(os.environ, LC_ALL="C"), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert xattrs.is_selinux_enabled() == ("unknown filesystem type" not in done.stderr)


@pytest.mark.parametrize(
    ("text", "is_enabled"),
    [("nodev\tsysfs\nnodev\tselinuxfs\n\text4\n", True), ("nodev\tsysfs\n\text4\n", False), ("", False)],
)
def test_the_kernel_lists_its_filesystem_iff_it_is_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, is_enabled: bool
) -> None:
    (tmp_path / "filesystems").write_text(text)
    monkeypatch.setattr(xattrs, "_FILESYSTEMS", tmp_path / "filesystems")
    assert xattrs.is_selinux_enabled() == is_enabled


def test_without_proc_it_is_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xattrs, "_FILESYSTEMS", tmp_path / "none")
    assert not xattrs.is_selinux_enabled()
