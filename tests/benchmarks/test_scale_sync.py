"""`benchmarks.scale_sync` at toy size: what it measures has really happened."""

from argparse import Namespace

import pytest

from benchmarks.scale_sync import measure


@pytest.mark.processes
def test_processes_sync_update_and_replace_a_lost_engine():
    arguments = Namespace(ranks=2, megabytes=1, bucket_megabytes=0, network=False, repeats=1)
    found = measure(arguments, 2)
    assert found.keys() == {"first sync", "sync", "update", "lost engine"}
    for part in ("first sync", "sync", "lost engine"):
        wall_s, cpu_s, phase_s = found[part]
        assert wall_s >= phase_s["wire"] > 0
        assert cpu_s > 0
