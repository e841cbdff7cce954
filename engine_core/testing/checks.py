"""The checks. Each raises :class:`ConformanceError` with what differs, where and by how much."""

from __future__ import annotations

import copy
import importlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from engine_core.configs import EngineConfig, HFConfig, KVCacheSpec, ModelConfig, SamplingParams
from engine_core.engine import LLM
from engine_core.errors import (
    ConfigError,
    EngineError,
    OptionError,
    UnknownArchitectureError,
    WeightsMismatchError,
)
from engine_core.nn import Attention
from engine_core.nn.distributed import IndivisibleError
from engine_core.nn.loading import materialize
from engine_core.runtime.loader import check_weights
from engine_core.runtime.source import check_deterministic
from engine_core.steps import RequestOutput
from engine_core.testing.case import ConformanceError
from engine_core.testing.reference import NEW_TOKENS, Prompt, TinyCheckpoint
from engine_core.testing.state import changes, globals_of, kept_by, snapshot
from engine_core.testing.subject import Family, NotApplicableError, Subject
from engine_core.testing.synchronisation import no_synchronisation
from engine_core.testing.tiny_model import PagedCache, Run, Step, TokenSequence
from engine_core.testing.trace import TOLERANCE, Trace, difference, explain

_CHUNKS = (1, 7)
_BLOCK_SIZES = (1, 7)
# Of the log-probabilities' own spread; tiny models of four families lose 2.5 to 3 %.
_INT8_TOLERANCE = 0.1
# Of the logits' own spread. bfloat16 has 8 bits: the layers of tiny models lose 1 to 3 %.
_BFLOAT16_TOLERANCE = 0.1
_MOST_LOGPROBS = 1000
# Tokens of a prompt that is longer than those a model was trained with.
_LONGEST = 256
# Where only rounding differs, it may take many tokens until one changes.
_DETERMINISTIC_TOKENS = 4 * NEW_TOKENS


def every_architecture_has_a_case(family: Family) -> None:
    """No architecture of the module map goes unchecked."""
    cases = {case.architecture for case in family.cases}
    unchecked = sorted(set(family.report.architectures) - cases)
    if unchecked:
        raise ConformanceError(
            f"{family.package}.conformance has no case for {', '.join(unchecked)}, which the "
            "module map offers"
        )


def config_builder(subject: Subject) -> None:
    """One builder matches, leaves its input alone, and describes the model as it is built."""
    family, case = subject.family, subject.case
    given = HFConfig.from_folder(subject.folder)
    _claims_no_other(family)
    untouched = copy.deepcopy(given)
    config = family.registry.model_config(given, subject.folder)
    if given != untouched:
        keys = {*given, *untouched}
        changed = [key for key in sorted(keys) if _item(given, key) != _item(untouched, key)]
        raise ConformanceError(
            f"the config builder changes the config that it is given ({', '.join(changed)}); it "
            "must work on a copy, such as hf_config.to_dict()"
        )
    if config.architecture != case.architecture:
        raise ConformanceError(
            f"the config builder calls this model {config.architecture!r}, the case "
            f"{case.architecture!r}"
        )
    owner = family.registry.architectures.get(config.architecture)
    if owner != family.report.name:
        raise ConformanceError(
            f"architecture {config.architecture!r} belongs to {owner!r}, not to this family's "
            f"plugin {family.report.name!r}"
        )
    network = subject.on_meta()
    if case.encodes:  # nothing of its layers is known
        return
    model = subject.tiny_model(network)
    found: dict[str, tuple[Any, Any]] = {
        "num_layers": (config.num_layers, len(model.layers) or len(model.attention))
    }
    # Layers that keep states may have heads of another kind.
    attention = [layer for layer in model.attention if isinstance(layer, Attention)]
    for name, attribute in (
        ("num_key_value_heads", "num_kv_heads"),
        ("num_attention_heads", "num_heads"),
        ("head_dim", "head_dim"),
    ):
        if attention:
            built = {getattr(layer, attribute) for layer in attention}
            found[name] = ({getattr(config, name)}, built)
    for name, (stated, built) in found.items():
        if stated != built:
            raise ConformanceError(
                f"ModelConfig.{name} is {stated}, but the model is built with {built}"
            )


