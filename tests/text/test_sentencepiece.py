"""SentencePiece files as tokenizers, against the sentencepiece library."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from sentencepiece import SentencePieceProcessor
from sentencepiece_files import spaced_texts, train

from engine_core.configs import SentencePieceFormat
from engine_core.errors import RequestError, TokenizerError
from engine_core.text import IncrementalDetokenizer, SentencePieceTokenizer, load_tokenizer

BOS_FORMAT = SentencePieceFormat(
    prefix=("<s>",), named_tokens={"bos_token": "<s>", "eos_token": "</s>"}
)
IDENTITY = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}


@pytest.fixture(params=["bpe", "unigram"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    train(tmp_path / "tokenizer.model", model_type=request.param, **IDENTITY)
    return tmp_path


def processor(folder: Path) -> SentencePieceProcessor:
    return SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))


def write_config(folder: Path, **settings: object) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def test_ids_and_text_are_the_library_s(folder: Path) -> None:
    tokenizer = load_tokenizer(folder, BOS_FORMAT)
    original = processor(folder)
    assert isinstance(tokenizer, SentencePieceTokenizer)
    for text in spaced_texts():
        ids = tokenizer.encode(text)
        assert ids == [1, *original.encode(text)]
        assert ids[1:] == tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == original.decode(ids[1:]) == text


def test_the_vocabulary_is_the_file_s(folder: Path) -> None:
    tokenizer = load_tokenizer(folder, BOS_FORMAT)
    original = processor(folder)
    size = original.vocab_size()
    assert tokenizer.vocab_size == size
    assert [tokenizer.id_to_token(index) for index in range(-1, size + 1)] == [
        None,
        *(original.id_to_piece(index) for index in range(size)),
        None,
    ]
    assert all(tokenizer.token_to_id(original.id_to_piece(i)) == i for i in range(size))
    assert tokenizer.token_to_id("no such piece") is None
    assert tokenizer.special_ids == {0, 1, 2}
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)


def test_streamed_text_is_the_decoded_one(folder: Path) -> None:
    tokenizer = load_tokenizer(folder, BOS_FORMAT)
    for text in spaced_texts():
        stream = IncrementalDetokenizer(tokenizer)
        pieces = [stream.append([index]) for index in tokenizer.encode(text)]
        assert "".join(pieces) + stream.finish() == text


def test_special_tokens_written_in_a_text_become_ids(folder: Path) -> None:
    tokenizer = load_tokenizer(folder, BOS_FORMAT)
    encode = processor(folder).encode
    assert tokenizer.encode("hello</s><s>world </s>") == [
        *(1, *encode("hello"), 2, 1, *encode("world "), 2)
    ]
    assert tokenizer.decode([1, *encode("hello"), 2]) == "hello"
    assert tokenizer.decode([1, *encode("hello"), 2], skip_special_tokens=False) == (
        "<s> hello</s>"
    )


def test_no_space_after_tokens_if_the_config_says_so(folder: Path) -> None:
    write_config(folder, legacy=False)
    tokenizer = load_tokenizer(folder, BOS_FORMAT)
    original = processor(folder)
    text = "hello</s>world"
    pieces = [tokenizer.id_to_token(index) for index in tokenizer.encode(text)]
    # As with the space, and then without it, which is what follows a character that is cut off.
    after = original.encode_as_pieces("\nworld")
    assert after[:2] == ["\u2581", "<0x0A>"]
    assert pieces == ["<s>", *original.encode_as_pieces("hello"), "</s>", *after[2:]]


@pytest.mark.parametrize(
    ("settings", "before", "after"),
    [
        ({}, [1], []),
        ({"add_bos_token": False}, [], []),
        ({"add_bos_token": True, "add_eos_token": True}, [1], [2]),
    ],
)
def test_the_config_says_which_tokens_go_around_a_text(
    folder: Path, settings: dict[str, bool], before: list[int], after: list[int]
) -> None:
    write_config(folder, **settings)
    tokenizer = load_tokenizer(folder, BOS_FORMAT)
    inner = processor(folder).encode("hello")
    assert tokenizer.encode("hello") == [*before, *inner, *after]
    around = len(before) + len(after)
    for room in (0, 1, 100):
        (cut,) = tokenizer.encode_all(["hello"], around + room)
        ids = [*before, *inner[:room], *after]
        assert cut == (ids, [0] * len(ids))
    tokenizer.truncation_side = "left"
    (cut,) = tokenizer.encode_all(["hello"], around + 1)
    assert cut[0] == [*before, inner[-1], *after]
    if around:
        with pytest.raises(RequestError, match=f"no room for the {around} special tokens"):
            tokenizer.encode_all(["hello"], around - 1)


@pytest.mark.parametrize("place", ["added_tokens.json", "tokenizer_config.json"])
def test_tokens_that_a_checkpoint_adds_get_their_ids(folder: Path, place: str) -> None:
    size = processor(folder).vocab_size()
    if place == "added_tokens.json":
        (folder / place).write_text(json.dumps({"<tool>": size, "[END]": size + 3}))
        write_config(folder, additional_special_tokens=["[END]"])
    else:
        entries = {size: {"content": "<tool>"}, size + 3: {"content": "[END]", "special": True}}
        write_config(folder, added_tokens_decoder=entries)
    tokenizer = load_tokenizer(folder, BOS_FORMAT)
    encode = processor(folder).encode
    ids = [1, *encode("a"), size, *encode(" b "), size + 3]
    assert tokenizer.encode("a<tool> b [END]") == ids
    assert tokenizer.vocab_size == size + 4
    assert tokenizer.special_ids == {0, 1, 2, size + 3}
    assert tokenizer.id_to_token(size + 1) is None
    assert tokenizer.decode(ids) == "a<tool>  b "


def test_a_family_s_tokens_follow_the_pieces(folder: Path) -> None:
    size = processor(folder).vocab_size()
    form = SentencePieceFormat(
        added_tokens=("<a>", "<ab>", "sop"), prefix=("sop",), suffix=("<a>",)
    )
    tokenizer = load_tokenizer(folder, form)
    encode = processor(folder).encode
    # The longer token first, and a word only where it stands alone.
    assert tokenizer.encode("<ab>sopping sop", add_special_tokens=False) == [
        *(size + 1, *encode("sopping "), size + 2)
    ]
    assert tokenizer.encode("x") == [size + 2, *encode("x"), size]
    assert tokenizer.special_ids == {0, 1, 2, size, size + 1, size + 2}


def test_added_tokens_that_contradict_the_file_are_refused(folder: Path) -> None:
    (folder / "added_tokens.json").write_text(json.dumps({"<tool>": 5}))
    with pytest.raises(TokenizerError, match=r"'<tool>' has the id 5, which is '<0x02>'"):
        load_tokenizer(folder, BOS_FORMAT)
    (folder / "added_tokens.json").write_text(json.dumps({"</s>": 9000}))
    with pytest.raises(TokenizerError, match=r"'</s>' has the id 9000, but .* has it as 2"):
        load_tokenizer(folder, BOS_FORMAT)


def test_another_model_s_file_is_refused_by_what_it_lacks(folder: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.model has no piece '\[gMASK\]'"):
        load_tokenizer(folder, SentencePieceFormat(special_pieces=("[gMASK]",)))


@pytest.mark.parametrize("key", ["do_lower_case", "remove_space"])
def test_what_would_change_the_text_is_refused(folder: Path, key: str) -> None:
    write_config(folder, **{key: True})
    with pytest.raises(TokenizerError, match=f"sets {key}"):
        load_tokenizer(folder, BOS_FORMAT)


@pytest.mark.parametrize("content", [b"", b"no model", b"\n\x05abc"])
def test_a_file_that_is_no_model_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(TokenizerError, match=r"tokenizer\.model is no SentencePiece model"):
        load_tokenizer(tmp_path, BOS_FORMAT)


def test_a_tiktoken_file_of_that_name_is_left_to_transformers(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_text("IQ== 0\nIg== 1\n")
    write_config(tmp_path, auto_map={"AutoTokenizer": ["x.Y", None]}, tokenizer_class="Y")
    with pytest.raises(TokenizerError, match=r"the tokenizer class Y is code of the checkpoint's"):
        load_tokenizer(tmp_path, BOS_FORMAT)


def test_text_that_is_none_is_refused(folder: Path) -> None:
    tokenizer = load_tokenizer(folder, BOS_FORMAT)
    with pytest.raises(RequestError, match="lone surrogate"):
        tokenizer.encode("\ud800")


def test_tokenizer_json_goes_first(folder: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    Tokenizer(WordLevel({"hello": 0}, unk_token="hello")).save(str(folder / "tokenizer.json"))
    write_config(folder, tokenizer_class="PreTrainedTokenizerFast")
    assert load_tokenizer(folder, BOS_FORMAT).encode("hello") == [0]


def test_without_the_library_the_error_says_what_to_install(folder: Path) -> None:
    script = (
        "import sys; sys.modules['sentencepiece'] = None\n"
        "from pathlib import Path\n"
        "from engine_core.configs import SentencePieceFormat\n"
        "from engine_core.text import load_tokenizer\n"
        f"load_tokenizer(Path({str(folder)!r}), SentencePieceFormat())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert "TokenizerError" in done.stderr
    assert "pip install 'engine-core-llm[sentencepiece]'" in done.stderr
