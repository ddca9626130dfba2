"""KV of a rank: the paged cache, host memory behind it, and the copies and transfers of pages."""
