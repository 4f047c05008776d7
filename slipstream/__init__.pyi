from slipstream.notebook import Run as Run
from slipstream.notebook import Trainer as Trainer
from slipstream.notebook import load_run as load_run
from slipstream.notebook import run as run
from slipstream.observe.catalog.catalog import open_catalog as open_catalog

__version__: str
__all__ = ["Run", "Trainer", "load_run", "open_catalog", "run"]
