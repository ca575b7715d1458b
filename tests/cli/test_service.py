"""trashd service: what it puts there, what it leaves alone, and what it takes away."""

import os
import shutil
import stat
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from build_docs.man_pages import write_all
from fusefs.cli.service import FileOutcome, find_command, out_of_reach, unit_word
from fusefs.core.uring_choice import SWITCH
from tests.support.booted_systemd import REPO
from tests.support.manual import MAN_FILES
from tests.support.other_users import run_as
from tests.support.real_filesystems import tmpfs_volume
from tests.support.seccomp import IO_URING_SETUP, without
from tests.support.service_process import places, service
from tests.support.trashd_command import TRASHD, CommandResult, done_well, trashd
from tests.support.user_homes import ALICE

SLICE = "usr/local/lib/systemd/system/trashd.slice"
MANIFEST = "usr/local/share/trashd/installed.json"
URING = {"usr/local/lib/tmpfiles.d/trashd-uring.conf", "usr/local/lib/modprobe.d/trashd-uring.conf"}
_PIECES = """
import fusefs
from fusefs.cli.service import pieces_for_all
print(*fusefs.__path__, *(piece.path for piece in pieces_for_all("/usr")))
"""


def install(root: Path, *words: str) -> dict[str, str]:
    """The outcome of each file."""
    return outcomes(root, trashd("service", "install", "--root", root, "--json", *words).objects())


def uninstall(root: Path, *words: str) -> dict[str, str]:
    return outcomes(root, done_well("service", "uninstall", "--root", root, "--json", *words).objects())


def outcomes(root: Path, objects: list[dict[str, str]]) -> dict[str, str]:
    """By the paths without `root`, below which all are told to be."""
    assert all(one["path"].startswith(f"{root}/") for one in objects)
    return {one["path"].removeprefix(str(root)): FileOutcome(one["outcome"]).name for one in objects}


def files_of(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_symlink() or path.is_file()}


def test_all_is_there_after_it(tmp_path: Path) -> None:
    assert set(install(tmp_path).values()) == {"WRITTEN"}
    assert files_of(tmp_path) == {
        "usr/local/lib/systemd/system/trashd-reaper.service", "usr/local/lib/systemd/system/trashd-mount@.service",
        "usr/local/lib/systemd/system/trashd-sweep.service", "usr/local/lib/systemd/system/trashd-sweep.timer",
        "usr/local/lib/systemd/user/trashd-reaper.service", SLICE, "usr/local/lib/sysusers.d/trashd.conf",
        "usr/local/lib/tmpfiles.d/trashd.conf", "etc/trashd/config.toml",
        "sbin/mount.fuse.trashd", "usr/local/share/man/man8/mount.fuse.trashd.8",
        "usr/local/share/bash-completion/completions/trashd", "usr/local/share/zsh/site-functions/_trashd",
        "usr/local/share/fish/vendor_completions.d/trashd.fish",
        "usr/local/share/doc/trashd/examples/grafana-dashboard.json",
        "usr/local/share/doc/trashd/examples/alert-rules.yml",
        *(f"usr/local/share/man/{name}" for name in MAN_FILES),
    }  # fmt: skip
    assert os.access((tmp_path / "sbin/mount.fuse.trashd").readlink(), os.X_OK)


def test_again_changes_nothing(tmp_path: Path) -> None:
    install(tmp_path)
    before = (tmp_path / SLICE).stat().st_ino
    assert set(install(tmp_path).values()) == {"UNCHANGED"}
    assert (tmp_path / SLICE).stat().st_ino == before


@pytest.mark.quick("service")
def test_uninstall_leaves_no_file_and_none_of_its_directories(tmp_path: Path) -> None:
    install(tmp_path)
    assert set(uninstall(tmp_path).values()) == {"REMOVED"}
    assert files_of(tmp_path) == set()
    assert list(tmp_path.rglob("trashd")) == []


def test_uninstall_leaves_what_others_put_beside_it(tmp_path: Path) -> None:
    install(tmp_path)
    (tmp_path / "etc/trashd/config.d").mkdir()
    (tmp_path / "etc/trashd/config.d/own.toml").write_text("")
    uninstall(tmp_path)
    assert files_of(tmp_path) == {"etc/trashd/config.d/own.toml"}


def test_an_edited_unit_stays_and_the_new_one_is_beside_it(tmp_path: Path) -> None:
    install(tmp_path)
    (tmp_path / SLICE).write_text("mine")
    done = trashd("service", "install", "--root", tmp_path)
    assert done.code == 13
    assert f"{tmp_path / SLICE}.new" in done.err
    assert (tmp_path / SLICE).read_text() == "mine"
    assert (tmp_path / f"{SLICE}.new").read_bytes() == (REPO / "systemd/trashd.slice").read_bytes()


