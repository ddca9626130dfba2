#!/bin/bash
# measure.sh LIFE...: starts servers on two H100s and sends them loads; raw results in $SGL/res, logs in $SGL/log-LIFE.
# Needs a folder $SGL with SGLang's site, bin/{up,down,env}.sh and bin/replay.py, and the loads of loads.py in $SGL/loads.
. "${SGL:=/tmp/sgl}"/bin/env.sh

up() { # PAGE_SIZE
    export COMMON="--mem-fraction-static 0.85 --chunked-prefill-size 8192 --page-size $1 --disable-piecewise-cuda-graph"
    bash "$SGL"/bin/up.sh pd qwen3-8b || exit 1
}
send() { # NAME replay arguments: what cannot be sent in 100 s is cut off
    local name=$prefix$1
    shift
    echo "== $name"
    timeout 100 "$PY" "$SGL"/bin/replay.py --url http://127.0.0.1:31000 --out "$SGL/res/$name.jsonl" "$@"
}
replay() { send "$1" --trace "$SGL/loads/$1.jsonl" "${@:2}"; }
warm() { send warm --n 16 --in-len 1024 --out-len 64 --max-conc 16 --seed 3; }

light() { # prompts of every length alone, and closed loops
    for tokens in 128 512 1024 2048 4096 8192 16384; do
        send "s$tokens" --n 3 --in-len $tokens --out-len 8 --max-conc 1 --seed $tokens
    done
    for clients in 1 8 32 96; do
        send "c$clients" --n $((clients * 2)) --in-len 1024 --out-len 192 --max-conc $clients --seed 10$clients
    done
    send wide --n 48 --in-len 256:12288 --out-len 64:448 --max-conc 16 --seed 17
}

for life in "$@"; do
    prefix=
    case $life in
    plain)
        up 64
        light
        for name in poisson8 poisson19 bursts long mixed code conversation; do replay $name; done
        ;;
    page1)
        prefix=page1_
        up 1
        light
        for name in poisson8 poisson19 code; do replay $name; done
        ;;
    retract)
        DX="--max-total-tokens 40000 --num-reserved-decode-tokens 128" up 64
        warm
        replay retract --max-conc 48
        ;;
    shared)
        DX=--disaggregation-decode-enable-radix-cache up 64
        warm
        replay shared
        ;;
    esac
    bash "$SGL"/bin/down.sh
    rm -rf "$SGL/log-$life" && cp -r "$SGL/log" "$SGL/log-$life"
done
