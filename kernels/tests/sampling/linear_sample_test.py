"""`linear_sample` on the CPU: its random bits, its distribution and its log-probs."""

import math

import numpy as np
import pytest
import torch

from rlhf_kernels import linear_sample
from rlhf_kernels.ops.linear_sample.reference import exponentials, random_words


def head(num_rows, vocab_size, width=8):
    torch.manual_seed(0)
    return torch.randn(num_rows, width), torch.randn(vocab_size, width)


def draw(hidden, weight, temperature=1.0, seed=0, **options):
    """Draw with one temperature and seed, row n at position n."""
    num_rows = len(hidden)
    rows = torch.full((num_rows,), temperature), torch.full((num_rows,), seed), torch.arange(num_rows)
    return linear_sample(hidden, weight, *rows, **options)


@pytest.mark.parametrize(
    ("counter", "key", "word"),
    [
        ((0, 0, 0), 0, 0x6627E8D5),
        ((0xFFFFFFFF, -1, 0xFFFFFFFF), -1, 0x408F276D),
        ((0x243F6A88, 0x13198A2E_85A308D3, 0x03707344), 0x299F31D0_A4093822, 0xD16CFE09),
    ],
)
def test_random_words_are_those_of_the_authors_of_philox(counter, key, word):
    # https://github.com/DEShawResearch/random123/blob/main/tests/kat_vectors
    index, position, purpose = counter
    assert random_words(torch.tensor(key), torch.tensor(position), torch.tensor(index), purpose).item() == word


def test_exponential_numbers_have_the_exponential_distribution():
    numbers = exponentials(torch.tensor(1), torch.arange(1000)[:, None], torch.arange(200), 0).flatten().numpy()
    for bound in (1e-4, 1e-2, 0.5, 2.0, 6.0):
        share = -np.expm1(-bound)
        assert abs((numbers < bound).mean() - share) < 5 * math.sqrt(share * (1 - share) / len(numbers))
    assert numbers.min() > 0


# More draws would take tensors of a size that glibc asks the system for each time, which costs ten times as much.
@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("vocab_size", [40, 64, 150])
def test_draws_have_the_distribution_of_the_softmax(temperature, vocab_size, require_drawn_from):
    hidden, weight = head(1, vocab_size)
    hidden *= 0.3
    drawn = draw(hidden.expand(30_000, -1), weight, temperature)
    logits = weight.double().numpy() @ hidden[0].double().numpy()
    require_drawn_from(drawn.token_ids, logits / temperature)


