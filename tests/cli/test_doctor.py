"""`trashd doctor`: what is wrong with stores and besides is told with what mends it, and nothing else is."""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fusefs.linux.inotify import open_inotify
from fusefs.store.registry_lines import XATTR
from tests.support.make_trees import make_tree, owned
from tests.support.other_users import as_user
from tests.support.real_filesystems import tmpfs_volume
from tests.support.seccomp import IO_URING_SETUP
from tests.support.service_process import places, service
from tests.support.store_verbs import assert_silent
from tests.support.terminals import Terminal
from tests.support.trashd_command import TRASHD, CommandResult, done_well, environment, swapped, trashd, trashd_without

pytestmark = pytest.mark.needs("root")


USER = 65_534
NOT_SERVED = "[defaults]\nserve = false\n"


def test_on_a_terminal_it_says_that_all_is_well(volume: Path) -> None:
    terminal = Terminal("doctor", volume)
    assert (terminal.end(), terminal.output.strip()) == (0, f"{volume}: no problems found")
    assert done_well("doctor", volume).out == ""


def test_without_a_volume_every_store_and_the_configuration_are_looked_at(volume: Path) -> None:
    """As a user: root's are the machine's."""
    volume.chmod(0o777)
    home, config = volume / "home", volume / "home/config/trashd/config.toml"
    config.parent.mkdir(parents=True)
    config.write_text(NOT_SERVED)
    owned(home, USER)

    def doctor() -> CommandResult:
        return trashd("doctor", cwd=home, HOME=str(home), XDG_CONFIG_HOME=str(home / "config"))

    taken = as_user(USER, lambda: swapped(make_tree(home / "victim", {"file": "content"})))
    well = as_user(USER, doctor)
    assert (well.code, well.out) == (0, "")
    record = Path(taken["store"]) / "orphans" / taken["id"] / "record.json"
    whole = record.read_bytes()
    os.truncate(record, 40)
    config.write_text("nonsense = 1\n")
    ill = as_user(USER, doctor)
    assert ill.code == 1
    assert taken["id"] in ill.out
    assert f"{config}: nonsense: " in ill.out
    record.write_bytes(whole)


