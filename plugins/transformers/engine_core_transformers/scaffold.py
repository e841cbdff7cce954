"""A first package for an architecture of transformers: what ``nn`` has blocks for, found by trying.

A tiny random model of transformers' class is built. Its parts are compared with the blocks of
``engine_core.nn`` by their names, their shapes and what they compute; what fits none is left to the
author, and named.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from engine_core.configs import HFConfig
from engine_core.errors import ConfigError
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


@dataclass(slots=True)
class _Found:
    """Findings of the trials, as source of the arguments of blocks."""

    attention: list[str] = field(default_factory=list)
    mlp: list[str] = field(default_factory=list)
    norm_offset: float = 0.0
    sandwich: bool = False
    embedding_scale: float = 1.0
    logit_factor: float = 1.0
    activation: str = "hidden_act"
    reads: dict[str, Any] = field(default_factory=dict)


def draft(architecture: str) -> Draft:
    """The first package for ``architecture``.

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
    try:
        default = kind()
        known = {
            key: value
            for key, value in _SIZES.items()
            if getattr(default, key, None) is not None
            and not isinstance(getattr(kind, key, None), property)
        }
        ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
        hf_config = kind(**known, **ends, architectures=[architecture])
        torch.manual_seed(0)
        model: PreTrainedModel = model_class(architecture)(hf_config).float().eval()
    except Exception as error:  # Each class has its own ways to refuse sizes.
        raise ConfigError(
            f"transformers makes no tiny {architecture} of common sizes "
            f"({type(error).__name__}: {error}); start with --like"
        ) from error
    stem = re.split(r"For[A-Z]|LMHead|Model$", architecture)[0]
    tiny = _plain_config(hf_config.to_dict(), known, architecture, own[0])
    made = Draft(architecture, f"{stem}ConfigBuilder", tiny)
    with torch.device("meta"):
        runs = TransformersModel(HFConfig(hf_config.to_dict()), StepContextManager())
    _randomise(model)
    found = _Found()
    _look_at_layers(model, runs, found, made.left)
    _look_at_ends(model, found, made.left)
    made.config = _config_source(made, hf_config.to_dict(), found, stem)
    made.model = _model_source(made, found, stem, model)
    return made


def _plain_config(
    values: Mapping[str, Any], known: Mapping[str, Any], architecture: str, model_type: str
) -> dict[str, Any]:
    rope = values.get("rope_parameters") or {}
    tiny = {"architectures": [architecture], "model_type": model_type, **known}
    tiny["tie_word_embeddings"] = bool(values.get("tie_word_embeddings"))
    if "rope_theta" in rope:
        tiny["rope_theta"] = 5000.0 if rope["rope_theta"] != 5000.0 else 20000.0
    if values.get("layer_types"):
        tiny["layer_types"] = list(values["layer_types"])
    return tiny


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
    mlp = next((n for n, m in parts.items() if hasattr(m, "down_proj")), None)
    _look_at_attention(parts.pop(attention or "", None), attention, runs, found, left)
    _look_at_mlp(parts.pop(mlp or "", None), mlp, found, left)
    norms = [name for name in parts if "norm" in name]
    left += [
        f"{type(layer).__name__}.{name} ({type(part).__name__}) has no block"
        for name, part in parts.items()
        if name not in norms
    ]
    if attention is not None:
        told = [_scalars(getattr(each, attention, each)) for each in layers]
        differ = {key for each in told for key in each if each[key] != told[0].get(key)}
        left += [f"layers differ in {key} of their attention" for key in sorted(differ - _ALLOWED)]
    if sorted(norms) == sorted(_SANDWICH):
        found.sandwich = True
    elif sorted(norms) != sorted(_NORMS):
        left.append(
            f"the norms of {type(layer).__name__} are {', '.join(norms) or 'none'}: DecoderLayer "
            f"has {' and '.join(_NORMS)} before the branches, so write the layer anew"
        )
    for name in norms:
        offset = _norm_offset(parts[name])
        if offset is None:
            left.append(f"{name} ({type(parts[name]).__name__}) is no RMSNorm of this kind")
            break
        found.norm_offset = offset


# What layers may differ in: their number, and the window, which is looked at by itself.
_ALLOWED = {"layer_idx", "sliding_window", "attention_type", "layer_type", "is_sliding"}


