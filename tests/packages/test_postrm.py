"""What the packages run when they are removed: users' files are read with their users' rights."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.booted_systemd import REPO
from tests.support.real_filesystems import tmpfs_volume

pytestmark = pytest.mark.needs("root")

ALICE, MALLORY = 12001, 12666
POSTRM = REPO / "debian/trashd.postrm"
IN_ITS_OWN_NAMESPACE = """
mount --bind "$1" /etc/passwd
mkdir -p "$2/state"
[ ! -d /var/lib/trashd ] || mount --bind "$2/state" /var/lib/trashd
exec sh "$3" remove
"""


@pytest.fixture
def homes() -> Iterator[Path]:
    with tmpfs_volume() as path:
        path.chmod(0o755)
        for name, uid in (("alice", ALICE), ("mallory", MALLORY)):
            (path / name / ".local/state/trashd").mkdir(parents=True)
            for upper in (path / name, *(path / name).rglob("*")):
                os.chown(upper, uid, uid)
        (path / "alice").chmod(0o700)
        registry_of(path, "alice").write_text(line("/srv/alices"))
        os.chown(registry_of(path, "alice"), ALICE, ALICE)
        registry_of(path, "alice").chmod(0o600)
        yield path


def registry_of(homes: Path, name: str) -> Path:
    return homes / name / ".local/state/trashd/stores"


def line(path: str) -> str:
    return f"1 2 3 {'a' * 32} 4f {path}\n"


def said_at_removal(homes: Path) -> str:
    """What it says on a machine with root and these two users, which have no name that NSS could ask others for."""
    passwd = homes / "passwd"
    users = [("root", 0), ("alice", ALICE), ("mallory", MALLORY)]
    passwd.write_text("".join(f"{name}:x:{uid}:{uid}:some one:{homes}/{name}:/bin/sh\n" for name, uid in users))
    command = ("unshare", "--mount", "sh", "-ec", IN_ITS_OWN_NAMESPACE, "sh", passwd, homes, POSTRM)
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout


def test_stores_of_users_are_told_whose_homes_are_closed(homes: Path) -> None:
    assert "\n  /srv/alices\n" in said_at_removal(homes)


def test_no_link_of_a_user_leads_to_what_the_user_cannot_read(homes: Path) -> None:
    (homes / "secret").write_text(line("/srv/secret"))
    (homes / "secret").chmod(0o600)
    registry_of(homes, "mallory").symlink_to(homes / "secret")
    said = said_at_removal(homes)
    assert "/srv/secret" not in said
    assert "/srv/alices" in said


def test_a_pipe_of_a_user_keeps_no_other_users_store_from_being_told(homes: Path) -> None:
    os.mkfifo(registry_of(homes, "mallory"))
    os.chmod(registry_of(homes, "mallory"), 0o666)
    assert "/srv/alices" in said_at_removal(homes)


def test_a_users_own_store_is_told_by_the_directory_that_it_is_in(homes: Path) -> None:
    registry_of(homes, "alice").write_text(line("/srv/.trashd-12001") + line("/.trashd-12001"))
    said = said_at_removal(homes)
    assert "\n  /\n" in said
    assert "\n  /srv\n" in said
