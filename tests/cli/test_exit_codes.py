"""What a person or a program is told when something goes wrong: exit codes, hints, and nothing else."""

import errno
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fusefs.cli import main
from fusefs.core.errors import NotFound
from tests.support.make_trees import make_tree
from tests.support.trashd_command import TRASHD, done_well

pytestmark = pytest.mark.needs("root")


def make_victim(volume: Path, name: str = "victim") -> Path:
    return make_tree(volume / name, {"file": "content"})


def test_what_is_told_to_a_closed_standard_error_is_in_no_file(volume: Path) -> None:
    victim = make_victim(volume)
    refused = f"exec {TRASHD} rm missing {victim} 2>&-"
    assert subprocess.run(["sh", "-c", refused], cwd=volume, stdout=subprocess.DEVNULL, check=False).returncode == 13
    (found,) = done_well("list", "--json", "--volume", volume).objects()
    assert found["origin"] == str(victim)


@pytest.mark.parametrize("end", [KeyboardInterrupt(), NotFound("x"), OSError(errno.EIO, "x", "x")])
def test_what_was_printed_is_out_however_it_ends(monkeypatch: pytest.MonkeyPatch, end: BaseException) -> None:
    def prints(_arguments: list[str]) -> int:
        print("done so far")
        raise end

    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out))
    monkeypatch.setattr(main, "_run", prints)
    assert main.run([]) != 0
    assert out.getvalue() == b"done so far\n"


def test_a_closed_pipe_ends_it_silently() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as pipe:
        done = subprocess.run([TRASHD, "--help"], stdout=pipe, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 141
    assert done.stderr == b""


def test_where_a_user_may_not_write_is_told_as_he_knows_it(volume: Path) -> None:
    home = volume / "home"
    command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", TRASHD, "pause"]
    variables = {**os.environ, "HOME": str(home), "XDG_RUNTIME_DIR": "", "XDG_STATE_HOME": "", "XDG_CACHE_HOME": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=variables, check=False)
    assert done.returncode == 4
    assert f"Not permitted: {home}" in done.stderr


@pytest.mark.parametrize("words", ["sweep . --name x --print"])
def test_who_is_in_a_directory_that_was_removed_is_told_so(volume: Path, words: str) -> None:
    (volume / "here").mkdir()
    shell = f'cd "{volume}/here" && rmdir "{volume}/here" && exec {TRASHD} {words}'
    done = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=False)
    assert (done.returncode, "the working directory was removed" in done.stderr) == (5, True)


@pytest.mark.parametrize("words", ["sweep {} --name x --delete", "sweep {} --name x --print", "swap {}"])
def test_an_output_that_is_full_is_no_full_volume(volume: Path, words: str) -> None:
    make_tree(volume / "victim", {"x": ""})
    command = [TRASHD, *words.format(volume / "victim").split()]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, "standard output: No space left on device" in done.stderr) == (11, True)
    assert "reap" not in done.stderr
