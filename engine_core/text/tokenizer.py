"""A tokenizer as the rest of the engine sees it, and its two implementations."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from engine_core.errors import RequestError, TokenizerError
from engine_core.text.template_choice import (
    DEFAULT_TEMPLATE,
    choose_chat_template,
    marked,
    until_mark,
)

if TYPE_CHECKING:
    from tokenizers import Encoding
    from tokenizers import Tokenizer as Backend

# From this many characters or tokens on, calls release the GIL for other threads.
_LONG_TEXT = 4096


class Tokenizer(ABC):
    """Text to token ids and back, and the checkpoint's chat templates.

    Args:
        special_tokens: the tokens that have a name, such as ``{"bos_token": "<s>"}``; chat
            templates find them under these names.
        chat_templates: jinja templates by name; a single one is called "default".

    Attributes:
        vocab_size: number of tokens, added ones included; a model may have more logits than this.
        special_ids: the tokens that ``skip_special_tokens`` leaves out.
        gives_types: whether its model is told which of two texts a token is of; else all of them
            have type 0.
        truncation_side: "left" if a text that is too long loses its beginning, else "right".
    """

    vocab_size: int
    special_ids: frozenset[int]
    gives_types = False
    truncation_side = "right"

    def __init__(
        self, *, special_tokens: Mapping[str, str], chat_templates: Mapping[str, str]
    ) -> None:
        self.special_tokens = dict(special_tokens)
        self.chat_templates = dict(chat_templates)

    @abstractmethod
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``, with the beginning- and end-of-sequence tokens that the
        tokenizer adds by itself, unless told not to.

        Special tokens that are written out in the text become their ids either way.

        Raises:
            RequestError: ``text`` is no string, or not one that UTF-8 can express.
        """

    def encode_all(
        self,
        texts: Sequence[str] | Sequence[tuple[str, str]],
        most: int | None = None,
    ) -> list[tuple[list[int], list[int]]]:
        """Token ids, and the type of each token, of many texts or pairs of texts.

        Special tokens are added as :meth:`encode` adds them; in a pair those of the second text
        are usually of type 1. With ``most`` texts are cut at their ends, or at their beginnings if
        tokenizer_config.json says so, of a pair the longer one first, so that each result has at
        most so many tokens, special ones included.

        Raises:
            RequestError: as :meth:`encode`, or the special tokens alone are more than ``most``, or
                this tokenizer joins no pairs.
        """
        if any(not isinstance(text, str) for text in texts):
            raise RequestError(
                f"a {type(self).__name__} knows no way to join two texts, which this needs"
            )
        ids = [self.encode(text) for text in texts if isinstance(text, str)]
        if most is not None:
            ids = [self._cut(each, most) for each in ids]
        return [(each, [0] * len(each)) for each in ids]

    def _cut(self, ids: list[int], most: int) -> list[int]:
        return ids[:most]

    def lower(self) -> None:
        """Put every text into lower case from now on, before it is split; not special tokens.

        Raises:
            TokenizerError: this kind of tokenizer cannot.
        """
        raise TokenizerError(
            f"sentence_bert_config.json: do_lower_case is not supported for a {type(self).__name__}"
        )

    @abstractmethod
    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ``ids``; ids outside the vocabulary give nothing."""

    @abstractmethod
    def id_to_token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it, or None for an unknown id."""

    @abstractmethod
    def token_to_id(self, token: str) -> int | None:
        """The id of a token as the vocabulary spells it, or None."""

    @property
    def decoder_config(self) -> Mapping[str, Any] | None:
        """How tokens become text, as the ``decoder`` of tokenizer.json says it; None if unknown."""
        return None

    @cached_property
    def bos_token_id(self) -> int | None:
        """The beginning-of-sequence token."""
        return self._named_id("bos_token")

    @cached_property
    def eos_token_id(self) -> int | None:
        """The end-of-sequence token; a model's generation config may name more."""
        return self._named_id("eos_token")

    @property
    def chat_template(self) -> str | None:
        """The template used unless a request names another."""
        return self.chat_templates.get(DEFAULT_TEMPLATE)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt for a chat. Encode it with ``add_special_tokens=False``: a template writes
        its special tokens itself.

        Args:
            messages: the chat, each message with a "role".
            add_generation_prompt: whether the header of the assistant's answer follows.
            continue_final_message: whether the prompt ends with the last message's content, for the
                answer to continue it; the header of another answer must not follow then.
            tools: JSON schemas of the functions that the model may call.
            chat_template: a template, or the name of one of the tokenizer's own.
            kwargs: further variables for the template, such as ``enable_thinking=False``.

        Raises:
            RequestError: malformed messages, no template, or an error from the template.
        """
        # jinja comes with it.
        from engine_core.text.chat_template import render_chat_template

        template = choose_chat_template(
            self.chat_templates, chat_template, with_tools=tools is not None
        )
        text = render_chat_template(
            template,
            marked(messages) if continue_final_message else messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            variables={**self.special_tokens, **kwargs},
        )
        return until_mark(text) if continue_final_message else text

    def _named_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.token_to_id(token)


class FastTokenizer(Tokenizer):
    """A tokenizer.json, read by the ``tokenizers`` library.

    Args:
        backend: the tokenizer; truncation and padding are switched off.
        special_tokens: see :class:`Tokenizer`.
        chat_templates: see :class:`Tokenizer`.
        unused_ids: ids that stand for no token and give no text.
        gives_types: see :class:`Tokenizer`.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        special_tokens: Mapping[str, str],
        chat_templates: Mapping[str, str],
        unused_ids: frozenset[int] = frozenset(),
        gives_types: bool = False,
    ) -> None:
        super().__init__(special_tokens=special_tokens, chat_templates=chat_templates)
        self.gives_types = gives_types
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._unused_ids = unused_ids
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self.special_ids = unused_ids | {
            token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        }

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """See :meth:`Tokenizer.encode`."""
        check_text(text)
        if len(text) < _LONG_TEXT:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        # encode_batch_fast computes no offsets and releases the GIL, so that other threads run
        # meanwhile. encode would hold it throughout.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def encode_all(
        self,
        texts: Sequence[str] | Sequence[tuple[str, str]],
        most: int | None = None,
    ) -> list[tuple[list[int], list[int]]]:
        """See :meth:`Tokenizer.encode_all`."""
        _check_all(texts)
        backend = self._backend
        if most is None:
            return [self._typed(each) for each in backend.encode_batch_fast(texts)]
        pairs = bool(texts) and not isinstance(texts[0], str)
        room = text_room(most, backend.num_special_tokens_to_add(is_pair=pairs))
        flat = [text for pair in texts for text in pair] if pairs else texts
        bare = backend.encode_batch_fast(flat, add_special_tokens=False)
        done = []
        for first in range(0, len(bare), 2 if pairs else 1):
            one, other = bare[first], bare[first + 1] if pairs else None
            own, others = _shares(len(one.ids), 0 if other is None else len(other.ids), room)
            one.truncate(own, direction=self.truncation_side)
            if other is not None:
                other.truncate(others, direction=self.truncation_side)
            done.append(self._typed(backend.post_process(one, other)))
        return done

    def _typed(self, encoding: Encoding) -> tuple[list[int], list[int]]:
        return encoding.ids, encoding.type_ids if self.gives_types else [0] * len(encoding.ids)

    def lower(self) -> None:
        """See :meth:`Tokenizer.lower`."""
        from tokenizers.normalizers import Lowercase, Normalizer, Sequence

        own = self._backend.normalizer
        steps: list[Normalizer] = [Lowercase()] if own is None else [Lowercase(), own]
        self._backend.normalizer = Sequence(steps)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """See :meth:`Tokenizer.decode`."""
        if self._unused_ids:
            ids = [token_id for token_id in ids if token_id not in self._unused_ids]
        if len(ids) < _LONG_TEXT:
            return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        (text,) = self._backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)
        return text

    def id_to_token(self, token_id: int) -> str | None:
        """See :meth:`Tokenizer.id_to_token`."""
        if token_id < 0 or token_id in self._unused_ids:
            return None
        return self._backend.id_to_token(token_id)

    def token_to_id(self, token: str) -> int | None:
        """See :meth:`Tokenizer.token_to_id`."""
        token_id = self._backend.token_to_id(token)
        return None if token_id in self._unused_ids else token_id

    @cached_property
    def decoder_config(self) -> Mapping[str, Any] | None:
        """See :attr:`Tokenizer.decoder_config`."""
        return component_config(self._backend.decoder)


