"""How a model's hidden states become vectors or scores, as sentence-transformers' files say it.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from engine_core.configs.base import FrozenConfig
from engine_core.configs.engine import _Number
from engine_core.configs.hf_config import HFConfig, read_object
from engine_core.errors import ConfigError, CorruptCheckpointError, RequestError

PoolingKind = Literal["mean", "cls", "last", "max", "mean_sqrt", "weighted_mean"]
DenseActivation = Literal["tanh", "identity", "relu", "gelu", "sigmoid", "silu"]
Activation = Literal["sigmoid", "identity"]
Similarity = Literal["cosine", "dot"]

_MODULES = "modules.json"
# sentence-transformers' words for the kinds that there are.
_KINDS: dict[str, PoolingKind] = {
    "cls": "cls",
    "max": "max",
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt",
    "weightedmean": "weighted_mean",
    "lasttoken": "last",
}
# In the order in which several are concatenated.
_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_SIMILARITIES: dict[str, Similarity] = {"cosine": "cosine", "dot": "dot", "dot_score": "dot"}
_ACTIVATIONS: dict[str, Activation] = {"Sigmoid": "sigmoid", "Identity": "identity"}
_DENSE_ACTIVATIONS: dict[str, DenseActivation] = {
    "Tanh": "tanh",
    "Identity": "identity",
    "ReLU": "relu",
    "GELU": "gelu",
    "Sigmoid": "sigmoid",
    "SiLU": "silu",
}
_TRANSFORMER, _POOLING, _DENSE, _NORMALIZE = "Transformer", "Pooling", "Dense", "Normalize"


class DenseConfig(FrozenConfig):
    """A linear layer after the pooling.

    Attributes:
        folder: where its weights are.
        in_features: numbers of what it takes.
        out_features: numbers of what it gives.
        bias: whether it has one.
        activation: of its result.
    """

    folder: str
    in_features: int = Field(gt=0)
    out_features: int = Field(gt=0)
    bias: bool = True
    activation: DenseActivation = "tanh"


class PoolingConfig(FrozenConfig):
    """Pooling of prompts, in an engine that generates no text.

    Attributes:
        task: "embed" for a vector, "score" for a cross encoder's score.
        kinds: which hidden states count, such as the mean of all, the first token's or the last
            one's; the results of several are concatenated.
        dense: layers that follow.
        whole: whether a prompt is computed in one step, as attention in both directions needs.
        normalize: whether vectors have length 1, unless a request says otherwise.
        activation: of scores.
        similarity: of two vectors, where scores are asked of a model that embeds.
        dimensions: lengths to which a vector may be cut; any if empty, none if None.
        hidden_size: numbers of a whole vector.
        prompts: texts that go before a prompt, by name.
        default_prompt: the name of the one that is used if none is asked for; or None.
        max_length: tokens of a prompt that the model was trained for, if it is known.
        lower_case: whether text is put into lower case before it is tokenised.
    """

    task: Literal["embed", "score"] = "embed"
    kinds: tuple[PoolingKind, ...] = ("mean",)
    dense: tuple[DenseConfig, ...] = ()
    whole: bool = False
    normalize: bool = True
    activation: Activation = "identity"
    similarity: Similarity = "cosine"
    dimensions: tuple[int, ...] | None = None
    hidden_size: int = Field(gt=0)
    prompts: dict[str, str] = Field(default_factory=dict)
    default_prompt: str | None = None
    max_length: int | None = Field(default=None, gt=0)
    lower_case: bool = False

    def resolve(self, params: PoolingParams) -> PoolingParams:
        """``params`` with what the model says where they say nothing.

        Raises:
            RequestError: the model's vectors cannot be cut to these dimensions.
        """
        size = params.dimensions
        if size is not None:
            if self.task == "score":
                raise RequestError("dimensions are for vectors, and this model gives scores")
            if self.dimensions is None:
                raise RequestError(
                    f"dimensions {size}: this model is not said to be trained for shorter vectors "
                    f"than its {self.hidden_size} numbers; leave dimensions out, or start the "
                    'engine with hf_overrides {"is_matryoshka": true} if it is',
                    param="dimensions",
                )
            if size > self.hidden_size or (self.dimensions and size not in self.dimensions):
                some = ", ".join(map(str, self.dimensions)) or f"up to {self.hidden_size}"
                raise RequestError(
                    f"dimensions {size} is none that this model has; it has {some}",
                    param="dimensions",
                )
        normalize = self.normalize if params.normalize is None else params.normalize
        return PoolingParams(dimensions=size, normalize=normalize, activate=params.activate)


class PoolingParams(FrozenConfig):
    """Settings of a request for vectors or scores. The docstring of each field describes it."""

    dimensions: Annotated[int | None, Field(gt=0), _Number] = None
    """Numbers of the vector, for models that are trained so that its beginning is one too."""
    normalize: bool | None = None
    """Whether vectors have length 1; as the model says if not set."""
    activate: bool = True
    """Whether scores pass the model's activation; raw if not."""


