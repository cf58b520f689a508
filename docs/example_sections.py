"""A griffe extension: the docstring section "Example:" is read like "Examples:", so that it is shown as code.

Without it the lines of a doctest are taken for Markdown, in which ``>>>`` quotes and ``[0.5]`` is a link.
"""

import re
from typing import Any

import griffe


class ExampleSections(griffe.Extension):
    """Renames the section before docstrings are parsed."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rename it in one object's docstring."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
