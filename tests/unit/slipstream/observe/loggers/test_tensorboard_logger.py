import struct
import zlib
from pathlib import Path
from typing import Any

import pytest

from slipstream.observe.loggers.logger import LoggedRun, as_text, make_logger

event_accumulator = pytest.importorskip(
    "tensorboard.backend.event_processing.event_accumulator", reason="the package tensorboard is not installed"
)


def png(width: int, height: int) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + b"IHDR" + header + struct.pack(">I", zlib.crc32(header))


def logger_in(folder: Path) -> Any:
    return make_logger("tensorboard", LoggedRun("mine", "mine-1", folder, {}, 1), {})


def read(folder: Path) -> Any:
    found = event_accumulator.EventAccumulator(str(folder / "tensorboard"))
    found.Reload()
    return found


def test_what_is_logged_is_what_tensorboard_reads(tmp_path):
    logger = logger_in(tmp_path)
    for step in (1, 2):
        logger.log(step, {"learner/reward_mean": step / 4, "lag/max": 1.0})
    logger.image(2, "curve", png(30, 20))
    logger.table(2, "samples", ("step", "answer"), [[2, "<b>x</b> **1**\n|"]])
    logger.close()
    found = read(tmp_path)
    assert [(each.step, each.value) for each in found.Scalars("learner/reward_mean")] == [(1, 0.25), (2, 0.5)]
    (image,) = found.Images("curve")
    assert (image.width, image.height, image.step) == (30, 20, 2)
    (table,) = found.Tensors("samples")
    cells = [cell.decode() for cell in table.tensor_proto.string_val]
    assert cells == ["step", "answer", "2", as_text("<b>x</b> **1**\n|")]
    assert [each.size for each in table.tensor_proto.tensor_shape.dim] == [2, 2]


def test_steps_that_are_trained_again_replace_those_before(tmp_path):
    logger = logger_in(tmp_path)
    for step, value in ((1, 0.125), (2, 0.25), (3, 0.5), (2, 0.75)):
        logger.log(step, {"reward": value})
    logger.close()
    assert [(each.step, each.value) for each in read(tmp_path).Scalars("reward")] == [(1, 0.125), (2, 0.75)]


def test_markup_of_a_model_stays_text():
    shown = as_text("<script>alert(1)</script> [a](b) *c* `d`\n# e")
    assert not set("<>[]*`#\n") & set(shown.replace("&#", "").replace("<br>", ""))
