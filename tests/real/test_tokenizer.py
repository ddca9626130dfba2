"""Whatever a model says, its text counts as the same tokens again, on the server and in clients."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pdreal.serve.tokenizer import HUB_NAME, Detokenizer, Tokenizer, plant_in_hub_cache, write_tokenizer
from pdreal.settings.host import LaunchError

VOCAB_SIZE = 512
TOKENIZER = Tokenizer(VOCAB_SIZE)
TOKENS = st.lists(st.integers(0, VOCAB_SIZE - 1) | st.sampled_from(list(b"<0xC3>12 \n")))
TEXTS = st.text() | st.text("<>0xX12C3\n é")


@given(TOKENS)
def test_decoded_tokens_encode_to_the_same(tokens):
    assert TOKENIZER.encode(TOKENIZER.decode(tokens)) == tokens


@given(TEXTS)
def test_every_text_has_tokens_that_are_its_bytes_or_are_named_in_it(text):
    tokens = TOKENIZER.encode(text)
    assert all(0 <= token < VOCAB_SIZE for token in tokens)
    assert len(tokens) <= len(text.encode())


@given(st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E, exclude_characters="<")))
def test_plain_text_comes_back(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_a_token_name_beyond_the_vocabulary_is_text():
    assert TOKENIZER.encode("<511><512><65><0x41>") == [511, *b"<512><65><0x41>"]


def test_a_vocabulary_must_hold_all_bytes():
    with pytest.raises(ValueError, match="255 tokens cannot hold all 256 bytes"):
        Tokenizer(255)


@pytest.fixture(scope="module")
def client_tokenizer(tmp_path_factory):
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, VOCAB_SIZE)
    return transformers.AutoTokenizer.from_pretrained(folder)


@given(TEXTS)
def test_clients_encode_as_the_server_does(client_tokenizer, text):
    assert client_tokenizer.encode(text, add_special_tokens=False) == TOKENIZER.encode(text)


@given(TOKENS)
def test_clients_decode_as_the_server_does(client_tokenizer, tokens):
    assert client_tokenizer.decode(tokens) == TOKENIZER.decode(tokens)


def test_clients_write_chats_down_as_the_server_does(client_tokenizer):
    chat = [("system", "be brief"), ("user", "hi < there")]
    messages = [{"role": role, "content": content} for role, content in chat]
    messages[1]["content"] = [{"type": "text", "text": messages[1]["content"]}]
    text = client_tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert TOKENIZER.encode(text) == TOKENIZER.chat(chat)


def test_a_planted_tokenizer_is_found_by_its_name(tmp_path):
    plant_in_hub_cache(tmp_path, VOCAB_SIZE)
    transformers = pytest.importorskip("transformers")
    found = transformers.AutoTokenizer.from_pretrained(HUB_NAME, cache_dir=tmp_path / "hub", local_files_only=True)
    assert found.encode("<300>A", add_special_tokens=False) == [300, 65]


def test_the_files_are_all_that_transformers_asks_for(tmp_path):
    """Version 5 reads config.json before it looks for a tokenizer."""
    write_tokenizer(tmp_path, VOCAB_SIZE)
    assert {path.name for path in tmp_path.iterdir()} == {
        "chat_template.jinja",
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert json.loads((tmp_path / "config.json").read_text()) == {"vocab_size": VOCAB_SIZE}


def test_a_name_of_a_token_with_thousands_of_digits_is_text():
    text = f"<{9:9<5000}>"
    assert TOKENIZER.encode(text) == [*text.encode()]


def test_a_checkpoints_own_tokenizer(tmp_path):
    pytest.importorskip("tokenizers", reason="reads tokenizer.json")
    pytest.importorskip("jinja2", reason="renders chat templates")
    from pdreal.serve.server import tokenizer_of
    from pdreal.serve.tokenizer import CheckpointTokenizer
    from pdreal.settings.options import Options

    assert isinstance(tokenizer_of(Options(), 512), Tokenizer)
    write_tokenizer(tmp_path, 512)
    own, plain = tokenizer_of(Options(weights=str(tmp_path)), 512), Tokenizer(512)
    assert isinstance(own, CheckpointTokenizer)
    messages = [("system", "be brief"), ("user", "a < b <300>\n")]
    assert own.chat(messages) == plain.chat(messages)
    text = "hello <0x3C> there"
    assert own.encode(text) == plain.encode(text)
    tokens = [72, 300, 195, 188, 10]
    detokenizer = own.detokenizer()
    assert "".join(detokenizer.add([token]) for token in tokens) == own.decode(tokens) == plain.decode(tokens)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(LaunchError, match="cannot be read"):
        CheckpointTokenizer(tmp_path, 512)


def test_characters_of_several_tokens_come_whole():
    whole = "aé€😀b".encode()
    detokenizer = Detokenizer(lambda tokens: bytes(tokens).decode(errors="replace"))
    parts = [detokenizer.add([token]) for token in whole]
    assert "".join(parts) == "aé€😀b"
    assert "\ufffd" not in "".join(parts)
