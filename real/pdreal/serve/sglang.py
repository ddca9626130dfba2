"""SGLang's own /generate: text or token ids in, and in each event all of the answer so far."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from pdreal.serve.fields import WHY, Fields, RefusedError, wanted_of
from pdreal.serve.service import Answer, Generation, Part, Service

_DEFAULT_MAX_TOKENS = 128
NEUTRAL: Mapping[str, Sequence[Any]] = {
    "input_embeds": [],
    "image_data": [[]],
    "audio_data": [[]],
    "video_data": [[]],
    "lora_path": [],
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
        logprobs = fields.integer("top_logprobs_num", 0) if fields.flag("return_logprob") else None
        vocab_size = service.tokenizer.vocab_size
        wanted = wanted_of(params, ["max_new_tokens"], _DEFAULT_MAX_TOKENS, vocab_size, logprobs)
        return Generation(self._prompt(fields, service), wanted, stream=fields.flag("stream"))

    def part(self, answer: Answer, part: Part) -> dict[str, Any]:
        index = {"index": answer.index} if answer.generation.wanted.num_choices > 1 else {}
        return {**self._one(answer), **index}

    def whole(self, answers: Sequence[Answer]) -> Any:
        """The whole answer; a list of several choices."""
        found = [self._one(answer) for answer in answers]
        return found if len(found) > 1 else found[0]

    def _one(self, answer: Answer) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": str(answer.request_id),
            "finish_reason": self._finish_reason(answer),
            "prompt_tokens": answer.num_prompt_tokens,
            "completion_tokens": len(answer.tokens),
            "cached_tokens": answer.num_cached_tokens,
            "e2e_latency": time.monotonic() - answer.began_s,
        }
        if answer.sampling.num_logprobs is not None:
            decode = answer.service.tokenizer.decode
            made = list(zip(answer.tokens, answer.logprobs, strict=False))
            meta["output_token_logprobs"] = [[own, token, decode([token])] for token, (own, _) in made]
            meta["output_top_logprobs"] = [
                [[value, token, decode([token])] for token, value in tops] for _, (_, tops) in made
            ]
        return {"text": answer.text, "output_ids": answer.tokens, "meta_info": meta}

    def behind(self, answer: Answer) -> list[dict[str, Any]]:
        is_told = answer.finish_reason != "stop" or answer.matched is not None
        return [] if is_told else [self.part(answer, Part("", len(answer.tokens)))]

    def closing(self, answers: Sequence[Answer]) -> list[dict[str, Any]]:
        return []

    def _prompt(self, fields: Fields, service: Service) -> list[int]:
        if (fields.get("text") is None) == (fields.get("input_ids") is None):
            raise RefusedError("a request needs text or input_ids, and not both")
        if fields.get("text") is None:
            return fields.tokens("input_ids", service.tokenizer.vocab_size)
        return service.tokenizer.encode(fields.text("text", ""))

    def _finish_reason(self, answer: Answer) -> dict[str, Any] | None:
        match answer.finish_reason:
            case "length":
                return {"type": "length", "length": answer.sampling.max_tokens}
            case "stop":
                return {"type": "stop", "matched": answer.matched or answer.tokens[-1]}
        return None
