# SGLang's bench client: its own /generate, then a shared-prefix load on chat.
environment sglang --no-deps sglang + \
    aiohttp datasets msgspec numpy orjson pillow psutil pybase64 pyzmq requests tqdm transformers
bench() { # NAME ARGUMENTS...
    local name=$1
    shift
    rm -f "$OUT/$name.jsonl"
    attempt "$name" "$CLIENTS/sglang/bin/python" "$HERE/sglang_client.py" --base-url "$URL" --model "$MODEL" \
        --tokenizer "$TOKENIZER" --max-concurrency 4 --flush-cache --output-file "$OUT/$name.jsonl" "$@"
}
bench sglang-random --backend sglang --dataset-name random-ids --random-input-len 100 --random-output-len 16 \
    --random-range-ratio 1.0 --num-prompts 12
completed "$OUT/sglang-random.jsonl" 12 192
bench sglang-prefixes --backend sglang-oai-chat --dataset-name generated-shared-prefix --gsp-num-groups 3 \
    --gsp-prompts-per-group 4 --gsp-system-prompt-len 200 --gsp-question-len 40 --gsp-output-len 16
completed "$OUT/sglang-prefixes.jsonl" 12 192
