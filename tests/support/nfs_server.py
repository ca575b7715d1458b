"""Serving NFS from a virtual machine (uml_machine), and mounting it in another; these run in there.

The shortest lease and grace that Linux's server takes are 10 s.
"""

import os
import subprocess
from pathlib import Path

from tests.support import uml_guest
from tests.support.uml_guest import Line

EXPORT = "/mnt/export"
MIN_LEASE_S = 10
_NFSD = Path("/proc/fs/nfsd")
_STATE = Path("/var/lib/nfs")
_THREADS = 8


def _run_command(*argv: str) -> None:
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=20)
    if done.returncode:
        raise RuntimeError(f"{argv}: {done.returncode} {done.stderr or done.stdout}")


def _make_state() -> None:
    """What the daemons find at their start; it is in memory, so lost with the machine."""
    for name in ("sm", "sm.bak", "v4recovery", "nfsdcltrack"):
        (_STATE / name).mkdir(parents=True, exist_ok=True)
    for name in ("etab", "rmtab", "state"):
        (_STATE / name).touch()


def start_locks(_line: Line) -> None:
    """What NFS 3's locks need on clients and servers: rpcbind and statd."""
    _make_state()
    _run_command("rpcbind", "-w")
    _run_command("rpc.statd", "--no-notify")


def serve(_line: Line, has_disk: bool) -> None:
    """Serve its disk, or memory, with all versions."""
    if has_disk:
        uml_guest.mount("/dev/ubda", EXPORT, "ext4")
    else:
        uml_guest.mount("export", EXPORT, "tmpfs", "mode=755")
    start_locks(_line)
    uml_guest.mount("nfsd", _NFSD, "nfsd")
    _run_command("exportfs", "-i", "-o", "rw,sync,no_root_squash,no_subtree_check,fsid=0,insecure", f"*:{EXPORT}")
    _run_command("rpc.mountd")
    start(_line)
    end_grace(_line)


def start(_line: Line) -> None:
    """Begin to serve, with a grace time; all locks of the time before are to be reclaimed."""
    for name in ("nfsv4leasetime", "nfsv4gracetime"):
        (_NFSD / name).write_text(str(MIN_LEASE_S))
    Path("/proc/sys/fs/nfs/nlm_grace_period").write_text(str(MIN_LEASE_S))
    _run_command("rpc.nfsd", str(_THREADS))


def end_grace(_line: Line) -> None:
    """No reclaim is waited for any longer, by either version's locks."""
    for path in (_NFSD / "v4_end_grace", Path("/proc/fs/lockd/nlm_end_grace")):
        path.write_text("Y")


def mount(_line: Line, server: str, own: str, options: str, target: str, source: str = "/") -> None:
    """Mount an export, by mount(2): no helper that tries other ways."""
    data = f"{options},addr={server}" + ("" if "vers=3" in options else f",clientaddr={own}")
    os.makedirs(target, exist_ok=True)
    uml_guest.mount(f"{server}:{source}", target, "nfs" if "vers=3" in options else "nfs4", data)
