"""The tokenizer in a GGUF file's metadata, as the ``tokenizers`` library writes it.

Where each kind splits text follows the table in llama.cpp's ``src/llama-vocab.cpp``; where the
tokenizers that the models were published with are known, they are the measure.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_core.checkpoint.gguf import GGUFFile
from engine_core.checkpoint.tokenizer_json import with_short_merges
from engine_core.errors import TokenizerError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

logger = logging.getLogger(__name__)

_PREFIX = "tokenizer.ggml."
# tokenizer.ggml.token_type
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{digits}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK = (
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+"
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _PreTokenizer:
    """How byte-level BPE cuts text before it merges.

    Attributes:
        patterns: each splits the pieces that the one before it left.
        whole_words: whether a piece that is itself a token is taken without merging.
        add_bos: whether a begin-of-sequence token is added if the file does not say.
        nfc: whether text is brought to Unicode's composed form first.
        plain: added tokens that stay in texts, though files call them control tokens: llama.cpp's
            converter does so with all that look like ``<|this|>``.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    add_bos: bool = False
    nfc: bool = False
    plain: frozenset[str] = frozenset()


_LLAMA3 = _PreTokenizer((_CL100K.replace("{digits}", "{1,3}"),), whole_words=True, add_bos=True)
_SMOLLM = _PreTokenizer((_DIGIT, _GPT2))
_LOOK_SPECIAL = frozenset(
    f"<|{name}|>"
    for name in ("fim_prefix", "fim_middle", "fim_suffix", "fim_pad", "repo_name", "file_sep")
)
_PRE_TOKENIZERS = {
    "gpt-2": _PreTokenizer((_GPT2,)),
    "phi-2": _PreTokenizer((_GPT2,)),
    "smollm": _SMOLLM,
    "starcoder": _SMOLLM,
    "refact": _SMOLLM,
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _PreTokenizer(
        (_CL100K.replace("{digits}", ""),),
        nfc=True,
        plain=_LOOK_SPECIAL,
    ),
    "tekken": _PreTokenizer((_TEKKEN,), whole_words=True, add_bos=True),
    "deepseek-v3": _PreTokenizer(
        (r"\p{N}{1,3}", r"[\x{4e00}-\x{9fa5}\x{3040}-\x{309f}\x{30a0}-\x{30ff}]+", _DEEPSEEK)
    ),
    # What llama.cpp does with files from before it knew kinds.
    "default": _PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
}


def special_ids(gguf: GGUFFile) -> dict[str, Any]:
    """The ids of special tokens under their names in ``config.json``, without those not given.

    ``eos_token_id`` is a list if the file names tokens that end a turn or a message too.

    Raises:
        TokenizerError: the vocabulary is no list, or an id is no index into it.
    """
    if _PREFIX + "tokens" not in gguf.metadata:
        return {}
    tokens = _strings(gguf, "tokens")
    ids: dict[str, Any] = {}
    for key, name in (
        ("bos_token_id", "bos_token_id"),
        ("padding_token_id", "pad_token_id"),
        ("eos_token_id", "eos_token_id"),
        ("eot_token_id", "eot"),
        ("eom_token_id", "eom"),
    ):
        value = gguf.metadata.get(_PREFIX + key)
        if value is None:
            continue
        if type(value) is not int or not 0 <= value < len(tokens):
            raise TokenizerError(
                f"{gguf.path}: {_PREFIX}{key} is {value!r}, but there are {len(tokens)} tokens"
            )
        ids[name] = value
    ends = dict.fromkeys(ids.pop(name) for name in ("eos_token_id", "eot", "eom") if name in ids)
    if ends:
        ids["eos_token_id"] = list(ends) if len(ends) > 1 else next(iter(ends))
    return ids


