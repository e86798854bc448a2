"""Processor time of a process, shared out among its actors."""

import os
import subprocess
import sys
import time

import pytest

from penstock.actors.runtime.clock import SystemClock
from penstock.actors.runtime.meter import Meter
from penstock.actors.runtime.processor_time import ProcessorTime, process_s, processor_s_of


def test_actors_share_by_how_busy_they_were_and_add_up_to_the_process():
    measured = [2.0]
    processor = ProcessorTime(lambda: measured[0])
    meters = {name: Meter(SystemClock()) for name in "abc"}
    for name, meter in meters.items():
        processor.join(name, meter)
    meters["a"].add(3.0)
    meters["b"].add(1.0)
    assert [processor.used_s(name) for name in "abc"] == [1.5, 0.5, 0.0]
    measured[0] = 5.0
    meters["c"].add(0.5)
    assert [processor.used_s(name) for name in "abc"] == [1.5, 0.5, 3.0]
    measured[0] = 5.3
    assert sum(processor.used_s(name) for name in "abc") == pytest.approx(5.3), (
        "idle ones share alike"
    )


def test_the_kernel_counts_what_this_process_does():
    before = process_s()
    total = 0
    while process_s() < before + 0.02:
        total += sum(range(1000))
    assert process_s() > before and total


def test_another_process_is_counted_while_it_runs():
    assert processor_s_of(os.getpid()) == pytest.approx(process_s(with_children=False), abs=0.1)
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        deadline = time.monotonic() + 30.0
        while processor_s_of(child.pid) < 0.1:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        child.kill()
        child.wait()
    assert processor_s_of(child.pid) == 0.0
