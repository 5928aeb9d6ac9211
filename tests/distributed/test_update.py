"""Several ranks against one process: the same losses, gradients and weights, however the weights are spread.

Processes are started once for all tests. The first of them also computes what a process alone would, and
tells the others.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import make_policy
from tests.distributed.launch import run_on
from tests.support.ranks import CPU, difference, my_batches
from tests.support.update import make_samples, sequence_logprobs, train_on, updater_for
from whetstone.config import build
from whetstone.config.sections import ModelConfig, ParallelConfig
from whetstone.engines import make_engine
from whetstone.engines.base import Request, SamplingParams
from whetstone.errors import UserError
from whetstone.model.logprobs import UNSHARDED
from whetstone.model.lora import add_lora
from whetstone.model.policy import Policy
from whetstone.model.reference import Reference
from whetstone.model.sharded import model_writer, shard_policy
from whetstone.parallel import fsdp, mesh
from whetstone.parallel.collectives import broadcast_from_main
from whetstone.parallel.mesh import SINGLE, Ranks
from whetstone.parallel.tensor import ShardedLogits, check_plan
from whetstone.run.checkpoint import Checkpoint, CheckpointData, Saver
from whetstone.run.checkpoint_search import verify
from whetstone.run.setup import restore
from whetstone.update.packing import Batch, pack

Case = tuple[str, dict[str, Any], str, dict[str, Any]]
GRPO = {"advantage": "group"}
CRITIC = {"advantage": "gae", "critic_learning_rate": 1e-3}
# What is shared, and what is trained with it; every entry is compared with a process alone.
CASES: dict[int, list[Case]] = {
    2: [
        ("FSDP 2", {}, "llama", GRPO),
        ("FSDP 2, critic", {}, "qwen2", CRITIC),
        ("TP 2", {"tp_size": 2}, "qwen3", GRPO),
        ("TP 2, critic", {"tp_size": 2}, "smollm", CRITIC),
        ("TP 2, sequence parallel, whole KL", {"tp_size": 2, "sequence_parallel": True}, "mistral",
         {"beta": 0.1, "kl_estimator": "full", "entropy_coef": 0.01}),
    ],
    4: [
        ("FSDP 2 x TP 2, packed states", {"tp_size": 2}, "llama", {**GRPO, "optim": "adamw_8bit"}),
        ("FSDP 2 x 2 replicas", {"ddp_size": 2}, "qwen2", GRPO),
        ("TP 2 x 2 replicas, sequence parallel, critic",
         {"ddp_size": 2, "tp_size": 2, "sequence_parallel": True}, "smollm", CRITIC),
    ],
}  # fmt: skip
# Further pairs of the same, for who has a minute more. The steps that are resumed have a critic of its own on
# four ranks.
MORE: dict[int, list[Case]] = {
    2: [
        ("FSDP 2, critic of its own, checkpointing", {"checkpointing": True}, "smollm",
         {**CRITIC, "critic": "model"}),
        ("FSDP 2, moving reference, gspo", {}, "llama",
         {"beta": 0.1, "kl_reference": "moving", "loss_type": "gspo"}),
        ("TP 2, LoRA", {"tp_size": 2, "lora": True}, "llama", {"beta": 0.1}),
        ("FSDP 2, LoRA, critic of its own", {"lora": True}, "llama", {**CRITIC, "critic": "model"}),
        ("TP 2, LoRA, critic of its own", {"tp_size": 2, "lora": True}, "llama",
         {**CRITIC, "critic": "model"}),
        ("FSDP 2, LoRA, entropy quantile", {"lora": True}, "qwen3", {"top_entropy_quantile": 0.5}),
    ],
    4: [
        ("FSDP 2 x TP 2, critic of its own", {"tp_size": 2}, "qwen3", {**CRITIC, "critic": "model"}),
    ],
}  # fmt: skip


def plain_policy(architecture: str, lora: bool) -> Policy:
    plain = make_policy(architecture)
    if not lora:
        return plain
    model = add_lora(plain.model, ModelConfig(use_peft=True, lora_r=4), None)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():  # the second factor begins as zeros, which would hide the first one's gradient
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 10)
    return Policy(model, plain.tokenizer, plain.device)


class Trained:
    """Steps of a policy on some batches: the rows, the first gradient, the weights at the end.

    The third is the first with a reference that has moved.
    """

    def __init__(self, policy: Policy, batches: list[Batch], flat: dict[str, Any]):
        wants_reference = flat.get("beta", 0) > 0
        moving = flat.get("kl_reference") == "moving"
        reference = Reference.from_policy(policy, policy, moving=moving) if wants_reference else None
        # A floor under Adam's denominator: gradients that are only rounding must not become steps of full
        # size.
        settings = {"ref_model_sync_steps": 2, "max_steps": 3, "adam_epsilon": 1e-6}
        updater = updater_for(policy, reference, **settings, **flat)
        parameters = list(policy.parameters())
        if updater.critic is not None:
            parameters += updater.critic.parameters()
        self.gradient: list[torch.Tensor] = []
        move = updater.optimizer.step

        def catch(norm: float) -> None:
            if not self.gradient:
                self.gradient = [fsdp.full(p.grad).clone() for p in parameters if p.grad is not None]
            move(norm)

        updater.optimizer.step = catch
        self.rows = [train_on(updater, [batches]) for _ in range(3 if moving else 2)]
        self.weights = [fsdp.full(parameter.detach()).clone() for parameter in parameters]


def compare(cases: list[Case]) -> list[tuple[str, float, float, float]]:
    """In every process: for each case the largest difference of gradients, rows and final weights."""
    found = []
    for name, given, architecture, flat in cases:
        settings = dict(given)
        lora, checkpointing = settings.pop("lora", False), settings.pop("checkpointing", False)
        parallel = ParallelConfig(**settings)
        ranks = mesh.make_ranks(parallel, "cpu")
        samples = make_samples(make_policy(architecture))
        alone, source = None, None
        if ranks.is_main:
            alone = Trained(plain_policy(architecture, lora), pack(samples, 30), flat)
            source = plain_policy(architecture, lora)
        alone = broadcast_from_main(ranks, alone)
        assert alone is not None
        model_config = ModelConfig(gradient_checkpointing=checkpointing)
        policy = shard_policy(source, model_config, parallel, ranks, CPU)
        together = Trained(policy, my_batches(samples, ranks), flat)
        gradient = max(difference(a, b) for a, b in zip(alone.gradient, together.gradient, strict=True))
        rows = max(abs(a[key] - b[key]) for a, b in zip(alone.rows, together.rows, strict=True) for key in a)
        weights = max(difference(a, b) for a, b in zip(alone.weights, together.weights, strict=True))
        found.append((name, gradient, rows, weights))
    return found


def steps_with_checkpoint(folder: Path, parallel: ParallelConfig, ranks: Ranks, *, resume: bool) -> list[Any]:
    """Two steps with a critic and a moving reference, a checkpoint, three more steps; or only those three."""
    flat = {
        "advantage": "gae",
        "critic": "model",
        "beta": 0.1,
        "kl_reference": "moving",
        "ref_model_sync_steps": 1,
    }
    flat |= {
        "max_steps": 5,
        "adam_epsilon": 1e-6,
        "lr_scheduler_type": "linear",
        "critic_learning_rate": 1e-3,
        # Too small for 8 bits here: several ranks have float32 states that are parts of a larger memory, as
        # on a GPU; one process resumes them as torch's.
        "optim": "adamw_torch" if ranks.mesh is None else "adamw_8bit",
    }
    samples = make_samples(make_policy("smollm"))
    if ranks.mesh is None:
        policy = make_policy("smollm")
    else:
        source = make_policy("smollm") if ranks.is_main else None
        policy = shard_policy(source, ModelConfig(), parallel, ranks, CPU)
    updater = updater_for(policy, Reference.from_policy(policy, policy, moving=True), **flat)
    batches = my_batches(samples, ranks)
    if resume:
        found = Checkpoint(folder=folder / "checkpoint-2", step=2)
        assert verify(found.folder, ranks)[0] is None  # each rank hashes its share
        restore(updater, found, found.scalars())
    else:
        for _ in range(2):
            train_on(updater, [batches])
        numbers = {"updater": updater.state_scalars(), "seconds": 1.0}
        write = model_writer(policy)
        contents = CheckpointData(step=2, write_model=write, tensors=updater.state_tensors(), scalars=numbers)
        saver = Saver(folder, None, ranks)
        saver.save(contents)  # goes on in the background while the next step moves the weights
    for _ in range(3):
        train_on(updater, [batches])
    if not resume:
        saver.finish()
    critic = updater.critic
    assert critic is not None
    # As numpy: torch would hand tensors over through memory that ends with the process.
    return [fsdp.full(p.detach()).clone().numpy() for p in (*policy.parameters(), *critic.parameters())]


def sampled(parallel: ParallelConfig, architecture: str) -> tuple[list[Any], list[Any], float]:
    """What the native engine samples from weights that are spread, beside a process alone, and how far its
    logprobs are from those of the trainer, after the weights have moved.
    """
    ranks = mesh.make_ranks(parallel, "cpu")
    samples = make_samples(make_policy(architecture))
    source = make_policy(architecture) if ranks.is_main else None
    policy = shard_policy(source, ModelConfig(), parallel, ranks, CPU)
    plain = make_policy(architecture)
    engines = []
    for one, batches in ((plain, pack(samples, 30)), (policy, my_batches(samples, ranks))):
        engine = make_engine(build({}), one)
        train_on(updater_for(one, adam_epsilon=1e-6), [batches])
        engine.update_weights(1)
        engines.append(engine)
    requests = [Request(prompt_ids=s.rollout.prompt_ids, seeds=(1, 2)) for s in samples[2:4]]
    drawn = [
        sorted(e.generate(requests, SamplingParams(max_tokens=6)), key=lambda d: (d.request, d.sample))
        for e in engines
    ]
    tokens = [[one.completion.token_ids for one in some] for some in drawn]
    worst = 0.0
    for one in drawn[1]:
        prompt = requests[one.request].prompt_ids
        own = sequence_logprobs(plain, [*prompt, *one.completion.token_ids], len(prompt))
        worst = max(worst, (own - torch.tensor(one.completion.logprobs)).abs().max().item())
    return tokens[0], tokens[1], worst


def sliced_vocabulary() -> float:
    """The vocabulary split between two ranks, 97 tokens unevenly, against whole float64 logits: values and
    gradients.
    """
    ranks = mesh.make_ranks(ParallelConfig(tp_size=2), "cpu")
    generator = torch.Generator().manual_seed(5)
    logits = 30 * torch.randn(6, 97, generator=generator, dtype=torch.float64)
    reference = torch.randn(6, 97, generator=generator, dtype=torch.float64).log_softmax(-1)
    targets = torch.randint(0, 97, (6,), generator=generator)
    mine = slice(49 * ranks.tp_rank, 49 * ranks.tp_rank + 49)
    whole, part = logits.clone().requires_grad_(), logits[:, mine].clone().requires_grad_()
    vocabulary = ShardedLogits(ranks.tp, 97)
    results = []
    for leaf, found in (
        (whole, UNSHARDED.statistics(whole, targets, reference)),
        (part, vocabulary.statistics(part, targets, reference[:, mine])),
    ):
        weights = torch.arange(1.0, 7.0, dtype=torch.float64)
        sum((weights * (i + 1) * one).sum() for i, one in enumerate(found)).backward()  # type: ignore[union-attr, arg-type]
        results.append((*found, leaf.grad))
    (*values, gradient), (*parts, slice_gradient) = results
    assert torch.equal(vocabulary.gather(part.detach()), logits)
    errors = [(a - b).abs().max().item() for a, b in zip(values, parts, strict=True)]
    errors.append((gradient[:, mine] - slice_gradient).abs().max().item())
    difference = UNSHARDED.logprobs(logits)[:, mine] - vocabulary.logprobs(logits[:, mine])
    errors.append(difference.abs().max().item())
    return max(errors)


def refusals() -> list[str]:
    """What can't be done, said in a sentence."""
    said = []
    for architecture, given in (("phi3", {"tp_size": 2}), ("llama", {"tp_size": 2, "heads": 1})):
        settings: dict[str, Any] = dict(given)
        changes = {"num_key_value_heads": settings.pop("heads")} if "heads" in settings else {}
        ranks = mesh.make_ranks(ParallelConfig(**settings), "cpu")
        source = make_policy(architecture, **changes) if ranks.is_main else None
        try:
            shard_policy(source, ModelConfig(), ParallelConfig(**settings), ranks, CPU)
        except UserError as error:
            said.append(str(error))
    return said


