"""Measuring a text source and holding out its end for validation.

Everything wrong with a text is found here, in one pass over all of it, before anything is written.
"""

from collections.abc import Iterator
from typing import final

from attnres.data.text import Piece, TextSource
from attnres.errors import ConfigError, DataError


@final
class TextRange:
    """The characters ``[start, stop)`` of a source, itself a source."""

    def __init__(self, source: TextSource, start: int, stop: int) -> None:
        self.source, self.start, self.stop = source, start, stop

    @property
    def description(self) -> str:
        """The description of the whole."""
        return self.source.description

    @property
    def characters(self) -> int:
        """Length of the range."""
        return self.stop - self.start

    def __iter__(self) -> Iterator[Piece]:
        position = 0
        for text, ends_document in self.source:
            first, last = max(self.start - position, 0), min(self.stop - position, len(text))
            if first < last:
                yield Piece(text[first:last], ends_document and last == len(text))
            position += len(text)
            if position >= self.stop:
                return


def whole(source: TextSource) -> TextRange:
    """Measure a source by reading all of it once, which also proves that it can be read."""
    return TextRange(source, 0, sum(len(piece.text) for piece in source))


def hold_out(source: TextSource, fraction: float) -> tuple[TextRange, TextRange]:
    """Split a source into its start and its last ``fraction``, cut at the end of a line.

    The held-out part grows back to the start of its first line, but to no more than twice its size: where lines are
    longer than that, the cut falls inside one.

    Raises:
        ConfigError: The fraction is not between 0 and 1.
        DataError: The text is so short that one side would be empty.
    """
    if not 0.0 < fraction < 1.0:
        raise ConfigError(f"valid_fraction is {fraction}; allowed: above 0 and below 1")
    total = whole(source).characters
    position = int(total * (1.0 - fraction))
    cut = _line_end_before(source, position, reach=total - position)
    if not 0 < cut < total:
        raise DataError(
            f"text has {total} characters, too few to hold out valid_fraction={fraction}; give a valid text"
        )
    return TextRange(source, 0, cut), TextRange(source, cut, total)


def _line_end_before(source: TextSource, position: int, *, reach: int) -> int:
    """Position behind the last line end at most ``reach`` before ``position``, or ``position`` if there is none."""
    start = 0
    for text, _ in source:
        if position < start + len(text):
            inside = position - start
            return start + (text.rfind("\n", max(inside - reach, 0), inside) + 1 or inside)
        start += len(text)
    return position
