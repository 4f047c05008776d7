"""All-reduce over all GPUs with NCCL, or over two processes with Gloo, within a time limit.

The log of each rank names the phase of a failure.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from slipstream.launch.diagnose.machine import Result
from slipstream.runtime.process import die_with_parent, read_text

_PHASE = "phase: "
_POLL_S = 0.05
_SIZES = (2**10, 2**24)
"""Elements; the second is timed."""
_FIX = (
    "look at `nvidia-smi topo -m`; try NCCL_P2P_DISABLE=1 (peer access that fails, as in virtual machines) and another "
    "NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME; in a container, raise /dev/shm"
)


class _Rank(NamedTuple):
    number: int
    process: "subprocess.Popen[bytes]"
    log: Path

    @property
    def phases(self) -> list[str]:
        """Phases that it began."""
        return re.findall(rf"^{_PHASE}(.+)$", read_text(self.log), re.MULTILINE)

    def describe(self, end: str) -> str:
        lines = [line for line in read_text(self.log).splitlines() if line.strip() and not line.startswith(_PHASE)]
        of_nccl = [line for line in lines if "NCCL WARN" in line] or [line for line in lines if " NCCL " in line]
        text = f"rank {self.number} {end} in the phase {['start', *self.phases][-1]!r}"
        text += f"; its last line: {lines[-1]}" if lines and lines[-1] not in of_nccl else ""
        return text + (f"; NCCL: {of_nccl[-1]}" if of_nccl else "")


def check_all_reduce(num_gpus: int, *, timeout_s: float, program: Path = Path(__file__)) -> Result:
    """Sum over all GPUs; without one, over two processes on the CPU."""
    size, backend = (num_gpus, "nccl") if num_gpus else (2, "gloo")
    module = ["-m", __name__] if program == Path(__file__) else [str(program)]
    ranks: list[_Rank] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for number in range(size):
                command = [sys.executable, *module, *map(str, (number, size, backend, folder, os.getpid()))]
                log = Path(folder, f"rank-{number}.log")
                with log.open("wb") as output:
                    variables = {"NCCL_DEBUG": "INFO"} | os.environ
                    process = subprocess.Popen(command, env=variables, stdout=output, stderr=output)
                ranks.append(_Rank(number, process, log))
            ends_at = time.monotonic() + timeout_s
            # After a failure, the other ranks would wait for that one.
            while time.monotonic() < ends_at:
                codes = [rank.process.poll() for rank in ranks]
                if any(codes) or None not in codes:
                    break
                time.sleep(_POLL_S)
            return _judge(ranks, backend, timeout_s=timeout_s)
        finally:
            for rank in ranks:
                rank.process.kill()
                rank.process.wait()


def _judge(ranks: Sequence[_Rank], backend: str, *, timeout_s: float) -> Result:
    codes = {rank: rank.process.poll() for rank in ranks}
    if failed := [rank for rank, code in codes.items() if code]:
        # A signal is a cause; an error may be the consequence of a peer's end.
        first = min(failed, key=lambda rank: (codes[rank] or 0, len(rank.phases)))
        code = codes[first] or 0
        end = f"ended with {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"
    elif silent := [rank for rank, code in codes.items() if code is None]:
        first, end = min(silent, key=lambda rank: len(rank.phases)), f"gave no answer within {timeout_s:g} s"
    else:
        (summary,) = re.findall(r"^.* sums over .*$", read_text(ranks[0].log), re.MULTILINE)
        return Result("all-reduce", "ok", summary)
    return Result("all-reduce", "fail", f"{backend}: {first.describe(end)}", fix=_FIX)


def main() -> None:
    """Take part as a rank."""
    rank, size, backend, folder, parent = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:5], int(sys.argv[5])
    die_with_parent(signal.SIGKILL, parent=parent)
    _begin("load torch")
    import torch
    import torch.distributed as dist

    _begin("connect")
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    where, limit = f"file://{folder}/meeting", timedelta(seconds=600)
    dist.init_process_group(backend, init_method=where, rank=rank, world_size=size, timeout=limit)
    _begin("sum")
    for elements in _SIZES:
        numbers = torch.full((elements,), rank + 1.0, device=device)
        began_at = time.monotonic()
        dist.all_reduce(numbers)
        found, expected = (float(numbers.min()), float(numbers.max())), size * (size + 1) / 2
        took_s = time.monotonic() - began_at
        if found != (expected, expected):
            sys.exit(f"the sum over ranks 1 to {size} must be {expected:g}, got {found[0]:g} to {found[1]:g}")
    _begin("end")
    version = "NCCL " + ".".join(map(str, torch.cuda.nccl.version())) if backend == "nccl" else "Gloo"
    dist.destroy_process_group()
    print(f"{version} sums over {size} rank{'s'[: size > 1]}, {numbers.nbytes / took_s / 1e9:.2g} GB/s", flush=True)


def _begin(phase: str) -> None:
    print(f"{_PHASE}{phase}", flush=True)


if __name__ == "__main__":
    main()
