"""A first package for an architecture of transformers: what ``nn`` has blocks for, found by trying.

A tiny random model of transformers' class is built. Its parts are compared with the blocks of
``engine_core.nn`` by their names, their shapes and what they compute; what fits none is left to the
author, and named.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from engine_core.configs import HFConfig
from engine_core.errors import ConfigError, UnknownArchitectureError
from engine_core.nn.activation import build_activation
from engine_core.step_context import StepContextManager
from engine_core_transformers.config import model_class
from engine_core_transformers.model import TransformersModel

_SIZES = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "sliding_window": 12,
}
# Keys of transformers' configs that change no result, or that belong to every model.
_ASIDE = re.compile(
    r".*(dropout|_token_id|_range|initializer|pdrop)|use_cache|pretraining_tp|output_.*|return_dict"
    r"|architectures|transformers_version|model_type|dtype|chunk_size_.*|id2label|label2id"
    r"|is_encoder_decoder|problem_type|_.*|tie_word_embeddings|rope_parameters|layer_types"
    r"|router_.*|cross_attention.*|add_cross_attention|is_decoder|tokenizer_class"
)
_NORMS = ["input_layernorm", "post_attention_layernorm"]
_SANDWICH = [*_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm"]
_AFTER = ["post_attention_layernorm", "post_feedforward_layernorm"]
# Settings of a checkpoint's config that a tiny model does not take over.
_DROPPED = re.compile(
    rf"{_ASIDE.pattern}|.*_token_id|auto_map|torch_dtype|.*(theta|quantization).*"
)
_FACTOR = re.compile("multiplier|scal")


@dataclass(slots=True)
class Draft:
    """A first package.

    Attributes:
        architecture: the name of transformers' class.
        config: content of ``config.py``.
        model: content of ``model.py``.
        builder: the name of the config builder.
        tiny: the config of the tiny model.
        left: what the author has to do, in a sentence each; empty if the blocks are the model.
    """

    architecture: str
    builder: str
    tiny: dict[str, Any]
    config: str = ""
    model: str = ""
    left: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Norm:
    """A norm that is a block: its class, arguments after the width and eps, and its eps."""

    block: str
    more: str
    eps: float


@dataclass(slots=True)
class _Found:
    """Findings of the trials, mostly as source of the arguments of blocks.

    Attributes:
        values: the tiny model's config.
        layer: the form of a decoder layer, as :func:`_look_at_layers` names it.
        renames: parts of names in a checkpoint, and here.
        reads: keys that the model reads beside the usual ones.
    """

    values: dict[str, Any]
    attention: list[str] = field(default_factory=list)
    unrotated: str | None = None
    mlp: list[str] = field(default_factory=list)
    gated: bool = True
    norm: _Norm | None = None
    layer: str = "pre"
    embedding_scale: str | None = None
    logit_factor: str | None = None
    branch_factor: str | None = None
    activation: str = "hidden_act"
    partial: bool = False
    renames: dict[str, str] = field(default_factory=dict)
    reads: set[str] = field(default_factory=set)

    def eps(self) -> str:
        """The source of the norms' eps."""
        value = 1e-6 if self.norm is None else self.norm.eps
        keys = [key for key in self._keys(value) if "eps" in key]
        self.reads.update(keys[:1])
        return f"config.{keys[0]}" if keys else repr(value)

    def number(self, value: float, what: str, left: list[str], *, root: bool = False) -> str:
        """The source of ``value``: the only key that has it, or its inverse (of the root)."""
        power = -0.5 if root else -1.0
        given = [(key, f"config.{key}") for key in self._keys(value)]
        given += [(key, f"config.{key}**{power}") for key in self._keys(value ** (1 / power))]
        given = [(k, text) for k, text in given if "eps" not in k and self.values[k] != 1]
        if len(given) == 1:
            self.reads.add(given[0][0])
            return given[0][1]
        ones = [key for key, each in self.values.items() if each == 1 and _FACTOR.search(key)]
        given += [(key, f"config.{key}") for key in ones if value == 1]
        hint = f" (perhaps {' or '.join(text for _, text in given)})" if given else ""
        left.append(f"{what} {value:g} here: say by which key{hint}")
        return repr(value)

    def _keys(self, value: float) -> list[str]:
        return [
            key
            for key, each in self.values.items()
            if isinstance(each, int | float) and not isinstance(each, bool) and key not in _SIZES
            and abs(each - value) <= 1e-6 * abs(value)
        ]  # fmt: skip


