"""Command lines of `trashd` and how each ends: one table, from which tests/cli/test_command_scenarios.py runs each."""

import os
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

from fusefs.cli.group import REMOVED
from fusefs.core.version import VERSION
from tests.support.foreground_mount import trashd_mount
from tests.support.make_trees import IMMUTABLE, make_tree, set_flags
from tests.support.open_files import opened
from tests.support.service_process import places, service
from tests.support.trashd_command import CommandResult, done_well, trashd
from tests.support.typed_commands import all_commands

Prepare = Callable[[Path], object]
Around = Callable[[Path], AbstractContextManager[object]]


@dataclass(frozen=True, slots=True)
class Scenario:
    """One command line, typed in a volume that has a store and a directory `victim` with a file.

    words     the command line; {volume} and {id} stand for the volume's path and the id of its only container
    code      its exit code
    error     the name of the error's class, where the command prints one error and nothing else
    prepare   changes the volume first
    after     removes what the store checker would report
    around    surrounds `prepare` and the command: a service, a mount, an open file
    golden    the golden file of what it prints, in tests/cli/golden
    prints    parts of its output, on either stream; {volume} as in `words`
    lacks     parts that its output must not have
    variables environment variables; {volume} as in `words`
    is_bare   whether it runs in an empty directory, without a volume: it needs no root
    is_silent whether it prints nothing
    needs     capabilities of the machine beside root
    """

    words: str
    code: int = 0
    error: str = ""
    prepare: Prepare = lambda _volume: None
    after: Prepare = lambda _volume: None
    around: Around = nullcontext
    golden: str = ""
    prints: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    is_bare: bool = False
    is_silent: bool = False
    needs: tuple[str, ...] = ()

    def play(self, place: Path) -> CommandResult:
        """Prepare, run the command once, and clean up."""
        if not self.is_bare:
            make_tree(place / "victim", {"file": "content"})
        with self.around(place):
            self.prepare(place)
            done = self.type(place)
        self.after(place)
        return done

    def type(self, place: Path) -> CommandResult:
        variables = {name: fill(value, place) for name, value in self.variables.items()}
        return trashd(*self.split(place), cwd=place, stdin=b"", **variables)

    def split(self, place: Path) -> list[str]:
        return [fill(word, place) for word in shlex.split(self.words)]


def fill(text: str, place: Path) -> str:
    """Put the volume's path and the id of its only container into a text."""
    if "{id}" in text:
        text = text.replace("{id}", only_container(place).name)
    return text.replace("{volume}", str(place))


def only_container(volume: Path) -> Path:
    (container,) = volume.glob(".trashd/u/0/*/*Z-*")
    return container


def swap_victim(volume: Path) -> None:
    done_well("swap", "--note", "a note", "victim", cwd=volume)


def quarantine_victim(volume: Path) -> None:
    """Put the victim, whose file is immutable, into quarantine."""
    set_flags(volume / "victim/file", IMMUTABLE)
    swap_victim(volume)
    assert trashd("reap", "--now", "--volume", volume, only_container(volume).name).code == 13


def then(*steps: Prepare) -> Prepare:
    """Several steps as one."""

    def take(volume: Path) -> None:
        for step in steps:
            step(volume)

    return take


def typed(*lines: str) -> Prepare:
    """Commands that are typed before, and succeed."""

    def type_lines(volume: Path) -> None:
        for line in lines:
            done_well(*(fill(word, volume) for word in shlex.split(line)), cwd=volume)

    return type_lines


def write(name: str, text: str) -> Prepare:
    def write_file(volume: Path) -> None:
        (volume / name).parent.mkdir(exist_ok=True)
        (volume / name).write_text(fill(text, volume))

    return write_file


def lead_session(_volume: Path) -> None:
    """Lead a session, as xdist's workers do already: undo finds the commands of its session."""
    with suppress(PermissionError):
        os.setsid()


def drop_victim(volume: Path) -> None:
    (volume / "victim").rename(volume / ".trashd/u/0/drop/victim")


def take_name(volume: Path) -> None:
    """Something else has the name of the orphan."""
    swap_victim(volume)
    (volume / "victim").rmdir()
    (volume / "victim").write_text("another")


def break_record(volume: Path) -> None:
    swap_victim(volume)
    record = only_container(volume) / "record.json"
    record.rename(volume / "record")
    record.write_text("{}")


def mend_record(volume: Path) -> None:
    (volume / "record").rename(only_container(volume) / "record.json")


STRAY = ".trashd/u/0/orphans/stray"


def leave_stray(volume: Path) -> None:
    (volume / STRAY).mkdir()


def remove_stray(volume: Path) -> None:
    (volume / STRAY).rmdir()


