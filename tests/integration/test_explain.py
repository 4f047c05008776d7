"""The records of a run that is over and has no running store."""

from slipstream.buffer.records import VersionEntry
from slipstream.buffer.redis.embedded import EmbeddedRedis
from slipstream.buffer.redis.run_store import open_run_store
from slipstream.observe.reader import RunReader
from tests.recorded_run import record_run


def test_the_store_of_a_run_that_is_over_is_started_to_be_read_and_stopped_again(tmp_path):
    folder = record_run(tmp_path, steps=1)
    server = EmbeddedRedis(folder / "store", max_memory_mib=64)
    server.start(timeout_s=20)
    try:
        with open_run_store(server.url, "mine", timeout_s=5) as store:
            store.open_run("mine", config_json="{}", num_rows=5, seed=7)
            store.record_version(VersionEntry(0, 0, "aaaa"))
    finally:
        server.stop()
    with RunReader(folder, starts_server=True) as reader:
        assert ([entry.checksum for entry in reader.versions()], reader.problem) == (["aaaa"], "")
    assert not server.is_listening
