"""The contract of a quantisation: which layers it takes, and what each keeps instead of numbers."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import nn

from engine_core.errors import EngineError, OptionError, PluginLoadError
from engine_core.nn.distributed import IndivisibleError
from engine_core.nn.embedding import VocabularyMethod, VocabularySplit
from engine_core.nn.linear import Linear, LinearMethod

if TYPE_CHECKING:
    from engine_core.checkpoint import Checkpoint
    from engine_core.nn.loading import LoadAccount

logger = logging.getLogger(__name__)

# Keys of config.json under which tools leave how they quantised the weights.
QUANTIZATION_KEYS = ("quantization_config", "compression_config")

ScaleKind = Literal["added", "multiplied", "divided"]
"""What is done with numbers beside codes, so that all must be finite, and also: not negative if
weights' codes are multiplied by them, positive if activations or a cache are divided by them."""


class QuantizationScheme:
    """One way to keep weights in fewer bits. A package offers subclasses.

    The hook ``quantization_schemes`` maps names to such classes. A name is asked for by
    ``EngineConfig.quantization``, or :meth:`condition` holds for a checkpoint.
    Each layer's :class:`LinearMethod` loads the packed tensors and multiplies by them.

    Attributes:
        converts_gguf: whether a GGUF file is converted to plain numbers before it is loaded.
        takes: which layers :meth:`linear_method` takes; the error that there is none says "no", and
            goes on with it.
        name: as in the hook.
        settings: the checkpoint's ``quantization_config``; None if the option asked for it.
        cache_settings: that which may say how the cache is scaled: the same, or, where the option
            asked for it, that of a checkpoint whose cache alone is quantised.
        quiet: whether :meth:`warn` says nothing, for a model that is not to run.
    """

    quiet = False
    converts_gguf: ClassVar[bool] = True
    takes: ClassVar[str] = "linear layer has a shape that it takes"

    def __init__(self, name: str, settings: Mapping[str, Any] | None = None) -> None:
        """Raise a :class:`ConfigError` for settings that are not supported."""
        self.name = name
        self.settings = self.cache_settings = settings

    @property
    def takes_weights(self) -> bool:
        """Whether any weights are quantised; of some checkpoints the cache alone is."""
        return True

    def warn(self, text: str) -> None:
        """Log how a model runs with its weights on this device."""
        if not self.quiet:
            logger.warning("quantization %s: %s", self.name, text)

    @classmethod
    def condition(cls, settings: Mapping[str, Any]) -> bool:
        """Whether a checkpoint with this ``quantization_config`` is of this scheme."""
        return False

    def check_device(self, device: torch.device) -> None:
        """Raise an :class:`OptionError` if the layers cannot run on ``device``."""

    def check_checkpoint(self, checkpoint: Checkpoint, model: str) -> None:
        """Raise an :class:`OptionError` if ``checkpoint``, called ``model``, has not what it takes.

        Only called where the option asks for the scheme.
        """

    def linear_method(self, name: str, layer: Linear) -> LinearMethod | None:
        """The method of one linear of the model, or None to leave it as it is.

        Args:
            name: its place in the model, such as ``model.layers.0.mlp.down_proj``.
            layer: on meta and plain; :attr:`Linear.weight` has this rank's shape.
        """
        raise NotImplementedError(f"{type(self).__name__} has no linear_method")

    def vocabulary_method(self, name: str, layer: VocabularySplit) -> VocabularyMethod | None:
        """The method that packs the embedding or the head; None to leave it as it is."""
        return None

    def prepare(self, model: nn.Module) -> None:
        """Give the layers of a model on meta their methods, before its tensors are looked for."""
        self.give_methods(model)

    def plain(self, checkpoint: Any) -> Any:
        """The tensors' headers as plain layers have them, for a scheme that leaves them plain.

        :meth:`match` is told which of these fill which parameters.
        """
        return checkpoint

    def numbers(self, checkpoint: Any) -> Any:
        """A checkpoint that is quantised so, with numbers in the place of codes.

        It has ``headers`` and ``weights()``. None if it cannot be had: then ``check-model --deep``
        compares nothing.
        """
        return None

    def scales(self, headers: Mapping[str, Any]) -> Mapping[str, ScaleKind]:
        """The checkpoint's tensors of scales by name, whose numbers ``check-model`` looks at.

        Only asked once the headers were matched.
        """
        return {}

    def remarks(self, headers: Mapping[str, Any]) -> Iterator[str]:
        """A line on each of the checkpoint's settings that is not followed, and what is done."""
        return iter(())

    def match(self, model: nn.Module, checkpoint: Checkpoint, account: LoadAccount) -> Checkpoint:
        """Look at which tensors fill which parameters; return the checkpoint to load from.

        The model is still on meta, and may be given methods here that depend on the tensors.
        """
        return checkpoint

    def match_dummy(self) -> None:
        """Raise an :class:`OptionError` if dummy weights will not do, for want of tensors."""

    def give_methods(self, model: nn.Module) -> list[Linear]:
        """Ask for each layer's method, and return the linears that got one.

        A linear whose weight another module shares stays as it is. So does, if the option asks for
        the scheme, what the model's class names in ``quantization_skip``: the layer or a module
        around it. Of weights that are quantised already the checkpoint decides.

        Raises:
            OptionError: the option asks for it, and it takes no layer at all; or a layer's packed
                numbers cannot be shared out to so many ranks.
            PluginLoadError: the scheme fails at a layer.
        """
        skip: Collection[str] = getattr(model, "quantization_skip", ())
        if self.settings is not None or not self.converts_gguf:
            skip = ()
        users = Counter(id(param) for m in model.modules() for param in m._parameters.values())
        taken: list[Linear] = []
        left: list[str] = []
        for name, module in model.named_modules():
            if not isinstance(module, Linear | VocabularySplit):
                continue
            skipped = any(f".{part}." in f".{name}." for part in skip)
            if isinstance(module, VocabularySplit):
                module.method = None if skipped else self.vocabulary_method(name, module)
                continue
            shared = users[id(module.weight)] > 1
            try:
                given = self.settings is not None and module.takes_codes
                asked = module.quantizable or given
                takes = asked and not (skipped or shared)
                method = self.linear_method(name, module) if takes else None
                if method is None:
                    left.append(name)
                    continue
                module.set_method(method)
            except EngineError:
                raise
            except IndivisibleError as error:
                raise OptionError(f"quantization {self.name!r}: {name}: {error}") from error
            except Exception as error:  # Of a package; nothing is known of what it may raise.
                raise PluginLoadError(
                    f"quantization {self.name!r}: {type(self).__module__}.{type(self).__name__} "
                    f"fails at {name}: {type(error).__name__}: {error}"
                ) from error
            taken.append(module)
        if not taken and self.settings is None and self.converts_gguf:
            raise OptionError(f"quantization {self.name!r}: no {self.takes}; leave it out")
        if left:
            logger.info("quantization %s leaves %d of %d linears as they are: %s", self.name,
                        len(left), len(left) + len(taken), ", ".join(left[:4]))  # fmt: skip
        return taken
