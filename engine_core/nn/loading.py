"""From a checkpoint's tensors to a model's parameters, with an account of both.

A model's ``load_weights`` passes each tensor to :func:`load_weight`, usually through
:func:`load_stacked_weights`. While a :class:`LoadAccount` is open it notes which parameters were
filled and which tensors were taken. A model on the meta device can be loaded from tensors on the
meta device: that checks every name and shape of a checkpoint without reading it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from engine_core.errors import ConfigError, WeightsMismatchError
from engine_core.step_context import current_build_context

Weights = Iterable[tuple[str, Tensor]]


class WeightLoader(Protocol):
    """Puts a checkpoint's tensor, or the shard of it that this rank keeps, into a parameter."""

    def __call__(self, param: nn.Parameter, tensor: Tensor, shard_id: Any = None) -> None:
        """Load ``tensor``, or raise :class:`ShapeMismatchError`."""


class ShapeMismatchError(ValueError):
    """A tensor does not fit the parameter, or the part of it, that it was meant for."""


class LoadAccount:
    """Which parameters of a model were filled and which tensors were taken.

    Attributes:
        uncompared: pairs of tensors that are for one parameter and were not read: if they differ,
            loading them will be refused.
        noted: ids of the parameters that something was loaded into, until somebody clears it.
        altered: tensors that the model made others of, before it filled a parameter.
    """

    def __init__(self, model: nn.Module) -> None:
        self._params = dict(model.named_parameters())
        self._names = {id(param): name for name, param in self._params.items()}
        # Numbers to come. Added up for each tensor, the parts of 128 experts would take minutes.
        self._missing = {name: param.numel() for name, param in self._params.items()}
        self._filled: dict[str, dict[Any, int]] = {name: {} for name in self._missing}
        self._sources: dict[str, dict[Any, set[str]]] = {name: {} for name in self._missing}
        self._dtypes: dict[str, set[torch.dtype]] = {}
        self._offered: dict[str, int] = {}
        self._taken: set[str] = set()
        # By a storage's address. A weak reference keeps it from being that of a later one.
        self._by_storage: dict[int, str] = {}
        self._storages: list[StorageWeakRef] = []
        self._current: str | None = None
        self._made_of: tuple[str, ...] = ()
        self._wrong: list[str] = []
        self._twice: dict[str, str] = {}
        self._forms: dict[str, tuple[torch.Size, tuple[int, ...]]] = {}
        self.uncompared: list[tuple[str, str]] = []
        self.altered: set[str] = set()
        self.noted: list[int] = []

    def watch(self, weights: Weights) -> Iterator[tuple[str, Tensor]]:
        """Pass the tensors on and remember their names."""
        for name, tensor in weights:
            self._offered[name] = len(self._offered)
            storage = StorageWeakRef(tensor.untyped_storage())
            self._storages.append(storage)
            self._by_storage[storage.cdata] = name
            self._forms[name] = tensor.shape, tensor.stride()
            self._current = name
            yield name, tensor

    @property
    def current(self) -> str | None:
        """The name of the tensor that was handed out last."""
        return self._current

    def _source(self, tensor: Tensor) -> str | None:
        # A view shares its tensor's storage; a computed copy came from the tensor handed out last.
        return self._by_storage.get(tensor.untyped_storage()._cdata, self._current)

    def note(
        self,
        param: nn.Parameter,
        tensor: Tensor,
        shard_id: Any,
        numel: int,
        refused: ShapeMismatchError | None = None,
    ) -> None:
        """A part of ``param`` with ``numel`` elements was filled from ``tensor``, or refused it.

        A part that refused its tensor is wrong, and not missing too.
        """
        name = self._names.get(id(param))
        self.noted.append(id(param))
        if name is not None:
            self._missing[name] -= numel - self._filled[name].get(shard_id, 0)
            self._filled[name][shard_id] = numel
            self._dtypes.setdefault(name, set()).add(tensor.dtype)
        own = self._by_storage.get(tensor.untyped_storage()._cdata)
        sources = self._made_of or (() if self._current is None else (self._current,))
        if own is not None:
            sources = (own,)
        if name is not None and sources:
            if not _COMPARING.get():
                self._compare(name, sources, shard_id)
            self._sources[name].setdefault(shard_id, set()).update(sources)
            if own is None or self._forms[own] != (tensor.shape, tensor.stride()):
                self.altered.update(sources)
        self._taken.update(sources)
        if refused is not None:
            self._wrong.append(f"{sources[-1] if sources else None}: {refused}")

    @contextmanager
    def making(self, tensors: Iterable[Tensor]) -> Iterator[None]:
        """Within the block what is no tensor that was handed out is made of these."""
        names = (self._by_storage.get(tensor.untyped_storage()._cdata) for tensor in tensors)
        self._made_of = tuple(name for name in names if name is not None)
        try:
            yield
        finally:
            self._made_of = ()

    def _compare(self, name: str, sources: Collection[str], shard_id: Any) -> None:
        """Note whether other tensors than ``sources`` filled this part, or some of it."""
        shards = self._sources[name]
        others = shards.get(shard_id, set())
        if self._missing[name] < 0 and hasattr(self._params[name], "stacks"):
            # Experts may come one by one and all at once.
            others = set().union(*(shards[key] for key in shards if _overlap(key, shard_id)))
        others = others.difference(sources)
        if others:
            self._twice[max(sources)] = min(others)

    def is_filled(self, param: nn.Parameter) -> bool:
        """Whether all parts of a parameter of the model were filled."""
        return self._missing[self._names[id(param)]] <= 0

    def sources(self, param: nn.Parameter) -> frozenset[str]:
        """The tensors that a parameter of the model was filled from."""
        return frozenset().union(*self.shards(param).values())

    def shards(self, param: nn.Parameter) -> Mapping[Any, frozenset[str]]:
        """The same for each part of it, by shard id."""
        parts = self._sources[self._names[id(param)]]
        return {shard_id: frozenset(names) for shard_id, names in parts.items()}

    def fills(self) -> Counter[str]:
        """How many parameters of the model each tensor filled, or parts of them."""
        return Counter(
            name
            for shards in self._sources.values()
            for name in frozenset().union(*shards.values())
        )

    def stored_dtype(self, param: nn.Parameter) -> torch.dtype | None:
        """The type of all that filled a parameter; None of several, or if it is not the model's."""
        dtypes = self._dtypes.get(self._names.get(id(param), ""), set())
        return next(iter(dtypes)) if len(dtypes) == 1 else None

    def ignore(self, tensor: Tensor) -> str | None:
        """Take ``tensor`` as known to the model, which fills nothing; its name."""
        name = self._source(tensor)
        if name is not None:
            self._taken.add(name)
        return name

    def raise_mismatch(self, where: str, spare: Collection[str] = ()) -> None:
        """Say what did not match, if anything did not; ``spare`` tensors need not be taken.

        Raises:
            WeightsMismatchError: a parameter was not or only partly filled, a tensor was not
                taken, or one had a wrong shape.
        """
        missing = tuple(
            f"{name}{self._lost(name)}" for name, numel in self._missing.items() if numel > 0
        )
        expected = self._taken.union(spare)
        unexpected = tuple(name for name in self._offered if name not in expected)
        wrong = tuple(self._wrong)
        twice = tuple(f"{name}: fills what {first} does" for name, first in self._twice.items())
        if not (missing or unexpected or wrong or twice):
            return
        parts = [
            f"{title}: {_listing(names)}"
            for title, names in (
                ("of the wrong shape", wrong),
                ("there twice", twice),
                ("missing", missing),
                ("unexpected", unexpected),
            )
            if names
        ]
        advice = "check that the config belongs to them"
        if missing:
            advice += ", and that no shard is missing"
        raise WeightsMismatchError(
            f"the weights in {where} are not those of this model; {'; '.join(parts)}; {advice}",
            missing=missing,
            unexpected=unexpected,
            wrong=(*wrong, *twice),
        )

    def _lost(self, name: str) -> str:
        """The parts that a partly filled parameter lacks, in words."""
        filled, param = self._filled[name], self._params[name]
        sizes: Mapping[Any, int] = getattr(param, "shard_sizes", {})
        parts = [key for key in getattr(param, "parts", sizes) if sizes.get(key)]
        lost = [part for part in parts if not any(_overlap(key, part) for key in filled)]
        if not filled or not lost:
            return ""
        return f" (without part {_listing(tuple(map(str, lost)), 4)})"


