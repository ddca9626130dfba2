# vLLM's bench client: random prompts, then the Mooncake trace at its own times.
environment vllm --no-deps vllm + torch==2.13.0 aiohttp cachetools cbor2 cloudpickle datasets einops fastapi \
    llguidance msgspec numpy openai openai-harmony orjson pandas partial-json-parser pillow prometheus_client psutil \
    py-cpuinfo pybase64 pydantic pyzmq regex requests tqdm transformers uvicorn uvloop watchfiles xgrammar
bench() { # NAME ARGUMENTS...
    local name=$1
    shift
    attempt "$name" "$CLIENTS/vllm/bin/vllm" bench serve --backend openai --base-url "$URL" --model "$MODEL" \
        --tokenizer "$TOKENIZER" --ignore-eos --save-result --result-dir "$OUT" --result-filename "$name.json" "$@"
}
bench vllm-random --dataset-name random --random-input-len 100 --random-output-len 16 --num-prompts 12 \
    --max-concurrency 4
completed "$OUT/vllm-random.json" 12 192
bench vllm-mooncake --dataset-name timed_trace --dataset-path "$HERE/trace.jsonl" --num-prompts 12 \
    --timed-trace-chunk-hash-size 512 --timed-trace-sec-multiplier 0.001 --self-timed \
    --timed-trace-label-input-length input_length --timed-trace-label-output-length output_length
completed "$OUT/vllm-mooncake.json" 12 176
