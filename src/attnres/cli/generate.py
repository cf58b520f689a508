"""``attnres generate``: continue a prompt with a trained model."""

from collections.abc import Sequence
from pathlib import Path

from attnres.cli.parsing import parse
from attnres.errors import ConfigError


def main(arguments: Sequence[str]) -> None:
    """Run the command."""
    parse(generate, arguments, command="generate")


def generate(
    folder: Path,
    /,
    *,
    prompt: str,
    max_new_tokens: int = 100,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
) -> None:
    """Continue a prompt with the newest checkpoint of a run.

    Args:
        folder: Run folder.
        prompt: Text to continue.
        max_new_tokens: Tokens to add.
        temperature: Of sampling; 0 takes the likeliest token each time.
        top_k: Sample from this many likeliest tokens.
        seed: Of sampling.
    """
    for name, value, allowed, fits in (
        ("prompt", prompt, "some text in UTF-8", _is_text(prompt)),
        ("max_new_tokens", max_new_tokens, "1 or more", max_new_tokens >= 1),
        ("temperature", temperature, "0, or 0.01 to 100", temperature == 0 or 0.01 <= temperature <= 100),
        ("top_k", top_k, "1 or more", top_k >= 1),
        ("seed", seed, "0 to below 2**63", 0 <= seed < 2**63),
    ):
        if not fits:
            raise ConfigError(f"{name} is {value!r}; allowed: {allowed}")
    import torch

    from attnres.experiments.trained import load_trained

    trained = load_trained(folder)
    ids = torch.tensor([trained.tokenizer.encode(prompt).ids], device=trained.model.device)
    torch.manual_seed(seed)
    sampling = (
        {"do_sample": True, "temperature": temperature, "top_k": top_k} if temperature > 0 else {"do_sample": False}
    )
    output = trained.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, pad_token_id=0, **sampling
    )
    print(trained.tokenizer.decode(output[0].tolist(), skip_special_tokens=True).removesuffix("<|endoftext|>"))


def _is_text(prompt: str) -> bool:
    """Whether there is a prompt, and the bytes it was typed in are characters."""
    try:
        return bool(prompt.encode())
    except UnicodeEncodeError:
        return False
