"""Guided decoding: which tokens a grammar allows next, by llguidance. Imports no torch.

A :class:`GrammarCompiler` belongs to a vocabulary. It makes a :class:`Guide` for each sequence,
which follows the tokens chosen, and fills the bit masks of the next ones.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from decimal import Decimal
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from engine_core.configs import GuidedParams
from engine_core.configs.sampling import JSON_WHITESPACE
from engine_core.errors import ErrorCode, RequestError
from engine_core.steps import RowError

if TYPE_CHECKING:
    from llguidance import LLMatcher, TokenizerWrapper

# Parts of a refused schema that are compiled to find the culprit, about 1 ms each, and how long
# that may take.
_PLACES_TRIED = 200
_PLACES_SECONDS = 1.0
# llguidance 1.9 rounds larger numbers, and overflows its stack on some.
_LARGEST = 2**53
# llguidance has a state per remainder of a multipleOf: 10**5 of them take seconds to compile.
_MOST_STEPS = 10**4
_TOO_COMPLEX = "the grammar is too complex to follow"
# What llguidance calls the parts that have limits.
_LIMITS = ("parser error", "lexer error", "Parser Error: Current row", "Parser Error: Too many")
_WITHOUT_END = RowError(
    ErrorCode.GRAMMAR_WITHOUT_END,
    "the guided text is complete, but the model has no end-of-sequence token; name one in "
    "stop_token_ids",
)
NOT_INSTALLED = (
    "guided decoding needs llguidance, which is not installed: "
    "pip install 'engine-core-llm[guided]'"
)
# Keys under which a schema keeps its definitions.
_DEFINITIONS = ("$schema", "$defs", "definitions")
# Compiled grammars kept for requests to come.
_KEPT_GRAMMARS = 32
# Grammars compiled at once beside an engine's steps.
_BUILDERS = 2
# llguidance's defaults, but for the states: each takes 1 to 2 KiB. The fuels bound a mask's time.
_LIBRARY_LIMITS: dict[str, Any] = {
    "max_items_in_row": 2000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 500_000,
}
# Of many masks that are made together, each may take this long without suspicion.
_USUAL_MASK_SECONDS = 0.002
MASK_SECONDS = 0.1
"""Processor time that one token's mask may take. Usual ones take 0.1 ms, in a large vocabulary a
few; the library's own limits end most others within 20 ms."""

Masks = npt.NDArray[np.uint32]
"""Bit masks ``[rows, words]``, 32 tokens a word, the lowest bit first."""