def _overlap(shard_id: Any, other: Any) -> bool:
    """Whether two shard ids have a part in common; of experts they are pairs, see StackedLinear."""
    ids = [each if isinstance(each, tuple) else (None, each) for each in (shard_id, other)]
    return all(a is None or b is None or a == b for a, b in zip(*ids, strict=True))


def _listing(names: tuple[str, ...], most: int = 8) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


class _DifferentError(Exception):
    """A tensor is not what the parameter holds that it is compared with."""


_ACCOUNT: ContextVar[LoadAccount | None] = ContextVar("engine_core_load_account", default=None)
# Whether load_weight compares instead of copying.
_COMPARING: ContextVar[bool] = ContextVar("engine_core_comparing", default=False)


@contextmanager
def load_account(model: nn.Module) -> Iterator[LoadAccount]:
    """Open an account for the loads inside the ``with`` block."""
    account = LoadAccount(model)
    token = _ACCOUNT.set(account)
    try:
        yield account
    finally:
        _ACCOUNT.reset(token)


def note_filled(param: nn.Parameter, tensor: Tensor) -> None:
    """Tell an open account that all of ``param`` was filled from ``tensor``.

    For code that copies a tensor itself; :func:`load_weight` does both.
    """
    account = _ACCOUNT.get()
    if account is not None:
        account.note(param, tensor, None, param.numel())


