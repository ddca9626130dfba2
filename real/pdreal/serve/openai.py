"""OpenAI's completions and chat completions: what of them is served, and how answers are written.

Tokens are greedy: settings of sampling are accepted and change nothing. A field that asks for something that there is
none of, such as several choices or tools, is refused unless its value asks for nothing. Unknown fields are ignored.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pdreal.serve.fields import WHY, Fields, sampling_of
from pdreal.serve.service import Answer, Generation, Service

_DEFAULT_MAX_TOKENS = 16
_DEFAULT_MAX_CHAT_TOKENS = 128

NEUTRAL: Mapping[str, Sequence[Any]] = {
    "echo": [False],
    "logprobs": [False],
    "top_logprobs": [0],
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
"""Fields that ask for more than an answer of text, and the values that do not; null never does."""


class Completions:
    """/v1/completions"""

    def read(self, fields: Fields, service: Service) -> Generation:
        return _generation(fields, service, self._prompt(fields, service), ["max_tokens"], _DEFAULT_MAX_TOKENS)

    def part(self, answer: Answer, tokens: Sequence[int]) -> dict[str, Any]:
        return self._object(answer, answer.service.tokenizer.decode(tokens))

    def whole(self, answer: Answer) -> dict[str, Any]:
        return {**self._object(answer, answer.text), "usage": _usage(answer)}

    def behind(self, answer: Answer) -> list[dict[str, Any]]:
        return _behind(answer, self.part(answer, []))

    def _prompt(self, fields: Fields, service: Service) -> list[int]:
        """A text or token ids; the same as the only item of a list."""
        prompt = fields.get("prompt")
        if isinstance(prompt, list) and any(isinstance(part, str | list) for part in prompt):
            if len(prompt) > 1:
                raise fields.refused("prompt", f"has {len(prompt)} prompts: send one a request")
            fields = fields.having("prompt", prompt[0])
        if isinstance(fields.get("prompt"), list):
            return fields.tokens("prompt", service.tokenizer.vocab_size)
        return service.tokenizer.encode(fields.text("prompt", ""))

    def _object(self, answer: Answer, text: str) -> dict[str, Any]:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": answer.finish_reason}
        return _envelope(answer, "cmpl", "text_completion", choice)


class ChatCompletions:
    """/v1/chat/completions"""

    def read(self, fields: Fields, service: Service) -> Generation:
        prompt = service.tokenizer.chat(_messages(fields))
        names = ["max_completion_tokens", "max_tokens"]
        return _generation(fields, service, prompt, names, _DEFAULT_MAX_CHAT_TOKENS)

    def part(self, answer: Answer, tokens: Sequence[int]) -> dict[str, Any]:
        delta = {"content": answer.service.tokenizer.decode(tokens)}
        if len(tokens) == len(answer.tokens):
            delta = {"role": "assistant", **delta}
        return self._object(answer, "chat.completion.chunk", {"delta": delta})

    def whole(self, answer: Answer) -> dict[str, Any]:
        message = {"role": "assistant", "content": answer.text}
        return {**self._object(answer, "chat.completion", {"message": message}), "usage": _usage(answer)}

    def behind(self, answer: Answer) -> list[dict[str, Any]]:
        return _behind(answer, self.part(answer, []))

    def _object(self, answer: Answer, kind: str, content: Mapping[str, Any]) -> dict[str, Any]:
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": answer.finish_reason}
        return _envelope(answer, "chatcmpl", kind, choice)


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
    """A text, or a list of parts that are texts."""
    parts = message.get("content")
    if not isinstance(parts, list):
        return message.text("content", "")
    if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        raise message.refused("content", 'has a part that is no text; parts must be {"type": "text", "text": ...}')
    return "".join(part["text"] for part in parts)


def _generation(fields: Fields, service: Service, prompt: list[int], limits: Sequence[str], default: int) -> Generation:
    fields.allow_only(NEUTRAL, WHY)
    options = fields.section("stream_options")
    return Generation(
        prompt,
        sampling_of(fields, limits, default, service.tokenizer.vocab_size),
        stream=fields.flag("stream"),
        closing_usage=options.flag("include_usage"),
        running_usage=options.flag("continuous_usage_stats"),
    )


def _envelope(answer: Answer, prefix: str, kind: str, choice: Mapping[str, Any]) -> dict[str, Any]:
    event = {
        "id": f"{prefix}-{answer.request_id}",
        "object": kind,
        "created": answer.created_s,
        "model": answer.service.model_name,
        "choices": [choice],
    }
    return {**event, "usage": _usage(answer)} if answer.generation.running_usage else event


def _behind(answer: Answer, empty_part: dict[str, Any]) -> list[dict[str, Any]]:
    """Events behind the last token: an early end, which was not known before, and token counts if they are asked for.

    Others may trip over an event without choices.
    """
    ends = [empty_part] if answer.finish_reason == "stop" else []
    if answer.generation.closing_usage:
        ends.append({**empty_part, "choices": [], "usage": _usage(answer)})
    return ends


def _usage(answer: Answer) -> dict[str, Any]:
    prompt, output = answer.num_prompt_tokens, len(answer.tokens)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": answer.num_cached_tokens},
    }
