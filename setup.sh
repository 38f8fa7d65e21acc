#!/bin/sh
# Makes everything that justgoal needs on this machine: Debian packages that are missing, then .venv.
# Called by make; quick when nothing is to be done. PYTHON names the interpreter that .venv is made from.
set -eu
cd "$(dirname "$0")"
PYTHON=${PYTHON:-python3}

fail() {
    echo "error: $*" >&2
    exit 2
}

python_can() { # CODE: whether the interpreter that counts (that of .venv once it exists) runs it without an error
    if [ -x .venv/bin/python ]; then .venv/bin/python -c "$1"; else "$PYTHON" -c "$1"; fi >/dev/null 2>&1
}

has_headers() {
    python_can 'import os, sysconfig; os.stat(os.path.join(sysconfig.get_path("include"), "Python.h"))'
}

missing_packages() {
    python_can 'import ensurepip, venv' || echo python3-venv
    # torch.compile compiles against Python.h; without it the expert would silently be the eager one.
    has_headers || echo python3-dev
    command -v g++ >/dev/null || echo g++
    command -v bwrap >/dev/null || echo bubblewrap
}

install_packages() { # PACKAGE...
    if [ "$(id -u)" = 0 ]; then
        sudo=
    elif sudo -n true 2>/dev/null; then
        sudo="sudo -n"
    else
        fail "missing: $*; type: sudo apt-get install -y $*"
    fi
    command -v apt-get >/dev/null || fail "missing: $*; there is no apt-get here: install what your system calls them"
    echo "installing $*"
    # A repository out of reach is not the end: what is wanted may be in another one, or in the list already there.
    $sudo apt-get update -qq || true
    $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null \
        || fail "apt-get could not install $*"
}

command -v "$PYTHON" >/dev/null || fail "no $PYTHON: install Python 3.11 or newer, or name one: make PYTHON=python3.12"
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "$PYTHON is $("$PYTHON" -V 2>&1): justgoal needs Python 3.11 or newer; name one: make PYTHON=python3.12"
[ ! -e .venv ] || .venv/bin/python -c '' 2>/dev/null || rm -r .venv

packages=$(missing_packages)
# shellcheck disable=SC2086 # one word a package
[ -z "$packages" ] || install_packages $packages
has_headers || fail "$PYTHON has no header files (Python.h): install them, or use Debian's: make PYTHON=/usr/bin/python3"

stamp=.venv/installed
if [ -e "$stamp" ] && [ -z "$(find pyproject.toml constraints.txt -newer "$stamp")" ]; then
    exit 0
fi
echo "installing justgoal and what it needs into .venv (a minute or two)"
[ -x .venv/bin/pip ] || "$PYTHON" -m venv --clear .venv
.venv/bin/pip install -qq --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
touch "$stamp"