def _item(config: HFConfig, key: str) -> tuple[bool, Any]:
    return key in config, config.get(key)


def _claims_no_other(family: Family) -> None:
    """No builder claims a config that no family has."""
    stranger = HFConfig(architectures=["NobodysForCausalLM"], model_type="nobodys")
    plugin = importlib.import_module(family.report.module)
    for builder in getattr(plugin, "config_builders", list)():
        if builder.condition(stranger):
            raise ConformanceError(
                f"{builder.__name__}.condition claims a config of architectures "
                "['NobodysForCausalLM'], model_type 'nobodys': no other family could be read"
            )
    try:
        family.registry.model_config(stranger)
    except UnknownArchitectureError:
        return
    raise ConformanceError("a config of architectures ['NobodysForCausalLM'] finds a builder")


class _Headers:
    """A checkpoint's tensors without their data, for a load on the meta device."""

    def __init__(self, headers: Mapping[str, Any]) -> None:
        self.headers = headers

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        raise AssertionError("a check of names reads no data")


def weights(subject: Subject) -> None:
    """Every tensor is asked for, every parameter filled, and each mistake is refused by name."""
    model = subject.on_meta()
    headers = subject.open().headers
    check_weights(model, _Headers(headers), str(subject.folder))
    _check_unknown(model, headers, subject.case.unused_weights)
    _check_passed_over(model, headers, subject.checkpoint)
    unused: list[str] = []
    used: list[str] = []
    for name in headers:
        if name.endswith(subject.case.unused_weights):
            continue
        rest = {key: value for key, value in headers.items() if key != name}
        (unused if _refusal(model, rest) is None else used).append(name)
    for name in _suspects(used, lambda names: _taken_by_other_names(model, headers, names)):
        raise ConformanceError(
            f"the tensor {name!r}, renamed to 'not_{name}', is loaded all the same or not "
            "reported as unexpected; load_weights must leave unknown names to "
            "load_stacked_weights"
        )
    for name in _suspects(used, lambda names: _taken_in_other_shapes(model, headers, names)):
        shape = headers[name].shape
        raise ConformanceError(
            f"the tensor {name!r} with shape {list(_wrong_shape(shape))} in place of "
            f"{list(shape)} is not refused by name; give tensors to load_weight as they are"
        )
    if unused:
        raise ConformanceError(
            f"{', '.join(unused)} of the checkpoint can be left out and nobody notices: the model "
            "does not use it. If it has no meaning for the results, name it in the case's "
            "unused_weights"
        )
    # Failures that need real data are reported by this check, too.
    subject.load()


def _suspects(
    names: Sequence[str], taken: Callable[[Sequence[str]], Sequence[str]]
) -> Iterator[str]:
    """Names of tensors that a mistake of theirs does not have refused, when no other has one.

    All have it together first: what is refused by name there needs no load of its own.
    """
    try:
        left = taken(names)
    except EngineError:  # Together they are more than the family's load_weights can take.
        left = names
    for name in left:
        yield from taken([name])


def _taken_by_other_names(
    model: torch.nn.Module, headers: Mapping[str, Any], names: Sequence[str]
) -> list[str]:
    given = {f"not_{name}" if name in names else name: headers[name] for name in headers}
    refusal = _refusal(model, given)
    unexpected = refusal.unexpected if refusal is not None else ()
    return [name for name in names if f"not_{name}" not in unexpected]


def _taken_in_other_shapes(
    model: torch.nn.Module, headers: Mapping[str, Any], names: Sequence[str]
) -> list[str]:
    wrong = {n: replace(headers[n], shape=_wrong_shape(headers[n].shape)) for n in names}
    refusal = _refusal(model, {**headers, **wrong})
    said = refusal.wrong if refusal is not None else ()
    if len(names) == 1:
        return [name for name in names if not any(name in message for message in said)]
    # A name may be a part of another one, whose message would stand for both.
    return [name for name in names if not any(each.startswith(f"{name}: ") for each in said)]


def _wrong_shape(shape: Sequence[int]) -> tuple[int, ...]:
    return (shape[0] + 1, *shape[1:])


