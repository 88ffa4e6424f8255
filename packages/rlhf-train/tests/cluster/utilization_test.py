"""The metrics of GPUs, with an NVML that is made up, and the share of their peak by numbers of hand."""

# ruff: noqa: N802 - NVML's names

import threading
from types import SimpleNamespace

import pytest

from rlhf_train.cluster.gpu_meter import GpuMeter, GpuReading
from rlhf_train.cluster.places import Place, PlacementPlan, ProcessPlan
from rlhf_train.cluster.utilization import (
    PEAK_FLOPS,
    GpuWatch,
    flops_utilization,
    gpu_metrics,
    peak_flops,
)

GIB = 2**30
# Two machines; the engine has the second GPU of the first one, and the actor's ranks have the others.
PLAN = PlacementPlan(
    "cuda",
    (2, 1),
    (ProcessPlan("actor+reference", ("actor", "reference"), (Place(0, (0,)), Place(1, (0,)))),),
    ProcessPlan("engines", (), (Place(0, (1,)),)),
    colocated=False,
)


class Nvml:
    """Stands for the module `pynvml`: GPU k is used for 10 (k + 1) percent, then 20 percent more at each look."""

    def __init__(self, broken=()):
        self.broken = broken
        self.looks = {}
        self.looked = threading.Event()
        self.named = []

    def nvmlInit(self):
        pass

    def nvmlDeviceGetHandleByIndex(self, index):
        self.named.append(index)
        return index

    def nvmlDeviceGetHandleByUUID(self, name):
        self.named.append(name)
        return 0

    def nvmlDeviceGetCount(self):
        return 2

    def nvmlDeviceGetUUID(self, handle):
        return ("GPU-8932f937-d72c", "GPU-45c2a8b1-11ee")[handle]

    def nvmlDeviceGetName(self, handle):
        return b"NVIDIA H200" if handle else "NVIDIA H100 80GB HBM3"

    def nvmlDeviceGetUtilizationRates(self, handle):
        if "utilization" in self.broken:
            raise RuntimeError("Not Supported")
        looks = self.looks[handle] = self.looks.get(handle, 0) + 1
        if looks > 3:
            self.looked.set()
            threading.Event().wait()  # no further sample
        return SimpleNamespace(gpu=10 * (handle + 1) + 20 * (looks - 1))

    def nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(used=(self.looks.get(handle, 0) % 3 + 1) * GIB, total=80 * GIB)

    def nvmlDeviceGetPowerUsage(self, handle):
        return 300_000 + 50_000 * self.looks.get(handle, 0)


def sampled(nvml, gpus):
    """Return the devices of a meter after three samples, without its thread."""
    meter = GpuMeter(gpus, nvml, period_s=3600)
    for _ in range(3):
        for device in meter._devices:
            device.sample()
    return meter


def test_meter_reads_use_memory_and_power_of_each_gpu_since_the_last_reading(monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "node-7")
    nvml = Nvml()
    meter = sampled(nvml, ["0", "1"])
    assert nvml.named == [0, 1]
    host, readings = meter.take()
    assert host == "node-7" and [reading.name for reading in readings] == ["NVIDIA H100 80GB HBM3", "NVIDIA H200"]
    # 10, 30 and 50 percent; memory of 2, 3 and 1 GiB; 350, 400 and 450 watts.
    assert readings[0].samples == {
        "utilization": pytest.approx((0.9, 0.5, 3)),
        "memory_bytes": (6 * GIB, 3 * GIB, 3),
        "power_watts": (1200, 450, 3),
    }
    assert readings[1].samples["utilization"] == pytest.approx((1.2, 0.6, 3))
    # A step without a sample of the thread has one of its end: the fourth look waits, see `Nvml`.
    del nvml.looks[0], nvml.looks[1]
    assert [reading.samples["power_watts"] for reading in meter.take()[1]] == [(350, 350, 1)] * 2


def test_meter_samples_by_itself():
    nvml = Nvml()
    meter = GpuMeter(["0"], nvml, period_s=0.001)
    assert nvml.looked.wait(10)
    assert meter._devices[0]._samples["utilization"] == pytest.approx((0.9, 0.5, 3))


def test_gpu_may_be_named_by_its_unique_name_and_tell_no_use():
    nvml = Nvml(broken={"utilization"})
    [part, whole] = sampled(nvml, ["MIG-4f2d", "GPU-45c2"]).take()[1]  # CUDA takes the beginning of a GPU's name
    assert nvml.named[0] == "MIG-4f2d" and set(part.samples) == {"memory_bytes", "power_watts"}
    assert (part.name, whole.name) == ("NVIDIA H100 80GB HBM3", "NVIDIA H200")


