"""Rollouts of a verifiers environment per second: our harness in the environment's process, and a process for each.

    python -m benchmarks.generators.harness --python=envs/verifiers/bin/python --out=harness.json

The model is a stand-in that answers at once, so that what is measured is the harness: `null` is verifiers' own, which
starts a Python for every rollout. Needs a Python with verifiers 0.4.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROBE = """
import asyncio, json, sys, time
from aiohttp import web
import verifiers.v1 as vf
from verifiers.v1.utils.loaders import load_environment, resolve_env_config
sys.path.insert(0, sys.argv[4])
import slipstream_harness

async def chat(request):
    message = {"role": "assistant", "content": "it is 70"}
    usage = {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    body = await request.json()
    if not body.get("stream"):
        return web.json_response({"id": "1", "object": "chat.completion", "created": 0, "model": "m",
                                  "choices": [choice], "usage": usage})
    base = {"id": "1", "object": "chat.completion.chunk", "created": 0, "model": "m"}
    events = [{**base, "choices": [{"index": 0, "delta": message, "finish_reason": None}]},
              {**base, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
              {**base, "choices": [], "usage": usage}]
    text = "".join(f"data: {json.dumps(event)}\\n\\n" for event in events) + "data: [DONE]\\n\\n"
    return web.Response(text=text, content_type="text/event-stream")

async def main(harness, number, at_once):
    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    address = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/v1"
    slipstream_harness._key.set("none")
    seat = {"harness": {"id": harness}, "runtime": {"type": "subprocess"}}
    env = load_environment(resolve_env_config({"taskset": {"id": "sums_v1"}, "agent": seat, "id": "single-agent"}))
    tasks = list(env.taskset)
    client = vf.EvalClientConfig(base_url=address, api_key_var="SLIPSTREAM_NO_KEY")
    ctx = vf.ModelContext(client=client, model="m", sampling=vf.SamplingConfig())
    gate = asyncio.Semaphore(at_once)
    async def one(n):
        async with gate:
            episode = await env.run_slot(env.slots(tasks[n % len(tasks)])[0], ctx)
            return episode.ok
    async with env.serving():
        await one(0)
        began = time.perf_counter()
        done = await asyncio.gather(*map(one, range(number)))
        taken = time.perf_counter() - began
    print(json.dumps({"rollouts": number, "ok": sum(done), "seconds": taken, "per_s": number / taken}))

asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
"""


def main() -> None:
    """Measure both harnesses, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--python", required=True, help="Python that has verifiers")
    parser.add_argument("--at-once", type=int, default=4, help="rollouts at the same time (4)")
    parser.add_argument("--out", type=Path, default=Path("harness.json"), help="file to write (harness.json)")
    options = parser.parse_args()
    harnesses = ROOT / "generators" / "environments"
    environment = os.environ | {"PYTHONPATH": str(ROOT / "examples" / "verifiers_environment")}
    found = {"at_once": options.at_once, "cores": os.cpu_count(), "load": os.getloadavg()[0]}
    for harness, number in (("slipstream_harness", 200), ("null", 12)):
        command = [options.python, "-c", PROBE, harness, str(number), str(options.at_once), str(harnesses)]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, timeout=400)
        found[harness] = json.loads(done.stdout.splitlines()[-1])
        print(harness, found[harness], file=sys.stderr)
    found["ratio"] = found["slipstream_harness"]["per_s"] / found["null"]["per_s"]
    options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