@contextmanager
def file_is_open(volume: Path) -> Iterator[None]:
    with opened(volume / "victim/file"):
        yield


@contextmanager
def own_places(_volume: Path) -> Iterator[None]:
    with places():
        yield


@contextmanager
def with_service(volume: Path) -> Iterator[None]:
    with places() as base, service(base, volume):
        yield


@contextmanager
def with_mount(volume: Path) -> Iterator[None]:
    """A mount of the victim at `mounted`."""
    (volume / "mounted").mkdir()
    with trashd_mount(volume / "victim", volume / "mounted"):
        yield


PLAN = """\
[[rule]]
directory = "{volume}/victim"
name = "*"
"""
MORE_OF_PLAN = """\
[[rule]]
directory = "{volume}/victim"
older = "9d"
[[rule]]
directory = "{volume}/none"
older = "9d"
purgelist = { directory = "{volume}/lists", ahead = "1d" }
"""
HOME = {"HOME": "{volume}", "XDG_DATA_HOME": "", "XDG_RUNTIME_DIR": ""}
_OF_HELP = {
    **{f"{command} --help".strip(): command for command in dict(all_commands())},
    **{f"help {command}".strip(): command for command in ("", "swap", "service install")},
    "-h": "",
}
"""Commands by what prints their help."""
_MEANT = {
    "swp": "swap", "lst": "list", "restor": "restore", "empty": "reap",
    "service instal": "install", "plan shwo": "show", "config shw": "show",
}  # fmt: skip
"""Commands by how they are mistyped."""
_WRONG_LINES = (
    "bogus", "swap --bogus x", "swap --keep-for '3 moons' x", "swap --now --for-owner x", "rm --json",
    "reap --all 20261121T032253.555Z-job-2fe7e4cb8ba8", "reap --now", "reap --all --free 1G --one", "restore --json",
    "reap --one 20261121T032253.555Z-job-2fe7e4cb8ba8", "reap --one --free 1G",
    "list --bogus --json", "bogus --json", "keep --for soon x --json", "list extra --json", "swap --json",
    "swap --json --no-such-option", "init --beside /b /a", "rm -v", "rm -v --json",
    "config check --json /nowhere.toml --system", "swap --now --wait=1G x",
    "reap --all --max-rate fast", "reap --all --max-rate -5/s", "reap --all --max-rate 0/s",
    "reap --all --max-bytes 200X/s", "reap --all --max-bytes ''", "reap --all --threads 0", "reap --all --threads 65",
    "reap --all --threads many",
)  # fmt: skip
_VERSION = (f"trashd, version {VERSION}\n",)
_NOT_FOUND = ("trashd: missing: not found\n",)

