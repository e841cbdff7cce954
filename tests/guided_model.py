"""A tiny random model with a tokenizer, for tests of guided text: the grammar does all the work."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from golden_fixtures import GOLDEN
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

MODEL = str(GOLDEN / "llama-gqa")
VOCAB = 320
EOS = 2

_CORPUS = [
    '{"name": "value", "items": [1, 2, 3], "flag": true, "other": null, "more": false}',
    '{"name": "value", "items": [10, 20, 30], "date": "2020-10-10", "text": "the and of"}',
] * 20


@cache
def backend() -> Backend:
    """Byte-level BPE with merges that cross the parts of JSON, as large vocabularies have them."""
    tokenizer = Backend(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        _CORPUS,
        trainers.BpeTrainer(
            vocab_size=VOCAB - 8,
            special_tokens=["<unk>", "<s>", "</s>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.add_tokens([AddedToken("<call>", special=False)])
    return tokenizer


def write_tokenizer(folder: Path) -> Path:
    """A folder with the tokenizer."""
    folder.mkdir(exist_ok=True)
    backend().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "bos_token": "<s>"}'
    )
    return folder
