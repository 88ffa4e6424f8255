"""Agents with images: in prompts and in observations, token by token, with the log-probs of plain transformers."""

import asyncio
import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from record_testing import make_prompt
from rlhf_data.images.reader import open_image_reader
from rlhf_data.prompts import load_prompts
from rlhf_data.records import FinishReason, RolloutGroup, Span, SpanSource, VerdictKind
from rlhf_data.rows.sources import open_sources
from rlhf_rollout.agents.agent_spec import AgentSpec, make_workflow
from rlhf_rollout.agents.recorder import EpisodeLimits, EpisodeRecorder
from rlhf_rollout.commands.parts import EngineJob
from rlhf_rollout.engines import EngineSpec, build_engine
from rlhf_rollout.protocols import Completion, SamplingParams
from rlhf_rollout.records_io import parse_group, rollout_record
from rlhf_rollout.router import EngineRouter
from rlhf_rollout.unfinished import UnfinishedGroups
from tiny_vision import tiny_vision_model_dir

PROMPT, POLICY, ENVIRONMENT = SpanSource.PROMPT, SpanSource.POLICY, SpanSource.ENVIRONMENT
SAMPLING = SamplingParams(max_tokens=5, seed=3, num_samples=1)
# Each picture is in the same file as the one before it.
ENVIRONMENT_CODE = """
from PIL import Image

class Environment:
    def reset(self, prompt, images):
        self.images = images
        self.turns = 0
        return ""

    def step(self, action):
        self.turns += 1
        if self.turns == 1:
            Image.new("RGB", (32, 32), (0, 0, 200)).save("frame.png")
            picture = {"type": "image_url", "image_url": {"url": "frame.png"}}
            return [picture, {"type": "text", "text": TEXT}], 0.0, False, {}
        if self.turns == 2:
            Image.new("RGB", (32, 32), (200, 0, 0)).save("frame.png")
            picture = {"type": "image", "image": Image.open("frame.png")}
            return [{"type": "text", "text": "or "}, picture], 0.0, False, {}
        return "", 1.0, True, {"score": float(len(self.images))}
"""
IMAGE = {"qwen2_5_vl": "<|vision_start|>" + "<|image_pad|>" * 16 + "<|vision_end|>"}
TILE = "<image>" * 16
ROWS = "".join(
    "".join(f"<fake_token_around_image><row_{row}_col_{column}>{TILE}" for column in (1, 2)) + "\n" for row in (1, 2)
)
IMAGE["smolvlm"] = f"{ROWS}\n<fake_token_around_image><global-img>{TILE}<fake_token_around_image>"
# What the chat templates write after an answer: its end, a message with two parts, and the beginning of an answer.
FOLLOWING = {
    "qwen2_5_vl": "<|im_end|>\n<|im_start|>user\n{}{}<|im_end|>\n<|im_start|>assistant\n",
    "smolvlm": "<end_of_utterance>\nUser:{}{}<end_of_utterance>\nAssistant:",
}


class Agent:
    """An agent, its process and an engine of transformers with a tiny model."""

    def __init__(self, path, source, *, reads=True):
        self.reader = open_image_reader(path)
        rows = open_sources("rows.jsonl")
        [self.prompt] = load_prompts(
            rows, self.reader.tokenizer, apply_chat_template=True, image_key="images", reader=self.reader
        )
        job = EngineJob(kind="transformers", spec=EngineSpec(model=str(path)), tokenizer=str(path))
        self.spec = job.masked_spec(self.reader.tokenizer, self.reader)
        self.engine = build_engine("transformers", self.spec)
        agent = AgentSpec(path=source, limits=EpisodeLimits(max_length=700), num_processes=1)
        router = EngineRouter([self.engine])
        self.agent = make_workflow(agent, router, self.reader.tokenizer, reader=self.reader if reads else None)

    def episodes(self, *labels):
        """Return an episode per label."""

        async def run():
            await self.agent.start()
            try:
                prompts = [dataclasses.replace(self.prompt, label=label) for label in labels]
                return [(await self.agent.run(one, SAMPLING, f"g{n}"))[0] for n, one in enumerate(prompts)]
            finally:
                await self.agent.close()
                await self.engine.close()

        return asyncio.run(run())


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_vision_model_dir(tmp_path_factory.mktemp("model") / "tiny", "qwen2_5_vl")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    noise = np.random.default_rng(0).integers(0, 255, (32, 32, 3), dtype=np.uint8)
    Image.fromarray(noise).save("first.png")
    Path("rows.jsonl").write_text('{"input": "what <image>?", "images": "first.png"}\n')
    return tmp_path