@contextmanager
def instead(path: str, other: Path) -> Iterator[None]:
    """Have something of this machine be another one, for this test's namespace."""
    subprocess.run(["mount", "--bind", other, path], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", path], check=True)


@pytest.fixture
def home(volume: Path) -> Path:
    """The home of a user with an orphan, whose configuration says that no service is needed."""
    volume.chmod(0o777)
    home = volume / "home"
    (home / "config/trashd/plan.d").mkdir(parents=True)
    (home / "config/trashd/config.toml").write_text(NOT_SERVED)
    owned(home, USER)
    as_user(USER, lambda: swapped(make_tree(home / "victim", {"file": "content"})))
    return home


def of_user(home: Path, *words: str, **others: str) -> CommandResult:
    """Run a command as the user whose home this is. others: more environment variables"""
    variables = {"HOME": home, "XDG_CONFIG_HOME": home / "config", "XDG_DATA_HOME": home / "data"}
    added = {name: str(path) for name, path in variables.items()} | {"XDG_RUNTIME_DIR": ""} | others
    return as_user(USER, lambda: trashd(*words, cwd=home, stdin=b"", **added))


@pytest.fixture
def base() -> Iterator[Path]:
    """A machine on which no service runs, unless a test starts one."""
    with places() as path:
        yield path


def doctor_of(home: Path) -> CommandResult:
    return of_user(home, "doctor")


def told_root(volume: Path) -> dict[str, tuple[str, str]]:
    """What it tells root, by where that is."""
    if not (volume / ".trashd").exists():
        swapped(make_tree(volume / "victim", {"file": "content"}))
    done = trashd("doctor", "--json", cwd=volume)
    return {told["where"]: (told["what"], told["hint"]) for told in done.objects()}


def test_stores_without_a_service_are_told_with_what_starts_one(home: Path, base: Path) -> None:
    assert of_user(home, "init", ".").code == 0
    assert doctor_of(home) == CommandResult(0, "", "")  # its owner wants none
    (home / "config/trashd/config.toml").unlink()
    what = "reaper service: not running: expired orphans are not deleted automatically"
    assert doctor_of(home) == CommandResult(1, f"{what}\n  hint: trashd service run\n", "")
    with service(base):
        assert doctor_of(home) == CommandResult(0, "", "")


@pytest.mark.usefixtures("base")
def test_a_service_that_is_not_installed_is_told_with_what_installs_it(home: Path) -> None:
    assert of_user(home, "init", ".").code == 0
    (home / "config/trashd/config.toml").unlink()
    (home / "systemd").mkdir()
    (home / "systemd/private").touch()  # his systemd runs
    systemctl = home / "systemctl"
    systemctl.write_text(
        "#!/bin/sh\nprintf 'Id=trashd-reaper.service\\nLoadState=not-found\\nActiveState=inactive\\n'\n"
    )
    systemctl.chmod(0o755)
    done = of_user(home, "doctor", XDG_RUNTIME_DIR=str(home), PATH=f"{home}:{os.environ['PATH']}")
    assert done.code == 1
    assert done.out == (
        "trashd-reaper.service: not installed: expired orphans are not deleted automatically\n"
        "  hint: trashd service install --user && systemctl --user enable --now trashd-reaper.service\n"
    )


def test_rules_that_are_wrong_are_told_with_their_key(home: Path) -> None:
    plan = home / "config/trashd/plan.d/mine.toml"
    plan.write_text('[[rule]]\ndirectory = "/x"\nolder = "30x"\n', encoding="utf-8")
    done = doctor_of(home)
    assert done.code == 1
    assert done.out.startswith(f"{plan}: rule[1].older: '30x': unknown unit 'x'")


def test_a_rule_for_what_is_not_there_is_told_and_one_for_what_may_come_is_not(home: Path) -> None:
    plan = home / "config/trashd/plan.d/mine.toml"
    there = "".join(f'[[rule]]\ndirectory = "{home}/{name}"\nolder = "9d"\n' for name in ("victim", "gone", "gone*"))
    plan.write_text(there, encoding="utf-8")
    done = doctor_of(home)
    assert done.code == 1
    assert done.out.splitlines()[0] == f"{plan}: rule[2]: {home}/gone: not a directory"
    assert len(done.out.splitlines()) == 2


def test_a_file_of_his_own_service_that_is_gone_is_told(home: Path) -> None:
    assert of_user(home, "service", "install", "--user").code == 0
    assert doctor_of(home) == CommandResult(0, "", "")
    (home / "data/man/man1/trashd.1").unlink()
    done = doctor_of(home)
    assert done.code == 1
    assert done.out == (f"{home}/data/man/man1/trashd.1: missing\n  hint: trashd service install --user\n")


def test_units_of_another_version_are_told(home: Path) -> None:
    assert of_user(home, "service", "install", "--user").code == 0
    page = home / "data/man/man1/trashd.1"
    page.write_text(page.read_text().replace('"trashd ', '"trashd 0.0.'))
    done = doctor_of(home)
    assert done.code == 1
    assert done.out.startswith("units and man pages: written by another version; this is trashd")


def test_users_can_mount_what_fstab_has_for_all_only_where_fuse_lets_them(volume: Path, tmp_path: Path) -> None:
    fstab, conf = tmp_path / "fstab", tmp_path / "fuse.conf"
    fstab.write_text("# users'\n/srv/a /srv/b fuse.trashd user,noauto,allow_other 0 0\n")
    conf.write_text("#user_allow_other\n")
    with instead("/etc/fstab", fstab), instead("/etc/fuse.conf", conf):
        what, hint = told_root(volume)["/etc/fstab:2"]
        assert "user_allow_other" in what
        assert hint == "echo user_allow_other >>/etc/fuse.conf"
        conf.write_text("user_allow_other\n")
        assert "/etc/fstab:2" not in told_root(volume)


def test_a_kernel_that_does_not_tell_pressure_is_told(volume: Path, tmp_path: Path) -> None:
    assert "/proc/pressure" not in told_root(volume)
    with instead("/proc/pressure", tmp_path):
        assert "psi=1" in told_root(volume)["/proc/pressure"][1]


def test_a_limit_that_is_used_up_is_told_with_its_name(volume: Path) -> None:
    """In a user namespace, which has limits of its own."""
    swapped(make_tree(volume / "victim", {"file": "content"}))
    script = f"echo 0 >/proc/sys/user/max_inotify_instances && exec {TRASHD} doctor --json"
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "sh", "-c", script], cwd=volume, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert '"where": "fs.inotify.max_user_instances"' in done.stdout, done.stderr
    open_inotify().close()  # and only there


