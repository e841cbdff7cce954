"""Tiny checkpoints, and the reference's results for their prompts."""

from __future__ import annotations

import copy
import inspect
import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from engine_core.runtime.layer_trace import decoder_layers
from engine_core.testing.case import ConformanceCase, ConformanceError, MediaPrompt
from engine_core.testing.trace import Recorder, Trace, first_input

NEW_TOKENS = 8
MEDIA_TOKENS = 16
_LENGTHS = (1, 6, 21, 45)


@dataclass(frozen=True)
class Prompt:
    """A prompt and what the reference continues it with, greedily.

    Attributes:
        name: for messages.
        token_ids: the prompt.
        new_tokens: the tokens after it.
        prompt_logits: ``[prompt length, vocab]`` float32.
        step_logits: ``[new tokens, vocab]`` float32; row 0 is the prompt's last one.
        trace: of the reference, for the tokens of :attr:`sequence`; None for golden files.
        columns: the tokens whose logits are given; None for all.
        shown: the prompt as its author gave it, if it shows more than text; :attr:`token_ids` have
            all its placeholders.
        inputs_embeds: ``[prompt length, H]`` float32, what the reference's first decoder layer
            takes; None if that is not known.
    """

    name: str
    token_ids: tuple[int, ...]
    new_tokens: tuple[int, ...]
    prompt_logits: Tensor
    step_logits: Tensor
    trace: Trace | None = None
    columns: list[int] | None = None
    shown: MediaPrompt | None = None
    inputs_embeds: Tensor | None = None

    @property
    def sequence(self) -> tuple[int, ...]:
        """Every token that is computed: the prompt and all new tokens but the last."""
        return (*self.token_ids, *self.new_tokens[:-1])

    @property
    def logits(self) -> Tensor:
        """``[len(sequence), vocab]``."""
        return torch.cat([self.prompt_logits, self.step_logits[1:]])

    @property
    def request(self) -> Any:
        """The prompt as ``LLM.generate`` takes it."""
        return list(self.token_ids) if self.shown is None else self.shown.request()


@dataclass(frozen=True)
class TinyCheckpoint:
    """A case's checkpoint on disk, with the reference's results.

    Attributes:
        folder: ``config.json`` and ``model.safetensors``.
        prompts: with what is expected of them.
        source: what they were computed by, for messages.
        prefix: beginning of the reference's module names that a model under test may lack, such as
            "transformer".
        encoded: of a case that encodes, prompts, their states ``[T, H]`` or scores ``[1]``, and
            the trace.
        typed: a prompt of two texts, the types of its tokens, and its states or score; None where
            the reference tells no types apart.
        passed_over: names of tensors that the reference's class knows of published checkpoints and
            leaves out, such as a stored causal mask.
    """

    folder: Path
    prompts: tuple[Prompt, ...]
    source: str
    prefix: str = ""
    encoded: tuple[tuple[list[int], Tensor, Trace], ...] = ()
    typed: tuple[list[int], list[int], Tensor] | None = None
    passed_over: tuple[str, ...] = ()


def prepare(
    case: ConformanceCase, folder: Path, *, count: int | None = None, scale: float = 1.0
) -> TinyCheckpoint:
    """Make the checkpoint of ``case`` in ``folder`` and run the reference on it.

    Args:
        case: the model and its prompts.
        folder: an empty one.
        count: new tokens of a prompt, if not the usual number.
        scale: factor of all random weights but those of norms.

    Raises:
        ConformanceError: the case's reference cannot be had, or does not fit the config.
    """
    if isinstance(case.reference, Path):
        return _golden(case.reference)
    assert case.config is not None, "a case has a config or golden files"
    config = json.loads(json.dumps(case.config))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if case.reference == "transformers":
            model = _from_transformers(case.name, config, encodes=case.encodes)
        else:
            model = case.reference(copy.deepcopy(config)).float().eval()
        _randomise(model, scale)
    if case.reference == "transformers":
        # It writes the names that published checkpoints have.
        with without_progress_bars():
            model.save_pretrained(folder)
    else:
        tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    given = case.prompts if case.prompts is not None else _random_prompts(model, config)
    if case.encodes:
        encoded = tuple((list(ids), *encode(model, list(ids))) for ids in given)
        name, typed = type(model).__name__, _typed(model, max(map(list, given), key=len))
        return TinyCheckpoint(
            folder,
            (),
            name,
            model.base_model_prefix,
            encoded=encoded,
            typed=typed,
            passed_over=_passed_over(model),
        )
    prompts = (
        *(_run(model, list(ids), f"{len(ids)} tokens", None, count or NEW_TOKENS) for ids in given),
        *(_run(model, [], each.name, each, count or MEDIA_TOKENS) for each in case.media),
    )
    return TinyCheckpoint(
        folder,
        prompts,
        type(model).__name__,
        getattr(model, "base_model_prefix", ""),
        passed_over=_passed_over(model),
    )


