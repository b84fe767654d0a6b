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

# patiently COMMAND...: quietly, for what asks a package registry: a page that does not arrive fails an
# installation, with any message, and arrives a moment later. Three tries, 10 and 20 s apart.
patiently() {
    for try in 1 2; do
        ! "$@" >"$log" 2>&1 || return 0
        say "that failed (try $try of 3): $(tail -n 1 "$log")"
        sleep "${RLPIPE_SETUP_PAUSE:-$((try * 10))}"
    done
    quietly "$@"
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
    patiently apt-get update
    patiently env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@"
}

# need_bubblewrap: the sandbox that model-written commands run in.
need_bubblewrap() {
    command -v bwrap >/dev/null || debian_package bubblewrap ||
        die "bwrap is missing: install the package 'bubblewrap' (apt-get, dnf, pacman: the same name)."
}

# need_chromium: tests look at the report in a real browser.
need_chromium() {
    command -v chromium >/dev/null || command -v google-chrome >/dev/null || debian_package chromium ||
        die "chromium is missing: install the package 'chromium' (apt-get, dnf, pacman: the same name)."
}

# need_compiler PYTHON: one dependency (pycosat, which reasoning-gym needs) comes as C source only.
need_compiler() {
    headers=$("$1" -c 'import sysconfig; print(sysconfig.get_path("include"))')
    { command -v cc >/dev/null && [ -e "$headers/Python.h" ]; } || debian_package gcc libc6-dev python3-dev ||
        die "a C compiler and Python's headers are missing: install the packages gcc and python3-dev."
}

# has_gpu: whether this machine has a GPU; RLPIPE_PINS=cpu or gpu answers instead (an image that is built on a
# machine without one).
has_gpu() {
    case ${RLPIPE_PINS:-} in
    cpu) return 1 ;;
    gpu) ;;
    *) nvidia-smi -L >/dev/null 2>&1 ;;
    esac
}

# pins: the file of versions for this machine. With GPUs trainer and servers have the same torch, and so the
# same NCCL; without, the builds that install quickly.
pins() {
    if has_gpu; then echo "$root/constraints_gpu.txt"; else echo "$root/constraints.txt"; fi
}

# no_compile: pip's option that leaves modules uncompiled until their first import, because most are never
# imported; nothing where Python may not store what it compiles, so that not every process compiles them again.
no_compile() {
    [ -n "${PYTHONDONTWRITEBYTECODE:-}" ] || echo --no-compile
}

# install_into DIR WHAT...: at the pinned versions.
install_into() {
    environment=$1
    shift
    patiently "$environment/bin/python" -m pip install --no-input $(no_compile) -c "$(pins)" "$@"
}

# make_bare_environment DIR: a virtual environment with nothing in it, unless one is there.
make_bare_environment() {
    [ ! -x "$1/bin/python" ] || return 0
    python=$(find_python)
    say "making a virtual environment with $("$python" --version)"
    "$python" -c 'import ensurepip' 2>/dev/null || debian_package python3-venv ||
        die "$python cannot make virtual environments: install the package 'python3-venv'."
    quietly "$python" -m venv "$1"
    # The pip that comes with Python 3.11 takes twice as long: it reads every package again for its summary.
    "$1/bin/python" -m pip install --no-input --upgrade "pip>=26" >"$log" 2>&1 ||
        say "pip stays as it is: $(tail -n 1 "$log")"
}

# make_environment DIR EXTRAS: a virtual environment at DIR with rlpipe (editable) and "[extras]", on a machine
# with GPUs also [gpu]. Does nothing when DIR already holds exactly that; an environment that is there is
# updated, not emptied.
make_environment() {
    if has_gpu; then set -- "$1" "${2:+${2%]},gpu]}" && set -- "$1" "${2:-[gpu]}"; fi
    stamp=$(cd "$root" && cat pyproject.toml setup.py "$(pins)" | cksum)" $root$2"
    if [ "$(cat "$1/rlpipe-stamp" 2>/dev/null)" = "$stamp" ]; then
        say "packages are in $1 already"
        return
    fi
    if [ ! -x "$1/bin/python" ]; then
        python=$(find_python)
        need_compiler "$python"
    fi
    make_bare_environment "$1"
    # torch first and alone: whichever build the machine's pip is set up for (CPU or CUDA) then stands, and
    # nothing that is resolved later brings another. Without a GPU the CPU build spares 3 GB.
    say "installing torch"
    install_into "$1" torch
    say "installing rlpipe$2 and what it needs (one to three minutes)"
    install_into "$1" -e "$root$2"
    printf '%s\n' "$stamp" >"$1/rlpipe-stamp"
    say "installed"
}

# make_sglang_environment DIR cpu|gpu: SGLang's own virtual environment at DIR. Does nothing when DIR already
# holds exactly that.
make_sglang_environment() {
    pins=$root/sglang_env/requirements_$2.txt
    stamp=$(find "$root/sglang_env" -type f ! -path '*/__pycache__/*' ! -path '*/plugin/*' -exec cat {} + | cksum)" $2"
    if [ "$(cat "$1/rlpipe-stamp" 2>/dev/null)" = "$stamp" ]; then
        say "SGLang is in $1 already"
        return
    fi
    make_bare_environment "$1"
    if [ "$2" = gpu ]; then
        say "installing SGLang with CUDA (many gigabytes)"
        patiently "$1/bin/python" -m pip install --no-input -r "$pins"
    else
        # torch first and alone, as above; then exactly the pinned packages, because what SGLang declares
        # would bring a CUDA build of torch.
        say "installing torch"
        patiently "$1/bin/python" -m pip install --no-input $(no_compile) "$(grep '^torch==' "$pins")"
        say "installing SGLang for the CPU (one to three minutes)"
        patiently "$1/bin/python" -m pip install --no-input $(no_compile) --no-deps -r "$pins"
        copy=$(mktemp -d "${TMPDIR:-/tmp}/rlpipe-sglang.XXXXXX") # building leaves files beside the source
        cp -R "$root/sglang_env/cpu_support/." "$copy"
        patiently "$1/bin/python" -m pip install --no-input --no-deps --no-build-isolation --force-reinstall "$copy"
        rm -rf "$copy"
    fi
    printf '%s\n' "$stamp" >"$1/rlpipe-stamp"
    say "installed"
}