def read_pooling(folder: Path, hf_config: HFConfig, hidden_size: int) -> PoolingConfig | None:
    """The pooling that sentence-transformers' files in a checkpoint folder state; None without any.

    ``modules.json`` names a model, a pooling, maybe dense layers, and maybe a normalisation. Their
    own ``config.json``, ``config_sentence_transformers.json`` and ``sentence_bert_config.json`` say
    more.

    Raises:
        ConfigError: a module or a way of pooling is not supported; names it.
        CorruptCheckpointError: a file cannot be read.
    """
    modules = _modules(folder)
    if modules is None:
        return None
    kinds = [str(each.get("type")).rpartition(".")[2] for each in modules]
    normalize = kinds[-1:] == [_NORMALIZE]
    num_dense = len(kinds) - 2 - normalize
    wanted = [_TRANSFORMER, _POOLING, *[_DENSE] * num_dense, *[_NORMALIZE] * normalize]
    if num_dense < 0 or kinds != wanted:
        raise ConfigError(
            f"{_MODULES}: the modules {', '.join(kinds)} are not supported; a {_TRANSFORMER}, a "
            f"{_POOLING}, maybe {_DENSE} ones and maybe a {_NORMALIZE} are"
        )
    places = [str(each.get("path") or f"{i}_{kinds[i]}") for i, each in enumerate(modules) if i]
    for place in places:
        if Path(place).is_absolute() or ".." in Path(place).parts:
            raise ConfigError(f"{_MODULES}: {place} is outside the checkpoint")
    place = f"{places[0]}/config.json"
    pooled = _kinds(_read(folder, place) or {}, place)
    size, dense = hidden_size * len(pooled), []
    for place in places[1 : 1 + num_dense]:
        dense.append(_dense(folder, place, size))
        size = dense[-1].out_features
    more = _read(folder, "config_sentence_transformers.json") or {}
    own = _read(folder, "sentence_bert_config.json") or {}
    prompts = more.get("prompts") or {}
    similarity = more.get("similarity_fn_name") or "cosine"
    if similarity not in _SIMILARITIES:
        raise ConfigError(
            f"config_sentence_transformers.json: similarity_fn_name {similarity!r} is not one of "
            f"{', '.join(_SIMILARITIES)}"
        )
    default = more.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise ConfigError(
            f"config_sentence_transformers.json: default_prompt_name {default!r} is not among the "
            f"prompts {sorted(prompts)}"
        )
    return PoolingConfig(
        kinds=pooled,
        dense=tuple(dense),
        normalize=normalize,
        similarity=_SIMILARITIES[similarity],
        dimensions=matryoshka(hf_config),
        hidden_size=size,
        prompts=prompts,
        default_prompt=default,
        max_length=own.get("max_seq_length"),
        lower_case=bool(own.get("do_lower_case")),
    )


