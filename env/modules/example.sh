#!/usr/bin/env bash
# hpcrl with a site's environment modules: makes a virtual environment over their Python, once, on the login node.
# Run it from the top of the checkout; the modules are the arguments:
#   bash env/modules/example.sh python/3.11 cuda/13.0
# Then the same modules belong into the job, which loads them before anything else:
#   python -m hpcrl.launch +cluster=slurm 'cluster.modules=[python/3.11,cuda/13.0]' +experiment=...
# The environment needs no activation there: the job uses the python that submitted it. HPCRL_VLLM=no leaves vLLM out.
set -eo pipefail # not -u, which module functions do not stand
[ -f constraints.txt ] || { echo "run this from the top of the checkout" >&2; exit 2; }
[ $# -gt 0 ] && { module load "$@" || exit 2; }
venv=${HPCRL_VENV:-.venv}
python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "hpcrl needs Python 3.11; load one" >&2; exit 2; }
python3 -m venv "$venv"
"$venv/bin/pip" install -c constraints.txt setuptools torch
"$venv/bin/pip" install -c constraints.txt --no-build-isolation -e '.[slurm]'
[ "${HPCRL_VLLM:-yes}" = no ] || "$venv/bin/pip" install -c constraints.txt --no-build-isolation -e '.[vllm]'
touch "$venv/.installed-core" # the Makefile's mark: make installs nothing more
echo "done: $venv/bin/python -m hpcrl.launch --help"
