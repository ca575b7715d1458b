"""trashd pause and resume: what they say, with and without a reaper that hears it."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusefs.core.service_status import VolumePhase
from tests.support.other_users import run_as
from tests.support.real_filesystems import bind_mount, tmpfs_volume
from tests.support.service_process import places, service
from tests.support.trashd_command import TRASHD, done_well, environment, trashd

pytestmark = pytest.mark.needs("root")


@pytest.fixture(autouse=True)
def base() -> Iterator[Path]:
    """Directories of this test alone."""
    with places() as path:
        yield path


def test_pause_says_what_and_for_how_long(volume: Path) -> None:
    done = done_well("pause", "--for", "2h", volume)
    assert done.out == f"{volume}: paused by root for 2h\n"
    assert done_well("pause").out == "all volumes: paused by root until resumed\n"


def test_with_a_reaper_there_is_nothing_to_warn_of(base: Path, volume: Path) -> None:
    with service(base, volume):
        assert done_well("pause", volume).err == ""


def test_what_has_no_store_is_paused_and_told(tmp_path: Path) -> None:
    done = done_well("pause", tmp_path)
    assert done.out == f"{tmp_path}: paused by root until resumed\n"
    assert f"{tmp_path}: currently has no trash store" in done.err


def test_json_names_the_volumes(volume: Path) -> None:
    (one,) = done_well("pause", "--json", "--for", "2h", volume).objects()
    (every,) = done_well("pause", "--json").objects()
    assert (one["volume"], every["volume"], every["until_s"]) == (str(volume), None, None)
    assert one["until_s"] > 0
    assert done_well("resume", "--json", volume).objects() == [{"volume": str(volume)}]
    assert trashd("resume", "--json", volume).out == ""


@pytest.mark.quick("pause", "resume")
def test_resume_ends_what_is_named(volume: Path) -> None:
    done_well("pause", volume)
    done_well("pause")
    assert done_well("resume", volume).out == f"{volume}: resumed\n"
    assert trashd("resume", volume).code == 5


def test_resume_without_a_name_ends_all(volume: Path) -> None:
    done_well("pause", volume)
    done_well("pause")
    assert set(done_well("resume").out.splitlines()) == {f"{volume}: resumed", "all volumes: resumed"}


def test_resume_with_nothing_paused_says_whether_a_reaper_runs(base: Path, volume: Path) -> None:
    assert trashd("resume").code == 5
    with service(base, volume):
        assert done_well("resume").out == ""


def test_name_of_a_volume_may_be_any_way_to_it(volume: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(volume)
    assert done_well("pause", tmp_path / "link").out.startswith(f"{volume}: ")
    assert done_well("resume", f"{volume}/.").out == f"{volume}: resumed\n"


# Users who aren't root

ALICE = 1001


def by_alice(tmp_path: Path, *words: str | Path) -> subprocess.CompletedProcess[bytes]:
    """A command of a user who has a home and no service."""
    home = tmp_path / "home"
    home.mkdir(exist_ok=True)
    os.chown(home, ALICE, ALICE)
    for above in (tmp_path, *tmp_path.parents[:3]):
        above.chmod(above.stat().st_mode | 0o011)
    return run_as(ALICE, [TRASHD, *words], env=environment({"HOME": str(home), "XDG_RUNTIME_DIR": str(home)}))


@pytest.mark.parametrize("words", [("--for", "2h"), ()])
@pytest.mark.parametrize("way", ["its path", "another mount of it", "all"])
def test_where_roots_reaper_serves_nobody_else_pauses(
    base: Path, volume: Path, tmp_path: Path, words: tuple[str, ...], way: str
) -> None:
    with service(base, volume) as running, tmpfs_volume() as there, bind_mount(volume, there):
        running.until_phase(volume, VolumePhase.IDLE)
        named = {"its path": [volume], "another mount of it": [there], "all": []}[way]
        done = by_alice(tmp_path, "pause", *words, *named)
    assert (done.returncode, done.stdout) == (4, b"")
    assert "root's reaper serves this volume" in done.stderr.decode()
    assert str(volume) in done.stderr.decode()
    assert "trashd keep ID" in done.stderr.decode()
    assert not list((tmp_path / "home").rglob("pause/*"))


@pytest.mark.parametrize("is_named", [True, False])
def test_what_roots_reaper_serves_only_root_resumes(base: Path, volume: Path, tmp_path: Path, is_named: bool) -> None:
    with service(base, volume) as running:
        done_well("pause", volume)
        running.until_phase(volume, VolumePhase.PAUSED)
        done = by_alice(tmp_path, "resume", *([volume] if is_named else []))
        assert running.volume(volume).phase is VolumePhase.PAUSED
    assert (done.returncode, done.stdout) == (4, b"")
    assert f"{volume}: " in done.stderr.decode()
    assert "only root can resume it: run trashd resume as root" in done.stderr.decode()


def test_his_own_volumes_everybody_pauses(base: Path, volume: Path, tmp_path: Path) -> None:
    with service(base, volume), tmpfs_volume() as own:
        os.chown(own, ALICE, ALICE)
        done = by_alice(tmp_path, "pause", own)
    assert done.returncode == 0, done
    assert b"your reaper service is not running" in done.stderr


def test_his_own_store_everybody_pauses_though_it_has_the_id_of_roots(base: Path, volume: Path, tmp_path: Path) -> None:
    with service(base, volume) as running, tmpfs_volume() as own:
        running.until_phase(volume, VolumePhase.IDLE)
        os.chown(own, ALICE, ALICE)
        assert by_alice(tmp_path, "init", own).returncode == 0
        text = (volume / ".trashd/volume.json").read_bytes()
        (own / f".trashd-{ALICE}/volume.json").write_bytes(text)
        assert by_alice(tmp_path, "pause", own).returncode == 0


def test_without_roots_reaper_all_are_paused(tmp_path: Path) -> None:
    done = by_alice(tmp_path, "pause")
    assert (done.returncode, b"all volumes: paused by " in done.stdout) == (0, True)
