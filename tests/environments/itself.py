"""An environment that says which process it is, how many sockets it has, and where its files go."""

import os
import tempfile


class Itself:
    def reset(self, seed: int) -> str:
        with os.scandir("/proc/self/fd") as entries:
            links = [os.readlink(entry.path) for entry in entries if int(entry.name) > 2]
        num_sockets = sum(link.startswith("socket:") for link in links)
        return f"{os.getpid()} {num_sockets} {tempfile.gettempdir()}"

    def step(self, text: str):
        return "", 0.0, True, False, {}