class Guide:
    """One sequence's grammar, and its state in it.

    Args:
        matcher: at the beginning of the text.
        ends: the tokens that end the sequence.

    Attributes:
        error: what went wrong, or None; after an error all tokens are allowed.
        ended: whether one of ``ends`` was chosen.
    """

    def __init__(self, matcher: LLMatcher, ends: Sequence[int]) -> None:
        self.matcher = matcher
        self.ends = frozenset(ends)
        self.error: RowError | None = None
        self.ended = False
        # Whether its mask was among masks that took too long together.
        self.suspect = False

    def advance(self, tokens: Sequence[int]) -> None:
        """Take in the tokens that were chosen."""
        for token in tokens:
            if self.ended or self.error is not None:
                return
            if token in self.ends:
                self.ended = True
            elif not self.matcher.consume_token(token):
                self.error = _failure(self.matcher)


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A grammar at the beginning of a text, and why it cannot be used, or None."""

    matcher: LLMatcher
    error: str | None


class GrammarCompiler:
    """Makes guides over one vocabulary.

    Args:
        tokens: the bytes of each token, a special one's after 0xFF; see ``token_bytes`` of the room
            ``text``.
        encode: token ids of a text, without those that a tokenizer adds. Text that a grammar leaves
            no choice about is written in the tokens that it gives.
        vocab_size: columns of the logits; those without a token are never allowed.

    Attributes:
        vocab_size: the same.

    Raises:
        RequestError: llguidance is not installed.
    """

    def __init__(
        self, tokens: Sequence[bytes], encode: Callable[[str], list[int]], vocab_size: int
    ) -> None:
        try:
            import llguidance
        except ImportError as error:
            raise RequestError(NOT_INSTALLED) from error
        self._library = llguidance
        table = [*tokens[:vocab_size], *[b""] * (vocab_size - len(tokens))]
        self.vocab_size = vocab_size
        vocabulary = _Vocabulary(table, encode)
        self._tokenizer = llguidance.LLTokenizer(cast("TokenizerWrapper", vocabulary))
        vocabulary.longest_tokens = self._tokenizer.greedy_tokenize
        self._limits = llguidance.LLParserLimits(verbose_errors=False, **_LIBRARY_LIMITS)
        self._executor = llguidance.LLExecutor()
        # By a hash of the grammar; the first that asks for it makes it.
        self._kept: OrderedDict[bytes, Future[_Compiled]] = OrderedDict()
        # By the id of parameters that are in use.
        self._held: dict[int, _Compiled] = {}
        # It is asked in several threads.
        self._lock = threading.Lock()
        # The bit after the last token stands for the end of the text.
        self._num_words = vocab_size // 32 + 1

    def check(self, params: GuidedParams) -> None:
        """Compile the grammar of a request.

        Raises:
            RequestError: it cannot be compiled or no text satisfies it; says what and where.
        """
        try:
            error = self.compile(params).error
        except ValueError as refused:
            error = _brief(str(refused))
        if error is None:
            return
        place = ""
        if params.kind == "json_schema":
            place, error = _innermost_error(params.json_schema, error, self._schema_error)
        param = f"guided.{params.kind}{place}"
        raise RequestError(f"{param}: {error}", param=param)

    def guide(self, params: GuidedParams, ends: Sequence[int]) -> Guide:
        """A guide at the beginning of a text.

        Args:
            params: checked before.
            ends: tokens that end the sequence, allowed where the text is complete.
        """
        compiled = self.compile(params)
        guide = Guide(compiled.matcher.deep_copy(), ends)
        if compiled.error is not None:
            guide.error = RowError(ErrorCode.GUIDED, f"guided decoding failed: {compiled.error}")
        return guide

    def masks(self, guides: Sequence[Guide]) -> Masks:
        """The tokens allowed next, one row per sequence.

        A row whose guide is in error or has ended allows everything, as its token is not used.
        """
        masks: Masks = np.full((len(guides), self._num_words), 0xFFFFFFFF, dtype=np.uint32)
        live = [
            (guide.matcher, place)
            for place, guide in enumerate(guides)
            if guide.error is None and not guide.ended
        ]
        together = [(matcher, place) for matcher, place in live if not guides[place].suspect]
        alone = [(matcher, place) for matcher, place in live if guides[place].suspect]
        if len(together) == 1:
            alone += together
        elif together:
            begun = time.monotonic()
            self._executor.unsafe_compute_mask_ptr(
                together, masks.ctypes.data, 4 * self._num_words, len(guides)
            )
            # One of them may be slow, or the machine: next time each is measured by itself.
            usual = MASK_SECONDS + len(together) * _USUAL_MASK_SECONDS
            slow = time.monotonic() - begun > usual
            for _, place in together:
                guides[place].suspect = slow
        for matcher, place in alone:
            row, before = masks[place], time.thread_time()
            matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            seconds = time.thread_time() - before
            guides[place].suspect = False
            if seconds > MASK_SECONDS:
                guides[place].error = RowError(
                    ErrorCode.GRAMMAR_TOO_COMPLEX,
                    f"{_TOO_COMPLEX}: a token's mask took {seconds:.2f} s of processor time, and "
                    f"may take {MASK_SECONDS:g} s",
                )
        end_word, end_bit = divmod(self.vocab_size, 32)
        for matcher, place in live:
            guide, row = guides[place], masks[place]
            if guide.error is None and matcher.is_error():
                guide.error = _failure(matcher)
            if guide.error is not None:
                row[:] = 0xFFFFFFFF
                continue
            may_end = int(row[end_word]) >> end_bit & 1
            if may_end and not guide.ends and matcher.is_stopped():
                guide.error = _WITHOUT_END
            # A vocabulary may hold an end as ordinary text, which is then not to be cut off there.
            for token in guide.ends:
                word, bit = token // 32, np.uint32(1 << token % 32)
                row[word] = row[word] | bit if may_end else row[word] & ~bit
        return masks

    def compile(self, params: GuidedParams) -> _Compiled:
        """The grammar at the beginning of a text; copy its matcher to advance it.

        It is kept as long as ``params`` are, and so found at once while a request with them lives.

        Raises:
            ValueError: llguidance cannot take it; says why.
        """
        held = self._held.get(id(params))
        if held is not None:
            return held
        grammar = self._grammar(params)
        key = hashlib.blake2b(grammar.encode(), digest_size=16).digest()
        with self._lock:
            future = self._kept.get(key)
            first = future is None
            if future is None:
                future = self._kept[key] = Future()
                if len(self._kept) > _KEPT_GRAMMARS:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(key)
        if first:
            try:
                future.set_result(self._compiled(grammar))
            except BaseException as error:
                future.set_exception(error)
        compiled = future.result()
        self._held[id(params)] = compiled
        weakref.finalize(params, self._held.pop, id(params), None).atexit = False
        return compiled

    def _compiled(self, grammar: str) -> _Compiled:
        matcher = self._library.LLMatcher(
            self._tokenizer, grammar, log_level=0, limits=self._limits
        )
        error = None
        if matcher.is_error():
            error = _brief(matcher.get_error())
        else:
            beginning = matcher.deep_copy()
            beginning.compute_bitmask()
            if beginning.is_error():
                error = "no text satisfies it"
        return _Compiled(matcher, error)

    def _grammar(self, params: GuidedParams) -> str:
        """The grammar in llguidance's form."""
        build = self._library.LLMatcher
        if params.regex is not None:
            return build.grammar_from_regex(params.regex)
        if params.grammar is not None:
            return build.grammar_from_lark(params.grammar)
        if params.choice is not None:
            texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in params.choice)
            return build.grammar_from_lark(f"start: {texts}")
        schema = {"type": "object"} if params.json_object else params.json_schema
        return self._schema_grammar(schema)

    def _schema_grammar(self, schema: Any) -> str:
        if schema is True:
            schema = {}
        if isinstance(schema, Mapping):
            _check_numbers(schema)
        return self._library.LLMatcher.grammar_from_json_schema(
            json.dumps(schema), {"whitespace_pattern": JSON_WHITESPACE}
        )

    def _schema_error(self, schema: Any) -> str | None:
        try:
            return self._compiled(self._schema_grammar(schema)).error
        except ValueError as error:
            return _brief(str(error))


