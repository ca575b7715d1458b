"""The configuration: what is typed is what is meant; what is not understood is told with its key and a way out."""

import re
from pathlib import Path

import pytest

from fusefs.core.config import Config, HooksConfig, MetricsConfig, read_config_with_places
from fusefs.core.errors import BadConfig, ConfigProblem
from fusefs.core.policy import DeleteAs, Quota, RetentionRules, TimeWindow, VolumePolicy, Watermark
from fusefs.core.toml_reader import LINE_MAX_CHARS, TEXT_MAX_BYTES, Source, decode_source
from tests.support.read_configs import read_config

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLE = (DOCS / "config.example.toml").read_text(encoding="utf-8")
GIB = 1 << 30


def read(*texts: str) -> Config:
    """The configuration of files f1, f2…"""
    return read_config([Source(f"f{number}", text) for number, text in enumerate(texts, 1)])


def problems(*texts: str) -> list[ConfigProblem]:
    """What is wrong with them."""
    with pytest.raises(BadConfig) as caught:
        read(*texts)
    return list(caught.value.problems)


def only_problem(*texts: str) -> ConfigProblem:
    """The one thing that is wrong with them."""
    (problem,) = problems(*texts)
    return problem


def test_nothing_typed_is_the_defaults() -> None:
    assert read() == read("") == read("# a comment\n") == Config()


def test_every_key_is_understood() -> None:
    config = read("""
        poll = "5m"
        audit = "none"
        [defaults]
        retention = "2d"
        [[volume]]
        path = "/scratch/"
        serve = false
        retention = "never"
        minimum_age = "1h"
        keep = ["*/keep/*"]
        paced = false
        max_rate = "5000/s"
        max_bytes = "200M/s"
        windows = ["22:00-06:00", "12:00-13:00"]
        horizon = "8h"
        quota = { bytes = "500G", inodes = 1000000, share = "12.5%" }
        [volume.free_space]
        low = "3%"
        high = "6%"
        [volume.free_inodes]
        low = "0%"
        [[volume.rules]]
        path = "/scratch/ci"
        delete_as = "root"
        users = ["ci", "12001"]
        clears_flags = true
        [hooks]
        on_reaped = ["/usr/bin/logger", "gone", ""]
        on_quarantine = ["/q"]
        on_low_space = []
        on_swap = ["/s"]
        on_expires_soon = ["/e"]
        warn_before = "2d"
        timeout = "1m"
        user = "trash"
        [metrics]
        textfile = "/var/lib/node_exporter/trashd.prom"
        http = "[::1]:9817"
    """)
    scratch = RetentionRules(retention_s=None, minimum_age_s=3600, keep=("*/keep/*",))
    volume = VolumePolicy(
        path=b"/scratch",
        is_served=False,
        rules=scratch,
        paths=((b"/scratch/ci", scratch._replace(delete_as=DeleteAs.ROOT, users=("ci", "12001"), clears_flags=True)),),
        max_entries_per_s=5000,
        max_bytes_per_s=200 << 20,
        windows=(TimeWindow(1320, 360), TimeWindow(720, 780)),
        horizon_s=8 * 3600,
        quota=Quota(500 * GIB, 1_000_000, 0.125),
        blocks=Watermark(0.03, 0.06),
        inodes=None,
        paced=False,
    )
    assert config == Config(
        defaults=VolumePolicy(b"", rules=RetentionRules(retention_s=2 * 86_400)),
        volumes=(volume,),
        hooks=HooksConfig(("/usr/bin/logger", "gone", ""), ("/q",), None, ("/s",), ("/e",), 172_800, 60, "trash"),
        metrics=MetricsConfig("/var/lib/node_exporter/trashd.prom", ("::1", 9817)),
        audit=None,
        poll_s=300,
    )


# Which volume, which file.


def test_volume_that_is_not_named_has_the_defaults() -> None:
    config = read('[defaults]\nretention = "2d"\n[[volume]]\npath = "/a"\n')
    assert config.policy_of(b"/b") == VolumePolicy(b"/b", rules=RetentionRules(retention_s=2 * 86_400))
    assert config.policy_of(b"/a/").path == b"/a"


def test_a_store_in_a_volume_has_the_rules_of_the_part_that_it_is_in() -> None:
    config = read('[[volume]]\npath = "/home"\nretention = "1d"\n[[volume]]\npath = "/home/a/b"\nretention = "2d"\n')
    day = 86_400
    inside = {
        path: config.policy_inside(path, b"/").rules.retention_s for path in (b"/home/a", b"/home/a/b/c", b"/homes/a")
    }
    assert inside == {b"/home/a": day, b"/home/a/b/c": 2 * day, b"/homes/a": config.defaults.rules.retention_s}
    assert config.policy_inside(b"/home/a", b"/home/a") == config.policy_of(b"/home/a"), (
        "another filesystem is another volume"
    )
    assert config.policy_inside(b"/home/a", b"/home").path == b"/home/a"


