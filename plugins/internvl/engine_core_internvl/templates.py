"""Prompt formats of the original code as chat templates. Imports no torch.

A checkpoint of the original layout names one of them (``template``). Its tokenizer may have a
template too, but the original code does not use that, and it knows no images.
"""

from __future__ import annotations

import json

# The system message of checkpoints that do not state their own.
_SYSTEM_1 = (
    "你是由上海人工智能实验室联合商汤科技开发的书生多模态大模型，英文名叫InternVL, "  # noqa: RUF001
    "是一个有用无害的人工智能助手。"
)
_SYSTEM_2 = (
    "你是书生·万象，英文名是InternVL，是由上海人工智能实验室、清华大学及多家合作单位"  # noqa: RUF001
    "联合开发的多模态大语言模型。"
)
# What a message shows stands where its part is, on lines of its own.
_CONTENT = """\
{%- macro shown(content) -%}
{%- if content is string -%}{{ content }}
{%- else -%}
{%- for part in content -%}
{%- if part.type == 'image' -%}{{ '<img><IMG_CONTEXT></img>\\n' }}
{%- elif part.type == 'video' -%}{{ 'Frame1: <img></img>\\n' }}
{%- else -%}{{ part.text }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
"""
_CHATML = """\
{%- if messages and messages[0].role == 'system' -%}
{%- set system, rest = shown(messages[0].content), messages[1:] -%}
{%- else -%}
{%- set system, rest = SYSTEM, messages -%}
{%- endif -%}
{{- '<|im_start|>system\\n' + system + END -}}
{%- for message in rest -%}
{{- '<|im_start|>' + message.role + '\\n' + shown(message.content) + END -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""
_HUMAN_BOT = """\
{{- bos_token -}}
{%- if messages and messages[0].role == 'system' -%}
{%- set system, rest = shown(messages[0].content), messages[1:] -%}
{%- else -%}
{%- set system, rest = SYSTEM, messages -%}
{%- endif -%}
{{- system + ' ' -}}
{%- for message in rest -%}
{%- if message.role == 'assistant' -%}{{ '<bot>: ' + shown(message.content) + '</s>' }}
{%- else -%}{{ '<human>: ' + shown(message.content) + ' ' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<bot>:' }}{%- endif -%}
"""


def chat_template(
    name: str | None, system: str | None, *, begins: bool
) -> tuple[str | None, str | None]:
    """The template of this name, and the token that ends an answer; None, None if there is none.

    Args:
        name: what config.json calls it.
        system: the checkpoint's system message; None for that of the format.
        begins: whether the tokenizer begins a text with its first token.
    """
    if name == "internvl_zh":
        return _filled(_HUMAN_BOT, system or "", "</s>"), "</s>"
    formats = {
        "Hermes-2": (_SYSTEM_1, "<|im_end|>"),
        "internlm2-chat": (_SYSTEM_1, "<|im_end|>"),
        "internvl2_5": (_SYSTEM_2, "<|im_end|>\n"),
    }
    if not isinstance(name, str) or name not in formats:
        return None, None
    usual, end = formats[name]
    first = "{{- bos_token -}}\n" if begins else ""
    return first + _filled(_CHATML, usual if system is None else system, end), end.strip()


def _filled(template: str, system: str, end: str) -> str:
    literals = {"SYSTEM": json.dumps(system, ensure_ascii=False), "END": json.dumps(end)}
    for word, literal in literals.items():
        template = template.replace(word, literal)
    return _CONTENT + template
