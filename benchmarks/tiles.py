"""Compare tiles, and other choices of kernels, in whole decode steps, in turn on one card.

    python benchmarks/tiles.py MODEL [--batches 8,32] [--rounds 4] [--try "KEY=VALUES ..."] ...
        [--quantization fp8] [--kv-cache-dtype fp8]

Each ``--try`` is one or more settings, separated by spaces, measured against the current settings:

- ``4096x14336=128,128,4,wx,8,4,256``: the tile of linears with a weight ``[N, K]`` as it is stored
  (a gate and up's has both), the fields of ``kernels.linear.tiles.Tile`` in their order; 0 for
  what is done without a tile.
- ``attention=64,2,3``: the fields of ``kernels.attention.decode.Tile`` in their order.
- ``pieces=8``: so many quarters of a split has attention's longest row.
- ``begin=2.5``, ``split=1.7``, ``turn=0.6``: those fields of ``kernels.attention.decode.Costs``.
- ``experts=32,64,128,4,3``: the tile of experts whose pairs are grouped, as ``_tiles`` of
  ``kernels.experts.triton`` gives it.
- ``gate=4,512,5``, ``down=2,4096,4``: ``GATE_TILE`` and ``DOWN_TILE`` of ``kernels.experts.few``.
- ``deferred=64``: the norms of more tokens divide, whatever the linears around them.
- ``4096x14336.prefetch=8192``: that field of the tile that such linears have.
- ``prefetch=4``: all tiles fetch so many times as much of the weight before they wait.
- ``few=64``: so many rows take tiles of 8-bit floats, and more are quantised, whatever the weight.
- ``products=192,192,64``: rows in 8-bit floats up to which Hopper's own kernel multiplies them by
  8-bit floats: for results of more than 8192 columns, for others that a norm adds up, and for the
  rest; ``products=0,0,0`` is cuBLAS.
- ``products.4096x14336=64,2,8,4``: the tile of the product of rows in 8-bit floats by such a
  weight, the fields of ``kernels.linear.tiles.ProductTile`` in their order.
- ``gated.9728x896=80,2``: columns of a tile of Hopper's gate and up by such a weight, and the warp
  groups that multiply it; ``gated.9728x896=0`` leaves it to others.
- ``parts.896x4864=128,9``: columns and parts of K of Hopper's kernel for such a weight before a
  norm; ``parts.896x4864=0`` leaves it to cuBLAS.
- ``norms=8``: warps of a norm that quantises few long rows; ``quantizing=16``: those of programs
  that quantise attention's rows.
- ``parts=0``: heads are filled up to a power of 2; ``filled=0``: shapes that no measured one is
  like have no tile.
- ``held=2,64``: weights that have room wait in shared memory with so many rows, none with 1,0;
  ``registers=96``: weights of one row wait in so many registers of a thread at most.
- ``start=2``: attention is launched behind the products of queries, keys and values, with 1 when
  these have waited, with 0 at once; but for 2 it asks for tokens before it waits. ``late=0``
  changes when it is launched alone.
- ``carveout._linear_kernel_of_one_row=100``: kernels with this in their name prefer so many per
  cent of the first cache as shared memory, -1 as the driver chooses. Those of decode attention,
  whose every launch says what they prefer, do as ``keeps`` has it.
- ``keeps=132``: multiprocessors that run decode attention are to have so many KiB of shared memory,
  with 0 as many as the driver chooses.
- ``even=0``: programs of decode attention without a split are the last, and as many as there are.
- ``turned=0``: no heads are columns of attention's products.
- ``teams=0``: codes have no programs of several warp groups that share x.
- ``chain=0``: no linears from one attention to the next are one launch; ``deals=0``: none
  of 8-bit floats deals out tiles of gate and up; ``last=0``: those behind the last attention are
  launched apart; ``shared=196``: a program in 8-bit floats takes so many KiB of shared memory.
- ``at_once=0``: what follows attention is launched behind its products, with 1 at once.
- ``coded=0``: norms and activations quantise no rows; ``scaled=0``: the rotation applies no scales.

Random weights and a random cache, as in ``decode.py``; rows of 1030 tokens, and of 200 to 1860 at
random, the longest first. The least and the median of ``--rounds`` rounds of 20 replays between
CUDA events are printed; the variations take turns. A variation that does not run, such as a tile
too large for a multiprocessor, is named and left out. The script uses private parts of the engine.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.decode import REPLAYS, fill_cache, place_rows, wait_for_kernels
from benchmarks.gpu import build
from benchmarks.workloads import SHAPES
from engine_core.nn.blocks import agree


def fields(values: str) -> list[Any]:
    """Split at commas; numbers become int, or float if they have a point."""
    return [
        int(part) if part.isdigit() else float(part) if "." in part else part
        for part in values.split(",")
    ]


@contextlib.contextmanager
def carved(part: str, percent: int) -> Iterator[None]:
    """As long as it lasts, kernels with this in their name prefer so much of the first cache."""
    shared = importlib.import_module("engine_core.kernels.launch.shared")
    names = [name for name in shared._functions if part in name]
    before = {name: shared._percents.get(name, shared.AS_IT_CHOOSES) for name in names}
    try:
        for name in names:
            shared.prefer(name, percent)
        yield
    finally:
        # A variation that does not run leaves nothing to the others.
        for name in names:
            shared.prefer(name, before[name])


@contextlib.contextmanager
def settings(text: str) -> Iterator[None]:
    """The settings of one ``--try`` while it lasts.

    Raises:
        SystemExit: one is not of the forms above.
    """
    attention = importlib.import_module("engine_core.kernels.attention.decode")
    linear = importlib.import_module("engine_core.kernels.linear.tiles")
    epilogue = importlib.import_module("engine_core.nn.epilogue")
    fp8 = importlib.import_module("engine_core.nn.quantization.fp8_checkpoint")
    chain = importlib.import_module("engine_core.kernels.linear.chain")
    linears = importlib.import_module("engine_core.nn.linear")
    declined: Callable[..., str | None] = epilogue.Deferral.declined
    tiles: dict[tuple[int, int], Any] = {}
    changes: dict[tuple[int, int], dict[str, Any]] = {}
    products: dict[tuple[int, int], Any] = {}
    gated: dict[tuple[int, int], list[int]] = {}
    parted: dict[tuple[int, int], list[int]] = {}
    times = 1

    def choosing(choose: Callable[..., Any]) -> Callable[..., Any]:
        def chosen(rows: int, n: int, k: int, *given: Any, **options: Any) -> Any:
            tile = tiles[n, k] if (n, k) in tiles else choose(rows, n, k, *given, **options)
            if tile is None:
                return None
            changed = {"prefetch": tile.prefetch * times} | changes.get((n, k), {})
            return replace(tile, **changed)

        return chosen

    with contextlib.ExitStack() as stack:
        for setting in text.split():
            key, _, values = setting.partition("=")
            key, _, field = key.partition(".")
            n, _, k = key.partition("x")
            if key in attention.Costs._fields:
                costs = attention.H200._replace(**{key: float(values)})
                stack.enter_context(patch.object(attention, "H200", costs))
            elif key == "pieces":
                launch: Callable[..., Any] = attention.launch

                def cut(*given: Any, launch: Callable[..., Any] = launch, n: str = values) -> Any:
                    items = given[0] * attention.most_splits(given[0])
                    return launch(*given)._replace(pieces=int(n), items=items)

                stack.enter_context(patch.object(attention, "launch", cut))
            elif key == "deferred":
                most = int(values)
                stack.enter_context(
                    patch.object(
                        epilogue.Deferral,
                        "declined",
                        lambda self, call, most=most: (
                            declined(self, call) if call.rows <= most else "too many rows"
                        ),
                    )
                )
            elif key == "experts":
                experts = importlib.import_module("engine_core.kernels.experts.triton")
                tile = tuple(fields(values))
                stack.enter_context(patch.object(experts, "_tiles", lambda *_, t=tile: t))
            elif key in ("gate", "down"):
                few = importlib.import_module("engine_core.kernels.experts.few.triton")
                tile = tuple(fields(values))
                stack.enter_context(patch.object(few, f"{key.upper()}_TILE", tile))
            elif key == "attention":
                tile = attention.Tile(*fields(values))
                stack.enter_context(patch.object(attention, "tile_of", lambda *_, t=tile: t))
            elif key == "few":
                for name in ("MOST_FP8_ROWS", "MOST_LARGE_ROWS"):
                    stack.enter_context(patch.object(linear, name, int(values)))
            elif key == "products" and field:
                n, _, k = field.partition("x")
                products[int(n), int(k)] = linear.ProductTile(*fields(values))
            elif key in ("gated", "parts") and field:
                n, _, k = field.partition("x")
                (gated if key == "gated" else parted)[int(n), int(k)] = fields(values)
            elif key == "norms":
                norm = importlib.import_module("engine_core.kernels.norm.triton")
                limit, most = norm._FEW_ROWS, int(values)
                stack.enter_context(
                    patch.object(
                        norm,
                        "_warps",
                        lambda size, rows, coded, warps=norm._warps, limit=limit, most=most: (
                            most if coded and rows <= limit else warps(size, rows, coded)
                        ),
                    )
                )
            elif key == "quantizing":
                codes = importlib.import_module("engine_core.kernels.row_codes.triton")
                sizes: Callable[[int], tuple[int, int, int]] = codes.tile_of
                stack.enter_context(
                    patch.object(
                        codes,
                        "tile_of",
                        lambda columns, most=int(values), sizes=sizes: (*sizes(columns)[:2], most),
                    )
                )
            elif key == "products":
                limits = ("MOST_WIDE_ROWS", "MOST_PARTED_ROWS", "MOST_NARROW_ROWS")
                for name, rows in zip(limits, fields(values), strict=True):
                    stack.enter_context(patch.object(linear, name, rows))
            elif key == "parts" and values == "0":
                stack.enter_context(patch.object(attention, "rest_of", lambda *_: 0))
            elif key == "filled" and values == "0":
                stack.enter_context(patch.object(linear, "_few_rows_tile", lambda *_: None))
            elif key == "held":
                first, last = fields(values)
                stack.enter_context(patch.object(linear, "HELD_FROM", first))
                stack.enter_context(patch.object(linear, "HELD_TO", last))
            elif key in ("late", "start"):
                stored = importlib.import_module("engine_core.kernels.linear.epilogues.triton")
                made: Callable[..., Any] = stored.Stored.of

                def started(
                    *given: Any, made: Callable[..., Any] = made, n: str = values, **options: Any
                ) -> Any:
                    return made(*given, **(options | {"late": int(n)}))

                stack.enter_context(patch.object(stored.Stored, "of", started))
                if key == "start":
                    stack.enter_context(
                        patch.object(
                            attention, "start_by", lambda *_, n=int(values): attention.Start(n)
                        )
                    )
            elif key == "carveout":
                stack.enter_context(carved(field, int(values)))
            elif key == "keeps":
                stack.enter_context(
                    patch.object(attention, "shared_of", lambda *_, n=int(values), **__: n)
                )
            elif key == "even" and values == "0":
                evenly: Callable[..., Any] = attention.evenly

                def uneven(cut: Any, *given: Any, evenly: Callable[..., Any] = evenly) -> Any:
                    even = evenly(cut, *given)
                    return even._replace(items=cut.items, even=False, last_from=0)

                stack.enter_context(patch.object(attention, "evenly", uneven))
            elif key == "at_once":
                stack.enter_context(
                    patch.object(attention, "leaves_room", lambda *_, v=values == "1", **__: v)
                )
            elif key == "deals":
                floats = importlib.import_module("engine_core.kernels.linear.chain.hopper.triton")
                stack.enter_context(patch.object(floats, "_DEALS", values == "1"))
            elif key == "shared":
                floats = importlib.import_module("engine_core.kernels.linear.chain.hopper.triton")
                stack.enter_context(patch.object(floats, "_MOST_SHARED", int(values) << 10))
            elif key == "last" and values == "0":
                apart: Callable[..., Any] = linears._declined_chain

                def of_others(layer: Any, chained: Any, call: Any, apart: Any = apart) -> Any:
                    wanted = chained.following is not None
                    return apart(layer, chained, call) if wanted else "not wanted"

                stack.enter_context(patch.object(linears, "_declined_chain", of_others))
            elif key == "turned" and values == "0":
                launch = attention.launch

                def as_rows(*given: Any, launch: Callable[..., Any] = launch) -> Any:
                    cut = launch(*given)
                    return cut._replace(block_g=max(16, cut.block_g))

                stack.enter_context(patch.object(attention, "launch", as_rows))
            elif key == "registers":
                stack.enter_context(patch.object(linear, "HELD_REGISTERS", int(values)))
            elif key == "prefetch":
                times = int(values)
            elif key == "coded" and values == "0":
                stack.enter_context(
                    patch.object(epilogue.Coding, "declined", lambda self, call: "not wanted")
                )
            elif key == "scaled" and values == "0":
                stack.enter_context(
                    patch.object(fp8.Fp8Method, "scales_later", lambda self, layer, call: False)
                )
            elif key == "teams" and values == "0":
                for chooser in ("choose_teams_tile", "choose_bytes_tile"):
                    stack.enter_context(patch.object(linear, chooser, lambda *_: None))
            elif key == "chain":
                most = int(values)
                stack.enter_context(patch.object(chain, "MOST_ROWS", most))
            elif n.isdigit() and k.isdigit() and field:
                changes.setdefault((int(n), int(k)), {})[field] = fields(values)[0]
            elif n.isdigit() and k.isdigit():
                tiles[int(n), int(k)] = None if values == "0" else linear.Tile(*fields(values))
            else:
                raise SystemExit(f"{setting!r} is none of those that {Path(__file__).name} knows")
        if products:
            choose: Callable[..., Any] = linear.product_tile

            def product(rows: int, n: int, k: int, *given: Any, **options: Any) -> Any:
                tile = products.get((n, k))
                return choose(rows, n, k, *given, **options) if tile is None else tile

            stack.enter_context(patch.object(linear, "product_tile", product))
        if gated:
            gated_tile: Callable[..., Any] = linear.gated_tile

            def tile_of(rows: int, n: int, k: int, *given: Any) -> Any:
                tile = gated.get((n, k))
                if tile is None:
                    return gated_tile(rows, n, k, *given)
                return linear.GatedTile(*tile) if any(tile) else None

            stack.enter_context(patch.object(linear, "gated_tile", tile_of))
        if parted:
            choose_parted: Callable[..., Any] = linear.choose_parts_tile

            def parts_of(rows: int, n: int, k: int, *given: Any) -> Any:
                tile = parted.get((n, k))
                if tile is None:
                    return choose_parted(rows, n, k, *given)
                return linear.PartsTile(*tile) if any(tile) else None

            stack.enter_context(patch.object(linear, "choose_parts_tile", parts_of))
        for name in (
            "choose_tile",
            "choose_held_tile",
            "choose_fp8_tile",
            "choose_group_tile",
            "choose_codes_tile",
            "choose_teams_tile",
            "choose_bytes_tile",
        ):
            chosen = choosing(getattr(linear, name))
            stack.enter_context(patch.object(linear, name, chosen))
        yield


def captured_steps(
    runner: Any, positions: list[int], tries: list[str], named: str
) -> dict[str, Any]:
    """Steps of rows at these positions as they are, and with each of the settings that runs."""
    captured = {}
    for text in ["", *tries]:
        runner._decode_graphs._graphs.clear()
        with settings(text):
            # What the linears agree on may be another.
            agree(runner.model, runner.device)
            try:
                captured[text] = runner._decode_graphs.begin(range(len(positions)), positions)
            except RuntimeError as error:
                print(f"{named}: {error}  {text}", flush=True)
    agree(runner.model, runner.device)
    return captured


def times_in_turn(
    graphs: Any, captured: dict[str, Any], positions: list[int], rounds: int
) -> dict[str, list[float]]:
    """Milliseconds of each captured step in so many rounds, in which they take turns."""
    times: dict[str, list[float]] = {text: [] for text in captured}
    for _ in range(rounds):
        for text, step in captured.items():
            begun = graphs.begin(range(len(positions)), positions)
            # A step of other rows would take anything for the number of a row.
            assert begun.room.rows == step.room.rows, f"captured for {step.room.rows} rows: {text}"
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            step.graph.replay()
            begin.record()
            for _ in range(REPLAYS):
                step.graph.replay()
            end.record()
            end.synchronize()
            times[text].append(begin.elapsed_time(end) / REPLAYS)
    return times


@torch.inference_mode()
def compare(
    name: str,
    batches: list[int],
    tries: list[str],
    rounds: int,
    folder: Path,
    options: dict[str, str | None],
) -> None:
    """Print a line for each batch size and variation."""
    with build(name, folder, deterministic=False, **options) as llm:
        runner = llm.engine.core.executor._runner
        graphs = runner._decode_graphs
        wait_for_kernels(runner)
        fill_cache(runner)
        for batch in batches:
            generator = random.Random(1)
            unequal = sorted((generator.randint(200, 1860) for _ in range(batch)), reverse=True)
            captured = captured_steps(runner, unequal, tries, f"{name} {batch:4} rows")
            for label, positions in (("1030 tokens", [1030] * batch), ("200 to 1860", unequal)):
                place_rows(runner, positions)
                times = times_in_turn(graphs, captured, positions, rounds)
                for text, ms in times.items():
                    figures = f"{min(ms):7.3f} {statistics.median(ms):7.3f}"
                    print(
                        f"{name} {batch:4} rows {label}: {figures}  {text or 'as it is'}",
                        flush=True,
                    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=list(SHAPES))
    parser.add_argument("--batches", default="8,32,64,128,256")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--quantization")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--try", dest="tries", action="append", default=[], metavar="SETTINGS")
    arguments = parser.parse_args()
    for text in arguments.tries:
        with settings(text):
            pass
    print(torch.cuda.get_device_name(), torch.__version__)
    with tempfile.TemporaryDirectory() as folder:
        compare(
            arguments.model,
            [int(part) for part in arguments.batches.split(",")],
            arguments.tries,
            arguments.rounds,
            Path(folder),
            {
                "quantization": arguments.quantization,
                "kv_cache_dtype": arguments.kv_cache_dtype,
            },
        )


if __name__ == "__main__":
    main()