def take(tensor: Tensor) -> None:
    """Tell an open account that ``tensor`` is known: others are made of it, or nobody wants it."""
    account = _ACCOUNT.get()
    if account is not None:
        account.ignore(tensor)


def made_of(tensors: Iterable[Tensor]) -> AbstractContextManager[None]:
    """Tell an open account that what is loaded within the block is made of these tensors.

    A tensor that code computes is else taken for one that is made of the last that was handed out.
    """
    account = _ACCOUNT.get()
    return nullcontext() if account is None else account.making(tensors)


def copy_checked(
    target: Tensor, tensor: Tensor, copy: Callable[[Tensor, Tensor], None] | None = None
) -> None:
    """Copy ``tensor`` into ``target``; on the meta device only compare their shapes.

    Of two tensors that are tied the second is not copied, but must be what the first has left.
    ``copy(target, tensor)`` may leave the same numbers in another order.

    Raises:
        ShapeMismatchError: the shapes differ, or ``tensor`` holds the codes of quantised numbers
            (integers, or floats of one byte) where ``target`` wants numbers, or anything else than
            the codes that it wants.
    """
    if target.shape != tensor.shape:
        raise ShapeMismatchError(
            f"has shape {list(tensor.shape)}, the model wants {list(target.shape)}"
        )
    same_kind = _holds_numbers(target.dtype) and _holds_numbers(tensor.dtype)
    if not same_kind and target.dtype != tensor.dtype:
        raise ShapeMismatchError(f"is of {tensor.dtype}, the model wants {target.dtype}")
    if target.is_meta or tensor.is_meta:
        return
    if not _COMPARING.get():
        (copy or Tensor.copy_)(target, tensor)
        return
    if copy is not None:
        ordered = torch.empty_like(target)
        copy(ordered, tensor)
        tensor = ordered
    if not _equal(target, tensor):
        raise _DifferentError


