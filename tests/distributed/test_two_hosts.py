"""Two hosts, as near as one machine comes to them: two network namespaces joined by a cable that can be
pulled.

torchrun meets across them, one host is cut off in the middle, both end with a reason, and both go on
afterwards. Needs root and iproute2 (`make test-hosts`).
"""

import os
import re
import shutil
import subprocess
import sys
import threading
import time

import pytest

from tests.support.runs import rows, weights, words

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2"),
]
SPACES = {"whet-a": "10.77.0.1", "whet-b": "10.77.0.2"}
TIMEOUT_S = 10


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def hosts():
    """The namespaces with a cable between them."""
    for name in SPACES:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        ip("netns", "add", name)
    ip(
        "link",
        "add",
        "cable-a",
        "netns",
        "whet-a",
        "type",
        "veth",
        "peer",
        "name",
        "cable-b",
        "netns",
        "whet-b",
    )
    for name, address in SPACES.items():
        cable = f"cable-{name[-1]}"
        ip("-n", name, "addr", "add", f"{address}/24", "dev", cable)
        ip("-n", name, "link", "set", cable, "up")
        ip("-n", name, "link", "set", "lo", "up")
    yield
    for name in SPACES:
        ip("netns", "del", name)


class Host:
    """torchrun in one of the namespaces, and what it has said so far."""

    def __init__(self, name: str, run: str, settings: list[str]):
        command = [
            *("ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes=2", "--nproc_per_node=1", "--rdzv_backend=c10d", "--rdzv_endpoint=10.77.0.1:29400"),
            # torchrun can't see from names and addresses which namespace is the host of the rendezvous.
            *(
                f"--rdzv_id={run}",
                f"--local-addr={SPACES[name]}",
                f"--rdzv_conf=is_host={int(name == 'whet-a')}",
            ),
            *("-m", "whetstone", "train", *settings),
        ]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": f"cable-{name[-1]}", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
        self.output = ""
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line

    def wait_for(self, pattern: str, timeout_s: float = 240) -> None:
        begun = time.monotonic()
        while not re.search(pattern, self.output):
            assert time.monotonic() - begun < timeout_s, self.output
            time.sleep(0.2)

    def end(self, timeout_s: float = 240) -> int:
        code = self.process.wait(timeout=timeout_s)
        self.reader.join(timeout=10)
        return code


def both(run: str, settings: list[str]) -> dict[str, Host]:
    return {name: Host(name, run, settings) for name in SPACES}


def test_a_host_that_is_cut_off_ends_both_with_a_reason_and_both_go_on(tmp_path, hosts):
    settings = words(
        tmp_path, max_steps=12, save_steps=2, max_completion_length=16, eval_num_samples=0,
        heartbeat_timeout_s=TIMEOUT_S,
    )  # fmt: skip
    running = both("first", settings)
    try:
        running["whet-a"].wait_for(r"step 4/12")
        ip("-n", "whet-b", "link", "set", "cable-b", "down")  # the cable is pulled
        pulled = time.monotonic()
        running["whet-a"].wait_for(r"This run ends because rank 1 on \S+ has not been heard of for \d+ s", 60)
        running["whet-b"].wait_for(
            r"This run ends because the first host \(10.77.0.1\) has been out of reach", 60
        )
        print(f"both have said why {time.monotonic() - pulled:.0f} s after the cut")
        # The ranks have ended. torchrun's own agents may wait longer for each other: that is theirs to mend.
    finally:
        for host in running.values():
            host.process.kill()
    ip("-n", "whet-b", "link", "set", "cable-b", "up")
    again = both("second", [*settings, "auto_resume=true"])
    try:
        assert [host.end() for host in again.values()] == [0, 0], (
            again["whet-a"].output + again["whet-b"].output
        )
    finally:
        for host in again.values():
            host.process.kill()
    assert re.search(r"Resuming from \S+checkpoint-\d+ \(step (2|4|6)\)", again["whet-a"].output)
    # The same end as a run of one process that nothing happened to.
    alone = words(
        tmp_path / "alone", max_steps=12, save_steps=100, max_completion_length=16, eval_num_samples=0
    )
    subprocess.run([sys.executable, "-m", "whetstone", "train", *alone], check=True, capture_output=True)
    expected, found = (weights(folder / "run" / "final_model") for folder in (tmp_path / "alone", tmp_path))
    worst = max(((expected[name] - found[name]).norm() / expected[name].norm()).item() for name in expected)
    print(f"weights differ by {worst:.1e} from those of one process")
    assert worst < 1e-4
    for mine, theirs in zip(rows(tmp_path, "train"), rows(tmp_path / "alone", "train"), strict=True):
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3, abs=1e-6)