def _check_unknown(
    model: torch.nn.Module, headers: Mapping[str, Any], unused: tuple[str, ...]
) -> None:
    """Tensors that a checkpoint might have beside its own are refused: scales, biases."""
    header = next(iter(headers.values()))
    used = [name for name in headers if not name.endswith(unused)]
    stems = [name.removesuffix(".weight") for name in used if name.endswith(".weight")]
    unknown = [f"{stem}.{leaf}" for stem in stems for leaf in ("bias", "scales", "lora_A.weight")]
    unknown += [f"{name}_scale" for name in used]
    added = {name: header for name in unknown if name not in headers}
    refusal = _refusal(model, {**headers, **added})
    unexpected = refusal.unexpected if refusal is not None else ()
    swallowed = sorted(set(added) - set(unexpected))
    if swallowed:
        raise ConformanceError(
            f"{swallowed[0]!r} beside the checkpoint's own tensors is not reported as unexpected "
            f"({len(swallowed)} of {len(added)} such names are not): a checkpoint that needs it "
            "would give wrong results. Ignore names that checkpoints are known to have, and no "
            "others"
        )


def _check_passed_over(
    model: torch.nn.Module, headers: Mapping[str, Any], checkpoint: TinyCheckpoint
) -> None:
    """Tensors that transformers' class ignores, because published checkpoints have them, are taken.

    The reference's own state dict lacks them, so nothing else shows them to the family.
    """
    header = next(iter(headers.values()))
    added = dict.fromkeys(checkpoint.passed_over, header)
    refusal = _refusal(model, {**headers, **added})
    refused = sorted(set(refusal.unexpected) & set(added)) if refusal is not None else []
    if refused:
        raise ConformanceError(
            f"{', '.join(refused)} would be refused, and {checkpoint.source} of transformers "
            "ignores it (_keys_to_ignore_on_load_unexpected) because published checkpoints have "
            "it. Name its end in unused_weights of a RotaryCausalLM, or in ignore= of "
            "load_stacked_weights"
        )


def _refusal(model: torch.nn.Module, headers: Mapping[str, Any]) -> WeightsMismatchError | None:
    try:
        check_weights(model, _Headers(headers), "the checkpoint")
    except WeightsMismatchError as error:
        return error
    return None


def logits(subject: Subject) -> None:
    """Logits and greedy tokens are the reference's."""
    checkpoint = subject.checkpoint
    _check_window(subject)
    for prompt, run in zip(checkpoint.prompts, subject.computed, strict=True):
        ours, theirs = run.logits[0], prompt.logits
        if ours.shape != theirs.shape:
            raise ConformanceError(
                f"prompt {prompt.name!r}: logits of shape {list(ours.shape)}, those of "
                f"{checkpoint.source} have {list(theirs.shape)}"
            )
        apart, position = difference(ours, theirs)
        if apart > TOLERANCE:
            raise ConformanceError(
                f"prompt {prompt.name!r}: logits differ from {checkpoint.source} by "
                f"{apart:.2g} ({TOLERANCE:.0e} is allowed), first at "
                f"{_position(position, len(prompt.token_ids))}. "
                + place(run, prompt, checkpoint.prefix)
                + _hint(subject, prompt)
            )
        chosen = tuple(ours[len(prompt.token_ids) - 1 :].argmax(dim=-1).tolist())
        if chosen != prompt.new_tokens and not _tied(prompt.step_logits):
            raise ConformanceError(
                f"prompt {prompt.name!r}: greedy tokens {chosen}, those of {checkpoint.source} "
                f"are {prompt.new_tokens}"
            )


def place(run: Run, prompt: Prompt, prefix: str) -> str:
    """The first layer and module that differ from the reference's."""
    if prompt.trace is None:
        return "Golden files hold no hidden states, so the layer cannot be named."
    return _explain(run, 0, prompt.trace, prefix)


def _explain(run: Run, place: int, theirs: Trace, prefix: str = "") -> str:
    """As ``explain`` does, of a run that may have to be computed once more for it."""
    recorded = run.recorded()
    once, again = run.logits[place], recorded.logits[place]
    if not torch.allclose(again, once, rtol=0, atol=TOLERANCE, equal_nan=True):
        return (
            "The layer cannot be named: computed once more, with each module listened to, the same "
            "steps give other logits. The model keeps something of what it computed before, or a "
            "module gives something else where its parts run one by one."
        )
    return explain(recorded.trace(place), theirs, prefix)


