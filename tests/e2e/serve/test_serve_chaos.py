"""Swaps and kill -9 under load, small; `chaos.py` is the same at any size."""

import shutil
import socket

import pytest

from .chaos import GATEWAYS, chaos

pytestmark = [pytest.mark.vm, pytest.mark.slow, pytest.mark.timeout(1200, func_only=True)]


@pytest.fixture
def own(runs, tmp_path):
    """A copy of the finished run, for a service of its own."""
    shutil.copytree(runs, tmp_path / "runs")
    return tmp_path / "runs"


def check_log(found):
    assert found["wrong_header"] == found["not_applied"] == 0
    assert found["rescored"] > 0
    assert found["k3_max"] < 1e-9, "tokens of a version are of its weights"
    assert found["k3_of_another_version"] > 1e-3, "which other weights would show"


def test_no_request_fails_whatever_dies_but_the_gateway(own):
    found = chaos(own, num_kills=10, num_swaps=30, wait_s=800.0)
    assert found["num_kills"] == 10 and found["versions"] >= 30, found
    assert found["failed"] == []
    check_log(found)


def test_of_two_gateways_one_dies_and_the_client_s_own_retry_is_answered(own):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings = (
        'processes.front=["monitor"]',
        'processes.gateway-a=["gateway:a"]',
        'processes.gateway-b=["gateway:b"]',
        f"gateway.port={port}",
    )
    found = chaos(
        own, num_kills=5, num_swaps=5, wait_s=800.0, victims=GATEWAYS, settings=settings,
        num_retries=2,
    )  # fmt: skip
    assert found["num_kills"] == 5, found
    assert found["failed"] == []
    check_log(found)
