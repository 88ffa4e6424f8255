"""What a loader writes, recorded and repeated with other weights, compared with the loader's own work on these."""

import pytest

torch = pytest.importorskip("torch")

from rlhf_rollout.engines.vllm.patches.copies import CopyRecorder, Part, Target  # noqa: E402

HIDDEN = 4
ROWS = {"q": 6, "k": 2, "v": 2}


class Layer(torch.nn.Module):
    """Parameters as vLLM has them: fused, split between GPUs, and padded."""

    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Parameter(torch.full((10, HIDDEN), -7.0))
        self.down = torch.nn.Parameter(torch.full((HIDDEN, 3), -7.0))
        self.turned = torch.nn.Parameter(torch.full((HIDDEN, 5), -7.0))
        self.vocabulary = torch.nn.Parameter(torch.full((8, HIDDEN), -7.0))
        self.bias = torch.nn.Parameter(torch.full((HIDDEN,), -7.0))
        self.register_buffer("unloaded", torch.ones(2))

    def load_weights(self, weights):
        start = dict(zip(ROWS, (0, 6, 8), strict=True))
        for name, weight in weights:
            if name in ROWS:
                self.qkv.data.narrow(0, start[name], ROWS[name]).copy_(weight)
            elif name == "down":  # the second GPU's half of the columns
                self.down.data.copy_(weight.narrow(1, 3, 3))
            elif name == "turned":
                self.turned.data.copy_(weight.t())
            elif name == "vocabulary":
                self.vocabulary[:5].data.copy_(weight)
                self.vocabulary[5:].data.fill_(0)
            elif name == "bias":
                for _ in range(2):  # as vLLM does, which counts elements by loading
                    self.bias.data.copy_(weight)
                self.bias.data.copy_(self.bias)


