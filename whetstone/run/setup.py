"""Build a training run: ranks, tasks, plan, model, updater, engine, evaluator, metrics."""

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from whetstone.algorithm.losses import find_loss
from whetstone.config import Config, LoadedConfig, Plan, ineffective_settings, make_plan
from whetstone.config.engine_traits import engine_traits
from whetstone.config.plugins import is_plugin
from whetstone.engines import make_engine
from whetstone.environments.pool import EpisodePool
from whetstone.environments.table import REPAIR
from whetstone.environments.toolbox import TOOLBOX, tool_schemas
from whetstone.errors import UserError
from whetstone.evaluation.evaluator import Evaluator
from whetstone.evaluation.statistics import wilson
from whetstone.model.chat import Chat
from whetstone.model.hub import base_and_adapter, load_tokenizer, token_notes
from whetstone.model.policy import Policy, choose_device
from whetstone.model.reference import Reference
from whetstone.model.sharded import load_sharded
from whetstone.model.size import num_parameters
from whetstone.parallel import mesh
from whetstone.parallel.collectives import new_gloo_group, run_on_main
from whetstone.parallel.heartbeat import Heartbeat
from whetstone.parallel.local_ranks import SHARE_GPU, shares_gpu
from whetstone.parallel.mesh import SINGLE, Ranks
from whetstone.rewards.verify import check_reward_funcs, verify
from whetstone.rollout.async_source import AsyncRolloutSource
from whetstone.rollout.collector import Collector, EpisodeSettings, NullScorer
from whetstone.rollout.learning_signal import LearningSignal
from whetstone.rollout.rollout_func import RolloutFunction
from whetstone.rollout.source import RolloutSource
from whetstone.rollout.supervised import RejectionSampledSource, SupervisedSource
from whetstone.rollout.tensor_parallel import NoEnvironments
from whetstone.run.agents import make_agents
from whetstone.run.best_model import BestModel
from whetstone.run.checkpoint import Checkpoint, Saver
from whetstone.run.cost_line import describe_cost
from whetstone.run.folder import check_plan, open_run, run_dir, scratch_folder
from whetstone.run.metrics import MetricsLog
from whetstone.run.record import began_at, record_session
from whetstone.run.resources import ResourceMonitor
from whetstone.run.status import StatusFile
from whetstone.run.timing import ThroughputMeter
from whetstone.run.token_log import TokenLog
from whetstone.run.trial import check_own_code
from whetstone.run.viewer import Viewer, is_wanted
from whetstone.sandbox.pool import strongest_kind
from whetstone.tasks.mixture import Mixture, build_tasks, check_gold, eval_problems, prepare_tasks
from whetstone.tasks.registry import environments_of, with_room_for_turns
from whetstone.tasks.scoring.pool import Scorer
from whetstone.terminal.log import log_ending, setup_logging
from whetstone.terminal.stages import stage
from whetstone.terminal.text import counted
from whetstone.types import Problem
from whetstone.update.updater import Updater

FEW_PROBLEMS = 50  # with fewer, the 95 % interval of an accuracy is wider than 27 points
logger = logging.getLogger("whetstone")


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """The components of the training loop."""

    config: Config
    plan: Plan
    ranks: Ranks
    folder: Path
    saver: Saver
    policy: Policy
    source: RolloutSource
    learning_signal: LearningSignal
    updater: Updater
    evaluator: Evaluator | None
    best_model: BestModel
    token_log: TokenLog
    metrics: MetricsLog
    throughput: ThroughputMeter
    resources: ResourceMonitor


def init_distributed(config: Config, stack: contextlib.ExitStack) -> Ranks:
    """Join the other ranks of the launch, if any; until `stack` closes, a failed rank ends all."""
    with stage("waiting for the other ranks") if mesh.is_launched() else contextlib.nullcontext():
        ranks = stack.enter_context(mesh.start(config.parallel, choose_device(config.model.device).type))
    stack.enter_context(Heartbeat(ranks, config.parallel.heartbeat_timeout_s))
    in_process = engine_traits(config.rollout.rollout_engine).in_process
    if ranks.world_size > 1 and config.rollout.async_rollouts and in_process:
        raise UserError(
            "async_rollouts=1 with several ranks requires rollout_engine=vllm or sglang: the engine "
            f"{config.rollout.rollout_engine} would compete with training for the GPU."
        )
    if ranks.world_size > 1 and config.update.bf16_rounding != "nearest":
        raise UserError(
            "bf16_rounding=stochastic is for one GPU: several share float32 weights, and where these are "
            "gathered they are rounded to the nearest. Leave it out."
        )
    return ranks