def _hint(subject: Subject, prompt: Prompt) -> str:
    """The end of a message: where to look in a prompt that shows something."""
    if prompt.shown is None or prompt.inputs_embeds is None:
        return ""
    ours = subject.model.first_input(prompt.token_ids, prompt.shown)
    if ours is None or difference(ours, prompt.inputs_embeds)[0] > TOLERANCE:
        return " test_media_embeddings says what is wrong before the first layer."
    return (
        " What goes into the first layer is the reference's: look at positions, that is at "
        "token_state and row_state and at what the model makes of them."
    )


def _check_window(subject: Subject) -> None:
    """A window that no prompt reaches is not checked."""
    longest = max(len(prompt.sequence) for prompt in subject.checkpoint.prompts)
    for spec in subject.model.groups:
        window = spec.window if isinstance(spec, KVCacheSpec) else None
        if window is not None and window >= longest:
            raise ConformanceError(
                f"the sliding window of {window} is longer than every prompt ({longest} "
                "tokens with what follows), so nothing shows it; shorten it in the case's config"
            )


def _tied(rows: Tensor) -> bool:
    best = rows.topk(2, dim=-1).values
    return bool((best[:, 0] - best[:, 1] < 2 * TOLERANCE).any())


def _position(position: int, prompt_len: int) -> str:
    if position < prompt_len:
        return f"position {position} of its {prompt_len} tokens"
    return f"position {position}, which is decode step {position - prompt_len + 1}"


def check_same(subject: Subject, number: int, run: Run, place: int, how: str) -> None:
    """Compare sequence ``number``, at ``place`` in ``run``, with the same sequence alone."""
    prompt = subject.checkpoint.prompts[number]
    alone = subject.alone[number]
    apart, position = difference(run.logits[place], alone.logits[0])
    if apart > TOLERANCE:
        raise ConformanceError(
            f"prompt {prompt.name!r} {how}: logits differ by {apart:.2g} from those that it has "
            f"alone, its prompt at once and then token by token ({TOLERANCE:.0e} is allowed), "
            f"first at {_position(position, len(prompt.token_ids))}. "
            + _explain(run, place, alone.trace(0))
        )


def _check_alone(subject: Subject, runs: Sequence[Run], how: str) -> None:
    for number, run in enumerate(runs):
        check_same(subject, number, run, 0, how)


def chunked_prefill(subject: Subject) -> None:
    """A prompt may be computed in pieces of any size."""
    for size in _CHUNKS:
        runs = subject.run_alone(subject.model, lambda sequence, size=size: sequence.chunks(size))  # type: ignore[misc]
        _check_alone(subject, runs, f"in chunks of {size}")


def recomputation(subject: Subject) -> None:
    """Tokens computed together are those decoded one by one: what a preempted request needs."""
    runs = subject.run_alone(subject.model, lambda sequence: [(0, len(sequence.token_ids))])
    _check_alone(subject, runs, "with what was decoded after it, in one step")


def batching(subject: Subject) -> None:
    """Compare a sequence alone with the same one beside others."""
    model = subject.model
    sequences = subject.sequences(model)
    pieces = [sequence.incremental() for sequence in sequences]
    ways = {
        "batched with the others": pieces,
        # Each begins a step later than the one before.
        "batched so that some decode while others begin": [
            [(0, 0)] * index + each for index, each in enumerate(pieces)
        ],
        "batched with the others, one token of each a step": [s.chunks(1) for s in sequences],
    }
    for how, way in ways.items():
        run = model.run(sequences, _side_by_side(way))
        for number in range(len(sequences)):
            check_same(subject, number, run, number, how)


def _side_by_side(pieces: Sequence[Sequence[tuple[int, int]]]) -> list[Step]:
    """The next piece (start, count) of each sequence in one step; decode rows come first."""
    steps: list[Step] = []
    for step in range(max(map(len, pieces))):
        rows = [(n, *piece[step]) for n, piece in enumerate(pieces) if step < len(piece)]
        steps.append(sorted((row for row in rows if row[2]), key=lambda row: row[2] != 1))
    return [step for step in steps if step]


