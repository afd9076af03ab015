"""Shared test set-up. The first lines choose Triton's interpreter before anything imports triton."""

import gc
import os
import signal
import threading

# Only a CUDA device can run compiled kernels; without one, every Triton kernel runs in the interpreter.
# Triton reads the variable once, at its first import, and neither torch nor transformers imports it.
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# No test may wait on a hub: there is none on the machines that run these tests.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")

import pytest

if not torch.cuda.is_available():
    try:
        from tests.quick_interpreter import make_quick
    except ModuleNotFoundError:  # where there is no Triton
        pass
    else:
        make_quick()

# A shell has what it starts in the background ignore Ctrl-C, and so would the commands that tests start and interrupt.
if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    and threading.current_thread() is threading.main_thread()
):
    signal.signal(signal.SIGINT, signal.default_int_handler)

try:
    from hypothesis import HealthCheck, settings
except ModuleNotFoundError:  # a GPU machine may lack it; the tests that draw say so themselves
    pass
else:
    # By default an example that takes a quarter of a second fails its test, and a busy machine may stall for longer.
    settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("patient")


def pytest_collection_finish() -> None:
    """Modules stay: looking through them for garbage takes a fifth of a second each time that something collects it.

    And it is looked for less often than after 700 new objects, which the interpreter makes in no time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked gpu are skipped, with the reason, when chosen on a machine without a CUDA device."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture
def device() -> torch.device:
    """The device on which kernels run here: CUDA, or the CPU (Triton in its interpreter)."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
