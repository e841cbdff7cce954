"""Reports of a check: frozen models whose JSON Schema is part of the interface."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from engine_core.configs import CacheSpec

Severity = Literal["error", "warning", "info"]

HINTS = {
    "architecture-ambiguous": "Uninstall one of the plugins, or say which in a custom_module_map.",
    "architecture-unknown": "Install the plugin of this family; 'engine-core plugins' lists what "
    "is there.",
    "blocks-unpacked": "Set quantization='gguf', and measure with 'engine-core bench' which does "
    "better.",
    "chat-template-failed": "Completions work; try a chat with the roles that the template wants.",
    "chat-template-invalid": "Completions work; for chats pass a chat_template of your own.",
    "chat-template-missing": "Completions work; for chats pass a chat_template of your own.",
    "checkpoint-corrupt": "Download the named file again.",
    "checkpoint-not-found": "Check the path, or download what is missing.",
    "checkpoint-unsupported": "Take another format or conversion of the model.",
    "comparison-differs": "The first named part is where to look: its weights or its arithmetic.",
    "comparison-unavailable": "Compare with outputs of the original code through --against.",
    "config-invalid": "Correct the file that is named, else config.json, a key of which "
    "hf_overrides may set instead.",
    "device-unavailable": "Use device=cpu, or name the GPU that you plan for with --gpu.",
    "dtype-converted": "Set dtype to keep the stored type.",
    "eos-missing": "Generation ends at max_tokens; set stop_token_ids in the requests.",
    "fallback": "It is right, and slower than a package of its own: docs/write-a-plugin.md.",
    "generation-config-invalid": "Correct the key that is named, or remove it.",
    "generation-config-unread": "Remove the key to say that it is not wanted.",
    "kv-cache-scheme": "The cache takes twice the bytes that the checkpoint was calibrated for.",
    "kv-cache-slower": "Decode steps read half the cache; measure with 'engine-core bench' what "
    "prompts lose.",
    "length-cut": "Give the cache more memory, or set max_model_len to accept the shorter length.",
    "media-too-large": "Raise the option, or make items smaller with mm_processor_kwargs.",
    "memory-cache-too-small": "Give more memory, or set max_model_len to the length that fits, "
    "if the message names one.",
    "memory-weights-too-large": "Take a smaller dtype, a smaller model, more memory or more GPUs.",
    "model-failed": "Correct the line of the plugin that is named, or install another version of "
    "it.",
    "option-invalid": "Change the option that is named.",
    "plugin-broken": "Reinstall or remove the plugin; the others work without it.",
    "quantization-loses": "Compare with --deep, which measures it, or take more bits.",
    "quantization-settings": "It runs as the message says; compare outputs with those of the "
    "original code through --against.",
    "quantization-slower": "Measure with 'engine-core bench' whether bfloat16 does better.",
    "quantization-unsupported": "Take the model's unquantised checkpoint or a GGUF file of it.",
    "ranks-slower": "Measure with 'engine-core bench' which does better.",
    "scales-wrong": "The file was damaged or the quantisation failed; download it again, or take "
    "another checkpoint of the model.",
    "special-id-out-of-range": "Correct the id in config.json or generation_config.json.",
    "tied-head-unread": "Compare them with --deep; if they differ, set tie_word_embeddings to "
    "false with hf_overrides.",
    "tokenizer-larger-than-vocabulary": "Prompts that contain such a token are refused; check that "
    "tokenizer and weights belong together.",
    "tokenizer-unusable": "Add the tokenizer's files, name another with --tokenizer, or set "
    "skip_tokenizer_init and use token ids.",
    "weights-changed": "Copy the file again, or export the model again.",
    "weights-missing": "Check that config.json belongs to these weights and that no shard is "
    "missing.",
    "weights-not-finite": "The file was damaged or the training diverged; download it again.",
    "weights-unexpected": "Check that config.json belongs to these weights.",
    "weights-wrong": "Check that config.json belongs to these weights.",
}


if TYPE_CHECKING:
    Code = str
else:
    Code = Literal[tuple(HINTS)]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Problem(_Model):
    """One thing that is wrong, doubtful or worth knowing."""

    code: Code = Field(description="Stable name of this kind of problem.")
    severity: Severity = Field(
        description="error: it will not run, or not as asked; warning: it runs, with a loss; "
        "info: worth knowing."
    )
    message: str = Field(description="What is wrong: the culprit and what was found.")
    hint: str = Field(description="What to do about it.")
    names: tuple[str, ...] = Field(
        default=(), description="Every tensor concerned, where the message names only the first."
    )


class PluginInfo(_Model):
    """A plugin or module-map file."""

    name: str = Field(description="The entry point's name, or the path of a module-map file.")
    distribution: str | None = Field(description="The package that brought it; null for a file.")
    version: str | None = Field(description="That package's version.")
    error: str | None = Field(description="Why it was skipped; null if it works.")


class ModelInfo(_Model):
    """The plugin and class that run the model, and its config."""

    architecture: str = Field(description="Key into the module map.")
    plugin: str | None = Field(description="Name of the plugin or file that claims it.")
    model_class: str | None = Field(description="Dotted name of the class that runs it.")
    config: dict[str, Any] = Field(
        description="The parsed ModelConfig; hf_config in it is what the class is built from."
    )


class WeightsInfo(_Model):
    """Sizes and dtypes, read from the headers of the weight files."""

    num_tensors: int
    num_files: int
    total_bytes: int = Field(description="Bytes of all tensors as they will be read.")
    dtypes: dict[str, int] = Field(description="Element type -> number of tensors.")
    num_parameters: int | None = Field(
        description="Numbers in the model's parameters, shared ones once; null if not built."
    )
    scheme: str | None = Field(
        description="How the weights are quantised, and how many linears are; null if none is."
    )
    kept: dict[str, int] | None = Field(
        description="Of a GGUF file: block type -> number of tensors that stay in blocks."
    )
    unpacked: dict[str, list[str]] | None = Field(
        description="Of a GGUF file: block type -> tensors in blocks that become plain numbers."
    )


class TokenizerInfo(_Model):
    """The tokenizer, loaded."""

    kind: str = Field(description="The class that reads it.")
    vocab_size: int = Field(description="Tokens, added ones included.")
    bos_token_id: int | None
    eos_token_id: int | None = Field(description="The tokenizer's own; the model may have more.")
    chat_template: Literal["checkpoint", "family", "none"] = Field(
        description="Where chats get their template from."
    )


class CacheGroupInfo(_Model):
    """Layers with the same KV cache spec."""

    num_layers: int
    kind: str = Field(description="The class of their cache spec.")
    num_kv_heads: int | None = Field(description="Null if its spec does not say, as the next four.")
    head_dim: int | None
    v_head_dim: int | None
    dtype: str | None
    window: int | None = Field(description="Keys a query sees; null for all.")

    @classmethod
    def of(cls, spec: CacheSpec, num_layers: int) -> CacheGroupInfo:
        """The info of ``num_layers`` layers with ``spec``."""
        names = [name for name in cls.model_fields if name not in ("num_layers", "kind")]
        fields = {name: getattr(spec, name, None) for name in names}
        return cls(num_layers=num_layers, kind=type(spec).__name__, **fields)


class ReplicatedInfo(_Model):
    """Tensors of which a rank keeps more than an even share; alike ones of all layers together."""

    tensors: str = Field(description="Their name, with * for the number of the layer.")
    whole: bool = Field(
        description="Whether each rank keeps all of them; else a part is on several, such as a "
        "key-value head."
    )
    num_tensors: int
    excess_bytes: int = Field(description="What a rank keeps beyond an even share.")


class MemoryInfo(_Model):
    """Memory per rank: the weights, the KV cache and how many sequences fit.

    Of several stages they are the weights of the one with the most.
    """

    source: Literal["memory", "gpu", "machine"] = Field(
        description="Where the budget is from: the option memory, a named GPU or this machine."
    )
    gpu: str | None = Field(description="The named GPU.")
    num_ranks: int = Field(description="Processes or GPUs that share the model.")
    total_bytes: int = Field(description="Memory of the device, or the one given.")
    weights_bytes: int = Field(description="Parameters in the dtype that it runs with.")
    encoder_weights_bytes: int = Field(
        description="Those that only encode pictures, videos and sounds, if the family says."
    )
    encoder_cache_bytes: int = Field(description="Embeddings that are kept; 0 for a text model.")
    encoder_activation_bytes: int = Field(
        description="What the encoder takes while it computes as many, at most; 0 if not known."
    )
    rank_sums_bytes: int = Field(
        default=0, description="What a GPU keeps for sums over ranks; 0 for one rank and on CPUs."
    )
    kv_bytes_per_token: int = Field(
        description="What all layers together keep of one token, but for states."
    )
    state_bytes: int = Field(
        description="What layers with states keep in a block of each; a sequence needs one or two."
    )
    state_tokens: int = Field(
        description="Tokens from one state that is kept to the next; 0 without states."
    )
    block_size: int = Field(description="Tokens in a block of the cache.")
    cache_bytes: int = Field(description="What is left for the KV cache.")
    max_tokens: int = Field(description="Tokens that fit in it, of all sequences together.")
    max_model_len: int = Field(description="Longest sequence; 0 if none fits.")
    full_sequences: int = Field(description="Sequences of max_model_len that fit at once.")
    groups: tuple[CacheGroupInfo, ...]
    replicated: tuple[ReplicatedInfo, ...] = Field(
        default=(), description="What ranks do not share out evenly; the most bytes first."
    )


class MediaInfo(_Model):
    """A kind of media that the model takes, and the options allow."""

    kind: str = Field(description="image, video or audio.")
    max_tokens: int | None = Field(
        description="Most tokens of an item; null if there is no most, or the family does not say."
    )
    largest: str | None = Field(description="The largest item, in words; null as max_tokens.")
    max_items: int | None = Field(
        description="Most items of a prompt (limit_mm_per_prompt); null for no limit."
    )


class FusionInfo(_Model):
    """An epilogue of a linear, and for how many rows it is fused; see ``nn/epilogue.py``."""

    layers: str = Field(description="The layers that are alike, as model.layers.0-27.")
    linear: str = Field(description="The linear; two for what neighbours agree on.")
    epilogue: str = Field(description="The operations that follow its product.")
    rows: str = Field(description="Tokens in a step for which it is fused; empty for none.")
    reason: str | None = Field(description="Why it is not for others; null if it always is.")


class Difference(_Model):
    """How far one part of the forward pass is from the reference."""

    part: str = Field(description="embedding, layer 0, layer 1, ..., logits.")
    max_abs: float | None = Field(description="Largest absolute difference; null if not finite.")
    relative: float | None = Field(
        description="Largest norm of a token's difference over the norm of the token's reference."
    )
    differs: bool


class PromptComparison(_Model):
    """One prompt through both."""

    name: str
    num_tokens: int
    parts: tuple[Difference, ...] = Field(description="In the order of the forward pass.")
    first_difference: str | None = Field(description="The first part that differs.")
    first_wrong_token: int | None = Field(
        description="Index of the first generated token that differs; null if none does or none "
        "was compared."
    )


class Comparison(_Model):
    """The model's outputs against those of a reference."""

    reference: str = Field(description="What it was compared with.")
    dtype: str
    tolerance: float = Field(description="Relative difference above which a part differs.")
    same: bool
    prompts: tuple[PromptComparison, ...]


