"""The commands of this version on the data of earlier releases: they read everything, and lose nothing.

The samples are whole filesystems that 0.2.0 and 0.3.0 themselves wrote (old_releases/make.sh). So inode numbers, file
handles and birth times are those in the records, as on a machine that was upgraded; only the boot is another one.
"""

import json
import lzma
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fusefs.core.service_status import VolumePhase
from fusefs.linux.machine_identity import session
from fusefs.linux.runtime_directories import SYSTEM_RUNTIME
from fusefs.store.registry_lines import XATTR
from tests.support.make_trees import Dir, make_tree, snapshot
from tests.support.mount_namespaces import ROOTS
from tests.support.real_filesystems import full, mounted_image
from tests.support.service_process import places, service
from tests.support.store_verbs import forge
from tests.support.trashd_command import TRASHD, CommandResult, done_well, trashd
from tests.support.user_homes import accounts, trashd_as

pytestmark = pytest.mark.needs("root", "loop")

SAMPLES = Path(__file__).parent / "old_releases"
RELEASES = ("0.2.0", "0.3.0")
MNT = Path("/mnt")
"""Where the samples were made: the registries of stores and the configuration name this path."""
USER, NEIGHBOUR, EARLY = 7001, 7002, 1003
BOTH = (0, USER)
BY_BOTH = ("swapped", "expired", "kept-for", "pinned", "removed", "dropped", "parts", "keeps", "noted", "tmp")
KILLED = {
    2001: "stage",
    2002: "stage",
    2003: "restoring",
    2004: "restoring",
    2005: "reaping",
    2006: "stage",
    2007: "stage",
}
"""The states in which killed commands left `job`: swap before and after its exchange, restore before and after its
exchange, reap, rm, sweep."""
ORPHANS = {
    *((uid, name) for uid in BOTH for name in BY_BOTH),
    *((uid, "first") for uid in KILLED), (0, "job"), (USER, "by-root"), (USER, "odd____"), (2008, "new"),
}  # fmt: skip
QUARANTINED = {(uid, "quarantined") for uid in BOTH}
DAY_S = 86_400


class Item(NamedTuple):
    """A container. state: the directory that it is in"""

    id: str
    state: str
    path: Path
    record: dict[str, Any]

    def tree(self) -> Path:
        return self.path / "tree"


@contextmanager
def upgraded(release: str, name: str = "root") -> Iterator[Path]:
    """A volume of an earlier release on /mnt, with its state directory and runtime directory in their places.

    Yields  a directory for a service's files
    """
    with places() as base, tempfile.NamedTemporaryFile() as image:
        image.write(lzma.decompress((SAMPLES / f"{release}-{name}.xz").read_bytes()))
        image.flush()
        with mounted_image("ext4", Path(image.name), MNT):
            shutil.copytree(MNT / "state", ROOTS, dirs_exist_ok=True)
            shutil.copytree(MNT / "state", base, dirs_exist_ok=True)
            if name == "root":
                shutil.copytree(MNT / "run/reaper", os.fsdecode(SYSTEM_RUNTIME))
            yield base


