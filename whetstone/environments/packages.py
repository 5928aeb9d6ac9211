"""Environments of other packages, by name: `gem:game:GuessTheNumber-v0-easy`, `textarena:GuessTheNumber-v0`,
`skyrl:gsm8k_multi_turn`. Each adapter has Gymnasium's shape; none of the packages is needed to import this.

Behind the prefix stands a name of the package's registry, or a class of your own that is written for it
(`textarena:my_game.py:MyGame`). What such an environment does runs with the user's rights; one that is known
to run programs of the model outside our sandbox wants `run_programs: true`.
"""

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from whetstone.config.plugins import describe_error, load_object
from whetstone.environments.games.base import SOLVED, Step
from whetstone.errors import UserError, did_you_mean

SEED_RANGE = 1 << 32  # numpy's global generator takes no larger seeds


class PackageEnvironment:
    """An environment of a package; subclasses know its interface."""

    prefix: ClassVar[str]
    module: ClassVar[str]
    distribution: ClassVar[str]  # what pip installs
    runs_programs: ClassVar[
        tuple[str, ...]
    ] = ()  # how names begin whose environments execute what a model wrote

    @classmethod
    def find(cls, name: str) -> Callable[..., Any]:
        """Imports the package; the constructor of its environment `name`."""
        try:
            importlib.import_module(cls.module)
            registry: Mapping[str, Any] = cls.registry()
        except Exception as error:
            raise UserError(
                f"The environment {cls.prefix}:{name} needs the package {cls.distribution}, which can't be "
                f"imported ({describe_error(error)}): pip install {cls.distribution}."
            ) from error
        if name in registry:
            return functools.partial(cls, name, functools.partial(cls.make, name))
        if ":" in name and not cls.is_registry_name(name):
            return functools.partial(cls, name, load_object(name, "datasets"))
        raise UserError(
            f"The package {cls.distribution} has no environment '{name}'"
            f"{did_you_mean(name, list(registry)) or '.'} A class of your own is "
            f"{cls.prefix}:my_env.py:MyEnv."
        )

    @classmethod
    def registry(cls) -> Mapping[str, Any]:
        raise NotImplementedError

    @classmethod
    def is_registry_name(cls, name: str) -> bool:
        return False

    @classmethod
    def make(cls, name: str, **settings: Any) -> Any:
        return importlib.import_module(cls.module).make(name, **settings)

    def __init__(
        self, name: str, construct: Callable[..., Any], run_programs: bool = False, **settings: Any
    ) -> None:
        if name.startswith(self.runs_programs) and not run_programs:
            raise UserError(
                f"{self.prefix}:{name} runs programs that the model wrote, outside the sandbox: set "
                "run_programs: true among its settings where they can do no harm."
            )
        self.name, self.construct, self.settings = name, construct, settings


class GemEnvironment(PackageEnvironment):
    """GEM: Gymnasium's shape already. `prefix` and `suffix` of its info stand around an observation."""

    prefix, module, distribution = "gem", "gem", "gem-llm"
    runs_programs = ("code:", "terminal:")

    def __init__(self, name: str, construct: Callable[..., Any], **settings: Any) -> None:
        super().__init__(name, construct, **settings)
        self.environment = construct(**self.settings)

    @classmethod
    def registry(cls) -> Mapping[str, Any]:
        return importlib.import_module("gem.envs.registration").ENV_REGISTRY

    @classmethod
    def is_registry_name(cls, name: str) -> bool:
        return ".py:" not in name and name.split(":")[0] in {known.split(":")[0] for known in cls.registry()}

    def reset(self, seed: int) -> str:
        return _around(*self.environment.reset(seed=seed % SEED_RANGE))

    def step(self, text: str) -> Step:
        observation, reward, terminated, truncated, info = self.environment.step(text)
        if not (terminated or truncated):
            return _around(observation, info), reward, False, False, {}
        correct = bool(info.get("correct", float(reward) >= SOLVED))
        return str(observation), reward, terminated, truncated, {"correct": correct}


