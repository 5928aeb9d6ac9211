"""The recipes for q: the ranks that their own header starts, the plan those come to, and whether it fits GPUs
of 80 GB by the arithmetic of the cost model. What no arithmetic can tell (NCCL, a real q) is not tested here.
"""

import re

import pytest

from whetstone.config import ineffective_settings, load, make_plan
from whetstone.config.load import recipe_folders
from whetstone.cost.estimate import estimate
from whetstone.cost.prompts import Prompts
from whetstone.cost.shape import model_shape

# ranks by the command in the header, of them data ranks; prompts a step; GPUs of servers
Q = {
    "q/1.5b": (1, 1, 4, 0),  # 8 x 4 / 8
    "q/3b": (1, 1, 4, 0),
    "q/7b": (3, 3, 6, 1),  # 4 x 4 x 3 / 8
    "q/14b": (7, 7, 7, 1),  # 1 x 8 x 7 / 8
    "q/32b": (16, 4, 8, 0),  # 1 x 16 x 4 / 8
}


@pytest.mark.parametrize("name", Q)
def test_the_recipes_for_q_fit_their_gpus(name: str) -> None:
    text = (recipe_folders()[-1] / f"{name}.yaml").read_text(encoding="utf-8")
    hosts, local = (
        int(found[1]) if (found := re.search(rf"--{word} (\d+)", text.partition("\n\n")[0])) else 1
        for word in ("nnodes", "nproc-per-node")
    )
    config = load(name).config
    parallel, engines = config.parallel, config.engines
    data = hosts * local // parallel.tp_size
    plan = make_plan(config, num_problems=1000, world_size=data)
    assert ineffective_settings(config, plan) == []
    servers = [gpu for devices in engines.server_devices for gpu in devices.split(",")]
    assert (hosts * local, data, plan.prompts_per_batch, len(servers)) == Q[name]
    assert all(int(gpu) >= local for gpu in servers), "a server shares no GPU with a training rank"
    if hosts * local > 1:  # what engines/__init__.py would refuse
        assert config.rollout.rollout_engine == "native" or (
            parallel.tp_size == 1 and config.rollout.vllm_mode == "server"
        )
    # 80 GB, of which a tenth is for what the allocator loses.
    shape = model_shape(config.model.model_name_or_path)
    prompts = Prompts(tokens=config.rollout.max_prompt_length or 0, num_problems=1000, source="")
    planned = estimate(config, shape, prompts, capacity=0.9 * 80 * 2**30, gpus=hosts * local)
    assert planned.memory.fits and planned.setup.samples_here == (not servers)


@pytest.mark.parametrize(("name", "size"), [("multi_tasks", 24), ("multi_tasks", 40), ("syllogism_toy", 16)])
def test_the_recipes_of_the_course_fit_the_gpus_that_it_names(name: str, size: int) -> None:
    prompts = Prompts(tokens=300, num_problems=1000, source="")
    config = load(name).config
    planned = estimate(config, model_shape(config.model.model_name_or_path), prompts, capacity=size * 1e9)
    assert planned.memory.fits
