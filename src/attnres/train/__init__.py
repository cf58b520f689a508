"""Training: one run of one model in one run folder, resumable to the bit."""

from attnres.train.batch import TokenArrays, TokenData
from attnres.train.callback import Callback, RunContext
from attnres.train.checkpoint import Checkpoint, Checkpoints, find_checkpoint, read_checkpoint, verify_checkpoint
from attnres.train.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from attnres.train.evaluation import Evaluation, Evaluator
from attnres.train.folder import load_run_config
from attnres.train.runtime import autocast, resolve, resolve_device
from attnres.train.tracker import JsonlTracker, Tracker, read_metrics
from attnres.train.trainer import Resume, Trainer
from attnres.train.weights import load_weights

__all__ = [
    "Callback",
    "Checkpoint",
    "Checkpoints",
    "DataConfig",
    "Evaluation",
    "Evaluator",
    "JsonlTracker",
    "ModelConfig",
    "Resume",
    "RunConfig",
    "RunContext",
    "TokenArrays",
    "TokenData",
    "Tracker",
    "TrainConfig",
    "Trainer",
    "autocast",
    "find_checkpoint",
    "load_run_config",
    "load_weights",
    "read_checkpoint",
    "read_metrics",
    "resolve",
    "resolve_device",
    "verify_checkpoint",
]
