"""The engine's settings, and the limits that its scheduler keeps."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from engine_core.configs.base import FrozenConfig, number
from engine_core.configs.dtypes import DType
from engine_core.errors import shown

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def parse_bytes(value: Any) -> Any:
    """``"4GiB"``, ``"500MB"`` or a plain number as bytes.

    Raises:
        ValueError: it is neither.
    """
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d{1,30}(?:\.\d{1,30})?)\s*([kmg]i?)?b?\s*", value.lower())
    if match is None:
        raise ValueError("a size is a number of bytes or like '500MB' or '4GiB'")
    return int(float(match[1]) * _UNITS[match[2] or ""])


def _paths(value: Any) -> Any:
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else value


def _number(value: Any) -> Any:
    # Pydantic would read true as 1 and bytes as digits.
    return number(value, refused=(bool, bytes))


_Number = BeforeValidator(_number)
KVCacheDType = Literal["auto", "fp8", "int8"]
ModelImpl = Literal["native", "transformers", "auto"]
MediaKind = Literal["image", "video", "audio"]
# The value of EngineConfig.quantization that keeps no blocks: the name of no scheme.
UNPACKED = "unpacked"
Bytes = Annotated[int, BeforeValidator(parse_bytes)]
Paths = Annotated[tuple[str, ...], BeforeValidator(_paths)]


class EngineConfig(FrozenConfig):
    """The engine's settings; the command line's options are made from these fields.

    The docstring of each field is its help text.
    """

    dtype: Literal["auto"] | DType = "auto"
    """Element type of weights and activations; auto is the checkpoint's own, or float32 on a CPU
    without bfloat16 instructions."""
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    """auto, cpu, cuda or cuda:N; auto is the GPU if there is one."""
    load_format: Literal["auto", "safetensors", "bin", "gguf", "dummy"] = "auto"
    """Which weight files to read; dummy makes random weights and reads none."""
    task: Literal["auto", "generate", "embed", "score"] = "auto"
    """The model's purpose: to generate text, to embed prompts as vectors, or (a cross encoder) to
    score pairs of texts; auto is what the checkpoint is made for. Any decoder can embed."""
    revision: str | None = Field(default=None, min_length=1)
    """Branch, tag or commit of a hub id; the hub's default if not set."""
    hf_overrides: dict[str, Any] = Field(default_factory=dict)
    """Keys of config.json to replace, as JSON."""
    tokenizer: str | None = Field(default=None, min_length=1)
    """Folder or hub id of a tokenizer to use in place of the model's."""
    skip_tokenizer_init: bool = False
    """Read no tokenizer: prompts and results are token ids."""
    max_model_len: Annotated[int | None, Field(gt=0), _Number] = None
    """Longest sequence, prompt and output together; the model's own if not set."""
    max_num_seqs: Annotated[int, Field(gt=0), _Number] = 256
    """Most sequences that run at once."""
    max_num_batched_tokens: Annotated[int, Field(gt=0), _Number] = 2048
    """Prompt tokens computed in one step; longer prompts are chunked."""
    block_size: Annotated[int | None, Field(gt=0), _Number] = None
    """Tokens in a block of the KV cache; 16 on a CPU and 64 on a GPU if not set."""
    kv_cache_memory: Annotated[Bytes | None, Field(gt=0), _Number] = None
    """Bytes for the KV cache, like 4GiB; a share of what is free if not set."""
    kv_cache_dtype: KVCacheDType = "auto"
    """Element type of keys and values in the KV cache: auto is that of the activations, or fp8 if a
    checkpoint's kv_cache_scheme says so; fp8 (e4m3) and int8 take about half of 16 bits, with a
    scale for each token and head, or fp8 with those that a quantised checkpoint has."""
    swap_space: Annotated[Bytes, Field(ge=0), _Number] = 0
    """Host memory per rank, like 4GiB, that keeps the KV cache of preempted sequences; with 0 it is
    computed again."""
    encoder_cache_tokens: Annotated[int, Field(ge=0), _Number] = 16384
    """Embeddings of pictures, videos and sounds that are kept on the device; also the most that one
    of them may have."""
    limit_mm_per_prompt: dict[MediaKind, Annotated[int, Field(ge=0)]] = Field(default_factory=dict)
    """Most pictures, videos and sounds of a prompt, as JSON like {"image": 4}; 0 refuses a kind. As
    many as the prompt has room for if not set."""
    mm_processor_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Settings of the family's processing of pictures, videos and sounds, as JSON; a request's own
    go before."""
    allowed_local_media_path: str | None = Field(default=None, min_length=1)
    """Folder below which pictures, videos and sounds may be read that a request names by file:
    addresses; none if not set."""
    allowed_media_domains: Paths = ()
    """Host, with its port if that is not the usual one, from which pictures, videos and sounds may
    be fetched; none if not set. No redirects are followed, and private addresses are refused."""
    mm_processor_cache_gb: Annotated[float, Field(ge=0, allow_inf_nan=False), _Number] = 4.0
    """Host memory in GiB, in each process that takes requests, for pictures, videos and sounds that
    are ready for the model: the same content is not processed again. 0 for none."""
    enable_prefix_caching: bool = True
    """Share the cached blocks of equal prompt beginnings."""
    eager: bool = False
    """Launch every kernel by itself, for debugging: no CUDA graphs, and on a CPU no recorded
    steps."""
    deterministic: bool = False
    """On GPUs: a request gets the same tokens whatever else is in its batch."""
    tensor_parallel_size: Annotated[int, Field(gt=0), _Number] = 1
    """Processes, or GPUs, that share the model."""
    pipeline_parallel_size: Annotated[int, Field(gt=0), _Number] = 1
    """Stages that the layers are shared out to, each of ``tensor_parallel_size`` processes."""
    enable_expert_parallel: bool = False
    """Of a mixture of experts each of these keeps whole experts, not a part of every expert."""
    rank_sums: Literal["auto", "nccl"] = "auto"
    """How these GPUs add up what each computed: auto has kernels reach the other GPUs' memory where
    they can, and NCCL add up elsewhere; nccl leaves all of it to NCCL."""
    distributed_executor: Literal["auto", "processes", "ray"] = "auto"
    """Where the processes of one model run: processes are all on this machine, ray places them on
    the machines of a Ray cluster, and auto takes Ray if this machine has too few GPUs and a cluster
    can be reached."""
    ray_address: str | None = Field(default=None, min_length=1)
    """host:port of the Ray cluster's head; if not set, the cluster that RAY_ADDRESS names or that
    runs on this machine."""
    quantization: str | None = Field(default=None, min_length=1)
    """Store weights with fewer bits: int8 or int4, made at load; on a GPU also fp8, made at load;
    gguf, which keeps a GGUF file's blocks. That is the default for one on a CPU, and unpacked
    turns them into numbers. Packages may add names. The quant_method of a quantised checkpoint's
    config.json asks for nothing more."""
    compile_processes: Annotated[int | None, Field(ge=0), _Number] = None
    """Processes that compile kernels beside a start on a GPU, unless all are kept from an earlier
    one; as many as there are cores, at most 32, if not set. With 0 each is compiled where it is
    first launched."""
    guided_compile_timeout: Annotated[float, Field(gt=0), _Number] = 10.0
    """Seconds that the trial of a guided text's grammar may take, in a process of its own."""
    seed: Annotated[int, Field(ge=0, lt=2**63), _Number] = 0
    """Seed of dummy weights and of requests without one."""
    model_impl: ModelImpl = "auto"
    """native runs families of installed packages, transformers has that library's own code run the
    model (package engine-core-transformers), and auto does so if no package knows the family."""
    custom_module_map: Paths = ()
    """Python files with MODULE_MAP and CONFIG_BUILDERS; run with your rights."""
    plugin_errors: Literal["report", "strict"] = "report"
    """Whether a broken plugin is reported and skipped, or (strict) its error is raised."""

    @field_validator("hf_overrides")
    @classmethod
    def _as_in_a_file(cls, value: dict[str, Any]) -> dict[str, Any]:
        try:
            json.dumps(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"no config.json can hold this: {error}") from None
        return value

    @field_validator("allowed_media_domains")
    @classmethod
    def _hosts(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for host in value:
            if not re.fullmatch(r"[a-zA-Z0-9:._-]+", host) or host.endswith(":"):
                raise ValueError(f"{host!r} is no host, such as 'media.example.org'")
        return value

    @field_validator("allowed_local_media_path")
    @classmethod
    def _folder(cls, value: str | None) -> str | None:
        try:
            is_folder = value is None or Path(value).is_dir()
        except OSError:  # too long
            is_folder = False
        if not is_folder:
            raise ValueError(f"{shown(value)} is no folder")
        return value

    @property
    def num_ranks(self) -> int:
        """Processes that share the model: those of all stages."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @model_validator(mode="after")
    def _one_tokenizer_or_none(self) -> Self:
        if self.tokenizer is not None and self.skip_tokenizer_init:
            raise ValueError(
                f"tokenizer names {self.tokenizer!r}, and skip_tokenizer_init says that none is "
                "read; leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _coded_cache(self) -> Self:
        if self.kv_cache_dtype == "auto":
            return self
        if self.deterministic:
            raise ValueError(
                f"deterministic and kv_cache_dtype {self.kv_cache_dtype!r}: batch-invariant "
                "attention reads no cache of 8 bits; leave one of them out"
            )
        if self.block_size is not None and self.block_size % 4:
            raise ValueError(
                f"kv_cache_dtype {self.kv_cache_dtype!r} needs a block_size that is a multiple of "
                f"4, for its scales, not {self.block_size}"
            )
        return self

    @model_validator(mode="after")
    def _ranks_for_experts(self) -> Self:
        if self.enable_expert_parallel and self.tensor_parallel_size == 1:
            raise ValueError(
                "enable_expert_parallel shares experts out to several processes, and "
                "tensor_parallel_size is 1; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _ranks_for_ray(self) -> Self:
        if self.distributed_executor == "ray" and self.num_ranks == 1:
            raise ValueError(
                "distributed_executor 'ray' places the processes that share a model, and with "
                "tensor_parallel_size 1 and pipeline_parallel_size 1 there is one; set one of "
                "them, or leave it out"
            )
        if self.distributed_executor == "processes" and self.ray_address is not None:
            raise ValueError(
                f"ray_address names {self.ray_address!r}, and distributed_executor 'processes' "
                "uses no Ray; leave one of them out"
            )
        return self


class SchedulerConfig(FrozenConfig):
    """Limits that the scheduler keeps.

    Attributes:
        max_num_seqs: rows of the persistent batch: sequences that run at once.
        max_num_batched_tokens: tokens of prompts computed in one step. Each running sequence may
            add the one token that it decodes, so that a step has at most
            ``max_num_batched_tokens + max_num_seqs``.
        max_model_len: tokens of one sequence, prompt and output together.
        max_repeat: how often one plan may be replayed when every row decodes.
        num_swap_blocks: blocks of host memory a cache group, for what preempted sequences held.
        encoder_cache_tokens: embeddings of pictures, videos and sounds that are kept on the device.
    """

    max_num_seqs: int = Field(gt=0)
    max_num_batched_tokens: int = Field(gt=0)
    max_model_len: int = Field(gt=0)
    max_repeat: int = Field(default=1, gt=0)
    num_swap_blocks: int = Field(default=0, ge=0)
    encoder_cache_tokens: int = Field(default=16384, ge=0)
