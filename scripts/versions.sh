#!/usr/bin/env bash
# bash scripts/versions.sh [TEST...]
# Runs the tests with the newest releases, with those of GPU machines, and with the lower bounds of pyproject.toml, each in
# an environment of its own (pip install uv). PYTHON is an interpreter or its version (default: 3.11).
set -euo pipefail
cd "$(dirname "$0")/.."
environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT

tested() { # NAME [OPTION OF uv pip install...], then -- and tests
    name=$1 options=() && shift
    while [ "$1" != -- ]; do
        options+=("$1")
        # a version that is named may be newer than the day
        [[ $1 == *==* ]] && options+=(--exclude-newer-package "${1%%==*}=9999-01-01")
        shift
    done && shift
    echo "== $name"
    uv venv -q --python "${PYTHON:-3.11}" --clear "$environment"
    uv pip install -q --python "$environment" "${options[@]}" '.[test]' pip
    uv pip list --python "$environment"
    "$environment/bin/python" -m pytest -q -p no:cacheprovider "$@"
}

tested newest -- "$@"
tested "GPU machines" torch==2.11.0 torchvision==0.26.0 transformers==5.17.0 huggingface_hub==1.33.0 -- "$@"
# The other packages are those of a day when most of these releases were new; pyparsing 3.3 deprecates names that matplotlib
# 3.10.0 calls.
mapfile -t bounds < <(sed -n '/^dependencies/,/^all = /s/.*"\(.*\)>=\([0-9.]*\)".*/\1==\2/p' pyproject.toml)
tested "lower bounds" "${bounds[@]}" "pyparsing<3.3" --exclude-newer 2026-04-01 -- "$@"
