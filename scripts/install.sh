#!/usr/bin/env bash
# Make the virtual environment $VENV with verl and its development tools in it. Safe to repeat.
#   PYTHON  interpreter to make it with (default python3)
#   VENV    where (default .venv)
#   TORCH   what pip is asked for when there is no torch >= 2.11 yet
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3} VENV=${VENV:-.venv} TORCH=${TORCH:-torch==2.13.0}

fail() { echo "error: $*" >&2; exit 1; }

has_torch() {
    "$1" - <<'PY' 2>/dev/null
import sys
from importlib.metadata import version
sys.exit(tuple(int(part) for part in version("torch").split("+")[0].split(".")[:2]) < (2, 11))
PY
}

if [ ! -x "$VENV/bin/python" ]; then
    command -v "$PYTHON" >/dev/null || fail "no $PYTHON on this machine; install Python 3.10 or newer, or name one: make PYTHON=/path/to/python3"
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        fail "$PYTHON is $("$PYTHON" --version 2>&1); verl needs Python 3.10 or newer: make PYTHON=/path/to/python3"
    # A torch that the machine's owner has installed (matched to its driver, say) is used, not replaced.
    site=$(has_torch "$PYTHON" && echo --system-site-packages || true)
    "$PYTHON" -m venv $site "$VENV" || fail "cannot make $VENV with $PYTHON; on Debian and Ubuntu: apt install python3-venv"
fi

pip() { "$VENV/bin/python" -m pip --disable-pip-version-check "$@"; }

# torch first and by itself: its index may have to be named (TORCH="torch --index-url ..."), so no quotes here.
has_torch "$VENV/bin/python" || pip install $TORCH

# The versions of requirements.txt are known to work together; torch is settled above.
constraints=$(mktemp)
trap 'rm -f "$constraints"' EXIT
grep -v '^torch' requirements.txt >"$constraints"
pip install -c "$constraints" -e '.[dev]'
