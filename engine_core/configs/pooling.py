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
from engine_core.configs.hf_config import HFConfig, parse_json, read_object
from engine_core.errors import ConfigError, CorruptCheckpointError, RequestError

PoolingKind = Literal["mean", "cls", "last", "max", "mean_sqrt", "weighted_mean"]
DenseActivation = Literal["tanh", "identity", "relu", "gelu", "sigmoid", "silu"]
Activation = Literal["sigmoid", "identity"]
Similarity = Literal["cosine", "dot", "euclidean", "manhattan"]

_MODULES = "modules.json"
_SENTENCE = "config_sentence_transformers.json"
# sentence-transformers once named this file after the model; it reads the first that is there.
_OWN = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
_PACKAGE = "sentence_transformers"
# Settings that change neither tokens nor, without padding, states.
_HARMLESS = {"padding", "padding_side", "pad_to_multiple_of", "return_tensors", "use_fast"}
_HARMLESS |= {"trust_remote_code", "use_cache"}
# Tokenizers say so that they know no limit.
_NO_LIMIT = 10**9
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
_SIMILARITIES: dict[str, Similarity] = {
    "cosine": "cosine",
    "dot": "dot",
    "dot_score": "dot",
    "euclidean": "euclidean",
    "manhattan": "manhattan",
}
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
        cut: numbers that are left of a vector, after the normalisation, unless a request asks for
            dimensions; all if None.
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
    cut: int | None = Field(default=None, gt=0)
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
            if self.dimensions is None and size != self.hidden_size:
                raise RequestError(
                    f"dimensions {size}: this model is not said to be trained for shorter vectors "
                    f"than its {self.hidden_size} numbers; leave dimensions out, or start the "
                    'engine with hf_overrides {"is_matryoshka": true} if it is',
                    param="dimensions",
                )
            known = self.dimensions or ()
            if size > self.hidden_size or (known and size not in (*known, self.hidden_size)):
                some = ", ".join(map(str, known)) or f"up to {self.hidden_size}"
                raise RequestError(
                    f"dimensions {size} is none that this model has; it has {some}",
                    param="dimensions",
                )
        normalize = self.normalize if params.normalize is None else params.normalize
        if params.normalize and size is None:
            size = self.cut  # what is asked for has length 1
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
    own ``config.json``, ``config_sentence_transformers.json``, ``sentence_bert_config.json`` and
    ``tokenizer_config.json`` say more.

    Raises:
        ConfigError: a module or a way of pooling is not supported; names it.
        CorruptCheckpointError: a file cannot be read.
    """
    modules = _modules(folder)
    if modules is None:
        return None
    kinds = [kind for kind, _ in modules]
    normalize = kinds[-1:] == [_NORMALIZE]
    num_dense = len(kinds) - 2 - normalize
    wanted = [_TRANSFORMER, _POOLING, *[_DENSE] * num_dense, *[_NORMALIZE] * normalize]
    if num_dense < 0 or kinds != wanted:
        raise ConfigError(
            f"{_MODULES}: the modules {', '.join(kinds)} are not supported; a {_TRANSFORMER}, a "
            f"{_POOLING}, maybe {_DENSE} ones and maybe a {_NORMALIZE} are"
        )
    more = _read(folder, _SENTENCE) or {}
    texts = _texts(folder, more, "embed")
    places = [place for _, place in modules[1:]]
    place = f"{places[0]}/config.json"
    stated = _read(folder, place)
    if stated is None:
        raise ConfigError(f"{_MODULES} names {place}, and there is no such file in {folder}")
    pooled = _kinds(stated, place)
    if stated.get("include_prompt") is False and any(texts["prompts"].values()):
        raise ConfigError(
            f"{place}: include_prompt false, which leaves the tokens of a prompt of {_SENTENCE} "
            "out of the pooling, is not supported"
        )
    size, dense = hidden_size * len(pooled), []
    for place in places[1 : 1 + num_dense]:
        dense.append(_dense(folder, place, size))
        size = dense[-1].out_features
    similarity = more.get("similarity_fn_name") or "cosine"
    if not isinstance(similarity, str) or similarity not in _SIMILARITIES:
        raise ConfigError(
            f"{_SENTENCE}: similarity_fn_name {similarity!r} is not one of "
            f"{', '.join(_SIMILARITIES)}"
        )
    cut = _positive(more, "truncate_dim", _SENTENCE)
    return PoolingConfig(
        kinds=pooled,
        dense=tuple(dense),
        normalize=normalize,
        similarity=_SIMILARITIES[similarity],
        dimensions=matryoshka(hf_config),
        cut=None if cut is None else min(cut, size),
        hidden_size=size,
        **texts,
    )


def read_scoring(folder: Path, hf_config: HFConfig, **settings: Any) -> PoolingConfig:
    """The making of a cross encoder's score, with ``settings`` of the model's class.

    sentence-transformers' files say more, where there is a ``modules.json``.

    Raises:
        ConfigError: they ask for what is not supported; names it.
        CorruptCheckpointError: a file cannot be read.
    """
    modules = _modules(folder)
    kinds = [kind for kind, _ in modules or ()]
    if modules is not None and kinds != [_TRANSFORMER]:
        raise ConfigError(
            f"{_MODULES}: the modules {', '.join(kinds)} are not supported for a model that "
            f"scores; a {_TRANSFORMER} alone is"
        )
    more = {} if modules is None else _read(folder, _SENTENCE) or {}
    name = more.get("activation_fn")
    return PoolingConfig(
        task="score",
        activation=_score_activation(hf_config) if name is None else _activation(name, _SENTENCE),
        **_texts(folder, more, "score", saved=modules is not None),
        **settings,
    )


def _texts(
    folder: Path, more: Mapping[str, Any], task: Literal["embed", "score"], *, saved: bool = True
) -> dict[str, Any]:
    """Fields of :class:`PoolingConfig` about what goes into the model.

    Args:
        folder: of the checkpoint.
        more: what ``config_sentence_transformers.json`` has.
        task: decides which states the files have to name.
        saved: whether sentence-transformers wrote the checkpoint.
    """
    prompts = more.get("prompts") or {}
    fine = isinstance(prompts, dict)
    if not fine or not all(isinstance(text, str | None) for text in prompts.values()):
        raise ConfigError(f"{_SENTENCE}: prompts must be texts by name, got {prompts!r}")
    prompts = {name: text for name, text in prompts.items() if text is not None}
    default = more.get("default_prompt_name")
    if default is not None and default not in list(prompts):
        raise ConfigError(
            f"{_SENTENCE}: default_prompt_name {default!r} is not among the prompts "
            f"{sorted(prompts)}"
        )
    own, place = {}, _OWN[0]
    for name in _OWN if saved else ():
        if stated := _read(folder, name):
            own, place = stated, name
            break
    _check_states(own, place, task)
    arguments = _arguments(own, place)
    length = _positive(own, "max_seq_length", place) or _positive(
        arguments, "model_max_length", place
    )
    if length is None:
        name = "tokenizer_config.json"
        length = _positive(_read(folder, name) or {}, "model_max_length", name)
    return {
        "prompts": prompts,
        "default_prompt": default,
        "max_length": length,
        "lower_case": bool(own.get("do_lower_case")),
    }


def _check_states(own: Mapping[str, Any], place: str, task: Literal["embed", "score"]) -> None:
    """Refuse other states of the model than those that this engine takes."""
    kind, states, made = (
        ("feature-extraction", "last_hidden_state", "token_embeddings")
        if task == "embed"
        else ("sequence-classification", "logits", "scores")
    )
    inputs = own.get("modality_config")
    if inputs is not None:
        inputs = inputs.get("text") if isinstance(inputs, dict) else inputs
    told = {
        "transformer_task": (own.get("transformer_task"), kind),
        "modality_config": (inputs, {"method": "forward", "method_output_name": states}),
        "module_output_name": (own.get("module_output_name"), made),
    }
    if "modality_config" in own and inputs is None:
        raise ConfigError(f"{place}: modality_config has no 'text', which is needed")
    for key, (given, wanted) in told.items():
        if given is not None and given != wanted:
            raise ConfigError(f"{place}: {key} {given!r} is not supported; {wanted!r} is")


def _arguments(own: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Arguments that ``sentence_bert_config.json`` has for the tokenizer, none of them unknown."""
    found: dict[str, Any] = {}
    known = _HARMLESS | {"model_max_length"}
    processing = own.get("processing_kwargs") or {}
    for name, given, fine in (
        *((name, own.get(name), known) for name in ("tokenizer_args", "processor_kwargs")),
        *((name, own.get(name), _HARMLESS) for name in ("config_args", "config_kwargs")),
        *(
            (f"processing_kwargs.{name}", processing.get(name), _HARMLESS)
            for name in ("text", "common")
            if isinstance(processing, dict)
        ),
    ):
        given = given or {}
        if not isinstance(given, dict) or given.keys() - fine:
            raise ConfigError(
                f"{place}: {name} {given!r} is not supported; "
                f"{'model_max_length alone is' if fine is known else 'leave it out'}"
            )
        found |= given
    return found


