#!/usr/bin/env bash
# Everything that can be said about the tree without running it. Goes on after a failure; fails at the end.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
BIN=.venv/bin
failed=()

check() { # name, command
    local name=$1 output started
    shift
    started=$(date +%s)
    if output=$("$@" 2>&1); then
        printf 'check: %-34s ok (%s s)\n' "$name" $(($(date +%s) - started))
        [ "$name" != "file sizes" ] || [ -z "$output" ] || echo "$output"
    else
        printf 'check: %-34s FAILED\n%s\n' "$name" "$output"
        failed+=("$name")
    fi
}

# What people read in a terminal, spelled right: the help of every command, and the docs.
spelling() {
    local helps
    helps=$(mktemp -d)
    # shellcheck disable=SC2064
    trap "rm -rf '$helps'" RETURN
    local commands command
    "$BIN/ringfence" --help > "$helps/ringfence.txt" || return 1
    commands=$("$BIN/python" scripts/list_commands.py) || return 1
    [ -n "$commands" ] || { echo "no commands found in ringfence --help"; return 1; }
    for command in $commands; do
        "$BIN/ringfence" "$command" --help > "$helps/$command.txt" || return 1
    done
    "$BIN/codespell" "$helps"/*.txt ./*.md docs examples src scripts native
}

check "format (ruff)" "$BIN/ruff" format --check
check "lint (ruff)" "$BIN/ruff" check
check "types (mypy --strict)" "$BIN/mypy"
check "layers (import-linter)" env PYTHONPATH=src "$BIN/lint-imports" --no-cache
check "file sizes" "$BIN/python" scripts/check_sizes.py
check "spelling of help and docs" spelling
check "lock" scripts/lock.sh --check
check "figures in SPECIFICATION.md" "$BIN/python" scripts/spec_figures.py --check
check "matrix of the runtimes" "$BIN/python" scripts/matrix.py --check
check "blocking half of the SDK" "$BIN/python" scripts/sdk_blocking.py --check
check "docs/openapi.json" "$BIN/python" scripts/openapi.py --check
if command -v shellcheck > /dev/null; then
    check "shell scripts (shellcheck)" shellcheck scripts/*.sh .ci/run
fi

if [ ${#failed[@]} -gt 0 ]; then
    echo "check: failed: $(IFS=,; echo "${failed[*]}")"
    exit 1
fi
echo "check: all good"
