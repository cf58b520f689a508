"""Accelerators and links by their data sheets, and the shares of these numbers that a run is assumed to reach.

A data sheet says what cannot be exceeded. What a training run gets of it depends on kernels and shapes, so the shares
are assumptions: they are options, and every report says them.
"""

from dataclasses import dataclass

from attnres.errors import ConfigError

NODE_SIZE = 8
"""Accelerators of one NVLink domain."""


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One accelerator."""

    name: str
    """For tables."""
    flops: float
    """Dense bfloat16 operations per second."""
    memory_bandwidth: float
    """Bytes per second between memory and chip."""
    memory: float
    """Bytes of memory."""
    source: str
    """Where the numbers are from."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """A way from one accelerator to another, in one direction."""

    name: str
    """For tables."""
    bandwidth: float
    """Bytes per second, in one direction."""
    latency: float
    """Seconds before the first byte; an assumption, no data sheet has it."""
    source: str
    """Where the bandwidth is from."""


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Which shares of the data sheet a run reaches."""

    compute: float = 0.4
    """Of the arithmetic, in matrix products and attention, communication and waits not counted."""
    memory: float = 0.8
    """Of the memory bandwidth, in the kernels of the residual path; the best published reach 0.88 forward."""
    link: float = 0.8
    """Of a link's bandwidth, for transfers of many megabytes."""

    def __post_init__(self) -> None:
        for name in ("compute", "memory", "link"):
            value = getattr(self, name)
            if not 0 < value <= 1:
                raise ConfigError(f"{name} efficiency is {value}; allowed: above 0, up to 1")


ACCELERATORS = {
    "h100": Accelerator(
        name="H100 SXM",
        flops=989.4e12,
        memory_bandwidth=3.35e12,
        memory=80e9,
        source="NVIDIA H100 data sheet: 1,979 TFLOPS bf16 with sparsity, half of it dense; 3.35 TB/s; 80 GB",
    ),
    "h200": Accelerator(
        name="H200 SXM",
        flops=989.4e12,
        memory_bandwidth=4.8e12,
        memory=141e9,
        source="NVIDIA H200 data sheet: 1,979 TFLOPS bf16 with sparsity, half of it dense; 4.8 TB/s; 141 GB",
    ),
}
"""By the word on the command line."""

LINKS = {
    "nvlink": Link(
        name="NVLink 4",
        bandwidth=450e9,
        latency=5e-6,
        source="NVIDIA H100 and H200 data sheets: 900 GB/s both directions together",
    ),
    "infiniband": Link(
        name="InfiniBand NDR",
        bandwidth=50e9,
        latency=10e-6,
        source="NVIDIA DGX H100/H200 user guide: one 400 Gb/s adapter for each accelerator",
    ),
}
"""By the word on the command line."""

LINK_CHOICES = ("node", *LINKS)
"""``"node"``: NVLink inside a node of eight, InfiniBand between nodes."""


def accelerator(name: str) -> Accelerator:
    """The accelerator of a name.

    Raises:
        ConfigError: There is none.
    """
    if name not in ACCELERATORS:
        raise ConfigError(f"gpu is {name!r}; allowed: {', '.join(ACCELERATORS)}")
    return ACCELERATORS[name]


def link_between(choice: str, sender: int, receiver: int, tensor_ranks: int) -> Link:
    """The link between two ranks of the pipeline; tensor ranks are neighbours, and nodes are filled in order.

    Raises:
        ConfigError: There is no such choice.

    Examples:
        >>> link_between("node", 0, 1, tensor_ranks=4).name, link_between("node", 1, 2, tensor_ranks=4).name
        ('NVLink 4', 'InfiniBand NDR')
    """
    if choice not in LINK_CHOICES:
        raise ConfigError(f"link is {choice!r}; allowed: {', '.join(LINK_CHOICES)}")
    if choice != "node":
        return LINKS[choice]
    nodes = {rank * tensor_ranks // NODE_SIZE for rank in (sender, receiver)}
    return LINKS["nvlink" if len(nodes) == 1 else "infiniband"]
