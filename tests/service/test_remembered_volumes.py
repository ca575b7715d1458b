"""Volumes that the service knows again: after a while unserved, as a block copy, and mounted at another path."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from fusefs.core.service_status import VolumePhase
from fusefs.linux.mountinfo import Disk
from fusefs.service.remembered_volumes import RememberedVolumes
from fusefs.store.stage import SwapOptions
from tests.support.real_filesystems import bind_mount, mounted_image
from tests.support.service_process import QUICK, next_due_s, outwait, service
from tests.support.small_orphans import EXPIRED, ids, orphan_in
from tests.support.store_verbs import init
from tests.support.trashd_command import done_well

pytestmark = [pytest.mark.needs("root"), pytest.mark.needs("loop")]

GRACE = 'grace = "1h"\n' + QUICK


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """An ext4 with a store, not mounted."""
    image = tmp_path / "image"
    image.touch()
    with image.open("r+b") as file:
        file.truncate(32 << 20)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    with mounted(image, tmp_path / "first") as volume:
        init(volume)
    return image


@contextmanager
def mounted(image: Path, where: Path) -> Iterator[Path]:
    where.mkdir(exist_ok=True)
    with mounted_image("ext4", image, where) as volume:
        yield volume


def copied(image: Path) -> Path:
    """A block copy; the file must not be mounted."""
    return Path(shutil.copy(image, image.with_name("copy")))


def test_what_expired_while_a_volume_was_not_served_is_kept_for_an_hour(base: Path, image: Path) -> None:
    with mounted(image, base / "v") as volume:
        orphan = orphan_in(volume, options=EXPIRED).id
        with service(base, volume, config=GRACE) as running:
            running.until(lambda: "kept until" in running.volume(volume).why)
            later = orphan_in(volume, "later", EXPIRED).id
            running.until(lambda: later not in ids(volume))
            assert ids(volume) == {orphan}
            running.until(lambda: 3500 < next_due_s(running, volume) < 3600)
    assert "orphans that expired while the service was not running are kept until" in (base / "log").read_text()


def test_what_was_served_until_the_service_ended_has_no_grace_again(base: Path, image: Path) -> None:
    with mounted(image, base / "v") as volume:
        with service(base, volume, config=GRACE) as running:
            kept = orphan_in(volume, "kept", SwapOptions(retention_s=3600)).id
            running.until(lambda: running.volume(volume).n_orphans == 1)
        with service(base, volume, config=GRACE) as running:
            running.until_phase(volume, VolumePhase.IDLE)
            due = orphan_in(volume, "due", EXPIRED).id
            running.until(lambda: due not in ids(volume))
            assert ids(volume) == {kept}
            running.kill()


def test_the_hour_goes_on_when_the_service_is_started_again(base: Path, image: Path) -> None:
    with mounted(image, base / "v") as volume:
        orphan = orphan_in(volume, options=EXPIRED).id
        for _time in range(2):
            with service(base, volume, config=GRACE) as running:
                running.until(lambda: "kept until" in running.volume(volume).why)
                running.until_phase(volume, VolumePhase.IDLE)
                assert ids(volume) == {orphan}


def test_what_expired_while_the_store_could_not_be_used_is_kept(base: Path, image: Path) -> None:
    with mounted(image, base / "v") as volume, service(base, volume, config=GRACE) as running:
        running.until_phase(volume, VolumePhase.IDLE)
        (volume / ".trashd/u").chmod(0o777)
        running.reload()
        running.until_phase(volume, VolumePhase.BROKEN)
        with running.held():  # the swap registers the store, upon which the service looks at it again
            (volume / ".trashd/u").chmod(0o755)
            orphan = orphan_in(volume, options=EXPIRED).id
        done_well("init", volume)
        running.until(lambda: "kept until" in running.volume(volume).why)
        assert ids(volume) == {orphan}


def test_a_copy_that_is_mounted_alone_has_its_own_grace(base: Path, image: Path) -> None:
    with mounted(image, base / "v") as volume:
        orphan = orphan_in(volume, options=SwapOptions(retention_s=1)).id
    copy = copied(image)
    with mounted(image, base / "v") as volume, service(base, volume, config=QUICK) as running:
        running.until(lambda: not ids(volume))
    with mounted(copy, base / "v") as volume, service(base, volume, config=GRACE) as running:
        running.until(lambda: "kept until" in running.volume(volume).why)
        assert ids(volume) == {orphan}


def test_of_two_disks_with_one_id_neither_is_reaped_until_init_says_which(base: Path, image: Path) -> None:
    copy = copied(image)
    with ExitStack() as mounts:
        volume = mounts.enter_context(mounted(image, base / "v"))
        with service(base) as running:
            running.until_phase(volume, VolumePhase.IDLE)
            other = mounts.enter_context(mounted(copy, base / "w"))
            for one in (volume, other):
                running.until_phase(one, VolumePhase.UNPROVEN)
                assert str(other) in running.volume(one).why
            due = orphan_in(volume, options=EXPIRED).id
            orphan_in(other, options=EXPIRED)
            done_well("init", volume)
            running.until(lambda: due not in ids(volume))
            running.until_phase(other, VolumePhase.UNPROVEN)
            assert len(ids(other)) == 1
            done_well("init", other)
            running.until_phase(other, VolumePhase.IDLE)
            running.until_phase(volume, VolumePhase.UNPROVEN)


def test_when_the_copy_is_unmounted_the_volume_is_served_again(base: Path, image: Path) -> None:
    copy = copied(image)
    with mounted(image, base / "v") as volume, service(base) as running:
        with mounted(copy, base / "w"):
            running.until_phase(volume, VolumePhase.UNPROVEN)
        due = orphan_in(volume, options=EXPIRED).id
        running.until(lambda: due not in ids(volume))


def test_a_bind_mount_is_no_copy(base: Path, image: Path) -> None:
    (base / "w").mkdir()
    with mounted(image, base / "v") as volume, service(base) as running, bind_mount(volume, base / "w"):
        outwait(running, volume)
        running.until_phase(volume, VolumePhase.IDLE)


@pytest.mark.parametrize("lines", ['[[volume]]\npath = "{}/v"\nretention = "never"\n', 'keep = ["{}/v/prec*"]\n'])
def test_a_disk_that_had_rules_is_not_reaped_where_it_has_none(base: Path, image: Path, lines: str) -> None:
    rules = f'grace = "0s"\n{QUICK}{lines.format(base)}'
    with service(base, config=rules) as running:
        with mounted(image, base / "v") as volume:
            orphan_in(volume, options=EXPIRED)
            running.until(lambda: not ids(volume))
            running.until(lambda: subprocess.run(["umount", volume], check=False).returncode == 0)
        with mounted(image, base / "w") as elsewhere:
            orphan = orphan_in(elsewhere, "again", EXPIRED).id
            running.until(lambda: running.knows(elsewhere))
            status = running.until_phase(elsewhere, VolumePhase.UNPROVEN)
            assert f"{base}/v" in status.why
            assert status.id in status.why
            assert "this volume had its own rules at another path" in running.log.read_text()
            assert ids(elsewhere) == {orphan}


def test_that_is_remembered_by_the_next_service_too_also_of_what_it_did_not_serve(base: Path, image: Path) -> None:
    rules = f'grace = "0s"\n{QUICK}[[volume]]\npath = "{base}/v"\nserve = false\n'
    with mounted(image, base / "v"), service(base, config=rules) as running:
        running.until((base / "volumes.json").exists)
    with mounted(image, base / "w") as elsewhere:
        orphan = orphan_in(elsewhere, options=EXPIRED).id
        with service(base, config=rules) as running:
            running.until_phase(elsewhere, VolumePhase.UNPROVEN)
            assert ids(elsewhere) == {orphan}


def test_rules_follow_a_volume_that_is_named_by_its_id(base: Path, image: Path) -> None:
    with mounted(image, base / "w") as elsewhere:
        with service(base, elsewhere, config=QUICK) as running:
            running.until_phase(elsewhere, VolumePhase.IDLE)
            identifier = running.volume(elsewhere).id
        kept = orphan_in(elsewhere, "precious", EXPIRED).id
        due = orphan_in(elsewhere, "due", EXPIRED).id
        named = f'[[volume]]\npath = "{base}/v"\nid = "{identifier}"\nserve = true\nkeep = ["{base}/v/prec*"]\n'
        with service(base, config=f'grace = "0s"\n{QUICK}serve = false\n{named}') as running:
            running.until(lambda: due not in ids(elsewhere))
            outwait(running, elsewhere)
            assert ids(elsewhere) == {kept}


def test_what_is_remembered_is_bounded_and_of_users_first(tmp_path: Path) -> None:
    disk, state = Disk("boot 7:0 1", is_block=True), bytes(tmp_path)
    known = RememberedVolumes(state)
    for restart in range(10):
        grace = known.appear("root's", b"", disk, 100.0 + restart, 3600.0)
    assert grace.at_s(110.0, 50.0) == 100.0 + 3600.0  # what expired before the first of them
    for number in range(1100):
        known.appear(f"{number} 12001", b"", disk, 0.0, 3600.0)
    assert (tmp_path / "volumes.json").stat().st_size < 1 << 20
    assert RememberedVolumes(state).appear("root's", b"", disk, 120.0, 3600.0).at_s(130.0, 50.0) == 100.0 + 3600.0
