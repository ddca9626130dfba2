"""Durations from first principles: bytes divided by bandwidth, and operations divided by rate. Both rates are shares of
the nominal rates.
"""

from functools import cache, partial
from random import Random
from typing import TYPE_CHECKING, Any

from pdsim.core.messages import PrefillStep
from pdsim.cost.collectives import NO_GATHERS, AllReduces, Collectives, LayerSums, Nccl, RankSums
from pdsim.cost.host_traffic import host_traffic
from pdsim.cost.model import DecodeLine, Terms, tiled, window_pairs
from pdsim.system.memory import Layout
from pdsim.system.model import Experts, ModelSpec

if TYPE_CHECKING:
    from pdsim.cost.settings import Roofline

_STEEPEST = 8.0
"""Largest exponent of a power law that balanced_skew tries. With this exponent, one expert gets 99.6 % of tokens."""
_ROUNDS = 50


class RooflineModel:
    def __init__(
        self, settings: "Roofline", layout: Layout, nccl: Nccl | None = None, *, hosts_slower: float = 1
    ) -> None:
        """nccl: times of NCCL's collectives. None: all collectives are timed as the engine's all-reduces. hosts_slower:
        factor on the times of traffic between hosts.
        """
        spec, gpu, tp = layout.model, layout.gpu, layout.tp
        self._settings = settings
        self._spec = spec
        self._flops_per_pair = spec.attention.flops_per_pair
        self._experts = ExpertTimes(settings, layout) if settings.expert_efficiency and spec.experts else None
        rate = gpu.flops_for(spec.weight_dtype)
        slower = spec.wide_flops_per_token * (rate / gpu.flops_for("bf16") - 1)
        """FLOPs per token that are added because all products in _flops_per_token are timed at the rate of
        weight_dtype, while products with the layers' bf16 weights are slower. The added FLOPs take as long as these
        slower products take in addition.
        """
        self._flops_per_token = spec.flops_per_token + slower - (spec.expert_flops_per_token if self._experts else 0)
        self._routed_flops_per_token = 0 if self._experts else spec.expert_flops_per_token
        """FLOPs per token of routed experts, if they are timed together with the other products; else 0."""
        self._shared_bytes_read = spec.shared_bytes_read
        self._matrix_flops = tp * rate * settings.matrix_efficiency
        """FLOP/s of matrix products on tp GPUs, one context-parallel group. The groups share the tokens of prompts."""
        self._attention_flops = tp * gpu.flops_for("bf16") * settings.attention_efficiency
        self._memory_bandwidth = tp * gpu.memory_bandwidth * settings.memory_efficiency
        self._activation_ns = _activation_ns(settings, layout)
        kv = settings.fp8_kv_bandwidth if layout.kv_dtype == "fp8" else settings.kv_bandwidth
        token_ns = 1e9 * layout.read_token_bytes / gpu.memory_bandwidth
        self._window_share, self._window_tokens = spec.attention.window_share, spec.attention.window_tokens
        windows_ns = self._window_share * self._window_tokens * token_ns / kv
        token_ns *= 1 - self._window_share
        self._distinct_token_ns = token_ns / max(kv, settings.memory_efficiency)
        self._context_token_ns = token_ns / kv - self._distinct_token_ns
        reductions = partial(
            AllReduces, layout, fixed_ns=settings.all_reduce_ns, link_efficiency=settings.link_efficiency, nccl=nccl
        )
        self._layer_sums = LayerSums(layout, reductions) if layout.tp * layout.cp > 1 else None
        """Times of adding up layers' outputs over GPUs. None: one GPU computes whole layers, so none are added up."""
        self._divides = layout.cp > 1 or layout.dcp > 1
        collectives = Collectives(layout, settings.all_reduce_ns, settings.link_efficiency)
        self._prompts = collectives.of_prompts()
        self._queries = collectives.of_queries()
        self._contexts = collectives.of_contexts()
        self._dp, self._cp = layout.dp, layout.cp
        self._busiest = 1 + layout.expert_skew
        """Number of tokens that the experts of the busiest GPU compute, divided by the mean of all GPUs."""
        per_read = 1 / layout.num_verified_tokens  # all tokens that a step verifies of a request share one read
        state_ns = (1 + per_read) * 1e9 * layout.state_bytes / (gpu.memory_bandwidth * settings.memory_efficiency)
        self._state_ns = state_ns + windows_ns * per_read  # a token's, however long its request is
        num_expert_layers = 0 if spec.experts is None else spec.experts.num_layers
        self._between_hosts = host_traffic(layout, hosts_slower)
        self._exchange_ns = self._exchange_token_ns = 0.0
        self._sums: RankSums | None = None
        """Times of giving all data-parallel ranks' tokens to each GPU. None: no GPU gets the tokens of all ranks."""
        if layout.dp > 1 and self._between_hosts is None and not layout.sends_to_experts:
            self._sums = RankSums(
                layout,
                num_expert_layers,
                reductions(num_gpus=layout.tp * layout.dp),
                _activation_bandwidth(settings, layout),
            )
        elif layout.sends_to_experts and self._between_hosts is None:
            self._exchange_ns = 2 * num_expert_layers * settings.expert_exchange_ns
            self._exchange_token_ns = num_expert_layers * self._exchange_bytes_ns(layout)
        self._launch_ns = (
            settings.prefill_layer_ns * spec.num_layers + settings.expert_prefill_layer_ns * num_expert_layers
        )

    def prefill_ns(self, step: PrefillStep, start_ns: int, expert_tokens: float | None = None) -> int:
        num_tokens, num_groups = step.num_tokens, self._num_sharing(step)
        shared = num_tokens if expert_tokens is None else expert_tokens
        routed = shared * self._busiest
        work_ns = self._matrices_ns(num_tokens, routed, num_groups) + self._attention_ns(step, num_groups)
        work_ns += self._layer_sums_ns(num_tokens, num_groups) + self._activation_ns * num_tokens / num_groups
        if self._sums is not None:
            work_ns += self._sums.prefill_ns(shared)
        if self._divides:
            work_ns += self._gathering_ns(step, num_groups)
        if self._experts is not None:
            work_ns += self._experts.ns(routed)
        if self._between_hosts is not None:
            work_ns += self._between_hosts.prefill_ns(num_tokens, routed, work_ns)
        return round(max(work_ns, self._launch_ns) + self._overhead_ns(step))

    def prefill_terms(self, step: PrefillStep) -> Terms:
        num_tokens, num_groups = step.num_tokens, self._num_sharing(step)
        routed = num_tokens * self._busiest
        work = {
            "matrices": self._matrices_ns(num_tokens, routed, num_groups),
            **self._expert_terms(routed),
            "attention": self._attention_ns(step, num_groups),
            "activations": self._activation_ns * num_tokens / num_groups,
            "all-reduce": self._layer_sums_ns(num_tokens, num_groups),
        }
        if self._sums is not None:
            work["all-reduce"] += self._sums.prefill_ns(num_tokens)
        if self._divides:
            work["gathering"] = self._gathering_ns(step, num_groups)
        if self._between_hosts is not None:
            work["between hosts"] = self._between_hosts.prefill_ns(num_tokens, routed, sum(work.values()))
        beyond_ns = max(0.0, self._launch_ns - sum(work.values()))
        return {**work, "launches beyond that": beyond_ns, "overhead": self._overhead_ns(step)}

    def _num_sharing(self, step: PrefillStep) -> int:
        """Number of groups of GPUs that share the tokens of a forward by context parallelism. 1: there is only one
        group, or each group computes all tokens, because the forward also decodes, or has a chunk of fewer than 2 * cp
        tokens (SGLang 0.5.23, layers/cp/zigzag.py:109).
        """
        if self._cp == 1 or step.num_decode_tokens:
            return 1
        return self._cp if min([chunk.num_tokens for chunk in step.chunks]) >= 2 * self._cp else 1

    def _attention_ns(self, step: PrefillStep, num_groups: int) -> float:
        pairs = sum([chunk.num_pairs for chunk in step.chunks])
        if self._window_share:
            nearby = sum([window_pairs(chunk, self._window_tokens) for chunk in step.chunks])
            pairs += self._window_share * (nearby - pairs)
        return 1e9 * self._flops_per_pair * pairs / (self._attention_flops * num_groups)

    def _overhead_ns(self, step: PrefillStep) -> float:
        settings = self._settings
        further_ns = settings.further_prompt_overhead_ns * (len(step.chunks) - 1)
        return settings.step_overhead_ns + settings.prompt_overhead_ns + further_ns

    def decode_line(self, num_requests: int, expert_tokens: float | None = None) -> DecodeLine:
        base_ns = sum(self.decode_terms(num_requests, expert_tokens).values())
        return DecodeLine.of_ns(base_ns, self._context_token_ns, self._distinct_token_ns)

    def decode_terms(self, num_requests: int, expert_tokens: float | None = None) -> Terms:
        shared = num_requests if expert_tokens is None else expert_tokens
        routed = shared * self._busiest
        terms = {
            "matrices": self._matrices_ns(num_requests, routed, 1),
            **self._expert_terms(routed),
            "all-reduce": self._layer_sums_ns(num_requests, 1),
            "state": num_requests * self._state_ns,
            "layers": self._settings.decode_layer_ns * self._spec.num_layers,
            "overhead": self._settings.step_overhead_ns,
        }
        if self._divides:
            terms["gathering"] = self._queries.ns(num_requests)
        if self._sums is not None:
            terms["all-reduce"] += self._sums.decode_ns(shared)
        if self._between_hosts is not None:
            terms["between hosts"] = self._between_hosts.decode_ns(num_requests, routed, sum(terms.values()))
        return terms

    def _matrices_ns(self, num_tokens: int, routed: float, num_groups: int) -> float:
        computed = routed * num_groups / self._cp  # all groups share the experts
        num_rows = -(-num_tokens // num_groups)
        if self._settings.matrix_tile_tokens > 1:
            num_rows = tiled(num_rows, self._settings.matrix_tile_tokens)
        operations = self._flops_per_token * (num_rows * num_groups)
        operations += self._routed_flops_per_token * (computed - num_tokens)
        compute = operations / (self._matrix_flops * num_groups)
        bytes_read = self._shared_bytes_read
        if self._routed_flops_per_token:
            bytes_read += self._spec.expert_bytes_read(routed * self._dp) / (self._dp * self._cp)
        read = bytes_read / self._memory_bandwidth
        return 1e9 * max(compute, read) + self._exchange_ns + routed * self._exchange_token_ns

    def _layer_sums_ns(self, num_tokens: int, num_groups: int) -> float:
        return 0.0 if self._layer_sums is None else self._layer_sums.ns(num_tokens, num_groups)

    def _expert_terms(self, num_tokens: float) -> Terms:
        return {} if self._experts is None else {"experts": self._experts.ns(num_tokens)}

    def _gathering_ns(self, step: PrefillStep, num_groups: int) -> float:
        """Time in ns of a prefill forward's collectives of context parallelism and of decode context parallelism (DCP).
        num_groups: number of context-parallel groups that share the forward's tokens. With several groups, keys and
        values of all tokens are gathered, and hidden states before and after the experts.

        With DCP, GPUs exchange queries and attention outputs of running requests. For prompts with a context, GPUs
        gather the context's latents or, without latent attention, exchange the prompts' queries and attention outputs.
        """
        contexts = [chunk for chunk in step.chunks if chunk.num_context_tokens]
        merged = step.num_decode_tokens
        if self._contexts is NO_GATHERS:
            merged += sum([chunk.num_tokens for chunk in contexts])
        context_ns = self._contexts.ns(sum([chunk.num_context_tokens for chunk in contexts]))
        prompts_ns = self._prompts.ns(step.num_tokens) if num_groups > 1 else 0.0
        return prompts_ns + self._queries.ns(merged) + context_ns

    def _exchange_bytes_ns(self, layout: Layout) -> float:
        """Time in ns per token and layer in which tokens travel to the GPUs of their experts in fp8, and the results
        travel back in bf16. A token is sent once to each other GPU that holds at least one of its experts. 0: the model
        has no experts, or expert_exchange_efficiency is None.
        """
        experts, efficiency = layout.model.experts, self._settings.expert_exchange_efficiency
        if experts is None or efficiency is None:
            return 0.0
        num_gpus = layout.tp * layout.dp
        num_copies = (num_gpus - 1) * (1 - (1 - 1 / num_gpus) ** experts.num_active)
        rate = layout.tp * layout.gpu.nvlink_bandwidth * efficiency
        return 1e9 * 3 * layout.model.hidden_size * num_copies / rate


def _activation_ns(settings: "Roofline", layout: Layout) -> float:
    """Time in ns per token of the kernels between matrix products, on each of the tp GPUs that compute the token. 0:
    activation_efficiency is None.
    """
    bandwidth = _activation_bandwidth(settings, layout)
    return 1e9 * activation_bytes(layout.model, layout.tp) / bandwidth if bandwidth else 0.0


def _activation_bandwidth(settings: "Roofline", layout: Layout) -> float | None:
    """Bytes per second at which kernels read and write activations. None: they take no time."""
    efficiency = settings.activation_efficiency
    return None if efficiency is None else layout.gpu.memory_bandwidth * efficiency


def activation_bytes(spec: ModelSpec, tp: int) -> float:
    """Bytes of activations per token that kernels between matrix products read and write on one GPU of an instance, in
    all layers. Attention and all kernels of routed experts are not included.

    In each layer, two norms read and write hidden state and residual in bf16, on every GPU. Rotation and activation
    function read the outputs of matrix products or write their inputs. These inputs and outputs are divided among tp
    GPUs. If weights are fp8 or fp4, each product's input is also read in bf16 and written in 1 byte per element.
    """
    hidden = spec.num_layers * spec.hidden_size
    widths = (spec.flops_per_token - spec.expert_flops_per_token) / 2 / spec.hidden_size
    if spec.weight_dtype in {"fp8", "fp4"}:
        return 22 * hidden + 3 * widths / tp
    return 16 * hidden + 2 * widths / tp


def expert_activation_bytes(width: Any, intermediate_size: Any) -> Any:
    """Bytes of bf16 activations that a GPU reads and writes for one token in one expert. width: number of elements of
    the expert's input. intermediate_size: number of elements of the GPU's part of the expert's inner width.

    Three copies of `width` elements move: the input is gathered, and the output is written and read. Six copies of
    `intermediate_size` elements move: gate, up and the activation's result are written and read.
    """
    return 2 * (3 * width + 6 * intermediate_size)


class ExpertTimes:
    """Times of routed experts. Each expert gets few tokens, so reading weights and computing do not overlap."""

    def __init__(self, settings: "Roofline", layout: Layout) -> None:
        spec, gpu, tp = layout.model, layout.gpu, layout.tp * layout.cp
        assert spec.experts is not None
        assert settings.expert_efficiency is not None
        self._spec = spec
        self._dp = layout.dp
        self._num_holders = layout.num_server_gpus if layout.has_whole_experts else 1
        """Number of GPUs that hold whole experts; 1: all GPUs share each expert. A forward waits for the GPU that reads
        most experts."""
        self._token_ns = 1e9 * spec.expert_flops_per_token / (tp * gpu.flops_for(spec.weight_dtypes[-1]))
        self._token_ns /= settings.expert_efficiency
        self._token_ns += spec.experts.num_layers * layout.dp * settings.expert_token_ns
        self._byte_ns = 1e9 / (tp * gpu.memory_bandwidth * settings.expert_memory_efficiency)
        self._token_ns += spec.experts.num_layers * self._activation_bytes(layout, spec.experts) * self._byte_ns
        self._layers_ns = spec.experts.num_layers * settings.expert_layer_ns

    @staticmethod
    def _activation_bytes(layout: Layout, experts: Experts) -> float:
        """Bytes of activations that all GPUs of a server together read and write in the routed experts, for one token
        in one layer.
        """
        num_parts = 1 if layout.has_whole_experts else layout.num_server_gpus
        width = experts.input_size or layout.model.hidden_size
        each: float = expert_activation_bytes(width, experts.intermediate_size / num_parts)
        return each * experts.num_active * num_parts

    def ns(self, num_tokens: float) -> float:
        """Time in ns of the experts in one forward. num_tokens: mean number of tokens of the server's data-parallel
        instances, times the busiest GPU's load relative to the mean load.
        """
        num_bytes = self._spec.expert_bytes_read(num_tokens * self._dp, self._num_holders) / self._dp
        return self._layers_ns + self._token_ns * num_tokens + self._byte_ns * num_bytes


@cache
def balanced_skew(skew: float, num_experts: int, num_redundant: int, num_gpus: int) -> float:
    """Load of the busiest GPU relative to the mean load, minus 1, after a balancer (DeepSeek's EPLB) has copied the
    most loaded experts and placed all experts on GPUs. skew: the busiest GPU's load in the same measure before
    balancing. Popularities of experts are assumed to follow a power law, fitted so that GPUs with experts in checkpoint
    order have `skew`.
    """
    if skew == 0 or num_redundant >= num_experts * (num_gpus - 1):
        return 0.0
    low, high = 0.0, _STEEPEST
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        as_stored = loads(popularities(middle, num_experts), num_gpus)
        low, high = (low, middle) if skew_of(as_stored) > skew else (middle, high)
    balanced = balance(popularities(high, num_experts), num_redundant, num_gpus)
    return min(skew, skew_of(balanced))


def popularities(exponent: float, num_experts: int) -> list[float]:
    """For each expert, in checkpoint order: a number in proportion to the tokens that choose it. The numbers follow a
    power law with this exponent, and are shuffled with a fixed seed.
    """
    popular = [(1 + i) ** -exponent for i in range(num_experts)]
    Random(0).shuffle(popular)
    return popular


def loads(popular: list[float], num_gpus: int) -> list[float]:
    """Load of each GPU, if each GPU holds a block of consecutive experts. popular: load of each expert, in any unit."""
    size = len(popular) // num_gpus
    return [sum(popular[gpu * size : (gpu + 1) * size]) for gpu in range(num_gpus)]


def balance(popular: list[float], num_redundant: int, num_gpus: int) -> list[float]:
    """Load of each GPU after balancing with redundant experts.

    popular: load of each expert, in any unit. Each redundant expert copies the expert with the largest load per copy.
    Then each copy of an expert, the most loaded first, goes to the least loaded GPU with room.
    """
    copies = [1] * len(popular)
    for _ in range(num_redundant):
        most = max(range(len(popular)), key=lambda i: popular[i] / copies[i])
        copies[most] += 1
    parts = sorted((load / n for load, n in zip(popular, copies, strict=True) for _ in range(n)), reverse=True)
    room = len(parts) // num_gpus
    dealt: list[list[float]] = [[] for _ in range(num_gpus)]
    for part in parts:
        min((gpu for gpu in dealt if len(gpu) < room), key=sum).append(part)
    return [sum(gpu) for gpu in dealt]


def skew_of(of_gpus: list[float]) -> float:
    """Load of the busiest GPU relative to the mean, minus 1. of_gpus: load of each GPU, in any unit. Rounding never
    makes the result negative.
    """
    return max(0.0, max(of_gpus) * len(of_gpus) / sum(of_gpus) - 1)
