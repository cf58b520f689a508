"""What the tests of the pool itself run on the ranks."""

import os

import torch
import torch.distributed as dist


def total(value):
    tensor = torch.tensor([value * (dist.get_rank() + 1)])
    dist.all_reduce(tensor)
    return tensor.item()


def fail_on(rank):
    if dist.get_rank() == rank:
        raise ValueError(f"rank {rank} fails")
    dist.barrier()


def end_on(rank):
    if dist.get_rank() == rank:
        os._exit(3)
