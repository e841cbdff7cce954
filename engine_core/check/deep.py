"""The model's outputs, layer by layer, against a reference."""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engine_core.check.report import Comparison, Difference, PromptComparison, QuantizationCost
from engine_core.configs import EngineConfig, ModelConfig
from engine_core.errors import ConfigError, EngineError
from engine_core.nn.quantization import QuantizationScheme, kv_scales
from engine_core.nn.quantization.scheme import QUANTIZATION_KEYS
from engine_core.registry import build_registry
from engine_core.runtime.layer_trace import decoder_layers
from engine_core.runtime.loader import build_on_meta, load_weights, match_weights
from engine_core.runtime.source import open_model
from engine_core.step_context import BuildContext
from engine_core.testing.reference import (
    Prompt,
    read_golden,
    transformers_class,
    without_progress_bars,
)
from engine_core.testing.tiny_model import TinyModel
from engine_core.testing.trace import Recorder, Trace
from engine_core.text import Tokenizer

# Relative to a token's norm. Correct float32 implementations are apart by 1e-6 a layer, up to 1e-5
# after many of them; a wrong rotation, a missed scale or a swapped half are apart by 1e-1 and more.
TOLERANCE = 1e-3
_PROMPT_LENGTHS = (1, 7, 33)
# What a quantised model is measured on: kinds of text that models are asked for.
_TEXTS = (
    "The river rises in the hills above the town and turns south at the old bridge. In spring it "
    "carries so much water that the lower fields are under it for weeks, and farmers move their "
    "sheep to the slopes until the grass is dry again.",
    "Question: A train leaves at 9:40 and arrives at 13:05. It stops twice for ten minutes. How "
    "long does it move?\nAnswer: From 9:40 to 13:05 are 3 hours and 25 minutes. Without the two "
    "stops, 20 minutes together, it moves for 3 hours and 5 minutes.",
    "def mean(values):\n    total = 0.0\n    for value in values:\n        total += value\n    "
    "return total / len(values)\n\n\nprint(mean([1.0, 2.0, 6.0]))  # 3.0\n",
    "Dear Ms Lindgren,\n\nthank you for your letter of 4 May. We have looked into the delay of "
    "your order and found that the address was incomplete. The parcel will be sent again today, at "
    "no cost to you.\n\nKind regards",
)
_CHUNK = 64


class NoReferenceError(EngineError):
    """There is no reference for this model, or it cannot be used."""


def read_golden_file(path: Path) -> tuple[Prompt, ...]:
    """The prompts of a file of golden outputs, ``expected.json`` with its tensors beside it.

    Raises:
        ConfigError: it cannot be read, lacks something, or its prompts are more than tokens.
    """
    try:
        prompts = tuple(read_golden(path))
    except KeyError as error:
        raise ConfigError(f"{path} is no file of golden outputs: it has no {error}") from error
    except Exception as error:  # safetensors and json raise kinds of their own.
        raise ConfigError(f"{path} cannot be read as golden outputs: {error}") from error
    if not prompts:
        raise ConfigError(f"{path} holds no prompts")
    return prompts


class DeepModel:
    """A model opened alone, in this process, to run in float32.

    Attributes:
        source: its checkpoint, and what runs it.

    Raises:
        EngineError: it cannot be opened.
    """

    def __init__(self, model: str, config: EngineConfig) -> None:
        config = config.replace(dtype="float32", tensor_parallel_size=1)
        registry = build_registry(config.custom_module_map, plugin_errors=config.plugin_errors)
        self.source = open_model(model, config, registry)

    def not_finite(self) -> tuple[str, ...]:
        """Names of the tensors that hold NaN or infinite numbers; reads all of them."""
        # Of another cache nobody reads the scales.
        unread = self.source.kv_cache_dtype != "fp8"
        return tuple(
            name
            for name, tensor in self.source.checkpoint.weights()
            if tensor.is_floating_point()
            and not (unread and kv_scales.is_scale(name))
            and not _is_finite(tensor)
        )

    @cached_property
    def numbers(self) -> Any:
        """The checkpoint, with numbers in the place of a tool's codes.

        Raises:
            NoReferenceError: the scheme of the codes does not give their numbers.
        """
        source = self.source
        if source.scheme is None or source.scheme.settings is None:
            return source.checkpoint
        numbers = source.scheme.numbers(source.checkpoint)
        if numbers is None:
            raise NoReferenceError(
                f"quantization {source.scheme.name!r} does not give the numbers that its codes "
                "stand for, so there is nothing to compare with"
            )
        return numbers

    def load(self, *, quantized: bool = False) -> TinyModel:
        """The model with its weights as numbers, or as its scheme keeps them."""
        source = self.source
        scheme = source.scheme if quantized else None
        network, checkpoint = self._build(scheme)
        if scheme is None:
            checkpoint = self.numbers
        load_weights(network, checkpoint, source.name, source.device, pack=quantized)
        processor = source.registry.input_processor(source.model_config)
        return TinyModel(network, processor, source.device)

    def _build(self, scheme: QuantizationScheme | None) -> tuple[nn.Module, Any]:
        source = self.source
        context = BuildContext(dtype=source.dtype, model_class=source.registry.model_class)
        network = build_on_meta(source.model_class, source.model_config, context, scheme)
        if scheme is None:
            kv_scales.set_aside(network, source.checkpoint.headers, source.scheme)
            return network, source.checkpoint
        return network, match_weights(network, source.checkpoint, source.name, scheme)[0]


