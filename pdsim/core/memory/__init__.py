"""The KV of an instance: pages, the radix tree over them, and the tiers behind the GPU."""
