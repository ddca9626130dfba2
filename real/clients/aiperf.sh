# NVIDIA AIPerf: synthetic load on completions, then a Mooncake trace on chat.
environment aiperf aiperf
profile() { # NAME ARGUMENTS...
    local name=$1
    shift
    attempt "$name" "$CLIENTS/aiperf/bin/aiperf" profile --model "$MODEL" --url "$URL" --streaming \
        --tokenizer pdreal/bytes --artifact-dir "$OUT/$name" --ui-type none --extra-inputs ignore_eos:true "$@"
    cp "$OUT/$name/profile_export_aiperf.json" "$OUT/$name.json"
}
profile aiperf-synthetic --endpoint-type completions --isl 100 --osl 16 --concurrency 4 --request-count 12
completed "$OUT/aiperf-synthetic.json" 12 192
profile aiperf-mooncake --endpoint-type chat --input-file "$HERE/trace.jsonl" --custom-dataset-type mooncake_trace
completed "$OUT/aiperf-mooncake.json" 12 176
