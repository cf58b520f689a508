"""``attnres schedule``: print which sources each site reads."""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import tyro

from attnres.cli.parsing import parse
from attnres.errors import ConfigError
from attnres.experiments.arms import parse_arm
from attnres.residual import BlockAttnRes, Strategy, reads


def main(arguments: Sequence[str]) -> None:
    """Run the command."""
    parse(schedule, arguments, command="schedule")


def schedule(
    *,
    layers: int,
    residual: str = "block",
    sublayers_per_block: int | None = None,
    num_blocks: int | None = None,
    remainder: Literal["tail", "balanced"] = "tail",
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> None:
    """Print which sources each site reads.

    E is the token embedding, c0 the output of sublayer 0; two sublayers, an attention and an MLP, make a layer.

    Args:
        layers: Decoder layers.
        residual: Residual strategy (see attnres strategies), with settings as in window:window=8.
        sublayers_per_block: Sublayers (not layers) summed into one source; give this or num-blocks.
        num_blocks: Number of blocks; give this or sublayers-per-block.
        remainder: Where a depth that does not divide goes: a short last block, or spread over all.
        as_json: Print JSON instead of lines.
    """
    strategy: Strategy
    if residual == "block" and (sublayers_per_block or num_blocks):
        strategy = BlockAttnRes(sublayers_per_block=sublayers_per_block, num_blocks=num_blocks, remainder=remainder)
    else:
        if residual != "block":
            given = {"sublayers-per-block": sublayers_per_block, "num-blocks": num_blocks}
            _refuse_block_settings(residual, given | {"remainder": None if remainder == "tail" else remainder})
        strategy = parse_arm(residual)
    schedule = reads(2 * layers, strategy)
    if as_json:
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


def _refuse_block_settings(residual: str, given: Mapping[str, object]) -> None:
    for name, value in given.items():
        if value is not None:
            raise ConfigError(f"residual is {residual!r} and {name} is {value}; allowed: {name} with block only")
