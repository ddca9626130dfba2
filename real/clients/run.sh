#!/usr/bin/env bash
# Public clients, as they are installed, against `pdreal serve` on loopback: real/clients/run.sh [CLIENT ...]
# Each has an environment of its own below .clients/, made on the first call. Prints what each completed.
set -euo pipefail
HERE=$(cd "$(dirname "$0")" && pwd)
ROOT=$(cd "$HERE/../.." && pwd)
export HERE CLIENTS="$ROOT/.clients" PYTHON=${PYTHON:-python3}
export PDREAL=${PDREAL:-$ROOT/.venv/bin/pdreal} MODEL=tiny-qwen3 PORT=${PORT:-30000}
export OUT="$CLIENTS/out" TOKENIZER="$CLIENTS/tokenizer" HF_HOME="$CLIENTS/huggingface" HF_HUB_OFFLINE=1
export URL="http://127.0.0.1:$PORT"

# Install once. Clients are installed without what they depend on where that is an engine.
environment() { # NAME, and then lists of arguments for pip install, separated by +
    local name=$1 pip="$CLIENTS/$1/bin/python -m pip install --quiet --disable-pip-version-check" arguments=()
    shift
    [ -e "$CLIENTS/$name/ready" ] && return
    "$PYTHON" -m venv "$CLIENTS/$name"
    for argument in "$@" +; do
        if [ "$argument" = + ]; then
            $pip "${arguments[@]}" >> "$CLIENTS/$name.log" 2>&1
            arguments=()
        else
            arguments+=("$argument")
        fi
    done
    touch "$CLIENTS/$name/ready"
}

# One run of a client: its output goes to a log, of which the end is shown if it fails.
attempt() { # LOG COMMAND...
    local log="$OUT/$1.log"
    shift
    "$@" > "$log" 2>&1 || { tail -n 20 "$log"; echo "failed: $*; all of it: $log" >&2; exit 1; }
}

completed() { "$PYTHON" "$HERE/completed.py" "$@"; }

mkdir -p "$OUT"
"$PDREAL" tokenizer "$TOKENIZER" > /dev/null
"$PDREAL" tokenizer "$HF_HOME" --hf-home > /dev/null
"$PDREAL" serve "$HERE/scenario.yaml" --port "$PORT" > "$OUT/server.log" 2>&1 &
SERVER=$!
trap 'kill $SERVER 2> /dev/null && wait $SERVER' EXIT
until grep -qs "at $URL" "$OUT/server.log"; do
    kill -0 $SERVER 2> /dev/null || { cat "$OUT/server.log"; exit 1; }
    sleep 1
done

for client in "${@:-openai aiperf sglang vllm}"; do
    for name in $client; do
        # shellcheck source=/dev/null
        (source "$HERE/$name.sh")
    done
done
