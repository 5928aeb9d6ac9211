"""Ctrl-C and SIGTERM."""

import subprocess
import sys

PROGRAM = """
import os, signal, time
from whetstone.run.signals import StopRequest

def send(number):
    os.kill(os.getpid(), number)
    time.sleep(0.01)

with StopRequest(verbose=False) as stop:
    send(signal.SIGTERM)
    send(signal.SIGTERM)
    print("requested", stop.requested)
    time.sleep(0.6)
    try:
        send(signal.SIGINT)
    except KeyboardInterrupt:
        print("interrupted")
"""


def test_simultaneous_signals_count_once_a_later_one_interrupts():
    """As `timeout` sends it: to the process, and to its group."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert done.stdout.split("\n")[:2] == ["requested True", "interrupted"], done.stderr