def _passed_over(model: nn.Module) -> tuple[str, ...]:
    """Tensors of parts of ``model`` that transformers' class ignores in checkpoints; one a pattern.

    Patterns end in the part's name and the tensor's, as "attn.masked_bias"; others are of whole
    parts that this model may not have.
    """
    patterns: Any = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    own = model.state_dict().keys()
    parts = [part for part, _ in model.named_modules()]
    found: list[str] = []
    for pattern in sorted(patterns):
        end = _IGNORED_TENSOR.search(pattern)
        names = [f"{part}.{end[1]}" for part in parts] if end else []
        found += [name for name in names if name not in own and re.search(pattern, name)][:1]
    return tuple(found)


# A pattern's end: of a part's name, a dot, which may be escaped, and the tensor's name.
_IGNORED_TENSOR = re.compile(r"\w\\?\.([a-z_]+)\$?$")


def _from_transformers(name: str, config: Mapping[str, Any], *, encodes: bool = False) -> Any:
    try:
        if encodes:
            return transformers_encoder(config).float().eval()
        theirs, model_class = transformers_class(config)
        model = model_class._from_config(theirs, attn_implementation="eager")
    except (LookupError, ValueError, TypeError, AttributeError) as error:
        raise ConformanceError(
            f"case {name!r}: {error}; give golden files or a function as its reference"
        ) from error
    return model.float().eval()


def _randomise(model: nn.Module, scale: float) -> None:
    """Weights with which every part of a model shows in the logits; biases too, which start at 0.

    Two modules that share a parameter still do.
    """
    for name, param in model.named_parameters():
        param.requires_grad_(False)
        if param.dim() > 1:
            param.normal_(0.0, scale * 1.5 * param[0].numel() ** -0.5)
        elif name.endswith("bias"):
            param.normal_(0.0, scale * 0.3)
        else:
            param.normal_(1.0, 0.3)
    # Such as what routers add to the scores of experts.
    kept = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name in kept and name.endswith("bias") and buffer.is_floating_point():
            buffer.normal_(0.0, scale * 0.3)


def _random_prompts(model: nn.Module, config: Mapping[str, Any]) -> list[list[int]]:
    """Prompts of several lengths, the longest as long as the config allows."""
    embedding = next((m for m in model.modules() if isinstance(m, nn.Embedding)), None)
    vocab = config.get("vocab_size") or (embedding.num_embeddings if embedding else None)
    if vocab is None:
        raise ConformanceError(
            "the reference has no nn.Embedding and the config no vocab_size, so the kit cannot "
            "choose prompts; give the case some"
        )
    longest = config.get("max_position_embeddings") or max(_LENGTHS) + NEW_TOKENS
    draw = random.Random(0)
    lengths = dict.fromkeys(min(length, longest - NEW_TOKENS) for length in _LENGTHS)
    return [[draw.randrange(vocab) for _ in range(length)] for length in lengths]


