"""A SentencePiece file as a tokenizer, for checkpoints that bring no tokenizer.json.

The ``sentencepiece`` library itself encodes, so that the ids are those of the model's authors. What
it does not know, because a family's own code does it, comes as a
:class:`~engine_core.configs.SentencePieceFormat`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, decoders

from engine_core.configs import SentencePieceFormat
from engine_core.errors import TokenizerError
from engine_core.text.tokenizer import Tokenizer, check_text, component_config, text_room

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor

_SPACE = "\u2581"  # how a piece writes a space
# Appended to a serialised ModelProto, these bytes set normalizer_spec.add_dummy_prefix to false:
# protobuf merges a message that occurs twice, and the later value counts.
_NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model with a family's special tokens.

    Text between two special tokens is encoded by itself, as the original tokenizers do.

    Args:
        file: the model, such as tokenizer.model.
        format: what the family adds to it.
        added_tokens: tokens by id that the checkpoint's other files add.
        special_tokens: see :class:`Tokenizer`.
        chat_templates: see :class:`Tokenizer`.
        space_after_tokens: whether the space that SentencePiece puts before a text is also put
            before the text after a special token.

    Raises:
        TokenizerError: the library is not installed, or the file is not one of its models or does
            not fit the format or the added tokens.
    """

    def __init__(
        self,
        file: Path,
        format: SentencePieceFormat,  # noqa: A002 - what it is everywhere else
        *,
        added_tokens: Mapping[int, AddedToken],
        special_tokens: Mapping[str, str],
        chat_templates: Mapping[str, str],
        space_after_tokens: bool = True,
    ) -> None:
        super().__init__(special_tokens=special_tokens, chat_templates=chat_templates)
        self._file = file
        model = _read(file)
        self._first = _load(file, model)
        self._next = self._first if space_after_tokens else _load(file, model + _NO_DUMMY_PREFIX)
        self._pieces: list[str] = self._first.id_to_piece(list(range(self._first.vocab_size())))
        self._ids = {piece: index for index, piece in enumerate(self._pieces)}
        size = len(self._pieces)
        control = [
            index
            for index in range(size)
            if self._first.is_control(index) or self._first.is_unknown(index)
        ]
        own = {size + place: AddedToken(token) for place, token in enumerate(format.added_tokens)}
        added = {**own, **added_tokens}
        self._check_added(own, added)
        self._ids.update({token.content: index for index, token in added.items()})
        self._added = {index: token.content for index, token in added.items() if index >= size}
        self.vocab_size = max([size - 1, *self._added]) + 1
        named = set(special_tokens.values())
        self.special_ids = frozenset(
            [
                *control,
                *own,
                *map(self._id, format.special_pieces),
                *(i for i, token in added.items() if token.special or token.content in named),
            ]
        )
        found = {
            token: AddedToken(token)
            for token, index in self._ids.items()
            if index in self.special_ids
        }
        found.update({token.content: token for token in added.values()})
        self._found = _pattern(found)
        self._prefix = [self._id(token) for token in format.prefix]
        self._suffix = [self._id(token) for token in format.suffix]
        self._replacements = format.replacements
        longest_first = sorted(format.replacements, key=len, reverse=True)
        self._replaced = re.compile(_alternatives(map(re.escape, longest_first)))
        # What decoding spells otherwise than the file does.
        self._spelled = {
            self._id(piece): text.replace(" ", _SPACE)
            for text, piece in format.replacements.items()
        }
        self._ids.update({text: index for index, text in self._spelled.items()})
        has_space = self._first.encode("x", out_type=str)[0].startswith(_SPACE)
        self._decoder = decoders.Sequence(
            [
                decoders.Replace(_SPACE, " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                *([decoders.Strip(" ", 1, 0)] if has_space else []),
            ]
        )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """See :meth:`Tokenizer.encode`."""
        check_text(text)
        ids = list(self._prefix) if add_special_tokens else []
        end = 0
        for match in self._found.finditer(text):
            ids += self._encode(text[end : match.start()], is_first=end == 0)
            token = match[0]
            ids.append(self._ids[token if token in self._ids else token.strip()])
            end = match.end()
        ids += self._encode(text[end:], is_first=end == 0)
        return [*ids, *self._suffix] if add_special_tokens else ids

    def _cut(self, ids: list[int], most: int) -> list[int]:
        room = text_room(most, len(self._prefix) + len(self._suffix))
        bare = ids[len(self._prefix) : len(ids) - len(self._suffix)]
        first = max(0, len(bare) - room) if self.truncation_side == "left" else 0
        return [*self._prefix, *bare[first : first + room], *self._suffix]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """See :meth:`Tokenizer.decode`."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        tokens = (self.id_to_token(index) for index in ids if index not in skipped)
        text: str = self._decoder.decode([token for token in tokens if token is not None])
        return text

    def id_to_token(self, token_id: int) -> str | None:
        """See :meth:`Tokenizer.id_to_token`."""
        if token_id in self._spelled:
            return self._spelled[token_id]
        if 0 <= token_id < len(self._pieces):
            return self._pieces[token_id]
        return self._added.get(token_id)

    def token_to_id(self, token: str) -> int | None:
        """See :meth:`Tokenizer.token_to_id`."""
        return self._ids.get(token)

    @property
    def decoder_config(self) -> Mapping[str, Any] | None:
        """See :attr:`Tokenizer.decoder_config`."""
        return component_config(self._decoder)

    def _encode(self, text: str, *, is_first: bool) -> list[int]:
        if not text:
            return []
        text = self._replaced.sub(lambda match: self._replacements[match[0]], text)
        ids: list[int] = (self._first if is_first else self._next).encode(text)
        return ids

    def _id(self, token: str) -> int:
        if token not in self._ids:
            raise TokenizerError(
                f"{self._file} has no piece {token!r}, which this model family's tokenizer needs: "
                "it is another model's file"
            )
        return self._ids[token]

    def _check_added(self, own: Mapping[int, AddedToken], added: Mapping[int, AddedToken]) -> None:
        for index, token in added.items():
            known = (
                self._pieces[index] if index < len(self._pieces) else own.get(index, token).content
            )
            elsewhere = self._ids.get(token.content, index)
            if known != token.content or elsewhere != index:
                raise TokenizerError(
                    f"{self._file.parent}: the added token {token.content!r} has the id {index}, "
                    + (
                        f"which is {known!r}"
                        if known != token.content
                        else f"but {self._file.name} has it as {elsewhere}"
                    )
                )


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise TokenizerError(f"{file} cannot be read: {error}") from error


def _load(file: Path, model: bytes) -> SentencePieceProcessor:
    try:
        from sentencepiece import SentencePieceProcessor
    except ImportError as error:
        raise TokenizerError(
            f"{file} is a SentencePiece file; install the library that reads it: pip install "
            "'engine-core-llm[sentencepiece]', or put a tokenizer.json beside it"
        ) from error
    processor = SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(model)
        processor.vocab_size()
    except Exception as error:  # the library raises nothing more precise
        raise TokenizerError(f"{file} is no SentencePiece model: {error}") from error
    return processor


def _pattern(tokens: Mapping[str, AddedToken]) -> re.Pattern[str]:
    """Finds the tokens in a text, with the spaces around that a token takes in."""

    def one(content: str, token: AddedToken) -> str:
        expression = re.escape(content)
        # Letters alone would else be found inside of words.
        if token.single_word or content.isalpha():
            expression = rf"(?<!\w){expression}(?!\w)"
        left, right = (r"\s*" if strips else "" for strips in (token.lstrip, token.rstrip))
        return f"{left}{expression}{right}"

    longest_first = sorted(tokens.items(), key=lambda item: len(item[0]), reverse=True)
    return re.compile(_alternatives(one(*item) for item in longest_first))


def _alternatives(expressions: Iterable[str]) -> str:
    """An expression for the first of ``expressions`` that fits; for none, one that never does."""
    return "|".join(expressions) or r"(?!)"