class GuideBuilder:
    """Compiles the grammars of requests in threads, beside an engine's steps.

    Args:
        make_compiler: makes the compiler; called once, in a thread.
    """

    def __init__(self, make_compiler: Callable[[], GrammarCompiler]) -> None:
        self._make = make_compiler
        self._making = threading.Lock()
        self._compiler: GrammarCompiler | None = None
        self._asked: SimpleQueue[tuple[GuidedParams | None, Future[None]] | None] = SimpleQueue()
        self._threads = 0

    @property
    def compiler(self) -> GrammarCompiler:
        """The compiler, made now if it is not there.

        Raises:
            EngineError: what making it raised.
        """
        with self._making:
            if self._compiler is None:
                self._compiler = self._make()
            return self._compiler

    def prepare(self, params: GuidedParams | None) -> Future[None]:
        """Compile a request's grammar; None makes the compiler alone."""
        future: Future[None] = Future()
        self._asked.put((params, future))
        if self._threads < _BUILDERS:
            self._threads += 1
            # A daemon: a process that is to end does not wait for a grammar.
            threading.Thread(target=self._build, name="engine-core-guides", daemon=True).start()
        return future

    def close(self) -> None:
        """End the threads once they have compiled what was asked for."""
        for _ in range(self._threads):
            self._asked.put(None)

    def _build(self) -> None:
        while (asked := self._asked.get()) is not None:
            params, future = asked
            try:
                compiler = self.compiler
                if params is not None:
                    compiler.compile(params)
                future.set_result(None)
            except BaseException as error:
                future.set_exception(error)
            # A thread that waits for more must not keep a request alive.
            del asked, params, future


class _Vocabulary:
    """A vocabulary as llguidance wants it; it adds the end of the text by itself."""

    is_tokenizer_wrapper = True
    eos_token_id = None
    bos_token_id = None
    special_token_ids: Sequence[int] = ()

    def __init__(self, tokens: Sequence[bytes], encode: Callable[[str], list[int]]) -> None:
        self.tokens = tokens
        self.longest_tokens: Callable[[str], list[int]] | None = None
        self._encode = encode

    def __call__(self, text: str) -> list[int]:
        """Tokens whose bytes are exactly the text."""
        ids = self._encode(text)
        # A tokenizer may put a space before the text, which would not be what was asked for.
        if b"".join(map(self.tokens.__getitem__, ids)) == text.encode():
            return ids
        assert self.longest_tokens is not None, "set as soon as there is a trie"
        return self.longest_tokens(text)


