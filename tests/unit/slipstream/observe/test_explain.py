"""`slipstream explain`, on the folder of a run that is over, from a store, and from an archive without a store."""

import json
import random
import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from slipstream.buffer.archive.index import LedgerWriter, ManifestWriter
from slipstream.buffer.records import StepEntry, make_entry
from slipstream.buffer.role_reports import PHASES as KNOWN
from slipstream.buffer.sampling import SamplingRules
from slipstream.configs.base import ConfigError
from slipstream.observe import explain as explain_module
from slipstream.observe.explain import explain, explain_start, explain_step, explain_version, find_entry, read_stages
from slipstream.observe.reader import RunReader
from slipstream.observe.reward_fall import explain_reward, largest_fall
from slipstream.observe.slowness import PHASES, explain_slowness
from slipstream.runtime.run_folder import STAGES, RunFolder
from tests.builders import make_finished, make_run, write_archive
from tests.memory_store.store import MemoryStore
from tests.recorded_run import append_rows, make_row, record_run, record_step

BUSY = {"compute": 0.8, "waiting": 0.05, "rest": 0.15}
WAITS = {"compute": 0.2, "waiting": 0.7, "rest": 0.1}
STEPS = 80
FALLS_AT = 51


def test_a_question_is_answered_from_the_folder_alone_with_the_runs_figures_and_what_is_missing(tmp_path, capsys):
    folder = record_run(tmp_path, staleness={"max_lag": 7})
    for kind, answer in (("slow", "The largest part of a step"), ("reward", "The reward did not fall")):
        explain(kind, [str(folder)])
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].startswith(answer)
        assert lines[-1].startswith("events and versions must be read from the store, which is not there")
    append_rows(folder, make_row(31, **{"learner/ess": 0.1, "learner/chi2": 3.0, "learner/failed_fraction": 0.5}))
    explain("health", [str(folder)])
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "After step 31, outside of its healthy range: 3 of 23 watched metrics."
    # Metrics that mean the same stand together.
    ess = "1. learner/ess: 0.1, healthy is >= 0.3, since step 31; learner/chi2 3, healthy is <= 1, since step 31"
    assert ess in lines
    assert any("max_lag (now 7, mean lag 1.4)" in line for line in lines)


def test_a_supervised_run_says_what_to_look_at_and_names_of_tasks_are_text(tmp_path, capsys):
    folder = record_run(tmp_path, steps=0, mode="sft", sft={"train_path": "demonstrations.jsonl"})
    append_rows(folder, {"step": 1, "time_s": 0.1, "learner/loss": 2.0})
    for kind, answer in {"reward": "has no reward: its measures are", "slow": "records no shares of its time:"}.items():
        explain(kind, [str(folder)])
        (line,) = capsys.readouterr().out.splitlines()
        assert line.startswith(f"A run with mode=sft {answer} learner/")
    folder, key = record_run(tmp_path, "other", steps=0), "learner/by_source/[red]a\x1b[2J/stop_length"
    falls = {"learner/reward_mean": 0.1, key: 0.9}
    append_rows(folder, *(make_row(step, **(falls if step > 30 else {key: 0.0})) for step in range(1, 61)))
    explain("reward", [str(folder)])
    assert "1. learner/by_source/[red]a\\x1b[2J/stop_length: rose from 0 to 0.9" in capsys.readouterr().out


def test_wrong_words_are_refused_with_the_reason(tmp_path):
    with pytest.raises(ConfigError, match=r"which has none, got 3: events and versions .* store"):
        explain("step", ["3", str(record_run(tmp_path))])
    with pytest.raises(ConfigError, match="takes one run, got 'mine' and 'yours'"):
        explain("slow", ["mine", "yours"])


def make_store(*, is_retired: bool = False, clock: Callable[[], float] = lambda: 1.0) -> MemoryStore:
    return record_step(MemoryStore(clock=clock), run="run", is_retired=is_retired)


def read(store: MemoryStore, folder: Path = Path("nowhere")) -> RunReader:
    return RunReader(folder, store=store)


