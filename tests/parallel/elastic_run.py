"""A program for torchrun: ``attnres`` with one rank killed by a real SIGKILL at its first start.

    torchrun ... elastic_run.py RANK FUNCTION CALL -- ATTNRES ARGUMENTS

RANK dies when it is about to call FUNCTION (a dotted name) for the CALL-th time; ``none`` kills nobody.
"""

import os
import sys
from contextlib import nullcontext

import torch

from attnres.cli import main
from train.tiny_run import killed_at

if __name__ == "__main__":
    torch.set_num_threads(1)
    rank, function, call, _, *arguments = sys.argv[1:]
    first_start = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    dies = first_start and os.environ["RANK"] == rank
    with killed_at(function, int(call)) if dies else nullcontext():
        main(arguments)
