"""An external agent: leases answers of a run, talks to the model with OpenAI's client, and posts rewards.

    python examples/black_box_agent/agent.py runs/black_box_agent

It asks for a number backwards, and a second time if the answer was wrong. The reward is the fraction of right digits,
averaged over both answers. It imports nothing from Slipstream: the run folder contains the address of each generator
and the run's token.
"""

import asyncio
import os
import sys
import time
from pathlib import Path

import httpx
from openai import APIError, AsyncOpenAI

AT_ONCE = 64
"""Concurrent answers per generator."""
PATIENCE_S = 120.0


async def answer(client: AsyncOpenAI, lease: dict) -> dict:
    """Have the model write one answer and return its reward."""
    number, truth = lease["prompt"].rstrip("="), lease["ground_truth"]
    model = client.with_options(api_key=lease["api_key"])
    messages, shares = [], []
    while len(shares) < 2 and 1.0 not in shares:
        messages.append({"role": "user", "content": number})
        written = await model.chat.completions.create(model=lease["model"], messages=messages, max_tokens=6)
        messages.append(written.choices[0].message.to_dict())
        shares.append(sum(a == b for a, b in zip(messages[-1]["content"], truth, strict=False)) / len(truth))
    reward = sum(shares) / 2 if len(shares) == 2 else 1.0
    return {"reward": reward, "is_correct": shares[0] == 1.0, "metrics": {"asked_again": len(shares) - 1}}


async def work(http: httpx.AsyncClient, client: AsyncOpenAI, token: str) -> None:
    """Lease one answer after another until the generator stops."""
    while True:
        taken = await http.post("/v1/leases", headers={"Authorization": f"Bearer {token}"}, json={"wait_s": 20})
        if taken.status_code != 200:
            taken.raise_for_status()
            continue
        lease = taken.json()
        try:
            path, body = "/v1/reward", await answer(client, lease)
        except APIError as error:
            path, body = "/v1/return", {"reason": str(error)}
        ended = await http.post(path, headers={"Authorization": f"Bearer {lease['api_key']}"}, json=body)
        ended.raise_for_status()


async def attend(door: Path, token: str) -> None:
    """Work for the generator with the address in this file."""
    try:
        address = door.read_text()
        async with (
            httpx.AsyncClient(base_url=address, timeout=90) as http,
            AsyncOpenAI(base_url=f"{address}/v1", api_key="set for each answer") as client,
            asyncio.TaskGroup() as group,
        ):
            for _ in range(AT_ONCE):
                group.create_task(work(http, client, token))
    except* (httpx.HTTPError, OSError) as errors:
        print(f"{door.name}: {errors.exceptions[0]!r}", flush=True)


async def main(run: Path) -> None:
    """Work for all generators of a run, including later ones, until none has existed for PATIENCE_S."""
    at_work: dict[Path, asyncio.Task] = {}
    seen_at = time.monotonic()
    while time.monotonic() - seen_at < PATIENCE_S and not (run / "summary.json").exists():
        for door in run.glob("doors/*"):
            seen_at = time.monotonic()
            if door not in at_work or at_work[door].done():
                token = os.environ.get("SLIPSTREAM_TOKEN") or (run / "token").read_text().strip()
                at_work[door] = asyncio.create_task(attend(door, token))
        await asyncio.sleep(0.5)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
