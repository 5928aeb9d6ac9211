"""Ctrl-C and SIGTERM."""

import subprocess
import sys

PROGRAM = """
import os, signal
from types import SimpleNamespace
from whetstone.run import signals
from whetstone.run.signals import StopRequest

now = 1.0
signals.time = SimpleNamespace(monotonic=lambda: now)

def send(number):
    os.kill(os.getpid(), number)

with StopRequest(verbose=False) as stop:
    send(signal.SIGTERM)
    send(signal.SIGTERM)
    print("requested", stop.requested)
    now = 1.6
    try:
        send(signal.SIGINT)
    except KeyboardInterrupt:
        print("interrupted")
"""


def test_simultaneous_signals_count_once_a_later_one_interrupts():
    """As `timeout` sends it: to the process, and to its group."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert done.stdout.split("\n")[:2] == ["requested True", "interrupted"], done.stderr
