#!/usr/bin/env bash
# bash scripts/versions.sh [TEST...]
# Runs the tests with the newest releases, with those of GPU machines, and with the lower bounds of pyproject.toml, each in
# an environment of its own (pip install uv). A lower bound has to be a version on which this passed. PYTHON is an
# interpreter or its version (default: 3.11).
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
# transformers 5.0 to 5.2 lack transformers.backbone_utils, which modeling_sa.py needs. Only since 1.0.31 does timm record
# a model's arguments and input size, with which a folder builds the same model again.
tested "lower bounds" torch==2.9.0 torchvision==0.24.0 timm==1.0.31 transformers==5.4.0 \
    --exclude-newer 2026-04-01 -- "$@"