def on_step(reader: RunReader) -> str:
    entry = find_entry(reader, 1)
    members = reader.members(entry)
    cells = [cell for column in explain_module.table_of_step(entry, members).columns for cell in column.cells]
    return "\n".join([*explain_step(reader, entry, members), *map(str, cells)])


def test_a_step_names_its_trajectories_and_the_weights_after_it_and_a_version_its_step():
    reader = read(make_store())
    printed = on_step(reader)
    for part in (
        *("2 trajectories in 1 groups, learner at version 0", "seed 7, settings cfg", "version 1 (checksum bbbb)"),
        "test: 2 answers to 1 prompts, reward 0.5 (0.5 to 0.5), 6.0 tokens by the model",
        *("made by: generator-0 2", "lag of the oldest token -> trajectories: 0: 2", "0-0-0", "0-0-1"),
    ):
        assert part in printed
    assert [*explain_version(reader, 1)] == ["version 1: the weights after step 1, checksum bbbb"]
    with pytest.raises(ConfigError, match=re.escape("version must have been published by this run, got 5.")):
        list(explain_version(reader, 5))
    with pytest.raises(ConfigError, match="step must be one of the ledger's, 1 to 1, got 2"):
        find_entry(reader, 2)


def test_a_step_lists_groups_that_were_reused_weighted_or_mixed_in():
    store = make_store()
    store.roll_back(to_step=0, to_version=0)
    claim = store.claim(step=1, num_groups=1, version=0, rules=SamplingRules(), lease_s=60)
    claim = msgspec.structs.replace(claim, weights=[0.5], reused=[True])
    names = {"version": 0, "seed": 7, "config_hash": "cfg", "mixed_group_ids": ["8", "9"]}
    store.commit(claim, make_entry(claim, store.fetch(claim.group_ids), **names))
    printed = on_step(read(store))
    for line in ("used again: 0\n", "losses weighted: 0 x 0.5\n", "mixed in: 8, 9\n"):
        assert line in printed


def test_trajectories_that_left_the_store_are_read_from_the_archive_or_else_the_ledger(tmp_path):
    assert "2 of them: its tokens are stored no more" in on_step(read(make_store(is_retired=True), tmp_path))
    folder = record_run(tmp_path)
    archive = write_archive(folder / "archive", [make_finished("0", steps=[1])])
    assert "2 answers to 1 prompts" in on_step(read(make_store(is_retired=True), folder))
    LedgerWriter(archive, ManifestWriter(archive)).append(make_store().ledger())
    # Without its store, the run is explained from its folder.
    with RunReader(folder, starts_server=True) as reader:
        printed = on_step(reader)
        assert "2 answers to 1 prompts" in printed
        assert "weights after it: not known without the store" in printed
        assert (reader.events_by_step(reader.rows()), reader.versions()) == ({}, [])
        with pytest.raises(ConfigError, match=r"must be read from the store, .*it was deleted.*, got 1\."):
            list(explain_version(reader, 1))


def test_an_event_is_told_with_the_step_in_which_it_happened(tmp_path):
    now = [1000.0]
    store = make_store(clock=lambda: now[0])
    folder = record_run(tmp_path, steps=0)
    rows = [{"step": step, "time_s": 10.0 * step, "times": {"steps": max(1, step - 1)}} for step in range(1, 5)]
    append_rows(folder, *rows)
    # The last step ended at 1000 s of the store's clock; step 1 was made by an earlier process.
    for now[0], text in ((975.0, "died"), (975.5, "restarted"), (1001.0, "later")):
        store.record_event("generator-0", text)
    assert read(store, folder).events_by_step(rows) == {2: ["generator-0: died", "generator-0: restarted"]}


def make_times(*, learner, generator=None, step_s=0.5):
    shares = {"learner": learner} | ({"generator": generator} if generator else {})
    roles = [{"role": role, "count": 1, "shares": each, "cpu_s": 0.3} for role, each in shares.items()]
    return {"steps": 40, "step_s": step_s, "roles": roles}


def slow(*, learner, generator=None, rows=None, events=None, num_cores=None):
    rows = rows or [make_row(step) for step in range(1, 41)]
    rows[-1] |= {"times": make_times(learner=learner, generator=generator)}
    return explain_slowness(rows, make_run(), events=events or {}, num_cores=num_cores)


