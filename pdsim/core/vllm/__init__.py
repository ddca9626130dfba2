"""Instances that follow vLLM's scheduler where it differs from SGLang's."""
