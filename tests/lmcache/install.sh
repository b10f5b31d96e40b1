#!/usr/bin/env bash
# install.sh FOLDER PYTHON [pip options]: a virtual environment with LMCache and this project.
#
# LMCache pins packages that deploy/constraints.txt has in newer versions, and asks for CUDA and cloud
# packages that its CPU path never imports: so the wheel goes in without its dependencies, and then
# those of them that are needed.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
folder=$1 python=$2
shift 2

"$python" -m venv "$folder"
pip=("$folder/bin/python" -m pip install --quiet --disable-pip-version-check --prefer-binary "$@")
"${pip[@]}" torch==2.13.0
"${pip[@]}" --no-deps lmcache==0.5.6
"$folder/bin/python" - >"$folder/needed.txt" <<'PYTHON'
from importlib.metadata import requires

HEAVY = ("torch", "cupy", "cuda", "cufile", "google", "awscrt", "setuptools", "pytest")
for line in requires("lmcache") or []:
    if "extra ==" not in line and not line.startswith(HEAVY):
        print(line)
PYTHON
# requests is imported by its SDK, and not among its requirements.
"${pip[@]}" --requirement "$folder/needed.txt" requests pytest --editable "$here/../.."
