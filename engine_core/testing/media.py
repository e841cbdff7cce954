"""The checks of a family that sees or hears. They raise as those of ``checks`` do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine_core.cache.prefix_cache import BlockKey, extend_block_keys
from engine_core.errors import EngineError
from engine_core.inputs import MediaItem, MediaProcessor, ProcessedPrompt
from engine_core.testing.case import ConformanceError, MediaPrompt
from engine_core.testing.checks import (
    check_output,
    check_same,
    chunk,
    generate,
    llm_of,
    stated_lengths,
)
from engine_core.testing.reference import NEW_TOKENS, Prompt, kinds_of
from engine_core.testing.state import changes, snapshot
from engine_core.testing.subject import NotApplicableError, Subject
from engine_core.testing.tiny_model import TinyModel, TokenSequence
from engine_core.testing.trace import TOLERANCE, difference

# A prompt of as many tokens is cut everywhere.
_CUTS = 48
# Heights and widths of pictures whose outlines are asked for.
_SIZES = ((1, 1), (24, 36), (36, 24), (17, 53), (64, 64), (200, 90))


@dataclass(frozen=True)
class _Variant:
    """A prompt of a case, as it is or a little changed.

    Attributes:
        how: which it is, for messages.
        shown: as it is given.
        prompt: what the input processor makes of it.
    """

    how: str
    shown: MediaPrompt
    prompt: ProcessedPrompt


def _prompts(subject: Subject) -> list[tuple[Prompt, MediaPrompt]]:
    """The prompts that show something.

    Raises:
        NotApplicableError: there are none.
    """
    prompts = [(each, each.shown) for each in subject.checkpoint.prompts if each.shown is not None]
    if not prompts:
        raise NotApplicableError("the case shows no pictures, videos or sounds")
    return prompts


def media_items(subject: Subject) -> None:
    """Each item has its place, and a digest that tells it from every other one.

    Each prompt is also tried with one number of an item changed, with the options of others,
    without its last item, and with text after it. What is said of a picture by its size alone is
    what becomes of it.
    """
    _check_kinds(subject)
    variants: list[_Variant] = []
    outlined: list[int] = []
    for prompt, shown in _prompts(subject):
        variant = _Variant(f"prompt {prompt.name!r}", shown, _process(subject, shown))
        _check_places(variant, prompt)
        outlined += _check_outlines(subject, variant)
        edited = _taken(subject, variant, _edited(subject, shown))
        continued = _taken(subject, variant, _continued(subject, variant))
        variants += [variant, *edited, *continued]
    if outlined and not any(outlined):
        raise ConformanceError(
            "no prompt takes pictures of its own as arrays of any of the sizes "
            f"{', '.join(f'{wide} x {high}' for high, wide in _SIZES)}, so that nothing is known "
            "of its picture_outline; have a case with a prompt that does"
        )
    for variant in variants:
        again = _process(subject, variant.shown)
        if what := _unlike(variant.prompt, again):
            raise ConformanceError(
                f"{variant.how}: processed once more, after others, it has other {what}; an input "
                "processor keeps nothing of a prompt"
            )
        _check_reuse(subject, variant)
        _check_salts(subject, variant)
    _check_digests(variants)
    _check_prefixes(variants)


def _check_salts(subject: Subject, variant: _Variant) -> None:
    """A long prompt that shows something is told apart as one of text is."""
    text = next((list(p.token_ids) for p in subject.checkpoint.prompts if p.shown is None), [])
    trained = stated_lengths(subject.model_config)
    if not text or not trained or not subject.model_config.may_exceed_length:
        return
    ids = list(variant.prompt.token_ids)
    length = 2 * max(*trained, len(ids)) + 1
    more = (text * length)[: length - len(ids)]
    long = _process(subject, replace(variant.shown, token_ids=[*ids, *more]))
    salts = subject.processor.process((text * length)[:length]).cache_salts  # type: ignore[union-attr]
    if set(salts) - set(long.cache_salts):
        raise ConformanceError(
            f"{variant.how}, with text after it up to {length} tokens, has the cache_salts "
            f"{long.cache_salts}, and text alone of that length has {salts}: what keys depend on "
            "holds for both"
        )


def _check_reuse(subject: Subject, variant: _Variant) -> None:
    """A processor that takes its own items again makes the same prompt of them."""
    if not getattr(subject.processor, "reuses_items", False):
        return
    made: dict[str, list[MediaItem]] = {}
    for item in variant.prompt.media:
        # As if they were from another prompt.
        elsewhere = replace(item, span=(item.span[0] + 1, item.span[1] + 1))
        made.setdefault(item.kind, []).append(elsewhere)
    try:
        again = _process(subject, replace(variant.shown, media=made))
    except Exception as error:
        raise ConformanceError(
            f"{variant.how}: with its own items of another prompt in place of what they were made "
            f"of, {type(error).__name__}: {error}; reuses_items says that it takes them"
        ) from error
    if what := _unlike(variant.prompt, again):
        raise ConformanceError(
            f"{variant.how}: with its own items of another prompt in place of what they were made "
            f"of, it has other {what}; reuses_items says that only spans are made anew"
        )


def _check_outlines(subject: Subject, variant: _Variant) -> list[int]:
    """A picture's size alone lays a prompt out as the picture does, where the family says so.

    Returns how many sizes the prompt takes, in a list that is empty where nothing is to be checked.
    """
    say = getattr(subject.processor, "picture_outline", None)
    items = variant.prompt.media
    if say is None or {item.kind for item in items} != {"image"}:
        return []
    ids = list(variant.prompt.token_ids)
    for item in reversed(items):  # which may have one placeholder each
        ids[item.span[0] + 1 : item.span[1]] = []
    options = dict(variant.shown.options)
    taken = 0
    for size in _SIZES:

        def lay(image: Any) -> ProcessedPrompt:
            shown = replace(variant.shown, token_ids=ids, media={"image": [image] * len(items)})
            return _process(subject, shown)

        try:
            whole = lay(np.zeros((*size, 3), np.uint8))
        except EngineError:  # not all sizes are taken, nor options for what is no features
            continue
        taken += 1
        how = f"{variant.how} with pictures of {size[1]} x {size[0]} pixels"
        try:
            outline = say(*size, options)
            again = lay(outline)
        except Exception as error:
            raise ConformanceError(
                f"{how}: with the picture_outline({size[0]}, {size[1]}, {options}) in place of "
                f"each, {type(error).__name__}: {error}; process_media takes it as it takes items "
                "made before"
            ) from error
        if outline.num_embeddings != whole.media[0].num_embeddings:
            raise ConformanceError(
                f"{how}: picture_outline({size[0]}, {size[1]}, {options}) has "
                f"{outline.num_embeddings} embeddings, and each picture "
                f"{whole.media[0].num_embeddings}; by it prompts are refused as too long"
            )
        # An outline has no digest, and of the features some at most.
        bare = [replace(item, digest=b"", features={}) for item in (*whole.media, *again.media)]
        half = len(whole.media)
        whole = replace(whole, media=tuple(bare[:half]))
        again = replace(again, media=tuple(bare[half:]))
        if what := _unlike(whole, again):
            raise ConformanceError(
                f"{how}: with their picture_outline in place of them it has other {what}; "
                "process_media lays a prompt out by it as by the picture"
            )
    return [taken]


def _check_kinds(subject: Subject) -> None:
    """No kind that the architecture takes goes unchecked."""
    cases = [c for c in subject.family.cases if c.architecture == subject.case.architecture]
    shown = {kind for case in cases for kind in (*kinds_of(case), *case.kinds_elsewhere)}
    processor = subject.processor
    takes = processor.media_kinds if isinstance(processor, MediaProcessor) else ()
    unseen = [kind for kind in takes if kind not in shown]
    if unseen:
        raise ConformanceError(
            f"{type(processor).__name__} takes the kinds {', '.join(takes)}, and no case of "
            f"{subject.case.architecture} shows {' or '.join(unseen)}; give one a MediaPrompt in "
            "its media, or name in kinds_elsewhere what a tiny checkpoint cannot show"
        )


def _process(subject: Subject, shown: MediaPrompt) -> ProcessedPrompt:
    processor = subject.processor
    if not isinstance(processor, MediaProcessor):
        raise ConformanceError(
            f"the case shows {', '.join(shown.media)}, and the family's input processor, "
            f"{type(processor).__name__}, has no media_kinds or no process_media"
        )
    media = {kind: list(items) for kind, items in shown.media.items()}
    return processor.process_media(list(shown.token_ids), media, dict(shown.options))


def _check_places(variant: _Variant, prompt: Prompt) -> None:
    processed = variant.prompt
    if tuple(processed.token_ids) != prompt.token_ids:
        raise ConformanceError(
            f"{variant.how}: the input processor makes {len(processed.token_ids)} tokens of it, "
            f"{list(processed.token_ids)}; the reference has {len(prompt.token_ids)}, "
            f"{list(prompt.token_ids)}"
        )
    given = sum(map(len, variant.shown.media.values()))
    if len(processed.media) != given:
        raise ConformanceError(
            f"{variant.how}: {given} items are given, and media has {len(processed.media)}"
        )
    before = 0
    for item in processed.media:
        if not before <= item.span[0] < item.span[1] <= len(processed.token_ids):
            raise ConformanceError(
                f"{variant.how}: spans must be sorted, disjoint and within the prompt of "
                f"{len(processed.token_ids)} tokens, got {[each.span for each in processed.media]}"
            )
        before = item.span[1]


def _taken(
    subject: Subject, variant: _Variant, changed: Iterable[tuple[str, MediaPrompt]]
) -> Iterator[_Variant]:
    """The changed prompts that the family takes: not all of them need make sense any more."""
    for what, given in changed:
        try:
            processed = _process(subject, given)
        except EngineError:
            continue
        yield _Variant(f"{variant.how} with {what}", given, processed)


def _edited(subject: Subject, shown: MediaPrompt) -> Iterator[tuple[str, MediaPrompt]]:
    """The prompt with a number of an item changed, and with other options."""
    for kind, items in shown.media.items():
        for index, item in enumerate(items):
            for what, other in _others(item):
                media = {**shown.media, kind: [*items[:index], other, *items[index + 1 :]]}
                yield f"{kind} {index} {what}", replace(shown, media=media)
    yield "no options", replace(shown, options={})
    for _, other in _prompts(subject):
        yield f"the options {dict(other.options)}", replace(shown, options=other.options)


def _continued(subject: Subject, variant: _Variant) -> Iterator[tuple[str, MediaPrompt]]:
    """The prompt with text after it, and up to its last item."""
    shown, ids = variant.shown, list(variant.prompt.token_ids)
    text = next((p.token_ids for p in subject.checkpoint.prompts if p.shown is None), ())
    yield "text after it", replace(shown, token_ids=[*ids, *text[:6]])
    last = variant.prompt.media[-1]
    cut = {kind: items[:-1] if kind == last.kind else items for kind, items in shown.media.items()}
    media = {kind: items for kind, items in cut.items() if items}
    if media:
        kept = replace(shown, token_ids=ids[: last.span[0]], media=media)
        yield "its last item left out", kept


def _others(item: Any) -> Iterator[tuple[str, Any]]:
    """Items that differ from one by a single number, or by the order of two sizes."""
    if isinstance(item, Mapping):
        for name, value in item.items():
            for what, other in _other_arrays(np.asarray(value)):
                yield f"whose {name} has {what}", {**item, name: other}
    elif isinstance(item, list | tuple):
        for index in sorted({0, len(item) - 1}):
            for what, other in _others(item[index]):
                changed = [*item[:index], other, *item[index + 1 :]]
                yield f"{what} in part {index}", type(item)(changed)
    elif hasattr(item, "getbands"):
        from PIL import Image

        for what, other in _other_arrays(np.asarray(item)):
            yield f"of {what}", Image.fromarray(other)
    elif isinstance(item, np.ndarray):
        for what, other in _other_arrays(item):
            yield f"of {what}", other


def _other_arrays(values: NDArray[Any]) -> Iterator[tuple[str, NDArray[Any]]]:
    if values.size and (values.dtype.kind == "f" or values.dtype == np.uint8):
        for what, place in (
            ("another number in the middle", values.size // 2),
            ("another last number", -1),
        ):
            other = values.copy()
            other.flat[place] = 200 if other.flat[place] < 100 else 0
            yield what, other
    if values.dtype == np.uint8 and values.ndim == 3 and values.shape[0] != values.shape[1]:
        yield "swapped sizes", values.reshape(values.shape[1], values.shape[0], -1)
    if values.dtype.kind == "i" and values.size > 1:
        other = values.copy()
        other.flat[-1], other.flat[-2] = values.flat[-2], values.flat[-1]
        yield "swapped sizes", other


def _unlike(one: ProcessedPrompt, other: ProcessedPrompt) -> str | None:
    """The first thing in which two prompts differ."""
    if list(one.token_ids) != list(other.token_ids):
        return "token_ids"
    if one.cache_salts != other.cache_salts or one.atomic_spans != other.atomic_spans:
        return "cache_salts" if one.cache_salts != other.cache_salts else "atomic_spans"
    for name in ("row_state", "token_state"):
        if not _same_arrays(getattr(one, name), getattr(other, name)):
            return name
    for mine, theirs in zip(one.media, other.media, strict=True):
        for name in ("kind", "span", "digest"):
            if getattr(mine, name) != getattr(theirs, name):
                return f"{name}s of items"
        if not _same_arrays(mine.features, theirs.features):
            return "features"
    return None


def _same_arrays(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    if one.keys() != other.keys():
        return False
    pairs = [(np.asarray(one[name]), np.asarray(other[name])) for name in one]
    return all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in pairs)


def _check_digests(variants: Sequence[_Variant]) -> None:
    """Items that the encoder cache takes for one are one."""
    seen: dict[Any, tuple[str, MediaItem]] = {}
    for variant in variants:
        for index, item in enumerate(variant.prompt.media):
            key = item.digest, variant.prompt.cache_salts
            how, other = seen.setdefault(key, (f"{variant.how}, item {index}", item))
            if other.kind != item.kind or not _same_arrays(other.features, item.features):
                raise ConformanceError(
                    f"{variant.how}, item {index}, has the digest of another one ({how}), but "
                    f"{'other features' if other.kind == item.kind else 'another kind'}: it would "
                    "get the other's embeddings. A digest is of the kind, of the whole content "
                    "and of every option that changes features or positions"
                )


def _check_prefixes(variants: Sequence[_Variant]) -> None:
    """Positions that the prefix cache takes for one have the same token state."""
    seen: dict[BlockKey, tuple[str, dict[str, Any]]] = {}
    for variant in variants:
        prompt = variant.prompt
        keys: list[BlockKey] = []
        extend_block_keys(
            keys,
            prompt.token_ids,
            1,
            spans=prompt.atomic_spans,
            salts=prompt.cache_salts,
            media=prompt.media,
        )
        for position, key in enumerate(keys):
            state = {
                name: np.atleast_2d(np.asarray(value))[:, position].tolist()
                for name, value in prompt.token_state.items()
            }
            how, other = seen.setdefault(key, (variant.how, state))
            if state != other:
                raise ConformanceError(
                    f"{variant.how}: at position {position} its token_state is {state}, and "
                    f"{other} in {how}, though tokens, digests and salts are equal up to there: "
                    "the prefix cache takes them for one. What the state depends on belongs into "
                    "cache_salts or into an item's digest"
                )


def media_embeddings(subject: Subject) -> None:
    """Embeddings are the reference's, whatever else is computed with them, before or after."""
    found = _prompts(subject)
    model = subject.loaded_anew()
    items: dict[bytes, tuple[str, MediaItem]] = {}
    for prompt, shown in found:
        for index, item in enumerate(model.process(shown).media):
            items.setdefault(item.digest, (f"prompt {prompt.name!r}, item {index}", item))
    names, given = [name for name, _ in items.values()], [item for _, item in items.values()]
    before = snapshot(model.network)
    alone, kept = [], []
    for item in given:
        alone += model.embed([item])
        kept.append(alone[-1].clone())
    ways = {
        "computed together with the others": model.embed(given),
        "computed together with the others in reverse": model.embed(given[::-1])[::-1],
        "computed alone after others": [model.embed([item])[0] for item in given],
        "computed by embed_media_parts": model.embed(given, in_parts=True),
        "after others were computed": alone,  # They may be views of what is kept.
    }
    for how, embeddings in ways.items():
        for name, ours, theirs in zip(names, embeddings, kept, strict=True):
            apart, row = difference(ours.float(), theirs.float())
            if apart > TOLERANCE:
                raise ConformanceError(
                    f"{name}: its embeddings, {how}, differ by {apart:.2g} from those that it has "
                    f"alone ({TOLERANCE:.0e} is allowed), first in row {row} of {len(theirs)}"
                )
    left = changes(model.network, before, snapshot(model.network))
    if left:
        raise ConformanceError(f"embed_media changes the model itself: {', '.join(left)}")
    for prompt, shown in found:
        _check_inputs(subject, model, prompt, shown)


