"""Requests through SGLang's own HiRadixCache: python experiments/host-cache/sglang_tree.py SITE > sglang_tree.jsonl

SITE is a folder with the package sglang (0.5.12.post1), as pip installs it. Its trees, locks and policies are the real
code; memory is integers, copies take no time, and everything else of the package is a stub. Needs torch, no GPU.
"""

import importlib
import json
import random
import sys
import time
from importlib.abc import Loader, MetaPathFinder
from importlib.util import spec_from_file_location, spec_from_loader
from itertools import count
from pathlib import Path
from unittest.mock import MagicMock

import torch

SITE = Path(sys.argv[1])
PACKAGE = "sglang.srt.mem_cache"
REAL = ("radix_cache", "hiradix_cache", "evict_policy", "base_prefix_cache", "cache_init_params", "events")


class Stubs(MetaPathFinder, Loader):
    def find_spec(self, name, _path, _target=None):
        if name.partition(".")[0] not in {"sglang", "triton", "zmq", "msgspec"}:
            return None
        if name in [f"{PACKAGE}.{real}" for real in REAL]:
            return spec_from_file_location(name, SITE / f"{name.replace('.', '/')}.py")
        return spec_from_loader(name, self, is_package=True)

    def create_module(self, spec):
        module = MagicMock(name=spec.name)
        module.__path__, module.__spec__, module.__name__ = [], spec, spec.name
        return module

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, Stubs())
base, params, hi, radix = (
    importlib.import_module(f"{PACKAGE}.{name}")
    for name in ("base_prefix_cache", "cache_init_params", "hiradix_cache", "radix_cache")
)
hi.split_node_hash_value = lambda *_: (None, None)
time.monotonic = count(1).__next__


class Pool:
    device = "cpu"

    def __init__(self, size):
        self.free_slots = list(range(size))

    def alloc(self, size):
        if size > len(self.free_slots):
            return None
        taken, self.free_slots = self.free_slots[:size], self.free_slots[size:]
        return torch.tensor(taken, dtype=torch.int64)

    def free(self, slots):
        self.free_slots += slots.tolist()
        return len(slots)


class Controller:
    """What the tree asks of HiCacheController."""

    def __init__(self, gpu, host, write_policy):
        self.mem_pool_device_allocator, self.host, self.write_policy = gpu, host, write_policy
        self.ack_write_queue = []
        self.copied = {"write": 0, "load": 0}
        self.evict_device, self.evict_host = gpu.free, host.free

    def write(self, device_indices, node_id, **_):
        if (slots := self.host.alloc(len(device_indices))) is not None:
            self.copied["write"] += len(slots)
            self.ack_write_queue.append((None, MagicMock(), [node_id]))
        return slots

    def load(self, host_indices, **_):
        if (slots := self.mem_pool_device_allocator.alloc(len(host_indices))) is not None:
            self.copied["load"] += len(slots)
        return slots


class Tree(hi.HiRadixCache):
    def __init__(self, setup):
        page = self.page_size = setup["page"]
        self.enable_storage = self.enable_storage_metrics = self.hicache_storage_pass_prefix_keys = False
        self.ongoing_write_through, self.ongoing_load_back = {}, {}
        self.write_through_threshold = 1 if setup["write"] == "write_through" else 2
        self.load_back_threshold = 1
        self.metrics_collector = None
        self.evictable_host_leaves = set()
        self.gpu, self.host = Pool(page * setup["gpu_pages"]), Pool(page * setup["host_pages"])
        self.cache_controller = Controller(self.gpu, self.host, setup["write"])
        radix.RadixCache.__init__(self, params.CacheInitParams(False, None, self.gpu, page))

    def reset(self):
        radix.RadixCache.reset(self)

    def _get_extra_pools(self):
        return {}

    def _all_reduce_attn_groups(self, *_):
        pass

    def update_eviction_metrics(self, *_):
        pass

    def settle(self):
        """All copies have ended."""
        self.writing_check()
        for node in self.ongoing_load_back.values():
            self.dec_lock_ref(node)
        self.ongoing_load_back.clear()

    def admit(self, ids):
        """As PrefillAdder.add_one_req; None if it does not fit."""
        found = self.match_prefix(base.MatchPrefixParams(key=radix.RadixKey(ids)))
        node, table = found.last_device_node, found.device_indices
        num_new = -(-len(ids) // self.page_size) * self.page_size - len(table)
        self.inc_lock_ref(node)
        if num_new > len(self.gpu.free_slots) + self.evictable_size_:
            self.dec_lock_ref(node)
            return None
        last, hits = node, [len(table), 0]
        if found.host_hit_length:
            asked = base.InitLoadBackParams(found.best_match_node, found.host_hit_length)
            loaded, last = self.init_load_back(asked)
            table, hits[1] = torch.cat([table, loaded]), len(loaded)
        self.inc_lock_ref(last)
        self.dec_lock_ref(node)
        lacking = num_new - hits[1] - len(self.gpu.free_slots)
        if lacking > 0:
            self.evict(base.EvictParams(num_tokens=lacking))
        own = self.gpu.alloc(num_new - hits[1])
        self.settle()
        return {"ids": ids, "node": last, "table": torch.cat([table, own]), "shared": len(table)}, hits

    def insert_whole(self, request):
        ids, table = request["ids"], request["table"]
        whole = len(ids) // self.page_size * self.page_size
        key = radix.RadixKey(ids[:whole])
        known = self.insert(base.InsertParams(key=key, value=table[:whole].clone())).prefix_len
        self.gpu.free(table[request["shared"] : max(known, request["shared"])])
        return key, whole

    def end(self, request):
        """As cache_unfinished_req, then cache_finished_req."""
        key, whole = self.insert_whole(request)
        found = self.match_prefix(base.MatchPrefixParams(key=key))
        self.dec_lock_ref(request["node"])
        self.inc_lock_ref(found.last_device_node)
        table = torch.cat([found.device_indices, request["table"][whole:]])
        request |= {"node": found.last_device_node, "table": table, "shared": max(whole, request["shared"])}
        self.settle()
        self.insert_whole(request)
        self.gpu.free(table[whole:])
        self.dec_lock_ref(request["node"])
        self.settle()


def sequence(seed):
    """Requests that come and end in random order, and what SGLang did for each call."""
    rng = random.Random(seed)
    setup = {
        "write": rng.choice(["write_through", "write_through_selective", "write_back"]),
        "page": rng.choice([1, 2]),
        "gpu_pages": rng.choice([8, 14]),
        "host_pages": rng.choice([16, 24, 60]),  # more than on the GPU, as SGLang wants it
    }
    most, longest = rng.choice([1, 1, 3]), setup["gpu_pages"] * setup["page"] // 2
    tree, requests, calls = Tree(setup), [], []
    for _ in range(50):
        if requests and (len(requests) == most or rng.random() < 0.4):  # noqa: PLR2004
            index = rng.randrange(len(requests))
            tree.end(requests.pop(index))
            what, hits = index, None
        else:
            ids = [rng.randrange(2) for _ in range(rng.randint(1, longest))]
            request, hits = tree.admit(ids) or (None, None)
            requests += [request] if request else []
            what = "".join(map(str, ids))
        copied = tree.cache_controller.copied
        calls.append([what, hits, copied["write"], copied["load"], len(tree.gpu.free_slots), len(tree.host.free_slots)])
    return {**setup, "calls": calls}


if __name__ == "__main__":
    for seed in range(40):
        print(json.dumps(sequence(seed)))