def _holds_numbers(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize > 1


def set_weight_loader(param: nn.Parameter, loader: WeightLoader) -> None:
    """Have :func:`load_weight` call ``loader`` for ``param``."""
    param.weight_loader = loader  # type: ignore[attr-defined]


def load_weight(param: nn.Parameter, tensor: Tensor, shard_id: Any = None) -> None:
    """Put a checkpoint's tensor into a parameter.

    Args:
        param: a parameter of the model.
        tensor: the checkpoint's tensor, of the whole model's shape, whatever the ranks.
        shard_id: which part of a merged parameter it is ("q", "k", "v"; 0, 1, ...).

    Raises:
        ShapeMismatchError: it does not fit, and no account is open to note it.
    """
    account = _ACCOUNT.get()
    loader: WeightLoader = getattr(param, "weight_loader", _load_whole)
    refused = None
    try:
        # Most loads are in such a block already, and entering another 2000 times shows in a start.
        with torch.no_grad() if torch.is_grad_enabled() else _AS_IT_IS:
            loader(param, tensor, shard_id)
    except ShapeMismatchError as error:
        if account is None:
            raise
        refused = error
    if account is not None:
        sizes: Mapping[Any, int] = getattr(param, "shard_sizes", {})
        account.note(param, tensor, shard_id, sizes.get(shard_id, param.numel()), refused)


def _load_whole(param: nn.Parameter, tensor: Tensor, shard_id: Any = None) -> None:
    if shard_id is not None:
        raise ValueError(f"this parameter has no shards, got shard_id {shard_id!r}")
    copy_checked(param, tensor)


def load_stacked_weights(
    model: nn.Module,
    weights: Weights,
    stacked: Mapping[str, tuple[str, Any]],
    *,
    rename: Callable[[str], str] | None = None,
    ignore: Iterable[str] = (),
) -> None:
    """Load a checkpoint whose names are the model's, but for layers merged into one.

    The arguments are those of :func:`stacked_loader`, which is called with each of ``weights``.

    Raises:
        ConfigError: two tensors that are tied are not the same.
    """
    load = stacked_loader(model, stacked, rename=rename, ignore=ignore)
    for name, tensor in weights:
        load(name, tensor)


def stacked_loader(
    model: nn.Module,
    stacked: Mapping[str, tuple[str, Any]],
    *,
    rename: Callable[[str], str] | None = None,
    ignore: Iterable[str] = (),
) -> Callable[[str, Tensor], None]:
    """A function that loads one tensor of a checkpoint after another, by its name there.

    A parameter that the model shares between two names, as a tied head, may have a tensor under
    each of them. The second is compared with what the parameter holds from the first.

    Args:
        model: whose parameters are filled.
        stacked: checkpoint's layer name -> (model's layer name, shard id), such as
            ``{"q_proj": ("qkv_proj", "q")}``; a layer name is one dotted part. The shard id says
            which part of the layer the tensor is: "q", "k" or "v" of q, k and v merged, a number
            of other merged layers, None the whole layer. A whole qkv is [all q | all k | all v]
            with None, and interleaved by heads with "hgd": for each key-value head its queries,
            key and value. Of stacked experts (:class:`~engine_core.nn.Experts`) it is an expert's
            shard; a tensor of all experts may lack the last part, "weight".
        rename: applied to each checkpoint name first.
        ignore: beginnings or ends of names that the model has no use for, before ``rename`` or
            after it.
    """
    params = dict(model.named_parameters(remove_duplicate=False))
    users = Counter(id(param) for param in params.values())
    tied: dict[tuple[int, Any], tuple[str, torch.Size]] = {}
    ignored = tuple(ignore)
    account = _ACCOUNT.get()

    def load(name: str, tensor: Tensor) -> None:
        target = rename(name) if rename else name
        if any(each.endswith(ignored) or each.startswith(ignored) for each in (name, target)):
            take(tensor)
            return
        shard_id = None
        *path, layer, leaf = ("", *target.split("."))
        if layer in stacked:
            layer, shard_id = stacked[layer]
            target = ".".join([*path, layer, leaf]).lstrip(".")
        param = params.get(target)
        if param is None and len(path) > 1 and _NUMBER.fullmatch(path[-1]):
            # An expert's tensor, where the model has one for all experts.
            *path, expert = path
            target = ".".join([*path, layer, leaf]).lstrip(".")
            shard_id = (int(expert), shard_id)
            param = params.get(target)
            # The model may have no such expert.
            param = param if shard_id in getattr(param, "shard_sizes", {}) else None
        elif param is None and hasattr(params.get(f"{target}.weight"), "stacks"):
            param = params[f"{target}.weight"]
        if param is None:
            if account is None:
                raise WeightsMismatchError(
                    f"the model has no parameter for the tensor {name!r}", unexpected=(name,)
                )
            return
        if users[id(param)] > 1:
            first, shape = tied.setdefault((id(param), shard_id), (name, tensor.shape))
            if first != name:
                if shape != tensor.shape or not _holds(param, tensor, shard_id, first):
                    raise ConfigError(
                        f"the model's config ties {first} and {name} (tie_word_embeddings), but in "
                        "the checkpoint they differ; set tie_word_embeddings to false in "
                        "hf_overrides to run with both"
                    )
                return
        load_weight(param, tensor, shard_id)

    return load


def _holds(param: nn.Parameter, tensor: Tensor, shard_id: Any, first: str) -> bool:
    """Whether ``param``, filled from the tensor ``first``, is what ``tensor`` would make of it."""
    account = _ACCOUNT.get()
    if account is not None and param.is_meta:
        account.uncompared.append((first, account.ignore(tensor) or ""))
        return True
    token = _COMPARING.set(True)
    try:
        load_weight(param, tensor, shard_id)
    except _DifferentError:
        return False
    finally:
        _COMPARING.reset(token)
    return True


def _equal(target: Tensor, tensor: Tensor) -> bool:
    # In parts: converted as a whole, a large model's vocabulary would take gigabytes.
    parts = zip(
        torch.atleast_1d(target).split(_ROWS), torch.atleast_1d(tensor).split(_ROWS), strict=True
    )
    return all(torch.equal(rows, others.to(rows)) for rows, others in parts)


_ROWS = 1024
_AS_IT_IS = nullcontext()
_NUMBER = re.compile("0|[1-9][0-9]*")


def empty_parameter(
    *shape: int, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> nn.Parameter:
    """A parameter whose values are to be loaded, as the build context says where nothing is."""
    context = current_build_context()
    data = torch.empty(shape, dtype=dtype or context.dtype, device=device or context.device)
    return nn.Parameter(data, requires_grad=False)


def materialize(model: nn.Module, device: torch.device) -> None:
    """Give every parameter on the meta device memory, and move constants to ``device``.

    Parameters shared by two modules stay shared, and keep their attributes.
    """
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is None:
                continue
            if id(param) not in made:
                if param.is_meta:
                    # Of a tensor there, empty_like is torch's Python, which imports sympy first.
                    shape, strides = param.shape, param.stride()
                    data = torch.empty_strided(shape, strides, dtype=param.dtype, device=device)
                else:
                    data = param.to(device)
                new = nn.Parameter(data, requires_grad=False)
                new.__dict__.update(param.__dict__)
                made[id(param)] = new
            module._parameters[name] = made[id(param)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                assert not buffer.is_meta, (
                    f"buffer {name!r} of {type(module).__name__} was built on the meta device; "
                    "build constants with an explicit device='cpu'"
                )
                module._buffers[name] = buffer.to(device)
