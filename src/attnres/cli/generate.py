"""``attnres generate``: continue prompts with a trained model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from attnres.cli.parsing import parse
from attnres.errors import ConfigError


def main(arguments: Sequence[str]) -> None:
    """Run the command."""
    parse(generate, arguments, command="generate")


def generate(
    folder: Path,
    /,
    *,
    prompt: tuple[str, ...],
    max_new_tokens: int = 100,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
    padding_side: Literal["left", "right"] | None = None,
    chunk_size: int | None = None,
) -> None:
    """Continue prompts with the newest checkpoint of a run, or with a Hugging Face folder.

    Args:
        folder: Run folder, or folder of a model that was converted, imported or saved by save_pretrained.
        prompt: Text to continue; several are done at once.
        max_new_tokens: Tokens to add.
        temperature: Of sampling; 0 takes the likeliest token each time.
        top_k: Sample from this many likeliest tokens.
        seed: Of sampling.
        padding_side: Where to pad prompts of unequal length; left.
        chunk_size: Send so many tokens of the prompts through the model at a time, which needs less memory.
    """
    for name, value, allowed, fits in (
        *(("prompt", text, "some text in UTF-8", _is_text(text)) for text in prompt),
        ("prompt", prompt, "one or more", bool(prompt)),
        ("max_new_tokens", max_new_tokens, "1 or more", max_new_tokens >= 1),
        ("temperature", temperature, "0, or 0.01 to 100", temperature == 0 or 0.01 <= temperature <= 100),
        ("top_k", top_k, "1 or more", top_k >= 1),
        ("seed", seed, "0 to below 2**63", 0 <= seed < 2**63),
        ("chunk_size", chunk_size, "1 or more", chunk_size is None or chunk_size >= 1),
    ):
        if not fits:
            raise ConfigError(f"{name} is {value!r}; allowed: {allowed}")
    from attnres.experiments.generation import continue_prompts, load_text_model

    texts = continue_prompts(
        load_text_model(folder),
        prompt,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
        padding_side=padding_side,
        chunk_size=chunk_size,
    )
    print("\n\n".join(texts))


def _is_text(prompt: str) -> bool:
    """Whether there is a prompt, and the bytes it was typed in are characters."""
    try:
        return bool(prompt.encode())
    except UnicodeEncodeError:
        return False