def block_sizes(subject: Subject) -> None:
    """The cache's block size does not matter."""
    model = subject.model
    for size in _BLOCK_SIZES:
        for number, sequence in enumerate(subject.sequences(model)):
            steps = [[(0, start, count)] for start, count in sequence.incremental()]
            run = model.run([sequence], steps, block_size=size)
            check_same(subject, number, run, 0, f"with cache blocks of {size}")


def _last_step(sequences: Sequence[TokenSequence]) -> Step:
    """The last token of each."""
    return [(n, len(s.token_ids) - 1, 1) for n, s in enumerate(sequences)]


def no_state(subject: Subject) -> None:
    """Steps leave nothing behind on the model: rows come and go, and a graph replays no Python."""
    subject.require_run()
    model = subject.load()
    package = subject.family.package
    before = kept_by(model.processor) | globals_of(package)
    sequences = subject.sequences(model)
    found = changes(model.network, before, kept_by(model.processor) | globals_of(package))
    if found:
        raise ConformanceError(
            f"a prompt changes the input processor: {', '.join(found)}. What holds for a prompt is "
            "in the ProcessedPrompt: others are processed at the same time, or never"
        )
    steps = _side_by_side([each.incremental() for each in sequences])
    before = snapshot(model.network) | globals_of(package)
    model.run(sequences, steps)
    after = snapshot(model.network) | globals_of(package)
    found = changes(model.network, before, after)
    if found:
        raise ConformanceError(
            f"a step changes the model itself: {', '.join(found)}. What a step needs comes from "
            "its context; what holds for a request is row state, from the input processor"
        )


@torch.inference_mode()
def no_host_synchronisation(subject: Subject) -> None:
    """A decode step reads no tensor's values, and uploads none."""
    subject.require_run()
    model = subject.model
    sequences = subject.sequences(model)
    cache = PagedCache(model, sequences, 16)
    context = cache.context(_last_step(sequences))
    with no_synchronisation():
        model.logits(cache, context)


@torch.inference_mode()
def no_host_synchronisation_on_a_gpu(subject: Subject) -> None:
    """On a GPU, CUDA's own check finds no wait in a decode step."""
    model = subject.load(device=torch.device("cuda"))
    sequences = subject.sequences(model)
    cache = PagedCache(model, sequences, 16)
    context = cache.context(_last_step(sequences))
    # The first time, kernels are compiled and libraries set up.
    for mode in ("default", "error"):
        torch.cuda.synchronize()
        with warnings.catch_warnings():
            # That this mode of torch's does not yet see everything.
            warnings.simplefilter("ignore", UserWarning)
            torch.cuda.set_sync_debug_mode(mode)
        try:
            model.logits(cache, context)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def gpu_logits(subject: Subject) -> None:
    """A GPU's kernels give the CPU's logits."""
    model = subject.load(device=torch.device("cuda"))
    runs = subject.run_alone(model, TokenSequence.incremental)
    _check_alone(subject, runs, "on a GPU")


def state_dict_round_trip(subject: Subject) -> None:
    """Load one model's state dict into a second and compare them."""
    alone = subject.alone
    state = {name: tensor.clone() for name, tensor in subject.model.network.state_dict().items()}
    network = subject.on_meta()
    materialize(network, torch.device("cpu"))
    with torch.no_grad():
        for param in network.parameters():
            param.fill_(torch.nan)
    network.load_state_dict(state)
    copied = subject.tiny_model(network)
    for number, run in enumerate(subject.run_alone(copied, TokenSequence.incremental)):
        if not torch.equal(run.logits[0], alone[number].logits[0]):
            how = "with the state dict of the model in a second one"
            check_same(subject, number, run, 0, how)


