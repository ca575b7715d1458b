"""No name, note or path that a user made reaches another's terminal, log, metrics or shell as anything but text."""

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fusefs.core.printable_names import shell_word
from fusefs.core.record import quote_path
from fusefs.core.service_status import Status, VolumeStatus
from fusefs.linux.runtime_directories import SYSTEM_RUNTIME, make_dir
from fusefs.service.state_files import write_status
from tests.cli.test_restore import in_a_shell
from tests.support.foreground_mount import trashd_mount
from tests.support.make_trees import IMMUTABLE, Dir, make_tree, set_flags
from tests.support.other_users import run_as
from tests.support.real_filesystems import tmpfs_over, tmpfs_volume
from tests.support.service_process import places, service
from tests.support.store_verbs import init, raw
from tests.support.terminals import Terminal
from tests.support.trashd_command import TRASHD, CommandResult, environment, trashd

pytestmark = pytest.mark.needs("root")

ALICE = 1001
BIDI = "".join(map(chr, (*range(0x202A, 0x202F), *range(0x2066, 0x206A))))
NAMES = {
    "newline": b"a\nFORGED: all is well",
    "escapes": b"\x1b]0;EVIL\x07\x1b[2J\x1b[31m\x1b]8;;http:evil\x1b\\click",
    "c1": "\x9b31m\x85\x90x\x9c".encode(),
    "bidi": f"{BIDI}gpj.exe".encode(),
    "undecodable": b"\xff\xfe\x9b31m",
    "html": b"<b>bold<br>&amp;",
    "markup": b"[link=evil][bold red]x [link](x) `$(id)` :smile:",
    "option": b"--json\t-rf",
    "tab": b"a\tb\rc\x08\x7f",
}
ALL = b"".join(name for what, name in NAMES.items() if what != "option")
NOTE = f"\x1b]0;EVIL\x07{BIDI}\nFORGED: a note\x9b[link=evil]"
OPENED = b"[/x]"
"""Two names: the end of a markup that never began."""
NOT_TEXT = re.compile(r"\x1b\]|EVIL\x07|\x1b\[2J\x1b\[31m|[\x80-\x9f\u202a-\u202e\u2066-\u2069]|^FORGED", re.MULTILINE)
"""On a terminal, which also gets our own colours and moves."""


def dirty(text: str) -> list[str]:
    """The lines that are more than text, or that a name has made."""
    return [ascii(line) for line in text.split("\n") if not line.isprintable() or line.startswith("FORGED")]


def victims(volume: Path) -> list[Path]:
    return [volume / "alice" / os.fsdecode(name) for name in (*NAMES.values(), ALL)]


def worst(volume: Path) -> list[Path]:
    """The victim whose name is all others in one, and the one that could be an option."""
    return [volume / "alice" / os.fsdecode(name) for name in (ALL, NAMES["option"])]


@pytest.fixture
def shared(volume: Path) -> Path:
    """A volume of root's with a directory of Alice's, in which everything has such a name."""
    make_tree(volume / "alice", Dir(owner=(ALICE, ALICE)))
    for path in victims(volume):
        make_tree(path, dict.fromkeys(NAMES.values(), "content"))
        for one in (path, *path.iterdir()):
            os.chown(one, ALICE, ALICE)
    return volume


def by_alice(*words: str | Path) -> CommandResult:
    done = run_as(ALICE, [TRASHD, *words], env=environment({}))
    return CommandResult(done.returncode, os.fsdecode(done.stdout), os.fsdecode(done.stderr))


def swapped_by_alice(volume: Path, *options: str) -> list[str]:
    """The ids of what she swapped, all of it."""
    done = by_alice("swap", "--json", "--note", NOTE, *options, *victims(volume))
    assert done.code == 0, done
    return [told["id"] for told in done.objects()]


def said(done: CommandResult) -> str:
    return f"{done.out}\n{done.err}"


