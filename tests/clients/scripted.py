"""Words of the scripted model, and when it says them: known to the server and to the tests.

Nothing but strings, as the clients' environments have no engine.
"""

# A longer prompt is refused.
LONGEST = 512

FIRST = "An engine runs models."
AGAIN = "It runs them fast."
THOUGHT = "Hm, well."
TOLD = "Rome is sunny."

# By the token that the prompt ends with. A piece is a token, so that none may be there twice.
SCRIPTS = {
    "<first>": ("<think>", "Hm,", " well.", "</think>", "An engine", " runs", " models."),
    "<again>": ("It runs", " them", " fast."),
    "<call>": (
        *("<tool_call>", '{"name": "get_weather", ', '"arguments": {"city": "Ro', 'me"}}'),
        "</tool_call>",
    ),
    "<told>": ("Rome", " is", " sunny."),
    # Lists of calls, which tool_choice "required" holds the text to. A grammar's forced characters
    # are tokenised anew, so that a piece begins where there is a choice.
    "<forced call>": ('[{"name": "get_weather", "arguments": ', '{"city": "Rome"}}]'),
    "<final>": ('[{"name": "final_answer", "arguments": ', '{"answer": "It is sunny."}}]'),
    "<json>": ('{"sky": "clear",', ' "wet": false}'),
    "<lost>": ("That is not what was said.",),
}

# It is told of the tools, and of what was said; so it sees whether a client sent all of it back.
# smolagents writes calls and their results into the text, and its agent ends with a tool.
TEMPLATE = (
    "{%- set last = messages[-1] %}"
    "{%- set before = messages[-2] if messages | length > 1 else none %}"
    "{%- set names = (tools or []) | map(attribute='function.name') | list %}"
    "{%- for message in messages %}{{ message.content }} {% endfor %}"
    "{%- if last.role == 'tool' %}"
    "{%- set call = before.tool_calls[0] %}"
    "{%- if 'sunny' in last.content and last.tool_call_id == call.id"
    " and call.function.arguments.city == 'Rome' %}<told>{% else %}<lost>{% endif %}"
    "{%- elif 'final_answer' in names %}"
    "{%- if 'sunny' in last.content %}<final>{% else %}<forced call>{% endif %}"
    "{%- elif names %}<call>"
    "{%- elif before and before.role == 'assistant' %}"
    "{%- if before.content == 'An engine runs models.' %}<again>{% else %}<lost>{% endif %}"
    "{%- elif 'JSON' in last.content %}<json>"
    "{%- else %}<first>{% endif %}"
)
