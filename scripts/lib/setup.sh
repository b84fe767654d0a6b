# Set-up shared by scripts/quickstart and scripts/test. Sourced by POSIX sh with `root` set.
#
# Owns: which Python, the virtual environment, its packages, the few system packages they need.
# Everything slow is announced; its output goes to a log that is shown only when it fails.

started=$(date +%s)
log=$(mktemp "${TMPDIR:-/tmp}/rlpipe-setup.XXXXXX")

# say TEXT: one progress line with the seconds since the start.
say() {
    printf '[%4ds] %s\n' "$(($(date +%s) - started))" "$*"
}

# die TEXT: what is wrong and what to do about it, then exit 1.
die() {
    printf 'rlpipe: %s\n' "$*" >&2
    exit 1
}

# quietly COMMAND...: run it; if it fails, show the end of what it printed and exit 1.
quietly() {
    "$@" >"$log" 2>&1 || {
        tail -n 40 "$log" >&2
        die "this failed: $*. All of its output is in $log."
    }
}

# find_python: print a Python 3.11 or 3.12, $RLPIPE_PYTHON first.
find_python() {
    for candidate in ${RLPIPE_PYTHON:+"$RLPIPE_PYTHON"} python3.11 python3.12 python3 python; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    die "no Python 3.11 or 3.12 found. Install one, or name it: RLPIPE_PYTHON=/path/to/python3.11 $0"
}

# debian_package NAMES...: install them where that needs no question (root on Debian or Ubuntu); else
# return 1.
debian_package() {
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || return 1
    say "installing system packages: $*"
    quietly apt-get update
    quietly env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@"
}

# need_bubblewrap: the sandbox that model-written commands run in.
need_bubblewrap() {
    command -v bwrap >/dev/null || debian_package bubblewrap ||
        die "bwrap is missing: install the package 'bubblewrap' (apt-get, dnf, pacman: the same name)."
}

# need_compiler PYTHON: one dependency (pycosat, which reasoning-gym needs) comes as C source only.
need_compiler() {
    headers=$("$1" -c 'import sysconfig; print(sysconfig.get_path("include"))')
    { command -v cc >/dev/null && [ -e "$headers/Python.h" ]; } || debian_package gcc libc6-dev python3-dev ||
        die "a C compiler and Python's headers are missing: install the packages gcc and python3-dev."
}

# install_into DIR WHAT...: at the pinned versions. Modules are compiled on first import: most never are.
install_into() {
    environment=$1
    shift
    quietly "$environment/bin/python" -m pip install --no-input --no-compile -c "$root/constraints.txt" "$@"
}

# make_environment DIR EXTRAS: a virtual environment at DIR with rlpipe (editable) and "[extras]".
# Does nothing when DIR already holds exactly that; an environment that is there is updated, not emptied.
make_environment() {
    stamp=$(cd "$root" && cat pyproject.toml setup.py constraints.txt | cksum)" $root$2"
    if [ "$(cat "$1/rlpipe-stamp" 2>/dev/null)" = "$stamp" ]; then
        say "packages are in $1 already"
        return
    fi
    if [ ! -x "$1/bin/python" ]; then
        python=$(find_python)
        say "making a virtual environment with $("$python" --version)"
        need_compiler "$python"
        "$python" -c 'import ensurepip' 2>/dev/null || debian_package python3-venv ||
            die "$python cannot make virtual environments: install the package 'python3-venv'."
        quietly "$python" -m venv "$1"
    fi
    # torch first and alone: whichever build the machine's pip is set up for (CPU or CUDA) then stands, and
    # nothing that is resolved later brings another. Without a GPU the CPU build spares 3 GB.
    say "installing torch"
    install_into "$1" torch
    say "installing rlpipe$2 and what it needs (one to three minutes)"
    install_into "$1" -e "$root$2"
    printf '%s\n' "$stamp" >"$1/rlpipe-stamp"
    say "installed"
}
