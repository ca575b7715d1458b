"""docs/howto/troubleshooting.md: each message is caused for real, and the remedy in its section helps."""

import errno
import fcntl
import os
import subprocess
from pathlib import Path

import pytest

from fusefs.core.errors import BY_NAME
from tests.support.background_mounts import kill_daemon
from tests.support.command_scenarios import SCENARIOS
from tests.support.make_trees import IMMUTABLE, make_tree, set_flags
from tests.support.open_files import held
from tests.support.real_filesystems import bind_mount, full, overlay_volume, tmpfs_volume, unmount
from tests.support.seccomp import CALLS
from tests.support.store_verbs import assert_silent, init
from tests.support.trashd_command import done_well, swapped, trashd_without
from tests.support.tried_pages import TriedPage, constants, in_bash

pytestmark = [pytest.mark.needs("root"), pytest.mark.timeout(120)]

PAGE = TriedPage("howto/troubleshooting")
USER = 1234
AS_USER = f"HOME=/ setpriv --reuid={USER} --regid={USER} --clear-groups"
NOT_TYPED_HERE = {
    "systemctl start trashd-reaper": "tests/systemd",
    "trashd service install": "tests/systemd",
    "trashd doctor --repair --wait VOLUME": "tests/store, tests/shared",
    "mv DIR .trashd/drop/": "tests/mount",
    "trashd swap --wait": "with a directory, below",
    "trashd doctor": "with a volume, below",
    "rm -r DIR": "what it does is known",
}
"""And where it is."""
ELSEWHERE = {
    "The command line is wrong": "tests/cli/test_command_scenarios.py",
    "the encryption (fscrypt) of the directory can't be preserved": "tests/store",
    "The request was refused": "each command's own",
    "the server maps root to nobody (root squash), or a security module restricts root": "tests/shared",
    "untrusted, because other users could have moved items into it": "tests/store",
    "the helper process of this user was killed or stopped": "tests/store",
    "the directory behind this mount is not accessible": "tests/mount",
    "the filesystem has no file locks (flock), but every command needs them": "tests/store",
    "taken over by another node": "tests/shared",
    "the operation was not completed, and nothing was deleted": "tests/crash",
    "the filesystem's server does not respond": "tests/shared",
    "The reaper of a volume needs attention": "tests/systemd",
    "two mounted disks have the same volume ID, so nothing on this one is reaped": "tests/service",
    "this volume had its own rules at another path and has none here, so nothing on it is reaped": "tests/service",
    "root does not move files across the boundary between users": "tests/store",
}
"""Messages whose causes take more than a volume, and the tests that cause them."""


@pytest.fixture
def tree(volume: Path) -> Path:
    """What somebody wants to swap."""
    return make_tree(volume / "job", {"file": b"x" * (1 << 20), "below": {"deep": "more"}})


def refused(section: str, line: str, volume: Path, code: int, printed: str = "") -> str:
    """Return the output of a line that must fail with the message of a section, or with `printed`."""
    assert section in PAGE.sections
    done = in_bash(line, volume)
    assert done.code == code, done
    assert (printed or section) in done.out
    return done.out


def test_every_message_is_caused_here_or_elsewhere() -> None:
    here = constants(__file__)
    by_scenarios = {BY_NAME[one.error]("").message() for one in SCENARIOS.values() if one.error}
    assert sorted(PAGE.sections.keys() - here - by_scenarios) == []
    assert sorted(PAGE.commands() - here) == []


def test_a_link(volume: Path, tree: Path) -> None:
    (volume / "link").symlink_to(tree)
    refused("not a directory (symbolic links are not followed)", "trashd swap link", volume, 3)
    PAGE.typed('trashd swap "$(realpath DIR)"', volume, DIR="link")
    assert os.listdir(tree) == []
    PAGE.typed("trashd rm", volume, "link")


def test_a_mount_point(volume: Path) -> None:
    disk = volume / "disk"
    disk.mkdir()
    with tmpfs_volume() as other, bind_mount(other, disk):
        make_tree(disk / "job", {"file": "content"})
        (disk / "beside").touch()
        refused("is a mount point", "trashd swap disk", volume, 3)
        PAGE.typed("trashd swap DIR/*/", volume, DIR=disk)
        PAGE.typed("trashd sweep DIR --name '*' --depth 1", volume, DIR=disk)
        assert sorted(os.listdir(disk)) == [".trashd", "job"]
        assert os.listdir(disk / "job") == []
        assert_silent(disk)


def test_a_mount_inside(volume: Path, tree: Path) -> None:
    message = "contains a mount point"
    with bind_mount(volume, tree / "below"):
        told = refused(message, "trashd swap job", volume, 3)
        assert f"umount {tree}/below\n" in told
        PAGE.typed("umount PATH", volume, PATH=tree / "below")
        swapped(tree)


