"""The site, built once for all tests of a run."""

from pathlib import Path

import pytest

from tests.support.built_site import build_site


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """Workers share what is above their own directories."""
    base = tmp_path_factory.getbasetemp()
    return build_site((base if worker_id == "master" else base.parent) / "site")
