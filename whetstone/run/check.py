"""`whet check`: the preflight of a configuration without a run folder, an optimizer or an update."""

import contextlib
from dataclasses import replace

from whetstone.config import LoadedConfig
from whetstone.model.sharded import load_sharded
from whetstone.run.preflight import Preflight, examine
from whetstone.run.setup import (
    build_tasks_and_plan,
    init_distributed,
    make_collector,
    make_pool,
    make_scorer,
    make_source,
)
from whetstone.run.sft_start import sft_config
from whetstone.run.trial import try_own_code
from whetstone.tasks.mixture import prepare_tasks
from whetstone.terminal.findings import Status
from whetstone.terminal.stages import stage


def check(loaded: LoadedConfig) -> tuple[Preflight, bool]:
    """The preflight of a configuration, and whether this process is the first rank."""
    config = loaded.config
    if config.update.sft_steps:  # what trains first
        config = sft_config(config)
    with contextlib.ExitStack() as stack:
        ranks = init_distributed(config, stack)
        _, tasks, plan = build_tasks_and_plan(config, ranks)
        prepare_tasks(tasks)
        scorer = stack.enter_context(make_scorer(config, ranks))
        tried = try_own_code(config, tasks, scorer, ranks, make_pool)
        if any(finding.status is Status.PROBLEM for finding in tried):
            problem = tasks.problem(0)
            return Preflight(
                findings=tuple(tried), measurements={}, problem=problem.id, prompt=problem.question
            ), ranks.is_main
        with stage("loading the model"):
            policy = load_sharded(config.model, config.parallel, ranks)
        with stage(f"starting the engine {config.rollout.rollout_engine}"):
            collector = make_collector(config, policy, scorer, stack)
        source = make_source(collector, tasks, config, plan)
        stack.callback(source.close)
        result = examine(config, source, policy)
        return replace(result, findings=(*tried, *result.findings)), ranks.is_main
