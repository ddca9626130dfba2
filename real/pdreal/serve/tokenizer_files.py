"""The tokenizer as the files that Hugging Face's libraries read, so that clients count tokens as the server does."""

import json
from pathlib import Path
from typing import Any

from pdreal.serve.tokenizer import CHAT_TEMPLATE, END_OF_TEXT, SPELLED_OUT, piece

HUB_NAME = "pdreal/bytes"
_REVISION = "0" * 40


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Files for AutoTokenizer.from_pretrained(folder)."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer(vocab_size), indent=1) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(_config(), indent=1) + "\n")
    (folder / "config.json").write_text(json.dumps({"vocab_size": vocab_size}) + "\n")  # transformers 5 asks for one
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def plant_in_hub_cache(hf_home: Path, vocab_size: int) -> None:
    """The same in the cache below HF_HOME, under HUB_NAME: some clients refuse a folder but look there when offline."""
    model = hf_home / "hub" / f"models--{HUB_NAME.replace('/', '--')}"
    write_tokenizer(model / "snapshots" / _REVISION, vocab_size)
    (model / "refs").mkdir(exist_ok=True)
    (model / "refs" / "main").write_text(_REVISION)


def _tokenizer(vocab_size: int) -> dict[str, Any]:
    """Names of tokens stand alone; all else is one token a character, or a byte where there is none for it."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": END_OF_TEXT,
                "content": piece(END_OF_TEXT),
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": SPELLED_OUT},
            "behavior": "Isolated",
            "invert": False,
        },
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": True,
            "ignore_merges": True,
            "vocab": {piece(token): token for token in range(vocab_size)},
            "merges": [],
        },
    }


def _config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": piece(END_OF_TEXT),
        "clean_up_tokenization_spaces": False,
        "model_max_length": 10**9,
    }