def test_volume_takes_from_the_defaults_what_it_does_not_say_wherever_they_stand() -> None:
    config = read(
        '[[volume]]\npath = "/a"\nminimum_age = "1m"\n', '[defaults]\nretention = "2d"\nfree_space.low = "1%"'
    )
    assert config.policy_of(b"/a").rules == RetentionRules(retention_s=2 * 86_400, minimum_age_s=60)
    assert config.policy_of(b"/a").blocks == Watermark(0.01, 0.10)


def test_later_file_wins_key_by_key() -> None:
    first = '[[volume]]\npath = "/a"\nretention = "2d"\nquota = { bytes = "1G", share = "5%" }\nkeep = ["/a/x"]\n'
    second = '[[volume]]\npath = "/a/"\nquota.bytes = "2G"\nkeep = ["/a/y"]\n[[volume.rules]]\npath = "/a/b"\n'
    (volume,) = read(first, second).volumes
    assert volume.quota == Quota(2 * GIB, None, 0.05)
    assert volume.rules.retention_s == 2 * 86_400
    assert volume.rules_for(b"/a/b/c").keep == ("/a/y",)


def test_what_contradicts_itself_across_files_is_told_where_it_stands() -> None:
    first = '[[volume]]\npath = "/a"\nfree_space.high = "4%"\n'
    assert only_problem(first).file == "f1"
    assert read(first, '[[volume]]\npath = "/a"\nfree_space.low = "1%"').volumes[0].blocks == Watermark(0.01, 0.04)


def test_caller_says_what_holds_without_files() -> None:
    assert read_config([], Config(audit=None)).audit is None
    assert read_config([Source("f", 'audit = "/a"')], Config(audit=None)).audit == "/a"


def test_a_key_of_an_earlier_release_is_a_warning_and_ignored() -> None:
    config, settings, (warning,) = read_config_with_places([Source("f", 'notices = false\npoll = "1m"\n')], Config())
    assert config == Config(poll_s=60)
    assert ("notices",) not in settings
    assert (warning.file, warning.key, warning.is_warning) == ("f", "notices", True)
    assert "trashd list --within 1d" in warning.fix


@pytest.mark.parametrize(("value", "now"), [("asker", "owner"), ("root", "root")])
def test_the_old_name_of_delete_as_is_read_with_a_warning(value: str, now: str) -> None:
    text = f'[[volume]]\npath = "/a"\n[[volume.rules]]\npath = "/a/b"\nauthority = "{value}"\n'
    text += 'users = ["ci"]\n' if value == "root" else ""
    config, settings, (warning,) = read_config_with_places([Source("f", text)], Config())
    assert config.volumes[0].rules_for(b"/a/b/c").delete_as is DeleteAs(now)
    assert settings["volume", b"/a", "rules", b"/a/b", "delete_as"].place.file == "f"
    assert (warning.key, warning.is_warning) == ("volume[1].rules[1].authority", True)
    assert (warning.what, warning.fix) == ("this key is now called delete_as", f'write delete_as = "{now}"')


def test_the_new_name_wins_over_the_old_one() -> None:
    text = '[defaults]\nusers = ["ci"]\ndelete_as = "root"\nauthority = "asker"\n'
    config, _settings, (warning,) = read_config_with_places([Source("f", text)], Config())
    assert config.defaults.rules.delete_as is DeleteAs.ROOT
    assert "no effect, because delete_as" in warning.what


def test_the_later_file_wins_whichever_name_it_uses() -> None:
    sources = [Source("f", '[defaults]\ndelete_as = "root"\nusers = ["ci"]\n'), Source("g", "[defaults]\nusers = []\n")]
    old = Source("h", '[defaults]\nauthority = "asker"\n')
    assert read_config_with_places([*sources, old], Config())[0].defaults.rules.delete_as is DeleteAs.OWNER


# What is wrong.

