"""Chat formats and the tokenizer, against what the original code gives.

The expected texts and ids of Chinese conversations are those that chatglm.cpp's tests record of the
original tokenizers and prompt builders.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from golden_fixtures import GOLDEN
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel

from engine_core import LLM
from engine_core.errors import RequestError, TokenizerError
from engine_core.text import Tokenizer, load_tokenizer
from engine_core.text.chat_template import render_chat_template
from engine_core_chatglm.tokenizer import complete

TEMPLATES = Path(__file__).parents[1] / "engine_core_chatglm" / "chat_templates"
CONVERTED = Path(__file__).parents[3] / ".cache" / "tokenizers" / "chatglm3" / "tokenizer.json"

FIRST = [{"role": "user", "content": "你好"}]


def conversation(name: str) -> list[dict[str, str]]:
    answer = f"你好👋！我是人工智能助手 {name}，很高兴见到你，欢迎问我任何问题。"  # noqa: RUF001
    return [
        *FIRST,
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "晚上睡不着应该怎么办"},
    ]


def render(
    version: str, messages: list, *, generate: bool = True, tools: list | None = None
) -> str:
    template = (TEMPLATES / f"{version}.jinja").read_text(encoding="utf-8")
    return render_chat_template(
        template, messages, add_generation_prompt=generate, tools=tools, variables={}
    )


def test_rounds_of_version_1() -> None:
    # A first question stands alone; the tokenizer ends every text with [gMASK]<sop>.
    assert render("chatglm1", FIRST) == "你好[gMASK]<sop>"
    assert render("chatglm1", conversation("ChatGLM-6B")) == (
        "[Round 0]\n问：你好\n答：你好👋！我是人工智能助手 ChatGLM-6B，很高兴见到你，"  # noqa: RUF001
        "欢迎问我任何问题。\n[Round 1]\n问：晚上睡不着应该怎么办\n答：[gMASK]<sop>"  # noqa: RUF001
    )


def test_rounds_of_version_2() -> None:
    assert render("chatglm2", FIRST) == "[gMASK]sop[Round 1]\n\n问：你好\n\n答："  # noqa: RUF001
    assert render("chatglm2", conversation("ChatGLM2-6B")) == (
        "[gMASK]sop[Round 1]\n\n问：你好\n\n答：你好👋！我是人工智能助手 "  # noqa: RUF001
        "ChatGLM2-6B，很高兴见到你，欢迎问我任何问题。\n\n"  # noqa: RUF001
        "[Round 2]\n\n问：晚上睡不着应该怎么办\n\n答："  # noqa: RUF001
    )


def test_roles_of_version_3() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        *FIRST,
        {"role": "assistant", "metadata": "get_weather", "content": "call"},
        {"role": "observation", "content": "22"},
    ]
    assert render("chatglm3", messages) == (
        "[gMASK]sop<|system|>\n Be brief.<|user|>\n 你好<|assistant|>get_weather\n call"
        "<|observation|>\n 22<|assistant|>"
    )
    renamed = [*messages[:-1], {"role": "tool", "content": "22"}]
    assert render("chatglm3", renamed) == render("chatglm3", messages)
    assert render("chatglm3", FIRST, generate=False) == "[gMASK]sop<|user|>\n 你好"


def test_the_published_template_of_version_3_renders_the_same() -> None:
    config = json.loads(CONVERTED.with_name("tokenizer_config.json").read_text(encoding="utf-8"))
    published = render_chat_template(
        config["chat_template"],
        conversation("ChatGLM3-6B"),
        add_generation_prompt=True,
        tools=None,
        variables={},
    )
    assert render("chatglm3", conversation("ChatGLM3-6B")) == published


def test_tools_of_version_3_follow_the_system_message() -> None:
    tools = [{"name": "时间", "parameters": {}}]
    listed = json.dumps(tools, indent=4, ensure_ascii=False)
    system = {"role": "system", "content": "Use tools."}
    expected = f"[gMASK]sop<|system|>\n Use tools.\n{listed}<|user|>\n 你好<|assistant|>"
    assert render("chatglm3", [{**system, "tools": tools}, *FIRST]) == expected
    assert render("chatglm3", [system, *FIRST], tools=tools) == expected
    assert render("chatglm3", FIRST, tools=tools) == (
        "[gMASK]sop<|system|>\n Answer the following questions as best as you can. You have access "
        f"to the following tools:\n{listed}<|user|>\n 你好<|assistant|>"
    )


@pytest.mark.parametrize(
    ("version", "messages", "message"),
    [
        ("chatglm1", [{"role": "system", "content": "x"}], "message 0 has the role system"),
        ("chatglm2", [*FIRST, *FIRST], "message 1 has the role user"),
        ("chatglm3", [{"role": "critic", "content": "x"}], "message 0 has the role critic"),
        ("chatglm1", [{"role": "user", "content": []}], "content of message 0"),
        ("chatglm2", [{"role": "user", "content": [{"type": "text", "text": "x"}]}], "message 0"),
        ("chatglm3", [{"role": "user"}], "content of message 0"),
    ],
)
def test_messages_that_a_version_has_no_form_for_are_refused(
    version: str, messages: list, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        render(version, messages)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer") / "completed"
    command = [sys.executable, "-m", "engine_core_chatglm.tokenizer", str(CONVERTED), str(folder)]
    subprocess.run(command, check=True)
    return load_tokenizer(folder)


def test_the_completed_tokenizer_begins_each_text_as_the_original(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("你好") == [64790, 64792, 36474, 54591]
    # fmt: off
    assert tokenizer.encode("def main():\n    print('hello world')\t# greeting") == [
        64790, 64792, 884, 1301, 9427, 13, 296, 4466, 2029, 15616, 30914, 993, 3387, 12, 31010,
        30174,
    ]
    # fmt: on


def test_conversations_of_version_2_have_the_original_ids(tokenizer: Tokenizer) -> None:
    text = render("chatglm2", conversation("ChatGLM2-6B"))
    # fmt: off
    assert tokenizer.encode(text, add_special_tokens=False) == [
        64790, 64792, 790, 30951, 517, 30910, 30939, 30996, 13, 13, 54761, 31211, 39701, 13, 13,
        55437, 31211, 39701, 243, 162, 148, 142, 31404, 33030, 34797, 42481, 22011, 10461, 30944,
        30943, 30941, 30978, 30949, 31123, 48895, 35214, 54622, 31123, 32616, 39905, 31901, 31639,
        31155, 13, 13, 30995, 30951, 517, 30910, 30943, 30996, 13, 13, 54761, 31211, 32820, 54266,
        31876, 35153, 13, 13, 55437, 31211,
    ]
    # fmt: on


def test_conversations_of_version_3_have_the_original_ids(tokenizer: Tokenizer) -> None:
    text = render("chatglm3", FIRST)
    ids = [64790, 64792, 64795, 30910, 13, 36474, 54591, 64796]
    assert tokenizer.encode(text, add_special_tokens=False) == ids
    text = render("chatglm3", conversation("ChatGLM3-6B"))
    # fmt: off
    assert tokenizer.encode(text, add_special_tokens=False) == [
        64790, 64792, 64795, 30910, 13, 36474, 54591, 64796, 30910, 13, 36474, 54591, 243, 162,
        148, 142, 31404, 33030, 34797, 42481, 22011, 10461, 30944, 30966, 30941, 30978, 30949,
        31123, 48895, 35214, 54622, 31123, 32616, 39905, 31901, 31639, 31155, 64795, 30910, 13,
        30910, 32820, 54266, 31876, 35153, 64796,
    ]
    # fmt: on


def test_the_completed_tokenizer_has_the_tokens_that_end_a_turn(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_to_id("<|user|>") == 64795
    assert tokenizer.token_to_id("<|observation|>") == 64797
    assert tokenizer.decode([36474, 54591, 64795]) == "你好"
    assert 64792 not in tokenizer.encode("sopping", add_special_tokens=False)


def test_another_tokenizer_is_not_completed(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="no conversion of ChatGLM2's"):
        complete({"model": {"type": "WordLevel", "vocab": {"a": 0}}})
    source = tmp_path / "tokenizer.json"
    source.write_text("{}")
    command = [sys.executable, "-m", "engine_core_chatglm.tokenizer", str(source), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "no conversion" in done.stderr


def test_a_checkpoint_with_only_the_original_files_says_what_it_lacks(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    (tmp_path / "tokenization_chatglm.py").write_text(f"open({str(ran)!r}, 'w')")
    (tmp_path / "tokenizer.model").write_bytes(b"pieces")
    config = {
        "tokenizer_class": "ChatGLMTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_chatglm.ChatGLMTokenizer", None]},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(TokenizerError, match=r"ChatGLMTokenizer is code.*Put a tokenizer\.json"):
        load_tokenizer(tmp_path)
    assert not ran.exists()


@pytest.fixture
def folder_without_template(tmp_path: Path) -> Path:
    """A tokenizer whose words are those of a version 1 chat."""
    words = ["[UNK]", "question", "[gMASK]", "<sop>"]
    ids = {word: index for index, word in enumerate(words)} | {"[gMASK]": 301, "<sop>": 304}
    backend = Backend(WordLevel(ids, unk_token="[UNK]"))
    backend.add_special_tokens(["[gMASK]", "<sop>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    )
    return tmp_path


def test_a_chat_takes_the_family_template_if_the_tokenizer_has_none(
    folder_without_template: Path,
) -> None:
    messages = [{"role": "user", "content": "question"}]
    settings = {"tokenizer": str(folder_without_template), "max_model_len": 64}
    with LLM(str(GOLDEN / "chatglm1-tiny"), **settings) as llm:
        (output,) = llm.chat(messages)
    assert output.prompt_token_ids == [1, 301, 304]

    own = "{{ 'question[gMASK]question<sop>' }}"
    (folder_without_template / "chat_template.jinja").write_text(own)
    with LLM(str(GOLDEN / "chatglm1-tiny"), **settings) as llm:
        (output,) = llm.chat(messages)
    assert output.prompt_token_ids == [1, 301, 1, 304]
