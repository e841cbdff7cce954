"""Finds and reads the tokenizer of a checkpoint folder.

A tokenizer.json is read by the ``tokenizers`` library, which takes milliseconds where importing
transformers takes seconds. The result is that of transformers' ``AutoTokenizer``. Added and special
tokens of the other files are resolved as it does, and tokenizers whose result could differ are left
to it. ``AutoTokenizer`` builds some tokenizers anew, in a way fixed by the class that
tokenizer_config.json names; tokenizer.json is then used only if it says the same.

There is one deliberate difference: a token of ``added_tokens_decoder`` gets the id stated there,
where transformers closes gaps between ids, although the model was trained on those stated.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from engine_core.configs import SentencePieceFormat, TiktokenFormat
from engine_core.configs.hf_config import read_object
from engine_core.errors import EngineError, TokenizerError
from engine_core.text.sentencepiece_tokenizer import SentencePieceTokenizer
from engine_core.text.template_choice import DEFAULT_TEMPLATE
from engine_core.text.tiktoken import read_tiktoken
from engine_core.text.tokenizer import (
    FastTokenizer,
    Tokenizer,
    TransformersTokenizer,
    component_config,
)

logger = logging.getLogger(__name__)

_TOKENIZER_FILE = "tokenizer.json"
_CONFIG_FILE = "tokenizer_config.json"
# What AutoTokenizer, or a checkpoint's own code, builds a tokenizer from.
_VOCABULARY_PATTERNS = (
    "*.model",
    "tokenizer.model.*",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tekken.json",
    "*.tiktoken",
)

_NAMED_TOKENS = tuple(
    f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)

# Where model_input_names has it, a model is told which of two texts a token is of.
_TYPES = "token_type_ids"

# Values of tokenizer_class with which AutoTokenizer takes tokenizer.json as it is.
_GENERIC_CLASSES = frozenset({"PreTrainedTokenizerFast", "TokenizersBackend"})

# Word-splitting expressions that transformers' classes write into the byte-level BPE tokenizers
# which they build anew, always with NFC before and nothing but bytes after.
_BUILT_IN_SPLITS = frozenset(
    {
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
        r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    }
)

# More ids than any vocabulary leaves free between its tokens; a larger gap is a wrong id.
_MAX_ID_GAP = 4096


def load_tokenizer(
    folder: Path,
    sentencepiece: SentencePieceFormat | None = None,
    tiktoken: TiktokenFormat | None = None,
) -> Tokenizer:
    """The tokenizer in a checkpoint folder. Code that came with the checkpoint is never run.

    Reads tokenizer.json with tokenizer_config.json, special_tokens_map.json, added_tokens.json and
    chat templates (chat_template.jinja, additional_chat_templates/, tokenizer_config.json,
    chat_template.json: the first of these that has one). Without tokenizer.json, a SentencePiece
    file, or one of tiktoken's ranks, is read as its family says (``sentencepiece`` and
    ``tiktoken`` of ``ModelConfig``). A folder with another tokenizer file (vocab.json and
    merges.txt, ...) is left to transformers.

    Raises:
        TokenizerError: there is no tokenizer, or a file of it cannot be read.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise TokenizerError(f"{folder} is not a folder, so there is no tokenizer in it")
    config = _read_json_object(folder / _CONFIG_FILE)
    chat_templates = _read_chat_templates(folder, config)
    tokenizer_file = folder / _TOKENIZER_FILE
    if not tokenizer_file.is_file():
        if sentencepiece is not None and _may_be_sentencepiece(folder / sentencepiece.file):
            return _sentencepiece_tokenizer(folder, sentencepiece, config, chat_templates)
        if tiktoken is not None and (folder / tiktoken.file).is_file():
            with _failing(f"{folder / tiktoken.file} cannot be read"):
                backend = read_tiktoken(folder / tiktoken.file, tiktoken)
                tokens = _read_declared_tokens(folder, config, ())
                made = _fast_tokenizer(folder, backend, config, tokens, chat_templates)
                made.special_tokens = {**tiktoken.named_tokens, **made.special_tokens}
                return made
        if any(any(folder.glob(pattern)) for pattern in _VOCABULARY_PATTERNS):
            try:
                return _load_with_transformers(folder, chat_templates)
            except TokenizerError as error:
                if "auto_map" not in config:
                    raise
                raise TokenizerError(
                    f"{folder}: the tokenizer class {config.get('tokenizer_class')} is code of the "
                    f"checkpoint's own, which is never run. Put a {_TOKENIZER_FILE} converted from "
                    "its files beside them, name a folder with one as tokenizer, or set "
                    "skip_tokenizer_init and give prompts as token ids"
                ) from error
        raise TokenizerError(
            f"{folder} has no tokenizer: neither {_TOKENIZER_FILE} nor any of "
            f"{', '.join(_VOCABULARY_PATTERNS)}. Put the checkpoint's tokenizer files there, or "
            "set skip_tokenizer_init and give prompts as token ids"
        )
    backend = _read_backend(tokenizer_file)
    tokens = _read_declared_tokens(folder, config, backend.get_added_tokens_decoder())
    reason = _reason_for_transformers(
        config, _read_json_object(folder / "config.json"), backend, tokens
    )
    if reason is None:
        return _fast_tokenizer(folder, backend, config, tokens, chat_templates)
    logger.info("%s: left to transformers, because %s", folder, reason)
    try:
        return _load_with_transformers(folder, chat_templates)
    except TokenizerError:
        if "auto_map" not in config:
            raise
        # tokenizer.json is what somebody converted that code to, and all that can be used.
        logger.warning(
            "%s: the tokenizer class %s is code of the checkpoint's own, which is never run; "
            "using %s as it is",
            folder,
            config.get("tokenizer_class"),
            _TOKENIZER_FILE,
        )
        return _fast_tokenizer(folder, backend, config, tokens, chat_templates)