@pytest.fixture(params=RELEASES)
def release(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def base(release: str) -> Iterator[Path]:
    with upgraded(release) as path:
        yield path


def items() -> dict[tuple[int, str], Item]:
    """All containers, by their users and names, as they are on disk."""
    found = {}
    for store in (MNT / ".trashd", MNT / "work/inner/.trashd"):
        for file in store.glob("**/record.json"):
            container = file.parent
            uid, state, identifier = container.parts[-3:]
            name = identifier.partition("Z-")[2].rpartition("-")[0]
            found[int(uid), name] = Item(identifier, state, container, json.loads(file.read_text()))
    return found


def of(uid: int, *words: str | Path) -> CommandResult:
    """`trashd WORDS` as a user, which has to succeed."""
    done = trashd(*words) if uid == 0 else trashd_as(uid, MNT / f"home/{uid}", *words)
    assert done.code == 0, done
    return done


def is_due(item: Item) -> bool:
    retention_s = item.record["retention_s"]
    return retention_s is not None and item.record["created_ns"] / 1e9 + retention_s <= time.time()


def origin(item: Item) -> Path:
    store = next(path for path in item.path.parents if path.name.startswith(".trashd"))
    escaped = re.sub(rb"%(..)", lambda match: bytes.fromhex(match[1].decode()), item.record["origin"].encode())
    return store.parent / os.fsdecode(escaped)


@pytest.mark.usefixtures("base")
def test_a_sample_holds_each_state() -> None:
    states = {key: item.state for key, item in items().items()}
    killed = {(uid, "job"): state for uid, state in KILLED.items()}
    assert states == {
        **dict.fromkeys(ORPHANS | {(EARLY, "early")}, "orphans"), **dict.fromkeys(QUARANTINED, "quarantine"), **killed,
    }  # fmt: skip


@pytest.mark.usefixtures("base")
def test_all_is_listed_with_its_end_and_its_errors() -> None:
    before = items()
    listed = {one["id"]: one for one in done_well("list", "--json").objects()}
    for key in ORPHANS | QUARANTINED:
        item = before[key]
        end_ns = item.record["retention_s"] and item.record["created_ns"] + item.record["retention_s"] * 10**9
        assert listed[item.id]["expires_ns"] == end_ns
        assert listed[item.id]["failures"] == item.record["failures"]
        assert listed[item.id]["uid"] == key[0]
    assert before.keys() - {key for key, item in before.items() if item.id in listed} == {
        (EARLY, "early"), (2001, "job"), (2004, "job"),
    }  # fmt: skip
    own = {one["id"] for one in of(USER, "list", "--json").objects()}
    assert own == {item.id for (uid, _), item in before.items() if uid == USER}
    assert {one["id"] for one in done_well("du", "--json").objects() if "id" in one} == listed.keys()


@pytest.mark.usefixtures("base")
def test_each_orphan_comes_back_as_it_was() -> None:
    whole = {uid: snapshot(items()[uid, "swapped"].tree()) for uid in BOTH}
    for uid, name in sorted(ORPHANS):
        if name == "tmp":
            continue
        item = items()[uid, name]  # root's first restore moves the orphans of a user that it had not seen
        before = snapshot(item.tree(), with_times=True)
        place = MNT / f"work/{uid}/dropped" if name == "dropped" else origin(item)
        of(uid, "restore", item.id, *(("--to", place) if name == "dropped" else ()))
        if name == "keeps":  # files and a directory had stayed in place
            assert snapshot(place) == whole[uid]
        else:
            assert snapshot(place, with_times=True) == before
        assert not item.path.exists()
        if name == "parts":  # a part was restored before: these releases did not record that it belongs to the whole
            assert (items()[uid, name].tree() / "sub/more").read_text() == "more\n"
    assert ORPHANS & items().keys() == {(uid, name) for uid in BOTH for name in ("tmp", "parts")}


@pytest.mark.usefixtures("base")
def test_what_a_sweep_took_comes_back_to_its_directory() -> None:
    for uid in BOTH:
        of(uid, "restore", items()[uid, "tmp"].id)
        names = {str(path.relative_to(MNT / f"work/{uid}/tmp")) for path in (MNT / f"work/{uid}/tmp").rglob("*")}
        assert names >= {"one.log", "two.log", "sub/three.log", "stays"}


@pytest.mark.usefixtures("base")
def test_killed_commands_are_completed_or_undone() -> None:
    before = items()
    whole = {uid: snapshot(before[uid, "first"].tree(), with_times=True) for uid in KILLED}
    done_well("list")
    after = items()
    for uid in (2001, 2004):  # not swapped yet; restored already
        assert (uid, "job") not in after
        assert snapshot(MNT / f"work/{uid}/job", with_times=True) == whole[uid]
    for uid in (2002, 2003, 2006):
        assert after[uid, "job"].state == "orphans"
        of(uid, "restore", after[uid, "job"].id)
        assert snapshot(MNT / f"work/{uid}/job", with_times=True) == whole[uid]
    of(2007, "restore", after[2007, "job"].id)
    assert {path.name for path in (MNT / "work/2007/job").glob("*.log")} == {"1.log", "2.log", "3.log"}
    assert after[2005, "job"].state == "reaping"
    of(2005, "restore", after[2005, "job"].id)
    rest = {(one.depth, one.name, one.content) for one in snapshot(MNT / "work/2005/job")}
    assert {(0, b"", None)} < rest < {(one.depth, one.name, one.content) for one in whole[2005]}
    (finding,) = trashd("doctor", "--json", MNT).objects()
    assert finding["hint"] == "its owner's next command here, such as trashd list, moves it to the new store"
    of(EARLY, "list")
    done_well("doctor", MNT)


@pytest.mark.usefixtures("base")
def test_what_waited_in_a_replaced_store_comes_out_and_stays() -> None:
    before = snapshot(items()[EARLY, "early"].tree(), with_times=True)
    (listed,) = of(EARLY, "list", "--json").objects()
    assert listed["expires_ns"] is None
    of(EARLY, "restore", listed["id"])
    assert snapshot(MNT / f"work/{EARLY}/early", with_times=True) == before


@pytest.mark.usefixtures("base")
def test_a_reap_deletes_what_has_expired_and_nothing_else() -> None:
    before = items()
    done_well("reap")
    due = {(uid, "expired") for uid in BOTH} | {key for key in ORPHANS | {(2006, "job")} if is_due(before[key])}
    assert before.keys() - items().keys() == due | {(2001, "job"), (2004, "job"), (2005, "job")}
    for uid in BOTH:
        assert snapshot(before[uid, "pinned"].tree()) == snapshot(before[uid, "kept-for"].tree())


@pytest.mark.usefixtures("base")
def test_what_is_in_quarantine_is_tried_again_kept_and_restored() -> None:
    for uid in BOTH:
        item = items()[uid, "quarantined"]
        before = snapshot(item.tree())
        done = trashd("reap", item.id) if uid == 0 else trashd_as(uid, MNT / f"home/{uid}", "reap", item.id)
        assert done.code == 13, done
        assert items()[uid, "quarantined"].record["failures"] == item.record["failures"]
        of(uid, "restore", item.id)
        assert snapshot(MNT / f"work/{uid}/quarantined") == before


@pytest.mark.usefixtures("base")
def test_a_drop_of_an_earlier_release_becomes_an_orphan() -> None:
    (waiting,) = MNT.glob(".trashd/new/2008/drop/*")
    before = snapshot(waiting, with_times=True)
    done_well("list")
    item = items()[2008, "waiting"]
    assert item.state == "orphans"
    assert snapshot(item.tree(), with_times=True) == before


@pytest.mark.usefixtures("base")
def test_the_reserve_serves_a_swap_on_a_full_volume() -> None:
    with full(MNT):
        for uid in BOTH:
            of(uid, "swap", MNT / f"work/{uid}/tmp")
            assert list((MNT / f"work/{uid}/tmp").iterdir()) == []


@pytest.mark.usefixtures("base")
def test_retentions_can_be_changed() -> None:
    for uid in BOTH:
        of(uid, "keep", items()[uid, "swapped"].id)
        of(uid, "keep", items()[uid, "pinned"].id, "--for", "7d")
        of(uid, "keep", items()[uid, "kept-for"].id, "--release")
        new = {name: items()[uid, name].record for name in ("swapped", "pinned", "kept-for")}
        assert new["swapped"]["retention_s"] is None
        age_s = time.time() - new["pinned"]["created_ns"] / 1e9
        assert new["pinned"]["retention_s"] == pytest.approx(age_s + 7 * DAY_S, abs=60)
        assert new["kept-for"]["retention_s"] == DAY_S


@pytest.mark.usefixtures("base")
def test_undo_takes_back_the_last_command_of_this_terminal() -> None:
    item = items()[USER, "noted"]
    done = trashd_as(USER, MNT / f"home/{USER}", "undo")
    assert done.code == 5, done
    assert "trashd list" in done.err
    # The session of the sample's terminal is over; an upgrade ends none.
    forge(item.path / "record.json", invocation={**item.record["invocation"], "session": session()})
    of(USER, "undo")
    assert not item.path.exists()
    assert (MNT / f"work/{USER}/noted/file").read_text() == "content\n"


@pytest.mark.usefixtures("base")
def test_the_list_of_stores_shows_where_stores_are_and_which_root_made() -> None:
    os.removexattr(MNT / ".trashd", XATTR)  # as on a filesystem without such attributes
    inner = items()[0, "job"]
    assert inner.path.is_relative_to(MNT / "work/inner")
    listed = {one["id"] for one in done_well("list", "--json").objects()}
    assert listed >= {item.id for key, item in items().items() if key in ORPHANS}
    (ROOTS / "stores").unlink()
    done = trashd("swap", MNT / "work/0/tmp")
    assert done.code == 6, done
    assert "trashd init --known /mnt" in done.err
    done_well("init", "--known", MNT)
    done_well("swap", MNT / "work/0/tmp")


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.usefixtures("base")
def test_another_format_is_refused_and_its_store_can_be_moved_aside_and_back(number: int) -> None:
    before = snapshot(MNT / ".trashd")
    volume = MNT / ".trashd/volume.json"
    known = volume.read_text()
    volume.write_text(known.replace('"format": 2', f'"format": {number}'))
    for words in (("list",), ("swap", MNT / "work/0/tmp"), ("reap",), ("init", MNT), ("init", "--replace", MNT)):
        done = trashd(*words)
        assert done.code == 6, done
        assert "mv /mnt/.trashd /mnt/.trashd-old" in done.err
    (MNT / ".trashd").rename(MNT / ".trashd-old")
    done_well("init", MNT)
    done_well("swap", MNT / "work/0/tmp")
    done_well("reap")
    (MNT / ".trashd").rename(MNT / ".trashd-new")
    (MNT / ".trashd-old").rename(MNT / ".trashd")
    volume.write_text(known)
    assert snapshot(MNT / ".trashd") == before
    assert {one["id"] for one in done_well("list", "--json").objects()} >= {
        item.id for key, item in items().items() if key in ORPHANS
    }  # fmt: skip


def test_the_service_continues_with_its_pause_and_deletes_only_what_has_expired(base: Path) -> None:
    before = items()
    config = (MNT / "etc/trashd/config.toml").read_text()
    config = re.sub(r"(?m)^(audit|http|textfile|allow_remote|on_\w+) = .*\n", "", config)
    with service(base, MNT, config=config) as running:
        running.until_phase(MNT, VolumePhase.PAUSED)
        assert items()[0, "expired"].path.exists()
        done_well("resume", MNT)
        gone = [before[key].path for key in ((0, "expired"), (USER, "expired"), (2005, "job"))]
        running.until(lambda: not any(path.exists() for path in gone))
        running.until(running.is_alone)
    assert (
        not {key for key in ORPHANS if key[1] != "expired"}
        - items().keys()
        - {key for key in ORPHANS if is_due(before[key])}
    )


@pytest.mark.usefixtures("base")
def test_a_configuration_means_the_same_and_check_names_the_new_keys() -> None:
    file = MNT / "etc/trashd/config.toml"
    text = (MNT / "etc/shown.json").read_text()
    for old, new in (('"authority": "asker"', '"delete_as": "owner"'), ('"authority": "root"', '"delete_as": "root"')):
        text = text.replace(old, new)
    before = json.loads(text)
    del before["notices"]
    (after,) = trashd_as(USER, Path("/"), "config", "show", "--json", XDG_CONFIG_HOME=str(MNT / "etc")).objects()
    assert is_part_of(before, after)
    fixes = {one["key"]: one["fix"] for one in trashd("config", "check", "--json", file).objects() if "key" in one}
    assert fixes.keys() == {
        "notices", "defaults.authority", "volume[1].authority", "volume[1].rules[1].authority",
    }  # fmt: skip
    text = file.read_text().replace("notices = false\n", "")
    for old, key in (("root", "defaults.authority"), ("asker", "volume[1].authority")):
        text = text.replace(f'authority = "{old}"', fixes[key].removeprefix("write "))
    file.write_text(text)
    done_well("config", "check", file)


def is_part_of(before: object, after: object) -> bool:
    """Return whether all values are there and equal; keys may have been added."""
    if isinstance(before, dict) and isinstance(after, dict):
        return all(key in after and is_part_of(value, after[key]) for key, value in before.items())
    if isinstance(before, list) and isinstance(after, list):
        return len(before) == len(after) and all(map(is_part_of, before, after))
    return before == after


@pytest.mark.usefixtures("base")
def test_plans_are_read_and_a_removed_key_loses_no_file() -> None:
    done_well("plan", "check", SAMPLES / "plan.toml")
    for directory in (MNT / "spool/archive", elsewhere := ROOTS / "elsewhere"):
        directory.mkdir()
    done = trashd("plan", "apply", SAMPLES / "removed.toml")
    assert done.code == 3, done
    assert "rule[1].flat: this key was removed" in done.err
    assert "rule[2].copy: this key was removed" in done.err
    assert (MNT / "spool/archive/old.log").exists()
    stays = MNT / f"work/{USER}/tmp/stays"
    assert stays.exists()
    (hint,) = re.findall("hint: (.*rsync.*)", done.out)
    subprocess.run(["sh", "-ec", f"PATH={Path(TRASHD).parent}:$PATH; {hint}"], check=True)
    assert not stays.exists()
    assert (elsewhere / "stays").exists()


@pytest.mark.parametrize("uid", BOTH)
@pytest.mark.usefixtures("base")
def test_purge_lists_are_replaced(uid: int) -> None:
    plan = MNT / "etc/purge.toml" if uid == 0 else MNT / f"home/{uid}/purge.toml"
    purge_list = MNT / f"spool/{USER}.list" if uid == 0 else MNT / f"home/{uid}/lists/{USER}.list"
    before = purge_list.read_text().splitlines()
    of(uid, "plan", "show", plan)
    of(uid, "plan", "apply", plan)
    after = purge_list.read_text().splitlines()
    assert after[0] != before[0]
    assert after[1:] == before[1:]


def test_the_store_of_a_user_serves_that_user_until_root_replaces_it(release: str) -> None:
    with upgraded(release, "users"):
        before = {name: snapshot(item.tree(), with_times=True) for (_, name), item in items().items()}
        assert before.keys() == {"job", "other", "expired"}
        of(USER, "restore", MNT / f"work/{USER}/other")
        assert snapshot(MNT / f"work/{USER}/other", with_times=True) == before["other"]
        make_tree(
            MNT / f"home/{NEIGHBOUR}", Dir({"job": Dir(owner=(NEIGHBOUR, NEIGHBOUR))}, owner=(NEIGHBOUR, NEIGHBOUR))
        )
        of(NEIGHBOUR, "swap", MNT / f"home/{NEIGHBOUR}/job")
        assert (MNT / f".trashd-{NEIGHBOUR}").is_dir()
        done = trashd("init", MNT)
        assert done.code == 6, done
        assert "trashd init --replace /mnt" in done.err
        done_well("init", "--replace", MNT)
        listed = {one["origin"]: one for one in of(USER, "list", "--json").objects()}
        assert listed.keys() == {f"{MNT}/work/{USER}/{name}" for name in ("job", "expired")}
        assert {one["expires_ns"] for one in listed.values()} == {None}
        of(USER, "restore", MNT / f"work/{USER}/job")
        assert snapshot(MNT / f"work/{USER}/job", with_times=True) == before["job"]
        of(NEIGHBOUR, "undo")
        done_well("doctor", MNT)


def test_the_service_of_root_serves_a_users_store(release: str) -> None:
    with upgraded(release, "users") as base, accounts({USER: MNT / f"home/{USER}"}):
        before = items()
        with service(base) as running:
            running.until(lambda: not before[USER, "expired"].path.exists())
            running.until(running.is_alone)
        assert items().keys() == {(USER, "job"), (USER, "other")}