def build(
    loaded: LoadedConfig, ranks: Ranks, stack: contextlib.ExitStack
) -> tuple[TrainingRun, Checkpoint | None, float]:
    """The run, the checkpoint that it resumes from, and the seconds that it had run before."""
    config = loaded.config
    folder, checkpoint, notes = open_run(config, stack, ranks, is_restart=mesh.restarts() > 0)
    folder = folder if ranks.is_main else stack.enter_context(scratch_folder())
    setup_logging(folder, is_main=ranks.is_main)
    stack.push(log_ending)
    stack.enter_context(StatusFile(folder, is_main=ranks.is_main))
    stack.enter_context(Viewer(folder, is_wanted=ranks.is_main and is_wanted(config.run.watch)))
    start_step = None if checkpoint is None else checkpoint.step
    record_session(folder, resumed_from=start_step, num_ranks=ranks.world_size)
    for note in (*loaded.notes, *notes, *token_notes(config.run.push_to_hub)):
        logger.info(note)
    torch.manual_seed(config.run.seed)  # a new LoRA adapter is initialized at random
    find_loss(config.loss.loss_type)  # a user's file may be wrong: before the model loads
    problems, tasks, plan = build_tasks_and_plan(config, ranks)
    scalars = {} if checkpoint is None else checkpoint.scalars()
    if checkpoint is not None:
        check_plan(checkpoint, scalars, plan)
    idle = ineffective_settings(config, plan, on_cpu=choose_device(config.model.device).type == "cpu")
    for line in (*describe_ranks(ranks), *idle, *prepare_tasks(tasks)):
        logger.info(line)
    scorer = stack.enter_context(make_scorer(config, ranks))  # its processes start while the model loads
    if checkpoint is None:
        check_own_code(config, tasks, scorer, ranks, make_pool)
    with stage("loading the model"):
        weights = None if checkpoint is None else checkpoint.folder
        policy = load_sharded(config.model, config.parallel, ranks, weights)
        for line in (describe_model(policy, config), *describe_cost(policy, config, tasks)):
            logger.info(line)
        updater = Updater(policy, config, plan, make_reference(config, policy, checkpoint))
        if checkpoint is not None:
            restore(updater, checkpoint, scalars)
    with stage(f"starting the engine {config.rollout.rollout_engine}"):
        began = folder if checkpoint is None else checkpoint.folder.parent
        now = run_on_main(ranks, lambda: began_at(began) or began_at(folder), to_all=True)
        collector = make_collector(config, policy, scorer, stack, now)
    source = make_source(collector, tasks, config, plan)
    stack.callback(source.close)
    if checkpoint is not None:
        source.load_state(scalars["source"])
    metrics = MetricsLog(folder, config, resume_step=start_step, has_sinks=ranks.is_main)
    stack.callback(metrics.close)
    own = run_dir(config)
    saved = start_step if checkpoint and checkpoint.folder.resolve().parent == own.resolve() else None
    run = TrainingRun(
        config=config,
        plan=plan,
        ranks=ranks,
        folder=folder,
        saver=Saver(own, config.run.save_total_limit, ranks, saved),
        policy=policy,
        source=source,
        learning_signal=LearningSignal(config),
        updater=updater,
        evaluator=Evaluator(config, problems, collector, folder) if problems else None,
        best_model=BestModel(folder, policy, enabled=config.run.load_best_model_at_end),
        token_log=TokenLog(folder, config, policy, updater.accumulator.tokens),
        metrics=metrics,
        throughput=ThroughputMeter(
            policy,
            num_iterations=plan.num_iterations,
            num_passes=updater.experience_builder.num_passes(plan.minibatches),
            peak_tflops=config.measure.peak_tflops,
        ),
        resources=stack.enter_context(ResourceMonitor(folder, policy.device, is_main=ranks.is_main)),
    )
    stack.callback(run.saver.finish)
    return run, checkpoint, scalars.get("seconds", 0.0)


