"""``attnres schedule``: print which sources each site reads."""

import json
from collections.abc import Sequence
from typing import Literal

from attnres.cli.parsing import parse
from attnres.residual import BlockAttnRes, FullAttnRes, PreNorm, Strategy, reads


def main(arguments: Sequence[str]) -> None:
    """Run the command."""
    parse(schedule, arguments, command="schedule")


def schedule(
    *,
    layers: int,
    residual: Literal["block", "full", "prenorm"] = "block",
    sublayers_per_block: int | None = None,
    num_blocks: int | None = None,
    remainder: Literal["tail", "balanced"] = "tail",
    json_output: bool = False,
) -> None:
    """Print which sources each site reads.

    E is the token embedding, c0 the output of sublayer 0; two sublayers, an attention and an MLP, make a layer.

    Args:
        layers: Decoder layers.
        residual: Residual strategy.
        sublayers_per_block: Sublayers (not layers) summed into one source; give this or num-blocks.
        num_blocks: Number of blocks; give this or sublayers-per-block.
        remainder: Where a depth that does not divide goes: a short last block, or spread over all.
        json_output: Print JSON instead of lines.
    """
    strategy: Strategy
    if residual == "block":
        strategy = BlockAttnRes(sublayers_per_block=sublayers_per_block, num_blocks=num_blocks, remainder=remainder)
    else:
        strategy = FullAttnRes() if residual == "full" else PreNorm()
    schedule = reads(2 * layers, strategy)
    if json_output:
        print(json.dumps([[str(source) for source in sources] for sources in schedule]))
        return
    ends = strategy.block_ends(2 * layers)
    lengths = [stop - start for start, stop in zip((0, *ends), ends, strict=False)]
    print(f"{strategy.label}: {layers} layers, {2 * layers} sublayers, {len(schedule)} reads of", end=" ")
    print(f"{sum(map(len, schedule))} sources, at most {max(map(len, schedule))} at once")
    if ends:
        print(f"blocks: {len(ends)} of {', '.join(map(str, lengths))} sublayers")
    for site, sources in enumerate(schedule):
        place = "output" if site == 2 * layers else f"layer {site // 2} {('attention', 'mlp')[site % 2]}"
        print(f"site {site:>3}  {place:<20}  {len(sources):>3}  {', '.join(map(str, sources))}")
