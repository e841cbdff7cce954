"""The parser of one answer, put together for a model and a request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine_core.errors import RequestError
from engine_core.parsers.guided_calls import ArgumentsParser, CallListParser, CallsOrAnswerParser
from engine_core.parsers.reasoning import ReasoningParser
from engine_core.parsers.tool_choice import ToolChoice, Tools, chosen_function, offered_functions
from engine_core.parsers.tools import ParsedDelta, ToolParser

if TYPE_CHECKING:
    from engine_core.configs import ModelConfig
    from engine_core.registry import Registry


class OutputParser:
    """Splits the text of one answer, fed in pieces, into its parts; without parsers all is content.

    Args:
        reasoning: reads the reasoning, which comes first.
        calls: reads the calls in the answer that follows.

    Attributes:
        skip_special_tokens: the value of ``SamplingParams.skip_special_tokens`` that keeps the
            parsers' tags in the text.
    """

    def __init__(
        self, reasoning: ReasoningParser | None = None, calls: ToolParser | None = None
    ) -> None:
        self._reasoning = reasoning
        self._calls = calls
        self.skip_special_tokens = all(
            parser is None or parser.skip_special_tokens for parser in (reasoning, calls)
        )

    def feed(self, text: str) -> ParsedDelta:
        """Take the next piece of text; return what it added."""
        reasoning, answer = ("", text) if self._reasoning is None else self._reasoning.feed(text)
        return self._answer(reasoning, answer)

    def finish(self) -> ParsedDelta:
        """Return the text held back; called once, at the end of the text."""
        reasoning, answer = ("", "") if self._reasoning is None else self._reasoning.finish()
        begun = self._answer(reasoning, answer)
        return begun if self._calls is None else begun + self._calls.finish()

    def _answer(self, reasoning: str, answer: str) -> ParsedDelta:
        if self._calls is None:
            return ParsedDelta(answer, reasoning)
        return ParsedDelta(reasoning=reasoning) + self._calls.feed(answer)


def find_parser_names(
    model_config: ModelConfig,
    source: Registry,
    *,
    tool_parser: str | None = None,
    reasoning_parser: str | None = None,
) -> tuple[str | None, str | None]:
    """The names of the tool parser and the reasoning parser: those given, or else the model's.

    A server calls it when it starts, so that a wrong name is found then.

    Raises:
        ConfigError: no installed plugin brings one of the names.
        PluginLoadError: a plugin's class cannot be imported.
    """
    tool_parser = tool_parser or model_config.tool_parser
    reasoning_parser = reasoning_parser or model_config.reasoning_parser
    if tool_parser is not None:
        source.tool_parser(tool_parser)
    if reasoning_parser is not None:
        source.reasoning_parser(reasoning_parser)
    return tool_parser, reasoning_parser


def build_output_parser(
    model_config: ModelConfig,
    source: Registry,
    *,
    tools: Tools = None,
    tool_choice: ToolChoice = None,
    tool_parser: str | None = None,
    reasoning_parser: str | None = None,
    prompt_end: str = "",
    guided: bool = False,
    calls_or_answer: bool = False,
    reasoned: bool = False,
) -> OutputParser:
    """Build the parser of one answer; without tools or reasoning all text is content.

    Args:
        model_config: names the family's parsers.
        source: the plugins, where they are found.
        tools: those of the request, in OpenAI's form.
        tool_choice: that of the request; None is "auto".
        tool_parser: a name that wins over the model's.
        reasoning_parser: a name that wins over the model's.
        prompt_end: the last text of the prompt, special tokens included; a hundred characters are
            enough. A chat template may open the reasoning there.
        guided: whether the text is guided from its first token on, which leaves no room for
            reasoning or calls. A ``tool_choice`` that names a function or is "required" implies it.
        calls_or_answer: whether it is guided by :func:`calls_or_answer_params`.
        reasoned: whether it is guided by :func:`reasoned_params`.

    Raises:
        RequestError: tools are malformed, or are offered to a model without a tool parser.
        ConfigError: no installed plugin brings the parser named.
    """
    offered = offered_functions(tools)
    chosen = chosen_function(offered, tool_choice)
    tool_parser = tool_parser or model_config.tool_parser
    reasoning_parser = reasoning_parser or model_config.reasoning_parser
    reasoning: ReasoningParser | None = None
    if reasoning_parser is not None and (reasoned or not guided):
        reasoning = source.reasoning_parser(reasoning_parser)(prompt_end)
    if chosen is not None:
        return OutputParser(reasoning, ArgumentsParser((chosen,)))
    if tool_choice == "required":
        return OutputParser(reasoning, CallListParser(offered))
    if guided and not calls_or_answer:
        return OutputParser()
    calls: ToolParser | None = None
    if offered and tool_choice != "none":
        if tool_parser is None:
            raise RequestError(
                f"tools are given, but how {model_config.architecture} writes their calls is not "
                "known: name a tool parser when the server is started, or set tool_choice to "
                "'required', a function or 'none'"
            )
        calls = source.tool_parser(tool_parser)(offered)
        if calls_or_answer:
            tags = calls.call_tags()
            assert tags is not None, "the text is guided by them"
            return OutputParser(calls=CallsOrAnswerParser(calls, tags[0]))
    return OutputParser(reasoning, calls)
