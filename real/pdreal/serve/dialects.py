"""Requests and answers of three HTTP APIs: OpenAI's completions and chat completions, and SGLang's /generate.

Some fields ask for features that real mode lacks, such as tools. Such a field is refused, unless its value asks for
nothing. Unknown fields are ignored.
"""

import time
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from pdreal.control.refused import RefusedError
from pdreal.serve.fields import WHY, Fields, answer_settings
from pdreal.serve.service import Answer, Generation, Part, Service

_DEFAULT_MAX_TOKENS = 16
_DEFAULT_MAX_CHAT_TOKENS = 128

_OPENAI_NEUTRAL: Mapping[str, Sequence[Any]] = {
    "echo": [False],
    "prompt_logprobs": [],
    "suffix": [""],
    "prompt_embeds": [],
    "truncate_prompt_tokens": [],
    "tools": [[]],
    "tool_choice": ["none", "auto"],
    "functions": [[]],
    "function_call": ["none", "auto"],
    "response_format": [{"type": "text"}],
    "structured_outputs": [],
    "guided_json": [],
    "guided_regex": [],
    "guided_choice": [],
    "guided_grammar": [],
    "modalities": [["text"]],
    "audio": [],
    "chat_template": [],
    "documents": [[]],
    "add_generation_prompt": [True],
    "continue_final_message": [False],
    "lora_path": [],
    "return_hidden_states": [False],
}
"""Fields for features that real mode lacks. For each: the values that switch the feature off, which are accepted. null
is always accepted.
"""


class Completions:
    """OpenAI's endpoint /v1/completions."""

    def read(self, fields: Fields, service: Service) -> Generation:
        prompt = self._prompt(fields, service)
        logprobs = None if fields.get("logprobs") in (None, False) else fields.integer("logprobs", 0)
        return _generation(fields, service, prompt, ["max_tokens"], _DEFAULT_MAX_TOKENS, logprobs)

    def part(self, answer: Answer, part: Part) -> dict[str, Any]:
        return self._object([answer], part.text, part.first_token)

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        return {**self._object(answers), "usage": _usage(answers)}

    def _prompt(self, fields: Fields, service: Service) -> list[int]:
        """Returns the prompt's token ids. The body has a text, token ids, or a list with one of them."""
        prompt = fields.get("prompt")
        if isinstance(prompt, list) and any(isinstance(part, str | list) for part in prompt):
            if len(prompt) > 1:
                raise fields.refused("prompt", f"has {len(prompt)} prompts; send one prompt per request")
            fields = fields.having("prompt", prompt[0])
        if isinstance(fields.get("prompt"), list):
            return fields.tokens("prompt", service.tokenizer.vocab_size)
        return service.tokenizer.encode(fields.text("prompt", ""))

    def _object(self, answers: Sequence[Answer], text: str | None = None, first_token: int = 0) -> dict[str, Any]:
        choices = [
            {
                "index": answer.index,
                "text": answer.text if text is None else text,
                "logprobs": self._logprobs(answer, first_token),
                "finish_reason": answer.finish_reason,
            }
            for answer in answers
        ]
        return _envelope(answers[0], "cmpl", "text_completion", choices)

    def _logprobs(self, answer: Answer, first_token: int) -> dict[str, Any] | None:
        if answer.sampling.num_logprobs is None:
            return None
        decode = answer.service.tokenizer.decode
        spelled = [decode([token]) for token in answer.tokens]
        offsets = [*accumulate(map(len, spelled), initial=0)][:-1]
        logprobs = answer.logprobs[: len(answer.tokens)]
        return {
            "tokens": spelled[first_token:],
            "token_logprobs": [own for own, _ in logprobs[first_token:]],
            "top_logprobs": [{decode([token]): value for token, value in tops} for _, tops in logprobs[first_token:]],
            "text_offset": offsets[first_token:],
        }


class ChatCompletions:
    """OpenAI's endpoint /v1/chat/completions."""

    def read(self, fields: Fields, service: Service) -> Generation:
        prompt = service.tokenizer.chat(_messages(fields))
        names = ["max_completion_tokens", "max_tokens"]
        logprobs = fields.integer("top_logprobs", 0) if fields.flag("logprobs") else None
        return _generation(fields, service, prompt, names, _DEFAULT_MAX_CHAT_TOKENS, logprobs)

    def part(self, answer: Answer, part: Part) -> dict[str, Any]:
        delta = {"content": part.text}
        if part.first_token == 0:
            delta = {"role": "assistant", **delta}
        return self._object("chat.completion.chunk", [(answer, {"delta": delta}, part.first_token)])

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        said = [(answer, {"message": {"role": "assistant", "content": answer.text}}, 0) for answer in answers]
        return {**self._object("chat.completion", said), "usage": _usage(answers)}

    def _object(self, kind: str, said: Sequence[tuple[Answer, Mapping[str, Any], int]]) -> dict[str, Any]:
        choices = [
            {
                "index": answer.index,
                **content,
                "logprobs": self._logprobs(answer, first_token),
                "finish_reason": answer.finish_reason,
            }
            for answer, content, first_token in said
        ]
        return _envelope(said[0][0], "chatcmpl", kind, choices)

    def _logprobs(self, answer: Answer, first_token: int) -> dict[str, Any] | None:
        if answer.sampling.num_logprobs is None:
            return None

        def entry(token: int, value: float) -> dict[str, Any]:
            text = answer.service.tokenizer.decode([token])
            return {"token": text, "logprob": value, "bytes": list(text.encode())}

        made = list(zip(answer.tokens, answer.logprobs, strict=False))[first_token:]
        return {
            "content": [
                {**entry(token, own), "top_logprobs": [entry(*top) for top in tops]} for token, (own, tops) in made
            ]
        }


