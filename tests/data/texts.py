"""Texts that the tests of attnres.data share."""

TRAIN_TEXT = "".join(f"It was line {n} of the story, and she said 'it isn't {n * n}' — naïvely.\n" for n in range(200))
VALID_TEXT = "".join(f"Another story: line {n} is held out — naïvely.\n" for n in range(20))
