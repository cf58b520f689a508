#!/usr/bin/env bash
# Checks and times everything that needs a GPU, in at most nine and a half minutes, and prints one short table last.
#
#   benchmarks/gpu.sh [WHEELS]
#
# WHEELS is a folder of wheels: the peers to compare with (fla-core, liger-kernel, flash-attn-res, fast-attnres), and any
# package that this project needs and the machine lacks (tyro, transformers, ...). They are unpacked for this run only and
# not installed; nothing is fetched. Result files go to $OUT, by default benchmarks/results. $PYTHON is an interpreter
# that has torch with CUDA and triton, by default python3. Exit status: 0, 1 when a check or a stage failed or ran out of
# its time, 2 when nothing could be started.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2

PYTHON=${PYTHON:-python3}
OUT=${OUT:-benchmarks/results}
wheels=${1:-}
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT

fail() {
    echo "gpu.sh: $*" >&2
    exit 2
}

command -v "$PYTHON" >/dev/null || fail "PYTHON is $PYTHON, which is not found"
if [ -n "$wheels" ]; then
    [ -d "$wheels" ] || fail "WHEELS is $wheels; allowed: a folder of wheels"
    for wheel in "$wheels"/*.whl; do
        [ -e "$wheel" ] || fail "WHEELS is $wheels, which holds no wheel"
        case $(basename "$wheel") in
            torch-* | triton-* | nvidia_*) ;; # the machine's own fit its driver
            *) "$PYTHON" -m zipfile -e "$wheel" "$site" || fail "cannot unpack $wheel" ;;
        esac
    done
fi
export PYTHONPATH="$PWD/src:$site${PYTHONPATH:+:$PYTHONPATH}" # ours first: fast-attnres has the same import name
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
unset TRITON_INTERPRET

"$PYTHON" -c 'import torch' 2>/dev/null || fail "$PYTHON has no torch"
torch=$("$PYTHON" -c 'import torch; print(torch.__version__)')
"$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || fail "torch $torch finds no CUDA device"
missing=$("$PYTHON" -c 'import attnres.cli.bench, attnres.cli.console, attnres.bench.models' 2>&1) ||
    fail "attnres cannot be imported; put what is missing into WHEELS: $(tail -n 1 <<<"$missing")"
mkdir -p "$OUT" || fail "OUT is $OUT, which cannot be made"
gpu=$("$PYTHON" -c 'import torch; print(torch.cuda.get_device_name())')

# each stage has a limit of its own, 550 seconds together, so that the table comes whatever happens before it.
status=0
stage() {
    local seconds=$1 name=$2
    shift 2
    echo "== $name"
    timeout "$seconds" "$@"
    local result=$?
    [ "$result" -eq 0 ] || { status=1 && echo "gpu.sh: $name: exit status $result" >&2; }
}
bench=("$PYTHON" -m attnres bench)
op=("${bench[@]}" op --device cuda --dtypes bfloat16 --budget-s 1 --csv "$OUT/op.csv")

if [ -e tests/ops/test_triton_gpu.py ]; then
    stage 100 "kernels against the reference" "$PYTHON" -m pytest -q -p no:cacheprovider tests/ops/test_triton_gpu.py
fi
if [ -e tests/parallel/test_one_rank.py ]; then
    stage 40 "a pipeline on one rank" "$PYTHON" -m pytest -q -p no:cacheprovider tests/parallel/test_one_rank.py
fi
stage 110 "one read" "${op[@]}" --no-compile --token-reads 500 \
    --shapes 9x8192x7168 5x1024x7168 9x128x7168 2x1x7168 9x8192x4096
stage 60 "all reads of a model" "${bench[@]}" phases --device cuda --dtype bfloat16 --tokens 8192 --dim 4096 \
    --sublayers 16 32 64 --rounds 7 --csv "$OUT/phases.csv" --figure "$OUT/depth-gpu.svg"
stage 80 "whole model" "${bench[@]}" overhead --device cuda --precisions bfloat16 --dim 2048 --vocab 8192 \
    --batch 4 --context 2048 --prompt 8192 --rounds 8 --csv "$OUT/overhead.csv"
stage 70 "first and next token" "${bench[@]}" inference --device cuda --precisions bfloat16 --dim 4096 --vocab 8192 \
    --prompt 8192 --chunks 1000 --cached 1024 --rounds 5 --csv "$OUT/inference.csv"
stage 30 "memory" "${bench[@]}" memory --device cuda --read 9x8192x7168 --dim 1024 --layers 8 16 --csv "$OUT/memory.csv"
stage 60 "one read, with compiled peers" "${op[@]}" --token-reads 0 --shapes 9x8192x7168

echo "== one read on $gpu, torch $torch: our share of the copy bandwidth; peers as multiples of our time,"
echo "   forward and forward with backward"
"$PYTHON" -c '
import sys
from pathlib import Path
from attnres.bench.summary import summary
print(summary(Path(sys.argv[1])))' "$OUT/op.csv" || status=1
exit "$status"