def expected(agent, path, rollout):
    """Return plain transformers' log-probs of a rollout's tokens but the first."""
    model = AutoModelForImageTextToText.from_pretrained(path)
    ids = torch.from_numpy(rollout.token_ids.astype(np.int64))[None]
    more = {name: torch.from_numpy(array) for name, array in agent.reader.arrays(rollout.images).items()}
    if agent.reader.family.startswith("qwen"):
        more["mm_token_type_ids"] = (ids == agent.reader.image_id).int()
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), **more).logits[0, :-1]
    for masked in agent.spec.masked_ids:
        logits[:, masked.start : masked.stop] = -torch.inf
    return logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].numpy()


@pytest.mark.parametrize(("family", "text"), [("qwen2_5_vl", "and <image>?"), ("smolvlm", "and <b>?")])
def test_observed_images_have_the_templates_tokens_and_answers_have_plain_transformers_logprobs(
    folder, write, family, text
):
    path = tiny_vision_model_dir(folder / family, family)
    agent = Agent(path, write(ENVIRONMENT_CODE.replace("TEXT", repr(text))))
    [episode] = agent.episodes(None)
    [rollout] = episode.rollouts
    assert (episode.verdict.kind, episode.verdict.score) == (VerdictKind.OK, 1.0)
    sources = [PROMPT, POLICY, ENVIRONMENT, POLICY, ENVIRONMENT, POLICY]
    assert [span.source for span in rollout.spans] == sources

    tokenizer = agent.reader.tokenizer
    first, answer, second, other_answer, third, _ = [span.token_ids.tolist() for span in rollout.spans]
    assert first == agent.prompt.token_ids.tolist()
    for before, added, parts in (
        (answer, second, (IMAGE[family], text)),
        (other_answer, third, ("or ", IMAGE[family])),
    ):
        wanted = tokenizer(FOLLOWING[family].format(*parts).replace("User:or", "User: or"))["input_ids"]
        assert added == (wanted[1:] if before[-1] == tokenizer.eos_token_id else wanted)

    own, *stored = rollout.images
    assert own == str(folder / "first.png")
    assert [Image.open(name).getpixel((5, 5)) for name in stored] == [(0, 0, 200), (200, 0, 0)]
    assert all(folder / "cache" in Path(name).parents for name in stored)
    mask = rollout.loss_mask
    np.testing.assert_allclose(
        rollout.rollout_logprobs[mask], expected(agent, path, rollout)[mask[1:]], atol=2e-5, rtol=0
    )
    # The pictures make a difference that this bound would show.
    swapped = dataclasses.replace(rollout, images=(own, *stored[::-1]))
    assert np.abs(expected(agent, path, swapped)[mask[1:]] - rollout.rollout_logprobs[mask]).max() > 1e-3

    group = RolloutGroup("g0", agent.prompt, (episode,))
    again = parse_group([{"num_left": 0, **rollout_record(group, episode, rollout)}], "here")
    assert (again.prompt.images, again.rollouts[0].images) == ((own,), rollout.images)


