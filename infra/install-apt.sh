#!/bin/sh
# Install the Debian packages that are named in the file $1 and are not there yet.
set -eu
wanted=$(sed 's/#.*//' "$1" | tr -s '[:space:]' ' ')
missing=""
for package in $wanted; do
    dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null | grep -q '^installed$' || missing="$missing $package"
done
[ -n "$missing" ] || exit 0
if [ "$(id -u)" = 0 ]; then
    sudo=""
elif sudo -n true 2>/dev/null; then
    sudo="sudo -n"
else
    echo "[setup] These Debian packages are missing and need root to install:" >&2
    echo "    sudo apt-get install --no-install-recommends$missing" >&2
    exit 1
fi
echo "[setup] Debian packages:$missing"
export DEBIAN_FRONTEND=noninteractive
$sudo apt-get update -qq || echo "[setup] apt-get update failed; going on with the lists that are here" >&2
# shellcheck disable=SC2086
$sudo apt-get install -y -qq --no-install-recommends $missing >/dev/null
