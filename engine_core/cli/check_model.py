"""``engine-core check-model``: whether a checkpoint will run, before it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine_core.cli.command import Model, OptionGroup, command
from engine_core.configs import EngineConfig
from engine_core.configs.engine import parse_bytes
from engine_core.errors import ConfigError

if TYPE_CHECKING:
    from engine_core.check import CheckReport
    from engine_core.check.report import MediaInfo

ENGINE_OPTIONS = OptionGroup(EngineConfig)
_MARKS = {"error": "ERROR", "warning": "warning", "info": "note"}
_OUTCOMES = {
    0: "It will run.",
    1: "It will not run.",
    3: "It runs, but its outputs are not those of the reference.",
    4: "It will run; the comparison that was asked for could not be made.",
}


def _task(pooling: Mapping[str, Any]) -> str:
    """The task of a model that generates no text, in words."""
    made = [f"{pooling['task']}, by {' and '.join(pooling['kinds'])} pooling"]
    if pooling["dense"]:
        made.append(f"{len(pooling['dense'])} dense")
    if pooling["task"] == "score":
        made.append("a sigmoid" if pooling["activation"] == "sigmoid" else "no activation")
    elif pooling["normalize"]:
        made.append("normalised")
    if pooling["cut"] is not None:
        made.append(f"cut to {pooling['cut']} numbers")
    if pooling["max_length"] is not None:
        made.append(f"texts of {pooling['max_length']} tokens")
    if pooling["default_prompt"] is not None:
        made.append(f"prompt {pooling['default_prompt']!r}")
    return ", ".join(made)


def _bytes(value: int) -> str:
    size, unit = float(value), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024:
            break
        size, unit = size / 1024, larger
    return f"{value} bytes" if unit == "bytes" else f"{size:.2f} {unit}"


def _rows(report: CheckReport) -> dict[str, str]:
    """The known facts about the model, title -> text."""
    rows = {"model": report.path or report.model}
    if report.model_info is not None:
        model = report.model_info
        rows["architecture"] = model.architecture
        if model.model_class is not None:
            rows["runs in"] = f"{model.model_class} (plugin {model.plugin})"
        config = model.config
        rows["config"] = (
            f"{config['num_layers']} layers, hidden {config['hidden_size']}, "
            f"{config['num_attention_heads']} heads, {config['num_key_value_heads']} key-value "
            f"heads of {config['head_dim']}, vocabulary {config['vocab_size']}, length "
            f"{config['max_position_embeddings']}"
        )
        if config.get("pooling"):
            rows["task"] = _task(config["pooling"])
    if report.weights is not None:
        weights = report.weights
        dtypes = ", ".join(f"{count} {dtype}" for dtype, count in weights.dtypes.items())
        rows["tensors"] = (
            f"{weights.num_tensors} in {weights.num_files} files, {_bytes(weights.total_bytes)}: "
            f"{dtypes}"
        )
        if weights.scheme is not None:
            rows["quantised"] = weights.scheme
        if weights.kept is not None and weights.unpacked is not None:
            kept = ", ".join(f"{count} {type_name}" for type_name, count in weights.kept.items())
            unpacked = ", ".join(
                f"{len(names)} {type_name} ({names[0]}{', ...' if names[1:] else ''})"
                for type_name, names in weights.unpacked.items()
            )
            rows["in blocks"] = f"kept: {kept or 'none'}; unpacked: {unpacked or 'none'}"
    if report.tokenizer is not None:
        tokenizer = report.tokenizer
        rows["tokenizer"] = (
            f"{tokenizer.vocab_size} tokens, chat template: {tokenizer.chat_template}"
        )
    if report.media:
        rows["takes"] = "; ".join(("text", *map(_media_text, report.media)))
    if report.dtype is not None:
        rows["runs as"] = f"{report.dtype} on {report.device}"
    if report.memory is not None:
        memory = report.memory
        where = {"gpu": memory.gpu, "memory": "the memory given", "machine": "this machine"}
        each = "" if memory.num_ranks == 1 else f", each of {memory.num_ranks} ranks"
        rows["memory"] = (
            f"{_bytes(memory.total_bytes)} ({where[memory.source]}{each}): weights "
            f"{_bytes(memory.weights_bytes)}, KV cache {_bytes(memory.cache_bytes)}"
        )
        if memory.rank_sums_bytes:
            rows["memory"] += f", sums over ranks {_bytes(memory.rank_sums_bytes)}"
        if memory.replicated:
            excess = sum(each.excess_bytes for each in memory.replicated)
            names = [
                f"{each.tensors}{'' if each.whole else ' (a part)'}" for each in memory.replicated
            ]
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            rows["replicated"] = f"{_bytes(excess)} of the weights: {', '.join(names[:4])}{more}"
        if report.media:
            rows["encoder"] = (
                f"weights {_bytes(memory.encoder_weights_bytes)} of these, cache "
                f"{_bytes(memory.encoder_cache_bytes)}, activations "
                f"{_bytes(memory.encoder_activation_bytes)}{each}"
            )
        rows["KV cache"] = "none: prompts are computed whole"
        if memory.groups:
            kinds = {group.dtype for group in memory.groups}
            codes = [name for name in ("int8", "float8_e4m3fn") if name in kinds]
            kept = f" (of {', '.join(codes)} with scales)" if codes else ""
            parts = []
            if memory.kv_bytes_per_token:
                parts.append(f"{_bytes(memory.kv_bytes_per_token)} a token{kept}")
            if memory.state_bytes:
                parts.append(f"{_bytes(memory.state_bytes)} a state")
            rows["KV cache"] = (
                f"{', '.join(parts)}, {memory.max_tokens} tokens: "
                f"{memory.full_sequences} sequences of {memory.max_model_len}"
            )
    return rows


def _media_text(media: MediaInfo) -> str:
    largest = "" if media.largest is None else f" of up to {media.largest}"
    tokens = "" if media.max_tokens is None else f" ({media.max_tokens} tokens)"
    number = "" if media.max_items is None else f", {media.max_items} in a prompt"
    return f"{media.kind}{largest}{tokens}{number}"


def _comparison_lines(report: CheckReport) -> list[str]:
    lines = []
    if report.quantization_cost is not None:
        cost = report.quantization_cost
        kl = "not finite" if cost.mean_kl is None else f"{cost.mean_kl:.5f}"
        tokens = f"{cost.num_tokens} {'' if cost.texts else 'random '}tokens"
        lines += [
            f"by {cost.scheme} instead of the same weights as numbers, in float32:",
            f"  the likeliest next token is the same after {cost.equal_tokens:.1%} of {tokens}, "
            f"mean KL {kl}",
        ]
    if report.comparison is None:
        return lines
    lines += [f"compared in {report.comparison.dtype} with {report.comparison.reference}:"]
    for prompt in report.comparison.prompts:
        last = prompt.parts[-1]
        apart = "not finite" if last.relative is None else f"{last.relative:.1e}"
        if prompt.first_difference is not None:
            verdict = f"differs first at {prompt.first_difference}"
        elif prompt.first_wrong_token is not None:
            verdict = f"generates another token at {prompt.first_wrong_token}"
        else:
            verdict = "the same"
        lines.append(f"  {prompt.name}: {verdict} ({last.part} apart by {apart})")
    return lines


def _fusion_lines(report: CheckReport) -> list[str]:
    if report.fusions is None:
        return []
    lines, layers = [f"fused on {report.device}, by tokens in a step:"], ""
    for fusion in report.fusions:
        if fusion.layers != layers:
            layers = fusion.layers
            lines.append(f"  {layers}")
        rows = fusion.rows or "never"
        if fusion.reason is not None:
            rows += f" (otherwise {fusion.reason})" if fusion.rows else f", {fusion.reason}"
        lines.append(f"    {fusion.linear}: {fusion.epilogue}: {rows}")
    return lines


def _lines(report: CheckReport) -> list[str]:
    rows = _rows(report)
    width = max(map(len, rows))
    lines = [f"{title:<{width}}  {text}" for title, text in rows.items()]
    lines += _fusion_lines(report)
    lines += _comparison_lines(report)
    for problem in report.problems:
        lines.append(f"{_MARKS[problem.severity]} {problem.code}: {problem.message}")
        lines.append(f"    {problem.hint}")
    lines.append(f"{_OUTCOMES[report.exit_code]} ({report.seconds:.1f} s)")
    return lines


@command(ENGINE_OPTIONS)
def check_model(
    model: Model,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Memory for weights and KV cache together, like 16GiB."),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Plan for a GPU of this name, like H100 or 'RTX 4090'."),
    ] = None,
    deep: Annotated[
        bool,
        typer.Option(
            "--deep", help="Load it and compare it with transformers, layer by layer, in float32."
        ),
    ] = False,
    against: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Load it and compare it with golden outputs."),
    ] = None,
    fusions: Annotated[
        bool, typer.Option("--fusions", help="List what is fused with each linear on its device.")
    ] = False,
    **options: Any,
) -> None:
    """Say whether a model will run, from its files' headers, and what is wrong if not.

    Exit code 0: it will run; 1: it will not; 2: wrong usage; 3: it runs but differs from the
    reference; 4: the comparison that was asked for could not be made.
    """
    config = ENGINE_OPTIONS.build(options)
    try:
        budget = None if memory is None else parse_bytes(memory)
    except ValueError as error:
        raise typer.BadParameter(f"--memory: {error}") from None

    from engine_core.check import check_model as check

    try:
        report = check(
            model, config, memory=budget, gpu=gpu, deep=deep, against=against, list_fusions=fusions
        )
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None
    print(report.to_json() if as_json else "\n".join(_lines(report)))
    raise typer.Exit(report.exit_code)