# The same conversation through `session.chat` and over HTTP, in OpenAI's two forms and Anthropic's.
ASKING = """
import base64, httpx
from pathlib import Path

URL = "data:image/png;base64," + base64.b64encode(Path("first.png").read_bytes()).decode()

async def run_episode(session):
    messages = session.messages
    added = messages
    async with httpx.AsyncClient(base_url=session.base_url, timeout=60) as client:
        for turn in range(3):
            if WAY == "session":
                answer = {"role": "assistant", "content": (await session.chat(added)).text}
            elif WAY == "chat":
                body = (await client.post("chat/completions", json={"messages": messages})).raise_for_status().json()
                answer = body["choices"][0]["message"]
            elif WAY == "messages":
                given = {"messages": [*map(as_blocks, messages)], "max_tokens": 5}
                body = (await client.post("messages", json=given)).raise_for_status().json()
                answer = {"role": "assistant", "content": body["content"][0]["text"]}
            else:
                given = [*map(as_item, messages)]
                body = (await client.post("responses", json={"input": given})).raise_for_status().json()
                answer = {"role": "assistant", "content": body["output"][0]["content"][0]["text"]}
            picture = {"type": "image_url", "image_url": {"url": URL}}
            added = [{"role": "user", "content": [picture, {"type": "text", "text": f"and <image> {turn}?"}]}]
            messages = [*messages, answer, *added]
    return 1.0

def as_blocks(message):
    if message["role"] == "assistant":
        return message
    blocks = []
    for part in message["content"]:
        head, _, data = part.get("image_url", {}).get("url", "").partition("base64,")
        source = {"type": "base64", "media_type": "image/png", "data": data} if data else {"type": "url", "url": head}
        blocks.append({"type": "image", "source": source} if head else part)
    return {"role": "user", "content": blocks}

def as_item(message):
    return {**message, "content": [*map(as_input, message["content"])]} if message["role"] == "user" else message

def as_input(part):
    is_text = part["type"] == "text"
    return {**part, "type": "input_text"} if is_text else {"type": "input_image", "image_url": part["image_url"]["url"]}
"""


@pytest.mark.parametrize("way", ["chat", "responses", "messages"])
def test_images_over_http_have_the_tokens_of_the_same_conversation_with_the_session(folder, write, model, way):
    source = write(ASKING.replace("WAY", "session.label"))
    [found], [wanted] = (episode.rollouts for episode in Agent(model, source).episodes(way, "session"))
    assert len(found.images) == 3 and len(found.turn_ends) == 3
    assert found.images == wanted.images
    assert found.spans[0].token_ids.tolist() == wanted.spans[0].token_ids.tolist()
    assert found.token_ids.tolist() == wanted.token_ids.tolist()
    np.testing.assert_allclose(found.rollout_logprobs, wanted.rollout_logprobs, atol=1e-5, rtol=0)


def test_a_request_over_http_has_no_file_read_but_those_of_the_prompt(folder, write, model):
    Image.new("RGB", (32, 32), "red").save("secret.png")
    Path("secret.txt").write_text("secret")
    names = ["secret.png", f"file://{folder}/secret.png", str(folder / "secret.txt"), "none.png", "https://a.b/c.png"]
    source = f"""
import httpx

async def run_episode(session):
    async with httpx.AsyncClient(base_url=session.base_url, timeout=60) as client:
        said = []
        for name in {[*names, str(folder / "first.png")]!r}:
            picture = {{"type": "image_url", "image_url": {{"url": name}}}}
            asked = {{"messages": [{{"role": "user", "content": [picture]}}]}}
            said.append(await client.post("chat/completions", json=asked))
    assert [answer.status_code for answer in said] == [400] * {len(names)} + [200], said
    assert all("none of the prompt's" in answer.text for answer in said[:-1]), said[0].text
    return 1.0
"""
    [episode] = Agent(model, write(source)).episodes(None)
    assert episode.verdict.detail == ""
    assert episode.rollouts[0].images == (str(folder / "first.png"),)
    assert not (folder / "cache").exists()


PICTURE = "{'type': 'image', 'image': %s}"


def function_of(*ways):
    """Return an agent that asks twice, by the code of the way that its label numbers."""
    code = "from pathlib import Path\n\nasync def run_episode(session):\n"
    for number, (first, second) in enumerate(ways):
        code += f"    if session.label == '{number}':\n"
        code += f"        first = await session.{first}\n        await session.{second}\n"
    return code + "    return 1.0\n"


def chat(image):
    return f"chat([{{'role': 'user', 'content': [{PICTURE % image}]}}])"


