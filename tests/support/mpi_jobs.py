"""trashd as an MPI job of a user's, by whichever MPI there is; each rank on a mount of its own, if asked for.

The Python that has mpi4py is this one, or that of the environment in TRASHD_TEST_MPI. One mpi4py serves both: it is
told whose library to load. MPICH comes from PyPI; Open MPI is Debian's (openmpi-bin).
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypedDict, Unpack

from fusefs.core.pacing import SliceBudget
from fusefs.engine.mpi_ranks import RankRunner
from fusefs.engine.strategy import choose_for_rank
from fusefs.linux.kernel import Kernel
from fusefs.store.orphans import find_container
from tests.support.fuse_slow import SlowVolume, slow_volume
from tests.support.other_users import as_user
from tests.support.proc_stat import all_stats
from tests.support.real_filesystems import tmpfs_volume
from tests.support.store_verbs import assert_silent, init, raw, swap, users_own
from tests.support.trashd_command import CommandResult, environment

USER = 1001
PREFIX = Path(os.environ.get("TRASHD_TEST_MPI", sys.prefix))
PYTHON = PREFIX / "bin/python"
ROOT = Path(__file__).parents[2]
_LIMIT_S = 100
_OPEN_MPI = "mpiexec.openmpi"
_ON_NODE = """
IFS=: read -ra nodes <<<"$3"
mount --bind "${nodes[PMI_RANK % ${#nodes[@]}]}" "$1"
exec setpriv --reuid="$2" --regid="$2" --clear-groups "${@:4}"
"""
"""AT UID NODE:NODE… COMMAND…: of the nodes the one that is the rank's is seen at AT."""


def mpiexec(mpi: str) -> list[str]:
    """What starts ranks by that MPI."""
    if mpi == "mpich":
        return [str(PREFIX / "bin/mpiexec")]
    return [_OPEN_MPI, "--oversubscribe", "-x", "MPI4PY_MPIABI=openmpi", "--mca", "btl_base_warn_component_unused", "0"]


def why_no_mpi(mpi: str) -> str | None:
    """Why there can be no job by that MPI."""
    program = mpiexec(mpi)[0]
    if shutil.which(program) is None:
        return f"no {program}"
    asked = subprocess.run([PYTHON, "-c", "import mpi4py"], capture_output=True, check=False)
    return None if asked.returncode == 0 else f"{PYTHON} has no mpi4py"


class Ranks(NamedTuple):
    """A running job."""

    process: subprocess.Popen[str]

    def pids(self) -> list[int]:
        """Those of its ranks that live: all Python processes of the job's session or below mpiexec."""
        below = {self.process.pid}
        parents = {pid: int(stat[1]) for pid, stat in all_stats()}
        for _ in range(4):
            below |= {pid for pid, parent in parents.items() if parent in below}
        return [pid for pid in below if _is_python(pid)]

    def lose(self, pid: int) -> None:
        """Kill a rank. What MPI has in memory for it stays there for ever, unless it is taken away."""
        with suppress(OSError):
            maps = Path(f"/proc/{pid}/maps").read_text()
            shared = {line.split()[5] for line in maps.splitlines() if " /dev/shm/" in line}
            os.kill(pid, signal.SIGKILL)
            for path in shared:
                Path(path).unlink(missing_ok=True)

    def wait(self, limit_s: float = _LIMIT_S) -> CommandResult:
        """How mpiexec ended, and what was said."""
        out, err = self.process.communicate(timeout=limit_s)
        return CommandResult(self.process.returncode, out, err)


def _is_python(pid: int) -> bool:
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return words[0] == os.fsencode(PYTHON) and b"fusefs.cli.main" in words
    return False


class RanksAs(TypedDict, total=False):
    """What `start_job` may be told of its ranks, and so whoever calls it."""

    uid: int
    nodes: Sequence[Path]
    at: Path
    first: Sequence[str | Path]


def run_ranks(mpi: str, n: int, *words: str | Path, **options: Unpack[RanksAs]) -> CommandResult:
    """`mpiexec -n N trashd WORDS`, to its end."""
    return start_ranks(mpi, n, *words, **options).wait()


def start_ranks(mpi: str, n: int, *words: str | Path, **options: Unpack[RanksAs]) -> Ranks:
    """`mpiexec -n N trashd WORDS`."""
    return start_job(mpi, n, [PYTHON, "-m", "fusefs.cli.main", *words], **options)


