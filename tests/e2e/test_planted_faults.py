"""Faults planted into updates of a real vLLM engine: each is caught before sampling, and the next update recovers."""

from collections.abc import Iterator

import pytest

from benchmarks.weights.planted_faults import FAULTS, Fault, PlantedFaults

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlantedFaults]:
    with pytest.MonkeyPatch.context() as patch:
        opened = PlantedFaults(tmp_path_factory.mktemp("planted") / "model", set_variable=patch.setenv)
        yield opened
        opened.close()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_caught_not_sampled_from_and_healed_by_the_next_update(fault: Fault, scene: PlantedFaults):
    outcome = scene.run(fault)
    assert outcome.caught_by == fault.caught_by
    assert outcome.is_loaded == fault.is_loaded
    # If nothing was loaded, the previous version is still verified.
    assert outcome.is_verified == (not fault.is_loaded)
    # Unsynced before the release: no prompt is requested in between.
    assert outcome.states == (["updating", "updating", "unsynced", "released"] if fault.is_loaded else ["unsynced"])
    assert outcome.is_healed
