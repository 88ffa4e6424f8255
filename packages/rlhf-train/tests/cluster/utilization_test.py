"""The metric of how busy GPUs are, with an NVML that is made up."""

import threading

import pytest
import torch

from rlhf_train.cluster.utilization import Utilization, watch_gpu
from rlhf_train.run.metrics import Mean, merge_metrics, results

GPU = torch.device("cuda", 0)


def sampled(*percents: float, node: str = "a", error: Exception | None = None) -> Utilization:
    """Return what has read these percentages, and then waits or has failed."""
    numbers = iter(percents)
    read_all, never = threading.Event(), threading.Event()

    def read() -> float:
        try:
            return next(numbers)
        except StopIteration:
            read_all.set()
            if error is not None:
                raise error from None
            never.wait()
            raise

    found = Utilization(read, node, period_s=0.001)
    assert read_all.wait(10)
    return found


def test_mean_of_a_step_is_that_of_its_samples_and_a_step_without_any_has_no_number():
    found = sampled(100, 50, 0, 90)
    assert results(found.take()) == pytest.approx({"gpu/utilization": 0.6, "gpu/utilization_a": 0.6})
    assert results(found.take()) == {}


def test_ranks_are_averaged_by_machine_and_over_all_of_them():
    ranks = [sampled(100, 0), sampled(50, 50), sampled(20, node="b.example")]
    assert results(merge_metrics(rank.take() for rank in ranks)) == pytest.approx(
        {"gpu/utilization": 2.2 / 5, "gpu/utilization_a": 0.5, "gpu/utilization_b_example": 0.2}
    )


def test_nvml_that_fails_later_ends_the_metric_and_not_the_run():
    found = sampled(40, error=RuntimeError("GPU is lost"))
    assert results(found.take()) == pytest.approx({"gpu/utilization": 0.4, "gpu/utilization_a": 0.4})
    assert results(found.take()) == {}


def test_metric_is_absent_on_a_cpu_and_without_nvml(monkeypatch):
    def missing(device):
        raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")

    monkeypatch.setattr("torch.cuda.utilization", missing)
    assert watch_gpu(GPU) is None
    monkeypatch.setattr("torch.cuda.utilization", lambda device: pytest.fail("a CPU was asked"))
    assert watch_gpu(torch.device("cpu")) is None


def test_gpu_is_sampled_by_nvml_under_the_name_of_its_machine(monkeypatch):
    asked = []
    twice = threading.Event()

    def utilization(device):
        asked.append(device)
        if len(asked) > 2:
            twice.set()
        return 30

    monkeypatch.setattr("torch.cuda.utilization", utilization)
    monkeypatch.setattr("socket.gethostname", lambda: "node-7")
    monkeypatch.setattr("rlhf_train.cluster.utilization.PERIOD_S", 0.001)
    found = watch_gpu(GPU)
    assert twice.wait(10) and set(asked) == {GPU}
    taken = found.take()
    assert set(taken) == {"gpu/utilization", "gpu/utilization_node-7"}
    assert all(isinstance(part, Mean) and part.result() == pytest.approx(0.3) for part in taken.values())
