#!/usr/bin/env bash
# Makes sure that sshd, ssh and the login shells of the test suite are there. Quiet unless something fails.
# Root installs the distribution's packages (no service is started); anybody else is told what is missing.
#
#   install.sh [PROGRAM]...   these as well, from packages of their names
set -euo pipefail
export LC_ALL=C DEBIAN_FRONTEND=noninteractive PATH="$PATH:/usr/sbin:/sbin"

PROGRAMS=(ssh sshd ssh-keygen setpriv tcsh fish zsh pkill "$@")
PACKAGES=(openssh-client openssh-server util-linux tcsh fish zsh procps "$@")
POLICY=""

# shellcheck disable=SC2317  # called by the trap
clean_up() { [ -z "$POLICY" ] || rm -f "$POLICY"; }
trap clean_up EXIT
trap 'exit 130' INT TERM HUP

missing() {
  local program
  for program in "${PROGRAMS[@]}"; do command -v "$program" >/dev/null || echo "$program"; done
}

[ -n "$(missing)" ] || exit 0
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
  echo "install.sh: without these the tests over SSH cannot run: $(missing | xargs)" >&2
  exit 0 # the tests say so themselves
fi
if [ ! -e /usr/sbin/policy-rc.d ]; then # forbids packages to start their services
  POLICY=/usr/sbin/policy-rc.d
  printf '#!/bin/sh\nexit 101\n' >"$POLICY"
  chmod 755 "$POLICY"
fi
if ! output=$({ apt-get -o Acquire::Retries=3 update && apt-get -o Acquire::Retries=3 \
  -o DPkg::Lock::Timeout=120 install -y --no-install-recommends "${PACKAGES[@]}"; } 2>&1); then
  printf '%s\n' "$output" >&2
  echo "install.sh: failed to install ${PACKAGES[*]}" >&2
  exit 1
fi
[ -z "$(missing)" ] || { echo "install.sh: still missing: $(missing | xargs)" >&2; exit 1; }
