"""SGLang's own /generate: text or token ids in, and in each event all of the answer so far."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from pdreal.serve.fields import WHY, Fields, RefusedError, sampling_of
from pdreal.serve.service import Answer, Generation, Service

_DEFAULT_MAX_TOKENS = 128
NEUTRAL: Mapping[str, Sequence[Any]] = {
    "input_embeds": [],
    "image_data": [[]],
    "audio_data": [[]],
    "video_data": [[]],
    "lora_path": [],
    "return_logprob": [False],
    "top_logprobs_num": [0],
    "token_ids_logprob": [],
    "return_hidden_states": [False],
    "return_routed_experts": [False],
    "session_params": [],
}
"""Fields that ask for more than an answer of text, and the values that do not; null never does."""


class Generate:
    """/generate"""

    def read(self, fields: Fields, service: Service) -> Generation:
        fields.allow_only(NEUTRAL, WHY)
        params = fields.section("sampling_params")
        sampling = sampling_of(params, ["max_new_tokens"], _DEFAULT_MAX_TOKENS, service.tokenizer.vocab_size)
        return Generation(self._prompt(fields, service), sampling, stream=fields.flag("stream"))

    def part(self, answer: Answer, tokens: Sequence[int]) -> dict[str, Any]:
        return self.whole(answer)

    def whole(self, answer: Answer) -> dict[str, Any]:
        meta = {
            "id": str(answer.request_id),
            "finish_reason": self._finish_reason(answer),
            "prompt_tokens": answer.num_prompt_tokens,
            "completion_tokens": len(answer.tokens),
            "cached_tokens": answer.num_cached_tokens,
            "e2e_latency": time.monotonic() - answer.began_s,
        }
        return {"text": answer.text, "output_ids": answer.tokens, "meta_info": meta}

    def behind(self, answer: Answer) -> list[dict[str, Any]]:
        return [self.whole(answer)] if answer.finish_reason == "stop" else []

    def _prompt(self, fields: Fields, service: Service) -> list[int]:
        if (fields.get("text") is None) == (fields.get("input_ids") is None):
            raise RefusedError("a request needs text or input_ids, and not both")
        if fields.get("text") is None:
            return fields.tokens("input_ids", service.tokenizer.vocab_size)
        return service.tokenizer.encode(fields.text("text", ""))

    def _finish_reason(self, answer: Answer) -> dict[str, Any] | None:
        match answer.finish_reason:
            case "length":
                return {"type": "length", "length": answer.generation.sampling.max_tokens}
            case "stop":
                return {"type": "stop", "matched": answer.tokens[-1]}
        return None
