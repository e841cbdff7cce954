"""Lines that a kernel may come to before it waits for the one ahead, read off its PTX.

It may write nothing: the kernel ahead may still read that memory, or write it. And it may bring
tiles of weights alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

WAIT = "griddepcontrol.wait"
# Lets the next kernel be launched.
LAUNCH = re.compile(r"griddepcontrol\.launch_dependents")
# Writes to global memory, tiles that are brought from it, and numbers.
STORES = re.compile(r"\bst\.global|\b(red|atom)\.\S*global|\.tensor\.\dd\.global\.shared")
TILES = re.compile(r"\.tensor\.\dd\.shared::\w+\.global")
LOADS = re.compile(r"\bld(\.\w+)*\.global")
_LABEL = re.compile(r"([$\w]+):(?!:)")
_BRANCH = re.compile(r"(@\S+\s+)?bra(?:\.uni)?\s+([$\w]+);")
_ENDS = re.compile(r"(@\S+\s+)?(bra|brx|ret|trap)\b")


@dataclass
class _Block:
    """Code without a branch but at its end; labels of an assembly's own are there several times."""

    labels: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)


def _blocks(ptx: str) -> list[_Block]:
    """All of a kernel, in the order of the text."""
    code = ptx[ptx.index("{", ptx.index(".entry")) :]
    blocks = [_Block()]
    for line in (line.strip() for line in code.splitlines()):
        label = _LABEL.match(line)
        if label is not None:
            if blocks[-1].lines:
                blocks.append(_Block())
            blocks[-1].labels.append(label[1])
        elif line and not line.startswith(("//", ".", "$")):
            blocks[-1].lines.append(line)
            if _ENDS.match(line):
                blocks.append(_Block())
    return blocks


def _next(blocks: list[_Block], index: int, table: list[str]) -> list[int]:
    """Blocks that may follow one; ``table`` has the labels of the one indirect branch."""

    def of(label: str) -> int:
        places = [place for place, block in enumerate(blocks) if label in block.labels]
        return min(places, key=lambda place: abs(place - index))

    last = blocks[index].lines[-1] if blocks[index].lines else ""
    found = [index + 1] if index + 1 < len(blocks) else []
    ends = _ENDS.match(last)
    if ends is None:
        return found
    following = found if ends[1] else []
    if ends[2] == "brx":
        return [of(label) for label in table]
    branch = _BRANCH.match(last)
    return following if branch is None else [of(branch[2]), *following]


def early_lines(ptx: str, what: re.Pattern[str]) -> list[str]:
    """Lines of a kind where not every way there has waited."""
    blocks = _blocks(ptx)
    table = re.search(r"\.branchtargets([^;]*);", ptx)
    labels = re.findall(r"[$\w]+", table[1]) if table else []
    following = [_next(blocks, index, labels) for index in range(len(blocks))]
    # Blocks that are come to without a wait.
    early, coming = {0}, [0]
    while coming:
        index = coming.pop()
        if not any(WAIT in line for line in blocks[index].lines):
            new = set(following[index]) - early
            early |= new
            coming += new
    found = []
    for index in sorted(early):
        for line in blocks[index].lines:
            if WAIT in line:
                break
            if what.search(line):
                found.append(line)
    return found
