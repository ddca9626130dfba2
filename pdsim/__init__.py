"""Simulate prefill/decode disaggregated LLM serving with the scheduler that real hardware runs."""
