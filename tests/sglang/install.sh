#!/usr/bin/env bash
# install.sh FOLDER PYTHON [pip options]: a virtual environment with SGLang and this project.
#
# SGLang asks for other versions than deploy/constraints.txt has, and for CUDA: so the wheel goes in
# without what it requires, and then what its HiCache modules import.
set -euo pipefail
project=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
folder=$1 python=$2
shift 2

"$python" -m venv "$folder"
pip=("$folder/bin/python" -m pip install --quiet --disable-pip-version-check --prefer-binary
    --no-compile "$@")
"${pip[@]}" --constraint "$project/deploy/constraints.txt" --editable "$project" \
    aiohttp IPython msgspec orjson pybase64 pytest pyzmq requests
"${pip[@]}" --no-deps sglang==0.5.23 triton==3.9.0
"$folder/bin/python" -c 'import sglang.srt.mem_cache.hicache_storage, sglang.srt.mem_cache.utils'
