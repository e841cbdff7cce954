"""Whether a model generates text, embeds or scores, and a decoder's weights without its head."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from engine_core.checkpoint import Checkpoint
from engine_core.configs import EngineConfig, HFConfig, ModelConfig, PoolingConfig
from engine_core.configs.dtypes import DTYPES
from engine_core.configs.pooling import matryoshka, read_pooling, read_scoring
from engine_core.errors import ConfigError, OptionError
from engine_core.registry import Registry

if TYPE_CHECKING:
    from engine_core.checkpoint.gguf_convert import GGUFWeights

_HEAD = "lm_head"
_BARE, _WITH_HEAD = "Model", "ForCausalLM"


def as_decoder(checkpoint: Checkpoint, config: EngineConfig, registry: Registry) -> None:
    """Let the family of a decoder read a checkpoint that was saved without the head.

    transformers calls it ``Qwen3Model``, say, where the family knows ``Qwen3ForCausalLM``.
    """
    names = checkpoint.hf_config.get("architectures")
    if config.task not in ("auto", "embed") or not isinstance(names, list) or len(names) != 1:
        return
    name, known = str(names[0]), registry.architectures
    with_head = name.removesuffix(_BARE) + _WITH_HEAD
    bare = name.endswith(_BARE) and name not in known and with_head in known
    # A family may say itself what such a checkpoint is, as BLOOM's does.
    if bare and not registry.claims(checkpoint.hf_config):
        checkpoint.hf_config = checkpoint.hf_config.replace(architectures=[with_head])
        checkpoint.headless = name


def with_task(
    model_config: ModelConfig, model_class: type, checkpoint: Checkpoint, config: EngineConfig
) -> ModelConfig:
    """The model config, with the pooling that ``config.task`` or the checkpoint asks for.

    Raises:
        OptionError: the model cannot do the task, or a setting means nothing for it.
        ConfigError: the checkpoint asks for a pooling that is not supported, or for attention in
            both directions of a decoder.
        CorruptCheckpointError: a file that says it cannot be read.
    """
    if not getattr(model_class, "encoder_only", False):
        _check_causal(model_config.architecture, checkpoint.hf_config)
    pooling = _pooling(model_config, model_class, checkpoint, config.task)
    if pooling is None:
        return model_config
    for name, unfit in (
        ("swap_space", bool(config.swap_space)),
        ("kv_cache_memory", pooling.whole and config.kv_cache_memory is not None),
        ("block_size", pooling.whole and config.block_size is not None),
        ("kv_cache_dtype", pooling.whole and config.kv_cache_dtype != "auto"),
        ("deterministic", pooling.whole and config.deterministic),
    ):
        if unfit:
            raise OptionError(
                f"{name} is set, and means nothing for a model that runs for the task "
                f"{pooling.task!r}{' without a KV cache' if pooling.whole else ''}; leave it out"
            )
    return model_config.replace(pooling=pooling, dtype=model_config.dtype or _stored(checkpoint))


def _stored(checkpoint: Checkpoint) -> str | None:
    """The element type of most of the weights, which old configs of encoders do not state."""
    sizes = Counter[str]()
    for header in checkpoint.headers.values() if checkpoint.has_weights else ():
        if header.dtype in DTYPES:
            sizes[header.dtype] += header.nbytes
    return max(sizes, key=sizes.__getitem__, default=None)


def _pooling(
    model_config: ModelConfig, model_class: type, checkpoint: Checkpoint, task: str
) -> PoolingConfig | None:
    encodes = bool(getattr(model_class, "encoder_only", False))
    scores = hasattr(model_class, "classify")
    name, hf_config = model_config.architecture, checkpoint.hf_config
    if task == "generate":
        if encodes:
            raise OptionError(
                f"task 'generate' is asked for, but {name} attends in both directions and has no "
                f"next token; use {'score' if scores else 'embed'!r}, or leave task out"
            )
        return None
    if (task == "score") > scores or (task == "embed" and scores):
        offered = "score" if scores else "embed"
        hint = "; LLM.score and /v1/score compare its vectors" if task == "score" else ""
        raise OptionError(
            f"task {task!r} is asked for, but {name} is made to {offered}; use {offered!r}, or "
            f"leave task out{hint}"
        )
    whole: dict[str, Any] = {"whole": encodes, "hidden_size": model_config.hidden_size}
    kind: Any = getattr(model_class, "pooling", "mean" if encodes else "last")
    if scores:
        _check_labels(hf_config)
        return read_scoring(checkpoint.folder, hf_config, kinds=(kind,), **whole)
    stated = read_pooling(checkpoint.folder, hf_config, model_config.hidden_size)
    if stated is not None:
        return stated.replace(whole=encodes)
    if task == "embed" or encodes or checkpoint.headless:
        return PoolingConfig(kinds=(kind,), dimensions=matryoshka(hf_config), **whole)
    return None


def _check_causal(name: str, hf_config: HFConfig) -> None:
    """Refuse a decoder that was trained on to see later tokens: its vectors would be others."""
    text = hf_config.get("text_config")
    for place, values in (("", hf_config), ("text_config.", text)):
        if not isinstance(values, HFConfig | Mapping):
            continue
        for key, wanted in (
            ("is_causal", (False,)),
            ("use_bidirectional_attention", (True, "all")),
        ):
            if values.get(key) in wanted:
                raise ConfigError(
                    f"config.json: {place}{key} is {values.get(key)!r}: {name} is to attend in "
                    "both directions, and here it attends to earlier tokens only; take an encoder, "
                    "or a decoder that embeds with causal attention"
                )


def _check_labels(hf_config: HFConfig) -> None:
    labels = hf_config.get("id2label")
    if not isinstance(labels, dict | None):
        raise ConfigError(f"config.json: id2label must be an object, got {labels!r}")
    count = hf_config.get("num_labels", 2 if labels is None else len(labels))
    if count != 1:
        raise ConfigError(
            f"config.json: the classifier has {count} labels (id2label, num_labels); a model that "
            "scores has one"
        )


class WeightSource(Protocol):
    """The part of a checkpoint that the loader reads."""

    @property
    def headers(self) -> Mapping[str, Any]:
        """Names to objects with ``dtype`` and ``shape``."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors, one after another."""


