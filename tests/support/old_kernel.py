"""`make old-kernel`: runs tests on Debian 12's kernel, 6.1. As root, with its package user-mode-linux.

python -m tests.support.old_kernel                            the mount's oracle, pjdfstest, swaps under load
python -m tests.support.old_kernel tests/mount/test_atime.py  other tests
"""

import sys
import tempfile
from contextlib import closing
from pathlib import Path

from tests.support.third_party_suites import suite
from tests.support.uml_actions import run_pytest
from tests.support.uml_machine import started
from tests.support.uml_switch import Switch

_LIMIT_S = 3600.0
"""Between two lines that pytest writes."""
_MODULES, _IMPORTS = ("fuse", "loop"), (run_pytest.__module__,)


def main() -> None:
    """Run the tests of the command line."""
    words = sys.argv[1:] or [
        "tests/mount/test_oracle.py",
        "tests/mount/test_machine.py",
        "tests/mount/test_swap_under_load.py",
        "tests/posix",
    ]
    suite("pjdfstest")  # builds it, which a guest without a network could not
    with (
        tempfile.TemporaryDirectory() as name,
        closing(Switch(folder := Path(name))) as switch,
        started(
            folder, "old", "10.9.0.1", switch.port("old"), modules=_MODULES, memory="3G", imports=_IMPORTS
        ) as machine,
    ):
        machine.boot()
        running = machine.start(run_pytest, words)
        while (text := running.wait_report_or_end(_LIMIT_S)) is not None:
            print(text, flush=True)
        code = running.result()
    sys.exit(code)


if __name__ == "__main__":
    main()
