"""Fused `linear_token_logprobs`: computes logits block by block in the forward pass, and again in the backward pass.

Where the kernels of `product` fit, logits stay in registers and only their gradient is written. Elsewhere cuBLAS writes
blocks of logits, and the kernels of `token_logprobs` read them. `logprob_kl` uses the same code with a second head, the
reference model's.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlhf_kernels.ops.linear_token_logprobs import product
from rlhf_kernels.ops.linear_token_logprobs.reference import Head
from rlhf_kernels.ops.token_logprobs.reference import TokenLogprobs
from rlhf_kernels.ops.token_logprobs.triton import NUM_SUMS, NUM_SUMS_WITH_REFERENCE, add_sums, write_gradient

# The blocks of all heads together take about MAX_BLOCK_BYTES. Forward blocks are wide, so that few partial sums have to
# be merged. Backward blocks are tall, so that few parts of the weight's gradient have to be added up. The width is a
# multiple of ALIGNMENT: every row is aligned for wide loads and the matrix product fills its tiles.
MAX_BLOCK_BYTES = 256 << 20
MAX_FORWARD_ROWS = 4096
MAX_BACKWARD_ROWS = 16_384  # a multiple of the tile height of `product`
ALIGNMENT = product.TILE_COLUMNS
# Logits up to this size form one block that is kept for the backward pass, which saves computing them again.
MAX_KEPT_BYTES = 384 << 20


@torch.compiler.disable  # kernels write into buffers, which a traced graph would copy
def linear_token_logprobs_triton(head: Head, token_ids: Tensor, temperature: float) -> TokenLogprobs:
    """Return log-prob, entropy and log-sum-exp. `linear_token_logprobs` has checked the arguments."""
    hidden, weight, bias = head
    bias = None if bias is None else bias.contiguous()
    return TokenLogprobs(*head_results(token_ids, temperature, hidden, weight, bias))


def head_results(token_ids: Tensor, temperature: float, *heads: Tensor | None) -> tuple[Tensor, ...]:
    """Apply `HeadResults` to one or two heads, each given as hidden states, weight and bias."""
    if not torch.is_grad_enabled():
        # autograd.Function sees requires_grad even under no_grad, and would keep tensors for a backward pass.
        heads = tuple(None if part is None else part.detach() for part in heads)
    return HeadResults.apply(token_ids.contiguous(), temperature, *heads)


class HeadResults(torch.autograd.Function):
    """Log-probs, entropies and log-sum-exps. With a reference's head also the KL and the reference's log-probs.

    Saves the arguments and a few numbers per row. Logits are saved only if they are few, else computed again backward.
    """

    @staticmethod
    def forward(ctx: Any, token_ids: Tensor, temperature: float, *heads: Tensor | None) -> tuple[Tensor, ...]:
        blocks = LogitBlocks(heads, MAX_FORWARD_ROWS)
        num_sums = NUM_SUMS if len(heads) == 3 else NUM_SUMS_WITH_REFERENCE
        sums = torch.empty((num_sums, len(token_ids)), dtype=torch.float32, device=token_ids.device)
        marks = None
        keeps = any(ctx.needs_input_grad) and len(blocks.rows) == len(blocks.columns) == 1
        ctx.by_product = len(heads) == 3 and not keeps and product.fits(*heads[:2])
        if ctx.by_product:
            marks = product.reference_sums(heads, token_ids, sums, temperature)
            product.head_sums(heads, token_ids, marks, sums, temperature)
        else:
            for rows in blocks.rows:
                for columns in blocks.columns:
                    start = columns.start
                    pair = blocks.logits(rows, columns)
                    add_sums(*pair, token_ids[rows], sums[:, rows], temperature, start, first=start == 0)
        ctx.save_for_backward(token_ids, marks, sums, *(pair if keeps else (None, None)), *heads)
        ctx.temperature = temperature
        ctx.is_first = True
        if len(heads) == 3:
            return tuple(row.clone() for row in sums[4:7])
        results = tuple(sums[row].clone() for row in (4, 5, 6, 7, 12))
        ctx.mark_non_differentiable(results[-1])
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        token_ids, marks, sums, logits, ref_logits, *heads = ctx.saved_tensors
        # The gradient overwrites kept logits, so a second backward pass computes them again.
        are_kept = ctx.is_first and logits is not None
        ctx.is_first = False
        grads = torch.stack(grads[:4])
        hidden, weight, bias = heads[:3]
        needed = ctx.needs_input_grad[2:5]
        blocks = LogitBlocks(heads, MAX_BACKWARD_ROWS)
        grad_hidden = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device) if needed[0] else None
        grad_weight = torch.empty_like(weight) if needed[1] else None
        grad_bias = torch.empty_like(bias) if needed[2] else None
        # 0 times a hidden state that is not finite would put NaN into the weight's gradient.
        kept = hidden.masked_fill((token_ids < 0)[:, None], 0.0) if needed[1] or ctx.by_product else hidden
        # The vocabulary is the outer loop, because the weight's gradient is by far the largest output: each part of it
        # is written once and never read back. Sums over blocks are float32.
        for columns in blocks.columns:
            part = weight[columns]
            add_up = needed[1] and len(blocks.rows) != 1
            weight_sum = torch.zeros(part.shape, dtype=torch.float32, device=part.device) if add_up else None
            bias_sum = torch.zeros(len(part), dtype=torch.float32, device=part.device) if needed[2] else None
            for rows in blocks.rows:
                beside = (sums[:, rows], grads[:, rows])
                if ctx.by_product:
                    logits = blocks.buffer(rows, columns)
                    head = kept[rows], part, None if bias is None else bias[columns]
                    tokens = token_ids[rows], marks[rows.start // product.TILE_ROWS :]
                    product.head_gradient(head, *tokens, *beside, logits, ctx.temperature, columns.start)
                else:
                    if not are_kept:
                        logits, ref_logits = blocks.logits(rows, columns)
                    write_gradient(logits, ref_logits, token_ids[rows], *beside, logits, ctx.temperature, columns.start)
                # `logits` holds their gradient from here on; both products read it before the next block overwrites it.
                if needed[0]:
                    add_product(grad_hidden[rows], logits, part)
                if add_up:
                    add_product(weight_sum, logits.T, kept[rows])
                elif needed[1]:
                    torch.mm(logits.T, kept, out=grad_weight[columns])
                if needed[2]:
                    bias_sum += logits.sum(0, dtype=torch.float32)
            if add_up:
                grad_weight[columns] = weight_sum
            if needed[2]:
                grad_bias[columns] = bias_sum
        grad_hidden = grad_hidden.to(hidden.dtype) if needed[0] else None
        return None, None, grad_hidden, grad_weight, grad_bias, *[None] * len(heads[3:])


class LogitBlocks:
    """Logits of one LM head, or of two with the same vocabulary, block by block in one reused buffer per head.

    Attributes:
        rows, columns: slices of the rows and of the vocabulary, in order; each pair of slices is a block.
    """

    def __init__(self, heads: Sequence[Tensor | None], max_rows: int) -> None:
        self._heads = [heads[start : start + 3] for start in range(0, len(heads), 3)]
        num_rows, vocab_size = len(heads[0]), len(heads[1])
        height = max(1, min(num_rows, max_rows))
        num_bytes = height * sum(hidden.element_size() for hidden, _, _ in self._heads)  # per column of a block
        is_one = height == num_rows and num_bytes * vocab_size <= MAX_KEPT_BYTES
        widest = vocab_size if is_one else MAX_BLOCK_BYTES // num_bytes
        num_columns = -(-vocab_size // max(ALIGNMENT, widest))  # number of blocks, of nearly equal width
        width = -(-vocab_size // (num_columns * ALIGNMENT)) * ALIGNMENT
        self._shape = (height, width)
        self._buffers = []
        self.rows = _slices(num_rows, height)
        self.columns = _slices(vocab_size, width)

    def logits(self, rows: slice, columns: slice) -> tuple[Tensor, Tensor | None]:
        """Return one block of each head, None for a missing second head. The next call overwrites them."""
        blocks = [None, None]
        for index, (hidden, weight, bias) in enumerate(self._heads):
            out = self.buffer(rows, columns, index)
            if bias is None:
                blocks[index] = torch.mm(hidden[rows], weight[columns].T, out=out)
            else:
                blocks[index] = torch.addmm(bias[columns], hidden[rows], weight[columns].T, out=out)
        return tuple(blocks)

    def buffer(self, rows: slice, columns: slice, index: int = 0) -> Tensor:
        """Return the memory of one block of a head's logits."""
        self._buffers = self._buffers or [hidden.new_empty(self._shape) for hidden, _, _ in self._heads]
        return self._buffers[index][: rows.stop - rows.start, : columns.stop - columns.start]


def _slices(total: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, total)) for start in range(0, total, step)]


def add_product(total: Tensor, left: Tensor, right: Tensor, beta: int = 1) -> None:
    """Set `total` to beta * total + left @ right, accumulated in the dtype of `total`."""
    options = {} if total.dtype == left.dtype else {"out_dtype": total.dtype}
    if options and not total.is_cuda:
        # Only cuBLAS takes an output dtype that differs from the operands'.
        left = left.to(total.dtype)
        right = right.to(total.dtype)
        options = {}
    torch.addmm(total, left, right, beta=beta, out=total, **options)
