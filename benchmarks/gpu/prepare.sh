#!/usr/bin/env bash
# Downloads what run.sh needs besides Python 3.12 and torch into benchmarks/gpu/wheels. Needs a network.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${PYTHON:-python3}
wheels=benchmarks/gpu/wheels
mkdir -p "$wheels"
"$python" - > "$wheels/requirements.txt" <<'END'
import tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
needed = [*project["dependencies"], *project["optional-dependencies"]["examples"]]
print(*(one for one in needed if not one.startswith("torch")), sep="\n")
END
"$python" -m pip download --dest "$wheels" --requirement "$wheels/requirements.txt" --only-binary :all: \
    --python-version 3.12 --implementation cp --abi cp312 --abi abi3 --abi none \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64
