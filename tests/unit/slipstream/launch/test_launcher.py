"""Prepare steps: only what is missing, in order, and the failing one by name."""

import io
import json
import re
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from slipstream.buffer.errors import RunConflictError
from slipstream.buffer.records import CheckpointPointer
from slipstream.cluster.seat import LocalSeat
from slipstream.configs.base import ConfigError
from slipstream.configs.load import load
from slipstream.configs.run import RunConfig
from slipstream.launch import launcher as launcher_module
from slipstream.launch.launcher import Launcher
from slipstream.launch.preflight import check_surroundings, describe_doubts, make_inputs, missing_steps, prepare
from slipstream.launch.scaling import LauncherReport, Scaling
from slipstream.observe.run_status import Monitor
from slipstream.runtime.run_folder import RunFolder
from slipstream.scripts.make_digits_data import make_row, write_pair
from tests.cases import cases
from tests.fakes import STATUS_ROW
from tests.memory_store.store import MemoryStore
from tests.tiny_model import make_tiny_model


class FarPlaces:
    """Places with seats on this machine."""

    gpus = ["4", "5"]

    def __init__(self) -> None:
        self.names: list[str] = []

    def seat(self, name: str, log: Path) -> LocalSeat:
        self.names.append(name)
        return LocalSeat(log)

    def learner_seat(self, log: Path, *, meet: Callable[[], Mapping[str, str]]) -> LocalSeat:
        return LocalSeat(log)


def make_launcher(
    folder: Path, *overrides: str, printed: io.StringIO | None = None, places: FarPlaces | None = None
) -> Launcher:
    """The launcher of a run with this name, in a folder of the test."""
    words = ["name=run", f"runs_dir={folder}", *overrides]
    run = load(words)
    console = Console(file=printed or io.StringIO(), width=200)
    return Launcher(run, RunFolder(run), overrides=words, console=console, places=places)


@pytest.fixture
def store() -> MemoryStore:
    made = MemoryStore()
    made.open_run("run", config_json="{}", num_rows=4, seed=0)
    return made


def update(launcher: Launcher, store: MemoryStore, monitor: Monitor | None = None) -> None:
    report = LauncherReport(store)
    scaling = Scaling(launcher._pool, report, run=launcher._run, check_room=launcher._check_room)
    launcher._update(store, monitor or Monitor(store, launcher._run), scaling, report)


def test_a_store_may_lack_the_run_until_a_broker_has_opened_it_and_no_longer(tmp_path: Path) -> None:
    printed = io.StringIO()
    launcher = make_launcher(tmp_path, "experiment=digits_cpu", printed=printed)
    store = MemoryStore()
    update(launcher, store)
    update(launcher, store)
    assert printed.getvalue().count("waiting for the broker to open the run: pid None, log ") == 1
    store.open_run("run", config_json="{}", num_rows=4, seed=0)
    update(launcher, store)
    assert "launcher" in store.roles()
    with pytest.raises(RunConflictError, match=r"must be opened before it is used.* or the store was emptied"):
        update(launcher, MemoryStore())