def each(volume: Path, *lines: str | tuple[str, ...], below: str = "") -> str:
    """Commands for each of the worst paths, or for what is below it, in the form of a whole path."""
    split = [line.split() if isinstance(line, str) else line for line in lines]
    return "\n".join(said(trashd(*words, path / below)) for words in split for path in worst(volume))


def all_of(volume: Path, *lines: str, below: str = "") -> str:
    """Commands for all such paths, or for what is below them; each loops over its operands."""
    paths = [path / below for path in victims(volume)]
    return "\n".join(said(trashd(*line.split(), *paths)) for line in lines)


def each_id(volume: Path, verb: str) -> str:
    return "\n".join(said(trashd(verb, "--volume", volume, one)) for one in swapped_by_alice(volume)[-2:])


def wrong(*lines: str) -> str:
    """Lines with each word that is none in the place of @."""
    words = [os.fsdecode(name) for name in (ALL, b"a\nFORGED: x", b"[/x]")]
    return "".join(
        said(trashd(*(part.replace("@", word) for part in line.split()))) for line in lines for word in words
    )


View = Callable[[Path], str]


def view_list(volume: Path) -> str:
    swapped_by_alice(volume)
    output = said(trashd("list", "--volume", volume)) + said(trashd("du", "--volume", volume))
    return output + "".join(said(trashd("list", "--path", path, "--volume", volume)) for path in worst(volume))


def view_check(volume: Path) -> str:
    with (victims(volume)[0] / "a").open("w"):
        return all_of(volume, "check")


def view_undo(volume: Path) -> str:
    words = " ".join(shell_word(raw(path)) for path in victims(volume))
    output = said(in_a_shell(f"trashd rm {words}", "trashd undo", cwd=volume))
    return output + said(in_a_shell(f"trashd swap {words}", "trashd undo", "trashd undo", cwd=volume))


def view_ls_and_diff(volume: Path) -> str:
    for path in victims(volume):
        (path / "link").symlink_to(path / "nowhere")
    output = ""
    lines = (("ls", ""), ("diff", ""), ("ls", ":link"), ("cat", f":{os.fsdecode(NAMES['c1'])}/gone"))
    for one, (verb, inside) in zip(swapped_by_alice(volume), itertools.cycle(lines), strict=False):  # all have the same
        output += said(trashd(verb, "--volume", volume, f"{one}{inside}"))
    return output + each(volume, *(f"{verb} --volume {volume}" for verb in ("ls", "diff", "cat")))


@contextmanager
def held(path: Path, comm: bytes) -> Iterator[None]:
    """A process of Alice's with such a name of its own has something open there."""
    code = "import ctypes, os, sys; ctypes.CDLL(None).prctl(15, os.fsencode(sys.argv[1])); print(flush=True); input()"
    argv: list[str | bytes] = [sys.executable, "-c", code, comm]
    with (
        (path / os.fsdecode(NAMES["bidi"])).open("rb") as file,
        subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[file.fileno()]) as process,
    ):
        assert process.stdout is not None
        process.stdout.readline()
        yield
        process.communicate(b"\n")


def view_holders(volume: Path) -> str:
    output = ""
    for path in victims(volume)[:2]:
        for comm in (b"\x1b[31m\xff", "\x9b\u202ex".encode()):
            with held(path, comm):
                output += said(trashd("holders", path))
    return output


def view_doctor(volume: Path) -> str:
    made = strange(volume)
    output = said(trashd("doctor", volume))
    for path in made:
        shutil.rmtree(path)
    return output


def strange(volume: Path) -> list[Path]:
    """What nobody understands, in her folder."""
    swapped_by_alice(volume)
    (orphans,) = (volume / ".trashd").glob(f"*/{ALICE}/orphans")
    made = [orphans / os.fsdecode(name) for name in NAMES.values()]
    for path in made:
        make_tree(path, Dir({ALL[:200]: ""}, owner=(ALICE, ALICE), mode=0o700))
    return made


