"""TensorboardLogger: TensorBoard's event files, without torch and TensorFlow."""

import struct
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from slipstream.observe.loggers.logger import Cell, LoggedRun, as_text

_FLUSH_S = 10.0
_PNG_SIZE = slice(16, 24)
"""Width and height in the header of a PNG."""


class TensorboardLogger:
    """Writes into `folder`, by default `tensorboard/` of the run folder."""

    def __init__(self, run: LoggedRun, *, folder: str | None = None) -> None:
        target = Path(folder) / run.name if folder else run.folder / "tensorboard"
        self._writer = EventFileWriter(str(target), flush_secs=_FLUSH_S)
        if run.first_step > 1:
            self._restart(run.first_step)
        self._last_step = run.first_step - 1

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if step <= self._last_step:
            self._restart(step)
        self._last_step = step
        self._add(step, Summary(value=[Summary.Value(tag=key, simple_value=value) for key, value in metrics.items()]))

    def image(self, step: int, name: str, png: bytes) -> None:
        width, height = struct.unpack(">II", png[_PNG_SIZE])
        image = Summary.Image(width=width, height=height, colorspace=4, encoded_image_string=png)
        self._add(step, Summary(value=[Summary.Value(tag=name, image=image)]))

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        cells = [*columns, *(cell for row in rows for cell in row)]
        sizes = [TensorShapeProto.Dim(size=size) for size in (len(rows) + 1, len(columns))]
        tensor = TensorProto(
            dtype=DT_STRING,
            tensor_shape=TensorShapeProto(dim=sizes),
            string_val=[as_text(str(cell)).encode() for cell in cells],
        )
        metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        self._add(step, Summary(value=[Summary.Value(tag=name, tensor=tensor, metadata=metadata)]))

    def close(self) -> None:
        self._writer.close()

    def _restart(self, step: int) -> None:
        """Make TensorBoard discard steps >= `step`, which are trained again."""
        self._writer.add_event(Event(wall_time=time.time(), step=step, session_log=SessionLog(status=SessionLog.START)))

    def _add(self, step: int, summary: Summary) -> None:
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))