def _positive(stated: Mapping[str, Any], key: str, place: str) -> int | None:
    """A whole number of a file, None if it says none or one without meaning."""
    value = stated.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 1:
        raise ConfigError(f"{place}: {key} must be a positive whole number, got {value!r}")
    return None if value >= _NO_LIMIT else int(value)


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


def _score_activation(hf_config: HFConfig) -> Activation:
    """The activation of a cross encoder's one score: a sigmoid unless its config names another.

    Raises:
        ConfigError: it names one that is not known.
    """
    told = hf_config.get("sentence_transformers", {})
    name = told.get("activation_fn") if isinstance(told, dict) else None
    name = name or hf_config.get("sbert_ce_default_activation_function") or "Sigmoid"
    return _activation(name, "config.json")


def _activation(name: Any, place: str) -> Activation:
    last = str(name).rpartition(".")[2]
    if last not in _ACTIVATIONS:
        raise ConfigError(
            f"{place}: activation_fn {name!r} is not one of {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[last]


def _modules(folder: Path) -> list[tuple[str, str]] | None:
    """The kind of each module that ``modules.json`` names, and its folder; None without the file.

    The first one is in the checkpoint's own folder.
    """
    try:
        modules = parse_json((folder / _MODULES).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{folder / _MODULES} cannot be read: {error}") from error
    if not isinstance(modules, list) or not all(isinstance(each, dict) for each in modules):
        raise CorruptCheckpointError(f"{folder / _MODULES} holds no list of modules")
    found = []
    for index, module in enumerate(modules):
        told = str(module.get("type"))
        package, _, kind = told.rpartition(".")
        if package.partition(".")[0] != _PACKAGE:
            raise ConfigError(
                f"{_MODULES}: the module {told!r} is code of the checkpoint's own, which is never "
                f"run; modules of {_PACKAGE} are supported"
            )
        place = str(module.get("path") or (f"{index}_{kind}" if index else ""))
        if Path(place).is_absolute() or ".." in Path(place).parts:
            raise ConfigError(f"{_MODULES}: {place} is outside the checkpoint")
        if not index and Path(place) != Path():
            raise ConfigError(
                f"{_MODULES}: the {kind} is in the folder {place!r}; move the files of that folder "
                "into the checkpoint's own, and give that module the path ''"
            )
        found.append((kind, place))
    return found


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
    if not isinstance(names, list) or not all(name in list(_KINDS) for name in names):
        raise ConfigError(
            f"{place}: pooling by {names!r} is not supported; {', '.join(_KINDS)} and lists of "
            "these are"
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