def test_a_strangers_file_stays(tmp_path: Path) -> None:
    (tmp_path / SLICE).parent.mkdir(parents=True)
    (tmp_path / SLICE).write_text("theirs")
    assert install(tmp_path)[f"/{SLICE}"] == "KEPT"
    assert uninstall(tmp_path)[f"/{SLICE}"] == "KEPT"
    assert (tmp_path / SLICE).read_text() == "theirs"
    assert files_of(tmp_path) == {SLICE}


def test_a_configuration_is_never_touched(tmp_path: Path) -> None:
    (tmp_path / "etc/trashd").mkdir(parents=True)
    (tmp_path / "etc/trashd/config.toml").write_text("# mine\n")
    assert install(tmp_path)["/etc/trashd/config.toml"] == "UNCHANGED"
    assert files_of(tmp_path / "etc") == {"trashd/config.toml"}
    uninstall(tmp_path)
    assert (tmp_path / "etc/trashd/config.toml").read_text() == "# mine\n"


@pytest.mark.parametrize("manifest", ['{"format": 1, "version": "0.3.0", "files": {}, "directories": []}', "no JSON"])
def test_what_only_0_3_0_wrote_is_removed(tmp_path: Path, manifest: str) -> None:
    install(tmp_path)
    earlier = {MANIFEST: manifest, "usr/local/share/man/man1/trashd-stats.1": ".TH"}
    for verb in (install, uninstall):
        for name, content in earlier.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(content)
        told = verb(tmp_path)
        assert {told[f"/{name}"] for name in earlier} == {"REMOVED"}
        assert not files_of(tmp_path) & set(earlier)
        assert not (tmp_path / MANIFEST).parent.exists()


def test_a_page_of_another_version_is_replaced(tmp_path: Path) -> None:
    install(tmp_path)
    page = tmp_path / "usr/local/share/man/man1/trashd-swap.1"
    before = page.read_bytes()
    page.write_text("as it was")
    told = install(tmp_path)
    assert {path for path, outcome in told.items() if outcome == "WRITTEN"} == {f"/{page.relative_to(tmp_path)}"}
    assert page.read_bytes() == before


def test_a_file_that_was_taken_over_is_in_order_again(tmp_path: Path) -> None:
    install(tmp_path)
    (tmp_path / SLICE).write_text("as it was")
    install(tmp_path)
    (tmp_path / f"{SLICE}.new").rename(tmp_path / SLICE)
    assert set(install(tmp_path).values()) == {"UNCHANGED"}


def test_a_dry_run_touches_nothing(tmp_path: Path) -> None:
    assert set(install(tmp_path, "--dry-run").values()) == {"WRITTEN"}
    assert list(tmp_path.iterdir()) == []
    install(tmp_path)
    before = files_of(tmp_path)
    assert set(uninstall(tmp_path, "--dry-run").values()) == {"REMOVED"}
    assert files_of(tmp_path) == before


def test_the_switch_for_io_uring_is_set_at_boot_only_if_somebody_says(tmp_path: Path) -> None:
    install(tmp_path)
    assert not URING & files_of(tmp_path)
    assert {path for path, outcome in install(tmp_path, "--uring").items() if outcome == "WRITTEN"} == {
        f"/{path}" for path in URING
    }
    line = (tmp_path / "usr/local/lib/tmpfiles.d/trashd-uring.conf").read_text().splitlines()[-1]
    assert line.split() == ["w", SWITCH, "-", "-", "-", "-", "Y"]


def test_it_stays_with_later_installs_until_somebody_says(tmp_path: Path) -> None:
    install(tmp_path, "--uring")
    assert set(install(tmp_path).values()) == {"UNCHANGED"}
    assert files_of(tmp_path) >= URING
    told = install(tmp_path, "--no-uring")
    assert {path for path, outcome in told.items() if outcome == "REMOVED"} == {f"/{path}" for path in URING}
    assert not URING & files_of(tmp_path)


def test_a_package_has_its_modules_apart_and_its_commands_in_view(tmp_path: Path) -> None:
    install(tmp_path, "--prefix", "/usr")
    assert os.readlink(tmp_path / "usr/bin/trashd") == "/usr/lib/trashd/trashd"
    assert os.readlink(tmp_path / "usr/sbin/mount.fuse.trashd") == "/usr/lib/trashd/mount.fuse.trashd"
    unit = (tmp_path / "usr/lib/systemd/system/trashd-reaper.service").read_bytes()
    assert unit == (REPO / "systemd/trashd-reaper.service").read_bytes()