def test_a_mount_inside_of_another_namespace(volume: Path, tree: Path) -> None:
    with subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs t "$1" && echo && read _', "sh", tree / "below"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as other:  # fmt: skip
        assert other.stdout is not None
        other.stdout.readline()
        told = refused("contains a mount point", "trashd swap job", volume, 3)
        _, _, pid, _, _, path = told.splitlines()[1].rpartition(": ")[2].split()
        PAGE.typed("nsenter -t PID -m umount PATH", volume, PID=pid, PATH=path)
        swapped(tree)


def test_a_store(volume: Path, tree: Path) -> None:
    init(tree)
    swapped(tree / "below")
    told = refused("is part of a trash store, or contains one", f"trashd rm {tree}", volume, 3)
    assert f"trashd list --volume {tree}" in told
    assert PAGE.typed("trashd list --volume DIR", volume, DIR=tree) == "no orphans\n"  # what went is in the volume's
    PAGE.typed("rm -r DIR/.trashd", volume, DIR=tree)
    swapped(tree)


def test_a_broken_store(volume: Path, tree: Path) -> None:
    orphan = swapped(tree)
    (volume / ".trashd/volume.json").write_text("{")
    refused("damaged trash store", f"trashd swap {tree}", volume, 6)
    PAGE.typed("trashd init VOLUME", volume, VOLUME=volume)
    assert in_bash(f"trashd restore {orphan['id']}", volume).code == 0
    assert (tree / "file").exists()


def test_an_unknown_format(volume: Path, tree: Path) -> None:
    init(volume)
    file = volume / ".trashd/volume.json"
    file.write_text(file.read_text().replace('"format": 2', '"format": 3'))
    refused("unknown trash store format", f"trashd swap {tree}", volume, 6)
    PAGE.typed("mv .trashd .trashd-old", volume)
    swapped(tree)


def test_not_alike(volume: Path) -> None:
    os.chown(volume, USER, USER)
    victim = make_tree(volume / "roots", {"file": "content"})
    victim.chmod(0o777)
    message = "the new directory can't be made like the old one"
    refused(message, f"{AS_USER} trashd swap roots", volume, 3)
    assert in_bash(f"{AS_USER} trashd swap --unlike roots", volume).code == 0
    os.chown(volume, 0, 0)


def test_not_kept(volume: Path, tree: Path) -> None:
    refused("--keep failed, and nothing was swapped", "trashd swap --keep '*.conf' job", volume, 3)
    output = PAGE.typed("trashd swap --keep GLOB --dry-run DIR", volume, GLOB="f*", DIR=tree)
    assert "keep     file" in output


def test_another_filesystem(volume: Path, tree: Path) -> None:
    message = "on another filesystem, subvolume or project, where a rename can't move files"
    with tmpfs_volume() as other:
        told = refused(message, f"trashd sweep {tree} --name file --move-to {other}", volume, 3)
        assert in_bash(told.rpartition("hint: ")[2], volume).code == 0
        assert len(list(other.rglob("file"))) == 1


def test_not_permitted(volume: Path, tree: Path) -> None:
    os.chown(tree, USER, USER)
    refused("permission denied", f"{AS_USER} trashd swap {tree}", volume, 4)
    volume.chmod(0o777)
    assert in_bash(f"{AS_USER} trashd swap {tree}", volume).code == 0
    volume.chmod(0o755)


def test_no_store() -> None:
    with tmpfs_volume() as other:
        make_tree(other / "shared", {"file": "content"})
        (other / "shared/file").chmod(0o666)
        os.chown(other / "shared/file", USER, USER)
        words = f"{AS_USER} trashd sweep shared --name file"
        refused("no usable trash store", words, other, 6)
        PAGE.typed("trashd init VOLUME", other, VOLUME=other)
        (other / "shared").chmod(0o777)
        assert in_bash(words, other).code == 0
        assert_silent(other)


def test_a_store_of_somebody_elses() -> None:
    with tmpfs_volume() as other:
        other.chmod(0o1777)
        assert in_bash(f"mkdir {other}/a && chown {USER} {other}/a && {AS_USER} trashd init {other}", other).code == 0
        (own,) = other.glob(".trashd-*")
        own.rename(other / ".trashd")
        (other / ".trashd").chmod(0o755)
        make_tree(other / "job", {})
        refused("untrusted trash store", "trashd swap job", other, 6)
        PAGE.typed("trashd init --replace VOLUME", other, VOLUME=other)
        swapped(other / "job")
        assert in_bash(f"{AS_USER} trashd list", other).code == 0, "it takes what it had there"
        assert_silent(other)


