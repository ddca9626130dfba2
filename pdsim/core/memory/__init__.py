"""The KV of an instance: pages, the radix tree over them, and the storage tiers behind the GPU."""