def _failure(matcher: LLMatcher) -> RowError:
    """The reason why a matcher cannot go on, for the user."""
    error = _brief(matcher.get_error())
    # The library's limits on a grammar's size are not all noticed before they are reached.
    # The library has no code for them: its stop_reason is "InternalError".
    if error.startswith(_LIMITS):
        return RowError(ErrorCode.GRAMMAR_TOO_COMPLEX, f"{_TOO_COMPLEX}: {error}")
    return RowError(ErrorCode.GUIDED, f"guided decoding failed: {error}")


def _brief(message: str) -> str:
    """The first line of a message, and the reason that a regular expression's error ends with."""
    first, *others = message.strip().splitlines() or [""]
    reasons = [line for line in others if line.startswith("error: ")]
    return f"{first.rstrip(':')}{''.join(f': {line[7:]}' for line in reasons)}"


def _check_numbers(schema: Mapping[str, Any]) -> None:
    """Refuse numbers that llguidance 1.9 cannot handle.

    Raises:
        ValueError: one is there; says which.
    """
    parts: list[tuple[str, Any]] = [("", schema)]
    while parts:
        key, part = parts.pop()
        if isinstance(part, Mapping):
            parts.extend(part.items())
        elif isinstance(part, list):
            parts.extend(("", item) for item in part)
        elif isinstance(part, int | float):
            if abs(part) > _LARGEST:
                raise ValueError(f"the number {part} is beyond what doubles count exactly, 2**53")
            if key == "multipleOf" and _steps(part) > _MOST_STEPS:
                raise ValueError(f"multipleOf {part} has too many digits to be followed")


def _steps(number: float) -> int:
    """A number's digits without the point, as an integer: as many remainders are possible."""
    _, digits, exponent = Decimal(str(abs(number))).normalize().as_tuple()
    assert isinstance(exponent, int), "JSON has no NaN and no infinity"
    steps: int = int("".join(map(str, digits))) * 10 ** max(exponent, 0)
    return steps


def _innermost_error(
    root: Any, error: str, error_of: Callable[[Any], str | None]
) -> tuple[str, str]:
    """The path, as ``.a.b[0]``, of the innermost part of a schema that fails by itself, and why.

    Args:
        root: a schema that fails.
        error: the reason why it fails.
        error_of: returns the reason why a schema fails, or None if it does not.
    """
    definitions = {}
    if isinstance(root, Mapping):
        definitions = {key: root[key] for key in _DEFINITIONS if key in root}
    path: tuple[str | int, ...] = ()
    part = root
    seen = {path}
    deadline = time.monotonic() + _PLACES_SECONDS
    while True:
        for inner_path, inner in _subschemas(root, part, path):
            tried = len(seen) > _PLACES_TRIED or time.monotonic() > deadline
            if inner_path in seen or tried:
                continue
            seen.add(inner_path)
            alone = {**definitions, **inner} if isinstance(inner, Mapping) else inner
            inner_error = error_of(alone)
            if inner_error is not None:
                path, part, error = inner_path, inner, inner_error
                break
        else:
            names = (f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)
            return "".join(names), error


def _subschemas(
    root: Any, schema: Any, path: tuple[str | int, ...]
) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """The schemas directly in the schema at ``path``, and the one that it refers to."""
    if not isinstance(schema, Mapping):
        return
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and value.startswith("#/"):
            yield from _pointed_at(root, value)
        elif key in ("properties", "patternProperties") and isinstance(value, Mapping):
            for name, inner in value.items():
                yield (*path, key, name), inner
        elif key in ("anyOf", "oneOf", "allOf", "prefixItems") and isinstance(value, list):
            for index, inner in enumerate(value):
                yield (*path, key, index), inner
        elif key in ("items", "additionalProperties", "not"):
            yield (*path, key), value


def _pointed_at(root: Any, reference: str) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """The target of a reference within ``root``, if it is a plain path of names."""
    path = tuple(reference.removeprefix("#/").split("/"))
    for name in path:
        if not isinstance(root, Mapping) or name not in root:
            return
        root = root[name]
    yield path, root
