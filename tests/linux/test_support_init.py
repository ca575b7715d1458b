"""What .ci/init brings: users that the machine need not have, and a way to the clone wherever it lies."""

import os
import stat
import subprocess
from pathlib import Path

import pytest

from tests.support.mount_namespaces import ROOTS, see_own_mounts_only

REPO = Path(__file__).parents[2]
INSIDE = (
    "unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--propagation", "private",
    REPO / ".ci/init",
)  # fmt: skip
AS_OTHER = "setpriv --reuid={0} --regid={0} --clear-groups "

pytestmark = pytest.mark.needs("root")


def inside(cwd: Path, script: str) -> str:
    return subprocess.run([*INSIDE, "sh", "-euc", script], cwd=cwd, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("above", ["shut", "shut/and/more", "a,colon:and\\more"])
@pytest.mark.parametrize("uid", [1000, 4711])
def test_others_pass_to_a_clone_below_a_private_directory(tmp_path: Path, above: str, uid: int) -> None:
    clone = tmp_path / above / "clone"
    clone.mkdir(parents=True)
    (clone / "file").write_text("content")
    for directory in (clone.parent, tmp_path / above.partition("/")[0]):
        directory.chmod(0o700)
    assert inside(clone, AS_OTHER.format(uid) + 'cat "$PWD/file" file') == 2 * "content"
    inside(clone, "echo made > made")
    assert (clone / "made").read_text() == "made\n", "the clone is the clone itself"
    assert stat.S_IMODE(clone.parent.stat().st_mode) == 0o700, "of the machine nothing changes"


def test_the_machines_list_of_stores_is_not_theirs(tmp_path: Path) -> None:
    mark = f"{tmp_path.name}-{os.getpid()}"
    assert inside(tmp_path, f"ls /var/lib/trashd; echo > /var/lib/trashd/{mark}") == ""
    pid = os.fork()
    if pid == 0:
        see_own_mounts_only()  # as the benchmarks and each of the tests' workers do
        (ROOTS / mark).touch()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert not (ROOTS / mark).exists()
