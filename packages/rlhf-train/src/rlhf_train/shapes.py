"""The shape check at the start of every loss and estimator."""

from torch import Tensor


def check_same_shape(**tensors: Tensor) -> None:
    """Raise ValueError, with all shapes, unless all `tensors` have the same shape."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1:
        raise ValueError(f"shapes differ: {', '.join(f'{name} {shape}' for name, shape in shapes.items())}")
