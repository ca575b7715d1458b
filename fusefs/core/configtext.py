"""A configuration written as TOML again: what is in force, in the words of the file, and where each word stands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fusefs.core.config import CONFIG, HOOKS, LOCAL_HOSTS, METRICS, RULES, VOLUME, Config
from fusefs.core.kinds import PATH, Kind
from fusefs.core.policy import Rules, VolumePolicy, Watermark
from fusefs.core.toml_reader import Key, Schema, Settings

_OFF = Watermark(0.0, 0.0)


def tell_config(config: Config, settings: Settings) -> str:
    """All of it; read again it is the same configuration."""
    lines = [
        *_table({"poll": config.poll_s, "audit": config.audit}, CONFIG, [()], settings),
        "\n[defaults]",
        *_table(_volume_values(config.defaults), VOLUME, [("defaults",)], settings),
    ]
    for volume in config.volumes:
        lines += ["", tell_volume(volume, settings).rstrip("\n")]
    host = config.metrics.http[0] if config.metrics.http else "localhost"
    metrics = {**config.metrics._asdict(), "allow_remote": host not in LOCAL_HOSTS}
    lines += [
        "\n[hooks]",
        *_table({**config.hooks._asdict(), "timeout": config.hooks.timeout_s}, HOOKS, [("hooks",)], settings),
        "\n[metrics]",
        *_table(metrics, METRICS, [("metrics",)], settings),
    ]
    return "\n".join(lines) + "\n"


def tell_volume(volume: VolumePolicy, settings: Settings, origin: bytes | None = None) -> str:
    """What holds for one volume, as a [[volume]].

    origin  with the rules for what came from there, and no others
    """
    at: Key = ("volume", volume.path)
    above: Key = ("defaults",)
    deepest = volume.deepest(origin)
    places = [at, above] if deepest is None else [(*at, "rules", deepest), at, above]
    lines = ["[[volume]]", f"path = {PATH.write(volume.path)}{_place(at, settings)}"]
    lines += _table(_volume_values(volume._replace(rules=volume.rules_for(origin))), VOLUME, places, settings)
    for path, rules in volume.paths if origin is None else ():
        here: Key = (*at, "rules", path)
        lines += ["\n[[volume.rules]]", f"path = {PATH.write(path)}{_place(here, settings)}"]
        lines += _table(_rules_values(rules), RULES, [here, at, above], settings)
    return "\n".join(lines) + "\n"


def _rules_values(rules: Rules) -> dict[str, Any]:
    return {**rules._asdict(), "retention": rules.retention_s, "minimum_age": rules.minimum_age_s}


def _volume_values(volume: VolumePolicy) -> dict[str, Any]:
    return {
        **_rules_values(volume.rules),
        "serve": volume.is_served,
        "paced": volume.paced,
        "max_rate": volume.max_entries_per_s,
        "max_bytes": volume.max_bytes_per_s,
        "windows": volume.windows,
        "horizon": volume.horizon_s,
        "quota": volume.quota._asdict(),
        "free_space": (volume.blocks or _OFF)._asdict(),
        "free_inodes": (volume.inodes or _OFF)._asdict(),
    }


def _table(values: Mapping[str, Any], schema: Schema, origins: list[Key], settings: Settings) -> Iterator[str]:
    """The lines of a table, keys in the schema's order; those of a table within it are dotted.

    origins  where a value may have been set, the nearest first
    """
    for key, kind in schema.items():
        if isinstance(kind, Kind) and key in values:
            place = next(filter(None, (_place((*origin, key), settings) for origin in origins)), "")
            yield f"{key} = {kind.write(values[key])}{place}"
        elif isinstance(kind, dict) and key in values:
            inner = [(*origin, key) for origin in origins]
            yield from (f"{key}.{line}" for line in _table(values[key], kind, inner, settings))


def _place(key: Key, settings: Settings) -> str:
    """A comment that tells where a setting stands; none for a default."""
    setting = settings.get(key)
    return "" if setting is None else f"  # {setting.place}"