def on_two(folder: Path) -> dict[str, Any]:
    with mesh.start(ParallelConfig(), "cpu") as ranks:
        return {
            "compared": compare(CASES[2]),
            "whole": steps_with_checkpoint(folder, ParallelConfig(), ranks, resume=False),
            "sampled": [sampled(ParallelConfig(), "llama"), sampled(ParallelConfig(tp_size=2), "qwen3")],
            "sliced": sliced_vocabulary(),
            "refused": refusals(),
        }


def on_four(folder: Path) -> dict[str, Any]:
    parallel = ParallelConfig(tp_size=2)
    with mesh.start(parallel, "cpu") as ranks:
        return {
            "compared": compare(CASES[4]),
            "resumed": steps_with_checkpoint(folder, parallel, ranks, resume=True),
        }


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[int, list[dict[str, Any]]]:
    """Everything that two and four ranks have to show, each in one launch: starting processes takes
    longest.
    """
    folder = tmp_path_factory.mktemp("run")
    found: dict[int, Any] = {2: run_on(2, on_two, folder), 4: run_on(4, on_four, folder)}
    found[1] = [{"resumed": steps_with_checkpoint(folder, ParallelConfig(), SINGLE, resume=True)}]
    return found


def compare_more(num_ranks: int) -> dict[str, Any]:
    with mesh.start(ParallelConfig(), "cpu"):
        return {"compared": compare(MORE[num_ranks])}


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", MORE)
def test_further_ways_equal_one_process_too(num_ranks):
    assert_equal_to_one_process(run_on(num_ranks, compare_more, num_ranks))


