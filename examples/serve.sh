#!/usr/bin/env bash
# An OpenAI-compatible server with AdaptiveSpec on the demo's models (after `make env`); then: examples/request.py
# Another model: MODEL=... HEAD=... examples/serve.sh. More options of `vllm serve` may follow, such as --port 8001.
set -euo pipefail
cd "$(dirname "$0")/.."
BIN=${VENV:-.venv}/bin

if [ -z "${MODEL:-}" ]; then
  { read -r MODEL; read -r HEAD; } < <("$BIN/adaptivespec" demo-models)
fi

# bfloat16 where the CPU multiplies in it; elsewhere it is much slower than float32.
if grep -qwE 'avx512_bf16|amx_bf16|bf16' /proc/cpuinfo; then DTYPE=bfloat16; else DTYPE=float32; fi

# vLLM's CPU worker leaves one core idle by default; each server process picks the same ones, so set this by hand
# where several share a machine.
export VLLM_CPU_OMP_THREADS_BIND=${VLLM_CPU_OMP_THREADS_BIND:-0-$(($(nproc) - 1))}

# Lossless unless a request asks for less, down to the floor.
exec "$BIN/vllm" serve "$MODEL" --served-model-name demo --dtype "$DTYPE" --max-model-len 2048 --max-num-seqs 16 \
  --kv-cache-memory-bytes 1073741824 \
  --speculative-config "{\"method\": \"adaptivespec\", \"model\": \"$HEAD\", \"num_speculative_tokens\": 8,
                         \"margin_threshold_floor\": 0.3}" "$@"