def test_the_border_of_an_overlay(volume: Path) -> None:
    message = "can't be renamed within its filesystem (EXDEV)"
    with overlay_volume(lambda lower: make_tree(lower / "image", {"file": "content", "below": {"deep": ""}})) as over:
        refused(message, f"trashd swap {over.path}/image", volume, 6)
        swapped(make_tree(over.path / "made", {"file": "x"}))
        assert os.listdir(over.path / "made") == []
        PAGE.typed("trashd sweep DIR --name '*' --delete", volume, DIR=over.path / "image")
        assert not [path for path in (over.path / "image").rglob("*") if not path.is_dir()]
    with tmpfs_volume() as top:
        for name in ("lower", "upper", "work", "seen"):
            (top / name).mkdir()
        make_tree(top / "lower/image", {"file": "content"})
        options = f"lowerdir={top}/lower,upperdir={top}/upper,workdir={top}/work,redirect_dir=on"
        subprocess.run(["mount", "-t", "overlay", "-o", options, "overlay", top / "seen"], check=True)
        try:
            swapped(top / "seen/image")
            assert os.listdir(top / "seen/image") == []
        finally:
            unmount(top / "seen")


def test_a_broken_record(volume: Path) -> None:
    message = "unreadable record, so the orphan is kept"
    for name in ("taken-out", "given-up"):
        identifier = swapped(make_tree(volume / name, {"file": "content"}))["id"]
        container = volume / f".trashd/u/0/orphans/{identifier}"
        (container / "record.json").write_bytes(b"")
        refused(message, f"trashd restore --volume {volume} {identifier}", volume, 7)
        PAGE.typed("trashd doctor --repair VOLUME", volume, VOLUME=volume, code=1)
        if name == "taken-out":
            PAGE.typed("mv CONTAINER PATH", volume, CONTAINER=container, PATH=volume / "out")
            assert (volume / "out/tree/file").read_text() == "content"
        else:
            PAGE.typed("mv CONTAINER VOLUME/.trashd/u/UID/drop/", volume, CONTAINER=container, VOLUME=volume, UID="0")
            assert len(done_well("list", "--json", "--volume", volume).objects()) == 1
    PAGE.typed("trashd doctor VOLUME", volume, VOLUME=volume)


def test_somebody_else_works_on_it(volume: Path, tree: Path) -> None:
    identifier = swapped(tree)["id"]
    with (volume / f".trashd/u/0/orphans/{identifier}/record.json").open() as record:
        fcntl.flock(record, fcntl.LOCK_EX)
        refused("in use by another process", f"trashd restore {identifier}", volume, 8)
    done_well("restore", identifier)


def test_a_registry_that_others_can_write(volume: Path, tree: Path) -> None:
    swapped(tree)
    registry = Path("/var/lib/trashd/stores")
    before = registry.stat().st_mode
    registry.chmod(0o666)
    try:
        refused("the registry of stores is not used", f"trashd doctor {volume}", volume, 1)
    finally:
        registry.chmod(before & 0o7777)
    PAGE.typed("trashd doctor VOLUME", volume, VOLUME=volume)


def test_a_full_volume(ext4: Path) -> None:
    make_tree(ext4 / "due", {f"file{n}": b"x" * (1 << 15) for n in range(40)})
    swapped(ext4 / "due", "--keep-for", "0s")
    first, *jobs = [make_tree(ext4 / f"job{n}", {"file": "x"}) for n in range(21)]
    with full(ext4):
        swapped(first)
        assert os.listdir(first) == []
        names = " ".join(job.name for job in jobs)
        done = in_bash(f"trashd swap {names}", ext4)
        assert done.code in (11, 13), done
        assert "No space left on device" in done.out
        assert "the volume is full" in done.out
        for command in ("trashd du", "trashd reap --free 1M"):
            assert in_bash(f"{command} --volume {ext4}", ext4).code == 0
        left = next(job for job in jobs if os.listdir(job))
        swapped(left)
    done_well("doctor", "--repair", ext4)


def test_a_volume_that_is_read_only(ext4: Path) -> None:
    make_tree(ext4 / "job", {})
    subprocess.run(["mount", "-o", "remount,ro", ext4], check=True)
    told = refused("A system call failed", "trashd swap job", ext4, 11, "Read-only file system")
    assert "the filesystem is mounted read-only" in told
    subprocess.run(["mount", "-o", "remount,rw", ext4], check=True)
    swapped(ext4 / "job")


def test_few_open_files(volume: Path, tree: Path) -> None:
    told = refused("A system call failed", "ulimit -n 8; trashd swap job", volume, 11, "Too many open files")
    assert "too many open files: raise ulimit -n" in told
    PAGE.typed("ulimit -n", volume, "1024; trashd swap job")
    assert os.listdir(tree) == []


