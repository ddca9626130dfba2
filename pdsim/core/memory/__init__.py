"""The KV memory of an instance: pages, the radix tree that owns cached pages, host memory and storage."""
