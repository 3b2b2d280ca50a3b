#!/bin/sh
# The check on a GPU, in under five minutes: every kernel against NumPy, GPT-2 against the
# reference in both modes, then timings.
#
#   benchmarks/gpu.sh prepare DIR [CHIP]   on a machine with MLIR: compile what the check needs
#   benchmarks/gpu.sh run DIR [OUT]        on the machine with the GPU; nothing is compiled there
#   benchmarks/gpu.sh rehearse [DIR]       both, on a device that is not there, with small arrays
#
# The report is OUT/gpu.txt, OUT/gpu.jsonl (each figure as soon as it is known) and, at the
# end, OUT/gpu.json; or in $OUT, or in DIR. PyTorch is compared with where it is installed.
# LIMIT is a number of seconds after which all ends (285). PYTHON names the Python (python3).
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
export PYTHONPATH="src:benchmarks${PYTHONPATH:+:$PYTHONPATH}"
unset OPENBLAS_CORETYPE OPENBLAS_L2_SIZE || true

case "${1:-}" in
prepare) exec "$python" benchmarks/gpu.py prepare "$2" --chip "${3:-sm_80}" ;;
run) exec "$python" benchmarks/gpu.py run "$2" --out "${3:-${OUT:-$2}}" --limit "${LIMIT:-285}" ;;
rehearse)
    dir=${2:-$(mktemp -d)}
    "$python" benchmarks/gpu.py prepare "$dir" --small
    exec "$python" benchmarks/gpu.py run "$dir" --small --stand-in --out "$dir"
    ;;
*)
    sed -n '2,13s/^# \{0,1\}//p' "$0"
    exit 2
    ;;
esac