def test_every_way_to_ask_keeps_the_images_of_its_conversation(folder, write, model):
    ways = [
        ("reply()", "reply('more')", 1),
        ("chat(session.messages)", "chat([{'role': 'user', 'content': 'no <image>'}])", 1),
        ("chat(session.messages)", chat("session.images[0]"), 2),
        ("complete(session.prompt_token_ids)", "complete(first.prompt_token_ids + first.token_ids + [40])", 1),
        # Tokens of the prompt's own text have one for the image.
        ("begin(session.prompt)", "reply('more')", 1),
        ("begin('nothing to see')", "reply('more')", 0),
    ]
    agent = Agent(model, write(function_of(*[way[:2] for way in ways])))
    episodes = agent.episodes(*map(str, range(len(ways))))
    for episode, (*_, images) in zip(episodes, ways, strict=True):
        assert episode.verdict.detail == ""
        [rollout] = episode.rollouts
        assert rollout.images == (str(folder / "first.png"),) * images
        assert (rollout.token_ids == agent.reader.image_id).sum() == 16 * images
        assert not (rollout.token_ids[rollout.loss_mask] == agent.reader.image_id).any()
        assert (rollout.spans[0].token_ids.tolist() == agent.prompt.token_ids.tolist()) == bool(images)


def test_an_image_that_cannot_be_used_costs_its_episode_alone(folder, write, model):
    Path("torn.png").write_bytes(Path("first.png").read_bytes()[:60])
    Image.new("I;16", (40, 40)).save("deep.png")
    bad = {
        chat("'none.png'"): "there is no image none.png",
        chat("'https://example.com/a.png'"): "no URL is fetched",
        chat("Path('torn.png').read_bytes()"): "cannot be read",
        chat("'deep.png'"): "no 8-bit colours",
        chat("'data:image/png;base64,!'"): "not base64",
        chat("None"): "an image is null",
        "reply('<|image_pad|>')": "1 places for 0 images",
        "complete(session.prompt_token_ids + [session.prompt_token_ids[20]])": "1 places for 0 images",
    }
    source = write(function_of(*[("reply()", second) for second in bad]))
    episodes = Agent(model, source).episodes(*map(str, range(len(bad))))
    for episode, says in zip(episodes, bad.values(), strict=True):
        assert episode.verdict.kind is VerdictKind.CRASH
        assert says in episode.verdict.detail
        assert episode.rollouts[0].images == (str(folder / "first.png"),)


def test_a_run_that_reads_text_refuses_an_agents_image(folder, write, model):
    [episode] = Agent(model, write(function_of((chat("'first.png'"), "reply()"))), reads=False).episodes("0")
    assert episode.verdict.kind is VerdictKind.CRASH
    assert "this run reads text only" in episode.verdict.detail


class Same:
    """Answers each request with the same token, and keeps the images that came with it."""

    def __init__(self):
        self.asked = []

    async def generate(self, token_ids, sampling, *, images=(), **_):
        self.asked.append(images)
        return [Completion((Span(POLICY, [7], [-1.0], 0),), FinishReason.STOP)]


def test_a_conversation_with_another_image_of_the_same_tokens_is_another_rollout():
    router = Same()
    recorder = EpisodeRecorder(
        router, make_prompt("2+2="), SAMPLING, name="e", group_id="g", limits=EpisodeLimits(), decode=str
    )

    async def run():
        await recorder.generate([1, 5, 5], {}, ("a.png",))
        await recorder.generate([1, 5, 5, 7, 5, 5], {}, ("b.png", "c.png"))
        await recorder.generate([1, 5, 5, 7, 5, 5], {}, ("a.png", "c.png"))

    asyncio.run(run())
    rollouts = recorder.episode([], None).rollouts
    assert [rollout.images for rollout in rollouts] == [("a.png", "c.png"), ("b.png", "c.png")]
    assert [len(rollout.spans[0].token_ids) for rollout in rollouts] == [3, 6]
    assert router.asked == [("a.png",), ("b.png", "c.png"), ("a.png", "c.png")]
    # What an interrupted run has written of a request is not taken for another image.
    groups = UnfinishedGroups()
    [draft] = groups.drafts("g", "e", np.array([1, 5, 5]), SAMPLING, ("a.png",))
    draft.token_ids.append(7)
    draft.logprobs.append(-1.0)
    later = UnfinishedGroups()
    later.restore(groups.state(["g"]))
    kept = [later.drafts("g", "e", np.array([1, 5, 5]), SAMPLING, (name,))[0] for name in ("b.png", "a.png")]
    assert [len(draft.token_ids) for draft in kept] == [0, 1]
