"""Runs that differ in `--group_by`, the mix of sources or the draft model, and the game and sums that they learn."""

from workloads.learning import ranges


def test_a_guess_is_answered_by_the_range_that_is_left():
    game = ranges.Environment()
    for number, guesses, answers, won in (
        ("5", (7, 2, 9, 5), ["0 to 6", "3 to 6", "3 to 6", None], 1.0),
        ("0", (9, 9, 3, 1), ["0 to 8", "0 to 8", "0 to 2", "0 to 0"], 0.0),
    ):
        game.reset(number)
        for turn, (guess, answer) in enumerate(zip(guesses, answers, strict=True)):
            text, reward, is_done, logged = game.step(ranges.parse(f"3 {guess}"))
            right = float(answer is None)
            assert (reward, is_done, logged) == (right, turn == 3, {"score": right})
            assert answer in (None, text)
        assert reward == won


def test_games_that_are_shown_follow_the_rules_and_mostly_the_range():
    heeded = []
    for number, row in enumerate(ranges.games(500)):
        turns = [message["content"] for message in row["messages"]]
        low, high = 0, 9
        for shown, guess in zip(turns[::2], map(int, turns[1::2]), strict=True):
            assert shown == f"{low} to {high}"
            heeded.append(low <= guess <= high)
            low, high = (max(low, guess + 1), high) if guess < number % 10 else (low, min(high, guess - 1))
        assert guess == number % 10 or len(turns) == 8
    assert 0.8 < sum(heeded) / len(heeded) < 0.95
