"""Probe: load libraries and use GPUs in a process that may hang or crash; it prints a line of JSON per part."""

import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from itertools import permutations
from pathlib import Path

import msgspec

from slipstream.configs.base import first_line
from slipstream.launch.diagnose.machine import Result, find_kernels, installed_packages

_NO_GPU = "torch finds no GPU"


def _load_torch() -> Result:
    # May crash the process.
    import torch

    assert float((torch.ones(64, 64) @ torch.ones(64, 64)).sum()) == 64**3
    number = torch.get_num_threads()
    return Result("torch", "ok", f"loads and computes with {number} thread{'s' if number > 1 else ''}")


def _load_kernels() -> Result:
    import torch

    installed = installed_packages()
    if "vllm" in installed and not torch.cuda.is_available():
        return Result("compiled parts", "skipped", "vLLM's CUDA kernels need the driver of a GPU")
    if not (files := find_kernels(installed)):
        return Result("compiled parts", "skipped", "vLLM is not installed, or has no kernels for this processor")
    for file in files:
        torch.ops.load_library(file)
    return Result("compiled parts", "ok", f"{', '.join(file.name for file in files)} of vLLM load")


def _use_gpus() -> Result:
    import torch

    if not (count := torch.cuda.device_count()):
        return Result("GPU arithmetic", "skipped", _NO_GPU)
    for number in range(count):
        square = torch.ones(1024, 1024, device=f"cuda:{number}", dtype=torch.bfloat16)
        assert float((square @ square).float().mean()) == 1024.0, f"GPU {number} computes wrongly"
    apart = [f"{a}-{b}" for a, b in permutations(range(count), 2) if not torch.cuda.can_device_access_peer(a, b)]
    if apart:
        found = f"no peer access between GPUs {', '.join(apart)}: NCCL uses host memory, which is slower"
        return Result("GPU arithmetic", "warn", found, fix="look at `nvidia-smi topo -m`; ACS in the BIOS prevents it")
    return Result("GPU arithmetic", "ok", f"{count} GPUs multiply matrices" + ", with peer access" * (count > 1))


_REINSTALL = "make clean and make setup, or pip install Slipstream into a fresh environment"
_PARTS: dict[str, tuple[Callable[[], Result], str]] = {
    "torch": (_load_torch, _REINSTALL),
    "GPU arithmetic": (_use_gpus, "look at `dmesg` for errors of the driver (Xid), then restart the machine"),
    "compiled parts": (_load_kernels, f"{_REINSTALL}: this build is for another torch or processor"),
}
"""Part -> (function, remedy), in order of execution."""


def main() -> None:
    """Try all parts; print a line of JSON for each."""
    for name, (part, fix) in _PARTS.items():
        try:
            # Libraries may print to stdout.
            with redirect_stdout(sys.stderr):
                finding = part()
        except Exception as error:  # libraries raise anything
            finding = Result(name, "fail", first_line(error), fix=fix)
        sys.stdout.buffer.write(msgspec.json.encode(finding) + b"\n")
        sys.stdout.buffer.flush()


def run_probe(*, timeout_s: float, program: Path = Path(__file__)) -> list[Result]:
    """Try all parts in another process. A part that crashes or hangs fails; later ones are skipped."""
    module = ["-m", __name__] if program == Path(__file__) else [str(program)]
    try:
        done = subprocess.run([sys.executable, *module], capture_output=True, timeout=timeout_s, check=False)
        printed, errors, code = done.stdout, done.stderr, done.returncode
        end = f"its process ended with {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"
    except subprocess.TimeoutExpired as expired:
        printed, errors, end = expired.stdout or b"", expired.stderr or b"", f"no answer within {timeout_s:g} s"
    lines = [line for line in printed.splitlines() if line.startswith(b"{")]
    found = [msgspec.json.decode(line, type=Result) for line in lines]
    if not (missing := list(_PARTS)[len(found) :]):
        return found
    words = errors.decode(errors="replace").strip().splitlines()
    last = f"; its last line: {words[-1]}" if words else ""
    failed = Result(missing[0], "fail", end + last, fix=_PARTS[missing[0]][1])
    return [*found, failed, *(Result(name, "skipped", f"not tried after {missing[0]}") for name in missing[1:])]


if __name__ == "__main__":
    main()