def weights(seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    shapes = {name: (rows, HIDDEN) for name, rows in ROWS.items()}
    shapes |= {"down": (HIDDEN, 6), "turned": (5, HIDDEN), "vocabulary": (5, HIDDEN), "bias": (HIDDEN,), "unused": (3,)}
    total = sum(torch.Size(shape).numel() for shape in shapes.values())
    flat = torch.randn(total, generator=generator).to(dtype)  # all in one storage, as in a bucket
    parts = flat.split([torch.Size(shape).numel() for shape in shapes.values()])
    return [(name, part.view(shape)) for part, (name, shape) in zip(parts, shapes.items(), strict=True)]


def targets(layer):
    tensors = layer._parameters | layer._buffers
    return {Target("model.layer", layer, name): tensor for name, tensor in tensors.items()}


def record(layer, load=None, arrived=None):
    """Return the recorder of a load in which the first weights come one by one and the others together."""
    recorder = CopyRecorder(targets(layer))
    arrived = weights(1) if arrived is None else arrived
    with recorder, torch.no_grad():
        for bucket in ([arrived[0]], [arrived[1]], arrived[2:]):
            recorder.expect(bucket)
            (load or layer.load_weights)(bucket)
    return recorder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_repeated_copies_leave_what_the_loader_leaves(dtype):
    recorder = record(Layer())
    found = recorder.finish()
    assert recorder.problem is None
    new = weights(2, dtype)
    by_loader = Layer()
    with torch.no_grad():
        by_loader.load_weights(new)
    repeated = Layer()
    for target, part in found.zeros:
        part.of(getattr(repeated, target.name).data).zero_()
    for name, weight in new:
        for copy in found.copies[name]:
            copy.place.of(getattr(repeated, copy.target.name).data).copy_(copy.source.of(weight))
    for name, expected in by_loader.state_dict().items():
        assert torch.equal(repeated.state_dict()[name], expected), name
    assert not (by_loader.qkv == -7).any()


def test_record_counts_copies_and_elements_of_a_layer_and_knows_all_weights_that_arrived():
    layer = Layer()
    found = record(layer).finish()
    # q, k, v, down, turned, vocabulary, bias; the rows that pad the vocabulary are no copy of a weight.
    assert found.num_copies == {layer: 7}
    assert found.numel == {"model.layer": 40 + 12 + 20 + 20 + 4}
    assert [(target.name, part.offset, part.numel) for target, part in found.zeros] == [("vocabulary", 20, 12)]
    assert found.shapes["down"] == (HIDDEN, 6)
    assert (found.shapes["unused"], found.copies["unused"]) == ((3,), [])


def copies_of(recorder):
    """Return what goes where, by weight."""
    found = recorder.finish()
    assert recorder.problem is None
    return {name: [(copy.target.name, *copy[1:]) for copy in copies] for name, copies in found.copies.items()}


def test_record_does_not_depend_on_the_order_in_which_weights_arrive():
    # All weights lie in one piece of memory, the last ones first in a bucket.
    assert copies_of(record(Layer(), arrived=weights(1)[::-1])) == copies_of(record(Layer()))


def test_weights_of_earlier_buckets_are_sources_as_long_as_they_live():
    layer = Layer()
    arrived, kept = weights(1), []

    def load(bucket):  # as vLLM, which waits for the rest of a layer
        kept.extend(bucket)
        if len(kept) == len(arrived):
            layer.load_weights(kept)

    assert copies_of(record(layer, load, arrived)) == copies_of(record(Layer()))


def test_record_of_a_parameter_that_is_a_part_of_other_memory_counts_from_its_first_element():
    layer = Layer()
    layer.bias = torch.nn.Parameter(torch.full((12,), -7.0)[6:10])
    assert copies_of(record(layer)) == copies_of(record(Layer()))


def test_reading_a_parameter_and_filling_padding_twice_change_no_record():
    layer = Layer()

    def load(bucket):
        layer.load_weights(bucket)
        torch.zeros(HIDDEN).add_(layer.bias)
        if "vocabulary" in dict(bucket):
            layer.vocabulary[5:].data.zero_()

    assert copies_of(record(layer, load)) == copies_of(record(Layer()))


def test_made_gives_the_part_of_the_weight_and_the_tensor_it_went_to():
    layer = Layer()
    arrived = weights(1)
    recorder = record(layer, arrived=arrived)
    [(copy, target, source)] = recorder.made("down", dict(arrived)["down"])
    assert copy.target.name == "down" and target is layer.down
    assert torch.equal(source, dict(arrived)["down"][:, 3:])
    assert [copy.target.name for copy, _, _ in recorder.made("vocabulary", dict(arrived)["vocabulary"])] == [
        "vocabulary"
    ]


def test_part_of_a_tensor_that_is_itself_a_part():
    tensor = torch.arange(40)[10:30]
    part = Part((2, 3), (5, 1), 2)
    assert part.numel == 6
    assert part.of(tensor).tolist() == [[12, 13, 14], [17, 18, 19]]
    assert part.of(tensor, 4).tolist() == [[16, 17, 18], [21, 22, 23]]


def without(name):
    return [(other, weight) for other, weight in weights(1) if other != name]


def test_record_of_an_update_that_lacks_a_part_is_refused():
    for name in ("k", "vocabulary", "bias"):
        recorder = record(Layer(), arrived=without(name))
        recorder.finish()
        target = "qkv" if name == "k" else name
        assert recorder.problem == f"model.layer.{target} is not written whole", name


def test_record_of_a_buffer_counts_only_if_it_is_written():
    layer = Layer()

    def load(arrived):
        layer.load_weights(arrived)
        for name, weight in arrived:
            if name == "unused":
                layer.unloaded[:1].copy_(weight[:1])

    recorder = record(layer, load)
    recorder.finish()
    assert recorder.problem == "model.layer.unloaded is not written whole"


def test_record_of_a_shared_parameter_needs_one_writer():
    layer = Layer()
    layer.head = layer.vocabulary
    tensors = {target: tensor.detach().to("meta") for target, tensor in targets(layer).items()}
    for target, tensor in tensors.items():
        tensor.__class__ = torch.nn.Parameter if target.name != "unloaded" else torch.Tensor
        assert tensor.is_meta
    recorder = CopyRecorder(tensors)
    real = dict(layer._parameters)
    for target, tensor in tensors.items():
        if target.name in real:
            layer._parameters[target.name] = tensor
    with recorder, torch.no_grad():
        recorder.expect(arrived := weights(1))
        layer.load_weights(arrived)
    layer._parameters.update(real)
    recorder.finish()
    assert recorder.problem is None
    layer.head = torch.nn.Parameter(torch.zeros(8, HIDDEN))
    recorder.finish()
    assert recorder.problem == "model.layer.head is not written whole"


OVERLAP = "model.layer.qkv is written twice in part"
COMPUTED = "model.layer.down is written with values that are not those of a weight"
WRITES = {
    "overlapping": (OVERLAP, lambda layer, weight: layer.qkv[:2].data.copy_(weight[:2, :4])),
    "scaled": (COMPUTED, lambda layer, weight: layer.down.data.copy_(2 * weight[:, :3])),
    "afterwards": (COMPUTED, lambda layer, weight: layer.down.data.mul_(2)),
    "in a list": (COMPUTED, lambda layer, weight: torch._foreach_mul_([layer.down.data], 2)),
    "as an output": (COMPUTED, lambda layer, weight: torch.exp(weight[:, :3], out=layer.down.data)),
    "a constant": (COMPUTED, lambda layer, weight: layer.down.data.fill_(1)),
    "a zero": (COMPUTED.replace("down", "bias"), lambda layer, weight: layer.bias.data.fill_(0)),
    "other bits": (COMPUTED, lambda layer, weight: layer.down.data.copy_(weight[:, :3].view(torch.int32))),
    "columns": (
        "model.layer.down is not written in contiguous parts",
        lambda layer, weight: layer.down.data[:, :2].copy_(weight[:, :2]),
    ),
}


@pytest.mark.parametrize("name", WRITES)
def test_record_of_other_writes_than_single_copies_is_refused(name):
    problem, write = WRITES[name]
    layer = Layer()

    def load(arrived):
        for pair in arrived:
            layer.load_weights([pair])
            if pair[0] == "down":
                write(layer, pair[1])

    recorder = record(layer, load)
    recorder.finish()
    assert recorder.problem == problem


def test_record_does_not_take_another_tensor_for_a_weight():
    layer = Layer()
    foreign = torch.randn(HIDDEN, 6)

    def load(arrived):
        layer.load_weights((name, foreign if name == "down" else weight) for name, weight in arrived)

    recorder = record(layer, load)
    recorder.finish()
    assert recorder.problem == COMPUTED
