"""``engine-core generate``: run prompts on this machine, without a server."""

from __future__ import annotations

import dataclasses
import io
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic_core import to_json

from engine_core.cli.command import Model, OptionGroup, command, startup_line
from engine_core.cli.media import KINDS, FilePart, check_takes, content, named
from engine_core.cli.trace_layers import traced_layers
from engine_core.configs import EngineConfig, SamplingParams
from engine_core.errors import RequestError

if TYPE_CHECKING:
    from engine_core import LLM, CompletionOutput, RequestOutput

ENGINE_OPTIONS = OptionGroup(EngineConfig)
SAMPLING_OPTIONS = OptionGroup(
    SamplingParams,
    # The engine's seed is also that of requests without one, and there is but one --seed.
    skip=("seed",),
)

Prompt = str | list[int]


def _read_text(path: Path, argument: str) -> str:
    """The content of a file, or of standard input for "-"."""
    if str(path) == "-" and sys.stdin is None:
        raise typer.BadParameter(f"{argument}: standard input is closed")
    try:
        data = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
        return data.decode("utf-8-sig")  # editors may write a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{argument}: {path} cannot be read: {error}") from None


def _read_prompt() -> str:
    # As a text file is read: each line ends with a line feed, whatever ended it.
    return io.StringIO(_read_text(Path("-"), "PROMPT"), newline=None).read()


def _read_lines(path: Path) -> list[str]:
    # splitlines would also cut at form feeds and at Unicode's own separators.
    text = _read_text(path, "--prompt-file")
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    return [line for line in lines if line.strip()]


def _parse_token_ids(text: str) -> list[int]:
    try:
        return [int(item) for item in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"--token-ids: wants numbers like 1,2,3, got {text!r}") from None


def _collect_prompts(
    arguments: Sequence[str], file: Path | None, token_ids: Sequence[str]
) -> list[Prompt]:
    prompts: list[Prompt] = [_read_prompt() if item == "-" else item for item in arguments]
    if file is not None:
        prompts += _read_lines(file)
    prompts += [_parse_token_ids(item) for item in token_ids]
    if not prompts:
        raise typer.BadParameter("no prompt; give a PROMPT, --prompt-file or --token-ids")
    return prompts


def _conversation(
    prompt: Prompt, system: str | None, files: Sequence[FilePart]
) -> list[dict[str, Any]]:
    if not isinstance(prompt, str):
        which = f"--{files[0].kind} needs" if files else "--chat applies"
        raise typer.BadParameter(f"{which} a template to text; leave --token-ids out")
    messages = [] if system is None else [{"role": "system", "content": system}]
    return [*messages, {"role": "user", "content": content(prompt, files)}]


def _shown(completion: CompletionOutput, as_ids: bool) -> str:
    return " ".join(map(str, completion.token_ids)) if as_ids else completion.text


def _stream(outputs: Iterator[RequestOutput], as_ids: bool) -> RequestOutput:
    written = 0
    for output in outputs:
        text = _shown(output.outputs[0], as_ids)
        print(text[written:], end="", flush=True)
        written = len(text)
    print("\n", flush=True)
    return output


def _print_all(results: Sequence[RequestOutput], as_ids: bool) -> None:
    for number, result in enumerate(results, 1):
        for completion in result.outputs:
            label = f"{number}" if len(result.outputs) == 1 else f"{number}.{completion.index + 1}"
            print(f"[{label}] {_shown(completion, as_ids)}\n")


def _as_json(result: RequestOutput) -> str:
    values = dataclasses.asdict(result)
    metrics = result.metrics
    values["metrics"] = {
        "time_to_first_token": _since(metrics.first_token_time, metrics.arrival_time),
        "time": _since(metrics.finished_time, metrics.arrival_time),
        "num_cached_tokens": metrics.num_cached_tokens,
        "num_preemptions": metrics.num_preemptions,
        "media_tokens": metrics.media_tokens,
    }
    # JSON cannot express NaN and infinity.
    return to_json(values, inf_nan_mode="null").decode()


def _since(end: float | None, start: float | None) -> float | None:
    return None if end is None or start is None else end - start


