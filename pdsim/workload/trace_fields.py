"""The field names under which traces contain the quantities of a request, with their units. All traces of rows are read
with this table.
"""

from collections.abc import Mapping
from typing import Any

from pdsim.dataclass import dataclass

NS, US, MS, S = 1.0, 1e3, 1e6, 1e9
UNITS = {"ns": NS, "us": US, "ms": MS, "s": S}
SAID_BY_VALUE = None
"""Stands in place of a unit for time fields whose name does not imply a unit. The user or the format sets the unit of
these fields; otherwise the unit is inferred from the values.
"""


@dataclass(frozen=True, slots=True)
class Quantity:
    what: str
    """Name of the quantity in messages and in the documentation of formats."""
    names: Mapping[str, float | None]
    """Names of the quantity's field, in the order in which they are tried. For times: each with the length of its unit
    in ns."""


def _counts(what: str, *names: str) -> Quantity:
    return Quantity(what, dict.fromkeys(names))


def _times(what: str, **names: float | None) -> Quantity:
    return Quantity(what, names)


INPUT = _counts(
    "prompt tokens",
    "input_length", "in_tokens", "input_tokens", "ContextTokens", "Request tokens", "num_prefill_tokens",
    "input_sequence_length", "prompt_tokens", "num_prompt_tokens", "prompt_len", "prompt_length", "input_len",
    "input_lens", "input_toks", "prompt_size", "num_input_tokens", "isl", "context_tokens", "request_tokens", "in",
    "gen_ai.usage.input_tokens", "query_length", "prompt_token_count", "input_token_count",
)  # fmt: skip
OUTPUT = _counts(
    "answer tokens",
    "output_length", "out_tokens", "output_tokens", "GeneratedTokens", "Response tokens", "num_decode_tokens",
    "output_sequence_length", "completion_tokens", "generated_tokens", "num_output_tokens", "output_len", "output_lens",
    "output_toks", "token_size", "osl", "response_tokens", "response_length", "out", "gen_ai.usage.output_tokens",
    "num_generated_tokens", "completion_token_count", "output_token_count", "max_completion_tokens", "max_tokens",
    "max_new_tokens",
)  # fmt: skip
LIMITS = ("max_completion_tokens", "max_tokens", "max_new_tokens")
"""Names of the field with the requested limit of output tokens. Read only if a row has no output length."""
ARRIVAL = _times(
    "arrival",
    timestamp=SAID_BY_VALUE, arrival_s=S, arrived_at=S, TIMESTAMP=SAID_BY_VALUE, Timestamp=S, request_start_ns=NS,
    arrival_time_ns=NS, arrival_ns=NS, timestamp_ns=NS, timestamp_ms=MS, arrival_ms=MS, arrival_time_ms=MS,
    timestamp_s=S, arrival_time_s=S, arrival_timestamp=S, arrival_time=SAID_BY_VALUE, start_times=S,
    request_start_time=S, request_received_ms=MS, timestamp_start_unix_ms=MS, inferenceTime=SAID_BY_VALUE,
    created_time=SAID_BY_VALUE, created_at=SAID_BY_VALUE, created=SAID_BY_VALUE, start_time=SAID_BY_VALUE,
    time=SAID_BY_VALUE, arrival=SAID_BY_VALUE, ts=SAID_BY_VALUE, request_time=SAID_BY_VALUE, t=S,
)  # fmt: skip
END = _times("end", request_end_ns=NS, end_time_ns=NS, end_ns=NS, event_time_unix_ms=MS)
DELAY = _times("pause", delay=MS, delay_ms=MS, think_time=S, think_time_s=S, think_time_ms=MS, think_ms=MS)
SESSION = _counts("session", "session_id", "x_correlation_id", "conversation_id")
BLOCKS = _counts("ids of blocks", "hash_ids", "block_hashes", "prefix_hash_ids", "input_sequence_hashes")
BLOCK_TOKENS = _counts("tokens of a block", "block_size", "block_tokens", "hash_block_size", "trace_block_size")
TOKEN_IDS = _counts("token ids", "input_tok_ids", "prompt_token_ids", "input_ids", "token_ids")
IMAGES = _counts("images", "num_images", "NumImages", "image_count", "images", "image")
CLASS = _counts("class", "class", "request_class")
FAILURE = _counts("failure", "error", "errors")

QUANTITIES = (INPUT, OUTPUT, ARRIVAL, END, DELAY, SESSION, BLOCKS, BLOCK_TOKENS, TOKEN_IDS, IMAGES, CLASS, FAILURE)

_QUANTITY_OF = {name: quantity.what for quantity in QUANTITIES for name in quantity.names}
_RANKS = {name: rank for rank, name in enumerate(_QUANTITY_OF)}


def quantities_of(fields: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """Returns field name and value of each quantity that a row has, by the quantity's `what`. If several fields have a
    quantity, the first of its names counts. Fields that are None or empty do not count.
    """
    found: dict[str, tuple[str, Any]] = {}
    for name, value in fields.items():
        what = _QUANTITY_OF.get(name)
        if what is None or value is None or value == "":
            continue
        if what not in found or _RANKS[name] < _RANKS[found[what][0]]:
            found[what] = name, value
    return found