def bfloat16(subject: Subject) -> None:
    """In bfloat16 the model runs, and comes close to float32."""
    alone = subject.alone
    model = subject.load("bfloat16")
    runs = subject.run_alone(model, TokenSequence.incremental)
    for number, (run, exact) in enumerate(zip(runs, alone, strict=True)):
        ours, theirs = run.logits[0], exact.logits[0]
        apart = _relative(ours, theirs)
        if not apart <= _BFLOAT16_TOLERANCE:
            trace = run.recorded().trace(0)
            sizes = ", ".join(
                f"{name} by {_relative(trace.outputs[name], rows):.1%}"
                for name, rows in exact.trace(0).outputs.items()
                if name in model.layers
            )
            raise ConformanceError(
                f"prompt {subject.checkpoint.prompts[number].name!r} in bfloat16: logits are "
                f"{apart:.1%} off float32's ({_BFLOAT16_TOLERANCE:.0%} is allowed); layers: {sizes}"
            )


def _relative(ours: Tensor, theirs: Tensor) -> float:
    """Root mean square difference, as a part of the values' own spread."""
    return float((ours - theirs).norm() / (theirs - theirs.mean()).norm())


def llm_of(subject: Subject, **settings: Any) -> LLM:
    """The whole engine with a subject's checkpoint."""
    defaults = {
        "device": "cpu",
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "max_model_len": subject.max_model_len,
        "kv_cache_memory": "64MiB",
        "max_num_seqs": 8,
    }
    return LLM(str(subject.folder), **{**defaults, **settings})


def generate(subject: Subject, llm: LLM, prompts: Sequence[Prompt]) -> list[RequestOutput]:
    """As many new tokens of each prompt as it has, with all log-probabilities."""
    count = min(subject.model_config.vocab_size, _MOST_LOGPROBS)
    params = [
        SamplingParams(
            temperature=0.0, max_tokens=len(p.new_tokens), ignore_eos=True, logprobs=count
        )
        for p in prompts
    ]
    return llm.generate([prompt.request for prompt in prompts], params)


def check_output(
    output: RequestOutput, tokens: Sequence[int], rows: Sequence[Mapping[int, float]], how: str
) -> None:
    """The tokens and, as log-probabilities, the logits of an output are the expected ones."""
    completion = output.outputs[0]
    assert completion.logprobs is not None, "they were asked for"
    what = f"a prompt of {len(output.prompt_token_ids)} tokens {how}"
    for step, (entry, wanted) in enumerate(zip(completion.logprobs, rows, strict=False)):
        apart = max(abs(entry[t].logprob - wanted[t]) for t in wanted if t in entry)
        if not apart <= TOLERANCE:
            raise ConformanceError(
                f"{what}: log-probabilities of new token {step} differ by {apart:.2g} "
                f"({TOLERANCE:.0e} is allowed)"
            )
    if tuple(completion.token_ids) != tuple(tokens):
        raise ConformanceError(f"{what}: new tokens {completion.token_ids}, not {list(tokens)}")


def engine(subject: Subject) -> None:
    """The whole engine gives the tokens of the model alone, whatever its settings."""
    subject.require_run()
    prompts = subject.checkpoint.prompts
    for settings in ({}, {"block_size": 4, "max_num_batched_tokens": chunk(subject)}):
        with llm_of(subject, **settings) as llm:
            outputs = generate(subject, llm, prompts)
        how = f"through LLM({', '.join(f'{key}={value}' for key, value in settings.items())})"
        for output, (tokens, wanted) in zip(outputs, subject.greedy, strict=True):
            check_output(output, tokens, wanted, how)


def chunk(subject: Subject) -> int:
    """Few tokens per step, but no fewer than a prompt's longest atomic span."""
    spans = [s for p in subject.sequences(subject.model) for s in p.prompt.atomic_spans]
    return max([8, *(end - start for start, end in spans)])


def same_outputs(
    outputs: Sequence[RequestOutput], expected: Sequence[RequestOutput], how: str
) -> None:
    """Outputs are those of another way."""
    for output, other in zip(outputs, expected, strict=True):
        completion = other.outputs[0]
        assert completion.logprobs is not None, "they were asked for"
        rows = [{t: value.logprob for t, value in e.items()} for e in completion.logprobs]
        check_output(output, completion.token_ids, rows, how)