@torch.inference_mode()
def _run(
    model: nn.Module, ids: list[int], name: str, shown: MediaPrompt | None, count: int
) -> Prompt:
    """Greedy decoding: transformers' models with their KV cache, others over the whole again."""
    # A copy, because models with dynamic rope scaling remember the longest sequence they saw.
    model = copy.deepcopy(model)
    # Those with states lack a KV cache, or take positions for those of the new tokens.
    cached = hasattr(model, "prepare_inputs_for_generation") and not getattr(
        model, "_is_stateful", False
    )
    layers, embeds = _reference_layers(model), None
    kept = cache_argument(model)
    inputs: dict[str, Tensor] = {}
    if shown is not None:
        ids = list(shown.token_ids if shown.reference_ids is None else shown.reference_ids)
        inputs = {key: torch.as_tensor(value) for key, value in shown.reference_inputs.items()}
        layers, embeds = _first_layer(model, layers, ids, inputs)
    recorder = Recorder(model, layers)
    length = len(ids) + count - 1
    sequence = list(ids)
    rows: list[Tensor] = []
    with recorder.recording():
        cache: Any = None
        start = 0
        while len(sequence) < len(ids) + count:
            if not cached:
                start = 0
            recorder.begin([(0, position) for position in range(start, len(sequence))])
            tokens = torch.tensor([sequence[start:]])
            more = {} if start else inputs
            if cached:
                if shown is None:
                    # Some classes with ALiBi take the mask's length for the sequence's, and some
                    # with mrope for that of the new tokens.
                    more = {"attention_mask": torch.ones(1, len(sequence), dtype=torch.int64)}
                output = model(tokens, use_cache=True, **{kept: cache}, **more)
                cache = getattr(output, kept)
            else:
                output = model(tokens, **more)
            logits = output if isinstance(output, Tensor) else output.logits
            rows = [*rows[:start], *logits[0].float()]
            start = len(sequence)
            sequence.append(int(rows[-1].argmax()))
    return Prompt(
        name=name,
        token_ids=tuple(ids),
        new_tokens=tuple(sequence[len(ids) :]),
        prompt_logits=torch.stack(rows[: len(ids)]),
        step_logits=torch.stack(rows[len(ids) - 1 :]),
        trace=recorder.trace(0, length),
        shown=shown,
        inputs_embeds=embeds,
    )


def cache_argument(model: nn.Module) -> str:
    """Name the argument of a model of transformers, and the field of its output, for its cache.

    Releases from 5.24 on call it ``cache``, those before ``past_key_values``.
    """
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _reference_layers(model: Any) -> list[str]:
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    count = getattr(config, "num_hidden_layers", None)
    if count is None:
        lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
        count = len(lists[0]) if lists else 0
    return decoder_layers(model, count)


def _first_layer(
    model: nn.Module, layers: Sequence[str], ids: Sequence[int], inputs: Mapping[str, Tensor]
) -> tuple[list[str], Tensor | None]:
    """The decoder layers of a model that also has an encoder's, and what the first one takes.

    They are those that are called for each token.
    """
    taken: dict[str, Tensor] = {}
    lists = {n: m for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m)}
    handles = [
        first_input(each[0], lambda x, name=name: taken.setdefault(name, x))  # type: ignore[misc]
        for name, each in lists.items()
    ]
    try:
        copy.deepcopy(model)(torch.tensor([list(ids)]), **inputs)
    finally:
        for handle in handles:
            handle.remove()
    for name, x in taken.items():
        if x.shape[:2] == (1, len(ids)):
            return [f"{name}.{index}" for index in range(len(lists[name]))], x[0].float()
    return list(layers), None


def _golden(folder: Path) -> TinyCheckpoint:
    wanted = ("config.json", "model.safetensors", "expected.json", "expected.safetensors")
    absent = [name for name in wanted if not (folder / name).is_file()]
    if absent:
        raise ConformanceError(
            f"the golden files in {folder} are not all there: no {', '.join(absent)}. A package "
            "that leaves them out of its wheel can be checked from its source"
        )
    prompts = tuple(read_golden(folder / "expected.json", NEW_TOKENS, with_media=True))
    return TinyCheckpoint(folder, prompts, f"the golden files in {folder.name}")


def read_golden(
    file: Path, count: int | None = None, *, with_media: bool = False
) -> Iterator[Prompt]:
    """Yield the prompts of a file of golden outputs and of the ``.safetensors`` beside it.

    Args:
        file: ``expected.json``.
        count: how many of the new tokens are read of a prompt of text; None for all.
        with_media: whether prompts may show more than text.

    Raises:
        KeyError: something is not there.
        ValueError: a prompt is more than tokens.
    """
    expected = json.loads(file.read_text(encoding="utf-8"))
    tensors = load_file(file.with_suffix(".safetensors"))
    for entry in expected["prompts"]:
        shown = _golden_media(entry, tensors)
        more = sorted(key for key in entry if "pixel" in key or "image" in key or key == "media")
        if more and not (shown and with_media):
            raise ValueError(
                f"the prompt {entry['name']!r} is more than tokens ({', '.join(more)})"
            )
        number = count if shown is None or count is None else MEDIA_TOKENS
        embeds = entry.get("inputs_embeds")
        suffix = "_sub" if "prefill_logits_sub" in entry else ""
        steps = entry.get(f"step_logits{suffix}")
        yield Prompt(
            name=str(entry["name"]),
            token_ids=tuple(map(int, entry["input_ids"])),
            new_tokens=tuple(map(int, entry["new_tokens"][:number])),
            prompt_logits=tensors[entry[f"prefill_logits{suffix}"]].float(),
            step_logits=torch.empty(0) if steps is None else tensors[steps].float()[:number],
            columns=expected["logits_token_ids"] if suffix else None,
            shown=shown,
            inputs_embeds=None if embeds is None else tensors[embeds].float(),
        )


