"""Bounds on what a chat template may do.

A template is code that came with a checkpoint. jinja's sandbox keeps it from other objects, but not
from looping or allocating without end. Here every loop, call and text is paid from a budget that
grows with the size of what is rendered. What one operation makes is paid before it is made, as an
operation cannot be interrupted.
"""

from __future__ import annotations

import re
import threading
import time
import types
from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    Mapping,
    MappingView,
    Sequence,
    Set,
    Sized,
)
from contextlib import contextmanager
from functools import wraps
from typing import Any

import jinja2
import jinja2.compiler
import jinja2.lexer
import jinja2.nodes
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils

# The largest templates of published models have a quarter of it; a token takes 30 us to compile.
MAX_SOURCE, MAX_TOKENS = 2**18, 2**14
# Characters, or entries of lists, that a template may make of nothing, and of each character or
# entry of the messages.
_BASE, _PER_SIZE = 1_000_000, 64
# Seconds of processor time, likewise: on a slow core a chat of 16,384 messages takes half of one.
_SECONDS, _SECONDS_PER_SIZE = 0.4, 4e-6
_STEP = 16
_LOOK_EVERY = 32
_MAX_BITS = 4096
# Filters and methods for web pages, whose cost nothing bounds.
_LEFT_OUT = ("pprint", "striptags", "urlize")
# Filters that only look at the entries of a container, or take some of them.
_SHALLOW = (
    *("attr", "batch", "count", "d", "default", "first", "items", "last", "length", "list", "map"),
    *("random", "reject", "rejectattr", "reverse", "select", "selectattr", "slice"),
)
_COMPARING = (
    *("in", "eq", "equalto", "==", "ne", "!=", "lt", "<", "lessthan", "le", "<="),
    *("gt", ">", "greaterthan", "ge", ">="),
)
_SCALARS = frozenset((int, float, bool, types.NoneType))
_PLAIN: tuple[type, ...] = (list, tuple, type({}.values()))
_NUMBER = re.compile(r"\d+")
_STAR = re.compile(r"%[^%]{0,99}\*")
_FIELD_IN_FIELD = re.compile(r"\{[^{}]+\{")


class TemplateLimitError(jinja2.TemplateError):
    """A template does more than any prompt of that size needs."""


class _Budget:
    """Remaining budget of a template.

    Args:
        size: characters and entries of what it renders.
    """

    def __init__(self, size: int) -> None:
        self._left = _BASE + _PER_SIZE * size
        self._seconds = _SECONDS + _SECONDS_PER_SIZE * size
        self._deadline = time.thread_time() + self._seconds
        self._until_look = 0

    def spend(self, cost: int) -> None:
        """Take ``cost`` characters or entries.

        Raises:
            TemplateLimitError: so much is not left, or the time is over.
        """
        self._left -= cost
        if self._left < 0:
            raise TemplateLimitError(
                "its loops and texts make more than any prompt of this size needs"
            )
        self._until_look -= 1 + cost // 256
        if self._until_look < 0:
            self._until_look = _LOOK_EVERY
            if time.thread_time() > self._deadline:
                raise TemplateLimitError(f"it takes more than {self._seconds:.1f} s")


_current = threading.local()


@contextmanager
def budget(size: int) -> Iterator[None]:
    """Give the templates that this thread renders or compiles meanwhile a budget."""
    before = getattr(_current, "budget", None)
    _current.budget = _Budget(size)
    try:
        yield
    finally:
        _current.budget = before


def spend(cost: int) -> None:
    """Take from this thread's budget.

    Raises:
        TemplateLimitError: there is not so much left.
    """
    _current.budget.spend(cost)


def size_of(*values: Any, paid: bool = True) -> int:
    """Characters and entries of ``values``; one that is in several places counts in each.

    Raises:
        TemplateLimitError: looking at all the entries costs more than is left; only if ``paid``.
    """
    size = 0
    stack = list(values)
    while stack:
        value = stack.pop()
        kind = type(value)
        if kind is str or isinstance(value, str | bytes):
            size += len(value)
            continue
        size += 8
        if kind in _SCALARS:
            continue
        if isinstance(value, jinja2.utils.Namespace):
            value = value._Namespace__attrs
        if kind is dict or isinstance(value, Mapping):
            stack.extend(value)
            value = value.values()
        # The plain types first: to ask for the abstract ones takes ten times as long.
        if isinstance(value, _PLAIN) or isinstance(value, Set | MappingView):  # noqa: SIM101
            if paid:
                spend(len(value))  # type: ignore[arg-type]
            stack.extend(value)  # type: ignore[arg-type]
    return size


def _made(value: Any) -> Any:
    """``value``, which an operation has made, with its size paid."""
    if isinstance(value, types.GeneratorType):
        return _counted(value)
    if isinstance(value, str | bytes):
        spend(len(value))
    elif isinstance(value, Sized):
        spend(_STEP * len(value))
    return value


def _counted(values: Iterator[Any]) -> Iterator[Any]:
    for value in values:
        spend(_STEP)
        yield value


