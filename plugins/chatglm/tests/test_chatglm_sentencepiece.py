"""The SentencePiece files of each version, against the rules of its tokenization_chatglm.py.

The rules are stated here once more, over the sentencepiece library. ChatGLM-6B's file cannot be had
here, so its tests use a small one with the same kinds of pieces.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from golden_fixtures import GOLDEN
from sentencepiece import SentencePieceProcessor
from sentencepiece_files import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    assemble,
    spaced_texts,
    train,
)

from engine_core import LLM, SamplingParams
from engine_core.configs import HFConfig
from engine_core.errors import TokenizerError
from engine_core.registry import build_registry
from engine_core.text import IncrementalDetokenizer, Tokenizer, load_tokenizer

CONVERTED = Path(__file__).parents[3] / ".cache" / "tokenizers" / "chatglm3" / "tokenizer.json"
SPECIAL_1 = ["[MASK]", "[gMASK]", "[sMASK]", "<unused_0>", "<sop>", "<eop>", "<ENC>", "<dBLOCK>"]
BLANKS = {length: f"<|blank_{length}|>" for length in range(2, 81)}


def load(folder: Path, golden: str, **changes: object) -> Tokenizer:
    """The tokenizer as an engine reads it, with the format that the family's builder gives."""
    config = HFConfig.from_folder(GOLDEN / golden).replace(**changes)
    model_config = build_registry().model_config(config, folder)
    return load_tokenizer(folder, model_config.sentencepiece)


def random_texts(count: int) -> list[str]:
    rng = random.Random(0)
    alphabet = [*"ab xyz,.\n\t", "  ", "     ", "你", "好", "😀", "1", "the ", "\u3000"]
    return ["".join(rng.choices(alphabet, k=rng.randrange(40))) for _ in range(count)]


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def folder_1(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chatglm-6b")
    train(
        folder / "ice_text.model",
        model_type=request.param,
        vocab_size=600,
        control_symbols=SPECIAL_1,
        user_defined_symbols=["<n>", "<|tab|>", *BLANKS.values()],
        pad_id=3,
        pad_piece="<pad>",
    )
    # As published, less what names the code.
    config = {
        "bos_token": "<sop>",
        "do_lower_case": False,
        "end_token": "</s>",
        "eos_token": "<eop>",
        "gmask_token": "[gMASK]",
        "mask_token": "[MASK]",
        "num_image_tokens": 0,
        "pad_token": "<pad>",
        "padding_side": "left",
        "remove_space": False,
        "tokenizer_class": "ChatGLMTokenizer",
        "unk_token": "<unk>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def original_1(folder: Path) -> tuple[Callable[[str], list[int]], Callable[[list[int]], str]]:
    model = SentencePieceProcessor(model_file=str(folder / "ice_text.model"))
    end = [model.piece_to_id("[gMASK]"), model.piece_to_id("<sop>")]

    def encode(text: str) -> list[int]:
        text = text.replace("\n", "<n>").replace("\t", "<|tab|>")
        for length in range(80, 1, -1):
            text = text.replace(" " * length, BLANKS[length])
        return [*model.encode(text), *end]

    def decode(ids: list[int]) -> str:
        text = model.decode(ids).replace("<n>", "\n").replace("<|tab|>", "\t")
        for length, piece in BLANKS.items():
            text = text.replace(piece, " " * length)
        return text

    return encode, decode


def test_version_1_encodes_and_decodes_as_the_original(folder_1: Path) -> None:
    tokenizer = load(folder_1, "chatglm1-tiny")
    encode, decode = original_1(folder_1)
    for text in [*spaced_texts(), *random_texts(300)]:
        ids = encode(text)
        assert tokenizer.encode(text) == ids
        assert tokenizer.encode(text, add_special_tokens=False) == ids[:-2]
        assert tokenizer.decode(ids) == decode(ids)
        stream = IncrementalDetokenizer(tokenizer)
        streamed = "".join([stream.append([index]) for index in ids]) + stream.finish()
        assert streamed == decode(ids)


def test_version_1_knows_its_special_tokens(folder_1: Path) -> None:
    tokenizer = load(folder_1, "chatglm1-tiny")
    encode, _ = original_1(folder_1)
    model = SentencePieceProcessor(model_file=str(folder_1 / "ice_text.model"))
    assert tokenizer.encode("hello[gMASK]<sop>", add_special_tokens=False) == encode("hello")
    special = {model.piece_to_id(p) for p in [*SPECIAL_1, "<unk>", "<s>", "</s>", "<pad>"]}
    assert tokenizer.special_ids == special
    assert tokenizer.bos_token_id == model.piece_to_id("<sop>")
    assert tokenizer.eos_token_id == model.piece_to_id("<eop>")
    assert tokenizer.vocab_size == model.vocab_size()
    # What a constrained decoder asks for is text, not the file's spelling of it.
    assert tokenizer.id_to_token(model.piece_to_id("<n>")) == "\n"
    assert tokenizer.token_to_id("\n") == model.piece_to_id("<n>")
    assert tokenizer.id_to_token(model.piece_to_id("<|blank_3|>")) == "\u2581" * 3


def test_the_first_revision_s_file_is_refused(tmp_path: Path) -> None:
    # Its special tokens were added by the code, behind 20000 ids of image tokens.
    train(tmp_path / "ice_text.model")
    with pytest.raises(TokenizerError, match=r"ice_text\.model has no piece '\[MASK\]'"):
        load(tmp_path, "chatglm1-tiny")


def test_an_engine_chats_with_the_original_file(folder_1: Path, tmp_path: Path) -> None:
    for file in [*(GOLDEN / "chatglm1-realids").iterdir(), *folder_1.iterdir()]:
        shutil.copy(file, tmp_path)
    model = SentencePieceProcessor(model_file=str(tmp_path / "ice_text.model"))
    config = json.loads((tmp_path / "config.json").read_text())
    config["gmask_token_id"] = model.piece_to_id("[gMASK]")
    config["bos_token_id"] = model.piece_to_id("<sop>")
    (tmp_path / "config.json").write_text(json.dumps(config))
    encode, _ = original_1(folder_1)
    chat = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "world\nthe end"},
        {"role": "user", "content": "the  dog"},
    ]
    with LLM(str(tmp_path), max_model_len=256, dtype="float32") as llm:
        (output,) = llm.chat(chat, SamplingParams(max_tokens=2))
    # chat() of modeling_chatglm.py.
    prompt = "[Round 0]\n问：hello\n答：world\nthe end\n[Round 1]\n问：the  dog\n答："  # noqa: RUF001
    assert output.prompt_token_ids == encode(prompt)


