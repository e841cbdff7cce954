"""How one request chooses its tokens."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from engine_core.configs.base import FieldError, FrozenConfig, number

JSON_WHITESPACE = r"[ \n\r\t]{1,32}"
"""White space between the parts of guided JSON: a model that does nothing but indent is stopped."""

LogitsProcessor = Callable[..., Any]
"""``(output_token_ids, logits) -> logits`` or ``(prompt_token_ids, output_token_ids, logits) ->
logits``: lists of ints and a float32 tensor ``[vocab_size]``, which it may change in place."""


def takes_prompt(processor: LogitsProcessor) -> bool:
    """Whether a logits processor also takes the prompt's token ids.

    Raises:
        ValueError: it takes neither two nor three arguments.
    """
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [
        parameter.name
        for parameter in inspect.signature(processor).parameters.values()
        if parameter.kind in kinds and parameter.default is parameter.empty
    ]
    if len(needed) not in (2, 3):
        raise ValueError(
            "a logits processor takes (output_token_ids, logits) or (prompt_token_ids, "
            f"output_token_ids, logits), this one {tuple(needed)}"
        )
    return len(needed) == 3


def _number(value: Any) -> Any:
    return number(value, refused=(str, bytes, bool))


_Number = BeforeValidator(_number)
_Token = Annotated[int, _Number]
_Bias = Annotated[float, _Number, Field(ge=-100.0, le=100.0)]
_TokenSequence = Annotated[tuple[_Token, ...], Field(min_length=1)]


class GuidedParams(FrozenConfig):
    """The constraint on a generated text; exactly one field is given.

    The text is held to it from its first token on, and may end exactly where it is complete.
    llguidance documents the syntax of each, and the parts of JSON schema that it knows.
    """

    json_object: bool = False
    """Any JSON object."""
    json_schema: dict[str, Any] | bool | None = None
    """JSON that this schema allows: a dictionary, or the same as text."""
    regex: str | None = Field(default=None, min_length=1)
    """Text that the whole expression matches."""
    choice: tuple[str, ...] | None = Field(default=None, min_length=1)
    """One of these texts."""
    grammar: str | None = Field(default=None, min_length=1)
    """A grammar in llguidance's variant of Lark."""

    @field_validator("json_schema", mode="before")
    @classmethod
    def _schema_from_text(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not JSON: {error}") from None

    @field_validator("choice")
    @classmethod
    def _no_empty_choice(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if value is not None and "" in value:
            raise ValueError("an empty text cannot be chosen")
        return value

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if self.json_schema is False:
            raise ValueError("the schema false allows no text at all")
        given = self._given
        if len(given) != 1:
            raise ValueError(
                f"exactly one of {', '.join(type(self).model_fields)} is to be given, got "
                f"{' and '.join(given) or 'none'}"
            )
        return self

    @property
    def kind(self) -> str:
        """The name of the field that is given."""
        return self._given[0]

    @property
    def _given(self) -> list[str]:
        fields = type(self).model_fields
        return [name for name in fields if getattr(self, name) not in (None, False)]


class SamplingParams(FrozenConfig):
    """How one request chooses its tokens; the command line's options are made from it.

    Names and meanings are those of vLLM. What changes the logits acts in the order of
    transformers' ``generate``:

    1. ``logit_bias`` and ``allowed_token_ids``;
    2. ``repetition_penalty``, then ``frequency_penalty`` and ``presence_penalty``;
    3. ``bad_words`` and ``min_tokens``;
    4. ``logits_processors``, in the order given;
    5. ``guided``, which nothing before it can undo;
    6. unless greedy: ``temperature``, ``top_k``, ``top_p``, ``min_p``.

    Log-probabilities are reported as the model gave them, before all of this.

    ``max_tokens`` beyond the model's length are cut to what the prompt leaves of it, and the
    sequence ends with the reason "length" there. ``min_tokens`` that it has no room for are
    refused, as they could not be kept.
    """

    n: Annotated[int, Field(ge=1, le=1024), _Number] = 1
    """Completions for the prompt; the first has the seed, each of the others one derived from it
    and its index."""
    temperature: Annotated[float, Field(ge=0.0, le=100.0), _Number] = 1.0
    """0 is greedy; otherwise logits are divided by it."""
    top_k: Annotated[int, Field(ge=-1, lt=2**31), _Number] = 0
    """Only the k most probable tokens; 0 or -1 for all."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0), _Number] = 1.0
    """Only the fewest most probable tokens whose probabilities add up to at least this."""
    min_p: Annotated[float, Field(ge=0.0, le=1.0), _Number] = 0.0
    """Only tokens with at least this fraction of the most probable one's probability."""
    repetition_penalty: Annotated[float, Field(gt=0.0), _Number] = 1.0
    """Divides the positive logits of tokens in the prompt and the output, and multiplies the
    negative ones."""
    presence_penalty: Annotated[float, Field(ge=-2.0, le=2.0), _Number] = 0.0
    """Subtracted from the logits of tokens in the output."""
    frequency_penalty: Annotated[float, Field(ge=-2.0, le=2.0), _Number] = 0.0
    """Subtracted from a token's logit once for each time it is in the output."""
    logit_bias: dict[int, _Bias] = Field(default={})
    """Added to the logits: token id to a number from -100 to 100."""
    allowed_token_ids: tuple[int, ...] | None = None
    """Only these tokens; name the end of sequence too if it may come."""
    bad_words: tuple[str | _TokenSequence, ...] = ()
    """Words that must not be generated, neither as written nor after a space."""
    seed: Annotated[int | None, Field(ge=0, lt=2**63), _Number] = None
    """Makes random sampling repeatable, once a start's kernels are there; drawn if not set."""
    max_tokens: Annotated[int | None, Field(ge=1), _Number] = 16
    """Tokens to generate at most; none for as many as the model's length allows, which ends the
    sequence in any case."""
    min_tokens: Annotated[int, Field(ge=0), _Number] = 0
    """No end of sequence or stop token before this many tokens."""
    stop: tuple[str, ...] = ()
    """Strings that end the text."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the sequence."""
    include_stop_str_in_output: bool = False
    """Leave the stop string or the stop token in the text."""
    ignore_eos: bool = False
    """Go on past the end-of-sequence token."""
    logprobs: Annotated[int | None, Field(ge=-1), _Number] = None
    """How many of the most probable tokens to report at each step, besides the chosen one; -1 for
    all; no report if not set."""
    prompt_logprobs: Annotated[int | None, Field(ge=-1), _Number] = None
    """The same for the prompt's tokens; no report if not set."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    logits_processors: tuple[LogitsProcessor, ...] = Field(default=(), exclude=True)
    """Functions that change the logits; see LogitsProcessor. Offline use only."""
    guided: GuidedParams | None = Field(default=None, exclude=True)
    """Required form of the text: JSON, a JSON schema, a regular expression, ..."""

    @field_validator("stop_token_ids", "allowed_token_ids", mode="before")
    @classmethod
    def _tokens(cls, value: Any) -> Any:
        for item in value if isinstance(value, list | tuple) else ():
            _number(item)
        return value

    @field_validator("logit_bias")
    @classmethod
    def _bounded(cls, value: dict[int, float]) -> dict[int, float]:
        return {_number(token): bias for token, bias in value.items()}

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop_string(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("stop")
    @classmethod
    def _no_empty_stop_string(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if any(not item for item in value):
            raise ValueError("an empty stop string would end every text at once")
        return value

    @field_validator(
        "logit_bias", "bad_words", "stop", "stop_token_ids", "logits_processors", mode="before"
    )
    @classmethod
    def _none_of_them(cls, value: Any, info: ValidationInfo) -> Any:
        return cls.model_fields[info.field_name or ""].default if value is None else value

    @field_validator("allowed_token_ids")
    @classmethod
    def _something_allowed(cls, value: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if value == ():
            raise ValueError("an empty list would allow no token at all; None allows every one")
        return value

    @field_validator("bad_words")
    @classmethod
    def _no_empty_bad_word(cls, value: tuple[Any, ...]) -> tuple[Any, ...]:
        if any(not item for item in value):
            raise ValueError("an empty word would forbid every token")
        return value

    @field_validator("logits_processors")
    @classmethod
    def _processors_of_either_form(
        cls, value: tuple[LogitsProcessor, ...]
    ) -> tuple[LogitsProcessor, ...]:
        for processor in value:
            takes_prompt(processor)
        return value

    @model_validator(mode="after")
    def _min_below_max(self) -> Self:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise FieldError(
                f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens})",
                "min_tokens",
            )
        return self

    @model_validator(mode="after")
    def _guided_may_end(self) -> Self:
        if self.guided is not None and (self.min_tokens or self.ignore_eos):
            name = "min_tokens" if self.min_tokens else "ignore_eos"
            raise FieldError(
                f"{name} cannot be kept by a guided text, which ends where it is complete; leave "
                "one of them out",
                name,
            )
        return self

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether the logits depend on which tokens came before."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    @property
    def changes_logits(self) -> bool:
        """Whether anything but the model's own logits has a part in the choice of a token."""
        return bool(
            self.has_penalties
            or self.logit_bias
            or self.allowed_token_ids is not None
            or self.min_tokens
            or self.bad_words
            or self.logits_processors
            or self.guided is not None
        )

    @property
    def needs_host(self) -> bool:
        """Whether the host must see each token before the next one is chosen."""
        return bool(
            self.stop or self.bad_words or self.logits_processors or self.guided is not None
        )


class BeamSearchParams(FrozenConfig):
    """How :meth:`LLM.beam_search` searches. Names are those of vLLM, scores those of transformers:
    the sum of a sequence's log-probabilities over its generated length to ``length_penalty``.
    Beyond 10 that power would leave the range of a float for long sequences.
    """

    beam_width: Annotated[int, Field(ge=1, le=1024), _Number]
    """Sequences kept at each step and returned."""
    max_tokens: Annotated[int, Field(ge=1), _Number]
    """Tokens to generate at most."""
    length_penalty: Annotated[float, Field(ge=-10.0, le=10.0), _Number] = 1.0
    """Above 0 favours long sequences, below 0 short ones; from -10 to 10."""
    ignore_eos: bool = False
    """Go on past the end-of-sequence token."""