def _check_inputs(subject: Subject, model: TinyModel, prompt: Prompt, shown: MediaPrompt) -> None:
    """Compare what goes into the first decoder layers."""
    theirs = prompt.inputs_embeds
    ours = model.first_input(prompt.token_ids, shown)
    if theirs is None or ours is None or ours.shape != theirs.shape:
        return  # Then logits tell.
    apart, position = difference(ours, theirs)
    if apart <= TOLERANCE:
        return
    processed = model.process(shown)
    place = "text"
    for index, item in enumerate(processed.media):
        if item.span[0] <= position < item.span[1]:
            number = position - item.span[0]
            place = f"embedding {number} of {item.kind} {index}, whose span is {item.span}"
    near = [
        p for p, row in enumerate(theirs) if float((row - ours[position]).abs().max()) < TOLERANCE
    ]
    shift = f"; the reference has this row at position {near[0]}" if near else ""
    raise ConformanceError(
        f"prompt {prompt.name!r}: what goes into the first decoder layer differs from "
        f"{subject.checkpoint.source} by {apart:.2g} ({TOLERANCE:.0e} is allowed), first at "
        f"position {position} ({place}){shift}"
    )


def media_chunks(subject: Subject) -> None:
    """A prompt that shows something may be cut anywhere where no atomic span is."""
    _prompts(subject)
    subject.require_run()
    model = subject.model
    for number, sequence in enumerate(subject.sequences(model)):
        prompt = subject.checkpoint.prompts[number]
        if prompt.shown is None:
            continue
        length = len(sequence.token_ids)
        for cut in _cuts(sequence):
            if any(start < cut < end for start, end in sequence.prompt.atomic_spans):
                continue
            run = model.run([sequence], [[(0, 0, cut)], [(0, cut, length - cut)]])
            check_same(subject, number, run, 0, f"cut after {cut} tokens")