def quantised(subject: Subject) -> None:
    """With int8 weights the model runs, and comes close to what it gives without."""
    subject.require_run()
    prompts = [p.request for p in subject.checkpoint.prompts if len(p.token_ids) > 1]
    count = min(subject.model_config.vocab_size, _MOST_LOGPROBS)
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=-1)
    tables = []
    for quantization in (None, "int8"):
        try:
            llm = llm_of(subject, quantization=quantization)
        except OptionError as error:
            raise ConformanceError(
                f"the tiny model cannot be quantised: {error}. If its sizes are why, give the case "
                "widths in multiples of 32"
            ) from error
        with llm:
            outputs = llm.generate(prompts, params)
        entries = [entry for output in outputs for entry in (output.prompt_logprobs or [])[1:]]
        assert all(entry is not None for entry in entries), "they were asked for"
        tables.append(
            torch.tensor([[entry[t].logprob for t in range(count)] for entry in entries if entry])
        )
    full, ours = tables
    apart = _relative(ours, full)
    if not apart <= _INT8_TOLERANCE:
        raise ConformanceError(
            f"with quantization='int8' log-probabilities are {apart:.1%} off those without "
            f"({_INT8_TOLERANCE:.0%} is allowed)"
        )


def prefix_caching(subject: Subject) -> None:
    """Blocks from the prefix cache equal those that would be computed."""
    subject.require_run()
    prompts = subject.checkpoint.prompts
    # As in a chat: the next prompt is the last one with its answer.
    longer = [
        replace(prompt, token_ids=(*prompt.token_ids, *prompt.new_tokens))
        for prompt in prompts
        if not prompt.shown
        and len(prompt.token_ids) + 2 * len(prompt.new_tokens) <= subject.max_model_len
    ]
    with llm_of(subject, enable_prefix_caching=False) as llm:
        first = generate(subject, llm, prompts)
        second = generate(subject, llm, longer)
    # Blocks of states, and of keys beside them, have up to 32 times as many tokens.
    block_size = 1 if any(spec.keeps_state for spec in subject.model.groups) else 4
    with llm_of(subject, block_size=block_size) as llm:
        generate(subject, llm, prompts)
        again = generate(subject, llm, prompts)
        continued = generate(subject, llm, longer)
    if max(len(prompt.token_ids) for prompt in prompts) > 4 and not any(
        o.metrics.num_cached_tokens for o in again
    ):
        raise ConformanceError(
            "prompts computed a second time take nothing from the prefix cache; cache_salts and "
            "row state must be equal for equal prompts"
        )
    same_outputs(again, first, "computed a second time, with prefix caching")
    same_outputs(continued, second, "that continues another one, with prefix caching")


def shared_prefixes(subject: Subject) -> None:
    """Prompts that share a prefix get a cold cache's tokens, also beyond the trained length."""
    if subject.processor is None and not subject.model_config.may_exceed_length:
        raise NotApplicableError(
            "nothing of a prompt but its tokens reaches the model, and none exceeds its length"
        )
    subject.require_run()
    prompts = list(_relatives(subject))
    if not prompts:
        raise NotApplicableError("the input processor takes no prompt but the case's own")
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=20)
    longest = max(map(len, prompts)) + 4
    outputs = []
    for settings in ({"enable_prefix_caching": False}, {"block_size": 1}):
        with llm_of(subject, max_model_len=longest, **settings) as llm:
            # One after the other, each with what those before it left.
            outputs.append([llm.generate([prompt], params)[0] for prompt in prompts])
    for number, (cold, warm) in enumerate(zip(*outputs, strict=True)):
        try:
            same_outputs([warm], [cold], "")
        except ConformanceError as error:
            shared = warm.metrics.num_cached_tokens
            other = next(
                (p for p in prompts[:number] if p[:shared] == prompts[number][:shared]), ()
            )
            raise ConformanceError(
                f"{error}, where {shared} of them come from the prefix cache, as they were "
                f"computed for a prompt of {len(other)} tokens, instead of from the model. What "
                "keys depend on beside the tokens before them belongs into cache_salts of the "
                "input processor: such as the prompt's length, or a token behind them"
            ) from None


