"""A checkpoint's tensors under transformers' own names, merged as its classes want them."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from engine_core.nn.loading import Weights, made_of, stacked_loader, take
from engine_core_transformers.merged import Merges


class Converted:
    """The names and operations by which transformers makes parameters of a checkpoint's tensors.

    Tensors that become one parameter together, such as those of a layer's experts, are kept until
    the last of them is there, and no longer.
    """

    def __init__(self, hf: PreTrainedModel, params: Mapping[str, Tensor], merges: Merges) -> None:
        """``params``: under the names that transformers gives them, before any was merged."""
        transforms = get_model_conversion_mapping(hf)
        self._hf = hf
        self._renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
        self._converters = [each for each in transforms if isinstance(each, WeightConverter)]
        self._by_pattern = {k: each for each in self._converters for k in each.source_patterns}
        self._params = dict(params)
        self._merges = merges
        self._prefix = hf.base_model_prefix
        self._waiting: dict[str, dict[str, list[tuple[str, Tensor]]]] = {}

    def load(self, weights: Weights, model: nn.Module) -> None:
        """Fill ``model``; tensors that transformers ignores are taken and not used."""
        ignored = [
            *(getattr(self._hf, "_keys_to_ignore_on_load_unexpected", None) or ()),
            r"rotary_emb\.inv_freq$",
            r"\.rotary_emb\.",
            r"\.(attn|attention)\.(masked_)?bias$",
        ]
        # A merged layer's name with the number of the part, which no other layer has.
        parts = {
            _numbered(path.rpartition(".")[2], part): (path.rpartition(".")[2], part)
            for path, part in self._merges.values()
        }
        put = stacked_loader(model, parts, rename=self._place)
        for name, tensor in weights:
            target, pattern = self._renamed(name)
            if pattern is None:
                if target not in self._params and any(re.search(p, target) for p in ignored):
                    take(tensor)
                    continue
                put(target, tensor)
                continue
            group = self._waiting.setdefault(target, {})
            group.setdefault(pattern, []).append((name, tensor))
            take(tensor)
            if self._complete(target, pattern, group):
                self._convert(target, pattern, put)
        for target, group in list(self._waiting.items()):
            self._convert(target, next(iter(group)), put)

    def _place(self, name: str) -> str:
        """The name of a parameter that became a part of another, with that one's and the part."""
        path, _, leaf = name.rpartition(".")
        if path not in self._merges:
            return name
        return f"{_numbered(*self._merges[path])}.{leaf}"

    def _renamed(self, name: str) -> tuple[str, str | None]:
        params = self._params
        target, pattern = rename_source_key(
            name, self._renamings, self._converters, self._prefix, params
        )
        if target not in params and name in params:
            return name, None
        if pattern is None:
            return target, None
        return target, pattern

    def _complete(
        self, target: str, pattern: str, group: dict[str, list[tuple[str, Tensor]]]
    ) -> bool:
        converter = self._by_pattern[pattern]
        if len(group) < len(converter.source_patterns):
            return False
        merged = "*" in pattern
        wanted = self._params[target].shape[0] if merged and target in self._params else 1
        return all(len(tensors) == wanted for tensors in group.values())

    def _convert(self, target: str, pattern: str, put: Any) -> None:
        converter = copy.deepcopy(self._by_pattern[pattern])
        sources = []
        for key, tensors in self._waiting.pop(target).items():
            for name, tensor in sorted(tensors, key=lambda item: dot_natural_key(item[0])):
                converter.add_tensor(target, name, key, tensor)  # type: ignore[arg-type]
                sources.append(tensor)
        made = converter.convert(target, model=self._hf, config=self._hf.config)
        with made_of(sources):
            for name, value in made.items():
                put(name, value[0] if isinstance(value, list) else value)


def _numbered(path: str, part: int) -> str:
    return f"{path}:{part}"
