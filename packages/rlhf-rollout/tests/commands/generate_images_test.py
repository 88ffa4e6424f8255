"""`generate --image_key`: responses to prompts with images, rows whose images are bad, and what is refused."""

import base64
import json
import struct
import zlib
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModel

from rlhf_data.images.reader import open_image_reader
from rlhf_rollout.commands.main import main
from rlhf_rollout.commands.parts import EngineJob
from rlhf_rollout.engines import EngineSpec
from tiny_vision import drawn_shapes, tiny_vision_model_dir, tiny_vision_reward_dir


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny_vision_model_dir(tmp_path / "model", "smolvlm")
    rows = list(drawn_shapes(tmp_path / "pictures", 3, seed=1))
    write(tmp_path, rows)
    return tmp_path


def write(folder, rows):
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def words(*more):
    model = "--pretrain model --engine transformers --prompt_data rows.jsonl --image_key images --apply_chat_template"
    return [
        "generate",
        *model.split(),
        *["--output_path", "out.jsonl", "--generate_max_len", "3", "--seed", "1"],
        *more,
    ]


def bomb(path):
    """Write a PNG of a few bytes whose header tells of 60,000 x 60,000 pixels."""
    size = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    chunks = b""
    for name, data in ((b"IHDR", size), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")):
        chunks += struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunks)


def test_generate_answers_prompts_with_images_and_counts_rows_whose_images_are_bad(folder, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    (folder / "torn.png").write_bytes((folder / "pictures" / "1-0.png").read_bytes()[:60])
    bomb(folder / "bomb.png")
    Image.new("I;16", (40, 40)).save(folder / "deep.png")
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    for name in ("torn.png", "bomb.png", "deep.png", "none.png"):
        rows.append({"input": "colour?", "images": name})
    rows.append({"input": "colour?", "images": "data:image/png;base64,AAAA"})
    held = (folder / "pictures" / "1-0.png").read_bytes()
    rows += [{"input": "count?", "images": "data:image/png;base64," + base64.b64encode(held).decode()}] * 2
    write(folder, rows)
    # More than one row of a hundred is bad, which is an error that shows the first of them.
    assert main(words()) != 0
    told = capsys.readouterr().err
    assert "rows.jsonl:4" in told
    assert "hint: " in told
    assert not (folder / "out.jsonl").exists()
    assert main(words("--skip_bad_rows")) == 0
    told = capsys.readouterr().err
    assert "5 prompts" in told
    assert "5 " in told
    records = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    records.sort(key=lambda record: int(record["prompt_id"].rpartition(":")[2]))
    *files, [one], [other] = [record["images"] for record in records]
    assert files == [[str(folder / "pictures" / f"1-{number}.png")] for number in range(3)]
    assert one == other
    assert (folder / "cache" in Path(one).parents, Path(one).read_bytes()) == (True, held)


def test_a_reward_model_reads_the_images_of_prompts(folder):
    tiny_vision_reward_dir(folder / "rm", folder / "model")
    with (folder / "rows.jsonl").open("a") as file:
        file.write('{"input": "text alone"}\n')
    assert main(words("--reward_pretrain", "rm")) == 0
    records = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    assert [len(record.get("images", [])) for record in records].count(1) == 3
    reader = open_image_reader("rm")
    model = AutoModel.from_pretrained("rm")
    head = load_file("rm/value_head.safetensors")["weight"][0]
    for record in records:
        arrays = {name: torch.from_numpy(array) for name, array in reader.arrays(record.get("images", [])).items()}
        with torch.no_grad():
            state = model(input_ids=torch.tensor([record["token_ids"]]), **arrays).last_hidden_state[0, -1]
        assert record["reward"] == pytest.approx(float(state @ head), abs=1e-4)


def test_engines_sample_no_token_that_stands_for_an_image(folder):
    reader = open_image_reader("model")
    job = EngineJob(kind="transformers", spec=EngineSpec(model="model"), tokenizer="model")
    spec = job.masked_spec(reader.tokenizer, reader)
    assert spec.images
    masked = [token for ids in spec.masked_ids for token in ids]
    tokens = reader.tokenizer.convert_ids_to_tokens(masked)
    # The others are those of the model's vocabulary to which no token belongs.
    assert [token for token in tokens if token is not None] == ["<image>"]
    assert masked == sorted(masked)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--engine", "fake"], "use --engine transformers or vllm"),
        (["--post_processor", "plain"], "drop --post_processor"),
        (["--image_key", "picture"], "no row of --prompt_data has images"),
        (["--apply_chat_template", "false"], "add --apply_chat_template"),
    ],
)
def test_what_does_not_work_with_images_is_refused(folder, capsys, more, says):
    (folder / "agent.py").write_text("")
    assert main(words(*more)) == 2
    told = capsys.readouterr().err
    assert says in told
    assert "hint: " in told
    assert not (folder / "out.jsonl").exists()
