"""Reads deployments of SGLang, vLLM and Dynamo as scenarios: scripts, manifests and values of charts."""