def told_without_uring(volume: Path) -> dict[str, tuple[str, str]]:
    """What it tells root where io_uring is refused."""
    done = trashd_without(IO_URING_SETUP, "doctor", "--json", cwd=volume)
    return {told["where"]: (told["what"], told["hint"]) for told in done.objects()}


def test_a_mount_that_wants_io_uring_is_told_why_it_gets_none(volume: Path, tmp_path: Path) -> None:
    fstab = tmp_path / "fstab"
    fstab.write_text("/srv/a /srv/b fuse.trashd uring=auto 0 0\n")
    with instead("/etc/fstab", fstab):
        assert "/etc/fstab:1" not in told_without_uring(volume)
        fstab.write_text("/srv/a /srv/b fuse.trashd uring=on 0 0\n")
        what, hint = told_without_uring(volume)["/etc/fstab:1"]
    assert "mounts with uring=on fail" in what
    assert hint == "remove uring=on from these mount options"


def test_a_switch_that_somebody_set_is_told_with_what_sets_it_back(volume: Path, tmp_path: Path) -> None:
    fstab, disabled = tmp_path / "fstab", tmp_path / "disabled"
    fstab.write_text("/srv/a /srv/b fuse.trashd uring=on 0 0\n")
    disabled.write_text("2\n")
    with instead("/etc/fstab", fstab), instead("/proc/sys/kernel/io_uring_disabled", disabled):
        what, hint = told_without_uring(volume)["/etc/fstab:1"]
    assert "kernel.io_uring_disabled is 2" in what
    assert hint.startswith("sysctl kernel.io_uring_disabled=0")


LESS = ("setpriv", "--bounding-set=-sys_admin", "--inh-caps=-all")


def in_a_container(*words: str | Path) -> CommandResult:
    """A command of root's without CAP_SYS_ADMIN."""
    done = subprocess.run([*LESS, TRASHD, *words], capture_output=True, text=True, env=environment({}), check=False)
    return CommandResult(done.returncode, done.stdout, done.stderr)


def test_init_and_doctor_say_what_it_means_until_it_is_noted() -> None:
    with tmpfs_volume() as volume:
        done_well("init", volume)
        os.removexattr(volume / ".trashd", XATTR)
        done = in_a_container("init", "--known", volume)
        assert done.code == 0, done
        assert XATTR not in os.listxattr(volume / ".trashd")
        assert "records that root created it" in done.err
        assert f"trashd init --known {volume}" in done.err
        init_result = json.loads(in_a_container("init", "--json", volume).out)
        assert "CAP_SYS_ADMIN" in init_result["unnoted"]
        doctor = trashd("doctor", volume)
        assert doctor.code == 1
        assert "records that root created it" in doctor.out
        assert f"trashd init {volume}" in doctor.out
        assert done_well("init", volume).err == ""
        assert XATTR in os.listxattr(volume / ".trashd")
        assert_silent(volume)


def test_a_root_who_cannot_note_it_makes_no_common_store() -> None:
    with tmpfs_volume() as volume:
        done = in_a_container("init", volume)
        assert (done.code, done.err) == (0, ""), done
        assert os.listdir(volume) == [".trashd-0"]
        done_well("init", volume)
        assert sorted(os.listdir(volume)) == [".trashd", ".trashd-0"]


def test_a_store_on_which_it_is_noted_is_told_as_ever() -> None:
    with tmpfs_volume() as volume:
        (init_result,) = done_well("init", "--json", volume).objects()
        assert init_result["unnoted"] == ""
        assert in_a_container("init", volume).err == ""