def start_job(
    mpi: str,
    n: int,
    command: Sequence[str | Path],
    *,
    uid: int = USER,
    nodes: Sequence[Path] = (),
    at: Path | None = None,
    first: Sequence[str | Path] = (),
) -> Ranks:
    """`mpiexec -n N COMMAND` as a user.

    nodes  one's content is seen by each rank at that path; MPICH only
    first  a command that is the first rank, beside these
    """
    command = [*map(str, command)]
    as_uid = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"]
    if nodes:
        assert at is not None
        on_node = ["unshare", "--mount", "--propagation=private", "bash", "-c", _ON_NODE, "node", str(at), str(uid)]
        argv = [*mpiexec(mpi), "-n", str(n), *on_node, ":".join(map(str, nodes)), *command]
    else:
        before = ["-n", "1", *map(str, first), ":"] if first else []
        argv = [*as_uid, *mpiexec(mpi), *before, "-n", str(n), *command]
    home = Path(os.environ.get("TMPDIR", "/var/tmp")) / f"mpi-home-{uid}"
    home.mkdir(exist_ok=True, mode=0o700)
    os.chown(home, uid, uid)
    added = {"PYTHONPATH": str(ROOT), "HOME": str(home), "TMPDIR": str(home), "PYTHONDONTWRITEBYTECODE": "1"}
    if not uid:
        added |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    process = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(added),
        start_new_session=True,
    )
    return Ranks(process)


@contextmanager
def open_mistaken(kernel: Kernel, n_ranks: int) -> Iterator[RankRunner[Any, Any]]:
    """See engine.mpi_ranks.OpensRunner: it runs no slice without a mistake."""

    def divide_by_zero(_work: object, _budget: SliceBudget) -> int:
        return 1 // 0

    with kernel.open_path(b"/", os.O_RDONLY | os.O_DIRECTORY) as fd:
        yield RankRunner(divide_by_zero, choose_for_rank(kernel, fd, 1, n_ranks))


def store_of_user(volume: Path) -> None:
    """A store on a volume that is a user's own."""
    os.chown(volume, USER, USER)
    as_user(USER, lambda: init(volume))


def folder_of_user(volume: Path) -> Path:
    """The user's folder in that store; it has to be there."""
    folder = users_own(volume, USER) / "u" / str(USER)
    assert folder.exists()
    return folder


def give_to_user(tree: Path) -> None:
    """Make the user the owner of all that is in a tree."""
    subprocess.run(["chown", "--recursive", "--no-dereference", f"{USER}:{USER}", tree], check=True)


def swap_by_user(tree: Path) -> str:
    """The id of the orphan that a tree of the user's becomes."""
    return as_user(USER, lambda: str(swap(tree).id))


def orphan_of_user(tree: Path) -> str:
    """The id of the orphan that a tree becomes, given to the user before."""
    give_to_user(tree)
    return swap_by_user(tree)


def is_gone(volume: Path, identifier: str) -> bool:
    """Whether nothing of an orphan is left in any state."""
    return not any(folder_of_user(volume).glob(f"*/{identifier}*"))


def state_of_user(volume: Path, identifier: str) -> str:
    """The state of a user's orphan."""
    return as_user(USER, lambda: find_container(Kernel(), [raw(volume)], identifier).state.value)


class RankMounts(NamedTuple):
    """The mounts, all of which are seen at the first one's path by the ranks on them."""

    mounts: list[SlowVolume]

    @property
    def path(self) -> Path:
        return self.mounts[0].path

    def slow(self, us: int) -> None:
        """Let each call take so long."""
        for one in self.mounts:
            one.delay(us)
            one.delay_all()

    def shares(self, message: str) -> list[float]:
        """Which part of what was asked came from each."""
        n = [one.n_messages.get(message, 0) for one in self.mounts]
        return [one / sum(n) for one in n]

    def run(self, n_ranks: int, *words: str | Path) -> CommandResult:
        """`mpiexec -n N trashd WORDS` on them in turn, as the user."""
        return run_ranks("mpich", n_ranks, *words, nodes=[one.path for one in self.mounts], at=self.path)


@contextmanager
def user_nodes(n: int) -> Iterator[RankMounts]:
    """A user's volume, as so many machines have it; the checker must have nothing to say at the end."""
    with ExitStack() as owned:
        source = owned.enter_context(tmpfs_volume("256m"))
        os.chown(source, USER, USER)
        made = RankMounts([owned.enter_context(slow_volume(source, 0, limit_s=300)) for _ in range(n)])
        store_of_user(made.path)
        yield made
        made.slow(0)
        as_user(USER, lambda: assert_silent(made.path))
