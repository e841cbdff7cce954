"""A sound family that sees passes the kit; each way to break it fails the checks made for it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from planted import LOOKS, Fault, installed, run_kit
from random_examples import FULL

from engine_core.testing.reference import TinyCheckpoint, prepare
from engine_core.testing.subject import find_family

# What looks at pictures; the others are checked by the families in test_kit_bites.py.
CHECKS = {
    "test_logits",
    "test_media_items",
    "test_media_embeddings",
    "test_media_chunks",
    "test_media_neighbours",
    "test_media_caches",
}
# Those that compare with the model alone, which must give the reference's logits at least once.
RUNS = {"test_media_chunks", "test_media_neighbours", "test_media_caches"}
SAME = r"has the digest of another one \(prompt '[a-z ]+'"

# An outline in place of a picture, of which it has the size.
_ARRAY = "picture = np.asarray(pictures.pop(0))"
_OUTLINE = """picture = pictures.pop(0)
            if isinstance(picture, MediaItem):
                picture = np.zeros((*picture.features["size"], 3), np.uint8)"""

FAULTS = {
    "a digest that ignores the content": Fault(
        "inputs.py",
        "media_digest(picture, light)",
        "media_digest(picture.shape, light)",
        {
            "test_media_items": r"'a picture first' with image 0 of another number in the middle, "
            rf"item 0, {SAME}, item 0\), but other features",
            "test_media_embeddings": r"'three pictures': .* first at position 8 \(embedding 0 of "
            r"image 1, whose span is \(8, 14\)\); the reference has this row at position 14",
            "test_media_chunks": r"'three pictures' cut after 9 tokens",
            "test_media_caches": r"\('three pictures'\), for the first time, through LLM\(",
            "test_logits": r"'three pictures': logits differ",
        },
    ),
    "a digest of the first row": Fault(
        "inputs.py",
        "media_digest(picture, light)",
        "media_digest(picture[:1], picture.shape, light)",
        {
            "test_media_items": rf"with image 0 of another number in the middle, item 0, {SAME}",
            "test_media_caches": r"of another number in the middle\), after it was computed as it",
        },
    ),
    "a digest that ignores options": Fault(
        "inputs.py",
        "media_digest(picture, light)",
        "media_digest(picture)",
        {
            "test_media_items": rf"'a picture first' with the options .*'light': 0\.5.*{SAME}",
            "test_media_neighbours": r"in a batch of 'a picture first' and 'a lighter picture'",
            "test_media_caches": r"\('a lighter picture'\), for the first time, through LLM\(",
        },
    ),
    "a digest that ignores the shape": Fault(
        "inputs.py",
        "media_digest(picture, light)",
        "media_digest(picture.tobytes(), light)",
        {"test_media_items": rf"'a picture first' with image 0 of swapped sizes, item 0, {SAME}"},
    ),
    "a span off by one": Fault(
        "inputs.py",
        "(start, start + high * wide)",
        "(start + 1, start + 1 + high * wide)",
        {
            "test_media_embeddings": r"first at position 0 \(text\)",
            "test_logits": r"test_media_embeddings says what is wrong",
        },
    ),
    "spans swapped between two pictures": Fault(
        "inputs.py",
        "pictures.pop(0)",
        "pictures.pop()",
        {
            "test_media_embeddings": r"'three pictures': .* first at position 1 \(embedding 0 of "
            r"image 0, whose span is \(1, 7\)\); the reference has this row at position 14",
            "test_logits": r"'three pictures': logits differ",
        },
    ),
    "an embedding too few": Fault(
        "model.py",
        'self.eye(item["pixels"]) for',
        'self.eye(item["pixels"])[1:] for',
        {
            "test_media_embeddings": r"gives \[5, 32\] for an image whose span \(0, 6\) has 6 pos",
            "test_logits": r"gives \[5, 32\] for an image",
        },
        blocked=RUNS,
    ),
    "placeholders too many": Fault(
        "inputs.py",
        "            ids += [PICTURE] * high * wide\n",
        "            ids += [PICTURE] * high * wide + [1]\n            places.append((0, 0))\n",
        {
            "test_media_items": r"'a picture first': the input processor makes 9 tokens of it.*"
            r" the reference has 8",
            "test_media_embeddings": r"makes 9 tokens of it",
            "test_logits": r"makes 9 tokens of it",
        },
        blocked=RUNS,
    ),
    "linear positions": Fault(
        "model.py",
        '        inputs["position_ids"] = places[None]\n',
        "",
        {
            "test_logits": r"'a picture first': logits differ .*inside it .*self_attn\.o_proj "
            r"differs first.*What goes into the first layer is the reference's: look at positions"
        },
    ),
    "positions of the answer that forget the pictures": Fault(
        "inputs.py",
        '"later": position - len(ids)',
        '"later": 0',
        {"test_logits": r"position 8, which is decode step 1"},
    ),
    "positions that depend on the prompt's length": Fault(
        "inputs.py",
        "items, position = [], [], [], 0",
        "items, position = [], [], [], len(token_ids)",
        {
            "test_media_items": r"token_state is .* the prefix cache takes them for one",
            "test_media_caches": r"with text after it\), after it was computed as it is",
        },
    ),
    "a picture that sees the others of its batch": Fault(
        "model.py",
        'return [self.eye(item["pixels"]) for item in items]',
        'mean = torch.cat([item["pixels"] for item in items]).mean(0)\n'
        '        return [self.eye(i["pixels"] - i["pixels"].mean(0) + mean) for i in items]',
        {
            "test_media_embeddings": r"'a picture first', item 0: its embeddings, computed "
            r"together with the others, differ by",
            "test_logits": r"'three pictures': logits differ",
            "test_media_chunks": r"'three pictures' cut after \d+ tokens",
            "test_media_neighbours": r"in a batch of",
            "test_media_caches": r"for the first time, through LLM\(",
        },
    ),
    "embeddings that depend on the order": Fault(
        "model.py",
        'self.eye(item["pixels"]) for item in items]',
        'self.eye(item["pixels"]) + n for n, item in enumerate(items)]',
        {
            "test_media_embeddings": r"computed together with the others, differ by",
            "test_logits": r"'three pictures': logits differ",
            "test_media_chunks": r"'three pictures' cut after \d+ tokens",
            "test_media_neighbours": r"in a batch of",
            "test_media_caches": r"for the first time, through LLM\(",
        },
    ),
    "embeddings in another order than the pictures": Fault(
        "model.py",
        'self.eye(item["pixels"]) for item in items]',
        'self.eye(i["pixels"]) for i in sorted(items, key=lambda i: float(i["pixels"].sum()))]',
        {
            "test_media_embeddings": r"computed together with the others, differ by",
            "test_logits": r"'three pictures': logits differ",
            "test_media_chunks": r"'three pictures' cut after \d+ tokens",
            "test_media_neighbours": r"in a batch of",
            "test_media_caches": r"for the first time, through LLM\(",
        },
    ),
    "an encoder's output that the next one overwrites": Fault(
        "model.py",
        'return [self.eye(item["pixels"]) for item in items]',
        "out = []\n"
        "        for item in items:\n"
        '            made = self.eye(item["pixels"])\n'
        "            place = _OUT.setdefault((made.shape, made.dtype), made)\n"
        "            out.append(place.copy_(made))\n"
        "        return out",
        {
            "test_media_embeddings": r"'a picture first', item 0: its embeddings, computed toge",
            "test_logits": r"'three pictures': logits differ",
            "test_media_chunks": r"'three pictures' cut after \d+ tokens",
            "test_media_neighbours": r"in a batch of",
            "test_media_caches": r"for the first time, through LLM\(",
        },
        more={"class Eye(nn.Module):": "_OUT: dict = {}\n\n\nclass Eye(nn.Module):"},
    ),
    "features that the model changes in place": Fault(
        "model.py",
        'self.eye(item["pixels"]) for',
        'self.eye(item["pixels"].mul_(1.01).div(1.01)) for',
        {
            "test_media_embeddings": r"computed together with the others, differ by",
            "test_media_chunks": r"'a picture first' cut after \d tokens",
            "test_media_neighbours": r"in a batch of",
        },
    ),
    "a model that keeps its last picture": Fault(
        "model.py",
        'return [self.eye(item["pixels"]) for item in items]',
        'self.last = items[-1]["pixels"]\n'
        '        return [self.eye(item["pixels"]) for item in items]',
        {"test_media_embeddings": r"embed_media changes the model itself: Looks\w+\.last \(set\)"},
    ),
    "a processor that keeps the last options": Fault(
        "inputs.py",
        'light = options.get("light", 0.0)',
        'self.kept = options.get("light", getattr(self, "kept", 0.0))\n        light = self.kept',
        {
            "test_media_items": r"'a picture first'.*: processed once more, after others, it has "
            r"other digests of items; an input processor keeps nothing",
            "test_media_caches": r"\('a picture first'\)",
            "test_media_embeddings": r"'a picture first': what goes into the first decoder layer",
            "test_logits": r"'three pictures': logits differ",
        },
    ),
    "a processor that does not take its own items again": Fault(
        "inputs.py",
        "    @classmethod\n    def condition",
        "    reuses_items: ClassVar[bool] = True\n\n    @classmethod\n    def condition",
        {
            "test_media_items": r"with its own items of another prompt in place of what they were "
            r"made of, ValueError: .*reuses_items says that it takes them",
            "test_media_caches": r"LooksProcessor.process_media failed: ValueError: not enough",
        },
    ),
    "a picture of another size than is said": Fault(
        "inputs.py",
        "    @classmethod\n    def condition",
        "    def picture_outline(self, height, width, options):\n"
        "        tall = (width + 1) // 2 * height * 2\n"
        '        return MediaItem("image", b"", (0, tall), {"size": (height, width)})\n\n'
        "    @classmethod\n    def condition",
        {
            "test_media_items": r"'a picture first' with pictures of 1 x 1 pixels: "
            r"picture_outline\(1, 1, \{\}\) has 2 embeddings, and each picture 1;",
        },
        more={_ARRAY: _OUTLINE},
    ),
    "a picture whose size is said the wrong way round": Fault(
        "inputs.py",
        "    @classmethod\n    def condition",
        "    def picture_outline(self, height, width, options):\n"
        "        size = (width, height)\n"
        '        return MediaItem("image", b"", (0, width * height), {"size": size})\n\n'
        "    @classmethod\n    def condition",
        {
            "test_media_items": r"'a picture first' with pictures of 36 x 24 pixels: with their "
            r"picture_outline in place of them it has other token_state",
        },
        more={_ARRAY: _OUTLINE},
    ),
    "a size that is not taken in place of a picture": Fault(
        "inputs.py",
        "    @classmethod\n    def condition",
        "    def picture_outline(self, height, width, options):\n"
        '        return MediaItem("image", b"", (0, width * height))\n\n'
        "    @classmethod\n    def condition",
        {
            "test_media_items": r"with pictures of 1 x 1 pixels: with the picture_outline\(1, 1, .*"
            r" in place of each, ValueError: .*process_media takes it",
        },
    ),
    "sizes that are said and never taken": Fault(
        "inputs.py",
        "    @classmethod\n    def condition",
        "    def picture_outline(self, height, width, options):\n"
        '        return MediaItem("image", b"", (0, width * height))\n\n'
        "    @classmethod\n    def condition",
        {"test_media_items": r"no prompt takes pictures .* sizes 1 x 1, .*have a case with a"},
        more={
            _ARRAY: f"""{_ARRAY}
            if len(picture) > 9 or picture.shape[:2] == (1, 1):
                raise RequestError("no such size")"""
        },
    ),
    "parts that give something else than the whole": Fault(
        "model.py",
        "    def prepare_inputs_for_generation(",
        "    def embed_media_parts(self, kind, items):\n"
        "        for number, _ in enumerate(items):\n"
        "            yield number / len(items)\n"
        "        return self.embed_media(kind, items)[::-1]\n\n"
        "    def prepare_inputs_for_generation(",
        {"test_media_embeddings": r"item 0: its embeddings, computed by embed_media_parts, differ"},
    ),
    "features of half the bits": Fault(
        "inputs.py",
        ".astype(np.float32)",
        ".astype(np.float16)",
        {
            "test_media_embeddings": r"'a picture first': what goes into .* by \S+ \(1e-04 is all.*"
            r" first at position \d \(embedding \d of image 0, whose span is \(0, 6\)\)",
            "test_logits": r"'a picture first': logits differ",
        },
    ),
    "token state of the next picture": Fault(
        "inputs.py",
        "for row in range(high) for _ in range(wide)",
        "for row in range(other[0]) for _ in range(other[1])",
        {
            "test_media_items": r"token_state is .* the prefix cache takes them for one",
            "test_media_embeddings": r"'three pictures': .*first at position \d \(embedding \d of "
            r"image 0",
            "test_logits": r"'three pictures': logits differ",
        },
        more={
            "            start = len(ids)\n": "            start = len(ids)\n"
            "            other = (pictures[0] if pictures else picture).shape\n"
        },
    ),
    "salts that were dropped": Fault(
        "inputs.py",
        "cache_salts=(len(items),) if items else ()",
        "cache_salts=()",
        {"test_media_caches": r"\(prompt 'three pictures' with its last item left out\), after it"},
    ),
    "salts that differ each time": Fault(
        "inputs.py",
        "cache_salts=(len(items),) if items else ()",
        "cache_salts=(len(items), id(items))",
        {
            "test_media_items": r"it has other cache_salts",
            "test_media_caches": r"take nothing from the prefix cache",
        },
    ),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyCheckpoint]:
    with installed(tmp_path_factory.mktemp("sound"), package=LOOKS):
        cases = find_family(LOOKS).cases
        return {c.name: prepare(c, tmp_path_factory.mktemp(c.name)) for c in cases}


def test_a_sound_family_passes(tmp_path: Path, checkpoints: dict[str, TinyCheckpoint]) -> None:
    with installed(tmp_path, package=LOOKS):
        # The other checks pass for the families that see.
        only = None if FULL in os.environ else CHECKS
        assert run_kit(checkpoints, LOOKS, only) == ({}, set())


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_a_fault_is_found(
    fault: Fault, tmp_path: Path, checkpoints: dict[str, TinyCheckpoint]
) -> None:
    """``make planted`` also shows that no other check fails."""
    only = CHECKS if FULL in os.environ else {*fault.fails, *fault.blocked, "test_logits"}
    with installed(tmp_path, {fault.old: fault.new, **fault.more}, fault.file, LOOKS):
        failed, blocked = run_kit(checkpoints, LOOKS, only)
    found = {name: text for (name, _), text in failed.items()}
    assert set(found) == set(fault.fails), found
    for check, message in fault.fails.items():
        assert pytest.RaisesExc(Exception, match=message).matches(Exception(found[check])), found[
            check
        ]
    assert {name for name, _ in blocked} == fault.blocked