def draft(architecture: str, given: Mapping[str, Any] | None = None) -> Draft:
    """The first package for ``architecture``.

    Args:
        architecture: the name of transformers' class.
        given: a checkpoint's config, whose settings beside sizes the tiny model has too.

    Raises:
        ConfigError: transformers has no causal model of that name, or makes no tiny one of it.
        UnknownArchitectureError: its state or attention is not what the cache can keep.
    """
    kinds = [k for k, v in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if v == architecture]
    if not kinds:
        raise ConfigError(
            f"transformers has no causal language model named {architecture!r}; give the class as "
            "config.json has it, such as 'Olmo2ForCausalLM'"
        )
    own = [kind for kind in kinds if kind.replace("_", "") in architecture.lower()] or kinds
    kind: Any = CONFIG_MAPPING[own[0]]
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    settings = {
        key: value
        for key, value in (given or {}).items()
        if isinstance(value, bool | float | str) and not _DROPPED.fullmatch(key)
    }
    try:
        default = kind()
        sizes = {
            key: value
            for key, value in _SIZES.items()
            if hasattr(default, key) and not isinstance(getattr(kind, key, None), property)
        }
        stated = {key: value for key, value in sizes.items() if getattr(default, key) is not None}
        known: dict[str, Any] = {**stated, **settings}
        try:
            hf_config, model = _tiny(kind, architecture, {**known, **ends})
        except Exception:  # A class may need what it leaves open.
            sizes.pop("sliding_window" if "sliding_window" not in stated else "", None)
            known = {**sizes, **settings}
            hf_config, model = _tiny(kind, architecture, {**known, **ends})
    except Exception as error:  # Each class has its own ways to refuse sizes.
        raise ConfigError(
            f"transformers makes no tiny {architecture} of common sizes "
            f"({type(error).__name__}: {error}); start with --like"
        ) from error
    stem = re.split(r"For[A-Z]|LMHead|Model$", architecture)[0]
    values = hf_config.to_dict()
    usual_ends = {key: getattr(default, key, None) for key in ends}
    beyond = [k for k, v in usual_ends.items() if isinstance(v, int) and v >= _SIZES["vocab_size"]]
    known |= {key: ends[key] for key in beyond}
    tiny = _plain_config(values, known, architecture, own[0])
    made = Draft(architecture, f"{stem}ConfigBuilder", tiny)
    try:
        with torch.device("meta"):
            runs = TransformersModel(HFConfig(hf_config.to_dict()), StepContextManager())
    except UnknownArchitectureError as error:
        raise UnknownArchitectureError(f"{error}; start one with --like") from error
    _randomise(model)
    scaled = (values.get("rope_parameters") or {}).get("rope_type", "default")
    if scaled != "default":
        made.left.append(
            f"positions are scaled ({scaled}) where a config says nothing: state rope_parameters "
            "in conformance.py, and their defaults in config.py"
        )
    found = _Found(values)
    _look_at_ends(model, found, made.left)
    _look_at_layers(model, runs, found, made.left)
    for key in found.reads:
        if isinstance(values.get(key), list):
            made.tiny.setdefault(key, values[key])
    _shorten(made.tiny, found)
    made.left += _read_otherwise(kind, found.activation)
    made.config = _config_source(made, found, stem)
    made.model = _model_source(made, found, stem, model)
    return made


def _tiny(kind: Any, architecture: str, values: Mapping[str, Any]) -> tuple[Any, PreTrainedModel]:
    """A config and its random model, which has run once."""
    hf_config = kind(**values, architectures=[architecture])
    torch.manual_seed(0)
    model: PreTrainedModel = model_class(architecture)(hf_config).float().eval()
    with torch.no_grad():
        model(torch.tensor(_IDS), use_cache=False)
    return hf_config, model


def _plain_config(
    values: Mapping[str, Any], known: Mapping[str, Any], architecture: str, model_type: str
) -> dict[str, Any]:
    rope = values.get("rope_parameters") or {}
    tiny = {"architectures": [architecture], "model_type": model_type, **known}
    tiny["tie_word_embeddings"] = bool(values.get("tie_word_embeddings"))
    if "rope_theta" in rope:
        tiny["rope_theta"] = 5000.0 if rope["rope_theta"] != 5000.0 else 20000.0
    if "partial_rotary_factor" in rope:
        tiny["partial_rotary_factor"] = rope["partial_rotary_factor"]
    if values.get("layer_types"):
        tiny["layer_types"] = list(values["layer_types"])
    return tiny


def _shorten(tiny: dict[str, Any], found: _Found) -> None:
    """Leave two layers where all are alike: of more, rounding grows and the kit takes longer."""
    layers = _SIZES["num_hidden_layers"]
    lists = {k: v for k, v in found.values.items() if isinstance(v, list) and len(v) == layers}
    alike = all(each == value[0] for value in lists.values() for each in value)
    if not alike or found.unrotated is not None or tiny.get("num_hidden_layers") != layers:
        return
    tiny["num_hidden_layers"] = 2
    for key in lists:
        if key in tiny:
            tiny[key] = tiny[key][:2]


def _read_otherwise(kind: Any, key: str) -> list[str]:
    """Sentences about names of activations that the config class reads as others."""
    left = []
    for given in ("gelu", "gelu_pytorch_tanh", "silu"):
        try:
            read = getattr(kind(**{key: given}), key, given)
        except Exception:  # It refuses the name.
            continue
        if read != given:
            left.append(f"the config class reads {key} {given!r} as {read!r}: do so in complete")
    return left