class TransformersTokenizer(Tokenizer):
    """A tokenizer that only transformers can read.

    Args:
        hf_tokenizer: what ``AutoTokenizer.from_pretrained`` gave.
        chat_templates: see :class:`Tokenizer`.
    """

    def __init__(self, hf_tokenizer: Any, *, chat_templates: Mapping[str, str]) -> None:
        super().__init__(
            special_tokens=hf_tokenizer.special_tokens_map, chat_templates=chat_templates
        )
        self._hf_tokenizer = hf_tokenizer
        self.vocab_size = len(hf_tokenizer)
        self.special_ids = frozenset(hf_tokenizer.all_special_ids)
        self.truncation_side = hf_tokenizer.truncation_side

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """See :meth:`Tokenizer.encode`."""
        check_text(text)
        ids: list[int] = self._hf_tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return ids

    def encode_all(
        self,
        texts: Sequence[str] | Sequence[tuple[str, str]],
        most: int | None = None,
    ) -> list[tuple[list[int], list[int]]]:
        """See :meth:`Tokenizer.encode_all`."""
        _check_all(texts)
        if not texts:
            return []
        options: dict[str, Any] = {}
        if most is not None:
            added = self._hf_tokenizer.num_special_tokens_to_add(pair=not isinstance(texts[0], str))
            text_room(most, added)
            options = {"truncation": "longest_first", "max_length": most}
        made = self._hf_tokenizer(list(texts), **options)
        ids = made["input_ids"]
        types = made.get("token_type_ids") or [[0] * len(each) for each in ids]
        return list(zip(ids, types, strict=True))

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """See :meth:`Tokenizer.decode`."""
        # A Python tokenizer fails on an id that it does not know.
        known = [token_id for token_id in ids if 0 <= token_id < self.vocab_size]
        text: str = self._hf_tokenizer.decode(known, skip_special_tokens=skip_special_tokens)
        return text

    def id_to_token(self, token_id: int) -> str | None:
        """See :meth:`Tokenizer.id_to_token`."""
        if not 0 <= token_id < self.vocab_size:
            return None
        token: str | None = self._hf_tokenizer.convert_ids_to_tokens(token_id)
        return token

    def token_to_id(self, token: str) -> int | None:
        """See :meth:`Tokenizer.token_to_id`."""
        token_id: int | None = self._hf_tokenizer.get_vocab().get(token)
        return token_id


