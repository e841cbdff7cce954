"""Tokenizers to test with: three real ones, and small ones made here."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from engine_core.text import Tokenizer as EngineTokenizer
from engine_core.text import load_tokenizer

REAL_TOKENIZERS = Path(__file__).parents[2] / ".cache" / "tokenizers"

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "hello world, hello there; the end of the world.",
    "    indented code:\n        return the_value\n\n",
    "naïve café — résumé, Grüße, señor",
    "你好世界 你好 世界",
    "emoji 😀😀 🎉 and more 😀",
]

# What tokenizers stumble over.
TEXTS = [
    "",
    " ",
    "hello world",
    " leading and trailing ",
    "runs   of    spaces\t\ttabs\n\n\nnewlines \r\n",
    "naïve café e\u0301 Grüße",
    "你好，世界！今天天气很好。",  # noqa: RUF001 - Chinese punctuation is meant
    "emoji 😀🎉 family 👨‍👩‍👧‍👦 flag 🇨🇭",
    "العربية हिन्दी ไทย 한국어 ქართული",
    "1234567890 3.14 1,000,000",
    "def f(x):\n    return x ** 2  # square",
    "I'll we've it's DON'T",
    "\u0000\u200b\ufeff\ufffd\U0010ffff",
    "<|im_start|>user\nhi<|im_end|><|eot_id|><s>text</s><unk>",
    "<|end|> <tool>call</tool> <|end|>x",
    "a" * 3000,
    "the quick brown 狐狸 😀 " * 500,
]


@pytest.fixture(scope="session")
def texts() -> list[str]:
    return TEXTS


@pytest.fixture(scope="session")
def real_folder() -> Callable[[str], Path]:
    def folder(name: str) -> Path:
        path = REAL_TOKENIZERS / name
        if not (path / "tokenizer.json").is_file():
            pytest.fail(f"{path} has no tokenizer.json: run `make models`")
        return path

    return folder


@pytest.fixture(scope="session")
def hf_tokenizer() -> Callable[..., Any]:
    """Transformers' own reading of a folder; ``generic`` for one whose class is not its own."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    def load(folder: Path, *, generic: bool = False) -> Any:
        loader = PreTrainedTokenizerFast if generic else AutoTokenizer
        return loader.from_pretrained(str(folder))

    return load


def _save(folder: Path, backend: Tokenizer, **config: Any) -> Path:
    """Writes a checkpoint folder that has only a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def _byte_level_backend() -> Tokenizer:
    """Byte-level BPE: every byte is a token, the beginning of the sequence is added."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=400,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=["<s>", "</s>", "<|end|>"],
            show_progress=False,
        ),
    )
    backend.add_tokens(["<tool>", AddedToken("</tool>", normalized=False)])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    return backend


def _byte_fallback_backend() -> Tokenizer:
    """BPE over words that begin with "▁", with a token for each byte of what it has no token for.

    The first half of the corpus alone is its alphabet: Chinese and emoji are bytes.
    """
    special = ["<unk>", "<s>", "</s>"]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    trained.train_from_iterator(
        [text.replace("\n", " ") for text in CORPUS[:3]],
        trainers.BpeTrainer(
            vocab_size=600, special_tokens=[*special, *byte_tokens], show_progress=False
        ),
    )
    model = json.loads(trained.to_str())["model"]
    backend = Tokenizer(
        models.BPE(
            vocab=model["vocab"],
            merges=[tuple(merge) for merge in model["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = trained.normalizer
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(special)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return backend


def _metaspace_backend() -> Tokenizer:
    """Unigram with a Metaspace decoder: neither byte-level nor byte-fallback."""
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.train_from_iterator(
        CORPUS,
        trainers.UnigramTrainer(
            vocab_size=120, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
        ),
    )
    return backend


@pytest.fixture(scope="session")
def small_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tokenizers")
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return {
        "byte-level": _save(
            root / "byte-level", _byte_level_backend(), bos_token="<s>", eos_token="</s>"
        ),
        "byte-fallback": _save(root / "byte-fallback", _byte_fallback_backend(), **names),
        "metaspace": _save(
            root / "metaspace", _metaspace_backend(), eos_token="</s>", unk_token="<unk>"
        ),
    }


@pytest.fixture(scope="session")
def small_tokenizers(small_folders: dict[str, Path]) -> dict[str, EngineTokenizer]:
    return {name: load_tokenizer(folder) for name, folder in small_folders.items()}


@pytest.fixture(scope="session")
def byte_level(small_tokenizers: dict[str, EngineTokenizer]) -> EngineTokenizer:
    return small_tokenizers["byte-level"]


@pytest.fixture(scope="session")
def byte_fallback(small_tokenizers: dict[str, EngineTokenizer]) -> EngineTokenizer:
    return small_tokenizers["byte-fallback"]


@pytest.fixture(scope="session")
def metaspace(small_tokenizers: dict[str, EngineTokenizer]) -> EngineTokenizer:
    return small_tokenizers["metaspace"]


@pytest.fixture(scope="session")
def real_tokenizers(real_folder: Callable[[str], Path]) -> dict[str, EngineTokenizer]:
    return {name: load_tokenizer(real_folder(name)) for name in ("qwen2_5", "llama3_1", "chatglm3")}