def write_tokenizer(gguf: GGUFFile, folder: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``; nothing if the file has no tokenizer.

    Raises:
        TokenizerError: the tokenizer is of an unknown kind, or its tables contradict each other.
    """
    kind = gguf.metadata.get(_PREFIX + "model", "none")
    if not isinstance(kind, str) or kind not in ("none", "no_vocab", "gpt2", "llama"):
        raise TokenizerError(
            f"{gguf.path} has a tokenizer of the kind {kind!r}; gpt2 (byte-level BPE) and llama "
            "(SentencePiece BPE) can be translated; give the model's own with --tokenizer"
        )
    if kind in ("none", "no_vocab"):
        return
    tables = _Tables(gguf)
    # Damaged tables surface as plain exceptions of the library.
    try:
        tokenizer = _byte_level(tables) if kind == "gpt2" else _sentencepiece(tables)
        _add_special_tokens(tokenizer, tables)
    except TokenizerError:
        raise
    except Exception as error:
        raise TokenizerError(f"{gguf.path}: the tokenizer's tables are damaged: {error}") from error
    (folder / "tokenizer.json").write_bytes(with_short_merges(tokenizer.to_str().encode()))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(tables.config(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )


def _strings(gguf: GGUFFile, key: str) -> list[str]:
    value = gguf.metadata.get(_PREFIX + key)
    if not isinstance(value, list):
        raise TokenizerError(f"{gguf.path}: {_PREFIX}{key} must be an array of strings")
    return value


class _Tables:
    """The tokenizer's part of the metadata, checked."""

    def __init__(self, gguf: GGUFFile) -> None:
        self.path = gguf.path
        self._gguf, self._metadata = gguf, gguf.metadata
        self.is_byte_level = self.get("model") == "gpt2"
        tokens = _strings(gguf, "tokens")
        # As in llama.cpp: an id without text keeps its place.
        self.tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(tokens)]
        self.vocab = self._ids()
        self.types = self._numbers("token_type", [_NORMAL] * len(tokens))
        if not self.is_byte_level:
            # Pieces taken whole are found in text as it is; old files write their spaces otherwise.
            self.tokens = [
                token.replace("▁", " ") if type_ == _USER_DEFINED else token
                for token, type_ in zip(self.tokens, self.types, strict=True)
            ]
            self.vocab = self._ids()
        # SentencePiece cuts text nowhere before it merges.
        self.pre = self._pre() if self.is_byte_level else _PreTokenizer((), add_bos=True)
        self.add_bos = self._flag("add_bos_token", self.pre.add_bos)
        self.add_eos = self._flag("add_eos_token", False)
        self.ids = special_ids(gguf)

    def get(self, key: str) -> Any:
        return self._metadata.get(_PREFIX + key)

    def _ids(self) -> dict[str, int]:
        ids = {token: index for index, token in enumerate(self.tokens)}
        if len(ids) != len(self.tokens):
            twice = next(t for i, t in enumerate(self.tokens) if ids[t] != i)
            raise TokenizerError(f"{self.path}: the token {twice!r} has two ids")
        return ids

    def merges(self) -> list[tuple[str, str]]:
        pairs = []
        for merge in _strings(self._gguf, "merges"):
            # A piece may begin with a space, but is never empty.
            at = merge.find(" ", 1)
            if at < 0:
                raise TokenizerError(f"{self.path}: the merge {merge!r} has no second piece")
            pairs.append((merge[:at], merge[at + 1 :]))
        return pairs

    def scores(self) -> list[float]:
        scores: list[float] = self._numbers("scores", None)
        return scores

    def add_space_prefix(self) -> bool:
        return self._flag("add_space_prefix", True)

    def config(self) -> dict[str, Any]:
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_bos_token": self.add_bos,
            "add_eos_token": self.add_eos,
            "clean_up_tokenization_spaces": False,
        }
        for key, name in (
            ("bos_token_id", "bos_token"),
            ("eos_token_id", "eos_token"),
            ("unknown_token_id", "unk_token"),
            ("padding_token_id", "pad_token"),
        ):
            index = self.get(key)
            if isinstance(index, int) and 0 <= index < len(self.tokens):
                config[name] = self.tokens[index]
        length = self._metadata.get(f"{self._metadata.get('general.architecture')}.context_length")
        if isinstance(length, int):
            config["model_max_length"] = length
        template = self._metadata.get("tokenizer.chat_template")
        names = self._metadata.get("tokenizer.chat_templates")
        if isinstance(names, list):
            templates = {
                name: self._metadata.get(f"tokenizer.chat_template.{name}") for name in names
            }
            config["chat_template"] = [
                {"name": name, "template": text}
                for name, text in {"default": template, **templates}.items()
                if isinstance(text, str)
            ]
        elif isinstance(template, str):
            config["chat_template"] = template
        return config

    def _pre(self) -> _PreTokenizer:
        name = self.get("pre")
        if name is None:
            logger.warning(
                "%s does not say its tokenizer.ggml.pre, so 'default' is used; newer conversions "
                "of the model split text better",
                self.path,
            )
            name = "default"
        pre = _PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
        if pre is None:
            raise TokenizerError(
                f"{self.path} splits text by the rules {name!r} (tokenizer.ggml.pre), which are "
                f"not known; known are {', '.join(sorted(_PRE_TOKENIZERS))}; give the model's own "
                "tokenizer with --tokenizer"
            )
        return pre

    def _numbers(self, key: str, default: Any) -> Any:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not hasattr(value, "tolist") or len(value) != len(self.tokens):
            raise TokenizerError(
                f"{self.path}: {_PREFIX}{key} must be an array of {len(self.tokens)} numbers, one "
                "for each token"
            )
        return value.tolist()

    def _flag(self, key: str, default: bool) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise TokenizerError(
                f"{self.path}: {_PREFIX}{key} must be true or false, got {value!r}"
            )
        return value


