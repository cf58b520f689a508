"""Text, tokenizers, token shards and the order in which they are read; knows nothing of models.

dataset = prepare("data/mine", train=[Path("books/")])      # or default_dataset()
shard = dataset.split("train")
sampler = Sampler(len(shard), context=256, batch_size=16, seed=0)
inputs, targets = shard.windows(sampler.next_batch(), context=256)
"""

from attnres.data.dataset import Dataset, open_dataset
from attnres.data.hub import HubText
from attnres.data.prepare import default_dataset, prepare, prepare_hub
from attnres.data.sampler import Sampler, validation_windows
from attnres.data.shards import TokenShard
from attnres.data.tokenizer import END_OF_TEXT, END_OF_TEXT_ID, byte_tokenizer, load_tokenizer, train_bpe

__all__ = [
    "END_OF_TEXT",
    "END_OF_TEXT_ID",
    "Dataset",
    "HubText",
    "Sampler",
    "TokenShard",
    "byte_tokenizer",
    "default_dataset",
    "load_tokenizer",
    "open_dataset",
    "prepare",
    "prepare_hub",
    "train_bpe",
    "validation_windows",
]
