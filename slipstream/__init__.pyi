from slipstream.buffer.catalog.catalog import open_catalog as open_catalog
from slipstream.notebook.finished_run import Run as Run
from slipstream.notebook.finished_run import load_run as load_run
from slipstream.notebook.trainer import Trainer as Trainer
from slipstream.notebook.trainer import run as run

__version__: str
__all__ = ["Run", "Trainer", "load_run", "open_catalog", "run"]
