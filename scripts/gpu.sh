#!/usr/bin/env bash
# bash scripts/gpu.sh OUT DATA [TITLE]
# Measures what needs a GPU: checks all models against the CPU, benchmarks them, trains the rows of results/runs.toml with
# gpu = true, and files their results. DATA is a folder of CIFAR-10's parquet files or a Hub data set. Run it again to
# continue: finished steps are skipped, a training run resumes. A step that fails is reported, and the others follow.
# Without a GPU it is a rehearsal of some minutes, with small networks, which files nothing.
set -uo pipefail
out=$(realpath -m "$1") data=$2 title=${3:-CIFAR-10}
[ -d "$data" ] && data=$(realpath "$data")
cd "$(dirname "$0")/.."
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
mkdir -p "$out"

step() { # NAME COMMAND...
    local name=$1
    shift
    [ -e "$out/$name.done" ] && return
    echo "== $name: $*"
    if "$@" 2>&1 | tee "$out/$name.log"; then touch "$out/$name.done"; else echo "== $name failed"; fi
}

bench() { # NAME ARGUMENT...
    local name=$1
    shift
    step "$name" python scripts/bench.py --device "$device" --json "$out/$name.json" "$@"
}

if python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    device=cuda
    step check python -m pytest -n 0 tests/proofs/test_gpu.py
    bench speed sa_quadratic_cifar resnet18_cifar sa_content_cifar --batch 512 --compile reduce-overhead
    sides=$(printf -- '--side %s ' 8 16 20 24 28 32 40 64)
    # the smallest number of tokens at which "by axes" is faster is AXES_FROM_ON_GPU, see docs/gpu_day.md
    for phase in inference training; do
        # shellcheck disable=SC2086
        bench "axes-$phase" sa_quadratic_cifar --phase "$phase, bfloat16" --batch 512 $sides
    done
    step train python scripts/reproduce.py "$out/runs" --data "$data" --title "$title" --gpu --jobs 1
    for run in "$out"/runs/*-0; do
        [ -d "$run" ] && step "file-$(basename "$run")" python scripts/catalogue.py add "$run" --data "$data"
    done
    step render python scripts/render.py
else
    device=cpu
    bench speed sa_quadratic_tiny_cifar --batch 7 --rounds 1 --side 5 --phase 'inference, bfloat16'
    step train python -m sa_zoo train quickstart --out "$out/runs/quickstart" --set train.epochs=2
fi
ls "$out"
