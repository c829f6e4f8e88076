#!/usr/bin/env bash
# bash scripts/gpu.sh speed OUT              checks all models against the CPU and measures the paper's, in five minutes
# bash scripts/gpu.sh paper OUT DATA TITLE   trains the paper's network for its 300 epochs, compiled, alone on the GPU
# bash scripts/gpu.sh rows  OUT DATA TITLE   trains the rows of results/runs.toml with gpu = true, and files them
# DATA is a folder of CIFAR-10's parquet files or a Hub data set. `paper` stops after SECONDS_PER_CALL (570); call it
# again to continue. Without a GPU, these are rehearsals with small networks.
set -euo pipefail
what=$1 out=$(realpath -m "$2") data=${3:-uoft-cs/cifar10} title=${4:-CIFAR-10}
[ -d "$data" ] && data=$(realpath "$data")
cd "$(dirname "$0")/.."
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
mkdir -p "$out"
device=$(python -c 'import torch; print("cuda" if torch.cuda.is_available() else "cpu")')

speed() {
    if [ "$device" = cuda ]; then
        python -m pytest -n 0 tests/proofs/test_gpu.py
        for mode in "training, bfloat16" "inference, bfloat16"; do
            python scripts/bench.py sa_quadratic_cifar resnet18_cifar --device cuda --batch 512 --compile default \
                --rounds 10 --phase "$mode" --json "$out/speed.json"
        done
    else
        python scripts/bench.py sa_quadratic_tiny_cifar resnet_tiny_cifar --batch 7 --rounds 1 --phase "training, bf" \
            --json "$out/speed.json"
    fi
}

paper() {
    local recipe=paper place=() backend=inductor resume=()
    local settings=(--set "data.name=$data" --set "data.title=$title" --set train.checkpoint_steps=200)
    if [ "$device" = cpu ]; then # on scikit-learn's digits
        recipe=quickstart place=(--cpu) backend=aot_eager settings=(--set train.checkpoint_steps=2)
    fi
    [ -e "$out/$recipe/train.toml" ] && resume=(--resume)
    # SIGTERM writes a checkpoint
    timeout --signal=TERM "${SECONDS_PER_CALL:-570}" accelerate launch "${place[@]}" --num_processes 1 --num_machines 1 \
        --mixed_precision bf16 --dynamo_backend "$backend" -m sa_zoo train "$recipe" --out "$out/$recipe" \
        "${settings[@]}" "${resume[@]}" || echo "stopped with status $?: call again to continue"
}

rows() {
    python scripts/reproduce.py "$out/runs" --data "$data" --title "$title" --gpu --jobs 1
    for run in "$out"/runs/*-0; do
        python scripts/catalogue.py add "$run" --data "$data"
    done
    python scripts/render.py
}

case $what in
speed | paper | rows) "$what" ;;
*) echo "gpu.sh: got $what, expected speed, paper or rows" && exit 1 ;;
esac
