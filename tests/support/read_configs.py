"""A configuration without the places of its settings."""

from collections.abc import Sequence

from fusefs.core.config import Config, read_config_with_places
from fusefs.core.toml_reader import Source

_DEFAULTS = Config()


def read_config(sources: Sequence[Source], defaults: Config = _DEFAULTS) -> Config:
    """What the sources give together. Raises  BadConfig"""
    return read_config_with_places(sources, defaults)[0]
