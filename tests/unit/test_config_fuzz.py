"""Whatever is typed into a configuration: a message or a valid policy, never a traceback."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from fusefs.core.config import AUDIT_FILE, CONFIG, Config, HooksConfig, MetricsConfig, format_config
from fusefs.core.errors import BadConfig
from fusefs.core.human_units import DURATION_MAX_S
from fusefs.core.policy import DAY_MIN, DeleteAs, Quota, RetentionRules, TimeWindow, VolumePolicy, Watermark
from fusefs.core.toml_reader import Schema, Source, Tables, decode_source, quote_text
from tests.support.read_configs import read_config


def read(text: str) -> Config | None:
    """The configuration in a text; None if it has problems, which must then be ones that help."""
    try:
        config = read_config([Source("f", text)])
    except BadConfig as error:
        assert_helpful(error)
        return None
    assert_possible(config)
    return config


def assert_helpful(error: BadConfig) -> None:
    """It says something, fit for a terminal, about a key or the file."""
    assert error.problems
    for problem in error.problems:
        assert str(problem).isprintable()
        assert len(problem.what) < 300


def assert_possible(config: Config) -> None:
    """What was let through makes sense."""
    assert 0 < config.poll_s <= DURATION_MAX_S
    assert 0 < config.hooks.warn_before_s <= DURATION_MAX_S
    for volume in (config.defaults, *config.volumes):
        assert volume.path == b"" or (volume.path.startswith(b"/") and b"\0" not in volume.path)
        assert volume.max_entries_per_s is None or volume.max_entries_per_s > 0
        assert volume.max_bytes_per_s is None or volume.max_bytes_per_s > 0
        for mark in (volume.blocks, volume.inodes):
            assert mark is None or 0 < mark.low < mark.high <= 1
        for rules in (volume.rules, *(rules for _path, rules in volume.paths)):
            assert rules.delete_as is DeleteAs.OWNER or rules.users
            assert not rules.clears_flags or rules.delete_as is DeleteAs.ROOT
            assert rules.retention_s is None or rules.minimum_age_s <= rules.retention_s


def keys_of(schema: Schema) -> set[str]:
    """All keys, of tables within it too."""
    inner = [kind.schema if isinstance(kind, Tables) else kind for kind in schema.values()]
    return set(schema).union(*(keys_of(one) for one in inner if isinstance(one, dict)))


KEYS = sorted(keys_of(CONFIG) | {"path"})
WORDS = (
    '"24h"', '"0s"', '"never"', '"none"', '"500G"', '"5000/s"', '"10%"', '"5%"', '"100%"', '"0%"', '"22:00-06:00"',
    '"/scratch"', '"/scratch/ci"', '"/"', '"root"', '"owner"', '"asker"', '"ci"', '"127.0.0.1:9817"', '"/a.prom"',
    '"*"', '"\\u0000"', '""', '"\\u001b[2J"', "true", "false", "0", "1", "-1", "1e400", "nan", "1979-05-27T07:32:00Z",
    "07:32:00", "[]", "{}", '"""\n[x]\n"""', "'''\nretention = 1\n'''",
)  # fmt: skip
plain_values = (
    st.sampled_from(WORDS) | st.text(max_size=8).map(quote_text) | st.integers().map(str) | st.floats().map(repr)
)
values = st.recursive(
    plain_values,
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda items: f"[{', '.join(items)}]")
        | st.dictionaries(st.sampled_from(KEYS), inner, max_size=2).map(
            lambda table: "{ " + ", ".join(f"{key} = {value}" for key, value in table.items()) + " }"
        )
    ),
    max_leaves=5,
)
keys = st.lists(st.sampled_from(KEYS) | st.text(max_size=5).map(quote_text), min_size=1, max_size=3).map(".".join)
headers = st.sampled_from(
    ["[defaults]", "[[volume]]", "[[volume.rules]]", "[volume.quota]", "[hooks]", "[metrics]", "[defaults.free_space]"]
)
lines = (
    st.tuples(keys, values).map(" = ".join)
    | headers
    | keys.map("[{}]".format)
    | st.text(max_size=20).map("# {}".format)
)
likely = st.lists(lines, max_size=12).map("\n".join)


@given(st.binary(), st.binary())
def test_any_bytes_are_a_policy_or_a_message(head: bytes, tail: bytes) -> None:
    raw = head + b'[defaults]\nretention = "1h"\n' + tail
    try:
        source = decode_source("f", raw)
    except BadConfig as error:
        assert_helpful(error)
    else:
        read(source.text)


@given(likely, st.integers(0, 200), st.text(alphabet="[]{}\"'\\\n=.,#\0\ufeff", max_size=5))
def test_text_with_something_put_in_is_a_policy_or_a_message(text: str, at: int, put_in: str) -> None:
    read(text[:at] + put_in + text[at:])


texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=8)
paths = st.lists(
    texts.map(lambda text: text.replace("/", "_")).filter(lambda name: name not in (".", "..")), max_size=3
)
absolute = paths.map(lambda names: "/" + "/".join(names))
seconds = st.integers(0, DURATION_MAX_S)
rates = st.integers(1, 1 << 60)
shares = st.integers(1, 99_999).map(lambda n: float(f"{n / 1000:.3f}") / 100)
marks = st.tuples(shares, shares).filter(lambda pair: pair[0] < pair[1]).map(lambda pair: Watermark(*pair))
minutes = st.integers(0, DAY_MIN - 1)
windows = st.tuples(minutes, minutes).filter(lambda pair: pair[0] != pair[1]).map(lambda pair: TimeWindow(*pair))
users = st.lists(st.from_regex(r"[a-z0-9_][a-z0-9_.-]{0,10}", fullmatch=True), min_size=1, max_size=3).map(tuple)
patterns = st.lists(texts.map("*{}".format), max_size=2).map(tuple)
commands = st.lists(texts | st.just(""), max_size=2).map(lambda words: ("/bin/x", *words))


@st.composite
def all_rules(draw: Any) -> RetentionRules:
    """Rules that contradict nothing."""
    least, most = sorted([draw(seconds), draw(seconds)])
    is_root = draw(st.booleans())
    return RetentionRules(
        retention_s=draw(st.none() | st.just(most)),
        minimum_age_s=least,
        keep=draw(patterns),
        delete_as=DeleteAs.ROOT if is_root else DeleteAs.OWNER,
        users=draw(users) if is_root else (),
        clears_flags=is_root and draw(st.booleans()),
    )


def volume_at(path: str) -> st.SearchStrategy[VolumePolicy]:
    """All that can hold for the volume of that path."""
    below = absolute.map(lambda inner: (path.rstrip("/") + inner).rstrip("/").encode() or b"/")
    return st.builds(
        VolumePolicy,
        path=st.just(path.encode()),
        is_served=st.booleans(),
        rules=all_rules(),
        paths=st.lists(st.tuples(below, all_rules()), max_size=2, unique_by=lambda one: one[0]).map(tuple)
        if path
        else st.just(()),
        max_entries_per_s=st.none() | rates,
        max_bytes_per_s=st.none() | rates,
        windows=st.lists(windows, max_size=3).map(tuple),
        horizon_s=st.none() | st.integers(1, DURATION_MAX_S),
        quota=st.builds(
            Quota,
            st.none() | st.integers(0, (1 << 60) - 1),
            st.none() | st.integers(0, (1 << 60) - 1),
            st.none() | shares,
        ),
        blocks=st.none() | marks,
        inodes=st.none() | marks,
        paced=st.booleans(),
        n_nodes=st.integers(1, 1000),
        takeover_s=st.none() | st.integers(1, 1_000_000),
        id=st.text("0123456789abcdef", min_size=32, max_size=32) | st.just("") if path else st.just(""),
        mounted_at=st.just(b""),  # of a volume that is named by its id: where the service finds it
    )


configs = st.builds(
    Config,
    defaults=volume_at(""),
    volumes=st.lists(absolute.flatmap(volume_at), max_size=2, unique_by=lambda one: one.path).map(tuple),
    hooks=st.builds(
        HooksConfig,
        *(st.none() | commands for _ in range(5)),
        st.integers(1, DURATION_MAX_S),
        st.integers(1, DURATION_MAX_S),
        st.just("nobody"),
    ),
    metrics=st.builds(
        MetricsConfig,
        st.none() | absolute.map("{}.prom".format),
        st.none() | st.tuples(st.sampled_from(["127.0.0.1", "::1", "host.example", "10.0.0.1"]), st.integers(1, 65535)),
    ),
    audit=st.none() | st.just(AUDIT_FILE) | absolute.filter(lambda path: path != "/"),
    poll_s=st.integers(1, DURATION_MAX_S),
    grace_s=st.integers(0, DURATION_MAX_S),
)


@given(configs)
def test_what_is_in_force_is_told_so_that_it_reads_back(config: Config) -> None:
    assert read(format_config(config, {})) == config