_BARE = (
    *(
        Scenario(words, golden=f"help-{command.replace(' ', '-') or 'trashd'}.txt", is_bare=True)
        for words, command in _OF_HELP.items()
    ),
    Scenario("-V", prints=_VERSION, is_bare=True),
    Scenario("--version", prints=_VERSION, is_bare=True),
    *(
        Scenario(words, 2, "UsageError", prints=(f"id you mean {command}",), is_bare=True)
        for words, command in _MEANT.items()
    ),
    Scenario("xyzzy", 2, "UsageError", lacks=("did you mean",), is_bare=True),
    *(
        Scenario(f"{command} {option}".strip(), 2, "UsageError", prints=(f"hint: {hint}",), is_bare=True)
        for (command, option), hint in REMOVED.items()
    ),
    *(Scenario(words, 2, "UsageError", is_bare=True) for words in _WRONG_LINES),
    Scenario("swap", 2, "UsageError", prints=("missing path",), is_bare=True),
    Scenario("browse", 3, "Refused", prints=("trashd list --json",), is_bare=True),
    Scenario("browse --volume /", 3, "Refused", prints=("trashd list --json",), is_bare=True),
    Scenario(
        "service install --user --uring",
        2,
        "UsageError",
        prints=("be combined with --user",),
        is_bare=True,
    ),
    Scenario("list --volume /nowhere", 5, "NotFound", is_bare=True),
    Scenario("list --json --volume /nowhere", 5, "NotFound", is_bare=True),
    Scenario("restore --json /nowhere/at/all", 5, "NotFound", is_bare=True),
)
_IN_A_VOLUME = (
    Scenario("swap {volume}", 3, "IsMountPoint"),
    Scenario("swap victim/file", 3, "NotADirectory", prints=("trashd rm",)),
    Scenario("swap --json victim/file", 3, "NotADirectory", prints=("trashd rm",)),
    Scenario("swap --dry-run victim/file", 3, prints=("can NOT be swapped",)),
    Scenario("check victim/file", 3, prints=("can NOT be swapped",)),
    *(
        Scenario(f"{verb} missing{as_json}", 5, "NotFound")
        for verb in ("swap", "rm", "check", "restore")
        for as_json in ("", " --json")
    ),
    Scenario("rm -- --json", 5, "NotFound"),
    Scenario("restore --volume {volume} missing", 5, "NotFound"),
    Scenario("swap ''", 5, "NotFound"),
    Scenario("doctor /proc --json", 5, "NotFound"),
    *(
        Scenario(f"{words} --volume {{volume}}/mistyped", 5, "NotFound", prints=("{volume}/mistyped",))
        for words in ("list", "reap", "restore x", "keep x", "holders x")
    ),
    Scenario("swap victim missing", 13, prints=_NOT_FOUND),
    Scenario("swap --note é victim missing", 13, prints=_NOT_FOUND),
    Scenario("swap --json victim missing", 13),
    Scenario("swap --json --unlike --keep-for 3d '--note=a word' victim missing", 13),
    Scenario("swap --print-id victim"),
    Scenario("rm none", 5, "NotFound"),
    Scenario("rm none --json", 5, "NotFound"),
    Scenario("rm -f none", is_silent=True),
    Scenario("rm -f none --json", is_silent=True),
    Scenario("rm --now none other", 13),
    Scenario("rm --now none other --json", 13),
    Scenario("restore --volume {volume} {id}", 9, "Occupied", prepare=take_name, prints=("--to",)),
    Scenario("restore --volume {volume} {id} --to elsewhere", prepare=take_name),
    Scenario(
        "service install --prefix /usr --dry-run", 3, "Refused", prints=("--prefix /usr is only for building packages",)
    ),
    Scenario("sweep / --name '*'", 3, "Refused"),
    Scenario("sweep victim --from victim", 11, "KernelRefused", prints=("victim: Is a directory",)),
    *(
        Scenario(f"swap '--wait={goal}' victim", 2, "UsageError", prints=("write, for example, 4096, 64K",))
        for goal in ("", "50%", "fast", "inodes:1M", "-1G")
    ),
    Scenario("swap --wait missing", 5, "NotFound", around=own_places),
    Scenario("holders nothing", 5, "NotFound"),
    Scenario("holders no/such/thing", 5, "NotFound"),
    Scenario("restore {volume}/none", 5, "NotFound", prints=("{volume}/none",)),
    Scenario("restore --volume {volume}", 2, "UsageError", prepare=swap_victim, prints=("missing ID or PATH",)),
    Scenario("keep --release --for 1d --volume . {id}", 2, "UsageError", prepare=swap_victim),
    Scenario("reap --dry-run {id} --volume .", 13, prepare=swap_victim),
    Scenario("status", 5, "NotRunning", around=own_places, prints=("systemctl [--user] start trashd-reaper",)),
    Scenario("pause .", around=own_places, prints=("the reaper service is not running",)),
    Scenario("pause nothing", 5, "NotFound", around=own_places, prints=("name an existing directory",)),
    Scenario("pause --for soon .", 2, "UsageError", around=own_places),
    Scenario("resume .", 5, "NotFound", around=own_places, prints=("pause of {volume}",)),
    Scenario("doctor --json --ended x {volume}", 2, "UsageError"),
    Scenario("doctor --json --wait {volume}", 2, "UsageError"),
    Scenario("doctor {volume}", prepare=swap_victim, is_silent=True),
    Scenario("doctor .", 1, prepare=leave_stray, after=remove_stray, prints=(STRAY, "  hint: ")),
)
"""Their names are their words."""

