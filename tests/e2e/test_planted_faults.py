"""Faults planted into updates of a real vLLM engine: each is caught, none is sampled from, a good update heals."""

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
def test_it_is_caught_nothing_is_sampled_from_it_and_a_good_update_heals(fault: Fault, scene: PlantedFaults):
    outcome = scene.suffer(fault)
    assert outcome.caught_by == fault.caught_by
    assert outcome.is_loaded == fault.is_loaded
    # Under the version before the generator may finish what it began; under no version may it begin anything.
    assert outcome.is_verified == (not fault.is_loaded)
    # It takes nothing new from before it gives up what it has.
    assert outcome.states == ["updating", "unsynced", *(["handed back"] if fault.is_loaded else [])]
    assert outcome.is_healed
