"""Simulates decode steps one at a time. tests/laws/test_decode_steps.py compares pdsim with this module."""

from tests.twins.page_pool import NaivePagePool


class NaiveBatch:
    """A batch of requests. Each step gives every request the KV of one token. Before the step, requests whose pages are
    full get a new page.
    """

    def __init__(self, page_size: int, pool: NaivePagePool) -> None:
        self.page_size = page_size
        self.pool = pool
        self.num_tokens: dict[int, int] = {}
        self.tables: dict[int, list[int]] = {}

    def join(self, request_id: int, num_tokens: int) -> None:
        self.num_tokens[request_id] = num_tokens
        self.tables[request_id] = self.pool.allocate(-(-num_tokens // self.page_size))

    def step(self) -> None:
        full = [i for i, table in self.tables.items() if self.num_tokens[i] == len(table) * self.page_size]
        for request_id, page in zip(full, self.pool.allocate(len(full)), strict=True):
            self.tables[request_id].append(page)
        for request_id in self.num_tokens:
            self.num_tokens[request_id] += 1

    def leave(self, request_id: int) -> None:
        del self.num_tokens[request_id]
        self.pool.free(self.tables.pop(request_id))
