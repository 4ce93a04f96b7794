#!/usr/bin/env bash
# Prepares this checkout: Debian packages (as root), .venv with the locked packages, the native programs, bytecode.
#
#   scripts/setup.sh [run|test|fuzz]     run: what `ringfence` needs; test: and the tests and checks; fuzz: and clang
#
# Says what it does, does only what is missing, and may be called at any time and by several at once.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
MODE=${1:-run}
VENV=.venv
changed=

case $MODE in run | test | fuzz) ;; *) echo "setup: unknown mode $MODE (run, test or fuzz)" >&2; exit 2 ;; esac
say() { echo "setup: $*"; }
die() { echo "setup: $*" >&2; exit 1; }

# One set-up at a time in a checkout; the lock goes with the process.
exec 9< .
flock 9

# --- Debian packages ---------------------------------------------------------------------------------------------
# program that shows a package is there = package; a program from elsewhere serves as well.
wanted() {
    cat <<-LIST
	gcc=gcc
	make=make
	musl-gcc=musl-tools
	newuidmap=uidmap
	bwrap=bubblewrap
	setpriv=util-linux
	mkfs.ext4=e2fsprogs
	LIST
    [ "$MODE" = run ] || cat <<-LIST
	git=git
	ps=procps
	ip=iproute2
	runc=runc
	crun=crun
	node=nodejs
	skopeo=skopeo
	umoci=umoci
	mmdebstrap=mmdebstrap
	qemu-system-x86_64=qemu-system-x86
	mkfs.erofs=erofs-utils
	cpio=cpio
	zstd=zstd
	docker-registry=docker-registry
	dockerd=docker.io
	podman=podman
	htpasswd=apache2-utils
	pg_ctlcluster=postgresql
	slirp4netns=slirp4netns
	curl=curl
	wget=wget
	LIST
    [ "$MODE" != fuzz ] || echo clang=clang
}

find_python() {
    local python
    # Debian's own interpreter first: version managers put slow shims on the PATH that other users can't read.
    for python in /usr/bin/python3 /usr/bin/python3.1[1-9] /usr/local/bin/python3 "$(command -v python3 || true)"; do
        if [ -x "$python" ] && "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null; then
            # What the interpreter calls itself: the real program behind a shim.
            "$python" -c 'import os, sys; print(os.path.realpath(sys.executable))'
            return
        fi
    done
    return 1
}

missing_packages() {
    local line program python
    wanted | while IFS= read -r line; do
        program=${line%%=*}
        PATH=$PATH:/usr/sbin:/sbin command -v "$program" > /dev/null || echo "${line#*=}"
    done
    [ -e /usr/include/stdio.h ] || echo libc6-dev
    [ -e /usr/include/linux/mount.h ] || echo linux-libc-dev
    if ! python=$(find_python); then
        # Ubuntu 22.04 keeps a newer interpreter beside its own; Debian 12, Ubuntu 24.04 and later have it as python3.
        if apt-cache show python3.11 > /dev/null 2>&1; then echo python3.11 python3.11-venv; else echo python3 python3-venv; fi
    elif ! "$python" -c 'import ensurepip, venv' 2> /dev/null; then
        echo "$(basename "$python")-venv"
    fi
    if [ "$MODE" = fuzz ] && command -v clang > /dev/null; then
        clang_runtime
    fi
}

clang_runtime() { # libFuzzer is a package of its own, named after clang's version
    local file
    file=$(clang -print-file-name=libclang_rt.fuzzer-"$(uname -m)".a)
    [ -e "$file" ] || [ -e "$(clang -print-resource-dir)/lib/linux/libclang_rt.fuzzer-$(uname -m).a" ] ||
        echo "libclang-rt-$(clang -dumpversion | cut -d. -f1)-dev"
}

apt_install() {
    local log status=0
    log=$(mktemp)
    DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "$@" > "$log" 2>&1 || status=$?
    [ "$status" = 0 ] || tail -3 "$log" >&2
    rm -f "$log"
    return $status
}

# The tests start a database server of their own; Debian need not make and start one.
no_cluster() {
    local folder=/etc/postgresql-common/createcluster.d
    mkdir -p "$folder" && echo "create_main_cluster = false" > "$folder/ringfence.conf"
}