def matryoshka(hf_config: HFConfig) -> tuple[int, ...] | None:
    """The lengths to which vectors may be cut; any if empty, None if they may not be.

    Raises:
        ConfigError: ``matryoshka_dimensions`` is no list of positive integers.
    """
    sizes = hf_config.get("matryoshka_dimensions")
    if sizes is None:
        return () if hf_config.get("is_matryoshka") else None
    if not isinstance(sizes, list) or not all(type(size) is int and size > 0 for size in sizes):
        raise ConfigError(
            f"config.json: matryoshka_dimensions must be a list of positive integers, got {sizes!r}"
        )
    return tuple(sizes)


def score_activation(hf_config: HFConfig) -> Activation:
    """The activation of a cross encoder's one score: a sigmoid unless its config names another.

    Raises:
        ConfigError: it names one that is not known.
    """
    told = hf_config.get("sentence_transformers", {})
    name = told.get("activation_fn") if isinstance(told, dict) else None
    name = name or hf_config.get("sbert_ce_default_activation_function") or "Sigmoid"
    last = str(name).rpartition(".")[2]
    if last not in _ACTIVATIONS:
        raise ConfigError(
            f"config.json: activation_fn {name!r} is not one of {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[last]


def _modules(folder: Path) -> list[dict[str, Any]] | None:
    import json

    try:
        modules = json.loads((folder / _MODULES).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{folder / _MODULES} cannot be read: {error}") from error
    if not isinstance(modules, list) or not all(isinstance(each, dict) for each in modules):
        raise CorruptCheckpointError(f"{folder / _MODULES} holds no list of modules")
    return modules


def _read(folder: Path, name: str) -> dict[str, Any] | None:
    try:
        return read_object(folder / name, CorruptCheckpointError)
    except FileNotFoundError:
        return None


def _kinds(stated: Mapping[str, Any], place: str) -> tuple[PoolingKind, ...]:
    """The ways of pooling that a module's config states."""
    named = stated.get("pooling_mode")
    names = [named] if isinstance(named, str) else named
    if not names:
        names = [name for flag, name in _FLAGS.items() if stated.get(flag)] or ["mean"]
    if not isinstance(names, list) or not all(name in _KINDS for name in names):
        raise ConfigError(
            f"{place}: pooling by {names!r} is not supported; {', '.join(_KINDS)} and lists of "
            "these are"
        )
    if stated.get("include_prompt") is False:
        raise ConfigError(
            f"{place}: include_prompt false, which leaves a prompt's tokens out of the pooling, is "
            "not supported"
        )
    return tuple(_KINDS[name] for name in names)


def _dense(folder: Path, place: str, size: int) -> DenseConfig:
    """The layer whose config is in a folder of the checkpoint, for vectors of ``size`` numbers."""
    stated, name = _read(folder, f"{place}/config.json") or {}, f"{place}/config.json"
    sizes = stated.get("in_features"), stated.get("out_features")
    if sizes[0] != size or type(sizes[1]) is not int or sizes[1] <= 0:
        raise ConfigError(
            f"{name}: in_features and out_features are {sizes[0]!r} and {sizes[1]!r}; {size}, as "
            "the module before gives, and a positive integer are needed"
        )
    told = str(stated.get("activation_function", "torch.nn.modules.activation.Tanh"))
    package, _, last = told.rpartition(".")
    if last not in _DENSE_ACTIVATIONS or package.partition(".")[0] != "torch":
        raise ConfigError(
            f"{name}: activation_function {told!r} is not one of "
            f"{', '.join(f'torch.nn.{each}' for each in _DENSE_ACTIVATIONS)}"
        )
    used = "sentence_embedding"
    for key in ("module_input_name", "module_output_name"):
        if stated.get(key) not in (None, used):
            raise ConfigError(f"{name}: {key} {stated[key]!r} is not supported; {used!r} is")
    if stated.get("use_residual"):
        raise ConfigError(f"{name}: use_residual is not supported")
    return DenseConfig(
        folder=str(folder / place),
        in_features=size,
        out_features=sizes[1],
        bias=stated.get("bias") is not False,
        activation=_DENSE_ACTIVATIONS[last],
    )