def _read_backend(file: Path) -> Backend:
    with _failing(f"{file} cannot be read"):
        data = file.read_bytes()
        if re.search(rb'"continuing_subword_prefix"\s*:\s*"[^"]', data):
            _check_prefix(file, json.loads(data))
        return Backend.from_str(data.decode())


def _check_prefix(file: Path, values: Any) -> None:
    """Refuse merges without the prefix that the library cuts off them unseen."""
    model = values["model"]
    prefix = model["continuing_subword_prefix"]
    for merge in model.get("merges", ()):
        piece = merge.split(" ", 1)[1] if isinstance(merge, str) else merge[1]
        if not piece.startswith(prefix):
            raise TokenizerError(
                f"{file}: continuing_subword_prefix is {prefix!r}, but the second piece of the "
                f"merge {merge!r} does not begin with it"
            )


@contextmanager
def _failing(what: str) -> Iterator[None]:
    """Turn what the libraries raise, a dozen kinds, into a :class:`TokenizerError`."""
    try:
        yield
    except EngineError:
        raise
    except BaseException as error:
        # A panic of the tokenizers library derives from BaseException.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise TokenizerError(f"{what}: {error}") from error


@dataclass(frozen=True)
class _DeclaredTokens:
    """Tokens that the files beside tokenizer.json name.

    Attributes:
        added: by id, as ``added_tokens_decoder`` or added_tokens.json has them.
        named: ``bos_token`` and its kin, and names of the checkpoint's own (``image_token``).
        extra: special tokens without a name.
    """

    added: Mapping[int, AddedToken]
    named: Mapping[str, AddedToken]
    extra: tuple[AddedToken, ...]


def _fast_tokenizer(
    folder: Path,
    backend: Backend,
    config: Mapping[str, Any],
    tokens: _DeclaredTokens,
    chat_templates: Mapping[str, str],
) -> FastTokenizer:
    input_names = config.get("model_input_names") or ()
    if not isinstance(input_names, list | tuple):
        raise TokenizerError(
            f"{folder / _CONFIG_FILE}: model_input_names must be a list, got {input_names!r}"
        )
    unused_ids = _add_tokens(folder, backend, tokens)
    backend.encode_special_tokens = bool(config.get("split_special_tokens", False))
    made = FastTokenizer(
        backend,
        special_tokens={name: token.content for name, token in tokens.named.items()},
        chat_templates=chat_templates,
        unused_ids=unused_ids,
        gives_types=_TYPES in input_names,
    )
    made.truncation_side = _truncation_side(folder, config)
    return made


def _truncation_side(folder: Path, config: Mapping[str, Any]) -> str:
    side: str = config.get("truncation_side") or "right"
    if side not in ("left", "right"):
        raise TokenizerError(
            f"{folder / _CONFIG_FILE}: truncation_side must be 'left' or 'right', got {side!r}"
        )
    return side


