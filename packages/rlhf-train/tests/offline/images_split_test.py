"""An update on rows with and without images is the gradient of plain transformers, however it is split over ranks."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_data.examples.sft import SftEncoder, SftExample
from rlhf_data.examples.with_images import ImageEncoder
from rlhf_data.images.reader import open_image_reader
from rlhf_data.rows.row import Row
from rlhf_models.lora import LoraSpec
from rlhf_rollout.host import free_port
from rlhf_train.offline.epochs import OfflineSchedule
from rlhf_train.offline.job import OfflineJob, run_offline
from rlhf_train.offline.objectives.supervised import SupervisedObjective
from rlhf_train.specs import ModelSpec
from tiny_vision import drawn_shapes, tiny_vision_model_dir
from trainer_testing import DESCENT, Watch, run_ranks

LORA = {"lora": LoraSpec(rank=4)}
SPLITS: dict[str, dict[str, Any]] = {
    "ZeRO 2": {"zero_stage": 2},
    "ZeRO 3": {"zero_stage": 3},
    "ZeRO 3, packed, frozen": {"zero_stage": 3, "packing": True, "images": "frozen"},
    "ZeRO 3, packed, LoRA": {"zero_stage": 3, "packing": True, **LORA},
}


def change(rank: int, num_ranks: int, master: Any, path: str, out: str, fields: Mapping[str, Any]) -> Any:
    """Run one update of SFT in passes of one row; return by how much it changed the saved weights, of rank 0."""
    from transformers import AutoModelForImageTextToText

    found = examples(path)
    job = OfflineJob(
        objective=SupervisedObjective(reader=open_image_reader(path)),
        model=ModelSpec(path=path, optimizer=DESCENT, **{"images": "trained"} | fields),
        examples=found, schedule=OfflineSchedule(train_batch_size=len(found), micro_train_batch_size=1),
        model_path=Path(out) / "model", master=master, rank=rank, num_ranks=num_ranks,
    )  # fmt: skip
    run_offline(job, Watch())
    if rank:
        return None
    loaded = [AutoModelForImageTextToText.from_pretrained(place) for place in (path, f"{out}/model")]
    before, after = (model.state_dict() for model in loaded)
    return {name: (before[name] - after[name]).numpy() * 10 for name in before}


def changes(rank: int, num_ranks: int, master: Any, path: str, out: str) -> dict[str, Any]:
    """Run every split in one process."""
    return {name: change(rank, num_ranks, master, path, f"{out}/{name}", fields) for name, fields in SPLITS.items()}


def examples(path: str) -> list[SftExample]:
    """Three rows with images and three without, which ranks read at the same time."""
    folder = Path(path).parent
    rows = [*drawn_shapes(folder / "pictures", 3, seed=1)]
    rows += [{"input": f"text {number}", "output": "yes"} for number in range(3)]
    reader = open_image_reader(path)
    encoder = ImageEncoder(encoder=SftEncoder(tokenizer=reader.tokenizer, apply_chat_template=True), reader=reader)
    return [encoder(Row(row, str(folder / "rows.jsonl"), number)) for number, row in enumerate(rows)]


def gradients_by_hand(path: str) -> dict[str, np.ndarray]:
    """Gradients of the loss of plain transformers, one row after the other."""
    import torch
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(path)
    reader = open_image_reader(path)
    total, count = 0.0, 0
    for example in examples(path):
        ids = torch.tensor(example.token_ids.astype(np.int64))[None]
        more = {name: torch.from_numpy(array) for name, array in reader.arrays(example.images).items()}
        if reader.family.startswith("qwen"):
            more["mm_token_type_ids"] = (ids == reader.image_id).int()
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), **more).logits
        logprobs = logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        mask = torch.tensor(example.loss_mask[1:])
        total = total - logprobs[mask].sum()
        count += int(mask.sum())
    (total / count).backward()
    return {name: weight.grad.numpy() for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("family", ["qwen3_vl", "smolvlm"])
def test_an_update_is_the_gradient_of_plain_transformers_on_two_ranks(tmp_path, family):
    path = str(tiny_vision_model_dir(tmp_path / "model", family))
    found = run_ranks(changes, 2, path, str(tmp_path / "two"))[0]
    expected = gradients_by_hand(path)
    eyes = {name for name in expected if any(part in name for part in ("vis", "connector"))}
    for split in ("ZeRO 2", "ZeRO 3", "ZeRO 3, packed, frozen"):
        changed = found[split]
        assert expected.keys() <= changed.keys()
        for name, gradient in expected.items():
            wanted = np.zeros_like(gradient) if "frozen" in split and name in eyes else gradient
            gap = np.abs(changed[name] - wanted).max()
            assert gap < 2e-5 + 1e-4 * np.abs(gradient).max(), (split, name)
    alone = change(0, 1, ("127.0.0.1", free_port()), path, str(tmp_path / "one"), LORA)
    adapted = found["ZeRO 3, packed, LoRA"]
    assert max(float(np.abs(alone[name] - adapted[name]).max()) for name in alone) < 2e-5
    moved = {name for name, value in adapted.items() if value.any()}
    assert moved
    assert not moved & eyes
