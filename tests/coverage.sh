#!/usr/bin/env bash
# coverage.sh PYTHON [PYTEST ARGS...]: which branches the tests pass, processes that they start included.
# Training with frameworks is left out: what of it is dtslurm's own is passed by the other tests. By default
# the part of the suite that takes minutes; `tests` as argument is all but the frameworks.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
shift
folder=$PWD/build/coverage
rm -rf "$folder"
mkdir -p "$folder"
export COVERAGE_FILE=$folder/data
fast=(tests --ignore=tests/frameworks --ignore=tests/e2e --ignore=tests/fuzz --ignore=tests/test_readme.py)
fast+=(--ignore=tests/test_demo.py --ignore=tests/test_packaging.py -m "not slow")
[ $# -gt 0 ] || set -- "${fast[@]}"
failed=0
nice -n 19 "$python" -m coverage run -m pytest -q -n 2 --dist worksteal -p no:cacheprovider "$@" || failed=$?
"$python" -m coverage combine --quiet
"$python" -m coverage json --quiet -o "$folder/coverage.json"
"$python" -m coverage report --skip-covered --sort=cover | tee "$folder/report.txt"
exit "$failed"
