#!/usr/bin/env bash
# Runs `keepsake bench` and llama.cpp alternately on the same model and prints the ratios of their medians.
#
#   tests/bench/compare.sh KEEPSAKE MODEL.gguf
#
# KEEPSAKE is the binary. Environment: PYTHON, an interpreter that has llama-cpp-python (default python3);
# ROUNDS, how often each side runs (default 3, each round is a median of 7); THREADS (default 2); BENCH_ARGS, more
# arguments for both, such as "--decode 64 --streams 1,4"; LLAMA_ARGS, more arguments for llama_cpp_rates.py.
set -euo pipefail

if [ $# -ne 2 ]; then
  echo "usage: $0 KEEPSAKE MODEL.gguf" >&2
  exit 2
fi
keepsake=$1
model=$2
python=${PYTHON:-python3}
rounds=${ROUNDS:-3}
threads=${THREADS:-2}
here=$(dirname "$(readlink -f "$0")")

if ! "$python" -c 'import llama_cpp' 2>/dev/null; then
  echo "$0: $python has no llama-cpp-python; name one that has in PYTHON" >&2
  exit 2
fi

results=$(mktemp)
trap 'rm -f "$results"' EXIT
for round in $(seq "$rounds"); do
  echo "round $round of $rounds" >&2
  KEEPSAKE__DEVICE__THREADS=$threads "$keepsake" bench --model "$model" ${BENCH_ARGS:-} | tee -a "$results"
  "$python" "$here/llama_cpp_rates.py" --model "$model" --threads "$threads" ${BENCH_ARGS:-} ${LLAMA_ARGS:-} | tee -a "$results"
done
"$python" "$here/ratios.py" "$results"
