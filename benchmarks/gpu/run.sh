#!/usr/bin/env bash
# Every step on this machine's GPU, or with --cpu on its CPU; arguments as of `python -m benchmarks.gpu`.
# Needs Python 3.12 with torch. What else it needs is installed from benchmarks/gpu/wheels, without a network,
# where prepare.sh has made that folder; else the Python ($PYTHON, or python3) has it.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${PYTHON:-python3}
wheels=benchmarks/gpu/wheels
if [ -d "$wheels" ]; then
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
    "$python" -m venv --without-pip "$folder/venv"
    # Not --system-site-packages: where this Python has torch in an environment of its own, it would not be seen.
    found=$("$python" -c 'import site; print(*site.getsitepackages(), sep="\n")')
    pip=("$python" -m pip --python "$folder/venv/bin/python")
    python="$folder/venv/bin/python"
    echo "$found" > "$("$python" -c 'import site; print(site.getsitepackages()[0])')/found.pth"
    "${pip[@]}" install --quiet --no-index --find-links "$wheels" --requirement "$wheels/requirements.txt"
fi
"$python" -m benchmarks.gpu "$@"