def make_source(collector: Collector, tasks: Mixture, config: Config, plan: Plan) -> RolloutSource:
    """Where the batches come from: samples of this step, samples one step ahead, or solutions."""
    source_type = AsyncRolloutSource if config.rollout.async_rollouts else RolloutSource
    if config.loss.is_supervised:
        source_type = RejectionSampledSource if config.rollout.rejection_sampling else SupervisedSource
    return source_type(collector, tasks, config, plan)


def restore(updater: Updater, checkpoint: Checkpoint, scalars: dict[str, Any]) -> None:
    """Load the updater's state; `scalars` are all of the checkpoint's."""
    tensors = updater.state_tensors()
    checkpoint.load_tensors(tensors)
    updater.load_state_tensors(tensors)
    updater.load_state_scalars(scalars["updater"])


def make_reference(config: Config, policy: Policy, checkpoint: Checkpoint | None) -> Reference | None:
    """The reference policy of the KL. A resumed run needs the initial weights, not its checkpoint's."""
    loss = config.loss
    if loss.beta == 0 or loss.kl_reference == "rollout":
        return None
    moving = loss.kl_reference == "moving"  # its weights are in the checkpoint
    had_adapter = policy.is_lora and base_and_adapter(config.model.model_name_or_path)[1] is not None
    reload = checkpoint is not None and not moving and (had_adapter or not policy.is_lora)
    initial = load_sharded(config.model, config.parallel, policy.ranks) if reload else policy
    offload = config.parallel.cpu_offload != "none" and policy.device.type == "cuda"
    return Reference.from_policy(policy, initial, moving=moving, had_adapter=had_adapter, offload=offload)


def describe_ranks(ranks: Ranks) -> list[str]:
    """How the ranks share the weights; nothing for a single process."""
    if ranks.mesh is None or ranks.world_size == 1:
        return []
    replicas, num_shards, tp = ranks.mesh.size(0), ranks.mesh.size(1), ranks.mesh.size(2)
    text = f"{ranks.world_size} ranks: weights in {num_shards} shards"
    text += f" x {tp} tensor-parallel parts" if tp > 1 else ""
    lines = [text + (f", {replicas} replicas" if replicas > 1 else "")]
    if shares_gpu():
        on_cpu = ranks.mesh.device_type == "cpu"
        meaning = "for tests and development, its speed means nothing" if not on_cpu else "no effect on CPUs"
        lines.append(f"All ranks share one GPU ({SHARE_GPU}): {meaning}.")
    return lines


def describe_model(policy: Policy, config: Config) -> str:
    total = num_parameters(policy.model)
    trained = sum(parameter.numel() for parameter in policy.parameters())
    precision = str(policy.dtype).removeprefix("torch.")
    name = config.model.model_name_or_path
    text = f"{name}: {total:,} parameters, {trained:,} trained, {precision} on {policy.device}"
    if config.model.bf16 and policy.device.type == "cpu":
        text += " (bf16 was asked for, but float32 is faster on a CPU)"
    return text


def build_tasks_and_plan(config: Config, ranks: Ranks = SINGLE) -> tuple[list[Problem], Mixture, Plan]:
    """Evaluation problems, training tasks and the plan. Every task must accept its own answers."""
    with stage("making the problems"):
        fits = prompt_filter(config)
        fixed = eval_problems(config, fits)
        tasks = build_tasks(config, "train", fixed, fits)
    with stage("scoring the tasks' own answers"):
        check_gold(tasks)
        if fixed:
            check_gold(build_tasks(config, "eval"))
    plan = make_plan(config, num_problems=len(tasks), world_size=ranks.data_size)
    for line in (
        *(note for task in tasks.tasks.values() for note in task.notes()),
        *plan.lines(config, len(fixed)),
        *few_problems(config, len(fixed)),
    ):
        logger.info(line)
    return fixed, tasks, plan


def prompt_filter(config: Config) -> Callable[[Problem], bool] | None:
    """Whether a prompt has at most max_prompt_length tokens, where others are to be left out."""
    limit = config.rollout.max_prompt_length
    if limit is None or not config.rollout.filter_overlong_prompts:
        return None
    chat = Chat(load_tokenizer(config.model.model_name_or_path), config.model)
    tools = tool_schemas(config.environments.tools)
    return lambda problem: len(chat.encode(replace(problem, tools=(*tools, *problem.tools)))) <= limit


