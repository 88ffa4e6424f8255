"""Settings of torch's compiler for all that is compiled in this process."""

import torch

# Versions of one code, such as a layer's: those of a trained model, a critic and frozen ones of the same class, with
# gradients and without. Beyond torch's own limit of 8, calls run without compilation.
_MAX_VERSIONS = 32


def configure_compiler() -> None:
    """Have torch's compiler keep all versions of a code that models need, and take numbers as constants."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MAX_VERSIONS)
    # A layer's numbers (epsilons, scales) never change. As inputs of its code they would be tensors on the CPU, for
    # which inductor may start a C++ compiler.
    torch._dynamo.config.specialize_float = True