def _listed(values: Any) -> Any:
    return values if isinstance(values, Sized) else list(values)


def _pay_format(text: str | bytes, values: Any) -> None:
    """Pay for the text that a format makes: what its widths say, and each value in each field."""
    if isinstance(text, bytes):
        text = text.decode("latin-1")
    if _STAR.search(text) or _FIELD_IN_FIELD.search(text):
        raise TemplateLimitError("a width in a format is no number but a value")
    spend(sum(int(number[:9]) for number in _NUMBER.findall(text)))
    spend((text.count("%") + text.count("{")) * size_of(values))


def _pay_text(name: str, text: Any, args: Sequence[Any]) -> None:
    """Pay for what the method or filter ``name`` makes of a text, before it is made."""
    if name in _LEFT_OUT:
        raise TemplateLimitError(f"{name} is not available to chat templates")
    numbers = [arg for arg in args if isinstance(arg, int)]
    longest = max((len(arg) for arg in args if isinstance(arg, str | bytes)), default=0)
    largest = max(0, *numbers, 0)
    times = 1
    if name == "join":
        spend(size_of(args[0]) + len(text) * len(args[0]))
    elif name == "replace" and len(args) > 1 and isinstance(args[0], str | bytes):
        times = text.count(args[0])
    elif name == "indent":
        times = text.count("\n") + 1
    elif name == "expandtabs":
        times, largest = text.count("\t"), max(largest, 8)
    elif name == "wordwrap":
        times, largest = len(text), 0
        spend(20 * len(text))
    elif name == "translate":
        longest = max((size_of(item) for item in _listed(args[0].values())), default=0)
        times = len(text)
    spend(times * (largest + longest))


class LimitedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """jinja's immutable sandbox, with every operation of a template paid from :func:`budget`."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, **options: Any) -> None:
        # Nothing is computed when a template is compiled.
        super().__init__(optimized=False, finalize=_finalized, **options)
        for name in _LEFT_OUT:
            del self.filters[name]
        del self.globals["lipsum"]
        self.limit_filters()
        for name in _COMPARING:
            test: Any = self.tests[name]
            self.tests[name] = _limited_test(test)

    def limit_filters(self, **added: Callable[..., Any]) -> None:
        """Add filters, and let all be paid for."""
        self.filters.update(added)
        for name, function in self.filters.items():
            if not hasattr(function, "is_limited"):
                self.filters[name] = _limited_filter(name, function)

    def _tokenize(self, *args: Any, **kwargs: Any) -> jinja2.lexer.TokenStream:
        stream = super()._tokenize(*args, **kwargs)
        return jinja2.lexer.TokenStream(_few(stream), stream.name, stream.filename)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call ``obj`` and pay for it."""
        spend(_STEP + len(args) + len(kwargs))
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str | bytes | int):
            name = obj.__name__
            if name == "join" and args:
                args = (_listed(args[0]), *args[1:])
            _pay_text(name, owner, (*args, *kwargs.values()))
        elif isinstance(owner, list | tuple):
            size_of(owner)
        elif isinstance(owner, jinja2.runtime.LoopContext):
            size_of(args)
        return _made(super().call(context, obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """``str.format`` in the sandbox, paid for."""
        function = super().wrap_str_format(value)
        if function is None:
            return None

        def paid(*args: Any, **kwargs: Any) -> str:
            _pay_format(value.__self__, (args, kwargs))
            return function(*args, **kwargs)

        return paid

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """``left operator right``, paid for."""
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length()
            bits = bits * right if operator == "**" else bits + right.bit_length()
            if operator in ("*", "**") and bits > _MAX_BITS:
                raise TemplateLimitError(f"{operator} makes a number of more than {_MAX_BITS} bits")
        elif operator == "*":
            for some, other in ((left, right), (right, left)):
                if isinstance(some, Sized) and isinstance(other, int):
                    spend(max(0, other) * (1 if isinstance(some, str) else _STEP) * len(some))
        elif operator == "%" and isinstance(left, str | bytes):
            _pay_format(left, right)
        elif operator == "+" and isinstance(left, Sized) and isinstance(right, Sized):
            # A tuple may become a key, whose hash looks at all of it.
            spend(len(left) + len(right))
            if isinstance(left, tuple):
                spend(size_of(left, right))
        return super().call_binop(context, operator, left, right)

    def step(self, cost: int = _STEP) -> bool:
        """Pay for a run of a block, or a look at an entry of a loop."""
        spend(cost)
        return True

    def paid(self, value: Any) -> Any:
        """``value`` with all that is in it paid."""
        spend(size_of(value))
        return value

    def looked_at(self, value: Any) -> Any:
        """``value``, all of which is compared with another."""
        size_of(value)
        return value

    def made(self, value: Any) -> Any:
        """``value`` with its length paid."""
        return _made(value)


def _few(stream: jinja2.lexer.TokenStream) -> Iterator[jinja2.lexer.Token]:
    for index, token in enumerate(stream):
        if index == MAX_TOKENS:
            raise TemplateLimitError(f"it has more than {MAX_TOKENS} words and signs of code")
        yield token


def _finalized(value: Any) -> Any:
    """A value that is written."""
    spend(len(value) if type(value) is str else size_of(value))
    return value


def _limited_test(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def limited(value: Any, *others: Any) -> Any:
        size_of(*others)
        return function(value, *others)

    return limited


def _limited_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    # jinja gives some of them itself or a context first.
    first = int(hasattr(function, "jinja_pass_arg"))

    @wraps(function)
    def limited(*args: Any, **kwargs: Any) -> Any:
        spend(_STEP + len(args))
        value, *others = args[first:]
        others += kwargs.values()
        if name in _SHALLOW:
            spend(sum(max(0, other) for other in others if isinstance(other, int)))
            return _made(function(*args, **kwargs))
        if name == "join":
            value = _listed(value)
            text = next((other for other in others if isinstance(other, str)), "")
            _pay_text(name, text, [value])
        elif name == "format":
            _pay_format(str(value), others)
        else:
            if name == "sum" and any(isinstance(other, list | tuple) for other in others):
                raise TemplateLimitError("sum adds numbers, and not lists")
            value = _listed(value) if isinstance(value, Iterable) else value
            cost = size_of(value)
            spend(20 * cost if name in ("sort", "dictsort", "groupby", "round") else cost)
            _pay_text(name, str(value) if name in ("replace", "indent", "wordwrap") else "", others)
        return _made(function(*args[:first], value, *args[first + 1 :], **kwargs))

    limited.is_limited = True  # type: ignore[attr-defined]
    return limited


class _Generator(jinja2.compiler.CodeGenerator):
    """Code of a template that pays for each run of a block and each value."""

    def blockvisit(self, nodes: Iterable[jinja2.nodes.Node], frame: Any) -> None:
        """A block begins with a step that pays for its fixed text too."""
        nodes = list(nodes)
        outputs = (node for node in nodes if isinstance(node, jinja2.nodes.Output))
        text = sum(
            len(item.data)
            for output in outputs
            for item in output.nodes
            if isinstance(item, jinja2.nodes.TemplateData)
        )
        self.writeline(f"environment.step({_STEP + text})")
        super().blockvisit(nodes, frame)

    def visit_For(self, node: jinja2.nodes.For, frame: Any) -> None:  # noqa: N802 - jinja's name
        """The entries that a loop's condition leaves out are paid too."""
        if node.test is not None:
            step = jinja2.nodes.Call(
                jinja2.nodes.EnvironmentAttribute("step"), [], [], None, None, lineno=node.lineno
            )
            node.test = jinja2.nodes.And(step, node.test, lineno=node.lineno)
        super().visit_For(node, frame)

    def _paid(self, way: str, visit: Callable[..., None], node: Any, frame: Any) -> None:
        self.write(f"environment.{way}(")
        visit(node, frame)
        self.write(")")

    def visit_List(self, node: jinja2.nodes.List, frame: Any) -> None:  # noqa: N802
        """A list."""
        self._paid("paid", super().visit_List, node, frame)

    def visit_Dict(self, node: jinja2.nodes.Dict, frame: Any) -> None:  # noqa: N802
        """A dictionary."""
        self._paid("paid", super().visit_Dict, node, frame)

    def visit_Tuple(self, node: jinja2.nodes.Tuple, frame: Any) -> None:  # noqa: N802
        """A tuple, unless it is what is assigned to."""
        if node.ctx == "load":
            self._paid("paid", super().visit_Tuple, node, frame)
        else:
            super().visit_Tuple(node, frame)

    def visit_Getitem(self, node: jinja2.nodes.Getitem, frame: Any) -> None:  # noqa: N802
        """A slice is paid for."""
        if isinstance(node.arg, jinja2.nodes.Slice):
            self._paid("made", super().visit_Getitem, node, frame)
        else:
            super().visit_Getitem(node, frame)

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: Any) -> None:  # noqa: N802
        """``~``, whose values are paid before they are texts."""
        markup = frame.eval_ctx.volatile or frame.eval_ctx.autoescape
        self.write(f"{'markup_join' if markup else 'str_join'}(environment.paid((")
        for item in node.nodes:
            self.visit(item, frame)
            self.write(", ")
        self.write(")))")

    def visit_Operand(self, node: jinja2.nodes.Operand, frame: Any) -> None:  # noqa: N802
        """The right side of a comparison."""
        if isinstance(node.expr, jinja2.nodes.Const | jinja2.nodes.List | jinja2.nodes.Tuple):
            super().visit_Operand(node, frame)
            return
        self.write(f" {jinja2.compiler.operators[node.op]} ")
        self._paid("looked_at", self.visit, node.expr, frame)

    def _output_child_to_const(self, node: Any, frame: Any, finalize: Any) -> str:
        if not isinstance(node, jinja2.nodes.TemplateData):
            raise jinja2.nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)


LimitedEnvironment.code_generator_class = _Generator