packages() {
    local missing
    mapfile -t missing < <(missing_packages | tr ' ' '\n')
    [ ${#missing[@]} -gt 0 ] || return 0
    if ! command -v apt-get > /dev/null; then
        say "not a Debian system; missing (by their Debian names): ${missing[*]}; going on with what is there"
    elif [ "$(id -u)" != 0 ]; then
        say "missing, and only root can install them: sudo apt-get install ${missing[*]}"
        say "going on with what is there"
    else
        changed=1
        say "installing Debian packages: ${missing[*]}"
        apt-get update -q > /dev/null 2>&1 || say "apt-get update failed; trying with the lists that are here"
        [[ " ${missing[*]} " != *" postgresql "* ]] || no_cluster
        apt_install "${missing[@]}" || {
            # One name that this release does not know must not keep the others away.
            local package
            for package in "${missing[@]}"; do
                apt_install "$package" || say "could not install $package; going on without it"
            done
        }
    fi
}

# The release's own gVisor is older than the platform that it needs here: a pinned one comes from the backports.
# `ringfence setup gvisor` does the same with the same module.
gvisor() {
    local python status=0
    python=$(find_python) || return 0
    "$python" -I src/ringfence/node/backports.py || status=$?
    [ "$status" != 10 ] || changed=1
}

packages
[ "$MODE" = run ] || gvisor
[ "$MODE" != fuzz ] || packages # clang's version is known only now, and its runtime is named after it

# --- Python environment ------------------------------------------------------------------------------------------
if ! "$VENV/bin/python" -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2> /dev/null; then
    python=$(find_python) || die "Python 3.11 or newer is needed and was not found; install it: sudo apt-get install python3 python3-venv"
    changed=1
    say "making $VENV with $("$python" --version) ($python)"
    rm -rf "$VENV"
    "$python" -m venv "$VENV" || die "$python can't make a virtual environment; install its venv package: sudo apt-get install python3-venv"
fi

lock_state() { cat "requirements/$1.txt" "$VENV/pyvenv.cfg" | sha256sum | cut -c1-64; }

install_locked() { # name of a lock: installs it unless that very lock was installed here before
    local stamp=$VENV/.stamp-$1
    [ "$(cat "$stamp" 2> /dev/null)" != "$(lock_state "$1")" ] || return 0
    changed=1
    say "installing the packages of requirements/$1.txt"
    "$VENV/bin/python" -m pip install -qq --disable-pip-version-check --require-hashes -r "requirements/$1.txt" ||
        die "pip could not install requirements/$1.txt; is a package index reachable? (see the lines above)"
    lock_state "$1" > "$stamp"
}

install_locked pip
if [ "$MODE" != run ]; then
    install_locked dev
elif [ "$(cat "$VENV/.stamp-dev" 2> /dev/null)" != "$(lock_state dev)" ]; then # dev holds all of these
    install_locked build
    install_locked runtime
fi

# --- the package itself ------------------------------------------------------------------------------------------
if command -v make > /dev/null && command -v "${CC:-gcc}" > /dev/null; then
    make -s --no-print-directory -C native -q 2> /dev/null || { changed=1; say "building the native programs"; }
    make -s --no-print-directory -C native || die "the native programs could not be built; see the lines above"
else
    [ -x src/ringfence/_native/ringfence-launcher ] || die "no C compiler or make here: sudo apt-get install gcc make musl-tools"
    say "no C compiler or make here; keeping the native programs that were built before"
fi
want=$(cat pyproject.toml setup.py | sha256sum | cut -c1-64)
if [ "$(cat "$VENV/.stamp-package" 2> /dev/null)" != "$want" ]; then
    changed=1
    say "installing ringfence into $VENV (editable)"
    "$VENV/bin/python" -m pip install -qq --disable-pip-version-check --no-build-isolation --no-deps -e . ||
        die "ringfence could not be installed into $VENV; see the lines above"
    echo "$want" > "$VENV/.stamp-package"
fi
"$VENV/bin/python" -m compileall -q -j 0 src examples scripts > /dev/null 2>&1 || true # a read-only checkout starts slower, that is all

# What virtual machines run in the tests: a kernel, and two small root file systems. Made once a machine, kept in /var/cache/ringfence
# (or RINGFENCE_CACHE). Whoever is interrupted leaves nothing that counts as made; what can't be made costs some tests.
machines() {
    [ "$MODE" != run ] && [ "$(id -u)" = 0 ] && [ "$(uname -m)" = x86_64 ] && command -v apt-get > /dev/null || return 0
    local cache=${RINGFENCE_CACHE:-/var/cache/ringfence}
    if ! compgen -G "$cache/kernels/*/kernel.json" > /dev/null; then
        changed=1
        say "fetching a kernel for virtual machines"
        timeout --foreground -k 10 900 "$VENV/bin/python" -m ringfence.runtimes.vm.kernel > /dev/null || say "no guest kernel; going on without it"
    fi
    if ! compgen -G "$cache/tests/*sysvinit-core.tar" > /dev/null || ! compgen -G "$cache/tests/guest-*.erofs" > /dev/null; then
        changed=1
        say "making the root file systems of the virtual machines in the tests"
        PYTHONPATH=.:src timeout --foreground -k 10 1800 "$VENV/bin/python" -c "
from ringfence.conformance import templates
from tests.support import guests
templates.archive()
guests.system_disk()" || say "could not make them; going on without"
    fi
}
machines

if [ -n "$changed" ]; then say "done"; else say "up to date"; fi