def keys(answer):
    return [finding.key for finding in answer.findings]


def test_slow_generators_a_slow_learner_stalls_of_publishing_and_pacing_are_told_apart():
    answer = slow(learner=WAITS, generator={"working": 0.95, "prompts": 0.05})
    causes = "waiting for trajectories; the largest part of the generators' time, 95%, is: engine"
    assert f"70% of 0.5 s, is: {causes}" in answer.headline
    assert keys(answer) == ["generator/working", "learner/compute", "learner/rest"]
    first = answer.findings[0]
    assert first.figures == "95% of the generators' time; the learner waits 70% of its own, 0.35 s of a step"
    assert "generators.count (now 1)" in first.advice
    assert any("generating is the slower side" in fact for fact in answer.facts)
    answer = slow(learner=BUSY, generator={"working": 0.3, "prompts": 0.7})
    assert answer.headline.endswith("80% of 0.5 s, is: forward and backward.")
    # What idle generators do costs nothing.
    assert keys(answer) == ["learner/compute", "learner/rest"]
    assert any("training is the slower side" in fact for fact in answer.facts)
    rows = [make_row(step, **{"weights/sync_s": 4.0, "weights/pause_s": 3.5}) for step in range(1, 41)]
    answer = slow(learner=WAITS, generator={"working": 0.3, "updating": 0.7}, rows=rows)
    assert keys(answer)[:2] == ["generator/updating", "generator/working"]
    assert "(the newest version took 4 s, and 3.5 s of pause)" in answer.findings[0].advice
    assert keys(slow(learner={"publishing": 0.6, "compute": 0.4}))[0] == "learner/publishing"
    answer = slow(learner=WAITS, generator={"working": 0.2, "prompts": 0.8})
    assert keys(answer)[0] == "generator/prompts"
    assert "staleness.max_lag (now" in answer.findings[0].advice
    answer = slow(learner=WAITS)
    assert keys(answer)[0] == "learner/waiting"
    assert answer.headline.endswith("waiting for trajectories.")
    assert "the learner waits 70% of its time for trajectories; no generator has reported its time" in answer.facts


@pytest.mark.parametrize(("num_cores", "is_full"), [(None, False), (2, True), (3, False)])
def test_more_processes_are_advised_only_where_a_core_is_idle(num_cores, is_full):
    answer = slow(learner=BUSY | {"waiting": 0.2}, generator={"working": 0.9}, num_cores=num_cores)
    advice = {finding.key: finding.advice for finding in answer.findings}
    for key, setting in (("learner/compute", "learner.num_ranks"), ("generator/working", "generators.count")):
        assert (setting in advice[key]) != is_full
        assert ("keeps 1.2 of 2 cores busy" in advice[key]) == is_full


def test_the_stages_of_a_weight_update_are_facts_and_every_phase_has_a_meaning():
    stages = {"receive_s": 0.04, "prepare_s": 1.5, "probe_s": 1.0}
    rows = [make_row(step, **{f"weights/{name}": each for name, each in stages.items()}) for step in range(1, 41)]
    assert not any("weight update" in fact for fact in slow(learner=BUSY, rows=rows[:0] or None).facts)
    for row in rows:
        row["weights/pause_s"] = 0.004
    rows[3]["weights/prepare_s"] = 90.0
    stages = "received in 0.04 s, prepared in 1.5 s, probed in 1 s during generation, which paused for 0.004 s"
    assert f"a weight update: {stages} (medians)" in slow(learner=BUSY, rows=rows).facts
    assert {f"learner/{phase}" for phase in KNOWN["learner"]} <= PHASES.keys()
    assert {f"generator/{phase}" for phase in KNOWN["generator"]} - PHASES.keys() == {"generator/rest"}


