"""Room for a request, so that one that can never be served is refused at the door and not by an instance."""

from typing import NamedTuple

from pdreal.serve.fields import RefusedError
from pdsim.policy.pages import ReserveDecodeTokens
from pdsim.scenario.schema import Scenario
from pdsim.scenario.servers import DecodeSettings
from pdsim.scenario.yaml_file import ConfigError

_TOKEN_BYTES = 32
"""Bytes in a body, at most: a character is six (\\u003c), an escaped name of a token 18, and a part of a message 27."""
_FIELDS_BYTES = 1 << 16
"""All of a body but its prompt."""


class Room(NamedTuple):
    """Tokens. Where prompt and output share a pool, the prompt counts in whole pages."""

    prompt_tokens: int
    total_tokens: int
    page_size: int = 1
    reserved_tokens: int = 0
    """Tokens of decode's pool that admission keeps free."""

    @classmethod
    def of(cls, scenario: Scenario, context: int) -> "Room":
        """The room of a resolved scenario and a model's context. Pools bind as they bind the requests of a workload.

        Raises ConfigError if there is none.
        """
        page, reserved = scenario.page_size, 0
        if scenario.aggregated is not None:
            total = prompt = (scenario.aggregated.pool_tokens or 0) - page - 1
        else:
            prefill, decode = scenario.pair
            prompt = (prefill.pool_tokens or 0) - 1 - page
            total, reserved = _decode_room(decode, page)
        room = cls(min(prompt, total - 1, context - 1), min(total, context), page, reserved)
        if room.prompt_tokens < 1:
            raise ConfigError(f"no request fits pool_tokens{room.why}")
        return room

    @property
    def body_bytes(self) -> int:
        """The largest body of a request that fits."""
        return _FIELDS_BYTES + _TOKEN_BYTES * self.prompt_tokens

    def check(self, num_prompt_tokens: int, max_tokens: int) -> None:
        """Raises RefusedError."""
        paged = -(-num_prompt_tokens // self.page_size) * self.page_size
        if num_prompt_tokens > self.prompt_tokens or paged + max_tokens > self.total_tokens:
            raise RefusedError(
                f"the prompt has {num_prompt_tokens} tokens and asks for up to {max_tokens} more; there is room "
                f"for {self.prompt_tokens} prompt tokens, and for {self.total_tokens} with the output{self.why}"
            )

    @property
    def why(self) -> str:
        reserved = self.reserved_tokens
        return f", as decode.admission.reserved_tokens keeps {reserved} of decode's pool free" if reserved else ""


def _decode_room(decode: DecodeSettings, page_size: int) -> tuple[int, int]:
    """Tokens with which a request is admitted, and comes back if it is retracted; and those that must stay free."""
    pool = decode.pool_tokens or 0
    if not isinstance(decode.admission, ReserveDecodeTokens):
        return pool + 1, 0
    reserved = decode.admission.reserved_tokens
    return min((pool - reserved) // page_size * page_size + 1, pool), reserved
