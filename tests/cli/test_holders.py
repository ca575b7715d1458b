"""trashd holders: which processes work in a tree, by its path, by an orphan's id, and on a whole volume."""

import subprocess
from pathlib import Path

import pytest

from tests.support.make_trees import make_tree
from tests.support.trashd_command import done_well, swapped, trashd

pytestmark = pytest.mark.needs("root")


def make_victim(volume: Path, name: str = "victim") -> Path:
    return make_tree(volume / name, {"file": "content"})


def test_holders_names_who_works_in_the_tree(volume: Path) -> None:
    victim = make_victim(volume)
    with subprocess.Popen(["cat"], cwd=victim, stdin=subprocess.PIPE) as holder:
        done = done_well("holders", victim)
        assert holder.stdin is not None
        holder.stdin.close()
    assert f"{holder.pid}" in done.out
    assert "cwd" in done.out


def test_holders_finds_an_orphan_by_its_id(volume: Path) -> None:
    victim = make_victim(volume)
    with subprocess.Popen(["cat"], cwd=victim, stdin=subprocess.PIPE) as holder:
        swap_result = swapped(victim)
        (held,) = done_well("holders", "--json", "--volume", volume, swap_result["id"]).objects()
        assert holder.stdin is not None
        holder.stdin.close()
    assert [one["pid"] for one in held["holders"]] == [holder.pid]


def test_holders_takes_an_id_cut_short(volume: Path) -> None:
    identifier = swapped(make_victim(volume))["id"]
    (held,) = done_well("holders", "--json", "--volume", volume, identifier[-12:], cwd=volume).objects()
    assert Path(held["path"]).parent.name == identifier


def test_holders_takes_a_directory_that_has_the_name_of_a_short_id(volume: Path) -> None:
    short = make_victim(volume, swapped(make_victim(volume))["id"][-12:])
    (held,) = done_well("holders", "--json", short.name, cwd=volume).objects()
    assert held["path"] == str(short)


def test_holders_of_a_volume_are_who_works_on_it(volume: Path) -> None:
    with subprocess.Popen(["cat"], cwd=make_victim(volume), stdin=subprocess.PIPE) as holder:
        (held,) = done_well("holders", "--json", volume).objects()
        assert holder.stdin is not None
        holder.stdin.close()
    assert holder.pid in [one["pid"] for one in held["holders"]]


def test_the_kernel_holds_what_a_loop_device_is_made_of(volume: Path) -> None:
    image = make_victim(volume) / "image"
    image.write_bytes(bytes(4 << 20))
    command: list[str | Path] = ["losetup", "--find", "--show", image]
    loop = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip().removeprefix("/dev/")
    try:
        told = done_well("holders", image.parent).out.split()
        assert (told[0], told[2:]) == ("0", [loop, "loop", "image"])
        identifier = swapped(image.parent)["id"]
        done = trashd("reap", "--now", "--wait", "--volume", volume, identifier)
        assert (done.code, f"the kernel, for {loop}, has a deleted file open" in done.out) == (13, True), done
    finally:
        subprocess.run(["losetup", "--detach", f"/dev/{loop}"], check=True)


def test_the_kernel_holds_an_active_swap_file(ext4: Path) -> None:
    file = make_victim(ext4) / "swap file"
    file.touch(mode=0o600)
    file.write_bytes(bytes(4 << 20))
    subprocess.run(["mkswap", "--quiet", file], check=True)
    subprocess.run(["swapon", file], check=True)
    try:
        assert done_well("holders", file.parent).out.split()[2:] == ["swap", "swap", "swap", "file"]
        done = trashd("rm", file)
        assert (done.code, "swapoff" in done.err) == (4, True), done
    finally:
        subprocess.run(["swapoff", file], check=True)