def view_reap_of_what_stays(volume: Path) -> str:
    for path in victims(volume):
        for one in path.iterdir():
            set_flags(one, IMMUTABLE)
    ids = swapped_by_alice(volume)
    output = said(trashd("reap", "--now", "--volume", volume, *ids))
    output += said(trashd("list", "--volume", volume))
    output += said(trashd("reap", "--force", "--volume", volume, "--yes", *ids))
    return output + said(trashd("list", "--volume", volume))


def view_sweep(volume: Path) -> str:
    output = said(trashd("sweep", volume / "alice", "--type", "f", "--size", "-1M", "--dry-run"))
    for path in victims(volume)[1::3]:
        set_flags(path / os.fsdecode(NAMES["escapes"]), IMMUTABLE)
        output += said(trashd("sweep", path, "--type", "f", "--delete"))
        output += said(trashd("sweep", path, "--type", "f", "--move-to", path / "gone"))
        set_flags(path / os.fsdecode(NAMES["escapes"]), 0)
    return output + said(trashd("sweep", volume / "alice", "--name", "[[]*", "--type", "d"))


def view_sweep_of_a_list(volume: Path) -> str:
    names = b"\0".join([*NAMES.values(), *(b"../../" + name for name in NAMES.values()), b""])
    return said(trashd("sweep", volume / "alice", "--delete", "-0", "--from", "-", stdin=names, cwd=volume / "alice"))


def view_plan(volume: Path) -> str:
    output = ""
    for path in (*worst(volume), volume / "alice" / os.fsdecode(NAMES["markup"])):
        plan = volume / f"{os.path.basename(path)[:80]}.toml"
        if "\udcff" not in str(path) and str(path).isprintable():
            plan.write_text(f'[[rule]]\ndirectory = {json.dumps(str(path))}\nname = "*"\n', encoding="utf-8")
        else:
            plan.write_text('[[rule]]\ndirectory = 1\nname = "*"\n', encoding="utf-8")
        output += said(trashd("plan", "show", plan)) + said(trashd("plan", "check", plan))
        output += said(trashd("config", "check", plan)) + said(trashd("config", "show", path))
        plan.unlink()
    return output


def view_plan_of_all(volume: Path) -> str:
    plan = volume / "plan.toml"
    rule = f'[[rule]]\ndirectory = "{volume}/alice/*"\nname = "*"\n'
    plan.write_text(rule + f'[[rule]]\ndirectory = "{volume}/alice"\nsubdirectories = true\n', encoding="utf-8")
    output = said(trashd("plan", plan))
    plan.write_text(rule + 'note = "\\u001b]0;EVIL\\u0007\\u202e"\n"\\u001b[31m" = 1\n', encoding="utf-8")
    output += said(trashd("plan", plan))
    plan.unlink()
    return output


def view_of_who_takes_names(volume: Path) -> str:
    for name in NAMES.values():
        make_tree(volume / ".trashd/new" / os.fsdecode(b"1001." + name), Dir(owner=(ALICE, ALICE)))
    output = said(trashd("init", volume)) + said(trashd("doctor", volume)) + said(trashd("list", "--volume", volume))
    for one in (volume / ".trashd/new").iterdir():
        one.rmdir()
    return output


def view_status(volume: Path) -> str:
    evil = os.fsdecode(ALL).encode("utf-8", "replace").decode()
    told = [VolumeStatus(path=quote_path(raw(path))) for path in victims(volume)]
    told.append(VolumeStatus(path=quote_path(b"/" + ALL), why=evil, filesystem=evil))
    now_ns = time.time_ns()
    status = Status(
        version=evil, pid=os.getpid(), boot_id=evil, started_ns=now_ns, updated_ns=now_ns, volumes=tuple(told)
    )
    with places():
        write_status(make_dir(SYSTEM_RUNTIME), status)
        return said(trashd("status"))


