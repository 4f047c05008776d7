import torch

from slipstream.broker.weights.collective import DoubleBuffer

CPU = torch.device("cpu")


def make_buckets(*sizes: int) -> list[torch.Tensor]:
    return [torch.full((size,), index + 1, dtype=torch.uint8) for index, size in enumerate(sizes)]


class Wire:
    """Broadcasts that end when they are waited for; what lay in the buffer when one began must still lie there then."""

    def __init__(self, arriving: list[torch.Tensor] | None = None) -> None:
        self.arriving = arriving
        self.sent: list[torch.Tensor] = []
        self.events: list[str] = []

    def start(self, index, buffer):
        self.events.append(f"begin {index}")
        before = buffer.clone()

        def finish():
            self.events.append(f"end {index}")
            assert buffer.equal(before), "a lane was written to while it was on its way"
            if self.arriving:
                buffer.copy_(self.arriving[index])
            self.sent.append(buffer.clone())

        return finish


def test_everything_is_sent_in_order():
    buckets, wire = make_buckets(8, 3, 0, 8, 5), Wire()
    DoubleBuffer(CPU).send(buckets, wire.start)
    assert all(sent.equal(bucket) for sent, bucket in zip(wire.sent, buckets, strict=True))
    assert wire.events == [f"{word} {index}" for index in range(5) for word in ("begin", "end")]


def test_the_next_bucket_is_copied_while_one_is_on_its_way(monkeypatch):
    buckets, wire, lanes = make_buckets(4, 4, 4), Wire(), DoubleBuffer(CPU)
    upload = lanes._upload
    monkeypatch.setattr(lanes, "_upload", lambda b, i: (wire.events.append(f"copy {i}"), upload(b, i)))
    lanes.send(buckets, wire.start)
    assert wire.events[:5] == ["copy 0", "begin 0", "copy 1", "end 0", "begin 1"]


def test_what_arrives_is_put_into_its_bucket():
    wanted, wire = make_buckets(8, 3, 8), Wire(make_buckets(8, 3, 8))
    buckets = [torch.zeros_like(bucket) for bucket in wanted]
    DoubleBuffer(CPU).receive(buckets, wire.start)
    assert all(bucket.equal(other) for bucket, other in zip(buckets, wanted, strict=True))


def test_the_memory_is_two_of_the_largest_bucket_and_is_kept():
    lanes = DoubleBuffer(CPU)
    for sizes in ((8, 3), (5,), ()):
        lanes.send(make_buckets(*sizes), Wire().start)
    assert [buffer.numel() for buffer in lanes._buffers] == [8, 8]
