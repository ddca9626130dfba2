"""Makes scenarios of deployments of SGLang, vLLM, TensorRT-LLM and Dynamo: scripts, manifests, and values of Helm
charts.
"""
