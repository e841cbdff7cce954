"""Templates that would loop, allocate or recurse without end are refused."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from engine_core.errors import ErrorCode, RequestError
from engine_core.text import FastTokenizer

CHAT = [{"role": "user", "content": "Hello"}]
# Lists in lists, each twice in the next: small in memory, without end when written.
NESTED = (
    "{% set ns = namespace(x=(1,)) %}"
    "{% for i in range(60) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}"
)
# The same in two ways, of which neither makes much.
WIDE = (
    "{% set ns = namespace(x=[[1]]) %}"
    "{% for i in range(12) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{% set ns.y = [ns.x] %}"
    "{% for i in range(14) %}{% set ns.y = ns.y + ns.y %}{% endfor %}"
)
LONG = "{% set ns = namespace(b='ab ' * 200000) %}"
MANY = "{% for a in range(99999) %}"


def _render(template: str, messages: list[dict[str, Any]] = CHAT, **variables: Any) -> str:
    tokenizer = FastTokenizer(
        Tokenizer(models.BPE()), special_tokens={}, chat_templates={"default": template}
    )
    return tokenizer.apply_chat_template(messages, **variables)


STOPPED = {
    "loops": MANY + MANY + "{% endfor %}{% endfor %}",
    "loops that skip": MANY + "{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    "a loop in a filter": MANY + "{{ range(99999) | map('abs') | list | length }}{% endfor %}",
    "sums": MANY + "{{ range(99999) | sum }}{% endfor %}",
    "sum of lists": "{{ ([[1] * 100] * 5000) | sum(start=[]) }}",
    "searches": LONG + MANY + "{{ 'abb' in ns.b }}{{ ns.b.count('bb') }}{% endfor %}",
    "slices": LONG + MANY + "{{ ns.b[::-1] | length }}{% endfor %}",
    "kept slices": LONG + MANY + "{% set ns.l = [ns.l, ns.b[1:]] %}{% endfor %}",
    "fixed text": MANY + "x" * 50_000 + "{% endfor %}",
    "dictionaries": MANY + "{% set x = dict.fromkeys(range(99999)) %}{% endfor %}",
    "arguments": "{% macro m() %}{% endmacro %}" + MANY + "{{ m(*range(99999)) }}{% endfor %}",
    "calls": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}"
    "{{ m(60) }}",
    "groups": "{% for a in range(9999) %}{{ range(9999) | groupby('real') }}{% endfor %}",
    "times": "{{ 'a' * 10**9 }}",
    "times twice": "{{ 'a' * 1000 * 1000 * 1000 }}",
    "a list times": "{{ [1] * 10**8 }}",
    "a power": "{{ 10 ** (10 ** 9) }}",
    "squares": "{% set ns = namespace(x=2) %}"
    "{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    **{
        f"doubling by {way}": "{% set ns = namespace(x='ab') %}"
        "{% for i in range(60) %}{% set ns.x = " + code + " %}{% endfor %}{{ ns.x }}"
        for way, code in {
            "~": "ns.x ~ ns.x",
            "+": "ns.x + ns.x",
            "replace": "ns.x.replace('a', ns.x)",
            "join": "ns.x.join(ns.x)",
            "a format": "'%s%s' % (ns.x, ns.x)",
            "format": "'{0}{0}'.format(ns.x)",
        }.items()
    },
    "doubling by blocks": "{% set ns = namespace(x='ab') %}{% for i in range(60) %}"
    "{% set t %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = t %}{% endfor %}",
    "nested written": NESTED + "{{ ns.x }}",
    "nested as JSON": NESTED + "{{ ns.x | tojson }}",
    "nested compared": NESTED + "{{ ns.x == ns.x[0] }}",
    "nested as a key": NESTED + "{{ {ns.x: 1} }}",
    "nested in namespaces": "{% set ns = namespace() %}{% for i in range(60) %}"
    "{% set ns.x = [namespace(a=ns.x, b=ns.x)] %}{% endfor %}{{ ns.x }}",
    "wide written": WIDE + "{{ ns.y }}",
    "wide joined": WIDE + "{{ ns.y | join }}",
    "wide formatted": WIDE + "{{ '%s' % [ns.y] }}{{ '{}'.format(ns.y) }}",
    "wide compared": WIDE + "{% set a = ns.y + [1] %}{% set b = ns.y + [2] %}{{ a == b }}",
    "wide in a test": WIDE + "{% set a = ns.y + [1] %}{% set b = ns.y + [2] %}{{ a is eq b }}",
    "wide searched": WIDE + "{{ ns.y.index(ns.y) }}",
    "wide sorted": WIDE + "{{ ns.y | sort | length }}",
    "wide that changes": WIDE + "{% for i in [1, 2] %}{{ loop.changed(ns.y + [i]) }}{% endfor %}",
    "a method's width": "{{ 'a'.center(10**9) }}",
    "a filter's width": "{{ 'a' | center(1000000000) }}",
    "zeros": "{{ 'a'.zfill(10**9) }}",
    "bytes": "{{ (1).to_bytes(10**9, 'big') }}",
    "format's width": "{{ '{:1000000000}'.format(1) }}",
    "format's width as a value": "{{ '{:{w}}'.format(1, w=10**9) }}",
    "format_map": "{{ '{a:999999999}'.format_map({'a': 1}) }}",
    "%'s width": "{{ '%1000000000d' % 1 }}",
    "%'s width as a value": "{{ '%*d' % (10**9, 1) }}",
    "the filter's width": "{{ '%1000000000d' | format(1) }}",
    "digits": "{{ 5 | round(1000000000, 'ceil') }}",
    "indentation": "{{ ('a\n' * 100000) | indent(100000) }}",
    "indentation by text": "{{ ('a\n' * 100000) | indent('b' * 100000) }}",
    "JSON's indentation": "{{ [[1]] | tojson(indent=1000000000) }}",
    "JSON's lines": "{{ ([[[[[[1]]]]]] * 1000) | tojson(indent=100000) }}",
    "replacing nothing": "{{ ('a' * 100000).replace('', 'b' * 100000) }}",
    "the filter replace": "{{ ('a' * 100000) | replace('a', 'b' * 100000) }}",
    "a filter block": "{% filter replace('a', 'b' * 100000) %}" + "a" * 100_000 + "{% endfilter %}",
    "a separator": "{{ range(99999) | join('b' * 100000) }}",
    "a method's separator": "{{ ('b' * 100000).join(range(99999) | map('string')) }}",
    "translation": "{{ ('a' * 100000).translate({97: 'b' * 100000}) }}",
    "tabs": "{{ ('\t' * 100000).expandtabs(100000) }}",
    "wrapping": "{{ ('a ' * 100000) | wordwrap(1, wrapstring='b' * 100000) }}",
    "batches": "{{ [1] | batch(10**9, 0) | list | length }}",
    "pages": "{{ [1] | slice(10**9) | list | length }}",
}


@pytest.mark.parametrize("name", STOPPED)
def test_a_template_that_does_too_much_is_stopped(name: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(RequestError, match="the chat template was stopped: ") as caught:
            _render(STOPPED[name])
        assert caught.value.code is ErrorCode.CHAT_TEMPLATE
        assert tracemalloc.get_traced_memory()[1] < 64 * 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "template",
    [
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
        "{% block a %}{{ self.a() }}{% endblock %}",
    ],
)
def test_recursion_without_end_is_an_error(template: str) -> None:
    with pytest.raises(RequestError, match=r"the chat template failed .*: RecursionError"):
        _render(template)


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}", "nests too deeply"),
        ("{% if a %}" * 8000 + "{% endif %}" * 8000, "nests too deeply"),
        ("{{ a" + ".b" * 5000 + " }}", "nests too deeply"),
        ("{{ " + "not " * 8000 + "1 }}", "nests too deeply"),
        ("{% for a in b %}" * 30 + "{% endfor %}" * 30, "cannot be compiled: SyntaxError"),
        ("{{ " + "9" * 200_000 + " }}", "cannot be compiled: ValueError"),
        ("{{a}}" * 50_000, "is too long: it has more than 16384 words and signs"),
        ("{{ " + "+".join("1" * 100_000) + " }}", "is too long: it has more than 16384 words"),
        ("x" * 300_000, "has 300000 characters, and the longest taken has 262144"),
        ("{% autoescape 'a' | center(1000000000) %}{% endautoescape %}", "was stopped"),
        ("{{ x | urlize }}", "No filter named 'urlize'"),
        ("{{ x | pprint }}", "No filter named 'pprint'"),
    ],
)
def test_a_template_that_cannot_be_compiled_is_refused(template: str, says: str) -> None:
    for _ in range(2):
        with pytest.raises(RequestError, match=f"the chat template .*{says}") as caught:
            _render(template)
        assert caught.value.code is ErrorCode.CHAT_TEMPLATE


def test_a_long_chat_is_rendered() -> None:
    template = (
        "{% macro text(message) %}{{ message.content | trim }}{% endmacro %}"
        "{% for message in messages %}{% if message.role == 'user' and loop.index < 10**9 %}"
        "{{ '[' + text(message) ~ ']' }}{% elif messages | length > 5 %}"
        "{{ message['content'].split('</think>')[-1].strip() }}{% endif %}{% endfor %}"
    )
    messages = [
        {"role": ("user", "assistant")[index % 2], "content": f" {index} "}
        for index in range(16_384)
    ]
    wanted = "".join(f"[{i}]{i + 1}" for i in range(0, 16_384, 2))
    assert _render(template, messages) == wanted
    long = "line\n" * 400_000
    assert _render(template, [{"role": "user", "content": long}]) == f"[{long.strip()}]"


def test_what_a_template_may_do_grows_with_the_request() -> None:
    template = "{% for i in range(n) %}{{ messages[0].content }}{% endfor %}"
    assert _render(template, [{"role": "user", "content": "a" * 100_000}], n=9) == "a" * 900_000
    assert len(_render(template, [{"role": "user", "content": "a" * 1_000_000}], n=40)) == 4 * 10**7
    with pytest.raises(RequestError, match="was stopped"):
        _render(template, [{"role": "user", "content": "a" * 1000}], n=5000)


SAME = {
    "{{ '%5.1f|%s' % (2.5, 'x') }}{{ '{:>4}{}'.format(1, [2]) }}": "  2.5|x   1[2]",
    "{{ [1, 2] + [3] }}{{ (1, 2) + (3,) }}{{ [0] * 2 }}": "[1, 2, 3](1, 2, 3)[0, 0]",
    "{{ 2 ** 10 }}{{ 1.5 * 2 }}{{ 7 % 4 }}{{ 'ab' * 2 }}": "10243.03abab",
    "{{ 'a' ~ 1 ~ none ~ [1] }}": "a1None[1]",
    "{{ 'abc'[::-1] }}{{ [1, 2, 3][1:] }}": "cba[2, 3]",
    "{{ ', '.join(['a', 'b']) }}{{ [1, 2] | join('-') }}{{ 'ab' | join('.') }}": "a, b1-2a.b",
    "{{ [3, 1, 2] | sort | join }}{{ [1, 2] | sum }}{{ {'b': 1} | dictsort }}": "1233[('b', 1)]",
    "{{ 'a\nb' | indent(2) }}|{{ 'x' | center(3) }}": "a\n  b| x ",
    "{{ 'a-b' | replace('-', '+') }}{{ 'a-b'.replace('-', '') }}": "a+bab",
    "{% for a, b in [(1, 2)] if b > 1 %}{{ a }}{{ loop.length }}{% endfor %}": "11",
    "{% for x in [1, [2, [3]]] recursive %}{{ x if x is number else loop(x) }}{% endfor %}": "123",
    "{% autoescape true %}{{ '<' ~ '&' }}{% endautoescape %}{{ '<' | e }}": "&lt;&amp;&lt;",
    "{{ 2 in [1, 2] }}{{ 'a' in {'a': 1} }}{{ 1 < 2 < 3 }}{{ 'x' is in 'xy' }}": "True" * 4,
    "{% filter upper %}a{{ 'b' }}{% endfilter %}{% set x %}c{% endset %}{{ x }}": "ABc",
    "{{ [{'a': 1}, {'a': 2}] | selectattr('a', 'eq', 2) | list }}": "[{'a': 2}]",
    "{% for x in [1, 2] | map('string') %}{{ x }}{{ loop.last }}{% endfor %}": "1False2True",
    "{{ [[1, [2]]] | tojson(indent=1) }}": "[\n [\n  1,\n  [\n   2\n  ]\n ]\n]",
}


@pytest.mark.parametrize("template", SAME)
def test_what_is_paid_for_is_what_jinja_makes(template: str) -> None:
    assert _render(template) == SAME[template]
