"""Weights sent to generators on other devices: all of them, in buckets of any size, and noticed when they change on the way."""

import threading

import pytest
import torch

from verl.engines.hybrid import check_arrival
from verl.engines.weight_link import WeightReceiver, WeightSender

CPU = torch.device("cpu")


def weights(dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    make = torch.Generator().manual_seed(seed)
    shapes = {"embed": (11, 4), "norm": (4,), "up": (16, 4), "scale": (), "nothing": (0, 4), "head": (11, 4)}
    return {name: torch.randn(shape, generator=make).to(dtype) for name, shape in shapes.items()}


class Generator:
    """As much of a rollout engine as the check of arrival looks at."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}

    def named_weights(self):
        return self.weights.items()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bucket_bytes", [1, 100, 10**6], ids=["one each", "several", "all in one"])
def test_every_receiver_gets_every_version(bucket_bytes, dtype):
    sender = WeightSender("127.0.0.1", receivers=2, timeout_s=30)
    got: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
    received = threading.Barrier(3)

    def receive(rank: int) -> None:
        receiver, generator = WeightReceiver(sender.address, rank, CPU, dtype), Generator()
        for version in (1, 2):
            generator.weights = {name: tensor.clone() for name, tensor in receiver.receive(version)}
            check_arrival(receiver.fingerprints, generator, version)
            got[rank, version] = generator.weights
            received.wait(30)

    receivers = [threading.Thread(target=receive, args=(rank,)) for rank in range(2)]
    for thread in receivers:
        thread.start()
    for version in (1, 2):
        sender.send(weights(dtype, version).items(), CPU, version, bucket_bytes)
        received.wait(30)
    for thread in receivers:
        thread.join(30)
    assert got.keys() == {(rank, version) for rank in range(2) for version in (1, 2)}
    for (_, version), arrived in got.items():
        sent = weights(dtype, version)
        assert list(arrived) == list(sent)
        assert all(torch.equal(arrived[name], sent[name]) and arrived[name].shape == sent[name].shape for name in sent)


@pytest.mark.parametrize(
    "damage, named",
    [
        (lambda w: w["up"].view(-1)[5].zero_(), "1 weights arrived changed, up first"),
        (lambda w: w.pop("head"), r"has no head \(1 weights are missing\)"),
    ],
    ids=["changed", "missing"],
)
def test_what_does_not_arrive_is_named(damage, named):
    from verl.engines.hybrid import fingerprint

    generator = Generator()
    generator.weights = weights(torch.float32, 0)
    fingerprints = {name: int(fingerprint(tensor)) for name, tensor in generator.weights.items()}
    check_arrival(fingerprints, generator, 7)
    damage(generator.weights)
    with pytest.raises(RuntimeError, match=rf"weight sync 7: .*{named}"):
        check_arrival(fingerprints, generator, 7)


def test_a_receiver_hears_when_the_sender_is_gone():
    sender = WeightSender("127.0.0.1", receivers=1, timeout_s=1)
    receiver = WeightReceiver(sender.address, 0, CPU, torch.float32)
    del sender
    with pytest.raises(Exception, match=r"Connection|timeout|Broken|Failed"):
        list(receiver.receive(1))
