#!/usr/bin/env bash
# Writes requirements/*.txt anew from the *.in files: newest versions, pinned, with hashes, for every Python ≥ 3.11.
# `scripts/lock.sh --check` only says whether every name in a *.in file is pinned in its lock (no network needed).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../requirements"

if [ "${1:-}" = --check ]; then
    status=0
    for input in *.in; do
        lock=${input%.in}.txt
        while IFS= read -r line; do
            name=$(sed -E 's/[ ;<>=!~\[].*//' <<< "$line" | tr 'A-Z_' 'a-z-')
            grep -qE "^$name==" "$lock" || { echo "lock: $name is in $input but not pinned in $lock: run scripts/lock.sh" >&2; status=1; }
        done < <(sed -E 's/#.*//; s/^ +//; /^-r/d; /^$/d' "$input")
        if grep -nE '://|--(extra-)?index|--find-links' "$lock"; then
            echo "lock: $lock must not name where packages come from" >&2
            status=1
        fi
    done
    exit $status
fi

tools=$(mktemp -d)
trap 'rm -rf "$tools"' EXIT
../.venv/bin/python -m venv "$tools"
"$tools/bin/pip" install -q --disable-pip-version-check uv
compile() { # name, then more options
    "$tools/bin/uv" pip compile -q --universal --python-version 3.11 --generate-hashes --no-header --upgrade "$1.in" -o "$1.txt" "${@:2}"
    echo "lock: requirements/$1.txt"
}
compile pip
compile build
compile runtime
# The same versions in all, so that one environment serves.
compile dev -c build.txt -c runtime.txt
