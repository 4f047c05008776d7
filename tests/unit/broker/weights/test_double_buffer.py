import torch

from slipstream.broker.weights.collective import DoubleBuffer

CPU = torch.device("cpu")


def make_buckets(*sizes: int) -> list[torch.Tensor]:
    return [torch.full((size,), index + 1, dtype=torch.uint8) for index, size in enumerate(sizes)]


class Wire:
    """Broadcasts that end when they are waited for; the contents of a buffer must not change in between."""

    def __init__(self, arriving: list[torch.Tensor] | None = None) -> None:
        self.arriving = arriving
        self.sent: list[torch.Tensor] = []
        self.events: list[str] = []

    def start(self, index, buffer):
        self.events.append(f"begin {index}")
        before = buffer.clone()

        def finish():
            self.events.append(f"end {index}")
            assert buffer.equal(before), "a buffer was overwritten during its broadcast"
            if self.arriving:
                buffer.copy_(self.arriving[index])
            self.sent.append(buffer.clone())

        return finish


def test_everything_is_sent_in_order():
    buckets, wire = make_buckets(8, 3, 0, 8, 5), Wire()
    DoubleBuffer(CPU).send(buckets, wire.start)
    assert all(sent.equal(bucket) for sent, bucket in zip(wire.sent, buckets, strict=True))
    assert wire.events == [f"{word} {index}" for index in range(5) for word in ("begin", "end")]


def test_the_next_bucket_is_copied_during_a_broadcast(monkeypatch):
    buckets, wire, double_buffer = make_buckets(4, 4, 4), Wire(), DoubleBuffer(CPU)
    upload = double_buffer._upload
    monkeypatch.setattr(double_buffer, "_upload", lambda b, i: (wire.events.append(f"copy {i}"), upload(b, i)))
    double_buffer.send(buckets, wire.start)
    assert wire.events[:5] == ["copy 0", "begin 0", "copy 1", "end 0", "begin 1"]


def test_received_bytes_reach_their_bucket():
    expected, wire = make_buckets(8, 3, 8), Wire(make_buckets(8, 3, 8))
    buckets = [torch.zeros_like(bucket) for bucket in expected]
    DoubleBuffer(CPU).receive(buckets, wire.start)
    assert all(bucket.equal(other) for bucket, other in zip(buckets, expected, strict=True))


def test_the_memory_is_twice_the_largest_bucket_and_is_kept():
    double_buffer = DoubleBuffer(CPU)
    for sizes in ((8, 3), (5,), ()):
        double_buffer.send(make_buckets(*sizes), Wire().start)
    assert [buffer.numel() for buffer in double_buffer._buffers] == [8, 8]
