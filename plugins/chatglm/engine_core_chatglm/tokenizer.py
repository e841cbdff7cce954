"""Additions of each version's tokenization_chatglm.py to its SentencePiece file.

That code is never run here. The file itself is read by the core, in the format given here for each
version. Where it is not to be had, for versions 2 and 3 there are conversions to tokenizer.json:
these have its 64789 pieces, but not the special tokens that the code numbers after them, nor
``[gMASK] sop`` before each text, and some add a few of them in a way that finds them only after a
space. :func:`complete` adds them.

As a program it makes a tokenizer folder, which the engine takes as its ``tokenizer``::

    python -m engine_core_chatglm.tokenizer converted/tokenizer.json completed/

Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine_core.configs import SentencePieceFormat
from engine_core.errors import TokenizerError

_PIECES = 64789
# In the order of their ids.
_SPECIAL_TOKENS_2 = ("[MASK]", "[gMASK]", "[sMASK]", "sop", "eop")
_ROLES_3 = ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
_SPECIAL_TOKENS = (*_SPECIAL_TOKENS_2, *_ROLES_3)
_PREFIX = ("[gMASK]", "sop")
_NAMED = {"eos_token": "</s>", "pad_token": "<unk>", "unk_token": "<unk>"}

FORMAT_1 = SentencePieceFormat(
    file="ice_text.model",
    special_pieces=("[MASK]", "[gMASK]", "[sMASK]", "<unused_0>", "<sop>", "<eop>"),
    suffix=("[gMASK]", "<sop>"),
    # Pieces of their own, because SentencePiece's normalisation would make one space of each.
    replacements={
        "\n": "<n>",
        "\t": "<|tab|>",
        **{" " * length: f"<|blank_{length}|>" for length in range(2, 81)},
    },
    named_tokens={
        "bos_token": "<sop>",
        "eos_token": "<eop>",
        "mask_token": "[MASK]",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
    },
)
FORMAT_2 = SentencePieceFormat(added_tokens=_SPECIAL_TOKENS_2, prefix=_PREFIX, named_tokens=_NAMED)
FORMAT_3 = replace(FORMAT_2, added_tokens=_SPECIAL_TOKENS)
_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "clean_up_tokenization_spaces": False,
    **_NAMED,
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
    import argparse  # not for those who only want a format

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
