"""The tree of `make tarball`, as an ordinary user has it: without root and network, wherever it is."""

import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

import pytest

from build_docs.man_pages import page_names
from fusefs.cli.service import PACKAGES, pieces_for_all
from fusefs.core.service_status import VolumePhase
from fusefs.core.version import VERSION
from tests.support.other_users import as_user, run_as
from tests.support.real_filesystems import tmpfs_volume
from tests.support.service_process import Service, service
from tests.support.store_verbs import assert_silent

pytestmark = pytest.mark.needs("root")

REPO = Path(__file__).parents[2]
TARBALL = REPO / f"dist/trashd-{VERSION}-{platform.machine()}.tar.gz"
OLD = REPO / f"build/packages/0.3.0/dist/trashd-0.3.0-{platform.machine()}.tar.gz"
ALICE = 1001
MODULES = [*Path("/usr/lib").glob("*/modulecmd.tcl"), *Path("/usr/share/lmod/lmod/libexec").glob("lmod")]
"""Environment Modules and Lmod: a machine has one of them."""
SHARED = ("man/man1/", "man/man5/", "bash-completion/", "zsh/", "fish/", "doc/")


class User(NamedTuple):
    """Somebody who has a home and nothing else, on a machine without network."""

    home: Path

    def run(self, *words: str | Path, code: int = 0, path: str | Path = "/usr/bin:/bin") -> str:
        """What a command says."""
        alone = ["unshare", "--net", "setpriv", f"--reuid={ALICE}", f"--regid={ALICE}", "--clear-groups", "env", "-i"]
        done = subprocess.run(
            [*alone, "LC_ALL=C.UTF-8", f"HOME={self.home}", f"PATH={path}", *words],
            cwd=self.home, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == code, done
        return done.stdout + done.stderr

    def unpack(self, where: str = "some place", tarball: Path = TARBALL) -> Path:
        """The tree."""
        self.run("mkdir", where)
        self.run("tar", "--extract", "--directory", where, f"--file={tarball}")
        (tree,) = (self.home / where).iterdir()
        return tree

    def serve(self, trashd: Path) -> AbstractContextManager[Service]:
        """A service of this user's."""
        state = self.home / "state"
        config = "# 0.3.0 has no key grace\n"
        return service(state, config=config, environment={"HOME": str(self.home)}, user=ALICE, command=(trashd,))


@pytest.fixture
def user() -> Iterator[User]:
    with tmpfs_volume("128m", [f"uid={ALICE}", f"gid={ALICE}"]) as home:
        yield User(home)


@pytest.mark.timeout(600)  # pip compiles pyfuse3
def test_a_user_builds_it_without_make_setup(user: User) -> None:
    clone = user.home / "clone"
    subprocess.run(["git", "clone", "--quiet", "--depth=1", REPO.as_uri(), clone], check=True)
    subprocess.run(["chown", "--recursive", f"{ALICE}:{ALICE}", clone], check=True)
    run_as(ALICE, ["make", "tarball"], cwd=clone, env={**os.environ, "HOME": str(user.home), "TMPDIR": ""}, check=True)
    assert (clone / "dist" / TARBALL.name).exists()
    assert not (clone / ".venv").exists()


def test_it_runs_and_runs_after_it_has_been_moved(user: User) -> None:
    trashd = user.unpack() / "bin/trashd"
    assert user.run(trashd, "--version") == f"trashd, version {VERSION}\n"
    job = user.home / "job"
    user.run("mkdir", job)
    (job / "file").write_text("content")
    user.run(trashd, "rm", job)
    assert not job.exists()
    assert str(job) in user.run(trashd, "list")
    user.run("mv", user.home / "some place", user.home / "other")
    user.run("ln", "--symbolic", user.home / f"other/trashd-{VERSION}/bin/trashd", user.home / "link")
    assert str(job) in user.run(user.home / "link", "list")
    user.run(user.home / "link", "restore", job)
    assert (job / "file").read_text() == "content"
    as_user(ALICE, lambda: assert_silent(user.home))


@pytest.mark.skipif(not OLD.exists(), reason="make packages builds 0.3.0")
def test_orphans_and_service_of_0_3_0_are_taken_over(user: User) -> None:
    old = user.unpack("old", OLD) / "bin/trashd"
    for name in ("restorable", "pinned", "due"):
        user.run("mkdir", name)
        (user.home / name / "file").write_text(name)
    user.run(old, "swap", "restorable")
    user.run(old, "keep", user.run(old, "swap", "--print-id", "pinned").strip())
    user.run("mkdir", "state")
    with user.serve(old):
        new = user.unpack("new") / "bin/trashd"
        user.run("rm", "-r", "old")
        assert str(user.home / "pinned") in user.run(new, "list")
    with user.serve(new) as running:
        running.until_phase(user.home, VolumePhase.IDLE)
        user.run(new, "swap", "--keep-for", "0s", "due")
        running.until(lambda: str(user.home / "due") not in user.run(new, "list"))
    for name in ("restorable", "pinned"):
        user.run(new, "restore", user.home / name)
        assert (user.home / name / "file").read_text() == name
    as_user(ALICE, lambda: assert_silent(user.home))


def test_a_users_own_service_is_of_this_tree(user: User) -> None:
    tree = user.unpack()
    user.run(tree / "bin/trashd", "service", "install", "--user")
    unit = user.home / ".local/share/systemd/user/trashd-reaper.service"
    assert f'"{tree}/bin/trashd"' in unit.read_text()


def test_a_python_that_is_missing_is_named(user: User) -> None:
    trashd = user.unpack() / "bin/trashd"
    user.run("mkdir", "bin")
    for name in ("sh", "readlink"):
        user.run("ln", "--symbolic", f"/usr/bin/{name}", f"bin/{name}")
    told = user.run(trashd, "--version", path=user.home / "bin", code=127)
    assert "Python {}.{} is not here".format(*sys.version_info) in told
    assert "TRASHD_PYTHON is /bin/false" in user.run("env", "TRASHD_PYTHON=/bin/false", trashd, "list", code=127)
    python = Path(sys.executable).resolve()
    told = user.run("/usr/bin/env", f"TRASHD_PYTHON={python}", trashd, "--version", path=user.home / "bin")
    assert VERSION in told


def test_links_between_its_pages_lead_somewhere(user: User) -> None:
    pages = [*(user.unpack() / "share/doc/trashd").rglob("*.md")]
    assert len(pages) > 50
    for page in pages:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists() or "tests/" in target or "bench/" in target, (page, target)


def test_it_has_of_the_one_list_what_a_user_can_use(user: User) -> None:
    share = user.unpack() / "share"
    pieces = {piece.path.removeprefix(f"{PACKAGES}/share/"): piece.content for piece in pieces_for_all(PACKAGES)}
    wanted = {name: content for name, content in pieces.items() if name.startswith(SHARED)}
    assert len(wanted) == 7 + len(page_names())
    assert {name: (share / name).read_bytes() for name in wanted} == wanted


def test_a_machine_for_this_has_environment_modules_or_lmod() -> None:
    assert MODULES, "apt-get install environment-modules, or lmod"


@pytest.mark.parametrize("modules", MODULES, ids=lambda path: path.name)
@pytest.mark.parametrize("is_link", [False, True], ids=["itself", "link"])
def test_its_module_brings_command_and_pages_and_takes_them_away(user: User, modules: Path, is_link: bool) -> None:
    reads_spaces = modules.name != "lmod"  # in a Tcl modulefile's path: Lmod 8.6
    tree = user.unpack("some place" if reads_spaces or is_link else "place")
    place = tree / "modulefiles"
    if is_link:
        place = user.home / "modulefiles"
        user.run("mkdir", "-p", place / "trashd")
        user.run("ln", "--symbolic", tree / f"modulefiles/trashd/{VERSION}", place / "trashd")
    interpreter = "tclsh " if modules.name == "modulecmd.tcl" else ""
    script = f"""
        set -e
        module() {{ eval "$({interpreter}{modules} bash "$@")"; }}
        module use "{place}"
        before=$PATH
        module load trashd
        command -v trashd
        man -w trashd trashd-swap
        echo "$XDG_DATA_DIRS"
        trashd --version
        man -w ls >/dev/null
        module unload trashd
        [ "$PATH" = "$before" ]
        man -w ls >/dev/null
    """
    assert user.run("bash", "-c", script).splitlines() == [
        f"{tree}/bin/trashd",
        f"{tree}/share/man/man1/trashd.1",
        f"{tree}/share/man/man1/trashd-swap.1",
        f"/usr/local/share:/usr/share:{tree}/share",
        f"trashd, version {VERSION}",
    ]
