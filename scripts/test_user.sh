#!/usr/bin/env bash
# As root: runs the tests that depend on who you are once more as a normal user, without copying the checkout.
#
#   scripts/test_user.sh [pytest arguments]       RINGFENCE_TEST_USER (default: daemon) names the user
#
# The user has no subordinate ids, no cgroup of its own and no home: the poorest case that must still work.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ "$(id -u)" != 0 ]; then
    echo "test-user: you are a normal user already; make test is the same" >&2
    exec .venv/bin/python -m pytest -q "$@"
fi
user=${RINGFENCE_TEST_USER:-daemon}
id "$user" > /dev/null
home=$(mktemp -d)
chmod 755 "$home"
# Directories that vanish with the namespace below may hold a mount while this trap runs: one file system only.
trap 'rm -rf --one-file-system "$home"' EXIT
mkdir "$home/checkout" "$home/own"
chown "$user": "$home/own"
args=("$@")
if [ ${#args[@]} -eq 0 ]; then
    for folder in tests/unit tests/integration tests/conformance tests/security tests/acceptance; do
        [ ! -d $folder ] || args+=("$folder")
    done
fi
# shellcheck disable=SC2016 # expanded by the inner shell
# The checkout may lie where only root can go (/root, a build folder): show it under a path that the user can walk.
unshare --mount --propagation private -- bash -euo pipefail -c '
    home=$1 user=$2; shift 2
    mount --bind . "$home/checkout"
    cd "$home/checkout"
    exec setpriv --reuid "$user" --regid "$user" --clear-groups --bounding-set=-all --inh-caps=-all -- \
        env -i PATH="$home/checkout/.venv/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin" HOME="$home/own" \
        TMPDIR="$home/own" USER="$user" LANG=C.UTF-8 PYTHONDONTWRITEBYTECODE=1 CI="${CI:-}" \
        .venv/bin/python -m pytest -q -p no:cacheprovider "$@"
' bash "$home" "$user" "${args[@]}"
