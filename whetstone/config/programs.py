"""The section of code tasks: the reward of a program, and the sandbox that it runs in."""

from typing import Literal

from pydantic import Field

from whetstone.config.base import MAX_COUNT, Name, Section


class ProgramsConfig(Section):
    """Code tasks: what is paid for a program that runs, and how it is kept from doing harm."""

    use_reasoning_format: bool = False
    """Ask for `<reasoning>...</reasoning><answer>...</answer>`; false: the program directly."""
    base_reward_weight: float = Field(default=1.0, ge=0, le=MAX_COUNT)
    """Reward for the fraction of passed tests (all or nothing with test_reward: all)."""
    perfect_reward_weight: float = Field(default=1.0, ge=0, le=MAX_COUNT)
    """What is paid on top for passing every test."""
    test_reward: Literal["partial", "all"] = "partial"
    """`partial`: base_reward_weight x fraction of tests passed; `all`: only if all of them pass."""
    max_tests_per_problem: int = Field(default=3, ge=0, le=MAX_COUNT)
    """Tests for a training answer, chosen once per problem by dataset_seed; 0: all, as in evaluation."""
    sandbox_pool: Literal["local", "ray"] = "local"
    """Where programs run: on this machine, one at a time for each of reward_workers, or on a Ray cluster."""
    ray_address: Name = "auto"
    """Ray cluster of sandbox_pool: ray; `auto` finds a running one, `local` starts one here."""
    sandbox_isolation: Literal["auto", "namespaces", "filters", "limits"] = "auto"
    """`auto`: the strongest that works, at least `filters`; `limits`: files and network are not protected."""
    sandbox_time_limit_s: float = Field(default=2.0, gt=0, le=3_600)
    """For one test of a problem that names no time limit of its own."""
    sandbox_memory_mb: int = Field(default=512, ge=32, le=1_048_576)
    """For all processes of a program together."""
    sandbox_output_kb: int = Field(default=256, ge=1, le=1_048_576)
    """What a program may print in one test; more ends it."""
