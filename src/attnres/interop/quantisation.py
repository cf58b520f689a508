"""What must not be quantised in a model with attention residuals.

A pseudo-query is a few thousand numbers of a model of billions, so 8 bits save nothing there; but an error in it shifts
the scores of every token in the same direction, and where two sources are close their depth weights with them.
"""

from torch import nn

from attnres.errors import UnsupportedModelError
from attnres.residual import Residual


def do_not_quantize(model: nn.Module) -> list[str]:
    """Names of modules and parameters of the residual path: pseudo-queries, key weights, whatever the strategy learns.

    Modules come first, the whole path before its parts, so that one list serves tools that match modules
    (``BitsAndBytesConfig(llm_int8_skip_modules=...)``, ``modules_to_not_convert``, a torchao filter) and tools that
    match parameters. Transformers leaves the head alone only as long as no list is given; name it too, as in
    ``[*do_not_quantize(model), "lm_head"]``.

    Args:
        model: A converted model, or anything that holds its residual path.

    Raises:
        UnsupportedModelError: The model has no residual path of ours.
    """
    modules, parameters = [], []
    for name, module in model.named_modules():
        if isinstance(module, Residual):
            modules += [part for part, _ in module.named_modules(prefix=name)]
            parameters += [parameter for parameter, _ in module.named_parameters(prefix=name)]
    if not modules:
        raise UnsupportedModelError(f"{type(model).__name__} has no residual strategy of attnres; convert it first")
    return [name for name in (*modules, *parameters) if name]