def test_steps_that_stand_out_changes_of_pace_and_what_was_generated_in_vain_are_told_with_their_parts():
    rows = [make_row(step) for step in range(1, 41)]
    for row in rows[20:]:
        row["time_s"] += 9.0
    rows[20]["learner/wait_s"] += 9.0
    facts = slow(learner=BUSY, rows=rows, events={21: ["generator-0: died"], 22: ["broker: other"]}).facts
    assert facts[-3:] == [
        "1 of 39 steps took more than 3 times the median of 0.5 s; what they took beyond it is 32% of all time",
        "  step 21: 9.5 s, of which 9.1 s waiting for trajectories",
        "    event: generator-0: died",
    ]
    rows = [make_row(step) for step in range(1, 41)]
    for row in rows[20:]:
        row["time_s"] += 0.5 * (row["step"] - 20)
        row["learner/train_s"] += 0.5
    (fact,) = (fact for fact in slow(learner=BUSY, rows=rows).facts if fact.startswith("the pace"))
    medians = "the median of steps 2 to 10 is 0.5 s, of steps 32 to 40 1 s"
    assert fact == f"the pace changed: {medians}; what grew most is training (+0.5 s a step)"
    rows = [make_row(1), make_row(2, **{"buffer/waste_fraction": 0.3, "learner/stale_fraction": 0.01})]
    told = [fact for fact in slow(learner=BUSY, rows=rows).facts if "%" in fact and "buffer/" in fact]
    assert told == ["30% of the tokens left the buffer untrained (buffer/waste_fraction)"]


def test_steps_that_come_again_and_rows_without_a_time_or_numbers_are_left_out_and_those_without_shares_refused():
    rows = [make_row(step) for step in (1, 2, 3, 2, 3, 40)]
    assert "no step took more than 3 times the median of 0.5 s" in slow(learner=BUSY, rows=rows).facts
    rows = [make_row(step) for step in range(1, 41)]
    del rows[19]["time_s"]
    rows[-1] |= {"generators/tokens_per_s": "many", "buffer/waste_fraction": None, "learner/train_s": "long"}
    facts = slow(learner=BUSY, rows=rows).facts
    assert "no step took more than 3 times the median of 0.5 s" in facts
    assert not any("tokens per second" in fact for fact in facts)
    for times, rule in ((None, "must hold the shares"), ({"steps": "many"}, "as this version of Slipstream writes it")):
        with pytest.raises(ConfigError, match=rule):
            explain_slowness([make_row(1, times=times)], make_run())


def noisy(step, *, key):
    return random.Random(f"{key}{step}").gauss(0, 1)


def noisy_row(step, **after):
    """Return the metrics of one step. At step 51, the reward falls from 0.8 to 0.5, and `after` replaces others."""
    level = 0.8 if step < FALLS_AT else 0.5
    usual = {"lag/mean": 1.0, "learner/idle_fraction": 0.05, "learner/ess": 0.95, "learner/grad_norm": 1.0}
    values = usual | (after if step >= FALLS_AT else {})
    row = {key: value * (1 + 0.02 * noisy(step, key=key)) for key, value in values.items()}
    return {"step": step, "learner/reward_mean": level + 0.02 * noisy(step, key="reward")} | row


def fallen(*, entries=(), events=None, change=lambda row: {}, **after):
    rows = [noisy_row(step, **after) for step in range(1, STEPS + 1)]
    rows = [row | change(row) for row in rows]
    return explain_reward(rows, make_run(), entries=entries, events=events or {})


def by_key(answer):
    return {finding.key: finding for finding in answer.findings}


def test_a_fall_is_told_with_its_figures_and_what_changed_with_it_first_changes_first():
    answer = fallen()
    assert answer.headline.startswith("The reward fell from 0.8")
    assert answer.headline.endswith(", from step 51 on.")
    assert answer.findings == []
    assert answer.note == "No watched metric changed with it."
    answer = fallen(**{"lag/mean": 6.0})
    assert list(by_key(answer)) == ["lag/mean"]
    found = answer.findings[0]
    assert found.figures.startswith("rose from 1")
    assert "from step 51 on" in found.figures
    assert "max_lag (now" in found.advice
    (same,) = (fact for fact in answer.facts if fact.startswith("much the same"))
    assert "learner/idle_fraction (0.05" in same
    assert "do not tell which" in answer.note
    found = by_key(fallen(**{"learner/idle_fraction": 0.7}))["learner/idle_fraction"]
    assert "healthy is <= 0.5" in found.figures
    assert "the policy loss clips most of the data" in found.advice
    assert fallen(**{"lag/mean": 0.2}).findings == [], "a change for the better is no sign"

    def change(row):
        since = {"learner/grad_norm": (51, 30.0), "learner/ess": (53, 0.2)}
        return {key: value for key, (step, value) in since.items() if row["step"] >= step}

    answer = fallen(change=change)
    assert [finding.key for finding in answer.findings] == ["learner/grad_norm", "learner/ess"]
    assert "from step 51 on" in answer.findings[0].figures
    assert "from step 53 on" in answer.findings[1].figures


