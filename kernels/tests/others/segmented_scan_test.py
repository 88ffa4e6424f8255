"""`segmented_scan` and `packed_gae` on the CPU: the plain twins, against which the kernels are tested."""

import itertools

import pytest
import torch

from rlhf_kernels import packed_gae, segmented_scan
from rlhf_kernels.ops.segmented_scan.reference import packed_gae_reference, segmented_scan_reference

BOUNDS = torch.tensor([0, 3, 3, 5])


def test_segmented_scan_matches_hand_values_and_does_not_cross_sequences():
    # x3 = 3 + 0.5*10 = 8, x2 = 2 + 0.5*8 = 6, x1 = 1 + 0.5*6 = 4; the second is empty; x5 = 5 + 2*20, x4 = 4 + 2*45.
    values, decays = torch.arange(1.0, 6.0), torch.tensor([0.5, 0.5, 0.5, 2.0, 2.0])
    solved = segmented_scan(values, decays, BOUNDS, last=torch.tensor([10.0, 99.0, 20.0]))
    assert solved.tolist() == [4.0, 6.0, 8.0, 94.0, 45.0]
    assert segmented_scan(values, decays, BOUNDS).tolist() == [2.75, 3.5, 3.0, 14.0, 5.0]


def test_scans_on_a_gpu_that_is_not_nvidias_take_the_twin_and_say_so_once(monkeypatch, caplog):
    monkeypatch.setattr("rlhf_kernels.ops.segmented_scan.takes_triton", lambda operator, tensor: True)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    values = torch.arange(1.0, 6.0)
    for _ in range(2):
        assert segmented_scan(values, torch.ones(5), BOUNDS).tolist() == [6.0, 5.0, 3.0, 9.0, 5.0]
        packed_gae(values, values, torch.ones(5, dtype=torch.bool), BOUNDS, gamma=1.0, lambd=1.0)
    operators = [record.getMessage().split()[0] for record in caplog.records]
    assert operators == ["segmented_scan", "packed_gae"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_segmented_scan_of_any_dtype_equals_the_loop_in_float64(dtype):
    torch.manual_seed(0)
    values, decays = torch.randn(40, dtype=dtype), torch.rand(40, dtype=dtype)
    bounds, last = torch.tensor([0, 17, 18, 40], dtype=torch.int32), torch.randn(3, dtype=dtype)
    expected = torch.zeros(40, dtype=torch.float64)
    for sequence, (start, end) in enumerate([(0, 17), (17, 18), (18, 40)]):
        x = last[sequence].double()
        for token in reversed(range(start, end)):
            expected[token] = x = values[token].double() + decays[token].double() * x
    solved = segmented_scan(values, decays, bounds, last=last)
    assert solved.dtype == torch.float32
    torch.testing.assert_close(solved.double(), expected, atol=1e-6, rtol=1e-6)


def gae(rewards, values, mask=None, **options):
    """Advantages and returns of one sequence, gamma 0.9 and lambda 0.5."""
    mask = torch.ones(len(rewards), dtype=torch.bool) if mask is None else torch.tensor(mask)
    bounds = torch.tensor([0, len(rewards)])
    tensors = (torch.tensor(rewards), torch.tensor(values), mask, bounds)
    return packed_gae(*tensors, gamma=0.9, lambd=0.5, **options)


def test_packed_gae_matches_hand_values():
    # delta3 = 1 - 0.6 = 0.4            A3 = 0.4
    # delta2 = 0.9*0.6 - 0.4 = 0.14     A2 = 0.14 + 0.45*0.4 = 0.32
    # delta1 = 0.9*0.4 - 0.5 = -0.14    A1 = -0.14 + 0.45*0.32 = 0.004
    advantages, returns = gae([0.0, 0.0, 1.0], [0.5, 0.4, 0.6])
    torch.testing.assert_close(advantages, torch.tensor([0.004, 0.32, 0.4]))
    torch.testing.assert_close(returns, torch.tensor([0.504, 0.72, 1.0]))


def test_packed_gae_skips_tokens_whatever_their_numbers_and_goes_on_after_a_cut():
    # V = 2 after the end: delta3 = 1 + 0.9*2 - 0.6 = 2.2, A2 = 0.14 + 0.45*2.2 = 1.13, A1 = -0.14 + 0.45*1.13 = 0.3685
    nan, off, on = float("nan"), False, True
    advantages, returns = gae(
        [nan, 0.0, 99.0, 0.0, 1.0, nan],
        [nan, 0.5, nan, 0.4, 0.6, -9.0],
        [off, on, off, on, on, off],
        last_values=torch.tensor([2.0]),
    )
    torch.testing.assert_close(advantages, torch.tensor([0.0, 0.3685, 0.0, 1.13, 2.2, 0.0]))
    torch.testing.assert_close(returns, torch.tensor([0.0, 0.8685, 0.0, 1.53, 2.8, 0.0]))


@pytest.mark.parametrize(
    ("turn_gamma", "expected"),
    [
        # The second token is the last of its turn: A2 = 0 - 0.4; A1 = -0.14 - 0.45*0.4 = -0.32.
        (0.0, [-0.32, -0.4, 0.4]),
        # delta2 = 0.6 - 0.4 = 0.2, A2 = 0.2 + 0.5*0.4 = 0.4; A1 = -0.14 + 0.45*0.4 = 0.04.
        (1.0, [0.04, 0.4, 0.4]),
    ],
)
def test_packed_gae_step_into_another_turn_has_its_own_discount(turn_gamma, expected):
    turns = torch.tensor([True, False, True])
    advantages, _ = gae([0.0, 0.0, 1.0], [0.5, 0.4, 0.6], turn_starts=turns, turn_gamma=turn_gamma)
    torch.testing.assert_close(advantages, torch.tensor(expected))


@pytest.mark.parametrize("goes_on", [False, True])
@pytest.mark.parametrize(("gamma", "lambd", "turn_gamma"), [(1.0, 1.0, 1.0), (0.99, 0.95, 0.5), (0.9, 0.0, 0.0)])
def test_packed_gae_of_ragged_sequences_equals_the_loop_in_float64(gamma, lambd, turn_gamma, goes_on):
    torch.manual_seed(0)
    bounds = [0, 7, 7, 8, 38, 50, 54]  # one is empty; of the last one nothing is trained
    rewards, values = torch.randn(2, 54).unbind()
    mask, turns = torch.rand(54) < 0.6, torch.rand(54) < 0.3
    mask[50:] = False
    rewards[~mask], values[~mask] = float("nan"), float("nan")
    last = torch.randn(6) if goes_on else None
    expected = torch.zeros(2, 54, dtype=torch.float64)
    for sequence, (start, end) in enumerate(itertools.pairwise(bounds)):
        next_value, next_advantage, discount = float(last[sequence]) if goes_on else 0.0, 0.0, gamma
        for token in (t for t in reversed(range(start, end)) if mask[t]):
            delta = float(rewards[token]) + discount * next_value - float(values[token])
            next_advantage = delta + discount * lambd * next_advantage
            next_value, discount = float(values[token]), turn_gamma if turns[token] else gamma
            expected[:, token] = torch.tensor([next_advantage, next_advantage + next_value], dtype=torch.float64)
    got = packed_gae(
        rewards, values, mask, torch.tensor(bounds),
        gamma=gamma, lambd=lambd, last_values=last, turn_starts=turns, turn_gamma=turn_gamma,
    )  # fmt: skip
    torch.testing.assert_close(torch.stack(got).double(), expected, atol=1e-5, rtol=1e-5)


def test_no_tokens_and_no_sequences_give_nothing():
    empty, mask = torch.zeros(0), torch.zeros(0, dtype=torch.bool)
    for bounds in (torch.tensor([0]), torch.tensor([0, 0, 0])):
        assert segmented_scan(empty, empty, bounds).shape == (0,)
        assert packed_gae(empty, empty, mask, bounds, gamma=1.0, lambd=1.0)[0].shape == (0,)


def test_results_carry_no_gradient():
    values = torch.ones(5, requires_grad=True)
    assert not segmented_scan(values, values, BOUNDS).requires_grad
    mask = torch.ones(5, dtype=torch.bool)
    assert not packed_gae(values, values, mask, BOUNDS, gamma=1.0, lambd=1.0)[0].requires_grad


def test_twins_keep_float64():
    numbers = torch.full((5,), 1 / 3, dtype=torch.float64)
    assert segmented_scan_reference(numbers, numbers, BOUNDS, None)[1].item() == 1 / 3 + (1 / 3) * (1 / 3)
    mask = torch.ones(5, dtype=torch.bool)
    results = packed_gae_reference(numbers, numbers, mask, BOUNDS, None, None, discounts=(1.0, 1.0, 1.0))
    assert [result.dtype for result in results] == [torch.float64] * 2


N = torch.zeros(5)


@pytest.mark.parametrize(
    ("values", "decays", "bounds", "last", "message"),
    [
        (N, torch.zeros(4), BOUNDS, None, r"values \[5\], decays \[4\]"),
        (N[None], N[None], BOUNDS, None, r"\[N\] each"),
        (N, N.double(), BOUNDS, None, "decays in .*; got torch.float64"),
        (N, N, BOUNDS.float(), None, "cu_seqlens in torch.int32 or torch.int64; got torch.float32"),
        (N, N, BOUNDS[:0], None, r"cu_seqlens \[0\]"),
        (N, N, BOUNDS, torch.zeros(4), r"cu_seqlens \[4\], last values \[4\]"),
        (N, N, BOUNDS, torch.zeros(3, dtype=torch.int64), "last values in .*; got torch.int64"),
        (N, N, torch.tensor([0, 4]), None, r"from 0 to 5.*got \[0, 4\]"),
        (N, N, torch.tensor([1, 5]), None, r"got \[1, 5\]"),
        (N, N, torch.tensor([0, 3, 2, 5]), None, "must rise from 0 to"),
        (N, N, torch.tensor([1] * 12), None, "12 bounds from 1 to 1"),
        (N, N.to("meta"), BOUNDS, None, "one device; decays is on meta"),
    ],
)
def test_segmented_scan_wrong_argument_says_what_is_allowed(values, decays, bounds, last, message):
    with pytest.raises(ValueError, match=message):
        segmented_scan(values, decays, bounds, last=last)


def test_packed_gae_masks_of_another_dtype_are_refused():
    mask = torch.ones(5, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"loss_mask in torch\.bool; got torch\.float32"):
        packed_gae(N, N, N, BOUNDS, gamma=1.0, lambd=1.0)
    with pytest.raises(ValueError, match="turn_starts in"):
        packed_gae(N, N, mask, BOUNDS, gamma=1.0, lambd=1.0, turn_starts=N)