def view_restore_of_another(volume: Path) -> str:
    swapped_by_alice(volume)
    return each(volume, ("restore", "--volume", str(volume)))


def view_restore_of_several(volume: Path) -> str:
    swapped_by_alice(volume)
    swapped_by_alice(volume)
    return each(volume, ("restore", "--user", str(ALICE), "--volume", str(volume)))


def view_restore_into_what_is_taken(volume: Path) -> str:
    return each(volume, ("restore", "--volume", str(volume), swapped_by_alice(volume)[0], "--to"))


def view_pause(volume: Path) -> str:
    with places():
        return all_of(volume, "pause", "resume", "resume")


VIEWS: dict[str, View] = {
    **{name.removeprefix("view_"): value for name, value in list(globals().items()) if name.startswith("view_")},
    "restore": lambda volume: each_id(volume, "restore"),
    "restore_of_nothing": lambda volume: each(volume, ("restore", "--volume", str(volume))),
    "check_of_a_file": lambda volume: all_of(volume, "check", below=os.fsdecode(NAMES["c1"])),
    "check_of_what_stays": lambda volume: all_of(volume, "swap --dry-run --keep *"),
    "swap": lambda volume: all_of(volume, "swap --keep *"),
    "swap_of_what_is_gone": lambda volume: all_of(volume, "swap", below="gone"),
    "rm": lambda volume: each(volume, "rm"),
    "rm_together": lambda volume: "".join(said(trashd("rm", *words, *victims(volume))) for words in ([], ["-v"])),
    "keep": lambda volume: each_id(volume, "keep"),
    "init": lambda volume: each(volume, "init", "init"),
    "mounts": lambda volume: each(volume, "umount", "mount --explain", "mount /nowhere/at/all"),
    "service_files": lambda volume: each(volume, "service install --dry-run --root"),
    "wrong_commands": lambda _volume: wrong("@", "help @", "swap@", "service @"),
    "wrong_options": lambda _volume: wrong("--@", "rm --@", "list -@", "rm --json@", "list @ @"),
    "wrong_values": lambda _volume: wrong(
        "keep @ --for @", "restore @ --user @", "swap --wait=@ .", "sweep . --older @", "sweep . --type @",
        "mount . / -o @", "sweep . --if-exists @", "reap --threads @",
    ),
    "wrong_ids": lambda _volume: wrong(
        "keep @", "reap @", "restore @", "list --volume @", "reap --force --yes @", "doctor --repair @"
    ),
}  # fmt: skip


@pytest.mark.parametrize("view", VIEWS)
def test_what_a_command_tells_is_text(shared: Path, view: str) -> None:
    told = VIEWS[view](shared)
    assert "Traceback" not in told
    assert dirty(told) == []


def test_a_name_that_is_more_than_text_is_found() -> None:
    for what, name in NAMES.items():
        if what not in ("html", "markup"):
            assert dirty(os.fsdecode(name)), what


def on_terminal(*words: str | Path) -> str:
    terminal = Terminal(*words)
    terminal.end()
    return terminal.output.replace("\r\n", "\n")


def test_a_list_on_a_terminal_is_text(shared: Path) -> None:
    swapped_by_alice(shared)
    assert NOT_TEXT.findall(on_terminal("list", "--volume", shared)) == []


def test_a_choice_on_a_terminal_is_text(shared: Path) -> None:
    swapped_by_alice(shared)
    swapped_by_alice(shared)
    for path in worst(shared):
        terminal = Terminal("restore", "--user", str(ALICE), "--volume", shared, path)
        terminal.wait_for("Which one")
        terminal.type("1\n")
        assert terminal.end() == 0
        assert NOT_TEXT.findall(terminal.output.replace("\r\n", "\n")) == []


