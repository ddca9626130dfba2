"""Makes scenarios from deployments of SGLang, vLLM, TensorRT-LLM and Dynamo: from scripts, manifests, and values of
Helm charts.
"""
