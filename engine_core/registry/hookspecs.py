"""The whole contract between the core and a plugin: the hooks, and their version."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from engine_core.configs import ConfigBuilder
    from engine_core.inputs import InputProcessor

API_VERSION = "0.3"
"""A plugin states what it was written for, as ``requires_api = "0.3"``; minor versions only add."""

NAMESPACE = "engine_core"
"""Entry-point group and pluggy project name."""

hookspec = pluggy.HookspecMarker(NAMESPACE)
hookimpl = pluggy.HookimplMarker(NAMESPACE)


class HookSpecs:
    """The hooks that a plugin's module may implement; each is optional."""

    @hookspec
    def module_map(self) -> dict[str, str]:  # type: ignore[empty-body]
        """Map architecture names to ``"package.module.Class"``, imported when asked for."""

    @hookspec
    def config_builders(self) -> list[type[ConfigBuilder]]:  # type: ignore[empty-body]
        """List the classes that read this family's configs."""

    @hookspec
    def fallback_builders(self) -> list[type[ConfigBuilder]]:  # type: ignore[empty-body]
        """List the classes that read configs of architectures that no package claims."""

    @hookspec
    def input_processors(self) -> list[type[InputProcessor]]:  # type: ignore[empty-body]
        """List the classes that tell the engine more about a prompt than its tokens."""

    @hookspec
    def gguf_adapters(self) -> dict[str, str]:  # type: ignore[empty-body]
        """Map GGUF architecture names to ``"package.module.Class"`` of a GGUFAdapter."""

    @hookspec
    def quantization_schemes(self) -> dict[str, str]:  # type: ignore[empty-body]
        """Map names to ``"package.module.Class"`` of a QuantizationScheme."""

    @hookspec
    def tool_parsers(self) -> dict[str, str]:  # type: ignore[empty-body]
        """Map names to ``"package.module.Class"`` of a ToolParser, which reads calls of tools."""

    @hookspec
    def reasoning_parsers(self) -> dict[str, str]:  # type: ignore[empty-body]
        """Map names to ``"package.module.Class"`` of a ReasoningParser."""


HOOK_NAMES = tuple(name for name in vars(HookSpecs) if not name.startswith("_"))
