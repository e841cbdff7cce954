"""A causal model of transformers with its attention, linears and vocabulary replaced by ours."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine_core.configs import HFConfig
from engine_core.errors import EngineError, OptionError, UnknownArchitectureError
from engine_core.nn import (
    CausalLM,
    Embedding,
    KVCacheLayer,
    Weights,
    build_colwise_linear,
    build_embedding,
    build_lm_head,
    build_merged_colwise_linear,
    build_replicated_linear,
    build_rowwise_linear,
)
from engine_core.nn.distributed import IndivisibleError
from engine_core.nn.linear import Linear, UnquantizedLinearMethod
from engine_core.step_context import AttentionMetadata, StepContextManager, current_build_context
from engine_core_transformers.attention import (
    PAGED,
    TRACED,
    PagedAttention,
    Step,
    UnsupportedError,
    has_layer,
    make_layers,
    tracing,
)
from engine_core_transformers.config import layer_config, model_class, read_config
from engine_core_transformers.fused import Rotations, replace_norms
from engine_core_transformers.layers import fuse_layers
from engine_core_transformers.merged import SameInputs, Watch, merge_feed_forward
from engine_core_transformers.weights import Converted

# Styles of transformers' plan under which every rank may as well keep a linear whole: its input is
# whole, and so is what it gives.
_WHOLE = (
    None, "colwise_gather_output", "rowwise_split_input", "replicated_with_grad_allreduce",
    "mla_kv_a_proj", "replicate",
)  # fmt: skip
_OTHER_WAY = "its attention does not go through transformers' interface"
# What a config may ask for besides hidden states and logits, which nobody reads here.
_ASIDE = ("use_cache", "output_attentions", "output_hidden_states", "output_router_logits")
_STATEFUL = (nn.Conv1d, nn.LSTM, nn.GRU, nn.RNN, nn.BatchNorm1d)
# Largest difference, relative to the largest number, that other tokens may make to one that does
# not see them: matrix products of other rows may round otherwise.
_ALONE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


def _said(error: Exception) -> str:
    """The error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