@pytest.mark.parametrize("shell", ["bash-completion/completions/trashd", "zsh/site-functions/_trashd"])
def test_a_shell_takes_its_completion(tmp_path: Path, shell: str) -> None:
    install(tmp_path)
    command = shutil.which(shell.partition("-")[0].partition("/")[0])
    if command is not None:
        subprocess.run([command, "-n", tmp_path / "usr/local/share" / shell], check=True)


def test_a_user_has_them_in_his_home(tmp_path: Path) -> None:
    def service(*words: str) -> CommandResult:
        return trashd("service", *words, "--user", HOME=str(tmp_path), XDG_DATA_HOME="", XDG_RUNTIME_DIR="")

    assert service("install").code == 0
    assert files_of(tmp_path) == {
        ".local/share/systemd/user/trashd-reaper.service",
        *(f".local/share/man/{name}" for name in MAN_FILES),
    }  # fmt: skip
    (told,) = service("status", "--json").objects()
    assert {one["outcome"] for one in told["files"]} == {"unchanged"}
    assert service("uninstall").code == 0
    assert files_of(tmp_path) == set()


@pytest.mark.needs("root")
def test_uninstall_without_systemd_removes_its_links_and_names_the_running_service() -> None:
    with places() as base, ExitStack() as ends:
        os.chown(base, ALICE, ALICE)
        running = ends.enter_context(service(base, user=ALICE))

        def command(verb: str) -> str:
            variables = {**os.environ, "HOME": str(base), "XDG_RUNTIME_DIR": str(base)}
            done = run_as(ALICE, [TRASHD, "service", verb, "--user"], env=variables, check=True)
            return os.fsdecode(done.stderr)

        command("install")
        wants = base / ".config/systemd/user/default.target.wants"
        wants.mkdir(parents=True)
        os.chown(wants, ALICE, ALICE)
        (wants / "trashd-reaper.service").symlink_to(base / ".local/share/systemd/user/trashd-reaper.service")
        (wants / "trashd-other.service").symlink_to("/etc/systemd/user/trashd-other.service")
        pid = running.process.pid
        assert f"process {pid} was not stopped; to stop it: kill {pid}\n" in command("uninstall")
        assert [path.name for path in wants.iterdir()] == ["trashd-other.service"]
        assert running.process.poll() is None


@pytest.mark.needs("root")
def test_the_machines_services_are_roots() -> None:
    done = run_as(12345, ["/bin/sh", "-c", f"{REPO}/.venv/bin/trashd service install"])
    assert done.returncode == 4
    assert b"--user" in done.stderr


@pytest.mark.needs("root")
@pytest.mark.parametrize(("closed", "mode"), [("above", 0o750), ("above/command", 0o750)])
def test_a_command_that_users_cannot_run_is_no_service_of_theirs(volume: Path, closed: str, mode: int) -> None:
    command = volume / "above/command"
    command.parent.mkdir(mode=0o755)
    command.write_text("#!/bin/sh")
    command.chmod(0o755)
    assert out_of_reach(str(command)) == out_of_reach(find_command())
    (volume / closed).chmod(mode)
    assert out_of_reach(str(command)) == str(volume / closed)


@pytest.fixture(scope="module")
def copied() -> Iterator[Path]:
    """The package in a directory where only root can write, as are those above it."""
    with tmpfs_volume() as path:
        path.chmod(0o755)
        shutil.copytree(REPO / "fusefs", path / "lib/fusefs", ignore=shutil.ignore_patterns("__pycache__"))
        for below in (path / "lib", *(path / "lib").rglob("*")):
            os.chown(below, 0, 0)
            below.chmod(0o755)
        if (risk := found_risk(path)) is not None:
            pytest.skip(f"{risk} of this Python's is not root's alone")
        yield path


def found_risk(copied: Path) -> str | None:
    """What the copy says that others can change. There is a directory in its sys.path that is missing."""
    program = "from fusefs.cli.service import who_else_may_change as ask; print(ask('/bin/sh') or '')"
    paths = {"PYTHONPATH": f"{copied}/lib:{copied}/made/later"}
    done = subprocess.run(
        [sys.executable, "-PBc", program], cwd="/", env=paths, capture_output=True, text=True, check=True
    )
    return done.stdout.strip() or None