def component_config(component: Any) -> Mapping[str, Any] | None:
    """A part of a ``tokenizers.Tokenizer`` (normalizer, decoder, ...) as tokenizer.json has it."""
    if component is None:
        return None
    config: Mapping[str, Any] = json.loads(component.__getstate__())
    return config


def _check_all(texts: Sequence[str] | Sequence[tuple[str, str]]) -> None:
    for text in texts:
        for each in (text,) if isinstance(text, str) else text:
            check_text(each)


def text_room(most: int, added: int) -> int:
    """Tokens of text beside ``added`` special ones.

    Raises:
        RequestError: there is no room for these.
    """
    if most < added:
        raise RequestError(
            f"truncate_prompt_tokens {most} leaves no room for the {added} special tokens that the "
            "tokenizer adds; set it higher",
            param="truncate_prompt_tokens",
        )
    return most - added


def _shares(one: int, other: int, room: int) -> tuple[int, int]:
    """How many tokens of two texts are kept: the longer one is cut first, as tokenizers cut."""
    if one + other <= room:
        return one, other
    less = min(one, other, room // 2)
    return (room - less, less) if one > other else (less, room - less)


def check_text(text: str) -> None:
    """Raise RequestError for what is no string, or not one that UTF-8 can express."""
    if not isinstance(text, str):
        raise RequestError(f"the text to tokenize must be a string, got {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the text has a lone surrogate (U+{ord(text[error.start]):04X}) at character "
            f"{error.start}, which UTF-8 cannot express"
        ) from error
