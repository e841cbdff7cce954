"""The subject of the checks: an installed family, and one of its tiny models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, wraps
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from engine_core.checkpoint import Checkpoint, open_checkpoint
from engine_core.configs import HFConfig, ModelConfig
from engine_core.inputs import InputProcessor
from engine_core.registry import PluginReport, Registry, build_registry
from engine_core.runtime.loader import build_on_meta, load_weights
from engine_core.step_context import BuildContext
from engine_core.testing.case import ConformanceCase, ConformanceError, load_cases
from engine_core.testing.reference import Prompt, TinyCheckpoint
from engine_core.testing.tiny_model import Run, TinyModel, TokenSequence

T = TypeVar("T")
CPU = torch.device("cpu")


class BlockedError(Exception):
    """A prerequisite of a check fails; another check reports it.

    Attributes:
        check: the other one's name. A check is skipped only if this one has failed.
        cause: what fails.
    """

    def __init__(self, check: str, cause: Exception) -> None:
        super().__init__(
            f"test_{check} says why this cannot be checked ({type(cause).__name__}: {cause})"
        )
        self.check = check
        self.cause = cause


class NotApplicableError(Exception):
    """A check has nothing to look at in this model, and says why; nothing is wrong."""


def blocked_by(check: str) -> Callable[[Callable[[Any], T]], Callable[[Any], T]]:
    """Raise failures of the decorated function as :class:`BlockedError` of ``check``."""

    def decorate(function: Callable[[Any], T]) -> Callable[[Any], T]:
        @wraps(function)
        def wrapper(self: Any) -> T:
            try:
                return function(self)
            except BlockedError:
                raise
            except Exception as error:
                raise BlockedError(check, error) from error

        return wrapper

    return decorate


@dataclass(frozen=True)
class Family:
    """An installed family.

    Attributes:
        package: its import name.
        registry: of every installed plugin.
        report: on its own plugin.
        cases: what its author gave.
    """

    package: str
    registry: Registry
    report: PluginReport
    cases: tuple[ConformanceCase, ...]


def find_family(package: str) -> Family:
    """The family whose plugin is in ``package``.

    Raises:
        ConformanceError: no installed plugin is, or it is broken, or the package has no cases.
    """
    registry = build_registry()
    reports = [r for r in registry.reports if r.module.split(".")[0] == package]
    if not reports:
        raise ConformanceError(
            f"no entry point of group 'engine_core' names a module of {package!r}: is the package "
            "installed, and does its pyproject.toml have [project.entry-points.engine_core]? "
            f"Installed: {', '.join(report.module for report in registry.reports) or 'none'}"
        )
    if reports[0].error:
        raise ConformanceError(reports[0].error)
    return Family(package, registry, reports[0], load_cases(package))


class Subject:
    """One tiny model of a family. What its attributes need is made once, when it is asked for.

    Attributes:
        family: the installed family.
        case: the model.
        checkpoint: its files.
        failed: names of the checks that have failed; see :meth:`run`.
    """

    def __init__(self, family: Family, case: ConformanceCase, checkpoint: TinyCheckpoint) -> None:
        self.family = family
        self.case = case
        self.checkpoint = checkpoint
        self.failed: set[str] = set()

    def run(self, check: Callable[[Subject], None]) -> None:
        """Run ``check``, a function of :mod:`engine_core.testing.checks`.

        Raises:
            BlockedError: it cannot run, because a prerequisite fails that another check reports.
            NotApplicableError: there is nothing to check.
            Exception: it fails, or a prerequisite does that no failed check has reported.
        """
        try:
            check(self)
        except NotApplicableError:
            raise
        except BlockedError as error:
            if error.check in self.failed - {check.__name__}:
                raise
            self.failed.add(check.__name__)
            raise error.cause from None
        except Exception:
            self.failed.add(check.__name__)
            raise

    @property
    def folder(self) -> Path:
        """The checkpoint's."""
        return self.checkpoint.folder

    def open(self) -> Checkpoint:
        """The checkpoint, opened anew."""
        return open_checkpoint(self.folder)

    @cached_property
    @blocked_by("config_builder")
    def model_config(self) -> ModelConfig:
        """The config as the family's builder reads it."""
        return self.family.registry.model_config(HFConfig.from_folder(self.folder), self.folder)

    @cached_property
    @blocked_by("config_builder")
    def model_class(self) -> type:
        """The class that the module map names."""
        return self.family.registry.model_class(self.model_config.architecture)

    @cached_property
    @blocked_by("config_builder")
    def processor(self) -> InputProcessor | None:
        """An input processor of the family's that none of the models has."""
        return self.family.registry.input_processor(self.model_config)

    def on_meta(
        self, dtype: str = "float32", tp_size: int = 1, *, deterministic: bool = False
    ) -> nn.Module:
        """The model without weights, or the first rank's share of it."""
        context = BuildContext(
            dtype=getattr(torch, dtype),
            tp_size=tp_size,
            deterministic=deterministic,
            model_class=self.family.registry.model_class,
        )
        return build_on_meta(self.model_class, self.model_config, context)

    def tiny_model(self, network: nn.Module, device: torch.device = CPU) -> TinyModel:
        """``network``, loaded, ready to be run."""
        processor = self.family.registry.input_processor(self.model_config)
        return TinyModel(network, processor, device)

    def load(self, dtype: str = "float32", device: torch.device = CPU) -> TinyModel:
        """The model with its weights."""
        network = self.on_meta(dtype)
        load_weights(network, self.open(), str(self.folder), device)
        return self.tiny_model(network, device)

    @cached_property
    @blocked_by("weights")
    def model(self) -> TinyModel:
        """The model in float32."""
        return self.load()

    @blocked_by("weights")
    def loaded_anew(self) -> TinyModel:
        """The model in float32, before anything was computed by it."""
        return self.load()

    def sequences(self, model: TinyModel) -> list[TokenSequence]:
        """Every prompt with the reference's new tokens."""
        prompts = self.checkpoint.prompts
        return [model.sequence(p.sequence, len(p.token_ids), p.shown) for p in prompts]

    def run_alone(
        self,
        model: TinyModel,
        pieces: Callable[[TokenSequence], Sequence[tuple[int, int]]],
        *,
        recording: bool = False,
    ) -> list[Run]:
        """Each sequence by itself, in the pieces (start, count) that ``pieces`` cuts it into."""
        return [
            model.run(
                [sequence],
                [[(0, start, count)] for start, count in pieces(sequence)],
                recording=recording,
            )
            for sequence in self.sequences(model)
        ]

    @cached_property
    def computed(self) -> list[Run]:
        """Each sequence by itself: the prompt in one step, then token by token; recorded."""
        return self.run_alone(self.model, TokenSequence.incremental, recording=True)

    @cached_property
    @blocked_by("logits")
    def alone(self) -> list[Run]:
        """As :attr:`computed`, for what is compared with it."""
        return self.computed

    def continued(self, prompt: Prompt) -> tuple[list[int], list[dict[int, float]]]:
        """The model's own new tokens of a prompt alone, and all log-probabilities of each."""
        count = len(prompt.new_tokens)
        tokens, rows = self.model.greedy(prompt.token_ids, count, prompt.shown)
        return tokens, [dict(enumerate(row.tolist())) for row in rows.log_softmax(dim=-1)]

    @cached_property
    def greedy(self) -> list[tuple[list[int], list[dict[int, float]]]]:
        """As :meth:`continued`, of each of the checkpoint's prompts."""
        return [self.continued(prompt) for prompt in self.checkpoint.prompts]

    def require_run(self) -> None:
        """Block a check of a model that cannot even run its prompts."""
        assert len(self.alone) == len(self.checkpoint.prompts)

    @property
    def max_model_len(self) -> int:
        """Room for the longest prompt, continued twice, as far as the model is made for it."""
        wanted = max(len(p.token_ids) + 2 * len(p.new_tokens) for p in self.checkpoint.prompts)
        if self.model_config.may_exceed_length:
            return wanted
        return min(wanted, self.model_config.max_position_embeddings)
