"""Conformance cases, which a family's author writes. Imports no torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import nn

ReferenceFactory = Callable[[Mapping[str, Any]], "nn.Module"]
"""Makes a reference model from a config.

Called with ``input_ids [1, T]`` it returns logits ``[1, T, vocab]``, or an object with them as
``logits``. Its state dict has the names of a checkpoint; the kit gives it random weights.
"""

Reference = Literal["transformers"] | Path | ReferenceFactory


class ConformanceError(AssertionError):
    """A violation of the contract by a family; says what differs, where and by how much."""


@dataclass(frozen=True, kw_only=True)
class MediaPrompt:
    """A prompt with pictures, videos or sounds.

    Attributes:
        name: for messages; unique in a case.
        token_ids: as the family's ``process_media`` takes them: of each item one placeholder, or as
            many as it has embeddings.
        media: by kind, items as it takes them: PIL images, arrays or mappings of features.
        options: settings of the family's processing.
        reference_ids: the prompt as the reference takes it, with all placeholders; ``token_ids`` if
            None.
        reference_inputs: what shows the reference the same: arrays by the names of its forward's
            parameters. Golden files need none.
    """

    name: str
    token_ids: Sequence[int]
    media: Mapping[str, Sequence[Any]]
    options: Mapping[str, Any] = field(default_factory=dict)
    reference_ids: Sequence[int] | None = None
    reference_inputs: Mapping[str, Any] = field(default_factory=dict)

    def request(self) -> dict[str, Any]:
        """The prompt as ``LLM.generate`` takes it."""
        return {
            "prompt_token_ids": list(self.token_ids),
            "multi_modal_data": {kind: list(items) for kind, items in self.media.items()},
            "mm_processor_kwargs": dict(self.options),
        }


@dataclass(frozen=True, kw_only=True)
class ConformanceCase:
    """One tiny model of a family, and the reference for its results.

    Attributes:
        name: for the report; unique in a package.
        architecture: the architecture that the family's config builder chooses: a key of its module
            map.
        config: content of the tiny model's ``config.json``: a few layers, a small vocabulary,
            heads that split over two ranks, a window shorter than the prompts. None for golden
            files, which bring theirs.
        reference: "transformers" for the class that transformers has for the config's
            ``model_type``; a folder with golden files (``docs/conformance.md`` gives their
            format); or a function from the config to a torch module.
        prompts: token ids of each prompt of text; random ones of several lengths if None. Golden
            files bring theirs.
        media: prompts with pictures, videos or sounds, of every kind that the family takes. Golden
            files bring theirs.
        kinds_elsewhere: of media that the family's own tests show, because they need what a tiny
            checkpoint lacks, such as a tokenizer.
        unused_weights: ends of the names of tensors that checkpoints have and the model has no use
            for, such as tables that follow from the config.
        defaults: what the original's config class has for keys that a config leaves out, where
            transformers has none; of keys in an object as "vision_config.layer_norm_eps".
        encodes: whether the model is an encoder, whose states or scores are compared, not logits.
    """

    name: str
    architecture: str
    config: Mapping[str, Any] | None = None
    reference: Reference = "transformers"
    prompts: Sequence[Sequence[int]] | None = None
    media: Sequence[MediaPrompt] = ()
    kinds_elsewhere: tuple[str, ...] = ()
    unused_weights: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    encodes: bool = False

    def __post_init__(self) -> None:
        golden = isinstance(self.reference, Path)
        if self.encodes and (golden or self.media):
            raise ValueError(f"case {self.name!r}: an encoder has no golden files, and no media")
        if golden and (self.config is not None or self.prompts is not None or self.media):
            raise ValueError(
                f"case {self.name!r}: golden files bring their config and prompts; leave out both"
            )
        if not golden and self.config is None:
            raise ValueError(f"case {self.name!r} needs a config, the content of a config.json")
        if self.defaults and self.reference == "transformers":
            raise ValueError(f"case {self.name!r}: transformers' config class has the defaults")


def load_cases(package: str) -> tuple[ConformanceCase, ...]:
    """The ``CASES`` of ``package``'s module ``conformance``.

    Raises:
        ConformanceError: there is no such module, or no case in it.
    """
    name = f"{package}.conformance"
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in (package, name):
            raise
        what = "the package" if error.name == package else f"a module {name}"
        raise ConformanceError(
            f"{what} cannot be found; the kit needs {name} with CASES, a list of "
            "engine_core.testing.ConformanceCase"
        ) from error
    cases = tuple(getattr(module, "CASES", ()))
    names = [getattr(case, "name", None) for case in cases]
    if not cases or not all(isinstance(case, ConformanceCase) for case in cases):
        raise ConformanceError(
            f"{name} needs CASES, a list of at least one ConformanceCase, has {cases!r}"
        )
    if len(set(names)) < len(names):
        raise ConformanceError(f"{name}: two of the CASES have one name: {names}")
    return cases
