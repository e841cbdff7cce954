"""Chat templates but for jinja: which one applies, and what is asked of it.

jinja is imported where a template is rendered: a prompt that is plain text needs none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine_core.errors import RequestError

DEFAULT_TEMPLATE = "default"
TOOL_TEMPLATE = "tool_use"

# Names that a template always gets, from the arguments of those names; "self" is jinja's own.
_NOT_VARIABLES = (
    *("messages", "tools", "add_generation_prompt", "continue_final_message"),
    *("chat_template", "self"),
)

# Stands after a message that is to be continued. No text is expected to have it, and the space
# tells whether the template keeps white space at the end.
_MARK = "\ue000CONTINUED\ue001"
_MARK_SPACE = _MARK + " "


def choose_chat_template(
    templates: Mapping[str, str], requested: str | None, *, with_tools: bool
) -> str:
    """The template to render with.

    Args:
        templates: the tokenizer's templates by name; a single one is called "default".
        requested: the name of one of them, a template's own text, or None.
        with_tools: whether the request brings tools; then "tool_use" goes before "default".

    Raises:
        RequestError: nothing was requested and there is no default, or the request is not a string.
    """
    if requested is not None and not isinstance(requested, str):
        raise RequestError(
            "chat_template must be a template's text or the name of one of the tokenizer's, got "
            f"{requested!r}",
            param="chat_template",
        )
    if requested is not None:
        return templates.get(requested, requested)
    if with_tools and TOOL_TEMPLATE in templates:
        return templates[TOOL_TEMPLATE]
    if DEFAULT_TEMPLATE in templates:
        return templates[DEFAULT_TEMPLATE]
    if templates:
        raise RequestError(
            "the tokenizer has several chat templates and no default; name one of them with the "
            f"chat_template argument: {', '.join(sorted(templates))}"
        )
    raise RequestError(
        "the tokenizer has no chat template; give one with the chat_template argument (a jinja "
        "template), or send a prompt instead of messages"
    )


def check_variables(variables: Mapping[str, Any]) -> None:
    """Refuse template variables that would replace those that every template gets.

    Args:
        variables: the ``chat_template_kwargs`` of a request.

    Raises:
        RequestError: names the first of them, or they are no dictionary of names.
    """
    if not isinstance(variables, Mapping) or not all(isinstance(name, str) for name in variables):
        raise RequestError(
            "chat_template_kwargs must be a dictionary of the template's variables by name, got "
            f"{variables!r}",
            param="chat_template_kwargs",
        )
    for name in _NOT_VARIABLES:
        if name in variables:
            param = f"chat_template_kwargs.{name}"
            own = "" if name in ("self", "chat_template") else f" with what the field {name} says"
            raise RequestError(
                f"{param}: the engine sets this one itself{own}; leave it out", param=param
            )


def marked(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages with a mark at the end of the last one's content; see :func:`until_mark`.

    Raises:
        RequestError: it has no text that can be continued.
    """
    last = messages[-1] if messages else None
    content = last.get("content") if isinstance(last, Mapping) else None
    if not isinstance(content, str) or not content.strip():
        raise RequestError(
            "continue_final_message needs a last message whose content is text that can be "
            f"continued, got {content!r}",
            param="continue_final_message",
        )
    return [*messages[:-1], {**messages[-1], "content": content + _MARK_SPACE}]


def until_mark(text: str) -> str:
    """Text that a template wrote of :func:`marked` messages, up to the mark.

    Raises:
        RequestError: it left out the end of the last message.
    """
    before, mark, after = text.rpartition(_MARK)
    if not mark:
        raise RequestError(
            "the chat template does not write the end of the last message, so that it cannot be "
            "continued; leave continue_final_message out",
            param="continue_final_message",
        )
    # A template that removes white space at the end would have done so without the mark.
    return before if after.startswith(" ") else before.rstrip()
