"""Transfer of KV from prefill to decode and back: plan, sender, staging ring, receiver."""