def _may_be_sentencepiece(file: Path) -> bool:
    """Whether it exists and is no tiktoken file, which some families gave the same name."""
    if not file.is_file():
        return False
    try:
        with file.open("rb") as stream:
            line = stream.readline(1024)
    except OSError as error:
        raise TokenizerError(f"{file} cannot be read: {error}") from error
    return re.match(rb"[A-Za-z0-9+/]+=* \d+\r?\n", line) is None


def _sentencepiece_tokenizer(
    folder: Path,
    format: SentencePieceFormat,  # noqa: A002 - what it is everywhere else
    config: Mapping[str, Any],
    chat_templates: Mapping[str, str],
) -> SentencePieceTokenizer:
    for key in ("do_lower_case", "remove_space"):
        if config.get(key):
            raise TokenizerError(
                f"{folder}: {_CONFIG_FILE} sets {key}, which is not supported for a SentencePiece "
                f"file; put a {_TOKENIZER_FILE} converted from it beside it"
            )
    tokens = _read_declared_tokens(folder, config, ())
    named = {**format.named_tokens, **{name: token.content for name, token in tokens.named.items()}}
    added = dict(tokens.added)
    for token in added.values():
        token.special = token.special or token in tokens.extra
    made = SentencePieceTokenizer(
        folder / format.file,
        replace(
            format,
            prefix=_with_token(format.prefix, named.get("bos_token"), config.get("add_bos_token")),
            suffix=_with_token(format.suffix, named.get("eos_token"), config.get("add_eos_token")),
        ),
        added_tokens=added,
        special_tokens=named,
        chat_templates=chat_templates,
        space_after_tokens=config.get("legacy") is not False,
    )
    made.truncation_side = _truncation_side(folder, config)
    return made


def _with_token(tokens: tuple[str, ...], token: str | None, wanted: object) -> tuple[str, ...]:
    """``tokens`` with ``token`` if it is wanted, without it if not; as they are if nothing says."""
    if token is None or wanted is None or (token in tokens) == bool(wanted):
        return tokens
    return (*tokens, token) if wanted else tuple(item for item in tokens if item != token)


