import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine_core.errors import RequestError
from engine_core.text import Tokenizer, check_variables, load_tokenizer

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather <now> & 'soon' in a city, 天气.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
USER = {"role": "user", "content": "  What is the weather in Zürich? 天气 😀 <b>&amp;</b>\n"}
CHATS: list[list[dict[str, Any]]] = [
    [USER],
    [{"role": "system", "content": "Be brief."}, USER],
    [USER, {"role": "assistant", "content": "Sunny."}, {"role": "user", "content": "Thanks"}],
    [{"role": "user", "content": ""}],
    [USER, {"role": "assistant", "content": "Sunny.", "name": None, "tool_calls": None}],
]
TOOL_CHAT: list[dict[str, Any]] = [
    USER,
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich"}}}
        ],
    },
    {"role": "tool", "content": '{"sky": "clear"}'},
]


@pytest.mark.parametrize("add_generation_prompt", [True, False], ids=["prompt", "no-prompt"])
@pytest.mark.parametrize("name", ["qwen2_5", "llama3_1", "chatglm3"])
def test_real_templates_render_as_in_transformers(
    real_folder: Callable[[str], Path],
    real_tokenizers: dict[str, Tokenizer],
    hf_tokenizer: Callable[..., Any],
    name: str,
    add_generation_prompt: bool,
) -> None:
    reference = hf_tokenizer(real_folder(name), generic=True)
    cases: list[tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = [
        (chat, tools) for chat in CHATS for tools in (None, [WEATHER])
    ]
    for chat, tools in [*cases, (TOOL_CHAT, [WEATHER])]:
        rendered = real_tokenizers[name].apply_chat_template(
            chat, tools=tools, add_generation_prompt=add_generation_prompt
        )
        assert rendered == reference.apply_chat_template(
            chat, tools=tools, add_generation_prompt=add_generation_prompt, tokenize=False
        )


@pytest.mark.parametrize("name", ["qwen2_5", "llama3_1", "chatglm3"])
@pytest.mark.parametrize("end", ["Sunny, I", "Sunny, \n"])
def test_a_last_message_is_continued_as_in_transformers(
    real_folder: Callable[[str], Path],
    real_tokenizers: dict[str, Tokenizer],
    hf_tokenizer: Callable[..., Any],
    name: str,
    end: str,
) -> None:
    options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    chat = [USER, {"role": "assistant", "content": end}]
    rendered = real_tokenizers[name].apply_chat_template(chat, **options)
    reference = hf_tokenizer(real_folder(name), generic=True)
    assert rendered == reference.apply_chat_template(chat, tokenize=False, **options)
    assert rendered.endswith(end if name != "llama3_1" else end.strip())


@pytest.mark.parametrize("last", [[], ["a"], [USER, {"role": "assistant", "content": " "}]])
def test_what_cannot_be_continued_is_refused(
    real_tokenizers: dict[str, Tokenizer], last: list[Any]
) -> None:
    with pytest.raises(RequestError, match="needs a last message whose content is text"):
        real_tokenizers["qwen2_5"].apply_chat_template(last, continue_final_message=True)


@pytest.mark.parametrize(
    "template",
    [
        "{{ bos_token }}{{ messages[0]['content'] }}{{ eos_token }}{{ pad_token }}",
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.role }}"
        "{% endfor %}",
        "{% generation %}\n  {{ messages[0].role }}\n{% endgeneration %}\n|",
        "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}",
        "{{ messages | tojson(indent=2) }}{{ tools | tojson(sort_keys=true) }}",
        "{{ {'b': '<é>', 'a': 1} | tojson(ensure_ascii=true, separators=(',', ':')) }}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
        "{{ ns.n }}",
        "{{ dict(a=1, b=2) }}{{ dict.fromkeys(['x'], 3) }}",
        "{{ strftime_now('%Y') | length }}{{ strftime_now(format='[%Z]') }}",
        "{{ documents is none }}{{ tools is none }}{{ undefined_name }}{{ add_generation_prompt }}",
        "  {% if true %}\n    indented\n  {% endif %}\nend\n",
        "{{ messages[0].reasoning_content }}|{{ messages[0].thinking }}",
        "{{ enable_thinking }}{{ nested.key }}",
        "{{ messages[0].image }}{{ messages[0].name is defined }}",
    ],
)
def test_template_language_is_that_of_transformers(
    small_folders: dict[str, Path],
    byte_level: Tokenizer,
    hf_tokenizer: Callable[..., Any],
    template: str,
) -> None:
    messages = [
        {
            "role": "user",
            "content": "hi <é>",
            "reasoning": "because",
            "image": Path("a.png"),
            "name": None,
        },
        {"role": "assistant", "content": "yes"},
    ]
    options = {"enable_thinking": False, "nested": {"key": "value"}}
    rendered = byte_level.apply_chat_template(messages, chat_template=template, **options)
    assert rendered == hf_tokenizer(small_folders["byte-level"]).apply_chat_template(
        messages, chat_template=template, tokenize=False, add_generation_prompt=True, **options
    )
    assert rendered != ""


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refused.*roles must alternate"),
        ("{{ messages[0].content + 1 }}", "failed.*TypeError"),
        ("{{ missing.attribute }}", "refused.*'missing' is undefined"),
        ("{% for m in messages %}", r"not valid jinja.*line 1"),
        ("{{ messages.append(1) }}", "refused.*unsafe|refused.*not safe"),
        ("{{ ''.__class__.__mro__ }}", "refused.*unsafe"),
        ("{% set n = namespace(__class__=1) %}", "refused.*underscore"),
        ("{% set n = namespace() %}{% set n._x = 1 %}", "refused.*underscore"),
        ("{{ dict.__class__() }}", "refused.*unsafe"),
        ("{% for i in range(100000000) %}{% endfor %}", "failed.*Range too big"),
    ],
)
def test_error_in_a_template_refuses_the_request(
    byte_level: Tokenizer, template: str, message: str
) -> None:
    with pytest.raises(RequestError, match=f"(?s){message}"):
        byte_level.apply_chat_template([USER], chat_template=template)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hello", "messages must be a list of objects with a role, got str"),
        (None, "must be a list .* got NoneType"),
        ({"role": "user"}, "must be a list .* got dict"),
        ([], "messages is empty"),
        (["hello"], r"messages\[0\] must be an object with a role, got str"),
        (
            [USER, {"content": "x"}],
            r"messages\[1\] must have a role .* only the keys \['content'\]",
        ),
        ([{"role": 3, "content": "x"}], r"messages\[0\] must have a role that is a string, got 3"),
        ([{"role": "user", "content": 3}], r"messages\[0\].content must be a string or a list"),
        ([{"role": "user", "content": [3]}], r"messages\[0\].content\[0\] must be an object"),
    ],
)
def test_malformed_messages_are_refused(byte_level: Tokenizer, messages: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        byte_level.apply_chat_template(messages, chat_template="{{ messages }}")


@pytest.mark.parametrize("tools", ["weather", ["weather"], [3]])
def test_malformed_tools_are_refused(byte_level: Tokenizer, tools: Any) -> None:
    with pytest.raises(RequestError, match=r"tools(\[0\])? must be a"):
        byte_level.apply_chat_template([USER], tools=tools, chat_template="{{ tools }}")


def test_what_nests_without_end_is_refused(byte_level: Tokenizer) -> None:
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"a": deep}
    call = {"type": "function", "function": {"name": "f", "arguments": deep}}
    messages = [{"role": "assistant", "tool_calls": [call]}]
    with pytest.raises(RequestError, match="nest too deeply"):
        byte_level.apply_chat_template(messages, chat_template="{{ messages }}")
    while deep:  # piece by piece, as its own end would nest as deeply
        deep = deep.pop("a")


