"""KV of a rank: the paged cache, the host memory behind it, and copies and transfers of pages."""
