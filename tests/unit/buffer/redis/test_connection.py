"""Commands packed into one piece equal redis-py's own pieces."""

import pytest
from redis.connection import Encoder, PythonRespSerializer

from slipstream.buffer.redis.connection import CommandPacker


@pytest.mark.parametrize(
    "command",
    [
        ("PING",),
        ("SCRIPT LOAD", "return 1"),
        ("EVALSHA", "0" * 40, 1, "{run}:", "", 1.5, -3, 1e300, "ü", b"\r\n$", b"x" * 100_000, b""),
    ],
)
def test_one_piece_is_the_same_as_many(command: tuple) -> None:
    many = PythonRespSerializer(6000, Encoder("utf-8", "strict", False).encode).pack(*command)
    assert CommandPacker().pack(*command) == [b"".join(many)]


@pytest.mark.parametrize("argument", [True, None, memoryview(b"x"), [1]])
def test_unsupported_arguments_are_refused(argument: object) -> None:
    with pytest.raises(TypeError, match="bytes, text and numbers"):
        CommandPacker().pack("SET", "key", argument)  # type: ignore[arg-type]