def _randomise(model: PreTrainedModel) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for param in model.parameters():
            noise = torch.randn(param.shape, generator=generator)
            param.copy_(0.1 * noise if param.dim() > 1 else param + 0.2 * noise)


def _look_at_layers(
    model: PreTrainedModel, runs: TransformersModel, found: _Found, left: list[str]
) -> None:
    body = getattr(model, model.base_model_prefix)
    layers = getattr(body, "layers", None)
    if model.base_model_prefix != "model" or not isinstance(layers, nn.ModuleList):
        left.append(
            f"the layers are not model.layers but parts of {type(body).__name__}: name them so in "
            "load_weights (rename=), or write the decoder anew"
        )
        return
    layer = layers[0]
    parts = dict(layer.named_children())
    attention = next((n for n, m in parts.items() if hasattr(m, "q_proj")), None)
    others = {n: m for n, m in parts.items() if n != attention and "att" not in n}
    mlp = next((n for n, m in others.items() if len(_linears(m)) > 1), None)
    _look_at_attention(parts.pop(attention or "", None), attention, runs, found, left)
    _look_at_mlp(parts.pop(mlp or "", None), mlp, found, left)
    norms = [name for name in parts if "norm" in name]
    left += [
        f"{type(layer).__name__}.{name} ({type(part).__name__}) has no block"
        for name, part in parts.items()
        if name not in norms and not isinstance(part, nn.Dropout | nn.Identity)
    ]
    kinds = [{n: type(m).__name__ for n, m in each.named_children()} for each in layers]
    odd = {
        name: kind for each in kinds for name, kind in each.items() if kinds[0].get(name) != kind
    }
    left += [f"{name} is a {kind} in some layers" for name, kind in odd.items()]
    if attention is None or mlp is None:
        return
    told = [_scalars(getattr(each, attention, each)) for each in layers]
    differ = {key for each in told for key in each if each[key] != told[0].get(key)}
    _look_at_rotations(model, attention, found, left)
    allowed = _ALLOWED | ({"use_rope"} if found.unrotated else set())
    left += [f"layers differ in {key} of their attention" for key in sorted(differ - allowed)]
    forms = {"pre": _NORMS, "sandwich": _SANDWICH, "after": _AFTER, "parallel": _NORMS[:1]}
    form = next((key for key, each in forms.items() if sorted(norms) == sorted(each)), None)
    if form is None:
        left.append(
            f"the norms of {type(layer).__name__} are {', '.join(norms) or 'none'}: DecoderLayer "
            f"has {' and '.join(_NORMS)} before the branches, so write the layer anew"
        )
        return
    found.layer = form
    factor = _branch_factor(model, layer, attention, mlp) if form == "pre" else 1.0
    if factor != 1.0:
        found.layer = "scaled"
        found.branch_factor = found.number(factor, "branches are multiplied by", left)
    elif not _adds_up(model, layer, form, attention, mlp):
        left.append(
            f"{type(layer).__name__} is more than norms, attention, {mlp} and the sum of them: "
            "write the layer anew"
        )
    for name in norms:
        if found.norm is None or _norm(parts[name]) != found.norm:
            left.append(f"{name} ({type(parts[name]).__name__}) is no norm like the final one")
            break


def _linears(module: nn.Module) -> dict[str, nn.Linear]:
    return {name: m for name, m in module.named_children() if isinstance(m, nn.Linear)}


@contextmanager
def _calls(modules: Mapping[str, nn.Module]) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """The first tensor that each module takes and gives, by its name, while models run."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def noting(name: str) -> Any:
        def note(_: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            given = args[0] if args else next(iter(kwargs.values()))
            seen.setdefault(name, (given, out[0] if isinstance(out, tuple) else out))

        return note

    hooks = [
        module.register_forward_hook(noting(name), with_kwargs=True)
        for name, module in modules.items()
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


_IDS = [[3, 5, 7, 11]]


def _branch_factor(model: PreTrainedModel, layer: nn.Module, attention: str, mlp: str) -> float:
    """The factor of both branches of a layer with two norms; 1 if none is seen."""
    parts = {**dict(layer.named_children()), "": layer}
    with _calls(parts) as seen, torch.no_grad():
        model(torch.tensor(_IDS), use_cache=False)
    if not {attention, mlp, "", *_NORMS} <= set(seen):
        return 1.0
    x, out = seen[""]
    middle = seen[_NORMS[1]][0]
    branches = [(middle - x, seen[attention][1]), (out - middle, seen[mlp][1])]
    first, second = (float((got * plain).sum() / (plain * plain).sum()) for got, plain in branches)
    same = all(torch.allclose(got, first * plain, atol=1e-4) for got, plain in branches)
    return first if same and abs(first - second) < 1e-4 and abs(first - 1) > 1e-4 else 1.0


def _adds_up(model: PreTrainedModel, layer: nn.Module, form: str, attention: str, mlp: str) -> bool:
    """Whether a layer's parts are put together as its form says."""
    parts = {**dict(layer.named_children()), "": layer}
    with _calls(parts) as seen, torch.no_grad():
        model(torch.tensor(_IDS), use_cache=False)
    if not {attention, mlp, ""} <= set(seen):
        return False
    x, out = seen[""]
    first, second = _AFTER if form in ("sandwich", "after") else (attention, mlp)
    middle = x if form == "parallel" else x + seen[first][1]
    starts = {
        "pre": {_NORMS[0]: x, _NORMS[1]: middle},
        "sandwich": {_NORMS[0]: x, _SANDWICH[2]: middle},
        "after": {attention: x, mlp: middle},
        "parallel": {_NORMS[0]: x, mlp: seen.get(_NORMS[0], (x, x))[1]},
    }[form]
    pairs = [(seen[name][0], wanted) for name, wanted in starts.items() if name in seen]
    pairs.append((out, x + seen[first][1] + seen[second][1]))
    return all(a.shape == b.shape and torch.allclose(a, b, atol=1e-4) for a, b in pairs)


