# Every target makes what it needs first; ARGS go through: make test ARGS='-k restore'
PYTHON := .venv/bin/python

NATIVE = hatch_build.py $(wildcard fusefs/*/native/*.[ch])

SANITIZERS = address,undefined
SANITIZED = cores=$$(mktemp -d) && trap 'rm -rf "$$cores"' EXIT && chmod 755 "$$cores" && $(PYTHON) hatch_build.py --sanitize $(SANITIZERS) --to "$$cores" && TRASHD_TEST_SANITIZED=$$cores/fusefs/mount/native

.PHONY: setup native demo test every flaky quick without-native lint coverage fmt bench simulate docs schema changelog dist release uring man site install-system packages pythons deb deb-bundled rpm tarball suites old-kernel catch-rate soak soak-service soak-store soak-reap soak-lists soak-mount soak-model soak-shared soak-mpi shared shared-packages mpi mpi-packages recipes recipes-packages sanitize fuzz clean

setup: .venv/.ready .venv/.native
.venv/.ready: pyproject.toml .ci/setup; @.ci/setup
native: .venv/.native
.venv/.native: $(NATIVE) | .venv/.ready; @$(PYTHON) hatch_build.py && touch $@
demo: setup; @$(PYTHON) -m bench.demo $(ARGS)
# The mount's tests with every mount over io_uring, and so by the native core.
uring: setup; @TRASHD_TEST_TRANSPORT=uring=on .ci/pytest tests/mount tests/posix $(or $(ARGS),--numprocesses=2 --dist=worksteal)
# A test of the mount or of the service waits a third of its time: four processes keep two cores at work.
test: setup; @.ci/pytest $(or $(ARGS),--numprocesses=6 --dist=worksteal)
every: setup; @.ci/pytest --every $(or $(ARGS),--numprocesses=3 --dist=worksteal)
# The tests that ARGS selects, ten times beside a load: make flaky ARGS='--times 20 tests/service -k held'
flaky: setup; @$(PYTHON) -m tests.flaky --numprocesses=2 $(ARGS)
quick: setup; @.ci/pytest -m quick tests/unit tests/linux $$(grep -rl --include='*.py' 'mark[.]quick(' tests) $(or $(ARGS),--numprocesses=2 --dist=worksteal)
without-native: setup; @TRASHD_NATIVE=0 .ci/pytest tests/linux tests/engine tests/plan tests/reaper tests/service tests/sweep tests/cli/test_wait_for_space.py tests/cli/test_wait_follow.py $(or $(ARGS),--numprocesses=3 --dist=worksteal)
lint: setup; $(PYTHON) hatch_build.py --lint & $(PYTHON) -m ruff check . && $(PYTHON) -m ruff format --check . && $(PYTHON) -m mypy; status=$$?; wait $$! && exit $$status
# Counted is what the tests' own processes run, some as other users, and commands and daemons of a sample (tests/conftest.py).
coverage: export COVERAGE_FILE = $(CURDIR)/.coverage/data
coverage: setup; @rm -rf .coverage && mkdir -m 1777 .coverage && .ci/pytest --cov --cov-report= $(or $(ARGS),--numprocesses=3 --dist=worksteal); $(PYTHON) -m coverage report --sort=cover
fmt: setup; $(PYTHON) -m ruff check --fix-only . && $(PYTHON) -m ruff format .
# A sample of every benchmark in ten minutes, and one table of all targets; in full: python -m bench --list
bench: setup; @$(PYTHON) -m bench --quick $(ARGS) && $(PYTHON) -m bench --plot docs/history.svg && $(PYTHON) -m bench.listing --plot docs/listing.svg && $(PYTHON) -m bench.mount --plot docs/mount.svg
# Many machines on a model of a server; measured anew first: make simulate ARGS=--measure
simulate: setup; @$(PYTHON) -m bench.simulate $(ARGS)
docs: setup; $(PYTHON) -m towncrier build --draft --version next
schema: setup; @$(PYTHON) -m build_docs schema docs/json.schema.json
changelog: setup; $(PYTHON) -m towncrier build --yes --version $(shell sed -n 's/^VERSION = "\(.*\)"/\1/p' fusefs/core/version.py)
# Faults that were mended, each made again in a copy of the tree: which test fails then.
catch-rate: setup; @$(PYTHON) -m tests.catch_rate $(ARGS)
suites: setup; @$(PYTHON) -m bench.suites $(ARGS)
# On another kernel, Debian 12's 6.1 (the package user-mode-linux), as root.
old-kernel: setup; @$(PYTHON) -m tests.support.old_kernel $(ARGS)
shared-packages: setup; @.ci/shared-packages
# On each shared filesystem that is run here from packages: what can't be started fails.
shared: shared-packages; @TRASHD_TEST_DEMANDED=shared TRASHD_TEST_ROUNDS=20 TRASHD_TEST_SHARED_LIMIT_S=20000 .ci/pytest -o faulthandler_timeout=0 tests/shared $(or $(ARGS),--numprocesses=2 --dist=worksteal)
mpi-packages: setup; @.ci/mpi-packages
# By each MPI: what can't be started fails.
mpi: mpi-packages; @TRASHD_TEST_DEMANDED=mpi .ci/pytest tests/mpi $(or $(ARGS),--numprocesses=2 --dist=worksteal)
recipes-packages: setup; @.ci/recipes-packages
# Each recipe of docs/howto/recipes as its page has it: what can't be run here fails.
recipes: recipes-packages; @TRASHD_TEST_DEMANDED=recipes .ci/pytest -o faulthandler_timeout=0 tests/recipes $(or $(ARGS),--numprocesses=2 --dist=worksteal)
dist: setup; $(PYTHON) -m build
release: setup; @.ci/release
# Each package, built and tried, those of Debian on their own kernels too: 30 minutes on two cores, and more the first time, when it builds roots and 0.3.0.
packages: setup; @.ci/packages all
# On the Pythons of other releases, in bare roots: an hour and a half.
pythons: ; @.ci/pythons
deb: ; @.ci/packages build trixie
deb-bundled: ; @.ci/packages build bookworm
# Users without root build it too. It is tested where root has run `make setup`.
tarball: ; @.ci/tarball && { [ ! -e .venv/.ready ] || [ "$$(id -u)" != 0 ] || TRASHD_TEST_PACKAGES=tarball .ci/pytest tests/packages; }
rpm: setup; @.ci/rpm && TRASHD_TEST_PACKAGES=rpm .ci/pytest tests/packages
# man -M build/man trashd-swap
man: setup; @$(PYTHON) -m build_docs man build/man
site: setup; @$(PYTHON) -m sphinx -c .ci/site --fail-on-warning --keep-going --quiet . build/site && echo build/site/index.html
install-system: man; .venv/bin/trashd service install --root "$(DESTDIR)/" $(ARGS)
soak: setup; @TRASHD_TEST_SOAK_S=3600 .ci/pytest --timeout=0 -o faulthandler_timeout=0 -s tests/service/test_service_soak.py $(ARGS)
soak-service: setup; @TRASHD_TEST_KILLS=1000 .ci/pytest --timeout=0 -o faulthandler_timeout=0 -s tests/service/test_service_killed.py $(ARGS)
soak-store: setup; @.ci/pytest --every --hypothesis-profile=soak --timeout=0 -o faulthandler_timeout=0 -k 'machine or killed or faults or late_nodes or test_recover or odd or powerfail or many_folders' tests/store tests/crash $(ARGS)
soak-reap: setup; @TRASHD_TEST_KILLS=1000 .ci/pytest --timeout=0 -s -k killed_at_any_time tests/reaper/test_reap.py $(ARGS)
soak-lists: setup; @TRASHD_TEST_NAMES=100000000 .ci/pytest --timeout=0 -o faulthandler_timeout=0 -s -k 'long_list or counted_first' tests/sweep/test_names_from_list.py $(ARGS)
soak-mount: setup; @TRASHD_TEST_SWAPS=1000 TRASHD_TEST_LOOKUPS=10000000 TRASHD_TEST_OPERATIONS=400000 TRASHD_TEST_RECORDS=10000 TRASHD_TEST_CHANGES=20000 TRASHD_TEST_INCARNATIONS=5000 TRASHD_TEST_SCENES=30000 TRASHD_TEST_ENTRIES=1000000 TRASHD_TEST_STEPS=100000 TRASHD_TEST_ENDS=300 .ci/pytest --hypothesis-profile=soak --timeout=0 -o faulthandler_timeout=0 -s tests/mount/test_machine.py tests/mount/test_access_cases.py tests/mount/test_cached_memory.py tests/mount/test_swap_under_load.py tests/mount/test_daemon_killed.py tests/mount/test_append.py tests/mount/test_data_races.py tests/mount/test_inode_numbers.py tests/mount/test_large_listing.py tests/mount/test_shuffled_threads.py tests/posix $(ARGS)
soak-shared: shared-packages; @TRASHD_TEST_DEMANDED=shared TRASHD_TEST_ROUNDS=1000 TRASHD_TEST_SHARED_LIMIT_S=400000 .ci/pytest --timeout=0 -o faulthandler_timeout=0 -s -k whatever_becomes_of tests/shared/test_two_nodes.py $(ARGS)
soak-mpi: mpi-packages; @TRASHD_TEST_DEMANDED=mpi TRASHD_TEST_KILLS=100 .ci/pytest --timeout=0 -o faulthandler_timeout=0 -s -k lost_ranks tests/mpi/test_reap_ranks.py $(ARGS)
soak-model: setup; @TRASHD_TEST_FAULTS=2 .ci/pytest --timeout=0 -o faulthandler_timeout=0 tests/unit/test_takeover_model.py $(ARGS)
# Forged requests to the core with sanitizers, for FUZZ_S seconds. A failure names its TRASHD_TEST_FUZZ_SEED.
fuzz: setup; @$(SANITIZED) TRASHD_TEST_FUZZ_S=$(or $(FUZZ_S),3600) TRASHD_TEST_FUZZ_SEED=$(or $(TRASHD_TEST_FUZZ_SEED),$$(date +%s)) .ci/pytest --timeout=0 -o faulthandler_timeout=0 -s tests/mount/test_forged_requests.py $(ARGS)
sanitize: setup; @$(SANITIZED) TRASHD_TEST_STEPS=5000 TRASHD_TEST_FUZZ_S=300 TRASHD_TEST_TRANSPORT=uring=on .ci/pytest --timeout=600 tests/mount/test_shuffled_threads.py tests/mount/test_ring_threads.py tests/mount/test_callers.py tests/mount/test_device_readers.py tests/mount/test_forged_requests.py tests/mount/test_oracle.py $(ARGS)
clean: ; rm -rf .venv .venv-shared .venv-recipes build dist .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache
