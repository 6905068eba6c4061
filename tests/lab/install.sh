#!/usr/bin/env bash
# Makes sure that Slurm, MUNGE, MariaDB and squashfs-tools are there for the test suite. Quiet unless something fails.
#
#   install.sh            nothing if they are installed; else root installs the distribution's packages
#                         (no service is started), anybody else does as with --unpack
#   install.sh --unpack   unpack the packages into ${XDG_CACHE_HOME:-~/.cache}/dtslurm/slurm-prefix,
#                         and leave the system as it is
set -euo pipefail
export LC_ALL=C DEBIAN_FRONTEND=noninteractive PATH="$PATH:/usr/sbin:/sbin"

PROGRAMS=(slurmctld slurmd slurmdbd munged sbatch sacctmgr mksquashfs)
PACKAGES=(slurmctld slurmd slurmdbd slurm-client munge squashfs-tools)
STATE=()   # options that give apt its own lists and cache
SCRATCH=""
POLICY=""

die() { echo "install.sh: $*" >&2; exit 1; }

# shellcheck disable=SC2317  # called by the trap
clean_up() {
  [ -z "$SCRATCH" ] || rm -rf "$SCRATCH"
  [ -z "$POLICY" ] || rm -f "$POLICY"
}
trap clean_up EXIT
trap 'exit 130' INT TERM HUP

# quietly COMMAND...: its output is shown only if it fails
quietly() {
  local output
  if ! output=$("$@" 2>&1); then
    printf '%s\n' "$output" >&2
    die "failed: $*"
  fi
}

installed() {
  local program
  for program in "${PROGRAMS[@]}"; do command -v "$program" >/dev/null || return 1; done
  command -v mariadbd >/dev/null || command -v mysqld >/dev/null || return 1
  command -v mariadb >/dev/null || command -v mysql >/dev/null
}

# available PACKAGE: apt has a version of it to offer
available() {
  local candidate
  candidate=$(apt-cache "${STATE[@]}" policy "$1" 2>/dev/null | sed -n 's/^ *Candidate: //p')
  [ -n "$candidate" ] && [ "$candidate" != "(none)" ]
}

# Packages whose names depend on the release: MariaDB's may carry a version, Slurm's plugin may be part of another.
add_release_packages() {
  local part name
  for part in server client; do
    name=mariadb-$part-core
    available "$name" || name=$(apt-cache "${STATE[@]}" --names-only search "^mariadb-$part-core-[0-9.]+\$" |
      cut -d' ' -f1 | sort -V | tail -n 1)
    [ -n "$name" ] || die "no package mariadb-$part-core"
    PACKAGES+=("$name")
  done
  if available slurm-wlm-mysql-plugin; then PACKAGES+=(slurm-wlm-mysql-plugin); fi
}

install_packages() {
  if [ ! -e /usr/sbin/policy-rc.d ]; then # forbids packages to start their services
    POLICY=/usr/sbin/policy-rc.d
    printf '#!/bin/sh\nexit 101\n' >"$POLICY"
    chmod 755 "$POLICY"
  fi
  quietly apt-get -o Acquire::Retries=3 update
  add_release_packages
  quietly env RUNLEVEL=1 apt-get -o Acquire::Retries=3 -o DPkg::Lock::Timeout=120 \
    install -y --no-install-recommends "${PACKAGES[@]}"
  installed || die "the packages are installed, but not all programs are there"
}

own_apt_state() { # $1: folder
  mkdir -p "$1/lists/partial" "$1/cache/archives/partial"
  STATE=(-o "Dir::State::Lists=$1/lists" -o "Dir::Cache=$1/cache" -o "APT::Sandbox::User=$(id -un)")
  quietly apt-get "${STATE[@]}" -o Acquire::Retries=3 update
}

unpack_packages() { # $1: prefix
  local deb names
  mkdir -p "$(dirname "$1")"
  exec 9>"$1.lock"
  flock 9 # several test processes may want it at the same time
  if [ -e "$1/.complete" ]; then return; fi
  SCRATCH=$(mktemp -d "$1.XXXXXX")
  available slurmctld || own_apt_state "$SCRATCH/apt"
  available slurmctld || die "apt knows no package slurmctld"
  add_release_packages
  # apt itself works out what is missing here; --reinstall names our own packages even where they are installed
  names=$(apt-get "${STATE[@]}" --simulate --no-install-recommends --reinstall install \
    "${PACKAGES[@]}" slurm-wlm-basic-plugins | awk '$1 == "Inst" { print $2 }')
  [ -n "$names" ] || die "apt offers no packages to unpack"
  mkdir "$SCRATCH/debs" "$SCRATCH/prefix"
  # shellcheck disable=SC2086  # one word per package
  (cd "$SCRATCH/debs" && quietly apt-get "${STATE[@]}" -o Acquire::Retries=3 \
    -o "APT::Sandbox::User=$(id -un)" download $names)
  for deb in "$SCRATCH"/debs/*.deb; do quietly dpkg -x "$deb" "$SCRATCH/prefix"; done
  : >"$SCRATCH/prefix/.complete"
  rm -rf "$1"
  mv "$SCRATCH/prefix" "$1"
}

case "${1-}" in
  "") if installed; then exit 0; fi ;;
  --unpack) ;;
  *) die "usage: install.sh [--unpack]" ;;
esac
command -v apt-get >/dev/null || die "needs apt-get: install Slurm, MUNGE and MariaDB by hand"
if [ "$(id -u)" -eq 0 ] && [ "${1-}" != --unpack ]; then
  install_packages
else
  unpack_packages "${XDG_CACHE_HOME:-$HOME/.cache}/dtslurm/slurm-prefix"
fi