def _add_tokens(folder: Path, backend: Backend, tokens: _DeclaredTokens) -> frozenset[int]:
    """Adds to the backend what it lacks, and says which ids had to be filled."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    named = {token.content for token in tokens.named.values()}
    unused: set[int] = set()
    for token_id, token in sorted(tokens.added.items()):
        if token.content in named:
            token.special = True
        if backend.token_to_id(token.content) is None:
            unused |= _fill_ids_before(folder, backend, token_id, token)
        backend.add_tokens([token])
        known.add(token.content)
    for token in (*tokens.named.values(), *tokens.extra):
        if token.content not in known:
            backend.add_tokens([token])
            known.add(token.content)
    return frozenset(unused)


def _fill_ids_before(
    folder: Path, backend: Backend, token_id: int, token: AddedToken
) -> frozenset[int]:
    """Makes ``token_id`` the next id that the backend gives, unless it is taken already."""
    next_id = max(
        [backend.get_vocab_size(with_added_tokens=False)]
        + [added_id + 1 for added_id in backend.get_added_tokens_decoder()]
    )
    if token_id < next_id:
        logger.warning(
            "%s: the added token %r gets the id %d, because %s has another token of its id %d",
            folder,
            token.content,
            next_id,
            _TOKENIZER_FILE,
            token_id,
        )
        return frozenset()
    if token_id > next_id + _MAX_ID_GAP:
        raise TokenizerError(
            f"{folder}: {_CONFIG_FILE} or added_tokens.json gives the token {token.content!r} the "
            f"id {token_id}, but the first id free in {_TOKENIZER_FILE} is {next_id}"
        )
    # Special, so that decoding can skip them, and with a character that no text contains.
    filler = [
        AddedToken(f"\U0010ffff{unused_id}", special=True) for unused_id in range(next_id, token_id)
    ]
    backend.add_tokens(filler)
    return frozenset(range(next_id, token_id))


def _reason_for_transformers(
    config: Mapping[str, Any],
    model_config: Mapping[str, Any],
    backend: Backend,
    tokens: _DeclaredTokens,
) -> str | None:
    """Why tokenizer.json alone may not give what ``AutoTokenizer`` gives; None if it does."""
    for key in (
        "fix_mistral_regex",
        "fast_tokenizer_files",
        "init_inputs",
        "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output",
    ):
        if config.get(key):
            return f"{_CONFIG_FILE} sets {key}"
    if config.get("clean_up_tokenization_spaces") and not isinstance(backend.model, BPE):
        return f"{_CONFIG_FILE} sets clean_up_tokenization_spaces"
    declared = config.get("tokenizer_class") or model_config.get("tokenizer_class")
    if not isinstance(declared, str | None):
        raise TokenizerError(f"{_CONFIG_FILE}: tokenizer_class must be a name, got {declared!r}")
    if declared in _GENERIC_CLASSES or (declared is None and not model_config.get("model_type")):
        return None
    if _is_built_in_pipeline(backend) and _declares_all_tokens(config, backend, tokens):
        return None
    return f"the tokenizer class {declared} may not take {_TOKENIZER_FILE} as it is"


def _is_built_in_pipeline(backend: Backend) -> bool:
    model = backend.model
    if not isinstance(model, BPE):
        return False
    if model.dropout or model.unk_token or model.fuse_unk or model.byte_fallback:
        return False
    if model.continuing_subword_prefix or model.end_of_word_suffix or model.ignore_merges:
        return False
    decoder = component_config(backend.decoder)
    pre_tokenizer = component_config(backend.pre_tokenizer)
    if component_config(backend.normalizer) != {"type": "NFC"}:
        return False
    if decoder is None or decoder["type"] != "ByteLevel":
        return False
    if pre_tokenizer is None or pre_tokenizer["type"] != "Sequence":
        return False
    match pre_tokenizer["pretokenizers"]:
        case [
            {
                "type": "Split",
                "pattern": {"Regex": expression},
                "behavior": "Isolated",
                "invert": False,
            },
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
        ]:
            return expression in _BUILT_IN_SPLITS
    return False


def _declares_all_tokens(
    config: Mapping[str, Any], backend: Backend, tokens: _DeclaredTokens
) -> bool:
    """Whether a class that reads only tokenizer_config.json gets every token of tokenizer.json.

    Such a class has its own values for names that the config leaves out, and makes every token
    that has a name special.
    """
    if "added_tokens_decoder" not in config or config.get("add_prefix_space"):
        return False
    if not all(name in config for name in ("bos_token", "eos_token", "unk_token", "pad_token")):
        return False
    present = backend.get_added_tokens_decoder()
    if {index: repr(token) for index, token in present.items()} != {
        index: repr(token) for index, token in tokens.added.items()
    }:
        return False
    special = {token.content for token in present.values() if token.special}
    return special >= {token.content for token in (*tokens.named.values(), *tokens.extra)}


def _load_with_transformers(folder: Path, chat_templates: Mapping[str, str]) -> Tokenizer:
    with _failing(f"transformers cannot read the tokenizer in {folder}"):
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        hf_tokenizer: Any = AutoTokenizer.from_pretrained(
            str(folder), trust_remote_code=False, local_files_only=True
        )
    uses_backend_alone = isinstance(hf_tokenizer, PreTrainedTokenizerFast) and all(
        getattr(type(hf_tokenizer), method) is getattr(PreTrainedTokenizerFast, method)
        for method in ("encode", "_encode_plus", "decode", "_decode")
    )
    cleans_up = hf_tokenizer.clean_up_tokenization_spaces and (
        getattr(
            hf_tokenizer,
            "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output",
            False,
        )
        or not (uses_backend_alone and isinstance(hf_tokenizer.backend_tokenizer.model, BPE))
    )
    if uses_backend_alone and not cleans_up:
        made = FastTokenizer(
            hf_tokenizer.backend_tokenizer,
            special_tokens=hf_tokenizer.special_tokens_map,
            chat_templates=chat_templates,
            gives_types=_TYPES in hf_tokenizer.model_input_names,
        )
        made.truncation_side = hf_tokenizer.truncation_side
        return made
    return TransformersTokenizer(hf_tokenizer, chat_templates=chat_templates)


def _read_declared_tokens(
    folder: Path, config: Mapping[str, Any], present: Collection[int]
) -> _DeclaredTokens:
    """Tokens that the files declare; ``present`` are added ids the tokenizer has already."""
    settings = _with_origin(folder / _CONFIG_FILE, config)
    if "added_tokens_decoder" not in config:
        # Before transformers 4.34 special and added tokens stood in two files of their own.
        file = folder / "special_tokens_map.json"
        settings.update(_with_origin(file, _read_json_object(file)))
    standard: dict[str, AddedToken] = {}
    own: dict[str, AddedToken] = {}
    extra: tuple[AddedToken, ...] = ()
    for name, (file, value) in settings.items():
        if value is None:
            continue
        if name in _NAMED_TOKENS:
            standard[name] = _token(file, name, value, special=True)
        elif name.endswith("_token") and isinstance(value, (str, dict)):
            own[name] = _token(file, name, value, special=True)
        elif name == "extra_special_tokens" and isinstance(value, list):
            extra = tuple(_token(file, name, item, special=True) for item in value)
        elif name == "extra_special_tokens" and not isinstance(value, dict):
            raise TokenizerError(f"{file}: {name} is not a list of tokens: {value!r}")
    file, value = settings.get("extra_special_tokens", (folder, None))
    if isinstance(value, dict):
        own.update({name: _token(file, name, item, special=True) for name, item in value.items()})
    if "added_tokens_decoder" in config:
        added = _read_added_tokens(folder / _CONFIG_FILE, config["added_tokens_decoder"])
    else:
        special = {token.content for token in (*standard.values(), *extra)}
        added = _read_legacy_added_tokens(folder / "added_tokens.json", special, present)
    # added_tokens_decoder also says how a token takes the spaces around it, so it goes first.
    by_content = {token.content: token for token in added.values()}
    named = {
        name: by_content.get(standard[name].content, standard[name])
        for name in _NAMED_TOKENS
        if name in standard
    }
    return _DeclaredTokens(added, {**named, **own}, extra)


def _with_origin(file: Path, settings: Mapping[str, Any]) -> dict[str, tuple[Path, Any]]:
    """Each setting with the file it is from, the list of special tokens under its new name."""
    renamed = dict(settings)
    older = renamed.pop("additional_special_tokens", None)
    if older and not renamed.get("extra_special_tokens"):
        renamed["extra_special_tokens"] = older
    return {name: (file, value) for name, value in renamed.items()}


def _read_added_tokens(file: Path, entries: object) -> dict[int, AddedToken]:
    if not isinstance(entries, dict):
        raise TokenizerError(f"{file}: added_tokens_decoder is not an object")
    added = {}
    for index, entry in entries.items():
        if not index.isdecimal():
            raise TokenizerError(f"{file}: added_tokens_decoder has the id {index!r}")
        added[int(index)] = _token(file, f"added_tokens_decoder[{index}]", entry)
    return added


def _read_legacy_added_tokens(
    file: Path, special: set[str], present: Collection[int]
) -> dict[int, AddedToken]:
    added = {}
    for content, index in _read_json_object(file).items():
        if not isinstance(index, int) or index < 0:
            raise TokenizerError(f"{file}: {content!r} has the id {index!r}")
        if index not in present:
            is_special = content in special
            added[index] = AddedToken(content, normalized=not is_special, special=is_special)
    return added


def _token(file: Path, name: str, value: object, *, special: bool = False) -> AddedToken:
    """The token that a JSON value stands for."""
    if isinstance(value, str) and value:
        return AddedToken(value, special=special)
    if isinstance(value, dict) and isinstance(value.get("content"), str) and value["content"]:
        flags = {
            flag: bool(value[flag])
            for flag in ("single_word", "lstrip", "rstrip", "normalized", "special")
            if flag in value
        }
        return AddedToken(value["content"], **{"special": special, **flags})
    raise TokenizerError(f"{file}: {name} is not a token: {value!r}")


def _read_chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The chat templates by name, from the first place that has any."""
    templates = {
        file.stem: _read_text(file)
        for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))
    }
    default_file = folder / "chat_template.jinja"
    if default_file.is_file():
        templates[DEFAULT_TEMPLATE] = _read_text(default_file)
    if templates:
        return templates
    for file, settings in (
        (folder / _CONFIG_FILE, config),
        (folder / "chat_template.json", _read_json_object(folder / "chat_template.json")),
    ):
        value = settings.get("chat_template")
        if value is not None:
            return _named_templates(file, value)
    return {}


def _named_templates(file: Path, value: object) -> dict[str, str]:
    if isinstance(value, str):
        return {DEFAULT_TEMPLATE: value}
    if isinstance(value, list):
        try:
            value = {entry["name"]: entry["template"] for entry in value}
        except (TypeError, KeyError) as error:
            raise TokenizerError(
                f"{file}: chat_template is a list whose entries lack name or template"
            ) from error
    if isinstance(value, dict) and all(isinstance(item, str) for item in value.values()):
        return value
    raise TokenizerError(f"{file}: chat_template is neither a template nor a list of named ones")


def _read_json_object(file: Path) -> dict[str, Any]:
    """The object in ``file``; empty if there is no such file."""
    return read_object(file, TokenizerError) if file.is_file() else {}


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{file} cannot be read: {error}") from error