def mixed(*, easy, hard, easy_reward=1.0):
    """Metrics of two tasks; one without trajectories is left out."""
    found = {}
    for name, count, reward in (("easy", easy, easy_reward), ("hard", hard, 0.2)):
        if count:
            found |= {f"learner/by_source/{name}/trajectories": count, f"learner/by_source/{name}/reward_mean": reward}
    return found


@pytest.mark.parametrize(
    ("before", "after", "split"),
    [
        ({"easy": 75, "hard": 25}, {"easy": 25, "hard": 75}, "-0.4: -0.4 another mix of tasks, +0"),
        ({"easy": 50, "hard": 50}, {"easy": 50, "hard": 50, "easy_reward": 0.4}, "-0.3: +0 another mix of tasks, -0.3"),
        ({"easy": 100, "hard": 0}, {"easy": 50, "hard": 50}, "-0.4: -0.4 another mix of tasks, +0"),
    ],
    ids=["another mix", "within tasks", "a new task"],
)
def test_a_fall_by_other_data_is_split_into_mix_and_rewards(before, after, split):
    answer = fallen(change=lambda row: mixed(**(before if row["step"] < FALLS_AT else after)))
    assert answer.facts[0] == f"of a change of {split} rewards within them"
    if before["easy"] == 75:
        hard = "  hard: 25% to 75% of the answers, reward 0.2 to 0.2"
        assert {*answer.facts[1:3]} == {"  easy: 75% to 25% of the answers, reward 1 to 1", hard}
        assert answer.note == ""


def test_answers_that_are_cut_parts_that_fall_other_settings_events_and_held_out_rewards_are_told():
    def change(row):
        late = row["step"] >= FALLS_AT
        names = {"stop_length": 0.6 if late else 0.01, "part_format": 0.1 if late else 0.9}
        return {f"learner/by_source/math/{name}": value for name, value in names.items()}

    answer = fallen(change=change)
    assert "max_tokens (now" in by_key(answer)["learner/by_source/math/stop_length"].advice
    assert "part of the reward that fell: learner/by_source/math/part_format, 0.9 to 0.1" in answer.facts
    entries = [StepEntry(step, step, step, 0, "aaaa" if step < 51 else "bbbb", [], []) for step in range(1, STEPS + 1)]
    events = {1: ["long before"], 51: ["learner: restarted"]}
    change = lambda row: {"eval/reward_greedy": 0.9 - 0.005 * row["step"]} if row["step"] % 5 == 0 else {}  # noqa: E731
    facts = fallen(entries=entries, events=events, change=change).facts
    assert "from step 51 on the run had other settings (aaaa to bbbb)" in facts
    assert "event in step 51: learner: restarted" in facts
    assert not any("long before" in fact for fact in facts)
    assert any(fact.startswith("eval/reward_greedy, of the same prompts before and after: 0.") for fact in facts)


def test_noise_rises_and_few_steps_are_no_fall_and_windows_of_a_fall_do_not_overlap():
    for slope in (0.0, 0.01):
        noise = [slope * step + 0.1 * noisy(step, key="x") for step in range(1, 201)]
        rows = [{"step": step, "learner/reward_mean": reward} for step, reward in enumerate(noise, 1)]
        answer = explain_reward(rows, make_run())
        assert answer.headline.startswith("The reward did not fall beyond its noise")
        assert answer.findings == []
    rows = [{"step": step, "learner/reward_mean": 0.01 * step} for step in range(1, 41)]
    assert explain_reward(rows, make_run()).facts == ["no 5 steps have a lower mean than 5 steps before them"]
    rows = [{"step": step, "learner/reward_mean": 0.5 if step < 12 else float("nan")} for step in range(1, 40)]
    assert explain_reward(rows, make_run()).headline.startswith("11 steps have a reward")
    assert explain_reward(rows[10:], make_run()).headline.startswith("1 step has a reward")
    values = [0.0] * 20 + [1.0] * 20 + [0.2] * 20 + [0.6] * 20
    windows = largest_fall(values)
    assert (windows.before, windows.after, windows.width) == (20, 40, 10)


