"""Whether `model.path` leads to a checkpoint, asked before anything large is loaded."""

from pathlib import Path

from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from configs.base import ConfigError

_HUB_TIMEOUT_S = 10.0
_FILE = "config.json"


def check_model_path(path: str) -> None:
    """Raises ConfigError unless `path` is a folder with a checkpoint or the name of one on the Hugging Face hub.

    Asks the hub, for at most 10 s, only about names that are neither here nor in its cache.
    """
    if Path(path).is_dir():
        if not (Path(path) / _FILE).is_file():
            raise _fault(path, f"the folder has no {_FILE}")
    elif _is_folder_name(path):
        raise _fault(path, "there is no such folder")
    else:
        _check_hub(path)


def _is_folder_name(path: str) -> bool:
    """Whether it can only mean a folder: hub names have at most one slash, and their owner is no folder here."""
    return path.startswith((".", "/", "~")) or path.count("/") > 1 or ("/" in path and Path(path).parent.is_dir())


def _check_hub(name: str) -> None:
    try:
        if isinstance(try_to_load_from_cache(name, _FILE), str):
            return
        HfApi().model_info(name, timeout=_HUB_TIMEOUT_S)
    except HFValidationError:
        raise _fault(name, "there is no such folder") from None
    # Whatever the client raises (no network, no such name, no access) has one meaning here, and its own hierarchy is
    # that of whichever HTTP library it uses.
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise _fault(name, f"there is no such folder, and the hub says: {reason}") from None


def _fault(path: str, reason: str) -> ConfigError:
    return ConfigError(
        f"model.path must be a folder with a transformers checkpoint, or the name of one on the Hugging Face hub, "
        f"got {path!r}: {reason.rstrip('.')}."
    )
