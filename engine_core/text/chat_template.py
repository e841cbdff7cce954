"""Chat templates and what they render.

A template is code that came with a checkpoint, so it runs in jinja's immutable sandbox and within
:mod:`~engine_core.text.template_limits`, sees only plain JSON values and cannot reach the caller's
objects. Environment, globals and the treatment of
messages are those of ``transformers.PreTrainedTokenizerBase.apply_chat_template``, so that a
checkpoint's template renders here what its authors tested there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.utils

from engine_core.errors import ErrorCode, RequestError
from engine_core.text.template_limits import (
    MAX_SOURCE,
    LimitedEnvironment,
    TemplateLimitError,
    budget,
    size_of,
    spend,
)

# A message's reasoning goes by several names; templates read the first, gpt-oss's the second.
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


def render_chat_template(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] | None,
    variables: Mapping[str, Any],
) -> str:
    """The prompt that ``template`` makes of ``messages``.

    Args:
        template: jinja source.
        messages: each with a "role"; keys whose value is None count as absent.
        add_generation_prompt: whether the header of the assistant's answer follows.
        tools: JSON schemas of the functions that the model may call, or None.
        variables: further names for the template: special tokens, and what the request passes.

    Raises:
        RequestError: malformed messages or tools, or an error in or from the template;
            ``add_generation_prompt`` is not a boolean; the template does more than any prompt
            of that size needs.
    """
    compiled = _compile(template)
    if isinstance(compiled, str):
        raise RequestError(f"the chat template {compiled}", code=ErrorCode.CHAT_TEMPLATE)
    if not isinstance(add_generation_prompt, bool):
        raise RequestError(
            f"add_generation_prompt must be true or false, got {add_generation_prompt!r}",
            param="add_generation_prompt",
        )
    try:
        names = {
            "documents": None,
            **_plain(variables),
            "messages": _checked_messages(messages),
            "tools": _checked_tools(tools),
            "add_generation_prompt": add_generation_prompt,
        }
    except RecursionError:
        raise RequestError(
            "the messages, the tools or the variables nest too deeply for a chat template"
        ) from None
    try:
        with budget(size_of(names, paid=False)):
            return compiled.render(names)
    except TemplateLimitError as error:
        raise RequestError(
            f"the chat template was stopped: {error}", code=ErrorCode.CHAT_TEMPLATE
        ) from None
    except jinja2.TemplateError as error:
        raise RequestError(f"the chat template refused the messages: {error}") from error
    except Exception as error:
        # The template is the checkpoint's or the user's code. Its exceptions (adding a string and a
        # list, say) are the fault of template and messages, not of the engine.
        raise RequestError(
            f"the chat template failed on the messages: {type(error).__name__}: {error}"
        ) from error


def _checked_messages(messages: object) -> list[dict[str, Any]]:
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        raise RequestError(
            f"messages must be a list of objects with a role, got {type(messages).__name__}"
        )
    if not messages:
        raise RequestError("messages is empty: a chat needs at least one message")
    return [_checked_message(index, message) for index, message in enumerate(messages)]


def _checked_message(index: int, message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(
            f"messages[{index}] must be an object with a role, got {type(message).__name__}"
        )
    role = message.get("role")
    if not isinstance(role, str):
        raise RequestError(
            f"messages[{index}] must have a role that is a string, got "
            + (f"{role!r}" if "role" in message else f"only the keys {sorted(map(str, message))}")
        )
    content = message.get("content")
    if not isinstance(content, (str, list, tuple, type(None))):
        raise RequestError(
            f"messages[{index}].content must be a string or a list of parts, got "
            f"{type(content).__name__}"
        )
    if isinstance(content, (list, tuple)):
        for part_index, part in enumerate(content):
            if not isinstance(part, (str, Mapping)):
                raise RequestError(
                    f"messages[{index}].content[{part_index}] must be an object with a type, got "
                    f"{type(part).__name__}"
                )
    plain: dict[str, Any] = _plain({key: item for key, item in message.items() if item is not None})
    reasoning = next((plain[key] for key in _REASONING_KEYS if plain.get(key) is not None), None)
    if reasoning is not None:
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    return plain


def _checked_tools(tools: object) -> list[Any] | None:
    if tools is None:
        return None
    if not isinstance(tools, Sequence) or isinstance(tools, (str, bytes)):
        raise RequestError(f"tools must be a list of JSON schemas, got {type(tools).__name__}")
    for index, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise RequestError(f"tools[{index}] must be a JSON schema, got {type(tool).__name__}")
    return [_plain(tool) for tool in tools]


def _plain(value: Any) -> Any:
    """A copy made of JSON types; anything else (an image, say) becomes its type's name.

    The sandbox cannot judge methods of other objects, so the template never sees one. Templates
    only ask whether such a value is present.
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    for base in (str, int, float):
        if isinstance(value, base):
            return base(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(item) for item in value)
    return f"<{type(value).__name__}>"


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's words for training; rendering looks through it."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A call block, as in transformers: what the body sets stays inside it.
        return jinja2.nodes.CallBlock(self.call_method("_render_body"), [], [], body).set_lineno(
            line
        )

    def _render_body(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """The template's ``dict``: not the type itself, whose attributes lead out of the sandbox."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        made: dict[Any, Any] = dict(*args, **kwargs)
        return made

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """The template's ``namespace``, without names that begin with an underscore."""

    # No parameter is called self, so that namespace(self=...) is a legal call in a template.
    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *positional = args
        values = dict(*positional, **kwargs)
        spend(len(values))
        for name in values:
            _refuse_underscore(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(
            f"a namespace takes no attribute that begins with an underscore, got {name!r}"
        )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:  # noqa: A002 - templates may pass it by name
    # Naive local time, as templates were written for: %Z renders as nothing.
    return datetime.now().strftime(format)  # noqa: DTZ005


def _tojson(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja's own filter escapes HTML characters, which a model was never trained on.
    if indent is None:
        return json.dumps(x, ensure_ascii=ensure_ascii, separators=separators, sort_keys=sort_keys)
    # Each line has the indentation of its depth.
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    pieces = []
    for piece in encoder.iterencode(x):
        spend(len(piece))
        pieces.append(piece)
    return "".join(pieces)


@lru_cache(maxsize=1)
def _environment() -> LimitedEnvironment:
    environment = LimitedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.limit_filters(tojson=_tojson)
    environment.globals.update(
        raise_exception=_raise_exception,
        strftime_now=_strftime_now,
        dict=_Dict(),
        namespace=_Namespace,
    )
    return environment


@lru_cache(maxsize=64)
def _compile(template: str) -> jinja2.Template | str:
    """The template, or what is wrong with it, which may take as long to find again."""
    if len(template) > MAX_SOURCE:
        return f"has {len(template)} characters, and the longest taken has {MAX_SOURCE}"
    try:
        with budget(0):
            return _environment().from_string(template)
    except jinja2.TemplateSyntaxError as error:
        return f"is not valid jinja: {error.message} (line {error.lineno})"
    except TemplateLimitError as error:
        return f"is too long: {error}"
    except (RecursionError, MemoryError):
        return "nests too deeply"
    except Exception as error:
        # What jinja makes of it is not valid Python, or a number in it has thousands of digits.
        return f"cannot be compiled: {type(error).__name__}: {error}"