class Body:
    """A decoder's tensors without those of its head, by the names that they have beside a head."""

    def __init__(self, checkpoint: Checkpoint, prefix: str) -> None:
        self._checkpoint = checkpoint
        self._prefix = prefix

    @property
    def gguf(self) -> GGUFWeights | None:
        """See :class:`Checkpoint`; with those of the head."""
        return self._checkpoint.gguf

    def keeping_blocks(self, names: Collection[str]) -> Body:
        """See :meth:`Checkpoint.keeping_blocks`."""
        own = {self.stored_name(name) for name in names}
        if self._checkpoint.gguf is not None:  # nor does the head need to be unpacked
            own |= set(filter(_of_head, self._checkpoint.gguf.block_types))
        return Body(self._checkpoint.keeping_blocks(own), self._prefix)

    def stored_name(self, name: str) -> str:
        """The name that the checkpoint has for a tensor."""
        return name.removeprefix(self._prefix)

    @property
    def headers(self) -> Mapping[str, Any]:
        """See :class:`WeightSource`."""
        headers = self._checkpoint.headers.items()
        return {self._prefix + name: header for name, header in headers if not _of_head(name)}

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See :class:`WeightSource`."""
        for name, tensor in self._checkpoint.weights():
            if not _of_head(name):
                yield self._prefix + name, tensor


def without_head(model: nn.Module, checkpoint: Checkpoint, config: ModelConfig) -> Any:
    """Take the head of a decoder away that is not to choose tokens; its weights then.

    The checkpoint may lack the head, and the prefix that the names of the rest have beside one.
    """
    if config.pooling is None or not hasattr(model, _HEAD):
        return checkpoint
    delattr(model, _HEAD)
    (prefix, *others) = {name.partition(".")[0] for name, _ in model.named_parameters()}
    named = any(name.startswith(f"{prefix}.") for name in checkpoint.headers)
    if named or others:
        prefix = ""
    elif checkpoint.has_weights:
        prefix += "."
    has_head = any(map(_of_head, checkpoint.headers))
    return Body(checkpoint, prefix) if has_head or prefix else checkpoint


def _of_head(name: str) -> bool:
    return name.startswith(f"{_HEAD}.")