@pytest.mark.needs("root")
@pytest.mark.parametrize(
    ("path", "owner", "mode", "is_risk"),
    [
        ("lib", 0, 0o775, True),
        ("lib/fusefs", 0, 0o757, True),
        ("lib/fusefs/core/names.py", 0, 0o664, True),
        ("lib/fusefs/service/event_outlets.py", 12345, 0o644, True),
        ("", 0, 0o777, True),
        ("", 0, 0o1777, False),
    ],
)
def test_modules_that_others_can_change_are_told(copied: Path, path: str, owner: int, mode: int, is_risk: bool) -> None:
    before = (copied / path).stat()
    (copied / path).chmod(mode)
    os.chown(copied / path, owner, 0)
    try:
        assert found_risk(copied) == (str(copied / path) if is_risk else None)
    finally:
        os.chown(copied / path, 0, 0)
        (copied / path).chmod(stat.S_IMODE(before.st_mode))


@pytest.mark.parametrize(
    ("path", "word"),
    [
        ("/opt/trashd/bin/trashd", "/opt/trashd/bin/trashd"),
        ("/opt/two words/trashd", '"/opt/two words/trashd"'),
        ("/opt/50%/$HOME", '"/opt/50%%/$$HOME"'),
        ('/opt/"', '"/opt/\\""'),
    ],
)
def test_a_path_is_one_word_of_execstart(path: str, word: str) -> None:
    assert unit_word(path) == word


def test_the_wheel_has_all_of_it(tmp_path: Path) -> None:
    """Laid out as hatchling is told to, since a build would need a network."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    for source, target in [(name, name) for name in wheel["packages"]] + list(wheel["force-include"].items()):
        (tmp_path / target).parent.mkdir(parents=True, exist_ok=True)
        if (REPO / source).is_dir():  # but for what others compile in it meanwhile
            shutil.copytree(REPO / source, tmp_path / target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(REPO / source, tmp_path / target)
    write_all(tmp_path / "fusefs/share/man")  # as the hook of the build does
    done = subprocess.run(
        [sys.executable, "-P", "-c", _PIECES],
        cwd="/", env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    home, *paths = done.stdout.split()
    assert home == str(tmp_path / "fusefs")
    assert "/usr/lib/systemd/system/trashd-reaper.service" in paths


_SET = """
import sys
from fusefs.cli import service
from fusefs.cli.service import FileOutcome, FileReport
if len(sys.argv) > 1:
    read_facts = service.read_facts
    service.read_facts = lambda: read_facts()._replace(release=sys.argv[1])
service.set_switch()
service.print_what_stays([FileReport("/etc/tmpfiles.d/trashd-uring.conf", FileOutcome.REMOVED)])
"""


def stderr_of(stand_in: Path, *words: str, how: tuple[str, ...] = ()) -> str:
    """What is written to stderr. words: the release of the kernel, if it is to be another"""
    script = f'mount --bind "$1" {SWITCH} && shift && exec "$@"'
    command = ["sh", "-c", script, "sh", str(stand_in), *how, sys.executable, "-c", _SET, *words]
    done = subprocess.run(["unshare", "--mount", *command], capture_output=True, text=True, check=True)
    return done.stderr


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    path = tmp_path / "enable_uring"
    path.write_text("N\n")
    return path


@pytest.mark.needs("root", "fuse")
@pytest.mark.skipif(not Path(SWITCH).exists(), reason="this kernel has no FUSE over io_uring")
def test_the_switch_is_set_and_what_outlives_an_uninstall_is_printed(stand_in: Path) -> None:
    stderr = stderr_of(stand_in)
    assert stand_in.read_text().startswith("Y")
    assert "enabled FUSE over io_uring for all FUSE mounts on this machine" in stderr
    assert f"echo N >{SWITCH}" in stderr


@pytest.mark.needs("root", "fuse")
@pytest.mark.skipif(not Path(SWITCH).exists(), reason="this kernel has no FUSE over io_uring")
@pytest.mark.needs("uring")
@pytest.mark.skipif(os.cpu_count() != len(os.sched_getaffinity(0)), reason="some cores are barred here")
def test_a_kernel_with_known_faults_is_a_warning(stand_in: Path) -> None:
    stderr = stderr_of(stand_in, "6.14.1")
    assert "Linux 6.14.1 may have bugs in FUSE over io_uring" in stderr
    assert stand_in.read_text().startswith("Y")


@pytest.mark.needs("root", "fuse")
@pytest.mark.skipif(not Path(SWITCH).exists(), reason="this kernel has no FUSE over io_uring")
def test_a_machine_that_denies_io_uring_is_a_warning(stand_in: Path) -> None:
    stderr = stderr_of(stand_in, how=tuple(without(IO_URING_SETUP)))
    assert "mounts on this machine can't use io_uring" in stderr