@pytest.mark.parametrize(
    "name", ["messages", "tools", "add_generation_prompt", "chat_template", "self"]
)
def test_variables_that_the_engine_sets_are_refused(name: str) -> None:
    with pytest.raises(RequestError, match=f"chat_template_kwargs.{name}: ") as refused:
        check_variables({"enable_thinking": False, name: 1})
    assert refused.value.param == f"chat_template_kwargs.{name}"
    check_variables({"enable_thinking": False, "bos_token": "<s>"})


@pytest.mark.parametrize("variables", [[], ["a"], 5, "x", {1: 2}])
def test_variables_without_names_are_refused(variables: Any) -> None:
    with pytest.raises(RequestError, match="chat_template_kwargs must be a dictionary"):
        check_variables(variables)


def test_messages_are_not_changed(byte_level: Tokenizer) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}], "thinking": "hm"}]
    before = json.dumps(messages)
    byte_level.apply_chat_template(messages, chat_template="{{ messages }}")
    assert json.dumps(messages) == before


def test_without_a_template(byte_level: Tokenizer) -> None:
    assert byte_level.chat_template is None
    with pytest.raises(RequestError, match="no chat template; give one with the chat_template"):
        byte_level.apply_chat_template([USER])


def copy(source: Path, target: Path, chat_template: Any) -> Path:
    (target / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": chat_template}
    (target / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return target


def test_several_named_templates(small_folders: dict[str, Path], tmp_path: Path) -> None:
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "with tools"},
        {"name": "rag", "template": "with documents"},
    ]
    tokenizer = load_tokenizer(copy(small_folders["byte-level"], tmp_path, named))
    assert tokenizer.chat_template == "plain"
    assert tokenizer.apply_chat_template([USER]) == "plain"
    assert tokenizer.apply_chat_template([USER], tools=[WEATHER]) == "with tools"
    assert tokenizer.apply_chat_template([USER], chat_template="rag") == "with documents"
    assert tokenizer.apply_chat_template([USER], chat_template="other text") == "other text"


def test_several_named_templates_without_a_default(
    small_folders: dict[str, Path], tmp_path: Path
) -> None:
    named = [{"name": name, "template": name} for name in ("rag", "brief")]
    tokenizer = load_tokenizer(copy(small_folders["byte-level"], tmp_path, named))
    with pytest.raises(RequestError, match=r"no default.*brief, rag"):
        tokenizer.apply_chat_template([USER])


def test_template_files_come_before_the_config(
    small_folders: dict[str, Path], hf_tokenizer: Callable[..., Any], tmp_path: Path
) -> None:
    folder = copy(small_folders["byte-level"], tmp_path, "of the config")
    (folder / "chat_template.json").write_text('{"chat_template": "of json"}', encoding="utf-8")
    assert load_tokenizer(folder).chat_template == "of the config"
    copy(small_folders["byte-level"], tmp_path, None)
    assert load_tokenizer(folder).chat_template == "of json"
    (folder / "chat_template.jinja").write_text("of a file", encoding="utf-8")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("more", encoding="utf-8")
    tokenizer = load_tokenizer(folder)
    assert tokenizer.chat_templates == {"default": "of a file", "rag": "more"}
    assert hf_tokenizer(folder).chat_template == tokenizer.chat_templates
