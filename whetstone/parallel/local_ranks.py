"""Several ranks on this machine: started by torchrun's own module, and on one GPU for tests and development.

NCCL refuses two ranks on one GPU only if they are on one host. So each rank says that it is on a host of its
own, and they communicate over a socket: the collectives are the real ones, their speed means nothing.
"""

import os

SHARE_GPU = "WHETSTONE_SHARE_GPU"
USABLE = 0.9  # of the free memory: torch does not count CUDA contexts and what NCCL allocates


def shares_gpu() -> bool:
    """Whether all ranks of this machine use its first GPU."""
    return os.environ.get(SHARE_GPU, "0") not in ("", "0")


def share_gpu() -> None:
    """Before the process group is made: what NCCL needs, and this rank's share of the GPU's free memory.

    whetstone/model/memory.py, which all ask for memory, keeps to the share.
    """
    import torch

    os.environ |= {
        "NCCL_HOSTID": f"host{os.environ['RANK']}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
    }
    torch.cuda.set_device(0)
    free, total = torch.cuda.mem_get_info(0)  # others may have some of it, such as a rollout server
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    torch.cuda.set_per_process_memory_fraction(USABLE * free / total / num_ranks, 0)


def torchrun(num_ranks: int, max_restarts: int, args: list[str]) -> int:
    """`whetstone ARGS` as so many ranks; the exit code of the first that failed, 130 after a signal to us."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    options = ["--standalone", f"--nproc-per-node={num_ranks}", f"--max-restarts={max_restarts}"]
    try:
        run.run(run.parse_args([*options, "-m", "whetstone", *args]))
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        return code if code > 0 else 128 - code  # killed by a signal: as a shell counts
    except SignalException:
        return 130
    return 0
