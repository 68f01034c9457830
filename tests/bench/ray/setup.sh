#!/usr/bin/env bash
# Makes .venv-ray, the environment of the Ray half of tests/bench/control.py. Ray is installed nowhere else.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
venv=$(cd "$here/../../.." && pwd)/.venv-ray
[ -x "$venv/bin/python" ] || python3.11 -m venv "$venv"
"$venv/bin/pip" install --quiet --requirement "$here/requirements.txt"
"$venv/bin/python" -c 'import ray; print("ray", ray.__version__)'