def measure_quantization(model: DeepModel, tokenizer: Tokenizer | None) -> QuantizationCost:
    """How far a quantised model's next tokens are from those of the numbers that it is made of.

    Both are computed in float32, token by token of the same texts, so that the weights alone
    differ; without a tokenizer on random tokens.

    Raises:
        EngineError: the model cannot be loaded, or its scheme does not give numbers.
    """
    source = model.source
    assert source.scheme is not None, "there is something to measure"
    longest = source.model_config.max_position_embeddings
    if tokenizer is None:
        prompts = _random_prompts(source.model_config, (_CHUNK, _CHUNK // 2))
    else:
        prompts = [tokenizer.encode(text)[:longest] for text in _TEXTS]
    exact = _log_probabilities(model.load(), prompts)
    gc.collect()
    ours = _log_probabilities(model.load(quantized=True), prompts)
    divergence = equal = 0.0
    for one, other in zip(exact, ours, strict=True):
        divergence += float((one.exp() * (one - other)).sum(dtype=torch.float64))
        equal += float((one.argmax(-1) == other.argmax(-1)).sum())
    tokens = sum(map(len, prompts))
    return QuantizationCost(
        scheme=source.scheme.name,
        texts=tokenizer is not None,
        num_prompts=len(prompts),
        num_tokens=tokens,
        mean_kl=max(divergence / tokens, 0.0) if math.isfinite(divergence) else None,
        equal_tokens=equal / tokens,
    )


def _random_prompts(config: ModelConfig, lengths: Sequence[int]) -> list[list[int]]:
    draw, longest = random.Random(0), config.max_position_embeddings
    return [
        [draw.randrange(config.vocab_size) for _ in range(length)]
        for length in dict.fromkeys(min(length, longest) for length in lengths)
    ]


def _log_probabilities(model: TinyModel, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
    """Of the next tokens, ``[T, vocab]`` float32 for each prompt."""
    made = []
    for prompt in prompts:
        sequence = model.sequence(prompt, len(prompt))
        steps = [[(0, start, count)] for start, count in sequence.chunks(_CHUNK)]
        made.append(model.run([sequence], steps).logits[0].log_softmax(-1))
    return made


def _is_finite(tensor: Tensor) -> bool:
    # There is no test for floats of one byte.
    numbers = tensor.float() if tensor.itemsize == 1 else tensor
    return bool(numbers.isfinite().all())


def compare_with_golden(model: DeepModel, file: Path, golden: Sequence[Prompt]) -> Comparison:
    """Logits of each prompt, and its greedy continuation, against those of ``file``.

    Raises:
        EngineError: the model cannot be loaded, or the file is of another vocabulary.
    """
    source, ours = model.source, model.load()
    vocab_size = source.model_config.vocab_size
    prompts = []
    for prompt in golden:
        outside = [token for token in prompt.token_ids if not 0 <= token < vocab_size]
        if outside:
            raise NoReferenceError(
                f"prompt {prompt.name} of {file} has the token {outside[0]}, outside the "
                f"vocabulary of {vocab_size}"
            )
        logits, _ = _trace(ours, prompt.token_ids)
        if prompt.columns is not None:
            logits = logits[:, prompt.columns]
        if logits.shape != prompt.prompt_logits.shape:
            raise NoReferenceError(
                f"prompt {prompt.name} of {file} has logits of shape "
                f"{list(prompt.prompt_logits.shape)}, the model gives {list(logits.shape)}"
            )
        tokens, _ = ours.greedy(prompt.token_ids, len(prompt.new_tokens))
        wrong = [
            index
            for index, (token, expected) in enumerate(zip(tokens, prompt.new_tokens, strict=True))
            if token != expected
        ]
        parts = (_difference("logits", logits, prompt.prompt_logits),)
        prompts.append(
            _prompt_comparison(prompt.name, prompt.token_ids, parts, wrong[0] if wrong else None)
        )
    return _comparison(str(file), prompts)


def compare_with_transformers(model: DeepModel) -> Comparison:
    """Every decoder layer's output and the logits, against transformers' model.

    Raises:
        NoReferenceError: transformers does not know the architecture or cannot load it.
        EngineError: the model cannot be loaded.
    """
    source = model.source
    numbers, hf_config = model.numbers, source.checkpoint.hf_config.to_dict()
    if numbers is not source.checkpoint:
        hf_config = {key: value for key, value in hf_config.items() if key not in QUANTIZATION_KEYS}
    try:
        reference = transformers_class(hf_config)
    except LookupError as error:
        raise NoReferenceError(f"{error}, so there is nothing to compare with") from error
    ours = model.load()
    model_config = source.model_config
    prompts = _random_prompts(model_config, _PROMPT_LENGTHS)
    traced = [_trace(ours, prompt) for prompt in prompts]
    # Both models in float32 at once would take twice the memory.
    del ours
    gc.collect()
    theirs = _load_transformers(reference, numbers)
    layers = decoder_layers(theirs, model_config.num_layers)
    compared = []
    for prompt, (logits, trace) in zip(prompts, traced, strict=True):
        their_logits, their_trace = _trace_transformers(theirs, layers, prompt)
        parts = [
            *_layer_differences(trace, their_trace),
            _difference("logits", logits, their_logits),
        ]
        compared.append(_prompt_comparison(f"{len(prompt)} tokens", prompt, parts, None))
    import transformers

    name = f"transformers {transformers.__version__} {type(theirs).__name__}"
    return _comparison(name, compared)


def _trace(model: TinyModel, token_ids: Sequence[int]) -> tuple[Tensor, Trace]:
    """Logits ``[T, V]`` of one prompt, computed at once, and what the modules put out."""
    sequence = model.sequence(token_ids, len(token_ids))
    run = model.run([sequence], [[(0, 0, len(token_ids))]], recording=True)
    return run.logits[0], run.trace(0)


def _load_transformers(reference: tuple[Any, Any], checkpoint: Any) -> Any:
    config, model_class = reference
    try:
        with without_progress_bars():
            model, loading = model_class.from_pretrained(
                None,
                config=config,
                state_dict={name: tensor.float() for name, tensor in checkpoint.weights()},
                attn_implementation="eager",
                dtype=torch.float32,
                output_loading_info=True,
            )
    except Exception as error:  # It raises a dozen kinds, for what a checkpoint may get wrong.
        raise NoReferenceError(f"transformers cannot load the model: {error}") from error
    if loading["missing_keys"]:
        # It would fill them with random numbers.
        raise NoReferenceError(
            f"transformers' {model_class.__name__} does not find its weights in the checkpoint: "
            f"{', '.join(sorted(loading['missing_keys'])[:4])}"
        )
    return model.eval()


@torch.inference_mode()
def _trace_transformers(
    model: Any, layers: Sequence[str], token_ids: Sequence[int]
) -> tuple[Tensor, Trace]:
    recorder = Recorder(model, layers)
    recorder.begin([(0, position) for position in range(len(token_ids))])
    with recorder.recording():
        logits = model(torch.tensor([list(token_ids)]), use_cache=False).logits[0].float()
    return logits, recorder.trace(0, len(token_ids))


def _layer_differences(ours: Trace, theirs: Trace) -> list[Difference]:
    """The embedding, if both begin with one of the same width, and each decoder layer."""
    pairs = [("embedding", next(iter(ours.outputs)), next(iter(theirs.outputs)))]
    pairs += [
        (f"layer {index}", mine, other)
        for index, (mine, other) in enumerate(zip(ours.layers, theirs.layers, strict=False))
    ]
    found = []
    for part, mine, other in pairs:
        one, two = ours.outputs.get(mine), theirs.outputs.get(other)
        if one is None or two is None or one.shape != two.shape:
            continue
        if part == "embedding":
            one = _scaled(one, two)
        found.append(_difference(part, one, two))
    return found


def _scaled(ours: Tensor, theirs: Tensor) -> Tensor:
    """Ours times the number that brings it nearest to theirs.

    Where embeddings are multiplied by a number, as Gemma's, one model does it in the embedding and
    another behind it. The first layer differs if one of them does not.
    """
    one, two = ours.double(), theirs.double()
    factor = float((one * two).sum() / one.square().sum())
    return one * factor if math.isfinite(factor) else ours


def _difference(part: str, ours: Tensor, theirs: Tensor) -> Difference:
    """Of ``[T, features]``, token by token."""
    apart = ours.double() - theirs.double()
    size = theirs.double().norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
    relative = float((apart.norm(dim=-1) / size).max())
    finite = bool(apart.isfinite().all())
    return Difference(
        part=part,
        max_abs=float(apart.abs().max()) if finite else None,
        relative=relative if finite else None,
        differs=not finite or relative > TOLERANCE,
    )


def _prompt_comparison(
    name: str, token_ids: Sequence[int], parts: Sequence[Difference], wrong_token: int | None
) -> PromptComparison:
    first = next((difference.part for difference in parts if difference.differs), None)
    return PromptComparison(
        name=name,
        num_tokens=len(token_ids),
        parts=tuple(parts),
        first_difference=first,
        first_wrong_token=wrong_token,
    )


def _comparison(reference: str, prompts: Sequence[PromptComparison]) -> Comparison:
    return Comparison(
        reference=reference,
        dtype="float32",
        tolerance=TOLERANCE,
        same=all(
            prompt.first_difference is None and prompt.first_wrong_token is None
            for prompt in prompts
        ),
        prompts=tuple(prompts),
    )
