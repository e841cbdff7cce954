"""A model under test, run step by step without an engine."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from engine_core.inputs import InputProcessor, MediaItem, ProcessedPrompt
from engine_core.nn import cached_layers, finished
from engine_core.runtime.layer_trace import decoder_layers
from engine_core.step_context import AttentionMetadata, GroupMetadata, StepContext
from engine_core.testing.case import ConformanceError, MediaPrompt
from engine_core.testing.trace import Recorder, Trace, first_input

Step = Sequence[tuple[int, int, int]]
"""The tokens of one pass: (sequence, first position, number of tokens) for each row."""

# Finite, as masked keys and values must be, and far from every real one.
_UNWRITTEN = 100.0
_BLOCK_SIZE = 16


@dataclass(frozen=True)
class TokenSequence:
    """Tokens to compute, the first ``prompt_len`` of which are the prompt.

    Attributes:
        token_ids: all of them.
        prompt: what the family's input processor made of the prompt.
    """

    token_ids: tuple[int, ...]
    prompt: ProcessedPrompt

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt.token_ids)

    def chunks(self, size: int) -> list[tuple[int, int]]:
        """(start, count) of pieces of ``size`` tokens; longer where a span must not be cut."""
        pieces = []
        start = 0
        while start < len(self.token_ids):
            end = min(start + size, len(self.token_ids))
            for first, last in self.prompt.atomic_spans:
                if first < end < last:
                    end = last
            pieces.append((start, end - start))
            start = end
        return pieces

    def incremental(self) -> list[tuple[int, int]]:
        """The prompt at once, then one token at a time."""
        rest = range(self.prompt_len, len(self.token_ids))
        return [(0, self.prompt_len), *((position, 1) for position in rest)]


@dataclass
class Run:
    """A model's outputs for some sequences.

    Attributes:
        logits: ``[length, vocab]`` float32 on the CPU, for each sequence.
        again: computes the same steps once more, and records them.
        recorder: what its modules put out; None if nobody listened.
    """

    logits: list[Tensor]
    again: Callable[[], Run]
    recorder: Recorder | None = None

    def recorded(self) -> Run:
        """This run if it was recorded, or the same steps computed once more."""
        return self.again() if self.recorder is None else self

    def trace(self, sequence: int) -> Trace:
        """The modules' outputs for one sequence, of a run that was recorded."""
        assert self.recorder is not None, "only what was recorded has a trace"
        return self.recorder.trace(sequence, len(self.logits[sequence]))


