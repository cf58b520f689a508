"""A converted model with learned queries in a folder, with a tokenizer, as a user would have it."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import nn
from transformers import PreTrainedTokenizerFast

import attnres
from attnres.residual import BlockAttnRes, DepthSite
from models.small import make

TEXT = "the quick brown fox jumps over the lazy dog and runs away from the slow red cat " * 8


def tokenizer():
    """A byte-level BPE of 96 tokens, padding on the left."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["<pad>", "<s>", "</s>"]
    inner.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=96, special_tokens=special, show_progress=False))
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>", padding_side="left"
    )


def learned(family="llama", strategy=None, seed=0, **changes):
    """A converted model whose queries and key weights are random."""
    torch.manual_seed(seed)
    model = attnres.convert(make(family, **changes), strategy or BlockAttnRes(sublayers_per_block=3))
    for site in model.base_model.residual.sites:
        if isinstance(site, DepthSite):
            nn.init.normal_(site.pseudo_query, std=0.5)
            nn.init.normal_(site.key_weight, mean=1.0, std=0.3)
    return model.eval()


def saved(folder: Path, model=None, **options):
    """The folder of a model, `learned` by default, with a tokenizer."""
    model = model or learned()
    model.save_pretrained(folder, **options)
    tokenizer().save_pretrained(folder)
    return model


def config_of(folder: Path):
    return json.loads((folder / "config.json").read_text())
