"""torchrun: a learner of several ranks as one process that its launcher can judge by its exit code."""

from collections.abc import Sequence
from typing import NoReturn

from configs.exits import TRY_AGAIN


def become_ranks(module: str, arguments: Sequence[str], *, num_ranks: int) -> NoReturn:
    """Start `python -m module arguments` as so many ranks, with a rendezvous; all end when one does.

    Ends with the exit code of the rank that failed first; with 75, which asks for another start, when it was killed.
    torchrun itself says 1 whatever happened.
    """
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    ranks = ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={num_ranks}"]
    try:
        torchrun.run(torchrun.parse_args([*ranks, "-m", module, *arguments]))
    except ChildFailedError as failed:
        _, failure = failed.get_first_failure()
        raise SystemExit(TRY_AGAIN if failure.exitcode < 0 else failure.exitcode) from None
    except SignalException as told:
        raise SystemExit(128 + int(told.sigval)) from None
    raise SystemExit(0)
