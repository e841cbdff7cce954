"""A text model of one family inside a model of another, such as one that sees."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from engine_core.configs import HFConfig
from engine_core.errors import PluginLoadError
from engine_core.nn.loading import Weights
from engine_core.step_context import StepContextManager

# What the engine asks of a model beside its forward pass. What a text model lacks, the one around
# it lacks too.
_ASKED = frozenset(
    {
        "get_input_embeddings",
        "get_logits",
        "lm_head",
        "prepare_inputs_for_generation",
        "quantization_skip",
        "support_cuda_graph",
    }
)


class AroundTextModel(nn.Module):
    """A model that computes embeddings of its own, and leaves the rest to a text model inside.

    A family adds ``embed_media`` and ``load_weights``, which calls :meth:`load_text_weights`. Its
    config builder reads the text model's config with
    :func:`~engine_core.registry.text_model_config`.

    Attributes:
        language_model: the text model.
    """

    def __init__(
        self,
        text_config: HFConfig,
        ctx_mgr: StepContextManager,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        """The text model is built here, of the class that the registry has for it.

        Args:
            text_config: ``ModelConfig.text_model.hf_config``.
            ctx_mgr: as the model got it; and so the next two.
            dtype: element type of parameters.
            device: where they are made.

        Raises:
            PluginError: the class cannot be had.
        """
        super().__init__()
        context = ctx_mgr.build_ctx
        (architecture,) = text_config.architectures
        if context.model_class is None:
            raise PluginLoadError(
                f"the class of the text model inside ({architecture}) is not known: give "
                "BuildContext the registry's model_class"
            )
        self.language_model: nn.Module = context.model_class(architecture)(
            text_config, ctx_mgr, dtype=dtype, device=device
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self.language_model, name) if name in _ASKED else super().__getattr__(name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The text model's forward pass."""
        return self.language_model(*args, **kwargs)

    def load_text_weights(
        self, weights: Weights, prefix: str, load: Callable[[str, Tensor], None]
    ) -> None:
        """Have the text model load the tensors under ``prefix``, by its own names for them.

        Args:
            weights: the checkpoint's names and tensors.
            prefix: of the text model's, such as "language_model.".
            load: takes each of the others, such as a :func:`stacked_loader` does.
        """

        def inside() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:
                if name.startswith(prefix):
                    yield name.removeprefix(prefix), tensor
                else:
                    load(name, tensor)

        text: Any = self.language_model
        text.load_weights(inside())