def test_a_resumed_run_prints_only_steps_that_are_new(
    tmp_path: Path, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = io.StringIO()
    launcher = make_launcher(tmp_path, "experiment=digits_cpu", "resume=true", printed=printed)
    pointer = CheckpointPointer(step=2, version=2, name="step-00000002")
    state = msgspec.structs.replace(store.run_state(), phase="training", step=3, checkpoint=pointer)
    monkeypatch.setattr(store, "run_state", lambda: state)
    monitor = Monitor(store, launcher._run)
    for steps in ([1, 2, 3], [3]):
        for step in steps:
            store.append_metrics(STATUS_ROW | {"step": step, "time_s": float(step)})
        update(launcher, store, monitor)
    lines = printed.getvalue().splitlines()
    kept = f"{tmp_path}/run/metrics.jsonl has steps 1 to 2"
    assert lines[0] == f"resuming after step 2, the newest checkpoint; the learner repeats step 3; {kept}"
    assert [line.split()[1] for line in lines if line.startswith("step ")] == ["3/80"]


def test_the_first_failure_of_each_kind_is_printed_once(tmp_path: Path, store: MemoryStore) -> None:
    printed = io.StringIO()
    launcher = make_launcher(tmp_path, "experiment=digits_cpu", printed=printed)
    boom, other = "an answer has no reward: ValueError: boom, at mine.py:2: `raise`", "a prompt fails: \x1b[2J"
    for name, problems in (("g-0", {"problem/1": boom}), ("g-1", {"problem/1": boom, "problem/2": other})):
        store.report_role(name, {"role": "generator", "state": "ready", "waits_for": "", **problems})
        update(launcher, store)
    update(launcher, store)
    lines = [line for line in printed.getvalue().splitlines() if line.startswith("g-")]
    assert lines == [f"g-0 reports: {boom}", r"g-1 reports: a prompt fails: \x1b[2J"]
    assert {(event.role, event.text) for event in store.events(limit=8)} >= {("g-0", f"reports: {boom}")}
    store.report_role("g-2", {"role": "generator", "state": "ready", **{f"problem/{n}": "flood" for n in range(99)}})
    update(launcher, store)
    assert printed.getvalue().count("flood") == 30


def test_roles_that_share_a_gpu_are_told_the_kv_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_tiny_model(tmp_path / "model")
    monkeypatch.setattr(launcher_module, "visible_gpus", lambda: ["3"])
    monkeypatch.setattr(launcher_module, "gpu_gib", lambda name: {"3": 24.0}[name])

    def arguments(*overrides: str) -> list[str]:
        launcher = make_launcher(tmp_path, f"model.path={model}", *overrides)
        launcher._share_gpu()
        assert launcher._learner._arguments[1:] == launcher._brokers[0]._arguments[1:]
        with pytest.raises(ConfigError, match=r"must be <= 1 on the one GPU .*, got 2: its memory is divided"):
            launcher._check_room(2)
        return launcher._brokers[0]._arguments

    (told,) = [text for text in arguments() if "kv_cache_gib" in text]
    # What 256 short sequences of such a model fill, and a little more; readable by the roles.
    assert 0.25 <= load([told]).generators.engine.kv_cache_gib < 0.5  # type: ignore[union-attr]
    assert arguments("generators.engine.kv_cache_gib=2")[-1] == "generators.engine.kv_cache_gib=2"
    for other in ("generators/engine=hf", "learner.device=cpu"):
        assert arguments(other)[-1] == other


class StubbornRole:
    """A role that gets a second stop request while it ends."""

    def __init__(self, name: str, events: list[str]) -> None:
        self.name = name
        self._events = events

    def start(self) -> None:
        self._events.append(f"start {self.name}")

    def terminate(self) -> None:
        self._events.append(f"terminate {self.name}")

    def stop(self, *, ends_at: float) -> None:
        self._events.append(f"{'stop' if ends_at else 'kill'} {self.name}")
        if ends_at:
            raise KeyboardInterrupt


def test_a_user_who_insists_ends_all_roles_before_the_launcher_ends(tmp_path: Path) -> None:
    events: list[str] = []
    launcher = make_launcher(tmp_path, places=FarPlaces())
    launcher._brokers = [StubbornRole("broker", events)]
    launcher._learner = StubbornRole("learner", events)
    with pytest.raises(KeyboardInterrupt), launcher._processes(None):
        pass
    assert events[2:] == ["terminate learner", "terminate learner", "stop learner", "kill broker", "kill learner"]


class SavingRole:
    """A learner that commits its first step only after it was asked to end, and saves until it is stopped."""

    name, is_running, has_finished = "learner", True, False

    def __init__(self, store: MemoryStore, checkpoints: Path) -> None:
        self._store, self._checkpoints = store, checkpoints

    def start(self) -> None: ...

    def terminate(self) -> None:
        state = msgspec.structs.replace(self._store.run_state(), step=1)
        self._store.run_state = lambda: state  # type: ignore[method-assign]

    def stop(self, *, ends_at: float) -> None:
        # The limit of a step and its checkpoint, rather than that of a role without work.
        if self.is_running and ends_at - time.monotonic() > 60:
            (self._checkpoints / "step-00000001").mkdir(parents=True)
        self.is_running = False


def test_a_first_step_that_the_launcher_has_not_seen_is_saved_too(tmp_path: Path, store: MemoryStore) -> None:
    printed = io.StringIO()
    launcher = make_launcher(tmp_path, printed=printed, places=FarPlaces())
    launcher._opened_store, launcher._brokers = store, [StubbornRole("broker", [])]
    launcher._learner = SavingRole(store, tmp_path / "run" / "checkpoints")
    with pytest.raises(KeyboardInterrupt), launcher._processes(None):
        pass
    assert "stopped; the newest checkpoint is that of step 1; continue: slipstream run name=run" in printed.getvalue()


def test_each_broker_is_told_its_number_and_generators_elsewhere_the_address_the_code_and_the_token(tmp_path) -> None:
    for shards, numbers in ((1, [[]]), (2, [["--shard", "0"], ["--shard", "1"]])):
        own = ["name=run", f"runs_dir={tmp_path}", f"broker.shards={shards}"]
        launcher = make_launcher(tmp_path, own[-1])
        brokers = [role for role in launcher._roles if role.name in launcher._run.broker.names]
        assert [role._arguments for role in brokers] == [["slipstream.broker", *number, *own] for number in numbers]
    own = ["generators.reward.function=mine:score", "experiment=digits_cpu"]
    here = ["name=run", f"runs_dir={tmp_path}", "broker.address=tcp://127.0.0.1:5757", "weights.transport=delta"]
    run = load([*here, *own, "cluster.kind=ray", "cluster.interface=127.0.0.0/8", "cluster.generator.cpus=4"])
    places, console = FarPlaces(), Console(file=io.StringIO())
    launcher = Launcher(run, RunFolder(run), overrides=[*here, *own], console=console, places=places)
    assert launcher._gpus == {"learner": ["4", "5"]}
    launcher._check_room(1000)
    launcher._address = "tcp://10.0.0.1:20000"
    role = launcher._generator("generator-0")
    assert places.names == ["generator-0"]
    limit = f"broker.join_timeout_s={run.broker.join_timeout_s}"
    assert role._arguments[:3] == ["slipstream.generators", "--id", "generator-0"]
    assert role._arguments[3:] == [*own, "name=run", "broker.address=tcp://10.0.0.1:20000", limit]
    token = (tmp_path / "run" / "token").read_text().strip()
    assert role._variables == {"SLIPSTREAM_TOKEN": token, "OMP_NUM_THREADS": "4"}
    assert token not in " ".join(role._arguments)


PROGRAMS = {
    "writer": "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text(sys.argv[2])",
    "idler": "",
    "lacking": "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')",
    "breaker": "raise SystemExit(3)",
}
INDEX = '{"weight_map": {"a": "b.safetensors"}}'
MESSAGES = '{"prompt": [{"role": "user", "content": "1+1="}], "answer": "2"}\n'
NAMED = '{"prompt": "1+1=", "answer": "2", "agent_name": "tool_agent"}\n'
TOOLS = "generators.agents={calculating: {kind: tools, tools: [calculator], tool_call_format: react}}"


@pytest.fixture(autouse=True)
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, program in PROGRAMS.items():
        (tmp_path / f"{name}.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def run_of(*steps: tuple[str, Path]) -> RunConfig:
    """A run with these prepare steps: (program, file to create)."""
    shown = ", ".join(f"{{creates: '{made}', module: '{module}', args: ['{made}', 'made']}}" for module, made in steps)
    return load([f"prepare=[{shown}]"])


def test_missing_products_are_made_in_order_and_existing_ones_are_kept(tmp_path, capfd):
    first, second = tmp_path / "first", tmp_path / "second"
    run = run_of(("writer", first), ("writer", second))
    assert prepare(run) == 2
    assert first.read_text() == second.read_text() == "made"
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("prepare: ")]
    assert ["first is missing" in lines[0], "second is missing" in lines[1], len(lines)] == [True, True, 2]
    first.write_text("mine")
    assert (prepare(run), first.read_text()) == (0, "mine")


@cases(
    "module, words",
    ("breaker", r"prepare step `python -m breaker .*a made` .* failed with exit code 3"),
    ("lacking", "failed with exit code 2; its own message is above"),
    ("idler", r"must create .*/a, but did not"),
)
def test_a_failing_step_is_named_and_ends_it(module, words, tmp_path, capfd):
    with pytest.raises(ConfigError, match=words):
        prepare(run_of((module, tmp_path / "a"), ("writer", tmp_path / "b")))
    assert not (tmp_path / "b").exists()
    needs = "error: torch must be installed, but is not: `pip install"
    assert capfd.readouterr().err.startswith(needs) == (module == "lacking")


def test_the_default_run_makes_data_and_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    modules = [missing.module for missing in missing_steps(load([]))]
    assert modules == [f"slipstream.scripts.{name}" for name in ("make_digits_data", "init_random_model", "warm_up")]


def test_a_data_source_without_a_reward_function_and_ranks_on_other_machines_are_refused_before_the_run(tmp_path):
    rows = [make_row("1=", ground_truth="1", data_source=name, index=0, split="train") for name in ("digits/a", "qa")]
    write_pair(tmp_path, train=rows, heldout=rows[:1])
    functions = "generators.reward.functions=[{function: exact_match, data_sources: ['digits/*']}]"
    paths = [f"data.train={tmp_path}/train.parquet", f"data.eval={tmp_path}/heldout.parquet"]
    with pytest.raises(ConfigError, match=r"got none for data_source 'qa' of .*train\.parquet \(they take digits/\*\)"):
        make_inputs(load(["experiment=digits_cpu", *paths, functions, "prepare=[]"]))
    network = ["cluster.interface=127.0.0.0/8", "cluster.trusted_network=true"]
    words = r"^cluster\.learner\.machines must be 1 with cluster\.kind=local, got 2: this"
    with pytest.raises(ConfigError, match=words):
        check_surroundings(load(["learner.num_ranks=2", "cluster.learner.machines=2", *network]))


def test_a_reward_that_reads_what_prepare_creates_is_checked_after_it(tmp_path: Path) -> None:
    made = tmp_path / "reward"
    reward = f"generators.reward.functions=[{{function: reward_model, arguments: {{path: {made}, device: cpu}}}}]"
    step = f"prepare=[{{creates: {made}, module: writer, args: [{made}, none]}}]"
    run = load([reward, step, "mode=serial", "weights.transport=memory", "generators/engine=scripted"])
    check_surroundings(run)
    with pytest.raises(ConfigError, match=r"model\.path must be a folder .* got .*reward"):
        make_inputs(run)
    with pytest.raises(ConfigError, match=r"model\.path must be a folder .* got .*reward"):
        check_surroundings(run)


def own_run(folder: Path, *overrides: str) -> RunConfig:
    """A run with a tiny model, two prompts to train on, and one held out."""
    (folder / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+2=", "answer": "3"}\n')
    (folder / "heldout.jsonl").write_text('{"prompt": "2+2=", "answer": "4"}\n')
    paths = [f"data.train={folder}/train.jsonl", f"data.eval={folder}/heldout.jsonl"]
    model = folder / "model" if (folder / "model").exists() else make_tiny_model(folder / "model")
    small = ["data.max_prompt_tokens=16", "generators.sampling.max_tokens=16", "generators.reward.function=exact_match"]
    return load([f"model.path={model}", *paths, *small, *overrides])


def change_config(folder: Path, **values: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@cases(
    "spoil, words",
    (lambda model: None, ""),
    (lambda model: change_config(model, model_type="qwen3_vl"), r"must be a text model or .*, a qwen3_vl: "),
    (lambda model: change_config(model, model_type="qwen2_5_vl"), ""),
    (lambda model: change_config(model, max_position_embeddings=31), r"max_length must be <= .* \(31\), got 32"),
    (lambda model: change_config(model, max_position_embeddings=8, rope_scaling={"factor": 4.0}), ""),
    (lambda model: (model / "tokenizer.json").write_text("{"), "its tokenizer.json is damaged"),
    (lambda model: (model / "model.safetensors.index.json").write_text(INDEX), "b.safetensors is missing"),
)
def test_a_model_that_cannot_be_trained_is_refused_before_the_start(tmp_path: Path, spoil, words: str) -> None:
    run = own_run(tmp_path)
    spoil(Path(run.model.path))
    with pytest.raises(ConfigError, match=words) if words else nullcontext():
        make_inputs(run)


@cases(
    "split, row, overrides, words",
    ("train", MESSAGES, [], r"template for row train/00000 of .*train\.jsonl, got none .* set model\.chat_t"),
    ("heldout", MESSAGES, [], r"template for row heldout/00000 of .*heldout\.jsonl, got none"),
    ("heldout", MESSAGES, ["model.chat_template={folder}/template"], ""),
    ("heldout", NAMED, [], r"row heldout/00000 of .*heldout\.jsonl names the agent 'tool_agent', .* got none: add"),
    ("train", NAMED, [TOOLS], ""),
)
def test_a_prompt_that_would_always_fail_is_refused_before_the_start(tmp_path, split, row, overrides, words):
    run = own_run(tmp_path, *(each.format(folder=tmp_path) if "folder" in each else each for each in overrides))
    (tmp_path / f"{split}.jsonl").write_text(row)
    (tmp_path / "template").write_text("{{ messages[0].content }}")
    (tmp_path / "model" / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match=words) if words else nullcontext():
        make_inputs(run)


def test_prompts_that_are_trained_on_are_not_held_out(tmp_path: Path) -> None:
    own_run(tmp_path)
    (tmp_path / "copy.jsonl").write_bytes((tmp_path / "train.jsonl").read_bytes())
    heldout = f"data.eval={tmp_path}/copy.jsonl"
    with pytest.raises(ConfigError, match=r"data\.eval must hold prompts that are not trained on, got .*\.jsonl, "):
        make_inputs(own_run(tmp_path, heldout))
    make_inputs(own_run(tmp_path, heldout, "mode=evaluate"))


@cases(
    "override, words",
    ("learner.optimizer.learning_rate=100", "is 100, and the model will probably diverge: 1e-7 to 1e-5 is typical"),
    ("learner.optimizer.learning_rate=1e-12", "probably barely change"),
    ("learner.prompts_per_step=8", "is 8, but there are only 2 training prompts: every step .* about 4 times"),
    ("generators.count=0", r"start a generator: `python -m slipstream\.generators name=run`"),
    ("seed=1", ""),
)
def test_a_doubtful_setting_is_noted(tmp_path, capsys, override, words):
    base = ["learner.prompts_per_step=2", "evaluation.num_prompts=1", "evaluation.num_final_prompts=1"]
    make_inputs(own_run(tmp_path, *base, override))
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    found = [note for note in notes if "evaluat" not in note]
    assert len(found) == bool(words)
    assert not words or re.search(words, found[0])
    assert [*describe_doubts(own_run(tmp_path, *base, "learner.optimizer.learning_rate=0.003"))] == []