@pytest.fixture(scope="module")
def folder_3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real pieces of versions 2 and 3, put together again from a conversion."""
    folder = tmp_path_factory.mktemp("pieces")
    vocab = json.loads(CONVERTED.read_text(encoding="utf-8"))["model"]["vocab"]
    kinds = {0: UNKNOWN, 1: CONTROL, 2: CONTROL, **dict.fromkeys(range(3, 259), BYTE)}
    assemble(
        folder / "tokenizer.model",
        # Of two merges SentencePiece takes the one whose piece came first.
        (
            (piece, -float(max(index - 259, 0)), kinds.get(index, NORMAL))
            for piece, index in sorted(vocab.items(), key=lambda item: item[1])
        ),
    )
    return folder


def test_version_3_has_the_original_s_ids(folder_3: Path) -> None:
    tokenizer = load(folder_3, "chatglm3-tiny", _name_or_path="THUDM/chatglm3-6b")
    # Recorded by chatglm.cpp's tests from the original tokenizer.
    assert tokenizer.encode("你好") == [64790, 64792, 36474, 54591]
    # fmt: off
    assert tokenizer.encode("def main():\n    print('hello world')\t# greeting") == [
        64790, 64792, 884, 1301, 9427, 13, 296, 4466, 2029, 15616, 30914, 993, 3387, 12, 31010,
        30174,
    ]
    # fmt: on
    assert tokenizer.encode("<|user|>\n 你好<|assistant|>", add_special_tokens=False) == [
        *(64795, 30910, 13, 36474, 54591, 64796)
    ]
    assert tokenizer.vocab_size == 64798
    assert tokenizer.eos_token_id == 2
    assert tokenizer.special_ids == {0, 1, 2, *range(64789, 64798)}


def test_versions_2_and_3_encode_as_the_originals(folder_3: Path) -> None:
    model = SentencePieceProcessor(model_file=str(folder_3 / "tokenizer.model"))
    for name, count in (("THUDM/chatglm2-6b", 5), ("THUDM/chatglm3-6b", 9)):
        tokenizer = load(folder_3, "chatglm3-tiny", _name_or_path=name)
        assert tokenizer.vocab_size == model.vocab_size() + count
        for text in [*spaced_texts(), *random_texts(300)]:
            ids = [64790, 64792, *model.encode(text)]
            assert tokenizer.encode(text) == ids
            assert tokenizer.decode(ids) == model.decode(ids[2:])


@pytest.mark.parametrize("first", ["hello  world\n", " 你好", "", "\n"])
def test_chats_of_version_3_are_build_chat_input_s(folder_3: Path, first: str) -> None:
    model = SentencePieceProcessor(model_file=str(folder_3 / "tokenizer.model"))
    config = HFConfig.from_folder(GOLDEN / "chatglm3-tiny").replace(_name_or_path="chatglm3")
    model_config = build_registry().model_config(config, folder_3)
    tokenizer = load_tokenizer(folder_3, model_config.sentencepiece)
    chat = [
        {"role": "system", "content": "Be brief.  "},
        {"role": "user", "content": first},
        {"role": "assistant", "metadata": "get_weather", "content": "```python\ncall()\n```"},
        {"role": "observation", "content": "22"},
    ]
    roles = {"system": 64794, "user": 64795, "assistant": 64796, "observation": 64797}
    expected = [64790, 64792]
    for message in chat:
        expected += [roles[message["role"]], *model.encode(message.get("metadata", "") + "\n")]
        expected += model.encode(message["content"])
    expected += [roles["assistant"]]
    text = tokenizer.apply_chat_template(chat, chat_template=model_config.default_chat_template)
    assert tokenizer.encode(text, add_special_tokens=False) == expected


@pytest.mark.parametrize("first", ["hello  world\n", " 你好", "", "\n"])
def test_chats_of_version_2_are_build_prompt_s(folder_3: Path, first: str) -> None:
    model = SentencePieceProcessor(model_file=str(folder_3 / "tokenizer.model"))
    config = HFConfig.from_folder(GOLDEN / "chatglm2-tiny").replace(_name_or_path="chatglm2")
    model_config = build_registry().model_config(config, folder_3)
    tokenizer = load_tokenizer(folder_3, model_config.sentencepiece)
    chat = [
        {"role": "user", "content": first},
        {"role": "assistant", "content": "答案"},
        {"role": "user", "content": "晚上"},
    ]
    prompt = f"[Round 1]\n\n问：{first}\n\n答：答案\n\n[Round 2]\n\n问：晚上\n\n答："  # noqa: RUF001
    text = tokenizer.apply_chat_template(chat, chat_template=model_config.default_chat_template)
    assert tokenizer.encode(text, add_special_tokens=False) == [
        *(64790, 64792, *model.encode(prompt))
    ]