def few_problems(config: Config, num_problems: int) -> list[str]:
    """A warning where the evaluation has too few problems."""
    if not 0 < num_problems < FEW_PROBLEMS:
        return []
    low, high = wilson(0.5, num_problems)
    remedy = f"set eval_num_samples to {2 * FEW_PROBLEMS} or more"
    if num_problems < config.evaluation.eval_num_samples:  # rows are only so many
        remedy = "give more rows, a larger eval_fraction, or an eval_path of their own"
    return [
        f"The evaluation has {counted(num_problems, 'problem')} only: a measured 50 % may be anything from "
        f"{100 * low:.0f} to {100 * high:.0f} %: {remedy}."
    ]


def make_scorer(config: Config, ranks: Ranks = SINGLE) -> Any:
    """The scorer of this rank; only the first of tensor-parallel ranks scores. Checks reward functions."""
    check_reward_funcs(config)
    verify(config.tasks.reward_funcs)
    return Scorer(config) if ranks.is_first_of_tp else NullScorer()


def make_pool(config: Config, names: list[str]) -> EpisodePool:
    """The processes of these environments, with the tools of the run."""
    own, programs = config.environments, config.programs
    runs_programs = "python" in own.tools or REPAIR in names
    if runs_programs:
        strongest_kind(programs.sandbox_isolation)  # refuses a machine without isolation before the run
    return EpisodePool(
        names,
        timeout_s=own.environment_timeout_s,
        memory_mb=own.environment_memory_mb,
        tools=own.tools,
        tool_settings={
            "isolation": programs.sandbox_isolation,
            "seconds": programs.sandbox_time_limit_s,
            "memory_mb": programs.sandbox_memory_mb,
        },
        with_state=any(map(is_plugin, config.tasks.reward_funcs)),
        sandbox_isolation=programs.sandbox_isolation if runs_programs else None,
    )


def _make_episodes(config: Config, policy: Policy, stack: contextlib.ExitStack) -> EpisodeSettings | None:
    """The processes of environments, where a task has one."""
    own, names = config.environments, environments_of(config)
    tools = tool_schemas(own.tools)
    if tools:
        names = [*names, TOOLBOX]
    if not names:
        return None
    is_described = own.tool_call_format == "template"
    if tools and is_described and not config.model.apply_chat_template:
        raise UserError("tools are described by a chat template: set apply_chat_template=true, or no tools.")
    ranks = policy.ranks
    pool = stack.enter_context(make_pool(config, names) if ranks.is_first_of_tp else NoEnvironments())
    return EpisodeSettings(pool=pool, config=own, ranks=ranks, tools=tools)


def _make_rollout_func(config: Config, policy: Policy) -> RolloutFunction | None:
    spec = config.environments.rollout_func
    if spec is None:
        return None
    if policy.ranks.tp_size > 1:
        raise UserError("rollout_func can't be sampled by tensor-parallel ranks: set tp_size=1.")
    own = config.environments
    if names := [*environments_of(config), *own.tools, *([own.agent] if own.agent else [])]:
        raise UserError(
            f"rollout_func has its own loop, in which {', '.join(names)} would have no part: leave out "
            "either."
        )
    ranks = policy.ranks
    return RolloutFunction(
        spec,
        config,
        tokenizer=policy.tokenizer,
        stop_token_ids=policy.stop_token_ids,
        vocabulary_size=policy.lm.get_input_embeddings().num_embeddings,
        accelerator=SimpleNamespace(
            device=policy.device,
            process_index=ranks.data_rank,
            num_processes=ranks.data_size,
            is_main_process=ranks.data_rank == 0,
        ),
    )


def make_collector(
    config: Config, policy: Policy, scorer: Any, stack: contextlib.ExitStack, now: str | None = None
) -> Collector:
    """The collector of all ranks, with the configured engine. `now`: the moment that prompts may tell."""
    engine = make_engine(with_room_for_turns(config), policy)
    stack.callback(engine.close)
    is_async = config.rollout.async_rollouts > 0
    side_group = new_gloo_group(policy.ranks, config.parallel.collective_timeout_s) if is_async else None
    chat = Chat(policy.tokenizer, config.model, now)
    return Collector(
        engine,
        scorer,
        chat,
        max_prompt_length=config.rollout.max_prompt_length,
        max_length=policy.max_length,
        episodes=_make_episodes(config, policy, stack),
        agents=make_agents(config, policy, chat, stack),
        rollout_func=_make_rollout_func(config, policy),
        ranks=policy.ranks,
        side_group=side_group,
    )
