#!/usr/bin/env bash
# Build the sdist from the files that git tracks, the wheel from the sdist, and try the wheel in an environment of its own, in
# an empty folder. Both are in dist/ afterwards, or in the folder $DIST.
#
#   env/dist.sh PYTHON            the wheel's environment gets its packages by pip, with constraints.txt
#   env/dist.sh PYTHON --borrow   it sees the packages of PYTHON's environment: no network, a minute
#
# PYTHON, such as .venv/bin/python, has the setuptools of constraints.txt, which builds.
set -euo pipefail
usage() { sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p}' "$0" >&2 && exit 2; }
[[ $# -eq 1 || ($# -eq 2 && $2 == --borrow) ]] || usage
python=$(realpath -s "$1")
borrow=${2:-}
cd "$(dirname "$0")/.."
top=$PWD
out=$(realpath -m "${DIST:-dist}")
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct) # the same commit makes the same wheel
export SOURCE_DATE_EPOCH
unset PYTHONPATH HPCRL_CONF
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

build() { # sdist or wheel, from the current folder, without its messages unless it fails
    "$python" -c "import sys; from setuptools import build_meta; build_meta.build_$1(sys.argv[1])" "$out" >"$work/log" 2>&1 ||
        { cat "$work/log"; exit 1; }
}

same() { # what must be there, what is there, the name of the latter
    diff "$1" "$2" >"$work/diff" && return
    echo "$3 lacks (<) or has too much (>):"
    grep '^[<>]' "$work/diff"
    exit 1
} >&2

version=$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)
tag=$(git describe --exact-match --tags --match 'v*' 2>/dev/null || true)
[[ -z $tag || $tag == "v$version" ]] || { echo "the tag is $tag, and pyproject.toml says $version" >&2; exit 1; }

echo "== building $version"
rm -f "$out"/hpcrl-*.whl "$out"/hpcrl-*.tar.gz
mkdir -p "$out" "$work/tracked" "$work/sdist" "$work/empty"
git ls-files -z | tar --create --null --files-from - | tar --extract --directory "$work/tracked"
cd "$work/tracked"
build sdist
tar --extract --gzip --strip-components 1 --directory "$work/sdist" --file "$out"/hpcrl-*.tar.gz
find . -type f ! -path './.*' ! -path './*.egg-info/*' -printf '%P\n' | sort >"$work/must"
(cd "$work/sdist" && find . -type f ! -path './*.egg-info/*' -printf '%P\n' | grep -vxE 'PKG-INFO|setup.cfg' | sort) >"$work/has"
same "$work/must" "$work/has" "the sdist"
cd "$work/sdist"
build wheel

echo "== installing the wheel"
"$python" -m venv "$work/venv"
bin=$work/venv/bin
site=$("$bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
if [[ $borrow ]]; then
    # The folders, not their .pth files: one of them may lead to the checkout.
    "$python" -c 'import sys; print(*(path for path in sys.path if path.endswith("-packages")), sep="\n")' >"$site/borrowed.pth"
    "$bin/python" -m pip install --quiet --no-index --no-deps "$out"/*.whl
else
    "$bin/python" -m pip install --quiet --progress-bar off -c "$top/constraints.txt" "$out"/*.whl
    "$bin/python" -m pip check
fi
(cd "$top" && git ls-files hpcrl conf) | sed -E 's,^conf/,hpcrl/conf/,' | sort >"$work/must"
(cd "$site" && find hpcrl -type f ! -name '*.pyc') | sort >"$work/has"
same "$work/must" "$work/has" "the installed package"

echo "== trying it in an empty folder"
cd "$work/empty"
PATH=$bin:$PATH
said=$(hpcrl --version)
[[ $said == "hpcrl $version" ]] || { echo "hpcrl --version says $said, pyproject.toml $version" >&2; exit 1; }
try() {
    echo "   $*"
    "$@" >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
}
try hpcrl --help
try python -m hpcrl.launch --help
try hpcrl launch +experiment=demo_sft dry_run=true
try hpcrl launch +experiment=demo model=tiny debug=fake max_steps=2
try hpcrl status runs/demo_fake
ls -l "$out"