def _byte_level(tables: _Tables) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pre = tables.pre
    tokenizer = Tokenizer(
        models.BPE(vocab=tables.vocab, merges=tables.merges(), ignore_merges=pre.whole_words)
    )
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(tables: _Tables) -> Tokenizer:
    """SentencePiece's BPE model, which has scores of pieces where ``tokenizers`` has merges."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    for key in ("precompiled_charsmap", "remove_extra_whitespaces"):
        if tables.get(key) not in (None, False):
            raise TokenizerError(
                f"{tables.path} normalises text by {_PREFIX}{key}, which is not known here; give "
                "the model's own tokenizer with --tokenizer"
            )
    unknown = [tables.tokens[i] for i, type_ in enumerate(tables.types) if type_ == _UNKNOWN]
    tokenizer = Tokenizer(
        models.BPE(
            vocab=tables.vocab,
            merges=_merges_of_scores(tables),
            unk_token=unknown[0] if unknown else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = tables.add_space_prefix()
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _merges_of_scores(tables: _Tables) -> list[tuple[str, str]]:
    """Every way to put a piece together from two, in the order in which SentencePiece would.

    It always joins the neighbours whose union has the highest score. Ways to the same piece are
    ordered by the ids of their halves, as in the published conversions of such models.
    """
    mergeable = {
        token: index
        for token, index in tables.vocab.items()
        if tables.types[index] in (_NORMAL, _UNUSED)
    }
    scores = tables.scores()
    merges = []
    for piece, index in mergeable.items():
        ways = []
        for cut in range(1, len(piece)):
            left, right = mergeable.get(piece[:cut]), mergeable.get(piece[cut:])
            if left is not None and right is not None:
                ways.append((left, right))
        merges += [(-scores[index], left, right) for left, right in sorted(ways)]
    merges.sort(key=lambda merge: merge[0])
    return [(tables.tokens[left], tables.tokens[right]) for _, left, right in merges]


def _add_special_tokens(tokenizer: Tokenizer, tables: _Tables) -> None:
    from tokenizers import AddedToken, processors

    special = {_CONTROL} if tables.is_byte_level else {_CONTROL, _UNKNOWN}
    ends = {tables.tokens[index] for index in tables.ids.values() if isinstance(index, int)}
    plain = tables.pre.plain - ends
    # All at once: each call prepares the search for all of them anew, and Gemma 3 has 6400.
    tokenizer.add_tokens(
        [
            AddedToken(token, special=type_ in special and token not in plain, normalized=False)
            for token, type_ in zip(tables.tokens, tables.types, strict=True)
            if type_ in special or type_ == _USER_DEFINED
        ]
    )
    around = {}
    for wanted, key in ((tables.add_bos, "bos_token_id"), (tables.add_eos, "eos_token_id")):
        if wanted:
            index = tables.get(key)
            if key not in tables.ids:
                raise TokenizerError(
                    f"{tables.path} wants {key.removesuffix('_id')} added to every text, but does "
                    f"not give {_PREFIX}{key}"
                )
            around[key] = (tables.tokens[index], index)
    if around:
        bos = [around["bos_token_id"][0]] if "bos_token_id" in around else []
        eos = [around["eos_token_id"][0]] if "eos_token_id" in around else []
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*bos, "$A", *eos],
            pair=[
                *bos,
                "$A",
                *eos,
                *(f"{token}:1" for token in bos),
                "$B:1",
                *(f"{token}:1" for token in eos),
            ],
            special_tokens=list(around.values()),
        )