WRONG = {
    "retention": ("90", "1.5", "true", "1979-05-27", "[]", "{}", '"1q"', '""', '"-1h"', '"24h\\u0000"'),
    "minimum_age": ('"never"', "inf"),
    "keep": ('"/a"', "[1]", '[""]', '["keep/*"]', '[["/a"]]', '["/a\\u0000"]'),
    "delete_as": ('"nobody"', '"asker"', "true", '["root"]'),
    "users": ('"ci"', '["*"]', '["@ci"]', '["a b"]', '["a\\u001b[2J"]'),
    "clears_flags": ('"yes"', "1", "0"),
    "serve": ('"true"',),
    "paced": ("nan",),
    "max_rate": ("0", "true", "-5", '"0"', '"fast"', str(1 << 70)),
    "max_bytes": ("1.5", '"-1M"'),
    "windows": ('"22:00-06:00"', '["22-06"]', "[22]"),
    "horizon": ('"0s"', "0"),
    "quota.bytes": ("500", '"500 500"', '"-1"'),
    "quota.inodes": ("-1", "1.0", "true", str(1 << 70)),
    "quota.share": ("10", "0.1", '"101%"', '"10"', '"nan%"'),
    "free_space.low": ("5", '"5"'),
    "free_space": ('"5%"', "5"),
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in WRONG.items() for value in values])
def test_wrong_value_is_told_with_its_key_and_what_to_write(key: str, value: str) -> None:
    problem = only_problem(f"[defaults]\n\n{key} = {value}\n")
    assert problem.file == "f1"
    assert problem.key == f"defaults.{key}"
    assert problem.what.startswith("expected ")
    assert problem.fix
    assert str(problem).isprintable()


@pytest.mark.parametrize(
    ("text", "key", "what", "fix"),
    [
        ('poll = "0"', "poll", "a duration above 0", "90s"),
        ('audit = "audit.log"', "audit", "absolute path", "/scratch"),
        ('retention = "1h"', "retention", "unknown key", "[defaults]"),
        ('[defaults]\nretension = "1h"', "defaults.retension", "unknown key", "did you mean retention?"),
        ('[hooks]\npoll = "1m"', "hooks.poll", "unknown key", "above all tables"),
        ("[defalts]", "defalts", "unknown key", "did you mean defaults?"),
        ("[defaults]\nx = 1", "defaults.x", "unknown key", "known keys: serve"),
        ('[defaults.quota]\nbyte = "1G"', "defaults.quota.byte", "unknown key", "did you mean bytes?"),
        ('["\\u001b[2J"]', '"\\u001b[2J"', "unknown key", "known keys"),
        ('\n[[volume]]\nretention = "1h"', "volume[1]", "no path", "path ="),
        ('[[volume]]\npath = "scratch"', "volume[1].path", '"scratch"', "/scratch"),
        ('[[volume]]\npath = "/a/../b"', "volume[1].path", '"/a/../b"', "`..`"),
        ('[volume]\npath = "/a"', "volume", "expected a list of tables", "[[volume]]"),
        ("volume = [1]", "volume", "expected a list of tables", "[[volume]]"),
        ('[[volume]]\npath = "/a"\n[[volume]]\npath = "/a/"', "volume[2].path", "given twice", "into volume[1]"),
        ('[[volume]]\npath = "/a"\n[[volume.rules]]\npath = "/ab"', "volume[1].rules[1].path", "/ab is not inside /a",
         "below"),
        ('[[volume]]\npath = "/a"\n[volume.rules]\npath = "/a/b"', "volume[1].rules", "expected a list of tables",
         "[[volume.rules]]"),
        ('[defaults]\nfree_space = { low = "20%" }', "defaults.free_space.low", 'low = "20%" is not below', '"0%"'),
        ('[defaults]\nfree_inodes.high = "5%"', "defaults.free_inodes.high", 'low = "5%" is not below', '"0%"'),
        ('[defaults]\nretention = "5m"', "defaults.retention", "shorter than minimum_age", "raise"),
        ('[defaults]\nminimum_age = "2d"', "defaults.minimum_age", "shorter than minimum_age", "raise"),
        ('[defaults]\ndelete_as = "root"', "defaults.delete_as", "needs users", "users ="),
        ('[defaults]\ndelete_as = "root"\nusers = []', "defaults.delete_as", "needs users", "users ="),
        ('[defaults]\nusers = ["ci"]', "defaults.users", "users needs", "delete_as"),
        ("[defaults]\nclears_flags = true", "defaults.clears_flags", "clears_flags needs", "root"),
        ('[hooks]\non_swap = "/bin/x"', "hooks.on_swap", "expected a command", "absolute"),
        ('[hooks]\non_swap = ["logger"]', "hooks.on_swap", "expected a command", "absolute"),
        ('[hooks]\non_swap = ["/bin/x", 1]', "hooks.on_swap", "expected a command", "absolute"),
        ('[hooks]\non_swaps = ["/bin/x"]', "hooks.on_swaps", "unknown key", "did you mean on_swap?"),
        ('[metrics]\nhttp = "0.0.0.0:9817"', "metrics.http", "open to other machines", "allow_remote"),
        ('[metrics]\nhttp = "127.0.0.1"', "metrics.http", "expected an address", "9817"),
        ('[metrics]\nhttp = "127.0.0.1:99999"', "metrics.http", "expected an address", "9817"),
        ('[metrics]\ntextfile = "/x/trashd.txt"', "metrics.textfile", "node exporter", ".prom"),
    ],
)  # fmt: skip
def test_problem_names_key_reason_and_fix(text: str, key: str, what: str, fix: str) -> None:
    problem = only_problem(text)
    assert problem.key == key
    assert what in problem.what
    assert fix in problem.fix


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("a = 24h", 1, "not TOML"),
        ("\n\na = ", 3, "not TOML"),
        ('a = "x', 1, "not TOML"),
        ('a = """\n\n', 3, "not TOML"),
        ("[a\n", 1, "not TOML"),
        ("a = 1\na = 2", 2, "not TOML"),
        ("[a]\n[a]", 2, "not TOML"),
        ("a: 1", 1, "not TOML"),
        ("a = 2026-13-45", 1, "not TOML"),
        ('a = "\0"', 1, "not TOML"),
        ("\ufeffa = 1", None, "byte order mark"),
        ("a = " + "[" * 3000, 1, "not TOML|too deep"),
        ("a = " + "[\n" * 100_000, None, "too deep"),
        ("a." * 2000 + "a = 1", None, "unknown key|too deep"),  # Python 3.14 refuses more than 1000 parts
        ("a = " + "9" * 4090, None, "unknown key|not TOML"),
        ("\n" + "a." * 5000 + "a = 1", 2, f"more than {LINE_MAX_CHARS}"),
        ("# x\n" * (TEXT_MAX_BYTES // 4 + 1), None, "larger than 1 MiB"),
    ],
    ids=lambda value: str(value)[:12],
)
def test_text_that_is_no_toml_is_told_with_its_line(text: str, line: int | None, what: str) -> None:
    problem = problems(text)[0]
    assert line is None or f"line {line}" in problem.what or re.search("deep|end of document", problem.what)
    assert re.search(what, problem.what)
    assert str(problem).isprintable()


