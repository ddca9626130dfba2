"""Instances that decide as vLLM's scheduler, where SGLang's decides otherwise."""
