#!/usr/bin/env bash
# Makes sure of the programs in which what people see is tested: a terminal and a browser for the dashboard and
# reports, shells for completion, two readers of man pages.
set -euo pipefail
missing=()
for program in tmux chromium-headless-shell zsh fish mandoc; do
  command -v "$program" >/dev/null || missing+=("$program")
done
command -v man >/dev/null || missing+=(man-db)
[ "${#missing[@]}" -eq 0 ] && exit 0
export LC_ALL=C DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
trap 'rm -f "$log"' EXIT
quietly() { "$@" >"$log" 2>&1 || { cat "$log" >&2; exit 1; }; }
[ "$(id -u)" -eq 0 ] || { echo "install.sh: ${missing[*]}: missing, install by hand" >&2; exit 1; }
quietly apt-get -o Acquire::Retries=3 update
quietly apt-get -o Acquire::Retries=3 -o DPkg::Lock::Timeout=120 install -y --no-install-recommends "${missing[@]}"
