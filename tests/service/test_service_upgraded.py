"""The service outlives the package that it came from: it has all of its modules before it says that it is ready."""

from pathlib import Path

import pytest

from tests.support.replaced_package import ReplacedPackage, modules_ever
from tests.support.service_process import QUICK, configure, service
from tests.support.small_orphans import EXPIRED, ids, orphan_in, orphan_of, victim_in
from tests.support.trashd_command import done_well

pytestmark = pytest.mark.needs("root")

USER = 12_345


def test_a_running_service_loads_no_module_of_a_new_version(base: Path, volume: Path, tmp_path: Path) -> None:
    package = ReplacedPackage(tmp_path)
    orphan_in(volume, "kept")
    with service(base, volume, command=package.command) as running:
        had = package.replace()
        assert modules_ever("fusefs.service.service") <= had
        configure(base, f'{QUICK}[metrics]\ntextfile = "{base}/metrics"\nhttp = "127.0.0.1:0"\n')
        running.reload()
        of_root = orphan_in(volume, "mine", options=EXPIRED).id
        of_user = orphan_of(USER, volume, EXPIRED).id
        running.until(lambda: not {of_root, of_user} & ids(volume))
        victim_in(volume).rename(next((volume / ".trashd/u/0").glob("drop")) / "job")
        running.until(lambda: any("job" in name for name in ids(volume)))
        done_well("pause", volume)
        done_well("resume", volume)
        assert package.imported_since() == []
    assert package.imported_since() == []