def _around(observation: Any, info: Mapping[str, Any]) -> str:
    """As GEM's own ObservationWrapper writes an observation."""
    text = str(observation)
    if text and not text.endswith("\n"):
        text += "\n"
    return f"{info.get('prefix', '')}{text}{info.get('suffix', '')}"


class TextArenaEnvironment(PackageEnvironment):
    """TextArena's games of one player. Wrappers that repeat the history in each observation are left out:
    the conversation has it. The reward comes at the end.
    """

    prefix, module, distribution = "textarena", "textarena", "textarena"

    def __init__(self, name: str, construct: Callable[..., Any], **settings: Any) -> None:
        super().__init__(name, construct, **settings)
        self.environment = _without_observation_wrappers(construct(**self.settings))

    @classmethod
    def registry(cls) -> Mapping[str, Any]:
        return importlib.import_module("textarena.envs.registration").ENV_REGISTRY

    def reset(self, seed: int) -> str:
        try:
            self.environment.reset(num_players=1, seed=seed % SEED_RANGE)
        except AssertionError as error:
            if "number of players" not in str(error):
                raise
            raise UserError(
                f"textarena:{self.name} is a game of several players: only games of one player can be "
                "trained on."
            ) from error
        return self._new_messages()

    def step(self, text: str) -> Step:
        done, _ = self.environment.step(action=text)
        observation = self._new_messages()
        if not done:
            return observation, 0.0, False, False, {}
        rewards, info = self.environment.close()
        reward, reason = float(rewards[0]), info[0].get("reason") or ""
        return f"{observation}\n{reason}".strip(), reward, True, False, {"correct": reward >= SOLVED}

    def _new_messages(self) -> str:
        """What the game has said since; the policy knows what it said itself."""
        types = importlib.import_module("textarena").ObservationType
        _, messages = self.environment.get_observation()
        return "\n".join(text for _, text, kind in messages if kind != types.PLAYER_ACTION).strip()


def _without_observation_wrappers(environment: Any) -> Any:
    core = importlib.import_module("textarena.core")
    if not isinstance(environment, core.Wrapper):
        return environment
    environment.env = _without_observation_wrappers(environment.env)
    return environment.env if isinstance(environment, core.ObservationWrapper) else environment


class SkyRLEnvironment(PackageEnvironment):
    """SkyRL-gym: an environment for each row, whose columns are its `extras`; settings are `env_config`."""

    prefix, module, distribution = "skyrl", "skyrl_gym", "skyrl-gym"
    runs_programs = ("lcb", "rlm", "searchcode", "text2sql")

    @classmethod
    def registry(cls) -> Mapping[str, Any]:
        return importlib.import_module("skyrl_gym.envs.registration").registry

    def reset(self, prompt: Any = (), seed: int = 0, **row: Any) -> list[dict[str, str]]:
        omegaconf = importlib.import_module("omegaconf")  # comes with skyrl-gym
        settings = dict(self.settings)
        extras = {**row, **({"max_turns": settings.pop("max_turns")} if "max_turns" in settings else {})}
        self.environment = self.construct(env_config=omegaconf.OmegaConf.create(settings), extras=extras)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        messages, _ = self.environment.init(messages)
        return [{"role": str(m["role"]), "content": str(m["content"])} for m in messages]

    def step(self, text: str) -> Step:
        result = self.environment.step(text)
        observation = "\n".join(str(message["content"]) for message in result["observations"])
        reward, done = float(result["reward"]), bool(result["done"])
        return observation, reward, done, False, {"correct": reward >= SOLVED} if done else {}


PACKAGES: Mapping[str, type[PackageEnvironment]] = {
    kind.prefix: kind for kind in (GemEnvironment, TextArenaEnvironment, SkyRLEnvironment)
}


def is_package_name(spec: str) -> bool:
    return spec.partition(":")[0] in PACKAGES


def package_factory(spec: str) -> Callable[..., Any]:
    """The constructor of the environment that `gem:...`, `textarena:...` or `skyrl:...` names."""
    prefix, _, name = spec.partition(":")
    return PACKAGES[prefix].find(name)