_INSTALLED = Scenario("service install --user", variables=HOME)
_OF_JSON = {
    "init": Scenario("init --json .", golden="json-init.json"),
    "swap-json": Scenario("swap --json victim", golden="json-swap.json"),
    "swap-now": Scenario("swap --json --now victim", golden="json-swap-now.json"),
    "swap-dry": Scenario("swap --json --dry-run victim"),
    "swap-awaited-in-vain": Scenario("swap --json --wait victim", 13, prepare=write("victim/file", "x" * (1 << 20))),
    "swap-waited": Scenario("swap --json --wait victim", around=with_service),
    "rm": Scenario("rm --json victim", golden="json-rm.json"),
    "rm-now": Scenario("rm --json --now victim"),
    "rm-together": Scenario("rm --json victim other", prepare=lambda volume: (volume / "other").mkdir()),
    "list": Scenario("list --json --volume .", prepare=swap_victim, golden="json-list.json"),
    "list-dropped": Scenario("list --json --volume .", prepare=drop_victim),
    "list-unreadable": Scenario("list --json --volume .", prepare=break_record, after=mend_record),
    "list-sized": Scenario("list --json --volume .", prepare=then(swap_victim, typed("du --volume ."))),
    "list-quarantined": Scenario(
        "list --json --volume .", prepare=quarantine_victim, golden="json-list-quarantined.json"
    ),
    "restore": Scenario("restore --json --volume . {id}", prepare=swap_victim, golden="json-restore.json"),
    "restore-rescued": Scenario(
        "restore --json --volume . {id}", prepare=then(swap_victim, write("victim/meanwhile", ""))
    ),
    "restore-quarantined": Scenario(
        "restore --json --volume . {id}", prepare=quarantine_victim, golden="json-restore-quarantined.json"
    ),
    "undo": Scenario("undo --json", prepare=then(lead_session, typed("rm victim"))),
    "du": Scenario("du --json --volume .", prepare=swap_victim),
    "ls": Scenario(
        "ls --json --volume . {id}",
        prepare=then(lambda volume: (volume / "victim/link").symlink_to("file"), swap_victim),
    ),
    "diff": Scenario("diff --json --volume . {id}", prepare=then(swap_victim, write("victim/new", ""))),
    "keep": Scenario("keep --json --volume . {id}", prepare=swap_victim, golden="json-keep.json"),
    "reap": Scenario("reap --json --now --volume . {id}", prepare=swap_victim, golden="json-reap.json"),
    "reap-quarantined": Scenario(
        "reap --json --volume . {id}", 13, prepare=quarantine_victim, golden="json-reap-quarantined.json"
    ),
    "reap-force": Scenario(
        "reap --force --yes --json --volume . {id}", prepare=quarantine_victim, golden="json-reap-force.json"
    ),
    "reap-dry": Scenario("reap --json --dry-run --all --now --volume .", prepare=swap_victim),
    "reap-waited": Scenario("reap --json --all --now --wait --count --volume .", prepare=swap_victim),
    "reap-pinned": Scenario(
        "reap --json --all --now --volume .", prepare=then(swap_victim, typed("keep --volume . {id}"))
    ),
    "check": Scenario("check --json victim", golden="json-check.json"),
    "check-refused": Scenario("check --json victim/file", 3, golden="json-check-refused.json"),
    "holders": Scenario("holders --json victim", golden="json-holders.json"),
    "holders-of-some": Scenario("holders --json victim", around=file_is_open),
    "sweep": Scenario("sweep --json victim --name 'f*'"),
    "sweep-dry": Scenario("sweep --json victim --name 'f*' --dry-run"),
    "sweep-printed": Scenario("sweep --json victim --name 'f*' --print"),
    "plan-show": Scenario("plan show --json plan.toml", prepare=write("plan.toml", PLAN)),
    "plan": Scenario(
        "plan apply --json {volume}/plan.toml", prepare=write("plan.toml", PLAN + MORE_OF_PLAN), golden="json-plan.json"
    ),
    "plan-check": Scenario("plan check --json plan.toml", 2, prepare=write("plan.toml", '[[rule]]\ndirectory = "/"\n')),
    "status-served": Scenario("status --json", prepare=swap_victim, around=with_service),
    "status-of-mounts": Scenario("status --json", 5, around=with_mount, needs=("fuse",)),
    "mount": Scenario("mount --explain --json {volume}/mounted", around=with_mount, needs=("fuse",)),
    "doctor": Scenario("doctor --json .", 1, prepare=leave_stray, after=remove_stray, golden="json-doctor.json"),
    "pause": Scenario("pause --json --for 2h .", around=own_places),
    "pause-of-all": Scenario("pause --json", around=own_places),
    "resume": Scenario("resume --json", prepare=typed("pause ."), around=own_places),
    "service-install": Scenario("service install --json --dry-run --root {volume}/root"),
    "service-status": Scenario("service status --user --json", prepare=_INSTALLED.type, variables=HOME),
    "service-uninstall": Scenario("service uninstall --user --json", prepare=_INSTALLED.type, variables=HOME),
    "config-check": Scenario(
        "config check --json {volume}/c.toml",
        2,
        prepare=write("c.toml", '[defaults]\nretension = "1h"\n'),
        golden="json-config-check.json",
    ),
    "config-show": Scenario("config show --json"),
    "config-show-of-path": Scenario("config show --json ."),
    "error": Scenario("swap --json {volume}/missing", 5, error="NotFound", golden="json-error.json"),
}
SCENARIOS: Mapping[str, Scenario] = {
    **{one.words: one for one in (*_BARE, *_IN_A_VOLUME)},
    **_OF_JSON,
    "long name": Scenario(f"swap {'x' * 300}", 11, "KernelRefused", prints=("a name can have at most 255 bytes",)),
    "long path": Scenario(f"swap {'x/' * 3000}", 5, "NotFound"),
}
"""By name."""
assert len(SCENARIOS) == len(_BARE) + len(_IN_A_VOLUME) + len(_OF_JSON) + 2, "two have one name"