def _scalars(module: nn.Module) -> dict[str, Any]:
    return {k: v for k, v in vars(module).items() if isinstance(v, bool | int | float | str | None)}


def _look_at_attention(
    module: Any, name: str | None, runs: TransformersModel, found: _Found, left: list[str]
) -> None:
    if module is None or name != "self_attn" or not hasattr(module, "o_proj"):
        left.append("attention has no q_proj, k_proj, v_proj and o_proj under self_attn")
        return
    biases = [getattr(module, f"{part}_proj").bias is not None for part in "qkvo"]
    if len(set(biases[:3])) > 1:
        left.append("of q, k and v only some have a bias")
    for key, bias in (("qkv_bias", biases[0]), ("o_bias", biases[3])):
        if bias:
            found.attention.append(f"{key}=True,")
    known = {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"}
    layer = runs._ordered()[0]
    head_dim = layer.head_dim
    norm = getattr(module, "q_norm", None)
    if norm is not None:
        offset = _norm_offset(norm)
        if offset is None or next(norm.parameters()).shape != (head_dim,):
            left.append(f"q_norm ({type(norm).__name__}) is no RMSNorm of each head")
        else:
            found.attention.append("qk_norm_eps=config.rms_norm_eps,")
            if offset:
                found.attention.append(f"qk_norm_offset={offset},")
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
        found.reads["sliding_window"] = _SIZES["sliding_window"]
        slides = "config.sliding_window"
        if None in windows or len(windows) > 1:
            slides += ' if config.layer_types[index] == "sliding_attention" else None'
            found.reads["layer_types"] = []
        found.attention.append(f"sliding_window={slides},")
    if abs(layer.scale - head_dim**-0.5) > 1e-9:
        left.append(f"scores are scaled by {layer.scale} here: say by which key (scale=)")
    if layer.softcap is not None:
        left.append(f"scores are capped at {layer.softcap}: say by which key (logit_softcapping=)")
    rotary = [m for n, m in runs._body.named_modules() if n.endswith("rotary_emb")]  # type: ignore[attr-defined]
    sizes = {tuple(m.inv_freq.shape) for m in rotary if hasattr(m, "inv_freq")}
    if sizes != {(head_dim // 2,)}:
        left.append(
            "the rotary embedding is not one of whole heads: override build_rotary, or pass "
            "cos_sin None"
        )


def _rotation(module: nn.Module, head_dim: int) -> str | None:
    """How its module's function rotates: by "halves", "interleaved" pairs, or otherwise None."""
    rotate = getattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb", None)
    q = torch.randn(1, 1, 3, head_dim)
    angles = torch.outer(torch.arange(1.0, 4.0), torch.logspace(0, -1, head_dim // 2))[None]
    both = torch.cat((angles, angles), dim=-1)
    try:
        out: Tensor = rotate(q, q, both.cos(), both.sin())[0]  # type: ignore[misc]
    except Exception:  # It takes other arguments.
        return None
    cos, sin = angles.cos(), angles.sin()
    first, second = q.chunk(2, dim=-1)
    halves = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    even, odd = q[..., ::2], q[..., 1::2]
    pairs = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)
    if torch.allclose(out, halves, atol=1e-5):
        return "halves"
    return "interleaved" if torch.allclose(out, pairs, atol=1e-5) else None


def _look_at_mlp(module: Any, name: str | None, found: _Found, left: list[str]) -> None:
    parts = {} if module is None else dict(module.named_children())
    linears = sorted(key for key, each in parts.items() if isinstance(each, nn.Linear))
    if name != "mlp" or linears != ["down_proj", "gate_proj", "up_proj"]:
        left.append(
            f"the feed-forward part ({'none' if module is None else type(module).__name__}) is no "
            "GatedMLP of gate_proj, up_proj and down_proj under mlp"
        )
        return
    if parts["down_proj"].bias is not None:
        found.mlp.append("bias=True,")
    config: Any = module.config if hasattr(module, "config") else None
    keys = ("hidden_act", "hidden_activation", "activation_function")
    found.activation = next((key for key in keys if getattr(config, key, None)), keys[0])
    x = torch.randn(1, 3, parts["gate_proj"].in_features)
    act = ACT2FN[getattr(config, found.activation, "silu")]
    with torch.no_grad():
        plain = parts["down_proj"](act(parts["gate_proj"](x)) * parts["up_proj"](x))
        if not torch.allclose(module(x), plain, atol=1e-5):
            left.append(f"{type(module).__name__} is more than down(act(gate(x)) * up(x))")


def _norm_offset(norm: nn.Module) -> float | None:
    """0 or 1 for an RMSNorm whose weight has that offset, None for anything else."""
    params = dict(norm.named_parameters())
    if set(params) != {"weight"}:
        return None
    weight = params["weight"]
    x = torch.randn(1, 4, weight.shape[-1])
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", 1e-6))
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    with torch.no_grad():
        out: Tensor = norm(x)
        for offset in (0.0, 1.0):
            if torch.allclose(out, normed * (weight + offset), atol=1e-4):
                return offset
    return None


def _look_at_ends(model: PreTrainedModel, found: _Found, left: list[str]) -> None:
    """Compare what goes into the first layer with the embedding, and logits with the head's."""
    body = getattr(model, model.base_model_prefix)
    layers = getattr(body, "layers", None)
    ids = torch.tensor([[3, 5, 7, 11]])
    seen: list[Tensor] = []
    hooks = []
    if isinstance(layers, nn.ModuleList):
        hooks.append(
            layers[0].register_forward_pre_hook(
                lambda _, args, kwargs: seen.append(args[0] if args else kwargs["hidden_states"]),
                with_kwargs=True,
            )
        )
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits
        hidden = body(ids, use_cache=False).last_hidden_state
        # Of the matrix: the module may multiply by a factor, as Gemma's does.
        matrix: Any = model.get_input_embeddings().weight
        embedded: Tensor = matrix[ids]
        plain: Tensor = head(hidden)
    for hook in hooks:
        hook.remove()
    if seen:
        found.embedding_scale = _ratio(seen[0], embedded, "embeddings", left)
    found.logit_factor = _ratio(logits, plain, "logits", left)
    if head.bias is not None:
        left.append("the head has a bias, which build_lm_head has not")
    norm = getattr(body, "norm", None)
    if norm is None or _norm_offset(norm) is None:
        left.append("the final norm is no RMSNorm under model.norm")


def _ratio(got: Tensor, plain: Tensor, what: str, left: list[str]) -> float:
    factor = float((got * plain).sum() / (plain * plain).sum())
    if not torch.allclose(got, factor * plain, atol=1e-4 * max(1.0, float(got.abs().max()))):
        left.append(f"{what} are more than a multiple of what the plain layer gives")
        return 1.0
    return 1.0 if abs(factor - 1) < 1e-4 else factor


def _config_source(made: Draft, values: Mapping[str, Any], found: _Found, stem: str) -> str:
    act = found.activation
    rope = values.get("rope_parameters") or {}
    defaults = {
        act: values.get(act) or "silu",
        "rms_norm_eps": float(values.get("rms_norm_eps") or 1e-6),
        "rope_theta": float(rope.get("rope_theta", 10000.0)),
        "max_position_embeddings": _longest(made),
        "tie_word_embeddings": bool(values.get("tie_word_embeddings")),
    }
    if "sliding_window" in found.reads:
        defaults["sliding_window"] = found.reads["sliding_window"]
    head_dim = _constant_head_dim(made)
    if head_dim is not None:
        defaults["head_dim"] = head_dim
    only = {
        key: value
        for key, value in sorted(values.items())
        if key not in {**defaults, **_SIZES, **found.reads}
        and not _ASIDE.fullmatch(key)
        and isinstance(value, bool | str | float)
    }
    types = """        types = values.get("layer_types")
        if not isinstance(types, list) or len(types) != values.get("num_hidden_layers"):
            raise ConfigError(f"config.json: layer_types must name every layer, got {types!r}")
"""
    return f'''"""Reads the configs of {stem}. Imports no torch."""

from __future__ import annotations

from typing import Any

from engine_core.configs import RotaryConfigBuilder
from engine_core.errors import ConfigError

# Keys that model.py does not read, with the only value that it was written for.
_ONLY = {_literal(only, 0)}


class {made.builder}(RotaryConfigBuilder):
    """Reads the configs of {stem}; the defaults are those of transformers' config class."""

    architecture = "{made.architecture}"
    defaults = {_literal(defaults, 4)}

    @classmethod
    def complete(cls, values: dict[str, Any]) -> None:
        """Refuse what the model does not do."""
        super().complete(values)
        for key, only in _ONLY.items():
            if values.get(key, only) != only:
                raise ConfigError(
                    f"config.json: {{key}} is {{values[key]!r}}; only {{only!r}} can be run"
                )
{types if "layer_types" in found.reads else ""}'''


def _constant_head_dim(made: Draft) -> int | None:
    """The head dimension of a config that does not say it; None where it follows from the width."""
    kind: Any = CONFIG_MAPPING[made.tiny["model_type"]]
    usual = kind()
    stated = getattr(usual, "head_dim", None)
    wider = getattr(kind(hidden_size=2 * usual.hidden_size), "head_dim", None)
    return int(stated) if stated is not None and stated == wider else None


def _longest(made: Draft) -> int:
    default = CONFIG_MAPPING[made.tiny["model_type"]]()
    return int(getattr(default, "max_position_embeddings", None) or 2048)


def _model_source(made: Draft, found: _Found, stem: str, model: PreTrainedModel) -> str:
    module = type(model).__module__.replace(".", "/") + ".py"
    todo = "".join(f"\n- {line}." for line in made.left)
    if made.left:
        todo = (
            f"\n\nTo do: transformers' {module} does what no block here was seen to do.\n{todo}\n"
        )
    arguments = "\n                ".join(found.attention)
    mlp = "\n                ".join(found.mlp)
    norm_import = "RMSNorm, " if found.norm_offset else ""
    extra = "\n            sandwich=True," if found.sandwich else ""
    methods = ""
    if found.norm_offset:
        methods += f'''
    def build_norm(self, config: HFConfig) -> RMSNorm:
        """A norm with {found.norm_offset} added to its weight."""
        return RMSNorm(config.hidden_size, config.rms_norm_eps, offset={found.norm_offset})
'''
    if found.embedding_scale != 1.0:
        root = abs(found.embedding_scale - _SIZES["hidden_size"] ** 0.5) < 1e-3
        factor = "float(config.hidden_size**0.5)" if root else repr(found.embedding_scale)
        if not root:
            made.left.append(f"embeddings are multiplied by {factor}: say by which key")
        methods += f'''
    def embedding_scale(self, config: HFConfig) -> float:
        """The factor of the embeddings."""
        return {factor}
'''
    if found.logit_factor != 1.0:
        made.left.append(f"logits are multiplied by {found.logit_factor}: say by which key")
        methods += f'''
    def adjust_logits(self, logits: Tensor) -> Tensor:
        """``[..., vocab]``, multiplied by a constant of the tiny model: read it from the config."""
        return logits * {found.logit_factor!r}
'''
    torch_import = "from torch import Tensor\n\n" if found.logit_factor != 1.0 else ""
    return f'''"""{stem}, after transformers' {type(model).__name__}.{todo}"""

from __future__ import annotations

{torch_import}from engine_core.configs import HFConfig
from engine_core.nn import DecoderLayer, GatedMLP, {norm_import}RotaryCausalLM, SelfAttention


class {made.architecture}(RotaryCausalLM):
    """{stem}: what a tiny random model of transformers showed of it."""
{methods}
    def build_layer(self, config: HFConfig, index: int) -> DecoderLayer:
        """The decoder layer ``index``."""
        return DecoderLayer(
            SelfAttention(
                config.hidden_size,
                config.num_attention_heads,
                config.num_key_value_heads,
                config.head_dim,
                {arguments}
            ),
            GatedMLP(
                config.hidden_size,
                config.intermediate_size,
                config.{found.activation},
                {mlp}
            ),
            lambda: self.build_norm(config),{extra}
        )
'''.replace("                \n", "")


def _literal(values: Mapping[str, Any], indent: int) -> str:
    inner = " " * (indent + 4)
    lines = [f"{inner}{_text(key)}: {_text(value)},\n" for key, value in values.items()]
    return "{\n" + "".join(lines) + " " * indent + "}" if lines else "{}"


def _text(value: Any) -> str:
    return '"' + value.replace('"', '\\"') + '"' if isinstance(value, str) else repr(value)