def _cuts(sequence: TokenSequence) -> list[int]:
    """Places to cut a prompt: all, or in a long one those about items and some of the others."""
    ends = [place for item in sequence.prompt.media for place in item.span]
    step = -(-sequence.prompt_len // _CUTS)
    return [
        cut
        for cut in range(1, sequence.prompt_len)
        if cut % step == 0 or any(abs(cut - end) < 2 for end in ends)
    ]


def media_neighbours(subject: Subject) -> None:
    """In any company, of text and of other pictures, a prompt gives what it gives alone."""
    _prompts(subject)
    subject.require_run()
    model, prompts = subject.model, subject.checkpoint.prompts
    sequences = subject.sequences(model)
    shown = [number for number, prompt in enumerate(prompts) if prompt.shown is not None]
    text = [number for number, prompt in enumerate(prompts) if prompt.shown is None]
    for size in (2, 3):
        for company in combinations((*shown[:5], *text[1:2]), size):
            own = [sequences[number] for number in company]
            first = [(place, 0, each.prompt_len) for place, each in enumerate(own)]
            rest = [(p, n, len(own[p].token_ids) - n) for p, _, n in first]
            run = model.run(own, [first, rest])
            names = " and ".join(repr(prompts[number].name) for number in company)
            for place, number in enumerate(company):
                check_same(subject, number, run, place, f"in a batch of {names}")


def media_caches(subject: Subject) -> None:
    """Through the engine: embeddings cold, warm and evicted, and prompts that share a prefix."""
    found = _prompts(subject)
    subject.require_run()
    prompts = [prompt for prompt, _ in found]
    # The same with other pictures, shorter and longer: what caches keep must not be taken for it.
    others: dict[str, Prompt] = {}
    made: list[ProcessedPrompt] = []
    for prompt, shown in found:
        first = _Variant(f"prompt {prompt.name!r}", shown, _process(subject, shown))
        made.append(first.prompt)
        edits = islice(_taken(subject, first, _edited(subject, shown)), 1)
        for each in (*edits, *_taken(subject, first, _continued(subject, first))):
            ids = tuple(each.prompt.token_ids)
            if len(ids) + NEW_TOKENS <= subject.max_model_len:
                tokens = prompt.new_tokens[:NEW_TOKENS]
                others[each.how] = replace(
                    prompt, token_ids=ids, shown=each.shown, new_tokens=tokens
                )
                made.append(each.prompt)
    expected = [subject.continued(prompt) for prompt in prompts]
    changed = [subject.continued(prompt) for prompt in others.values()]
    ways: tuple[dict[str, Any], ...] = (
        {"block_size": 4},
        {
            "enable_prefix_caching": False,
            "encoder_cache_tokens": _least_room(made),
            "max_num_batched_tokens": chunk(subject),
        },
    )
    for settings in ways:
        how = f"through LLM({', '.join(f'{key}={value}' for key, value in settings.items())})"
        with llm_of(subject, **settings) as llm:
            for turn in ("for the first time", "for the second time"):
                outputs = generate(subject, llm, prompts)
                for prompt, output, wanted in zip(prompts, outputs, expected, strict=True):
                    check_output(output, *wanted, f"({prompt.name!r}), {turn}, {how}")
            cached = all(
                o.metrics.num_cached_tokens for o in outputs if len(o.prompt_token_ids) > 5
            )
            if "enable_prefix_caching" not in settings and not cached:
                raise ConformanceError(
                    "prompts with pictures, computed a second time, take nothing from the prefix "
                    "cache; digests and cache_salts must be equal for equal prompts"
                )
            outputs = generate(subject, llm, list(others.values()))
        for name, output, wanted in zip(others, outputs, changed, strict=True):
            check_output(output, *wanted, f"({name}), after it was computed as it is, {how}")


def _least_room(prompts: Sequence[ProcessedPrompt]) -> int:
    """Embeddings of the largest item, or of what an atomic span has of them."""
    return max(
        sum(end - first for first, end in spans if first < stop and start < end)
        for prompt in prompts
        for spans in [[item.span for item in prompt.media]]
        for start, stop in (*spans, *prompt.atomic_spans)
    )
