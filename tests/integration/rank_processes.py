"""Ranks of a test as processes over Gloo."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from tests.runs import ROOT, kill_tree

_FORK_ALL = """
import importlib, json, os, sys, traceback

import torch
from slipstream.learner.engines.deepspeed_engine import deepspeed_environment

os.environ.update(deepspeed_environment(torch.device("cpu")))
import deepspeed

module, *ranks = json.load(sys.stdin)
entry = importlib.import_module(module).main
pids = []
for arguments in ranks:
    if (pid := os.fork()) == 0:
        try:
            entry(**arguments)
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    pids.append(pid)
codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
sys.exit(f"the ranks ended with {codes}" if any(codes) else 0)
"""


def start_rank(arguments: Sequence[str]) -> "subprocess.Popen[str]":
    """Start Python with these arguments."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )


def run_ranks(module: str, arguments: Sequence[dict[str, Any]], *, timeout_s: float) -> None:
    """Run all ranks at once, each with its arguments of `main`, and check that every rank exits with 0.

    They are forks of one process that has imported torch, DeepSpeed, and the module. Its `main` ends with `exit_rank`.
    """
    parent = start_rank(["-c", _FORK_ALL])
    try:
        output, _ = parent.communicate(json.dumps([module, *arguments]), timeout=timeout_s)
    finally:
        kill_tree(parent)
    assert parent.returncode == 0, output[-8000:]
