"""What a configuration of several turns needs of a rollout server."""

from whetstone.config import Config
from whetstone.tasks.registry import environments_of


def with_room_for_turns(config: Config) -> Config:
    """For servers: where there are several turns, `max_prompt_length` bounds the first prompt alone, so a
    server takes what the model takes, unless `server_max_model_length` says otherwise.
    """
    own = config.environments
    if not (own.agent or own.rollout_func or own.tools or environments_of(config)):
        return config
    rollout = config.rollout.model_copy(update={"max_prompt_length": None})
    return config.model_copy(update={"rollout": rollout})
