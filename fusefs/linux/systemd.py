"""The service manager of this machine, or this user's own, as its tools show it."""

from __future__ import annotations

import os
import subprocess

_BOOTED = "/run/systemd/system"


class SystemdFailed(Exception):
    """A tool of systemd said no; the text is its own."""


def is_running(*, for_user: bool = False) -> bool:
    """Whether there is a manager to talk to. Source  sd_booted(3)"""
    if for_user:
        return os.path.exists(f"{os.environ.get('XDG_RUNTIME_DIR', '')}/systemd/private")
    return os.path.isdir(_BOOTED)


def run(program: str, *words: str, for_user: bool = False) -> str:
    """What systemctl, systemd-sysusers and their like print.

    Raises  SystemdFailed, FileNotFoundError without the program
    """
    done = subprocess.run(
        [program, *(["--user"] if for_user else []), *words],
        env={**os.environ, "LC_ALL": "C.UTF-8", "SYSTEMD_PAGER": "", "SYSTEMD_COLORS": "0"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="backslashreplace",
        check=False,
    )
    if done.returncode:
        raise SystemdFailed(done.stderr.strip() or f"{program}: exit code {done.returncode}")
    return done.stdout


def properties(names: tuple[str, ...], units: tuple[str, ...], *, for_user: bool = False) -> list[dict[str, str]]:
    """Those properties of each unit, empty where its kind has none; a pattern stands for the units that are loaded.

    Raises  SystemdFailed, FileNotFoundError without systemctl
    """
    text = run("systemctl", "show", f"--property={','.join(names)}", "--", *units, for_user=for_user)
    blocks = (block.splitlines() for block in text.strip().split("\n\n") if block)
    none = dict.fromkeys(names, "")
    return [none | dict(line.split("=", 1) for line in lines if "=" in line) for lines in blocks]