def _look_at_rotations(
    model: PreTrainedModel, attention: str, found: _Found, left: list[str]
) -> None:
    """Find the layers that do not rotate, and what of the config says so."""
    body: Any = getattr(model, model.base_model_prefix)
    now: list[int] = []
    turned: set[int] = set()
    space: Any = sys.modules[type(getattr(body.layers[0], attention)).__module__]
    rotate = getattr(space, "apply_rotary_pos_emb", None)
    if rotate is None:
        return

    def noted(*args: Any, **kwargs: Any) -> Any:
        turned.update(now[-1:])
        return rotate(*args, **kwargs)

    hooks = [
        getattr(layer, attention).register_forward_pre_hook(lambda *_, i=i: now.append(i))
        for i, layer in enumerate(body.layers)
    ]
    try:
        space.apply_rotary_pos_emb = noted
        with torch.no_grad():
            model(torch.tensor(_IDS), use_cache=False)
    finally:
        space.apply_rotary_pos_emb = rotate
        for hook in hooks:
            hook.remove()
    turns = [index in turned for index in range(len(body.layers))]
    if all(turns):
        return
    lists = {k: v for k, v in found.values.items() if isinstance(v, list) and len(v) == len(turns)}
    slides = [kind == "sliding_attention" for kind in lists.pop("layer_types", [])]
    known = [key for key, value in lists.items() if list(map(bool, value)) == turns]
    if slides == turns:
        found.unrotated = 'config.layer_types[index] == "sliding_attention"'
        found.reads.add("layer_types")
    elif known:
        found.unrotated = f"config.{known[0]}[index]"
        found.reads.add(known[0])
    else:
        still = [index for index, turn in enumerate(turns) if not turn]
        left.append(f"layers {still} do not rotate: give their SelfAttention cos_sin None")


# What layers may differ in: their number, and the window, which is looked at by itself.
_ALLOWED = {"layer_idx", "sliding_window", "attention_type", "layer_type", "is_sliding"}


def _scalars(module: nn.Module) -> dict[str, Any]:
    return {k: v for k, v in vars(module).items() if isinstance(v, bool | int | float | str | None)}