@pytest.mark.parametrize("num_ranks", CASES)
def test_losses_gradients_and_weights_equal_those_of_one_process(results, num_ranks):
    assert_equal_to_one_process(results[num_ranks])


def assert_equal_to_one_process(found: list[dict[str, Any]]) -> None:
    for name, gradient, rows, weights in found[0]["compared"]:
        assert gradient < 1e-5, f"{name}: gradients differ by {gradient:.1e}"
        assert rows < 1e-4, f"{name}: losses and other metrics differ by {rows:.1e}"
        assert weights < 1e-4, f"{name}: weights at the end differ by {weights:.1e}"
    for other in found[1:]:  # every rank has seen the same
        assert other["compared"] == found[0]["compared"]


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_a_checkpoint_of_two_ranks_goes_on_elsewhere(results, num_ranks):
    for one, other in zip(results[2][0]["whole"], results[num_ranks][0]["resumed"], strict=True):
        assert difference(torch.tensor(one), torch.tensor(other)) < 1e-4


def test_the_native_engine_samples_the_same_from_spread_weights(results):
    for expected, tokens, error in results[2][0]["sampled"]:
        assert tokens == expected and any(len(one) == 6 for one in tokens)
        assert error < 1e-4


def test_a_sliced_vocabulary_gives_the_same_statistics_in_float64(results):
    assert max(result["sliced"] for result in results[2]) < 1e-10


def test_what_cannot_be_split_is_refused(results):
    for result in results[2]:  # on every rank, so that none waits
        fused, heads = result["refused"]
        assert "phi3" in fused and "tp_size" in fused
        assert "num_key_value_heads" in heads


def test_a_tied_embedding_in_a_plan_is_split_all_the_same():
    """transformers 5.17 adds it to the plan of models whose output is tied to it, such as pebble."""
    config = make_policy("llama").lm.config
    config.base_model_tp_plan = {**config.base_model_tp_plan, "embed_tokens": "embedding_rowwise"}
    check_plan(config, 2, lora_dropout=0.0)
