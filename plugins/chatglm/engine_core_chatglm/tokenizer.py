"""Completes a tokenizer.json of ChatGLM2 or ChatGLM3 with what only the original's code says.

The originals are a SentencePiece file and Python code, which is never run here. A conversion of the
file to tokenizer.json has its 64789 pieces, but not the special tokens that
``tokenization_chatglm.py`` numbers after them, nor ``[gMASK] sop`` before each text. Some add a few
of them in a way that finds them only after a space.

As a program it makes a tokenizer folder, which the engine takes as its ``tokenizer``::

    python -m engine_core_chatglm.tokenizer converted/tokenizer.json completed/

Imports no torch.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine_core.errors import TokenizerError

_PIECES = 64789
# In the order of their ids; version 2 has the first five, and never gives the others.
_SPECIAL_TOKENS = (
    "[MASK]",
    "[gMASK]",
    "[sMASK]",
    "sop",
    "eop",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
)
_PREFIX = ("[gMASK]", "sop")
_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "clean_up_tokenization_spaces": False,
    "eos_token": "</s>",
    "pad_token": "<unk>",
    "unk_token": "<unk>",
}


def complete(tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a tokenizer.json with all special tokens and the prefix of each text.

    Raises:
        TokenizerError: it is not a conversion of ChatGLM2's or ChatGLM3's tokenizer.model.
    """
    model = tokenizer.get("model", {})
    pieces = {index for index in model.get("vocab", {}).values() if index < _PIECES}
    if model.get("type") != "BPE" or not model.get("byte_fallback") or len(pieces) != _PIECES:
        raise TokenizerError(
            "this is no conversion of ChatGLM2's or ChatGLM3's tokenizer.model: that is a BPE with "
            f"byte fallback and {_PIECES} pieces, and here is {model.get('type')!r} with "
            f"{len(pieces)}"
        )
    ids = {token: _PIECES + index for index, token in enumerate(_SPECIAL_TOKENS)}
    kept = [token for token in tokenizer.get("added_tokens", []) if token["id"] < _PIECES]
    added = [
        {
            "id": index,
            "content": token,
            # Letters alone would else be found inside of words.
            "single_word": token.isalpha(),
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for token, index in ids.items()
    ]
    prefix = [{"SpecialToken": {"id": token, "type_id": 0}} for token in _PREFIX]
    text = [{"Sequence": {"id": name, "type_id": 0}} for name in ("A", "B")]
    return {
        **tokenizer,
        "added_tokens": kept + added,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [*prefix, text[0]],
            "pair": [*prefix, *text],
            "special_tokens": {
                token: {"id": token, "ids": [ids[token]], "tokens": [token]} for token in _PREFIX
            },
        },
    }


def main() -> None:
    """Read a tokenizer.json and write the completed one, with its config, into a folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", type=Path, help="a converted tokenizer.json")
    parser.add_argument("target", type=Path, help="the folder to write")
    arguments = parser.parse_args()
    try:
        source = json.loads(arguments.source.read_text(encoding="utf-8"))
        completed = complete(source)
        arguments.target.mkdir(parents=True, exist_ok=True)
        for name, content in (("tokenizer.json", completed), ("tokenizer_config.json", _CONFIG)):
            file = arguments.target / name
            file.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    except (OSError, ValueError, TokenizerError) as error:
        parser.exit(1, f"{arguments.source}: {error}\n")


if __name__ == "__main__":
    main()
