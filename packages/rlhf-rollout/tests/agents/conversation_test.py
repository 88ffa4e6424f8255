"""What a conversation keeps of its earlier states: tokens once, and forks and rewritten histories apart."""

import numpy as np
import pytest

from record_testing import make_prompt
from rlhf_data.errors import DataError
from rlhf_data.testing import ByteTokenizer
from rlhf_rollout.agents.conversation import Conversations
from rlhf_rollout.agents.recorder import EpisodeLimits, EpisodeRecorder
from rlhf_rollout.engines.fake import FakeEngine
from rlhf_rollout.protocols import SamplingParams
from rlhf_rollout.router import EngineRouter

LENGTH = 1000  # of each answer, in tokens


def messages_of(num_turns, last="answer"):
    pairs = [({"role": "user", "content": "more"}, {"role": "assistant", "content": "answer"})] * num_turns
    messages = [message for pair in pairs for message in pair]
    return [*messages[:-1], {"role": "assistant", "content": last}]


def test_tokens_of_a_long_conversation_are_kept_once():
    chats = Conversations(ByteTokenizer())
    tokens = np.arange(64 * LENGTH, dtype=np.int32)
    for turn in range(1, 65):
        chats.add_chat(messages_of(turn), [], tokens[: turn * LENGTH], is_ended=False)
    kept = [chat.added for chat in chats._chats.values()]
    assert sum(part.nbytes for part in kept) == tokens.nbytes
    assert all(part.base is None for part in kept)  # no part keeps a longer array
    last = chats.encode_chat(messages_of(64), [], is_continued=True).token_ids
    np.testing.assert_array_equal(last, tokens)


def test_forks_have_the_tokens_before_them_and_rewritten_histories_have_their_own():
    chats = Conversations(ByteTokenizer())
    chats.add_chat(messages_of(1), [], np.array([1, 2, 3], np.int32), is_ended=False)
    chats.add_chat(messages_of(2, "left"), [], np.array([1, 2, 3, 4], np.int32), is_ended=False)
    chats.add_chat(messages_of(2, "right"), [], np.array([1, 2, 3, 5, 6], np.int32), is_ended=False)
    chats.add_chat(messages_of(2, "rewritten"), [], np.array([1, 9, 3, 7], np.int32), is_ended=False)
    chats.add_chat(messages_of(2, "shorter"), [], np.array([1, 2], np.int32), is_ended=False)
    ends = {"left": [1, 2, 3, 4], "right": [1, 2, 3, 5, 6], "rewritten": [1, 9, 3, 7], "shorter": [1, 2]}
    for last, expected in ends.items():
        assert chats.encode_chat(messages_of(2, last), [], is_continued=True).token_ids.tolist() == expected


def test_texts_differ_where_their_lengths_or_ends_do():
    chats = Conversations(ByteTokenizer())
    for number, content in enumerate(["ab", "ab\ud800", "abc"]):
        chats.add_chat([{"role": "assistant", "content": content}], [], np.array([number], np.int32), is_ended=False)
    assert len(chats._chats) == 3


@pytest.mark.parametrize("token_ids", [[3, 2**70], [3, -1], [3, 256], np.array([3, 256])])
async def test_ids_outside_the_vocabulary_are_refused_whatever_their_size(token_ids):
    recorder = EpisodeRecorder(
        EngineRouter([FakeEngine()]),
        make_prompt(),
        SamplingParams(max_tokens=4),
        name="e",
        group_id="g",
        limits=EpisodeLimits(),
        decode=str,
        vocab_size=256,
    )
    with pytest.raises(DataError, match=f"token id {token_ids[1]}, and the vocabulary has 256"):
        await recorder.sample(token_ids)
    assert recorder.num_turns == 0