def _statistics(results: Sequence[RequestOutput]) -> str:
    prompt_tokens = sum(len(result.prompt_token_ids) for result in results)
    generated = sum(len(each.token_ids) for result in results for each in result.outputs)
    times = [result.metrics for result in results]
    shown = sum(sum(sizes) for item in times for sizes in item.media_tokens.values())
    of_files = f" ({shown} of files)" if shown else ""
    parts = [f"{prompt_tokens} prompt tokens{of_files}", f"{generated} generated"]
    waits = [
        item.first_token_time - item.arrival_time
        for item in times
        if item.first_token_time is not None
    ]
    if waits:
        which = "" if len(waits) == 1 else " (median)"
        parts.append(f"time to first token {statistics.median(waits):.3f} s{which}")
    end = max((item.finished_time for item in times if item.finished_time is not None), default=0)
    if len(results) == 1:
        # The first token is the prompt's; the rate is that of decoding.
        seconds = _since(end, times[0].first_token_time) or 0
        count = generated - len(results[0].outputs)
    else:
        seconds = end - min(item.arrival_time for item in times)
        count = generated
    if seconds > 0 and count > 0:
        parts.append(f"{count / seconds:.1f} tokens/s")
    return ", ".join(parts)


def _run(
    llm: LLM,
    prompts: list[Prompt],
    conversations: list[list[dict[str, Any]]],
    sampling: SamplingParams,
    *,
    as_json: bool,
    as_ids: bool,
) -> list[RequestOutput]:
    if len(prompts) == 1 and sampling.n == 1 and not as_json:
        if conversations:
            return [_stream(llm.stream_chat(conversations[0], sampling), as_ids)]
        return [_stream(llm.stream(prompts[0], sampling), as_ids)]
    progress = len(prompts) > 1 and sys.stderr.isatty()
    if conversations:
        results = llm.chat(conversations, sampling, progress=progress)
    else:
        results = llm.generate(prompts, sampling, progress=progress)
    if as_json:
        for result in results:
            print(_as_json(result), flush=True)
    else:
        _print_all(results, as_ids)
    return results


def _check_can_trace(prompts: Sequence[Prompt], config: EngineConfig) -> None:
    if len(prompts) > 1:
        raise typer.BadParameter(f"--trace-layers takes one prompt, got {len(prompts)}")
    if config.num_ranks > 1:
        raise typer.BadParameter(
            "--trace-layers sees the layers of this process only; "
            "leave --tensor-parallel-size out, and --pipeline-parallel-size too"
        )


@command(SAMPLING_OPTIONS, ENGINE_OPTIONS)
def generate(
    model: Model,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="PROMPT", help="Prompts; - is all of standard input."),
    ] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File with one prompt a line; - is standard input."),
    ] = None,
    token_ids: Annotated[
        list[str] | None,
        typer.Option(metavar="1,2,3", help="A prompt as token ids; may be given again."),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Send each prompt as a user's message.")
    ] = False,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="System message; needs --chat.")
    ] = None,
    image: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Picture that each prompt shows before its text; may be given again. It makes the "
            "prompts a user's messages, as --chat does, and so do --video and --audio.",
        ),
    ] = None,
    video: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Video, as --image; videos come after pictures."),
    ] = None,
    audio: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Sound, as --image; sounds come last.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object for each prompt.")
    ] = False,
    trace_layers: Annotated[
        bool,
        typer.Option(
            "--trace-layers",
            help="Print what each layer gives in the first prefill and decode steps; one prompt.",
        ),
    ] = False,
    **options: Any,
) -> None:
    """Generate text: one prompt is streamed, several run as a batch.

    Text goes to stdout, statistics to stderr. A sampling option that is not given comes from the
    checkpoint's generation_config.json, or else is the default shown.
    """
    prompts = _collect_prompts(arguments or (), prompt_file, token_ids or ())
    given = zip(KINDS, (image, video, audio), strict=True)
    files = [FilePart(kind, path) for kind, paths in given for path in paths or ()]
    chat = chat or bool(files)
    if system is not None and not chat:
        raise typer.BadParameter("--system needs --chat")
    conversations = [_conversation(prompt, system, files) for prompt in prompts] if chat else []
    config = ENGINE_OPTIONS.build(options)
    if trace_layers:
        _check_can_trace(prompts, config)
    SAMPLING_OPTIONS.build(options)  # a wrong value is found before the model is loaded

    from engine_core import LLM

    with LLM(model, config) as llm, traced_layers(llm) if trace_layers else nullcontext():
        media = llm.engine.frontend.media
        check_takes(files, media.kinds, model, media.kinds_off)
        sampling = llm.default_sampling_params(**SAMPLING_OPTIONS.given(options))
        try:
            results = _run(
                llm,
                prompts,
                conversations,
                sampling,
                as_json=as_json,
                as_ids=config.skip_tokenizer_init,
            )
        except RequestError as error:
            raise named(error, conversations[0]) if files else error from None
        typer.echo(f"{_statistics(results)}\n{startup_line(llm.startup)}", err=True)
    failed = False
    for number, result in enumerate(results, 1):
        for completion in result.outputs:
            if completion.finish_reason == "error":
                typer.echo(f"engine-core: error: prompt {number}: {completion.error}", err=True)
                failed = True
    if failed:
        raise typer.Exit(1)
