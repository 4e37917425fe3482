#!/bin/sh
# Bugs planted one at a time in a module, by cosmic-ray, and those that no test sees.
#
#     sh tests/mutants.sh BIN MODULE TESTS
#
# BIN: the bin folder of the virtual environment; MODULE: a file, or several; TESTS: files or folders for pytest.
# Works in a copy of the last commit, build/mutants. A mutant takes as long as TESTS; `git log` is left alone.
set -eu
bin=$(cd "$1" && pwd)
[ -n "$2" ] && [ -n "$3" ] || {
	echo "error: give MODULE and TESTS: make mutants MODULE=alma/stages.py TESTS=tests/alma" >&2
	exit 2
}
rm -rf build/mutants
mkdir -p build
git clone --quiet --shared . build/mutants
cd build/mutants
modules=$(printf '"%s", ' $2)
cat >mutants.toml <<TOML
[cosmic-ray]
module-path = [${modules%, }]
timeout = 600.0
excluded-modules = []
test-command = "$bin/python -m pytest -x -q -p no:cacheprovider -m 'not slow and not gpu' $3"

[cosmic-ray.distributor]
name = "local"
TOML
# a mutant may have the size and the second of the module before it, so that no bytecode may be kept
export PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1
run="$bin/uv tool run --quiet --from cosmic-ray==8.7.0"
$run cosmic-ray init mutants.toml mutants.sqlite
$run cosmic-ray baseline mutants.toml
$run cosmic-ray exec mutants.toml mutants.sqlite
$run cr-report --show-diff --surviving-only mutants.sqlite