def test_unknown_keys_of_any_depth_are_named_by_their_first_word() -> None:
    text = "".join(f"a{number}.{'a.' * 900}b = 1\n" for number in range(3))
    found = problems(text)
    assert [problem.key for problem in found] == [f"a{number}" for number in range(3)]


def test_value_without_quotes_is_told_to_have_them() -> None:
    assert '"24h"' in only_problem("[defaults]\nretention = 24h").fix


def test_file_that_has_nothing_to_do_with_us_is_told_about_briefly() -> None:
    text = "".join(f"some_key_{number} = 1\n" for number in range(50_000))
    assert len(problems(text)) == 100


def test_all_problems_of_all_files_come_at_once() -> None:
    found = problems('[defaults]\nretention = 1\nkeep = ""\n', "a = 24h", 'poll = "0s"')
    assert [(problem.file, problem.key) for problem in found] == [
        ("f1", "defaults.retention"), ("f1", "defaults.keep"), ("f2", ""), ("f3", "poll"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('[ "defaults" ]\n"retension" = 1', "defaults.retension"),
        ("defaults.retension = 1", "defaults.retension"),
        ("defaults = { retension = 1 }", "defaults.retension"),
        ("[defaults]\n'a b'.c = 1", 'defaults."a b"'),
        ("[defaults]\nquota.'a.b' = 1", "defaults.quota.a.b"),
    ],
)
def test_key_is_that_of_the_table_however_it_is_written(text: str, key: str) -> None:
    assert only_problem(text).key == key


def test_tables_of_an_array_are_counted_from_one() -> None:
    first = '[[volume]]\npath = "/a"\n[[volume.rules]]\npath = "/a/b"\n'
    text = first + '[[volume]]\npath = "/c"\n[[volume.rules]]\npath = "/d"\n'
    assert only_problem(text).key == "volume[2].rules[1].path"


@pytest.mark.parametrize("raw", [b"\xff", b"a = 1\n\xc3\x28"])
def test_bytes_that_are_no_text_are_told_with_their_line(raw: bytes) -> None:
    with pytest.raises(BadConfig) as caught:
        decode_source("f", raw)
    line = raw.count(b"\n") + 1
    assert f"line {line} is not UTF-8" in caught.value.problems[0].what


def test_file_of_more_than_a_mebibyte_is_refused_unread() -> None:
    with pytest.raises(BadConfig, match="1 MiB"):
        decode_source("f", bytes(TEXT_MAX_BYTES + 1))


# What documents say.


def test_example_states_the_defaults() -> None:
    assert read(EXAMPLE) == Config()


def test_example_says_nothing_but_with_its_reason() -> None:
    paragraphs = [part for part in EXAMPLE.split("\n\n") if re.search(r"(?m)^\w", part)]
    assert paragraphs
    assert [part for part in paragraphs if "# " not in part] == []


def test_what_the_example_leaves_out_works_once_it_is_put_in() -> None:
    put_in = "\n".join(line.removeprefix("#") if re.match(r"#[\w\[]", line) else line for line in EXAMPLE.split("\n"))
    config = read(put_in)
    assert [volume.path for volume in config.volumes] == [b"/scratch"]
    assert config.volumes[0].paths