def test_a_long_path(volume: Path) -> None:
    name = "d" * 250
    assert in_bash(f"for n in {{1..20}}; do mkdir {name} && cd {name} || exit; done && mkdir old", volume).code == 0
    line = f"trashd init {volume}/{'/'.join([name] * 20)}"
    told = refused("A system call failed", line, volume, 11, "File name too long")
    assert "a name can have at most 255 bytes, and a path at most 4,095" in told
    assert in_bash(f"for n in {{1..20}}; do cd {name}; done && trashd swap old", volume).code == 0


def test_no_service(volume: Path, tree: Path) -> None:
    swapped(tree, "--keep-for", "0s")
    assert "no reaper service is running" in PAGE.typed("trashd status", volume, code=5)
    PAGE.typed("trashd reap", volume, f"--volume {volume}")
    assert os.listdir(volume / ".trashd/u/0/orphans") == []


def test_nobody_to_wait_for(volume: Path, tree: Path) -> None:
    told = refused("no reaper serves", f"trashd swap --wait {tree}", volume, 13)
    hint = told.partition("hint: ")[2].splitlines()[0]
    assert in_bash(hint, volume).code == 0
    assert os.listdir(volume / ".trashd/u/0/orphans") == []


def test_what_can_not_be_deleted(ext4: Path) -> None:
    message = "Some of the items failed"
    assert message in PAGE.sections
    for name in ("again", "all", "given-up"):
        job = make_tree(ext4 / name, {"file": "content"})
        set_flags(job / "file", IMMUTABLE)
        identifier = swapped(job, "--keep-for", "0s")["id"]
        PAGE.typed("trashd reap", ext4, f"--volume {ext4}", code=13)
        assert "Operation not permitted" in PAGE.typed("trashd list --state quarantine", ext4)
        PAGE.typed("chattr -i", ext4, f"{ext4}/.trashd/u/0/quarantine/*/tree/file")
        if name == "again":
            PAGE.typed("trashd reap ID", ext4, ID=identifier)
        elif name == "all":
            in_bash("trashd list --state quarantine --json | jq -r .id | xargs -r trashd reap", ext4)
            assert in_bash("trashd list --state quarantine", ext4).out == "no orphans\n"
        else:
            PAGE.typed("trashd reap --force ID", ext4, "--yes", ID=identifier)


def test_a_file_that_is_open(ext4: Path) -> None:
    job = make_tree(ext4 / "job", {"file": b"x" * (1 << 20)})
    with held(job / "file"):
        swapped(job, "--keep-for", "0s")
        output = PAGE.typed("trashd reap --wait", ext4, f"--volume {ext4}", code=13)
    assert "a deleted file" in output
    assert str(os.getpid()) in output
    assert "a deleted file" in PAGE.sections


def test_a_wrong_configuration(volume: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "config.toml"
    wrong.write_text('[defaults]\nmax_rat = "1/s"\n')
    told = refused("The configuration has errors", f"trashd service run --config {tmp_path}", volume, 2, "unknown key")
    assert "config.toml: defaults.max_rat" in told
    assert "max_rate" in PAGE.typed("trashd config check", volume, str(wrong), code=2)
    wrong.write_text('[defaults]\nmax_rate = "1/s"\n')
    PAGE.typed("trashd config check", volume, str(wrong))


@pytest.mark.needs("fuse")
def test_a_mount_whose_daemon_is_gone(volume: Path, tree: Path) -> None:
    seen = volume / "seen"
    seen.mkdir()
    assert in_bash(f"trashd mount {tree} {seen}", volume).code == 0
    kill_daemon(seen)
    refused("the daemon of this mount has ended; its last counters are shown", "trashd status", volume, 5)
    assert "trashd mount --replace SRC MNT" in in_bash(f"trashd swap {seen}/below", volume).out
    PAGE.typed("trashd mount --replace SRC MNT", volume, SRC=tree, MNT=seen)
    assert (seen / "below/deep").read_text() == "more"
    PAGE.typed("trashd umount MNT", volume, MNT=seen)


def test_a_part_of_an_id_that_two_have(volume: Path) -> None:
    ids = [swapped(make_tree(volume / name, {}))["id"] for name in ("one", "two")]
    refused("is ambiguous", f"trashd restore {ids[0][:4]}", volume, 2)
    done_well("restore", ids[0][-12:])


def test_an_output_that_is_full(volume: Path, tree: Path) -> None:
    refused("standard output", "trashd swap job >/dev/full", volume, 11)
    assert os.listdir(tree) == []
    assert "job" in PAGE.typed("trashd list", volume)


def test_a_filter(tree: Path) -> None:
    message = "this system call is needed by every swap, but the kernel or a seccomp filter does not allow it"
    assert message in PAGE.sections
    assert "trashd check DIR" in PAGE.commands()
    for verb in ("swap", "check"):
        done = trashd_without(CALLS["openat2"], verb, tree, refusal=errno.ENOSYS)
        said = done.out + done.err
        assert (done.code, message in said, "openat2" in said) == (11, True, True), done