@pytest.mark.parametrize("nvml", [None, SimpleNamespace(), SimpleNamespace(nvmlInit=lambda: 1 / 0)])
def test_without_nvml_readings_are_empty(nvml, monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr("importlib.import_module", missing)
    assert GpuMeter(["0", "1"], nvml).take()[1] == []


def reading(utilization, memory, name="NVIDIA H200"):
    return GpuReading(name, {"utilization": (2 * utilization, 1.0, 2), "memory_bytes": (9 * memory, memory, 2)})


READINGS = {
    (0, 0): ("a", reading(0.9, 50.0)),
    (0, 1): ("a", reading(0.3, 70.0)),
    (1, 0): ("b.example", reading(0.6, 60.0)),
}


def test_metrics_are_of_all_gpus_of_machines_and_of_processes():
    assert gpu_metrics(READINGS, PLAN) == pytest.approx(
        {
            "gpu/utilization": 0.6, "gpu/memory_bytes": 70, "gpu/utilization_a": 0.6, "gpu/memory_bytes_a": 70,
            "gpu/utilization_b_example": 0.6, "gpu/memory_bytes_b_example": 60, "gpu/utilization_engines": 0.3,
            "gpu/memory_bytes_engines": 70, "gpu/utilization_actor_reference": 0.75,
            "gpu/memory_bytes_actor_reference": 60,
        }
    )  # fmt: skip
    assert gpu_metrics({}, PLAN) == {}


def test_utilization_is_the_work_divided_by_what_the_gpus_could_do():
    peaks = {(0, 0): 100.0, (0, 1): 300.0, (1, 0): 100.0}
    flops = {"generate": 200.0, "experience": 300.0, "train": 500.0}
    found = flops_utilization(flops, peaks, [(0, 0), (1, 0), (0, 0)], step_s=10.0, train_s=5.0)
    assert found == {"throughput/mfu": 1000 / 5000, "throughput/train_mfu": 500 / 1000}
    assert flops_utilization(flops, peaks, [(0, 0)], step_s=10.0, train_s=0.0) == {"throughput/mfu": 0.2}
    assert flops_utilization(flops, {}, [(0, 0)], step_s=10.0, train_s=5.0) == {}


def test_peak_is_that_of_the_products_name():
    assert peak_flops("NVIDIA H200") == peak_flops("NVIDIA H100 80GB HBM3") == 989.4e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("NVIDIA A100-SXM4-80GB") == peak_flops("NVIDIA A100-PCIE-40GB") == 312e12
    assert peak_flops("NVIDIA L40S") == 362e12 and peak_flops("NVIDIA L4") == 121e12
    assert peak_flops("NVIDIA GeForce RTX 4090") == 165.2e12
    assert peak_flops("NVIDIA H2000") is None and peak_flops("NVIDIA A100-SXM4-40GB MIG 1g.5gb") is None
    assert peak_flops("Tesla T4") is None
    # No name hides one below it.
    assert all(peak_flops(f"NVIDIA {name}") == peak for name, peak in PEAK_FLOPS.items())


class Meter:
    """A handle of a `GpuMeter` whose answers stand for references to them."""

    def __init__(self, *answers):
        self.answers = iter(answers)
        self.take = SimpleNamespace(remote=lambda: next(self.answers))


def watch(monkeypatch, dtype="bfloat16", name="NVIDIA H200", num_answers=1):
    def wait(references, **_):
        found = list(references)
        if None in found:
            raise RuntimeError("the meter is gone")
        return found

    monkeypatch.setattr("rlhf_train.cluster.utilization.wait", wait)
    first = ("a", [reading(0.5, 1.0, name), reading(0.5, 1.0, name)])
    second = ("b", [reading(0.5, 1.0, name)])
    return GpuWatch([Meter(*[first] * num_answers, None), Meter(*[second] * num_answers, None)], PLAN, dtype)


def test_step_has_tokens_per_gpu_and_the_share_of_the_peak(monkeypatch):
    watching = watch(monkeypatch)
    flops = {"generate": 1e15, "train": 3e15}
    found = watching.step(flops, 600, step_s=4.0, train_s=2.0)
    assert found["throughput/response_tokens_per_gpu"] == 50.0
    assert found["throughput/mfu"] == pytest.approx(4e15 / (4 * 3 * 989.4e12))
    assert found["throughput/train_mfu"] == pytest.approx(3e15 / (2 * 2 * 989.4e12))
    assert found["gpu/utilization_a"] == 0.5
    # The meters are gone; the run goes on with what needs none.
    assert watching.step(flops, 600, step_s=4.0, train_s=2.0) == {"throughput/response_tokens_per_gpu": 50.0}
    assert watching.step(flops, 600, step_s=4.0, train_s=2.0) == {"throughput/response_tokens_per_gpu": 50.0}


@pytest.mark.parametrize("changes", [{"dtype": "float32"}, {"name": "Tesla T4"}])
def test_share_of_an_unknown_peak_is_absent(monkeypatch, changes):
    found = watch(monkeypatch, **changes).step({"train": 1e15}, 600, step_s=4.0, train_s=2.0)
    assert "gpu/utilization" in found and not any("mfu" in name for name in found)