@dataclass
class TinyModel:
    """A loaded model, and caches made anew for each run.

    Attributes:
        network: the family's model.
        processor: the family's input processor, or None.
        device: where the network is.
    """

    network: nn.Module
    processor: InputProcessor | None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self) -> None:
        self.attention = cached_layers(self.network)
        specs = [layer.cache_spec() for layer in self.attention]
        self.groups = list(dict.fromkeys(specs))
        for layer, spec in zip(self.attention, specs, strict=True):
            layer.group_id = self.groups.index(spec)
            layer.block_size = _BLOCK_SIZE
        self.layers = decoder_layers(self.network)

    def sequence(
        self, token_ids: Sequence[int], prompt_len: int, shown: MediaPrompt | None = None
    ) -> TokenSequence:
        """``token_ids`` with what the input processor says of the prompt, and of what it shows.

        Raises:
            ConformanceError: it makes other tokens of a prompt that shows something.
        """
        prompt = tuple(token_ids[:prompt_len])
        if shown is not None:
            processed = self.process(shown)
            if tuple(processed.token_ids) != prompt:
                raise ConformanceError(
                    f"prompt {shown.name!r}: the input processor makes "
                    f"{len(processed.token_ids)} tokens of it, {list(processed.token_ids)}; the "
                    f"reference has {len(prompt)}, {list(prompt)}"
                )
        elif self.processor is None:
            processed = ProcessedPrompt(prompt)
        else:
            processed = self.processor.process(prompt)
        return TokenSequence(tuple(token_ids), processed)

    def process(self, shown: MediaPrompt) -> ProcessedPrompt:
        """The result of the input processor for a prompt that shows something."""
        processor: Any = self.processor
        media = {kind: list(items) for kind, items in shown.media.items()}
        processed: ProcessedPrompt = processor.process_media(
            list(shown.token_ids), media, dict(shown.options)
        )
        return processed

    @torch.inference_mode()
    def embed(self, items: Sequence[MediaItem], *, in_parts: bool = False) -> list[Tensor]:
        """The embeddings ``[n, H]`` of each of some items, all of a kind at once.

        ``in_parts`` is by the model's ``embed_media_parts``, if it has one.
        """
        found: list[Tensor | None] = [None] * len(items)
        for kind in dict.fromkeys(item.kind for item in items):
            places = [place for place, item in enumerate(items) if item.kind == kind]
            features = [self._sent(items[place]) for place in places]
            given = self._embedded(kind, features, in_parts)
            if not isinstance(given, list | tuple) or len(given) != len(places):
                raise ConformanceError(
                    f"embed_media of {len(places)} {kind} items returned {type(given).__name__} "
                    f"of {len(given)}, not a list of one tensor each"
                )
            for place, embeddings in zip(places, given, strict=True):
                count = items[place].num_embeddings
                if embeddings.shape[:1] != (count,) or embeddings.dim() != 2:
                    raise ConformanceError(
                        f"embed_media gives {list(embeddings.shape)} for an {kind} whose span "
                        f"{items[place].span} has {count} positions; [{count}, H] is expected"
                    )
                found[place] = embeddings
        return [embeddings for embeddings in found if embeddings is not None]

    def _sent(self, item: MediaItem) -> dict[str, Tensor]:
        """An item's features as the engine passes them: integers, which are sizes, stay here."""
        tensors = {
            # What the model writes to them reaches the item.
            name: torch.as_tensor(np.require(value, requirements="W"))
            for name, value in item.features.items()
        }
        return {
            name: tensor.to(self.device)
            if tensor.is_floating_point() or tensor.dtype is torch.uint8
            else tensor
            for name, tensor in tensors.items()
        }

    def _embedded(self, kind: str, features: Sequence[dict[str, Tensor]], in_parts: bool) -> Any:
        network: Any = self.network
        if in_parts and hasattr(network, "embed_media_parts"):
            return finished(network.embed_media_parts(kind, features))
        return network.embed_media(kind, features)

    @torch.inference_mode()
    def first_input(self, token_ids: Sequence[int], shown: MediaPrompt) -> Tensor | None:
        """``[T, H]`` float32, what the first decoder layer takes of a prompt; None without one."""
        if not self.layers:
            return None
        sequence = self.sequence(token_ids, len(token_ids), shown)
        taken: list[Tensor] = []
        handle = first_input(self.network.get_submodule(self.layers[0]), taken.append)
        try:
            self.run([sequence], [[(0, 0, len(token_ids))]])
        finally:
            handle.remove()
        return taken[0][0].float()

    @torch.inference_mode()
    def run(
        self,
        sequences: Sequence[TokenSequence],
        steps: Sequence[Step],
        block_size: int = _BLOCK_SIZE,
        *,
        recording: bool = False,
    ) -> Run:
        """Run ``steps``, which together compute every token of every sequence.

        With ``recording`` each module is listened to. That takes twice as long, and modules whose
        parts are otherwise computed in one call compute them one by one.
        """
        cache = PagedCache(self, sequences, block_size)
        recorder = Recorder(self.network, self.layers)
        logits: list[list[Tensor]] = [[] for _ in sequences]
        with recorder.recording() if recording else nullcontext():
            for step in steps:
                recorder.begin([])  # An encoder may have as many patches as a step has tokens.
                cache.encode(step)
                recorder.begin([(s, p + i) for s, p, count in step for i in range(count)])
                out = self.logits(cache, cache.context(step)).to("cpu", torch.float32)
                for (owner, _, _), rows in zip(step, out.split([c for *_, c in step]), strict=True):
                    logits[owner].append(rows)
        again = partial(self.run, sequences, steps, block_size, recording=True)
        return Run([torch.cat(rows) for rows in logits], again, recorder if recording else None)

    @torch.inference_mode()
    def greedy(
        self, prompt: Sequence[int], count: int, shown: MediaPrompt | None = None
    ) -> tuple[list[int], Tensor]:
        """``count`` new tokens and the logits ``[count, vocab]`` that they were chosen by."""
        tokens: list[int] = []
        rows: list[Tensor] = []
        # The cache is sized for the whole; what stands in for tokens to come is never computed.
        sequence = self.sequence([*prompt, *[0] * count], len(prompt), shown)
        cache = PagedCache(self, [sequence], _BLOCK_SIZE)
        start, length = 0, len(prompt)
        for _ in range(count):
            logits = self.logits(cache, cache.context([(0, start, length)]))
            rows.append(logits[-1].to("cpu", torch.float32))
            tokens.append(int(rows[-1].argmax()))
            start, length = len(prompt) + len(tokens) - 1, 1
            sequence = TokenSequence((*prompt, *tokens), sequence.prompt)
            cache.sequences = [sequence]
        return tokens, torch.stack(rows)

    def logits(self, cache: PagedCache, context: StepContext) -> Tensor:
        """Logits ``[T, vocab]`` of a step's ``T`` tokens."""
        prepare = getattr(self.network, "prepare_inputs_for_generation", None)
        inputs: dict[str, Any] = (
            context.model_inputs(cache.layers)
            if prepare is None
            else prepare(cache.layers, context.inputs_embeds, context)
        )
        hidden: Tensor = self.network(**inputs)[0]
        # A model without get_logits returns logits itself.
        get_logits = getattr(self.network, "get_logits", None)
        out: Tensor = hidden if get_logits is None else get_logits(hidden)
        return out