class QuantizationCost(_Model):
    """The next tokens' distribution with quantised weights, against that with plain ones."""

    scheme: str = Field(description="How the weights are quantised.")
    texts: bool = Field(description="Whether of texts; else of random tokens.")
    num_prompts: int
    num_tokens: int = Field(description="Positions that were compared.")
    mean_kl: float | None = Field(
        description="Mean Kullback-Leibler divergence from the plain weights' distribution, in "
        "nats; null if not finite."
    )
    equal_tokens: float = Field(description="Share of positions with the same likeliest token.")


class CheckReport(_Model):
    """Everything that a check found out. Its JSON is described by :meth:`json_schema`."""

    schema_version: Literal[1] = 1
    engine_version: str
    model: str = Field(description="The model as it was named.")
    path: str | None = Field(description="The folder or file that this is; null if none was found.")
    will_run: bool = Field(
        description="Whether no problem is an error, but for a comparison that differs."
    )
    exit_code: Literal[0, 1, 3, 4] = Field(
        description="0: it will run; 1: it will not; 3: it runs but differs from the reference; "
        "4: it runs, but the comparison asked for could not be made."
    )
    problems: tuple[Problem, ...] = Field(description="Errors first, then warnings, then infos.")
    device: str | None = Field(description="Where it would run.")
    dtype: str | None = Field(description="The element type that it would run with.")
    model_info: ModelInfo | None
    weights: WeightsInfo | None
    tokenizer: TokenizerInfo | None
    memory: MemoryInfo | None
    media: tuple[MediaInfo, ...] = Field(
        default=(), description="What it takes besides text; empty for a text model."
    )
    comparison: Comparison | None
    quantization_cost: QuantizationCost | None = Field(
        default=None, description="Only with a deep check of quantised weights."
    )
    fusions: tuple[FusionInfo, ...] | None = Field(
        default=None, description="Only if they were asked for and the model was built."
    )
    plugins: tuple[PluginInfo, ...]
    seconds: float = Field(description="How long the check took.")

    @property
    def errors(self) -> tuple[Problem, ...]:
        """The problems of severity error."""
        return tuple(problem for problem in self.problems if problem.severity == "error")

    @property
    def warnings(self) -> tuple[Problem, ...]:
        """The problems of severity warning."""
        return tuple(problem for problem in self.problems if problem.severity == "warning")

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """The JSON Schema (draft 2020-12) of :meth:`to_json`."""
        return cls.model_json_schema(mode="serialization")

    def to_json(self) -> str:
        """The report as JSON."""
        return json.dumps(_expressible(self.model_dump(mode="json")), indent=2, ensure_ascii=False)


def _expressible(value: Any) -> Any:
    """``value`` with escapes for what its strings have and UTF-8 has not."""
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {_expressible(key): _expressible(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_expressible(item) for item in value]
    return value