def _messages(fields: Fields) -> list[tuple[str, str]]:
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise fields.refused("messages", "must be a list of messages, at least one")
    found = []
    for number, message in enumerate(messages):
        if not isinstance(message, dict):
            raise fields.refused(f"messages[{number}]", "must be an object with role and content")
        inner = Fields(message, f"messages[{number}].")
        found.append((inner.text("role", "user"), _content(inner)))
    return found


def _content(message: Fields) -> str:
    """Returns the content of a message: a text, or a list of parts that are texts."""
    parts = message.get("content")
    if not isinstance(parts, list):
        return message.text("content", "")
    if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        raise message.refused("content", 'has a part that is not text; parts must be {"type": "text", "text": ...}')
    return "".join(part["text"] for part in parts)


def _generation(
    fields: Fields,
    service: Service,
    prompt: list[int],
    limits: Sequence[str],
    default: int,
    num_logprobs: int | None,
) -> Generation:
    fields.allow_only(_OPENAI_NEUTRAL, WHY)
    options = fields.section("stream_options")
    return Generation(
        prompt,
        answer_settings(fields, limits, default, service.tokenizer.vocab_size, num_logprobs),
        stream=fields.flag("stream"),
        closing_usage=options.flag("include_usage"),
        running_usage=options.flag("continuous_usage_stats"),
    )


def _envelope(answer: Answer, prefix: str, kind: str, choices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    event = {
        "id": f"{prefix}-{answer.request_id}",
        "object": kind,
        "created": answer.created_s,
        "model": answer.service.model_name,
        "choices": choices,
    }
    return {**event, "usage": _usage([answer])} if answer.generation.running_usage else event


def _usage(answers: Sequence[Answer]) -> dict[str, Any]:
    prompt, output = answers[0].num_prompt_tokens, sum(len(answer.tokens) for answer in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": answers[0].num_cached_tokens},
    }


_SGLANG_NEUTRAL: Mapping[str, Sequence[Any]] = {
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
"""Fields for features that real mode lacks. For each: the values that switch the feature off, which are accepted. null
is always accepted.
"""


class Generate:
    """SGLang's endpoint /generate."""

    def read(self, fields: Fields, service: Service) -> Generation:
        fields.allow_only(_SGLANG_NEUTRAL, WHY)
        params = fields.section("sampling_params")
        logprobs = fields.integer("top_logprobs_num", 0) if fields.flag("return_logprob") else None
        vocab_size = service.tokenizer.vocab_size
        settings = answer_settings(params, ["max_new_tokens"], _DEFAULT_MAX_CHAT_TOKENS, vocab_size, logprobs)
        return Generation(self._prompt(fields, service), settings, stream=fields.flag("stream"))

    def part(self, answer: Answer, part: Part) -> dict[str, Any]:
        index = {"index": answer.index} if answer.generation.settings.num_choices > 1 else {}
        return {**self._one(answer), **index}

    def whole(self, answers: Sequence[Answer]) -> Any:
        """Returns the answer to a request as JSON data: an object, or a list of objects if the client asked for several
        answers.
        """
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


Dialect = Completions | ChatCompletions | Generate


def last_events(dialect: Dialect, answer: Answer) -> list[dict[str, Any]]:
    """Returns a last event with the finish reason, if this was not known when the choice's last token was sent.
    Otherwise returns no event, because some clients fail on an event without tokens.
    """
    ended_early = answer.finish_reason == "stop" and answer.matched is None
    return [dialect.part(answer, Part("", len(answer.tokens)))] if ended_early else []


def closing_events(dialect: Dialect, answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """Returns the stream's last event, with token counts, which is sent after all choices. Returns no event unless the
    request asks for token counts.
    """
    if not answers[0].generation.closing_usage:
        return []
    return [{**dialect.part(answers[0], Part("", 1)), "choices": [], "usage": _usage(answers)}]
