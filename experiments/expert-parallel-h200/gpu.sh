#!/usr/bin/env bash
# On a host with four GPUs, from the repository's root: gpu.sh [STAGE]...; without stages all of them, in nine minutes.
#   smoke    the kernels of one layer, then the first run of the matrix: nothing else begins if they fail
#   measure  rows of whole experts on GPUs 0 and 1, beside rows of divided experts on 2 and 3; then links and host work
#   matrix   the other runs
#   skew     a run that counts the tokens of each expert
# OUT: folder of rows, runs.tar.gz and log.txt. LIMIT_S: no stage goes on for longer.
set -uo pipefail
NAME=expert-parallel-h200
FOLDER=experiments/$NAME
OUT=${OUT:-out}
LIMIT_S=${LIMIT_S:-530}
LOG=$OUT/log.txt
mkdir -p "$OUT" "$FOLDER/data"

say() { echo "[$SECONDS s] $*" | tee -a "$LOG"; }

# bounded SECONDS COMMAND...: end a command like an interruption after that time, or at the limit.
bounded() {
  local left=$((LIMIT_S - SECONDS)) seconds=$1
  shift
  if ((left < 20)); then
    say "no time left: $*"
    return 124
  fi
  say "begin: $*"
  timeout --signal INT --kill-after 10 $((seconds < left ? seconds : left)) "$@" >>"$LOG" 2>&1
  local code=$?
  say "exit code $code: $*"
  return $code
}

measure() {
  local seconds=$1
  shift
  bounded "$seconds" python3 -m pdreal measure --model qwen3-30b-a3b --device cuda --dtype bfloat16 --page-size 64 "$@"
}

run() {
  bounded 100 python3 -m pdreal run $FOLDER/scenario.yaml --device cuda --dtype bfloat16 --weights seed:0 --json "$@"
}

pack() {
  (cd $FOLDER && find data -name summary.json -o -name scenario.yaml -o -name '*.parquet' -o -name pdreal.log) |
    tar -czf "$OUT/runs.tar.gz" -C $FOLDER -T -
}

smoke() {
  nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | tee -a "$LOG"
  bounded 45 python3 $FOLDER/ranks_add_up.py &&
    run --set client.concurrency=1 --set workload.num_requests=24 --out $FOLDER/data/c1 --force
}

rows() {
  CUDA_VISIBLE_DEVICES=0,1 measure 200 --tp 2 --ep 2 --only prefill,decode --out "$OUT/ep2.csv" &
  local beside=$!
  CUDA_VISIBLE_DEVICES=2,3 measure 200 --tp 2 --only prefill,decode --out "$OUT/tp2.csv"
  wait $beside
  CUDA_VISIBLE_DEVICES=0,1 measure 80 --only gather,scatter,transfer --out "$OUT/links.csv" &
  beside=$!
  CUDA_VISIBLE_DEVICES=2,3 measure 120 --only host --out "$OUT/host.csv"
  wait $beside
  measure 110 --tp 2 --ep 2 --only host --out "$OUT/host-ep2.csv"
  measure 110 --tp 2 --only host --out "$OUT/host-tp2.csv"
}

skew() {
  local counted
  counted=$(mktemp -d)/run
  run --record-experts --out "$counted" && bounded 30 python3 -m pdreal experts "$counted" --ep 2
}

(($#)) || set -- smoke measure matrix skew
for stage in "$@"; do
  case $stage in
    smoke) smoke || { say "the smoke test failed"; tail -n 60 "$LOG"; exit 1; } ;;
    measure) rows ;;
    matrix) bounded 400 python3 -m pdsim validate $NAME --real-only ;;
    skew) skew ;;
    *) say "no stage $stage"; exit 2 ;;
  esac
  pack
done
say "done"
tail -n 40 "$LOG"
ls -l "$OUT"
