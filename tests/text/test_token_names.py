from collections.abc import Callable
from pathlib import Path

import pytest

from engine_core.text import Tokenizer, TokenNames, load_tokenizer


def id_of(tokenizer: Tokenizer, token: str) -> int:
    found = tokenizer.token_to_id(token)
    assert found is not None
    return found


@pytest.mark.parametrize("name", ["byte-level", "byte-fallback", "metaspace"])
def test_texts_of_tokens_put_together_are_the_text(
    small_tokenizers: dict[str, Tokenizer], name: str
) -> None:
    tokenizer = small_tokenizers[name]
    names = TokenNames(tokenizer)
    text = "the quick brown fox, hello world"
    ids = tokenizer.encode(text, add_special_tokens=False)
    for name_of in (names.text, names.unique):
        together = "".join(map(name_of, ids))
        # As tokens of a text that has begun: those that begin a word begin with its space.
        assert together == (text if name == "byte-level" else f" {text}")


def test_parts_of_characters_have_names_of_their_own(
    byte_level: Tokenizer, byte_fallback: Tokenizer
) -> None:
    names = TokenNames(byte_level)
    ids = byte_level.encode("龘", add_special_tokens=False)  # E9 BE 98
    assert "".join(map(names.unique, ids)).replace("bytes:", "") == r"\xe9\xbe\x98"
    assert set("".join(map(names.text, ids))) == {"\ufffd"}
    assert names.unique(id_of(byte_level, "ÿ")) == r"bytes:\xff"
    names = TokenNames(byte_fallback)
    assert names.unique(id_of(byte_fallback, "<0xFF>")) == r"bytes:\xff"
    assert names.text(id_of(byte_fallback, "<0xFF>")) == "\ufffd"
    assert names.unique(id_of(byte_fallback, "<0x41>")) == "A"
    assert names.unique(id_of(byte_fallback, "▁")) == " "


def test_special_tokens_are_called_by_their_names(byte_level: Tokenizer) -> None:
    names = TokenNames(byte_level)
    for token in ("<s>", "<|end|>", "<tool>"):
        assert names.text(id_of(byte_level, token)) == names.unique(id_of(byte_level, token))
        assert names.text(id_of(byte_level, token)) == token
    assert (names.text(10**6), names.unique(10**6)) == ("", "")


@pytest.mark.parametrize("name", ["qwen2_5", "llama3_1", "chatglm3"])
@pytest.mark.filterwarnings("ignore")
def test_real_vocabularies(real_folder: Callable[[str], Path], name: str) -> None:
    tokenizer = load_tokenizer(real_folder(name))
    names = TokenNames(tokenizer)
    for text in ("a  b __init__(self)\n", "naïve café", "你好, мир"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        together = "".join(map(names.unique, ids))
        assert together.removeprefix(" ") == text or "bytes:" in together