def kinds_of(case: ConformanceCase) -> set[str]:
    """The kinds that a case shows besides text."""
    if isinstance(case.reference, Path):
        file = case.reference / "expected.json"
        prompts = json.loads(file.read_text(encoding="utf-8"))["prompts"] if file.is_file() else ()
        return {kind for prompt in prompts for kind in prompt.get("media", ())}
    return {kind for shown in case.media for kind in shown.media}


def _golden_media(entry: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> MediaPrompt | None:
    """A prompt of golden files with its items by kind, which have named tensors."""
    if "media" not in entry:
        return None
    media = {
        kind: [{key: tensors[name].numpy() for key, name in item.items()} for item in items]
        for kind, items in entry["media"].items()
    }
    ids = entry.get("given_ids", entry["input_ids"])
    return MediaPrompt(name=str(entry["name"]), token_ids=ids, media=media)


def transformers_class(values: Mapping[str, Any]) -> tuple[Any, Any]:
    """transformers' config for the content of a ``config.json``, and the class of its causal model.

    Raises:
        LookupError: transformers has none.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM

    values = dict(values)
    model_type = values.pop("model_type", None)
    try:
        config = AutoConfig.for_model(model_type, **values)
        for known in (AutoModelForCausalLM._model_mapping, AutoModelForMultimodalLM._model_mapping):
            if type(config) in known:
                return config, known[type(config)]
        raise KeyError(type(config).__name__)
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise LookupError(
            f"transformers has no causal model for model_type {model_type!r} ({error})"
        ) from error


def transformers_encoder(values: Mapping[str, Any]) -> Any:
    """transformers' encoder for the content of a ``config.json``, a classifier if it is named one.

    Raises:
        LookupError: transformers has none.
    """
    from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

    values = dict(values)
    classifies = str(values["architectures"][0]).endswith("ForSequenceClassification")
    auto: Any = AutoModelForSequenceClassification if classifies else AutoModel
    try:
        config = AutoConfig.for_model(values.pop("model_type", None), **values)
        return auto._model_mapping[type(config)]._from_config(config, attn_implementation="eager")
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise LookupError(f"transformers has no encoder for this config ({error})") from error


def _typed(model: Any, ids: list[int]) -> tuple[list[int], list[int], Tensor] | None:
    """See :class:`TinyCheckpoint`; types of a model that has one are all of that."""
    if "token_type_ids" not in inspect.signature(model.forward).parameters:
        return None
    types = [int(index >= len(ids) // 2) for index in range(len(ids))]
    has_types = getattr(model.config, "type_vocab_size", 1) > 1
    return ids, types, encode(model, ids, types if has_types else None)[0]


@torch.inference_mode()
def encode(
    model: nn.Module, ids: list[int], types: list[int] | None = None
) -> tuple[Tensor, Trace]:
    """The reference's states ``[T, H]`` of a prompt, or its score ``[1]``, and its trace.

    ``types`` are its tokens', for a model that tells the two texts of a pair apart.
    """
    recorder = Recorder(model, _reference_layers(model))
    recorder.begin([(0, position) for position in range(len(ids))])
    with recorder.recording():
        more = {} if types is None else {"token_type_ids": torch.tensor([types])}
        given = model(torch.tensor([ids]), **more)
    scores: Tensor | None = getattr(given, "logits", None)
    states: Tensor = given.last_hidden_state if scores is None else scores
    return states[0], recorder.trace(0, len(ids))


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Keep transformers from showing progress bars inside the ``with`` block."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
