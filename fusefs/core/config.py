"""The configuration: reads TOML into a Config, or reports every problem with its file, key and fix; writes TOML."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from fusefs.core import toml_reader
from fusefs.core.errors import BadConfig, ConfigProblem
from fusefs.core.policy import DeleteAs, Quota, RetentionRules, VolumePolicy, Watermark, is_at_or_below
from fusefs.core.toml_reader import (
    Key,
    RemovedKey,
    RenamedKey,
    Schema,
    Settings,
    SettingsBuilder,
    SettingsReader,
    Source,
    Tables,
    read_document,
)

POLL_S = 600
"""On network filesystems, where inotify misses changes, polling finds them within ten minutes; a check is cheap."""
HOOK_TIMEOUT_S = 30
"""Most hooks take about a second. One that takes this long has probably hung, and it delays the others."""
GRACE_S = 3600
"""One hour: enough time to notice that a mounted volume is a copy, or that a service is back after a long absence."""
WARN_BEFORE_S = 21_600
"""Six hours: with the default retention of 24 h, this leaves an evening to inspect the orphans."""
AUDIT_FILE = "/var/log/trashd/audit.log"
_LOCAL_HOSTS = frozenset({"127.0.0.1", "::1", "localhost"})
_OFF = Watermark(0.0, 0.0)


class HooksConfig(NamedTuple):
    """Commands to run after events; on_expires_soon runs warn_before_s before an orphan expires. None: no command."""

    on_reaped: tuple[str, ...] | None = None
    on_quarantine: tuple[str, ...] | None = None
    on_low_space: tuple[str, ...] | None = None
    on_swap: tuple[str, ...] | None = None
    on_expires_soon: tuple[str, ...] | None = None
    warn_before_s: int = WARN_BEFORE_S
    timeout_s: int = HOOK_TIMEOUT_S
    user: str = "nobody"


class MetricsConfig(NamedTuple):
    """Where metrics for Prometheus are published: in a file for the node exporter, or at a host and port."""

    textfile: str | None = None
    http: tuple[str, int] | None = None


class Config(NamedTuple):
    """The configuration in force.

    defaults  the policy for every volume that is not in `volumes`; its path is empty
    volumes   the policies for the volumes that the configuration names
    audit     the audit log's path; None: events are only in the journal
    poll_s    interval between checks of a volume for which the kernel does not report all changes
    grace_s   how long orphans that expired while their volume was not served are kept once it is served again
    """

    defaults: VolumePolicy = VolumePolicy(b"")
    volumes: tuple[VolumePolicy, ...] = ()
    hooks: HooksConfig = HooksConfig()
    metrics: MetricsConfig = MetricsConfig()
    audit: str | None = AUDIT_FILE
    poll_s: int = POLL_S
    grace_s: int = GRACE_S

    def find_section(self, path: bytes, identifier: str = "") -> VolumePolicy | None:
        """Return the section for the volume that is mounted at a path, or None if there is none.

        identifier  the volume's ID; empty if not known yet. A section that has an ID applies only to the volume with
                    that ID, wherever it is mounted
        """
        by_id = (volume for volume in self.volumes if identifier and volume.id == identifier)
        by_path = (volume for volume in self.volumes if volume.path == path and not (volume.id and identifier))
        return next(by_id, None) or next(by_path, None)

    def rules_path(self, path: bytes, identifier: str) -> bytes:
        """Return the path for which a mounted volume has rules of its own, or b"" if only the defaults apply to it.

        This is the path of the volume's section. If it has no section, but a pattern in the defaults' `keep` begins
        with a path inside the volume, this is the path where it is mounted.
        """
        named = self.find_section(path, identifier)
        kept = (re.split(r"[*?[]", pattern)[0].encode() for pattern in self.defaults.rules.keep)
        return named.path if named is not None else path if any(is_at_or_below(one, path) for one in kept) else b""

    def policy_of(self, path: bytes, identifier: str = "") -> VolumePolicy:
        """Return the policy of the volume that is mounted at a path; see `find_section`."""
        path = path.rstrip(b"/") or b"/"
        named = self.find_section(path, identifier)
        return self.defaults._replace(path=path) if named is None else named._replace(mounted_at=path)

    def may_serve(self, path: bytes) -> bool:
        """Whether the volume that is mounted at a path might be one to serve; its ID is not known yet."""
        return self.policy_of(path).is_served or any(volume.id and volume.is_served for volume in self.volumes)

    def policy_inside(self, path: bytes, point: bytes) -> VolumePolicy:
        """Return the policy for a store at a path inside a volume: that of the nearest configured path at or above it.

        point  where the store's filesystem is mounted; paths above this one are not considered
        """
        named = {volume.path: volume for volume in self.volumes}
        above = path.rstrip(b"/") or b"/"
        while above not in named and above not in (point, b"/"):
            above = above[: above.rfind(b"/")] or b"/"
        return named.get(above, self.defaults)._replace(path=path)


# Keys in the order of the fields of RetentionRules and HooksConfig.
RULES: Schema = {
    "retention": toml_reader.or_none(toml_reader.DURATION, "never"),
    "minimum_age": toml_reader.DURATION,
    "keep": toml_reader.PATTERNS,
    "delete_as": toml_reader.DELETE_AS,
    "users": toml_reader.USERS,
    "clears_flags": toml_reader.FLAG,
}
_FREE: Schema = {"low": toml_reader.SHARE, "high": toml_reader.SHARE}
VOLUME: Schema = {
    "serve": toml_reader.FLAG,
    **RULES,
    "paced": toml_reader.FLAG,
    "max_rate": toml_reader.or_none(toml_reader.RATE),
    "max_bytes": toml_reader.or_none(toml_reader.RATE),
    "nodes": toml_reader.POSITIVE._replace(
        fix="write the number of nodes that serve the volume, such as 4, without quotes"
    ),
    "takeover_s": toml_reader.or_none(
        toml_reader.POSITIVE._replace(
            name="a number of seconds above 0", fix="write a number such as 300, without quotes"
        ),
        "auto",
    ),
    "windows": toml_reader.WINDOWS,
    "horizon": toml_reader.or_none(toml_reader.TIME_LIMIT),
    "quota": {
        "bytes": toml_reader.or_none(toml_reader.SIZE),
        "inodes": toml_reader.or_none(toml_reader.COUNT),
        "share": toml_reader.or_none(toml_reader.SHARE),
    },
    "free_space": _FREE,
    "free_inodes": _FREE,
}
_FIELDS = {
    "serve": "is_served", "paced": "paced", "max_rate": "max_entries_per_s", "max_bytes": "max_bytes_per_s",
    "nodes": "n_nodes", "takeover_s": "takeover_s", "windows": "windows", "horizon": "horizon_s",
}  # fmt: skip
"""The field of VolumePolicy for each key whose value is used unchanged."""
HOOKS: Schema = {
    "on_reaped": toml_reader.COMMAND,
    "on_quarantine": toml_reader.COMMAND,
    "on_low_space": toml_reader.COMMAND,
    "on_swap": toml_reader.COMMAND,
    "on_expires_soon": toml_reader.COMMAND,
    "warn_before": toml_reader.TIME_LIMIT,
    "timeout": toml_reader.TIME_LIMIT,
    "user": toml_reader.USER,
}
METRICS: Schema = {
    "textfile": toml_reader.or_none(toml_reader.FILE),
    "http": toml_reader.or_none(toml_reader.ADDRESS),
    "allow_remote": toml_reader.FLAG,
}
_TOP: Schema = {
    "poll": toml_reader.TIME_LIMIT,
    "grace": toml_reader.DURATION,
    "audit": toml_reader.or_none(toml_reader.FILE),
    "notices": RemovedKey("remove the key; trashd list --within 1d shows the orphans that expire soon"),
}
_RENAMED: Schema = {"authority": RenamedKey("delete_as", toml_reader.DELETE_AS, {"asker": DeleteAs.OWNER.value})}
CONFIG: Schema = {
    **_TOP,
    "defaults": {**VOLUME, **_RENAMED},
    "volume": Tables({"id": toml_reader.VOLUME_ID, **VOLUME, **_RENAMED, "rules": Tables({**RULES, **_RENAMED})}),
    "hooks": HOOKS,
    "metrics": METRICS,
}


def read_config_with_places(
    sources: Sequence[Source], defaults: Config
) -> tuple[Config, Settings, tuple[ConfigProblem, ...]]:
    """Read all sources. Return one configuration, the place of each setting in force, and warnings.

    If two sources set the same key, the later one wins.
    defaults  the values of keys that no source sets
    Raises    BadConfig with all problems that were found
    """
    problems: list[ConfigProblem] = []
    settings: Settings = {}
    for source in sources:
        settings |= SettingsReader(read_document(source, problems), CONFIG, problems).settings
    config = _ConfigBuilder(settings, problems).build(defaults)
    if not all(problem.is_warning for problem in problems):
        raise BadConfig(problems=tuple(problems))
    return config, settings, tuple(problems)


class _ConfigBuilder(SettingsBuilder):
    def build(self, base: Config) -> Config:
        defaults = self._build_volume(("defaults",), base.defaults)
        volumes = tuple(
            self._build_volume(("volume", path), defaults._replace(path=path)) for path in self._paths("volume")
        )
        return Config(
            defaults=defaults,
            volumes=volumes,
            hooks=HooksConfig(*self._values(("hooks",), HOOKS, base.hooks)),
            metrics=self._build_metrics(base.metrics),
            audit=self.get("audit", otherwise=base.audit),
            poll_s=self.get("poll", otherwise=base.poll_s),
            grace_s=self.get("grace", otherwise=base.grace_s),
        )

    def _values(self, at: Key, keys: Iterable[str], base: Iterable[Any]) -> Iterator[Any]:
        """Return the values of some keys of a table, in order; if a key is not set, take its value from `base`."""
        return (self.get(*at, key, otherwise=value) for key, value in zip(keys, base, strict=True))

    def _paths(self, *above: str | bytes) -> list[bytes]:
        """Return the `path` of each table in an array, in the order of their first occurrence."""
        return [path for key in self.settings if key[:-1] == above and isinstance(path := key[-1], bytes)]

    def _build_volume(self, at: Key, base: VolumePolicy) -> VolumePolicy:
        rules = self._build_rules(at, base.rules)
        paths = tuple((path, self._build_rules((*at, "rules", path), rules)) for path in self._paths(*at, "rules"))
        for path, _rules in paths:
            if not is_at_or_below(path, base.path):
                inside, above = (toml_reader.format_key(one.decode()) for one in (path, base.path))
                what = f"{inside} is not inside {above}"
                self.add_problem(what, "write rules below the [[volume]] to which they apply", (*at, "rules", path))
        values = {field: self.get(*at, key, otherwise=getattr(base, field)) for key, field in _FIELDS.items()}
        return VolumePolicy(
            path=base.path,
            id=self.get(*at, "id", otherwise=""),
            rules=rules,
            paths=paths,
            quota=Quota(*self._values((*at, "quota"), Quota._fields, base.quota)),
            blocks=self._build_watermark((*at, "free_space"), base.blocks),
            inodes=self._build_watermark((*at, "free_inodes"), base.inodes),
            **values,
        )

    def _build_rules(self, at: Key, base: RetentionRules) -> RetentionRules:
        rules = RetentionRules(*self._values(at, RULES, base))
        if rules.retention_s is not None and rules.retention_s < rules.minimum_age_s:
            fix = "lower minimum_age or raise retention: orphans younger than minimum_age are never reaped"
            self.add_problem("retention is shorter than minimum_age", fix, (*at, "retention"), (*at, "minimum_age"))
        is_root = rules.delete_as is DeleteAs.ROOT
        if is_root and not rules.users:
            fix = (
                'add users, such as users = ["ci"]: the path in a record proves nothing, since users write the records'
            )
            self.add_problem('delete_as = "root" needs users', fix, (*at, "delete_as"), (*at, "users"))
        if not is_root and (*at, "users") in self.settings and rules.users:
            self.add_problem(
                'users needs delete_as = "root"', 'add delete_as = "root", or remove users', (*at, "users")
            )
        if rules.clears_flags and not is_root:
            fix = 'add delete_as = "root", or remove clears_flags: only root can clear these flags'
            self.add_problem('clears_flags needs delete_as = "root"', fix, (*at, "clears_flags"), (*at, "delete_as"))
        return rules

    def _build_watermark(self, at: Key, base: Watermark | None) -> Watermark | None:
        low, high = self._values(at, _FREE, base or _OFF)
        if low == 0:
            return None
        if low >= high:
            what = f"low = {toml_reader.SHARE.write(low)} is not below high = {toml_reader.SHARE.write(high)}"
            fix = f"hurrying begins below low and ends at high; low = {toml_reader.quote_text('0%')} turns it off"
            self.add_problem(what, fix, (*at, "low"), (*at, "high"))
        return Watermark(low, high)

    def _build_metrics(self, base: MetricsConfig) -> MetricsConfig:
        metrics = MetricsConfig(*self._values(("metrics",), MetricsConfig._fields, base))
        allowed = self.get("metrics", "allow_remote", otherwise=False)
        if metrics.http is not None and metrics.http[0] not in _LOCAL_HOSTS and not allowed:
            what = f"http = {toml_reader.ADDRESS.write(metrics.http)} is open to other machines"
            self.add_problem(
                what, 'write a local address such as "127.0.0.1:9817", or add allow_remote = true', ("metrics", "http")
            )
        if metrics.textfile is not None and not metrics.textfile.endswith(".prom"):
            what = f"textfile = {toml_reader.format_value(metrics.textfile)} is not read by the node exporter"
            self.add_problem(what, "write a name that ends in .prom", ("metrics", "textfile"))
        return metrics


def format_config(config: Config, settings: Settings) -> str:
    """Format the whole configuration as TOML, from which the same configuration can be read."""
    hooks = {**config.hooks._asdict(), "warn_before": config.hooks.warn_before_s, "timeout": config.hooks.timeout_s}
    lines = [
        *_format_table({**config._asdict(), "poll": config.poll_s, "grace": config.grace_s}, _TOP, [()], settings),
        "\n[defaults]",
        *_format_table(_volume_values(config.defaults), VOLUME, [("defaults",)], settings),
    ]
    for volume in config.volumes:
        lines += ["", format_volume(volume, settings).rstrip("\n")]
    host = config.metrics.http[0] if config.metrics.http else "localhost"
    metrics = {**config.metrics._asdict(), "allow_remote": host not in _LOCAL_HOSTS}
    lines += [
        "\n[hooks]",
        *_format_table(hooks, HOOKS, [("hooks",)], settings),
        "\n[metrics]",
        *_format_table(metrics, METRICS, [("metrics",)], settings),
    ]
    return "\n".join(lines) + "\n"


def format_volume(volume: VolumePolicy, settings: Settings, origin: bytes | None = None) -> str:
    """Format the policy of one volume as a [[volume]] table.

    origin  include only the rules that apply to orphans from this path; None: all rules
    """
    at: Key = ("volume", volume.path)
    above: Key = ("defaults",)
    deepest = volume.deepest_rules_path(origin)
    places = [at, above] if deepest is None else [(*at, "rules", deepest), at, above]
    lines = ["[[volume]]", f"path = {toml_reader.PATH.write(volume.path)}{_format_place(at, settings)}"]
    lines += (
        [f"id = {toml_reader.VOLUME_ID.write(volume.id)}{_format_place((*at, 'id'), settings)}"] if volume.id else []
    )
    lines += _format_table(_volume_values(volume._replace(rules=volume.rules_for(origin))), VOLUME, places, settings)
    for path, rules in volume.paths if origin is None else ():
        here: Key = (*at, "rules", path)
        lines += ["\n[[volume.rules]]", f"path = {toml_reader.PATH.write(path)}{_format_place(here, settings)}"]
        lines += _format_table(_rules_values(rules), RULES, [here, at, above], settings)
    return "\n".join(lines) + "\n"


def _rules_values(rules: RetentionRules) -> dict[str, Any]:
    return {**rules._asdict(), "retention": rules.retention_s, "minimum_age": rules.minimum_age_s}


def _volume_values(volume: VolumePolicy) -> dict[str, Any]:
    return {
        **_rules_values(volume.rules),
        **{key: getattr(volume, field) for key, field in _FIELDS.items()},
        "quota": volume.quota._asdict(),
        "free_space": (volume.blocks or _OFF)._asdict(),
        "free_inodes": (volume.inodes or _OFF)._asdict(),
    }


def _format_table(values: Mapping[str, Any], schema: Schema, origins: list[Key], settings: Settings) -> Iterator[str]:
    """Yield the lines of a table, with the keys in the schema's order; keys of a nested table are dotted.

    origins  the tables where a value may have been set, the nearest first
    """
    for key, kind in schema.items():
        if isinstance(kind, toml_reader.ValueKind) and key in values:
            place = next(filter(None, (_format_place((*origin, key), settings) for origin in origins)), "")
            yield f"{key} = {kind.write(values[key])}{place}"
        elif isinstance(kind, dict) and key in values:
            inner = [(*origin, key) for origin in origins]
            yield from (f"{key}.{line}" for line in _format_table(values[key], kind, inner, settings))


def _format_place(key: Key, settings: Settings) -> str:
    """Return a comment that names the file of a setting, or an empty text for a default."""
    setting = settings.get(key)
    return "" if setting is None else f"  # {setting.place.file}"
