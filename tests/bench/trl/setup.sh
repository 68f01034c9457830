#!/usr/bin/env bash
# Makes .venv-trl, the environment of the TRL side of tests/bench/vs_trl.py.
# torch goes first, so that nothing below can replace it; torchvision is not wanted (it would bring its own torch).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
venv=$(cd "$here/../../.." && pwd)/.venv-trl
[ -x "$venv/bin/python" ] || python3.11 -m venv "$venv"
"$venv/bin/pip" install --quiet "$(grep '^torch==' "$here/requirements.txt")"
"$venv/bin/pip" install --quiet --requirement "$here/requirements.txt"
"$venv/bin/python" -c 'import torch, trl; print("trl", trl.__version__, "torch", torch.__version__)'