def _look_at_attention(
    module: Any, name: str | None, runs: TransformersModel, found: _Found, left: list[str]
) -> None:
    inner = [] if module is None else [f"{part}_proj" for part in "qkv"]
    out = [key for key in ([] if module is None else _linears(module)) if key not in inner]
    if name != "self_attn" or len(out) != 1 or not all(hasattr(module, key) for key in inner):
        left.append("attention has no q_proj, k_proj, v_proj and o_proj under self_attn")
        return
    if out != ["o_proj"]:
        found.renames[f".self_attn.{out[0]}."] = ".self_attn.o_proj."
    biases = [getattr(module, key).bias is not None for key in (*inner, *out)]
    if len(set(biases[:3])) > 1:
        left.append("of q, k and v only some have a bias")
    for key, bias in (("qkv_bias", biases[0]), ("o_bias", biases[3])):
        if bias:
            found.attention.append(f"{key}=True,")
    known = {*inner, *out, "q_norm", "k_norm"}
    layer = runs._ordered()[0]
    head_dim = layer.head_dim
    norm = getattr(module, "q_norm", None)
    if norm is not None:
        kind = _norm(norm)
        each = kind is not None and next(norm.parameters()).shape == (head_dim,)
        if not each or kind is None or kind.block != "RMSNorm":
            left.append(
                f"q_norm ({type(norm).__name__}) is no RMSNorm of each head alone: put attention "
                "together from build_qkv_proj, a norm (HeadsRMSNorm is one over all heads), "
                "ApplyRotaryEmb, Attention and build_o_proj"
            )
        else:
            found.attention.append(f"qk_norm_eps={found.eps()},")
            if kind.more:
                found.attention.append(f"qk_norm_{kind.more},")
    for part, child in module.named_children():
        if part not in known and next(child.parameters(), None) is not None:
            left.append(f"{type(module).__name__}.{part} ({type(child).__name__}) has no block")
    turned = _rotation(module, head_dim)
    if turned is None:
        left.append(f"{type(module).__name__} rotates in a way of its own")
    elif turned == "interleaved":
        found.attention.append("interleaved_rope=True,")
    if layer.v_head_dim != head_dim:
        left.append("values have another size than keys: use build_qkv_proj and Attention")
    windows = {each.window for each in runs._ordered()}
    if windows != {None}:
        found.reads.add("sliding_window")
        slides = "config.sliding_window"
        if None in windows or len(windows) > 1:
            slides += " if slides else None"
            found.reads.add("layer_types")
        found.attention.append(f"sliding_window={slides},")
    if abs(layer.scale - head_dim**-0.5) > 1e-9:
        scale = found.number(layer.scale, "scores are scaled by", left, root=True)
        found.attention.append(f"scale={scale},")
    if layer.softcap is not None:
        left.append(f"scores are capped at {layer.softcap}: say by which key (logit_softcapping=)")
    rotary = [m for n, m in runs._body.named_modules() if n.endswith("rotary_emb")]  # type: ignore[attr-defined]
    sizes = {tuple(m.inv_freq.shape) for m in rotary if hasattr(m, "inv_freq")}
    widths = {size[0] for size in sizes if len(size) == 1}
    found.partial = len(widths) == 1 and max(widths) < head_dim // 2
    if sizes != {(head_dim // 2,)} and not found.partial:
        left.append(
            "the rotary embedding is not one of whole heads: override build_rotary, or pass "
            "cos_sin None"
        )


def _rotation(module: nn.Module, head_dim: int) -> str | None:
    """How its module's function rotates: by "halves", "interleaved" pairs, or otherwise None."""
    rotate = getattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb", None)
    q = torch.randn(1, 1, 3, head_dim)
    angles = torch.outer(torch.arange(1.0, 4.0), torch.logspace(0, -1, head_dim // 2))[None]
    outs: list[Tensor] = []
    for both in (torch.cat((angles, angles), dim=-1), angles.repeat_interleave(2, dim=-1)):
        try:
            outs.append(rotate(q, q, both.cos(), both.sin())[0])  # type: ignore[misc]
        except Exception:  # It takes other arguments.
            return None
    cos, sin = angles.cos(), angles.sin()
    first, second = q.chunk(2, dim=-1)
    halves = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    even, odd = q[..., ::2], q[..., 1::2]
    pairs = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)
    if torch.allclose(outs[0], halves, atol=1e-5):
        return "halves"
    turned = any(torch.allclose(out, pairs, atol=1e-5) for out in outs)
    return "interleaved" if turned else None


def _look_at_mlp(module: Any, name: str | None, found: _Found, left: list[str]) -> None:
    parts = {} if module is None else _linears(module)
    packed = sorted(parts) == ["down_proj", "gate_up_proj"]
    gated = packed or sorted(parts) == ["down_proj", "gate_proj", "up_proj"]
    if name != "mlp" or (not gated and len(parts) != 2):
        left.append(
            f"the feed-forward part ({'none' if module is None else type(module).__name__}) is no "
            "GatedMLP of gate_proj, up_proj and down_proj, nor an MLP of two linears, under mlp"
        )
        return
    if not gated:
        found.gated = False
        sizes = {key: each.in_features for key, each in parts.items()}
        up, down = sorted(parts, key=lambda key: sizes[key] != _SIZES["hidden_size"])
        for theirs, ours in ((up, "up_proj"), (down, "down_proj")):
            if theirs != ours:
                found.renames[f".mlp.{theirs}."] = f".mlp.{ours}."
        parts = {"up_proj": parts[up], "down_proj": parts[down]}
    if parts["down_proj"].bias is not None:
        found.mlp.append("bias=True,")
    keys = ("hidden_act", "hidden_activation", "activation_function")
    found.activation = next((key for key in keys if found.values.get(key)), keys[0])
    name = found.values.get(found.activation, "silu")
    x = torch.randn(1, 3, _SIZES["hidden_size"])
    with torch.no_grad():
        try:
            act = ACT2FN[name]
            if packed:
                gate, inner = parts["gate_up_proj"](x).chunk(2, dim=-1)
            else:
                gate, inner = parts["gate_proj"](x) if gated else None, parts["up_proj"](x)
            inner = act(inner) if gate is None else act(gate) * inner
            plain = parts["down_proj"](inner)
            same = torch.allclose(module(x), plain, atol=1e-5)
        except Exception:  # The activation, or the module, is of another kind.
            same = False
    if not same:
        form = "act(gate(x)) * up(x)" if gated else "act(up(x))"
        left.append(f"{type(module).__name__} is more than down({form})")
    elif not gated:
        try:
            build_activation(name)
        except ValueError as error:
            left.append(
                f"MLP: {error}; write it of build_colwise_linear, the activation and "
                "build_rowwise_linear"
            )


def _norm(norm: nn.Module) -> _Norm | None:
    """The block that computes as a norm does; None if none does."""
    params = dict(norm.named_parameters())
    if (
        "weight" not in params
        or not set(params) <= {"weight", "bias"}
        or params["weight"].dim() > 1
    ):
        return None
    weight, bias = params["weight"], params.get("bias")
    x = torch.randn(1, 4, weight.shape[-1])
    eps = float(getattr(norm, "variance_epsilon", getattr(norm, "eps", 1e-6)))
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    with torch.no_grad():
        out: Tensor = norm(x)
        if torch.allclose(out, F.layer_norm(x, weight.shape, weight, bias, eps), atol=1e-4):
            return _Norm("LayerNorm", "" if bias is not None else "bias=False", eps)
        for offset in (0.0, 1.0):
            if bias is None and torch.allclose(out, normed * (weight + offset), atol=1e-4):
                return _Norm("RMSNorm", f"offset={offset}" if offset else "", eps)
    return None


def _look_at_ends(model: PreTrainedModel, found: _Found, left: list[str]) -> None:
    """Compare what goes into the first layer with the embedding, and logits with the head's."""
    body = getattr(model, model.base_model_prefix)
    layers = getattr(body, "layers", None)
    ids = torch.tensor(_IDS)
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    first = {"": layers[0]} if isinstance(layers, nn.ModuleList) else {}
    with _calls(first) as seen, torch.no_grad():
        logits = model(ids, use_cache=False).logits
        hidden = body(ids, use_cache=False).last_hidden_state
        # Of the matrix: the module may multiply by a factor, as Gemma's does.
        matrix: Any = model.get_input_embeddings().weight
        embedded: Tensor = matrix[ids]
        plain: Tensor = head(hidden)
    if seen:
        factor = _ratio(seen[""][0], embedded, "embeddings", left)
        if abs(factor - _SIZES["hidden_size"] ** 0.5) < 1e-3:
            found.embedding_scale = "float(config.hidden_size**0.5)"
        elif factor != 1.0:
            scale = found.number(factor, "embeddings are multiplied by", left)
            found.embedding_scale = f"float({scale})"
    factor = _ratio(logits, plain, "logits", left)
    if factor != 1.0:
        found.logit_factor = found.number(factor, "logits are multiplied by", left)
    if head.bias is not None:
        left.append(
            "the head has a bias, which build_lm_head has not: make it with empty_parameter, and "
            "add it in adjust_logits"
        )
    norms = {n: m for n, m in body.named_children() if n == "norm" or "layernorm" in n}
    name, norm = next(iter(norms.items()), ("", None))
    found.norm = None if norm is None else _norm(norm)
    if norm is None or found.norm is None:
        kind = "none" if norm is None else type(norm).__name__
        left.append(
            f"the final norm ({kind}) is no RMSNorm or LayerNorm: override build_norm (or, where 1 "
            "is added to the weight of a LayerNorm, add it in load_weights)"
        )
    elif name != "norm":
        found.renames[f"model.{name}."] = "model.norm."


def _ratio(got: Tensor, plain: Tensor, what: str, left: list[str]) -> float:
    factor = float((got * plain).sum() / (plain * plain).sum())
    if not torch.allclose(got, factor * plain, atol=1e-4 * max(1.0, float(got.abs().max()))):
        left.append(f"{what} are more than a multiple of what the plain layer gives")
        return 1.0
    return 1.0 if abs(factor - 1) < 1e-4 else factor


def _config_source(made: Draft, found: _Found, stem: str) -> str:
    values, act = found.values, found.activation
    usual = CONFIG_MAPPING[made.tiny["model_type"]]().to_dict()
    rope = usual.get("rope_parameters") or {}
    found.eps()
    defaults = {
        act: usual.get(act) or "silu",
        "rope_theta": float(rope.get("rope_theta", 10000.0)),
        "max_position_embeddings": int(usual.get("max_position_embeddings") or 2048),
        "tie_word_embeddings": bool(usual.get("tie_word_embeddings")),
    }
    if found.partial:
        defaults["partial_rotary_factor"] = float(rope.get("partial_rotary_factor", 1.0))
    lists = {key for key in found.reads if isinstance(values.get(key), list)}
    for key in sorted(found.reads - lists - {"sliding_window"}):
        defaults[key] = usual[key]
    nullable = ""
    if "sliding_window" in found.reads:
        nullable = f'\n    nullable = {{"sliding_window": (1, {usual["sliding_window"]})}}'
    heads = usual.get("num_key_value_heads")
    if heads is not None and heads != usual.get("num_attention_heads"):
        defaults["num_key_value_heads"] = heads
    head_dim = _constant_head_dim(made)
    if head_dim is not None:
        defaults["head_dim"] = head_dim
    only: dict[str, Any] = {
        key: value
        for key, value in sorted(values.items())
        if key not in {**defaults, **_SIZES} | dict.fromkeys(found.reads)
        and not _ASIDE.fullmatch(key)
        and isinstance(value, bool | str | float)
    }
    for key in ("sliding_window", "attention_bias", "mlp_bias"):
        if key in values and values[key] is None:
            only[key] = None
    types = "".join(
        f"""        each = values.get("{key}")
        if not isinstance(each, list) or len(each) != values.get("num_hidden_layers"):
            raise ConfigError(f"config.json: {key} must name every layer, got {{each!r}}")
"""
        for key in sorted(lists)
    )
    return f'''"""Reads the configs of {stem}. Imports no torch."""

from __future__ import annotations

from typing import Any

from engine_core.configs import RotaryConfigBuilder
from engine_core.errors import ConfigError

# Keys that model.py does not read, with the only value that it was written for. One that it comes
# to read belongs to the defaults below.
_ONLY = {_literal(only, 0)}


class {made.builder}(RotaryConfigBuilder):
    """Reads the configs of {stem}.

    The defaults are those of transformers' config class.
    """

    architecture = "{made.architecture}"
    defaults = {_literal(defaults, 4)}{nullable}

    @classmethod
    def complete(cls, values: dict[str, Any]) -> None:
        """Refuse what the model does not do."""
        super().complete(values)
        for key, only in _ONLY.items():
            if values.get(key, only) != only:
                raise ConfigError(
                    f"config.json: {{key}} is {{values[key]!r}}; only {{only!r}} can be run"
                )
{types}'''


def _constant_head_dim(made: Draft) -> int | None:
    """The head dimension of a config that does not say it; None where it follows from the width."""
    kind: Any = CONFIG_MAPPING[made.tiny["model_type"]]
    usual = kind()
    stated = getattr(usual, "head_dim", None)
    wider = getattr(kind(hidden_size=2 * usual.hidden_size), "head_dim", None)
    return int(stated) if stated is not None and stated == wider else None


def _model_source(made: Draft, found: _Found, stem: str, model: PreTrainedModel) -> str:
    module = type(model).__module__.replace(".", "/") + ".py"
    todo = ""
    if made.left:
        lines = [f"To do: what no block was seen to do in\n{module}.\n"]
        lines += [
            textwrap.fill(f"{line}.", 99, initial_indent="- ", subsequent_indent="  ")
            for line in made.left
        ]
        todo = "\n\n" + "\n".join(lines) + "\n"
    mlp = "GatedMLP" if found.gated else "MLP"
    blocks = {mlp, "RotaryCausalLM", "SelfAttention"}
    indent = "\n" + 16 * " "
    attention = "SelfAttention" if found.unrotated is None else "attention"
    start, slides = "", 'config.layer_types[index] == "sliding_attention"'
    rotated = found.unrotated
    if rotated == slides or any("if slides" in line for line in found.attention):
        start = f"        slides = {slides}\n"
        rotated = "slides" if rotated == slides else rotated
    if rotated is not None:
        start += f"        attention = SelfAttention if {rotated} else _Unrotated\n"
    methods, imports = "", ""
    norm = found.norm
    if norm is not None and (
        norm.block != "RMSNorm" or norm.more or "rms_norm_eps" not in found.eps()
    ):
        blocks.add(norm.block)
        more = f", {norm.more}" if norm.more else ""
        methods += f'''
    def build_norm(self, config: HFConfig) -> {norm.block}:
        """The norms of layers and the final one."""
        return {norm.block}(config.hidden_size, {found.eps()}{more})
'''
    if found.embedding_scale is not None:
        methods += f'''
    def embedding_scale(self, config: HFConfig) -> float:
        """The factor of the embeddings."""
        return {found.embedding_scale}
'''
    needs: dict[str, set[str]] = {}
    if found.logit_factor is not None:
        needs = {"typing": {"Any"}, "torch": {"Tensor"}}
        methods = (
            f"""
    def __init__(self, config: HFConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self._logit_factor: float = {found.logit_factor}
"""
            + methods
            + '''
    def adjust_logits(self, logits: Tensor) -> Tensor:
        """``[..., vocab]``, times a constant."""
        return logits * self._logit_factor
'''
        )
    if found.renames:
        methods += '''
    def weight_name(self, name: str) -> str:
        """The name of a tensor here."""
        for theirs, ours in _NAMES.items():
            name = name.replace(theirs, ours)
        return name
'''
    names = ""
    if found.renames:
        names = (
            f"\n# Parts of names in checkpoints, and here.\n_NAMES = {_literal(found.renames, 0)}\n"
        )
    stacked = (
        ""
        if found.gated
        else """
    stacked_weights = {
        name: target
        for name, target in RotaryCausalLM.stacked_weights.items()
        if target[0] == "qkv_proj"
    }
"""
    )
    classes, step = "", ""
    if found.unrotated is not None:
        classes += _UNROTATED
        needs.setdefault("typing", set()).add("Any")
    layer, extra = "DecoderLayer", ""
    if found.layer in _LAYERS:
        names_of = {"parallel": "ParallelLayer", "after": "PostNormLayer", "scaled": "ScaledLayer"}
        layer = names_of[found.layer]
        if found.branch_factor is not None:
            extra = f"\n            {found.branch_factor},"
        classes += _LAYERS[found.layer]
        needs.setdefault("torch", set()).update({"Tensor", "nn"})
        needs["collections.abc"] = {"Callable"}
    else:
        blocks.add(layer)
        extra = "\n            sandwich=True," if found.layer == "sandwich" else ""
    if classes:
        blocks |= {"CosSin", "KVCacheLayer"}
        step = "from engine_core.step_context import AttentionMetadata\n"
    for group in (("collections.abc", "typing"), ("torch",)):
        lines = [f"from {m} import {', '.join(sorted(needs[m]))}\n" for m in group if m in needs]
        imports += "".join(lines) + ("\n" if lines else "")
    ordered = sorted(blocks, key=lambda name: (not name.isupper(), name))
    listed = "import " + ", ".join(ordered)
    if len(f"from engine_core.nn {listed}") > 100:
        listed = "import (\n" + "".join(f"    {name},\n" for name in ordered) + ")"
    return f'''"""{stem}, after transformers' {type(model).__name__}.{todo}"""

from __future__ import annotations

{imports}from engine_core.configs import HFConfig
from engine_core.nn {listed}
{step}{names}{classes}

class {made.architecture}(RotaryCausalLM):
    """{stem}: what a tiny random model of transformers showed of it."""
{stacked}{methods}
    def build_layer(self, config: HFConfig, index: int) -> {layer}:
        """The decoder layer ``index``."""
{start}        return {layer}(
            {attention}(
                config.hidden_size,
                config.num_attention_heads,
                config.num_key_value_heads,
                config.head_dim,{"".join(indent + line for line in found.attention)}
            ),
            {mlp}(
                config.hidden_size,
                config.intermediate_size,
                config.{found.activation},{"".join(indent + line for line in found.mlp)}
            ),
            lambda: self.build_norm(config),{extra}
        )
'''


_UNROTATED = '''

class _Unrotated(SelfAttention):
    """Attention of a layer without positions."""

    def forward(
        self,
        x: Any,
        cos_sin: CosSin | None,
        cache: KVCacheLayer,
        attn_metadata: AttentionMetadata,
        *then: Any,
    ) -> Any:
        """As :class:`SelfAttention`'s, with ``cos_sin`` left out."""
        return super().forward(x, None, cache, attn_metadata, *then)
'''
_FORWARD = '''
    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        cos_sin: CosSin,
        cache: KVCacheLayer,
        attn_metadata: AttentionMetadata,
    ) -> tuple[Tensor, Tensor]:
        """``(x, residual)`` to the next layer's; the residual stream is their sum."""
'''
_INIT = """
    def __init__(self, self_attn: nn.Module, mlp: nn.Module, norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.self_attn, self.mlp = self_attn, mlp
"""
# Layers that are no DecoderLayer, by their form.
_LAYERS = {
    "scaled": f'''

class ScaledLayer(nn.Module):
    """``h = x + factor * attention(norm(x))``, then ``h + factor * mlp(norm(h))``."""

    def __init__(
        self, self_attn: nn.Module, mlp: nn.Module, norm: Callable[[], nn.Module], factor: float
    ) -> None:
        super().__init__()
        self.self_attn, self.mlp, self.factor = self_attn, mlp, factor
        self.input_layernorm, self.post_attention_layernorm = norm(), norm()
{_FORWARD}        x = x if residual is None else x + residual
        attended = self.self_attn(self.input_layernorm(x), cos_sin, cache, attn_metadata)
        x = x + self.factor * attended
        return self.factor * self.mlp(self.post_attention_layernorm(x)), x
''',
    "parallel": f'''

class ParallelLayer(nn.Module):
    """``x + attention(norm(x)) + mlp(norm(x))``."""
{_INIT}        self.input_layernorm = norm()
{_FORWARD}        x = x if residual is None else x + residual
        normed = self.input_layernorm(x)
        attended = self.self_attn(normed, cos_sin, cache, attn_metadata)
        return attended + self.mlp(normed), x
''',
    "after": f'''

class PostNormLayer(nn.Module):
    """``h = x + norm(attention(x))``, then ``h + norm(mlp(h))``."""
{_INIT}        self.post_attention_layernorm, self.post_feedforward_layernorm = norm(), norm()
{_FORWARD}        x = x if residual is None else x + residual
        attended = self.self_attn(x, cos_sin, cache, attn_metadata)
        x = x + self.post_attention_layernorm(attended)
        return self.post_feedforward_layernorm(self.mlp(x)), x
''',
}


def _literal(values: Mapping[str, Any], indent: int) -> str:
    inner = " " * (indent + 4)
    lines = [f"{inner}{_text(key)}: {_text(value)},\n" for key, value in values.items()]
    return "{\n" + "".join(lines) + " " * indent + "}" if lines else "{}"


def _text(value: Any) -> str:
    return '"' + value.replace('"', '\\"') + '"' if isinstance(value, str) else repr(value)
