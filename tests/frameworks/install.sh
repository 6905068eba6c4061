#!/usr/bin/env bash
# Makes sure that what frameworks are built with and run on is there: Open MPI, cmake, a C++ compiler, and
# the headers of the Python that is named. Quiet unless something fails.
#
#   install.sh [PYTHON]
set -euo pipefail
export LC_ALL=C DEBIAN_FRONTEND=noninteractive

python=${1-python3}
packages=()
# needs PROGRAM PACKAGE...
needs() {
  command -v "$1" >/dev/null || packages+=("${@:2}")
}
needs mpirun openmpi-bin
needs mpicc libopenmpi-dev
needs cmake cmake
needs make make
needs g++ g++
"$python" -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null ||
  packages+=("$("$python" -c 'import sys; print("python%d.%d-dev" % sys.version_info[:2])')")

[ "${#packages[@]}" -gt 0 ] || exit 0
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
  echo "install.sh: as root, install ${packages[*]} (names of Debian's packages)" >&2
  exit 1
fi
log=$(mktemp)
trap 'rm -f "$log"' EXIT
apt=(apt-get -o Acquire::Retries=3 -o DPkg::Lock::Timeout=120)
if ! { "${apt[@]}" update && "${apt[@]}" install -y --no-install-recommends "${packages[@]}"; } >"$log" 2>&1; then
  cat "$log" >&2
  echo "install.sh: cannot install ${packages[*]}" >&2
  exit 1
fi