class TransformersModel(CausalLM):
    """The class that transformers has for a checkpoint's architecture, over the paged cache.

    Attributes:
        support_cuda_graph: False where experts are chosen on the host. Other code that reads
            numbers there does not run on the meta device, and is refused.
    """

    # Not among the modules: their parts are.
    _hf: PreTrainedModel
    _body: Callable[..., Any]
    _head: Callable[..., Any]
    _converted: Converted

    def __init__(
        self,
        config: HFConfig,
        ctx_mgr: StepContextManager,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self._name: str = config.architectures[0]
        self._context = current_build_context()
        self._step = Step()
        self._colwise: set[nn.Module] = set()
        if self._context.deterministic:
            raise OptionError(
                f"deterministic: {self._name} is run by transformers' own code, whose norms and "
                "experts depend on the number of tokens; leave deterministic out"
            )
        try:
            self._build(config, dtype or torch.get_default_dtype())
        except (EngineError, IndivisibleError):
            raise
        except UnsupportedError as error:
            raise self._refusal(str(error)) from error
        except Exception as error:
            if isinstance(error, KeyError) and error.args == (TRACED,):
                raise self._refusal(_OTHER_WAY) from error
            if self._context.tp_size > 1:
                raise OptionError(
                    f"{self._name}: transformers' own code does not run on a part of the model "
                    f"({type(error).__name__}: {error}); set tensor_parallel_size to 1"
                ) from error
            raise self._refusal(
                "its code does not run without numbers to look at, as it does when it is built "
                f"({_said(error)})"
            ) from error

    def _refusal(self, reason: str) -> UnknownArchitectureError:
        return UnknownArchitectureError(
            f"transformers' own code cannot run {self._name} here: {reason}. A package of its own "
            "can: docs/write-a-plugin.md"
        )

    def _build(self, config: HFConfig, dtype: torch.dtype) -> None:
        hf_config = read_config(config)
        hf_config._attn_implementation = TRACED
        hf_config.return_dict = True
        for key in _ASIDE:
            setattr(hf_config, key, False)
        hf_config.dtype = dtype  # Some classes make constants of it, whatever the default is.
        try:
            with _default_dtype(dtype):
                hf: PreTrainedModel = model_class(self._name)(hf_config)
        except ImportError as error:
            raise UnsupportedError(
                f"its code needs a library that cannot be imported ({_said(error)})"
            ) from error
        except Exception as error:
            # Of attention past the interface, or of the device without numbers, more is said above.
            if error.args == (TRACED,) or "meta" in str(error).lower():
                raise
            raise UnsupportedError(
                f"transformers makes no model of this config ({_said(error)}), which hf_overrides "
                "may change"
            ) from error
        _check_kind(hf)
        _keep_in_float32(hf, dtype)
        _keep_buffers(hf)
        self._split(hf)
        self._tie(hf)
        for param in hf.parameters():
            param.requires_grad_(False)
        for name, child in hf.named_children():
            self.add_module(name, child)
        body, head = getattr(hf, hf.base_model_prefix), _head_alone(hf)
        self.__dict__.update(_hf=hf, _body=body, _head=head)
        hf.train(False)
        experts = getattr(hf.config, "_experts_implementation", None)
        chosen = hf._can_set_experts_implementation()
        self.support_cuda_graph = not chosen or experts in ("grouped_mm", "batched_mm")
        self._layers: list[PagedAttention] = []
        watch = Watch(hf)
        try:
            self._trace(hf)
        finally:
            watch.end()
        self._fuse(hf, watch, dtype)
        _compute_buffers(hf)

    def _fuse(self, hf: PreTrainedModel, watch: Watch, dtype: torch.dtype) -> None:
        """Have our kernels and blocks do what the model was seen to do."""
        # What a checkpoint has names for.
        params = dict(self.named_parameters(remove_duplicate=False))
        attending = [module for module in hf.modules() if has_layer(module)]
        same = SameInputs(hf, attending, watch, self._by_rows)
        if same.merges:
            try:
                with _plain_experts(hf):
                    self._alone(*torch.zeros(2, 1, dtype=torch.long, device="meta"))
            except Exception:  # Code may want a linear's attributes, or its result contiguous.
                same.undo()
        norms = replace_norms(hf, dtype, self._step)
        fuse_layers(hf, watch, norms)
        merges = same.merges | merge_feed_forward(hf, watch, self._by_rows)
        self.__dict__["_converted"] = Converted(hf, params, merges)

    def _by_rows(self, linear: nn.Module) -> bool:
        return self._context.tp_size == 1 or linear in self._colwise

    def _split(self, hf: PreTrainedModel) -> None:
        """Put our linears, embedding and head in the place of plain ones."""
        plan = dict(getattr(hf, "_tp_plan", None) or {})
        prefix = hf.base_model_prefix
        for key, style in (hf.config.base_model_tp_plan or {}).items():
            plan.setdefault(f"{prefix}.{key}", style)
        if self._context.tp_size > 1 and not plan:
            raise OptionError(
                f"{self._name} has no plan in transformers for several ranks; set "
                "tensor_parallel_size to 1"
            )
        embedding: Any = hf.get_input_embeddings()
        head: Any = hf.get_output_embeddings()  # type: ignore[no-untyped-call]
        tied = bool(hf.get_expanded_tied_weights_keys(all_submodels=False))
        plain_head = type(head) is nn.Linear and head.bias is None
        plain_embedding = type(embedding) is nn.Embedding
        ours = (plain_embedding and plain_head) or not tied
        for name, module in list(hf.named_modules()):
            new: nn.Module | None = None
            if module is embedding and plain_embedding and ours:
                new = build_embedding(module.num_embeddings, module.embedding_dim)
            elif module is head:
                if plain_head and ours:
                    new = build_lm_head(module.in_features, module.out_features)
                elif type(head) is nn.Linear and not tied:
                    new = build_replicated_linear(
                        module.in_features, module.out_features, head.bias is not None
                    )
            elif type(module) is nn.Linear:
                new = self._linear(name, module, plan.get(re.sub(r"\d+", "*", name)))
            if new is not None:
                hf.set_submodule(name, new)

    def _linear(self, name: str, old: nn.Linear, style: str | None) -> nn.Module:
        size, rows, bias = old.in_features, old.out_features, old.bias is not None
        dtype = old.weight.dtype
        if self._context.tp_size == 1 or style in _WHOLE:
            return build_replicated_linear(size, rows, bias, dtype=dtype)
        if style == "colwise":
            linear = build_colwise_linear(size, rows, bias, dtype=dtype)
            self._colwise.add(linear)
            return linear
        if style == "packed_colwise":
            return build_merged_colwise_linear(size, [rows // 2] * 2, bias, dtype=dtype)
        if style == "rowwise":
            return build_rowwise_linear(size, rows, bias, dtype=dtype)
        raise OptionError(
            f"{self._name}: transformers' plan splits {name} as {style!r}, which is not known "
            "here; set tensor_parallel_size to 1"
        )

    def _tie(self, hf: PreTrainedModel) -> None:
        for target, source in hf.get_expanded_tied_weights_keys(all_submodels=False).items():
            module, _, leaf = target.rpartition(".")
            setattr(hf.get_submodule(module), leaf, hf.get_parameter(source))

    def _trace(self, hf: PreTrainedModel) -> None:
        """Run the model on meta, and make the attention layers that it asks for."""
        inputs = torch.zeros(1, 2, dtype=torch.long, device="meta")
        with tracing() as trace, torch.no_grad(), _plain_experts(hf):
            hidden = self._run(inputs, inputs, None, attention_mask=torch.ones_like(inputs))
            self.get_logits(hidden)
        layers = hf.config.num_hidden_layers
        if not trace.calls:
            raise UnsupportedError(_OTHER_WAY)
        if len(trace.calls) != layers:
            raise UnsupportedError(
                f"{len(trace.calls)} of its {layers} layers attend through transformers' interface"
            )
        stated = getattr(layer_config(hf.config), "sliding_window", None)
        slides = any(call.window is not None for call in trace.calls.values())
        if stated is not None and not slides and getattr(hf.config, "layer_types", None) is None:
            raise UnsupportedError(
                f"its config has a sliding window ({stated}), by which transformers' cache drops "
                "keys that the model's masks still show"
            )
        self._layers = make_layers(trace, self._step)
        for module in hf.modules():
            config: Any = getattr(module, "config", None)
            if getattr(config, "_attn_implementation", None) == TRACED:
                config._attn_implementation = PAGED

    def _run(
        self, input_ids: Tensor, position_ids: Tensor, embeds: Tensor | None, **more: Any
    ) -> Tensor:
        given = {"input_ids": input_ids} if embeds is None else {"inputs_embeds": embeds}
        out = self._body(position_ids=position_ids, use_cache=False, **given, **more)
        hidden: Tensor = out.last_hidden_state
        return hidden

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        past_key_values: list[KVCacheLayer],
        attn_metadata: AttentionMetadata,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """``[1, T]`` to hidden states ``[1, T, H]``."""
        self._step.metadata = attn_metadata
        self._step.begin()
        for layer, cache in zip(self._ordered(), past_key_values, strict=True):
            layer.cache = cache
        return self._run(input_ids, position_ids, inputs_embeds)

    def _ordered(self) -> list[PagedAttention]:
        """The attention layers in the order of the cache's, that of the modules."""
        order: list[PagedAttention] | None = self.__dict__.get("_order")
        if order is None:
            order = [m for m in self.modules() if isinstance(m, PagedAttention)]
            self.__dict__["_order"] = order
        return order

    def get_logits(self, hidden_states: Tensor) -> Tensor:
        """``[..., H]`` to ``[..., vocab]``, by the head of transformers' own class."""
        rows = hidden_states.reshape(1, -1, hidden_states.shape[-1])
        logits: Tensor = self._head(inputs_embeds=rows, use_cache=False).logits
        return logits.reshape(*hidden_states.shape[:-1], -1)

    def load_weights(self, weights: Weights) -> None:
        """Fill the parameters from a checkpoint under transformers' names."""
        self._converted.load(weights, self)

    def update_weights(self) -> None:
        """Once the weights are there, see that tokens reach each other by attention alone.

        Rotations that our kernels compute as well are theirs from then on.

        Raises:
            UnknownArchitectureError: they do not, or the model makes up its own positions; packed
                sequences would disturb each other.
        """
        if any(param.is_meta for param in self.parameters()):
            return
        device = next(self.parameters()).device
        ids = torch.tensor([[3, 5, 7], [3, 11, 2], [3, 2, 13]], device=device)
        ids %= self._hf.config.vocab_size
        places = torch.tensor([[1, 2, 0], [1, 5, 3], [1, 30, 31]], device=device)
        rotations = Rotations([m for m in self.modules() if has_layer(m)], self._step)
        embeds: Sequence[Tensor | None] = [None] * 3
        for part in self.modules():
            if isinstance(part, Embedding) and part.weight.dtype != part.dtype:
                # It has codes until all is loaded. Any numbers will do.
                draw = torch.Generator().manual_seed(0)
                drawn = torch.randn(32, part.hidden_size, generator=draw, device="cpu")
                embeds = list(drawn.to(device, part.dtype)[ids % 32])
        first, *others = (run[0] for run in map(self._alone, ids, places, embeds))
        # A kernel of codes may compute in 16 bits, whatever it is given.
        coarse = any(
            isinstance(m, Linear) and type(m.method) is not UnquantizedLinearMethod
            for m in self.modules()
        )
        alone = _ALONE.get(torch.bfloat16 if coarse else first.dtype, 5e-2)
        bound = alone * float(first.abs().max())

        def differs(other: Tensor) -> bool:
            return float((first - other).abs().max()) > bound

        if any(map(differs, others)):
            raise self._refusal(
                "its tokens reach each other outside of attention, so sequences of one batch would "
                "disturb each other"
            )
        # The same token at the same position, and last in the batch.
        turned = None if embeds[0] is None else embeds[0].flip(0)
        if differs(self._alone(ids[0].flip(0), places[0].flip(0), turned)[-1]):
            raise self._refusal(
                "it counts positions by the tokens of a step, and not by what it is told of them"
            )
        # Ours turns queries and keys where they lie, which a model may use for something else.
        if rotations.replace():
            again = self._alone(ids[0], places[0], embeds[0])[0]
            if not torch.equal(first, again):
                rotations.restore()

    def _alone(self, ids: Tensor, places: Tensor, embeds: Tensor | None = None) -> Tensor:
        """Hidden states ``[T, H]`` when each token sees itself only."""
        self._step.alone = True
        self._step.begin()
        try:
            with torch.inference_mode():
                given = None if embeds is None else embeds[None]
                return self._run(ids[None], places[None], given)[0]
        finally:
            self._step.alone = False


def _check_kind(hf: PreTrainedModel) -> None:
    """Refuse what keeps a state of its own.

    Raises:
        UnsupportedError: it does.
    """
    if getattr(hf, "_is_stateful", False):
        raise UnsupportedError("it keeps a state of its own beside keys and values")
    for name, module in hf.named_modules():
        if isinstance(module, _STATEFUL):
            raise UnsupportedError(
                f"{name} is a {type(module).__name__}, which mixes neighbouring tokens"
            )
        for key, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta:
                raise UnsupportedError(f"{name}.{key} is a tensor that is no parameter or buffer")


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _keep_in_float32(hf: PreTrainedModel, dtype: torch.dtype) -> None:
    """Give float32 to the parameters and buffers for which transformers' class demands it."""
    names = set(hf._keep_in_fp32_modules_strict or ()) if dtype.itemsize == 2 else set()
    if dtype is torch.float16:
        names |= set(hf._keep_in_fp32_modules or ())
    if not names:
        return
    pattern = re.compile("|".join(re.escape(name).replace(r"\*", r"[^.]*") for name in names))
    for name, module in hf.named_modules():
        for values in (module._parameters, module._buffers):
            for key, value in values.items():
                if value is not None and pattern.search(f"{name}.{key}"):
                    values[key] = (
                        nn.Parameter(value.float(), False)
                        if isinstance(value, nn.Parameter)
                        else value.float()
                    )


def _keep_buffers(hf: PreTrainedModel) -> None:
    """Make parameters of the buffers that checkpoints hold: they are loaded like these."""
    for module in hf.modules():
        for key, value in list(module._buffers.items()):
            if value is not None and key not in module._non_persistent_buffers_set:
                delattr(module, key)
                module.register_parameter(key, nn.Parameter(value, requires_grad=False))


def _compute_buffers(hf: PreTrainedModel) -> None:
    """Give constants their values, on the CPU.

    Raises:
        UnsupportedError: transformers does not say how a constant is computed.
    """
    owners = {name: each for name, each in hf.named_modules() if isinstance(each, PreTrainedModel)}
    with torch.device("cpu"), torch.no_grad():
        for name, module in hf.named_modules():
            meta = {
                key: torch.full(value.shape, _unset(value), dtype=value.dtype)
                for key, value in module._buffers.items()
                if value is not None and value.is_meta
            }
            if not meta:
                continue
            module._buffers.update(meta)
            # As transformers does: each model in a model knows its own constants.
            owner = max((each for each in owners if _within(name, each)), key=len)
            owners[owner]._init_weights(module)  # type: ignore[no-untyped-call]
            for key in meta:
                value = module._buffers[key]
                assert value is not None, "it is set anew, not deleted"
                if bool((value.isnan() if value.isnan().any() else value == _unset(value)).all()):
                    raise UnsupportedError(f"the constant {name}.{key} is not computed anew")


def _within(name: str, path: str) -> bool:
    return not path or name == path or name.startswith(f"{path}.")


def _unset(value: Tensor) -> float:
    """A number that no constant is full of."""
    if value.is_floating_point():
        return float("nan")
    return 0 if value.dtype is torch.bool else -77


class _Given(nn.Module):
    """In the place of a model's body: gives the hidden states that it gets as embeddings."""

    def forward(self, *args: Any, inputs_embeds: Tensor, **kwargs: Any) -> _Output:
        """The output of a body."""
        return _Output(inputs_embeds)


class _Output:
    """A body's output of which everything but the hidden states is None."""

    def __init__(self, last_hidden_state: Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def _head_alone(hf: PreTrainedModel) -> PreTrainedModel:
    """A view of the model whose forward does what comes after the body."""
    head = copy.copy(hf)
    given = _Given()
    given.add_module("decoder", _Given())
    head.__dict__["_modules"] = {**hf._modules, hf.base_model_prefix: given}
    return head


@contextmanager
def _plain_experts(hf: PreTrainedModel) -> Iterator[None]:
    """Multiply experts in a way whose shapes do not depend on numbers, for the meta device."""
    before = getattr(hf.config, "_experts_implementation", None)
    if before is None:
        yield
        return
    hf.config._experts_implementation_internal = "batched_mm"
    try:
        yield
    finally:
        hf.config._experts_implementation_internal = before
