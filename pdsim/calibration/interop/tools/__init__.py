"""What each tool writes of a run, as a summary of ours. A field that a tool does not report is absent, and never 0.

tool         file                              TPOT is called                  ITL
SGLang       JSON lines of bench_serving       tpot                            gap between tokens
vLLM         JSON of `vllm bench serve`        tpot                            gap between chunks
AIPerf       profile_export_aiperf.json        inter_token_latency             none: its inter_chunk_latency is a list
InferenceX   agg_*.json, one row or an array   tpot, in seconds                gap between chunks
GuideLLM     benchmarks.json, version 2        inter_token_latency_ms          its mean, weighted by tokens
genai-bench  one JSON of a scenario and load   tpot, in seconds                none
DynoSim      JSON of --report-json             tpot                            gap between tokens
"""
