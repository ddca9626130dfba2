"""The openai package against a server: openai_client.py URL"""

import sys
from concurrent.futures import ThreadPoolExecutor

import openai

client = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none")
(model,) = [model.id for model in client.models.list()]


def complete(number: int) -> int:
    answer = client.completions.create(model=model, prompt=[number] * 50, max_tokens=16)
    return answer.usage.completion_tokens


def chat(number: int) -> int:
    messages = [{"role": "user", "content": f"what is {number}?"}]
    options = {"include_usage": True}
    parts = client.chat.completions.create(
        model=model, messages=messages, max_completion_tokens=16, stream=True, stream_options=options
    )
    *_, last = parts
    return last.usage.completion_tokens


with ThreadPoolExecutor(4) as pool:
    tokens = [*pool.map(complete, range(6)), *pool.map(chat, range(6))]
print(f"openai {openai.__version__}: {len(tokens)} of 12 requests, {sum(tokens)} of 192 tokens out")
sys.exit(sum(tokens) != 192)