def _relatives(subject: Subject) -> Iterator[list[int]]:
    """Prompts that share prefixes: longer than the model was trained with, and in other orders."""
    config, model = subject.model_config, subject.model
    given = [list(p.token_ids) for p in subject.checkpoint.prompts if p.shown is None]
    if not given:
        return
    tokens = max(given, key=len)
    trained = min(stated_lengths(config) or [config.max_position_embeddings])
    most = 4 * trained if config.may_exceed_length else config.max_position_embeddings - 4
    most = min(most, _LONGEST)
    base = (tokens * (most // len(tokens) + 1))[:most]
    lengths = {most * part // 8 for part in (2, 3, 4, 5, 6, 7, 8)}
    lengths |= set(range(trained - 2, trained + 4))
    orders = [base[:length] for length in sorted(lengths, reverse=True) if 1 < length <= most]
    short = min((p for p in given if len(p) > 3), key=len, default=[])[:12]
    for start in (short, short[::-1]):
        orders += [start[:cut] + start[cut:][::-1] for cut in range(len(start) - 1)]
    for order in orders:
        try:
            model.sequence(order, len(order))
        except EngineError:
            continue
        yield order


def stated_lengths(config: ModelConfig) -> list[int]:
    """The lengths that a config states, as far as they are trained ones."""
    names = ("max_position_embeddings", "seq_length")
    parts = [config.hf_config, HFConfig(config.hf_config.get("text_config", {}))]
    found = [part.get(name) for part in parts for name in names]
    return [value for value in found if type(value) is int and value > 8]


def tensor_parallel(subject: Subject) -> None:
    """Two ranks give the results of one."""
    subject.require_run()
    try:
        subject.on_meta(tp_size=2)
    except ConfigError as error:
        if isinstance(error.__cause__, IndivisibleError):
            raise NotApplicableError(
                f"this model does not split over two ranks: {error}"
            ) from error
        raise
    prompts = subject.checkpoint.prompts
    with llm_of(subject, tensor_parallel_size=2) as llm:
        outputs = generate(subject, llm, prompts)
    for output, (tokens, wanted) in zip(outputs, subject.greedy, strict=True):
        check_output(output, tokens, wanted, "with tensor_parallel_size=2")


def graph(subject: Subject) -> None:
    """On a GPU, replayed graphs give what eager steps give."""
    prompts = subject.checkpoint.prompts
    settings = {"device": "cuda", "eager": True}
    with llm_of(subject, **settings) as llm:
        expected = generate(subject, llm, prompts)
    with llm_of(subject, **{**settings, "eager": False}) as llm:
        outputs = generate(subject, llm, prompts)
    same_outputs(outputs, expected, "with captured graphs")


def deterministic(subject: Subject) -> None:
    """On a GPU, with ``deterministic=True``, what else is in a batch changes no token."""
    subject.require_run()
    try:
        subject.on_meta(deterministic=True)
        check_deterministic(EngineConfig(deterministic=True), torch.device("cuda"))
    except OptionError as error:
        raise NotApplicableError(f"not to be had here: {error}") from error
    same_tokens(subject, device="cuda", dtype="bfloat16", deterministic=True)


def same_tokens(subject: Subject, **settings: Any) -> None:
    """With ``settings``, prompts get the tokens that they get alone, without graphs.

    Together twice, so that the second time takes from the prefix cache, with whole prompts and in
    chunks.
    """
    prompts = [prompt.request for prompt in subject.checkpoint.prompts]
    params = SamplingParams(temperature=0.0, max_tokens=_DETERMINISTIC_TOKENS, ignore_eos=True)
    with llm_of(subject, eager=True, enable_prefix_caching=False, **settings) as llm:
        alone = [llm.generate([prompt], params)[0].outputs[0].token_ids for prompt in prompts]
    for more in ({}, {"max_num_batched_tokens": chunk(subject)}):
        named = ", ".join(f"{key}={value}" for key, value in {**settings, **more}.items())
        with llm_of(subject, **settings, **more) as llm:
            for order in (1, -1):
                outputs = llm.generate(prompts[::order], params)[::order]
                for expected, output in zip(alone, outputs, strict=True):
                    got = output.outputs[0].token_ids
                    if got != expected:
                        raise ConformanceError(
                            f"a prompt of {len(output.prompt_token_ids)} tokens through "
                            f"LLM({named}): beside others its new tokens are {got}, alone "
                            f"{expected}. A product, or a sum over a dimension, by torch's own "
                            "functions may depend on the batch"
                        )