class PagedCache:
    """The cache of one run, whose blocks are dealt out in a random order."""

    def __init__(
        self, model: TinyModel, sequences: Sequence[TokenSequence], block_size: int
    ) -> None:
        self.sequences = list(sequences)
        self._model = model
        self._device = model.device
        # Embeddings of items by digest and salts, as the engine keeps them.
        self._embeddings: dict[Hashable, Tensor] = {}
        self._block_size = block_size
        draw = random.Random(0)
        counts = [-(-len(sequence.token_ids) // block_size) for sequence in sequences]
        # Block 0 is nobody's, as in the engine.
        self._tables: list[list[list[int]]] = []
        for _ in model.groups:
            blocks = list(range(1, sum(counts) + 1))
            draw.shuffle(blocks)
            self._tables.append([[blocks.pop() for _ in range(count)] for count in counts])
        self.layers: list[tuple[Tensor, ...]] = []
        for layer in model.attention:
            layer.block_size = block_size
            tensors = model.groups[layer.group_id].tensors(block_size)
            self.layers.append(
                tuple(
                    torch.full(
                        (sum(counts) + 1, *tensor.shape),
                        0.0 if tensor.zeroed else _UNWRITTEN,
                        dtype=getattr(torch, tensor.dtype),
                    ).to(self._device)
                    for tensor in tensors
                )
            )

    def _touched(self, step: Step) -> Iterator[tuple[Hashable, MediaItem, int, int, int]]:
        """The items that a step touches: their keys, and the numbers of the first position.

        That is in its sequence and in the step; with the last one's end in the sequence.
        """
        number = 0
        for owner, start, count in step:
            prompt = self.sequences[owner].prompt
            for item in prompt.media:
                begin, end = max(item.span[0], start), min(item.span[1], start + count)
                if begin < end:
                    key = item.digest, prompt.cache_salts
                    yield key, item, begin, number + begin - start, end
            number += count

    def encode(self, step: Step) -> None:
        """Compute the embeddings of the items that are new in a step, together."""
        new = {k: item for k, item, *_ in self._touched(step) if k not in self._embeddings}
        self._embeddings.update(zip(new, self._model.embed([*new.values()]), strict=True))

    def _inputs_embeds(self, step: Step, tokens: Tensor) -> Tensor | None:
        """The tokens' embeddings ``[1, T, H]``, with those of items; None without any."""
        touched = list(self._touched(step))
        if not touched:
            return None
        self.encode(step)
        network: Any = self._model.network
        merged: Tensor = network.get_input_embeddings()(tokens).clone()
        for key, item, begin, place, end in touched:
            first = item.span[0]
            part = self._embeddings[key][begin - first : end - first]
            merged[0, place : place + len(part)] = part
        return merged

    def context(self, step: Step) -> StepContext:
        """The step's context, with the same fields as the engine's runner fills."""
        size = self._block_size
        rows = [(row, position + i) for row, (_, position, n) in enumerate(step) for i in range(n)]
        row_ids = [row for row, _ in rows]
        positions = [position for _, position in rows]
        lengths = [count for _, _, count in step]
        kv_lens = [start + count for _, start, count in step]
        starts = [sum(lengths[:index]) for index in range(len(lengths) + 1)]
        longest = max(kv_lens)
        width = -(-longest // size)
        owners = [self.sequences[owner] for owner, _, _ in step]
        groups = []
        for table in self._tables:
            own = [table[owner] for owner, _, _ in step]
            padded = [(blocks + [0] * width)[:width] for blocks in own]
            slots = [own[row][p // size] * size + p % size for row, p in rows]
            groups.append(
                GroupMetadata(
                    block_tables=self._tensor(padded, torch.int32), slot_mapping=self._tensor(slots)
                )
            )
        decode = next((i for i, count in enumerate(lengths) if count != 1), len(lengths))
        tokens = [owners[row].token_ids[position] for row, position in rows]
        input_ids = self._tensor([tokens])
        return StepContext(
            input_ids=input_ids,
            inputs_embeds=self._inputs_embeds(step, input_ids),
            position_ids=self._tensor([positions]),
            row_ids=self._tensor(row_ids),
            attn_metadata=AttentionMetadata(
                query_start=self._tensor(starts, torch.int32),
                kv_lens=self._tensor(kv_lens, torch.int32),
                max_query_len=max(lengths),
                max_kv_len=longest,
                num_decode_rows=decode,
                groups=tuple(groups),
            ),
            row_state=self._row_state(owners),
            token_state=self._token_state(owners, rows),
        )

    def _tensor(self, values: Any, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self._device)

    def _row_state(self, owners: Sequence[TokenSequence]) -> dict[str, Tensor]:
        state = {"prompt_len": self._tensor([owner.prompt_len for owner in owners])}
        for name in owners[0].prompt.row_state:
            values = [torch.as_tensor(owner.prompt.row_state[name]) for owner in owners]
            state[name] = torch.stack(values).to(self._device)
        return state

    def _token_state(
        self, owners: Sequence[TokenSequence], rows: Sequence[tuple[int, int]]
    ) -> dict[str, Tensor]:
        state = {}
        for name in owners[0].prompt.token_state:
            columns = []
            for row, position in rows:
                given = torch.as_tensor(owners[row].prompt.token_state[name])
                given = given.reshape(-1, given.shape[-1])
                beyond = position >= given.shape[1]
                columns.append(torch.zeros_like(given[:, 0]) if beyond else given[:, position])
            state[name] = torch.stack(columns, dim=1).to(self._device)
        return state