def test_draws_of_tokens_and_positions_are_independent_of_each_other(require_drawn_from):
    # Pairs of draws at two positions, and with two seeds, have the product of the distributions.
    hidden, weight = head(1, 12)
    logits = (weight.double() @ hidden[0].double()).numpy() * 0.3
    hidden, num_draws = 0.3 * hidden.expand(30_000, -1), torch.arange(30_000)
    ones = torch.ones(30_000)
    pairs = {
        "positions": [(torch.zeros_like(num_draws), 2 * num_draws + part) for part in (0, 1)],
        "seeds": [(2 * num_draws + part, torch.zeros_like(num_draws)) for part in (0, 1)],
        "upper bits": [(num_draws + (part << 40), num_draws + (part << 33)) for part in (0, 1)],
    }
    for seeded in pairs.values():
        first, second = (linear_sample(hidden, weight, ones, *rows).token_ids for rows in seeded)
        require_drawn_from(12 * first + second, np.add.outer(logits, logits).flatten())


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_logprobs_are_those_of_the_scaled_logits_and_of_the_plain_ones_when_greedy(temperature):
    hidden, weight = head(50, 150)
    bias = torch.randn(150)
    token_ids, logprobs, logsumexp = draw(hidden, weight, temperature, bias=bias)
    logits = hidden.double().numpy() @ weight.double().numpy().T + bias.double().numpy()
    if not temperature:
        assert token_ids.tolist() == logits.argmax(1).tolist()
    logits /= temperature or 1.0
    expected = np.log(np.exp(logits).sum(1))
    np.testing.assert_allclose(logsumexp, expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(logprobs, logits[np.arange(50), token_ids] - expected, rtol=1e-5, atol=1e-5)
    assert (token_ids.dtype, logprobs.dtype, logsumexp.dtype) == (torch.int64, torch.float32, torch.float32)


def test_a_draw_does_not_depend_on_other_rows():
    hidden, weight = head(40, 300)
    rows = torch.rand(40), torch.randint(-(2**62), 2**62, (40,)), torch.randint(0, 2**40, (40,))
    together = linear_sample(hidden, weight, *rows)
    order = torch.randperm(40)[:7]
    some = linear_sample(hidden[order], weight, *(column[order] for column in rows))
    assert torch.equal(some.token_ids, together.token_ids[order])
    assert len(set(together.token_ids.tolist())) > 20


def test_equal_logits_are_all_drawn_and_greedy_rows_take_the_first():
    hidden, weight = torch.zeros(3000, 4), torch.randn(130, 4)
    assert draw(hidden, weight).token_ids.unique().tolist() == list(range(130))
    assert draw(hidden, weight, 0.0).token_ids.unique().tolist() == [0]
    bias = torch.zeros(130)
    bias[[70, 71, 129]] = 1.0
    assert draw(hidden, weight, 0.0, bias=bias).token_ids.unique().tolist() == [70]


def test_forbidden_tokens_are_never_drawn():
    hidden, weight = head(3000, 200)
    bias = torch.full((200,), -math.inf)
    bias[[3, 150]] = 0.0
    token_ids, logprobs, _ = draw(hidden, weight, bias=bias)
    assert token_ids.unique().tolist() == [3, 150]
    pair = (hidden.double() @ weight[[3, 150]].double().T).log_softmax(1)
    torch.testing.assert_close(
        logprobs.double(), pair[torch.arange(3000), (token_ids == 150).long()], rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_a_distribution_give_token_0_and_nan(temperature):
    hidden = torch.ones(4, 1)
    hidden[0] = math.nan
    hidden[1] = math.inf
    token_ids, logprobs, logsumexp = draw(hidden, torch.ones(70, 1), temperature)
    assert token_ids[:2].tolist() == [0, 0]
    assert logprobs.isnan().tolist() == logsumexp.isnan().tolist() == [True, True, False, False]
    nothing = draw(torch.ones(2, 1), torch.ones(70, 1), temperature, bias=torch.full((70,), -math.inf))
    assert nothing.token_ids.tolist() == [0, 0] and nothing.logprobs.isnan().all()


def test_no_rows_give_no_tokens():
    assert [len(part) for part in draw(torch.zeros(0, 4), torch.zeros(70, 4))] == [0, 0, 0]


ROWS = torch.ones(3), torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, torch.ones(2), r"temperature must be \[3\] torch.float32 on cpu; got \[2\] torch.float32 on cpu\nhint: "),
        (0, torch.ones(3, dtype=torch.float64), r"got \[3\] torch.float64 on cpu\nhint: "),
        (1, torch.zeros(3, dtype=torch.int32), r"seeds must be \[3\] torch.int64 on cpu; got \[3\] torch.int32"),
        (
            2,
            torch.zeros(3, dtype=torch.int64, device="meta"),
            r"positions must .* on meta\nhint: ",
        ),
        (0, torch.tensor([1.0, -0.5, 1.0]), r"temperatures must be finite and at least 0; got -0.5\nhint: 0 takes"),
        (0, torch.tensor([1.0, 1.0, math.nan]), "got nan\nhint: "),
        (0, torch.tensor([math.inf, 1.0, 1.0]), "got inf\nhint: "),
    ],
)
def test_what_cannot_be_sampled_is_refused(place, value, message):
    rows = list(ROWS)
    rows[place] = value
    with pytest.raises(ValueError, match=message):
        linear_sample(*head(3, 10), *rows)


def test_a_head_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"got \[3, 8\] and \[10, 4\]"):
        linear_sample(torch.zeros(3, 8), torch.zeros(10, 4), *ROWS)
