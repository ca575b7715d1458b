"""What tests have virtual machines do (uml_machine); these run in there."""

import io
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from fusefs.cli.main import run as run_command_line
from fusefs.linux.machine_identity import boot_id, host_id
from tests.support.trashd_command import CommandResult
from tests.support.uml_guest import Line, mount

_REPO = Path(__file__).parents[2]


def who(_line: Line) -> tuple[str, str, str]:
    """Host name, machine id, boot id."""
    return os.uname().nodename, host_id(), boot_id()


def run_command(_line: Line, argv: list[str]) -> CommandResult:
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=30)
    return CommandResult(done.returncode, done.stdout, done.stderr)


def trashd(_line: Line, words: list[str], uid: int = 0) -> CommandResult:
    """Run `trashd WORDS`, in this process; as a user, in the group of the same number."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        if uid:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            os.environ["HOME"] = "/"
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), write_through=True)
        sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), write_through=True)
        code = run_command_line(words)
        sys.stdout.flush()
        out.seek(0)
        err.seek(0)
        return CommandResult(code, os.fsdecode(out.read()), os.fsdecode(err.read()))


N_FILES = 40


def make_directory(_line: Line, path: str) -> None:
    os.mkdir(path)


def make_tree(_line: Line, path: str) -> None:
    """A tree of N_FILES files in four directories."""
    for i in range(4):
        os.makedirs(f"{path}/d{i}")
        for j in range(N_FILES // 4):
            Path(f"{path}/d{i}/f{j}").write_text(f"{i}.{j}")


def count_files(_line: Line, path: str) -> int:
    """How many files with the right content a tree of `make_tree` has."""
    return sum(file.read_text() == f"{file.parent.name[1:]}.{file.name[1:]}" for file in Path(path).rglob("f*"))


def run_pytest(line: Line, words: list[str]) -> int:
    """Run .ci/pytest and report each line that it prints; return its exit code."""
    mount("fuse", "/sys/fs/fuse/connections", "fusectl")
    mount("pts", "/dev/pts", "devpts")
    for path in ("/dev/fuse", "/tmp", "/var/tmp"):  # as on other machines: some tests act as users
        os.chmod(path, 0o1777 if path.endswith("tmp") else 0o666)
    environment = os.environ | {"TRASHD_TEST_SWAPS": "60", "PATH": f"/root/.cargo/bin:{os.environ['PATH']}"}
    argv = [".ci/pytest", "-p", "no:cacheprovider", "--timeout=1500", "-k", "not fsx", *words]
    with subprocess.Popen(
        argv, cwd=_REPO, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace",
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for text in process.stdout:
            line.report(text.rstrip("\n"))
    return process.returncode