def test_progress_on_a_terminal_is_text(shared: Path) -> None:
    ids = swapped_by_alice(shared)
    seen = on_terminal("reap", "--now", "--volume", shared, ids[6])
    assert NOT_TEXT.findall(seen) == []
    assert "[bold red]" in seen  # and not what rich makes of it
    (shared / os.fsdecode(OPENED)).parent.mkdir()
    nested = make_tree(shared / os.fsdecode(OPENED), {"file": ""})
    for path in (nested, *worst(shared)):
        seen = on_terminal("sweep", path, "--type", "f", "--delete")
        assert "Traceback" not in seen
        assert NOT_TEXT.findall(seen) == []


def test_paths_that_are_printed_on_a_terminal_are_text(shared: Path) -> None:
    assert NOT_TEXT.findall(on_terminal("sweep", shared / "alice", "--name", "*", "--print")) == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_what_a_shell_is_offered_is_text(shared: Path, shell: str) -> None:
    assert trashd("swap", *victims(shared)).code == 0
    for typed in ("trashd restore 2", "trashd keep 2", "trashd holders 2", "trashd reap 2"):
        done = trashd(_TRASHD_COMPLETE=f"{shell}_complete", COMP_WORDS=typed, COMP_CWORD="2")
        assert done.err == ""
        lines = done.out.split("\n")
        # What it is beside an id; the tab is fish's own.
        assert [ascii(line) for line in lines if not line.replace("\t", "", 1).isprintable()] == []
        assert not any(line.startswith("FORGED") for line in lines)


def test_journal_audit_log_and_metrics_have_text(tmp_path: Path) -> None:
    volume = tmp_path / os.fsdecode(ALL[:200])
    volume.mkdir()
    with tmpfs_over(volume), places() as base:
        init(volume)
        make_tree(volume / "alice", Dir(owner=(ALICE, ALICE)))
        path = make_tree(volume / "alice" / os.fsdecode(ALL[:200]), {ALL[:200]: ""})
        set_flags(path / os.fsdecode(ALL[:200]), IMMUTABLE)
        for name in NAMES.values():
            one = make_tree(volume / "alice" / os.fsdecode(name), Dir({name: ""}, owner=(ALICE, ALICE)))
            assert trashd("rm", "--keep-for", "0s", one).code == 0
        assert trashd("rm", "--keep-for", "0s", path).code == 0
        config = f'[defaults]\npaced = false\nminimum_age = "0s"\n[metrics]\ntextfile = "{base}/trashd.prom"\n'
        with service(base, volume, config=config) as running:
            running.until(lambda: (told := running.read_status()) is not None and told.status.volumes[0].n_quarantined)
            running.until((base / "trashd.prom").exists)
            metrics = (base / "trashd.prom").read_text("utf-8")  # it goes with the service
            status = said(trashd("status"))
        log, audit = (base / "log").read_text("utf-8"), (base / "audit").read_text("utf-8")
        (quarantined,) = (volume / ".trashd/u/0/quarantine").iterdir()
        set_flags(next((quarantined / "tree").iterdir()), 0)
    assert {kind: dirty(text) for kind, text in locals().items() if kind in ("status", "log", "audit", "metrics")} == {
        "status": [], "log": [], "audit": [], "metrics": []
    }  # fmt: skip
    labels = [sample.labels for one in text_string_to_metric_families(metrics) for sample in one.samples]
    assert any("FORGED" in label.get("volume", "") for label in labels)
    assert all(value.isprintable() for label in labels for value in label.values())


@pytest.mark.needs("fuse")
def test_what_is_told_of_a_mount_is_text() -> None:
    with tmpfs_volume() as base:
        source, point = base / os.fsdecode(ALL[:200]), base / os.fsdecode(b"m" + ALL[:200])
        source.mkdir()
        point.mkdir()
        with trashd_mount(source, point):
            told = [trashd("mount", "--explain", point), trashd("status", "--prometheus"), trashd("status")]
            told.append(trashd("swap", point / "gone"))
    assert [dirty(said(one)) for one in told] == [[]] * len(told)