TIMELINE = """
100.0 launcher    1 process started
101.5 launcher    1 roles started
101.6 generator-0 2 process started
101.7 learner     3 process started
109.6 generator-0 2 libraries loaded
112.0 generator-0 2 weights verified
112.7 learner     3 training
142.7 learner     3 trained
143.2 learner     3 finished
143.4 generator-0 2 draining
145.0 generator-0 2 stopped
145.5 launcher    1 roles ended
"""
"""Time in seconds, role, process id, and stage."""
FIELDS = [line.split(maxsplit=3) for line in TIMELINE.strip().splitlines()]
RECORDED = [(float(at), role, int(pid), stage) for at, role, pid, stage in FIELDS]


def write(folder: Path, stages: list[tuple[float, str, int, str]], *, damaged: bytes = b"") -> Path:
    lines = [json.dumps(dict(zip(("at", "role", "pid", "stage"), each, strict=True))) for each in stages]
    with (folder / STAGES).open("ab") as file:
        file.write("".join(f"{line}\n" for line in lines).encode() + damaged)
    return folder


def test_the_timeline_of_a_run_is_that_of_its_records(tmp_path: Path) -> None:
    # Roles append their stages in any order.
    answer = explain_start(read_stages(write(tmp_path, RECORDED[::-1])))
    began = "Training began 12.7 s after the start and took 30.0 s"
    assert answer.headline == f"{began}; 2.8 s followed: 15.5 s outside of training."
    # The stages that span training, such as `roles ended`, wait for it. That of the learner waits for the generator.
    assert [(each.key, each.figures) for each in answer.findings] == [
        ("learner/training", "11.0 s, until 12.7 s"),
        ("generator-0/libraries loaded", "8.0 s, until 9.6 s"),
        ("generator-0/weights verified", "2.4 s, until 12.0 s"),
    ]
    assert "    9.60      8.00  generator-0   libraries loaded" in answer.facts
    assert "   45.50     44.00  launcher      roles ended" in answer.facts
    assert len(answer.facts) == 1 + len(RECORDED)


def test_a_restarted_process_and_roles_started_by_hand_have_a_timeline_and_only_the_newest_launch_counts(tmp_path):
    with pytest.raises(ConfigError, match=r"must have stages\.jsonl"):
        explain_start(read_stages(tmp_path))
    write(tmp_path, RECORDED[2:])
    assert [each.at for each in read_stages(tmp_path)][:2] == [101.6, 101.7]
    again = [(120.0, "generator-0", 9, "process started"), (128.5, "generator-0", 9, "libraries loaded")]
    facts = explain_start(read_stages(write(tmp_path, [*RECORDED, *again], damaged=b'{"at": 150.0, "ro'))).facts
    assert "   20.00      0.00  generator-0   process started" in facts
    assert "   28.50      8.50  generator-0   libraries loaded" in facts
    write(tmp_path, [], damaged=b"\n")
    resumed = [(200.0, "launcher", 7, "process started"), (201.0, "launcher", 7, "roles started")]
    stages = read_stages(write(tmp_path, resumed))
    assert [each.at for each in stages] == [200.0, 201.0]
    assert explain_start(stages).headline == "1.0 s after the start, the newest stage is: roles started."


def test_roles_record_stages_only_where_the_folder_of_the_run_is(tmp_path: Path) -> None:
    folder = RunFolder(make_run(runs_dir=str(tmp_path)))
    folder.record_stage("learner", "training")
    assert not folder.path.exists()
    folder.make()
    folder.record_process("learner")
    folder.record_stage("learner", "training")
    began, training = read_stages(folder.path)
    assert (began.stage, training.stage) == ("process started", "training")
    # This process has run for longer than the clock's error.
    assert began.at < training.at
