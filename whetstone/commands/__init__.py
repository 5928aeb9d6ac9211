"""One module for each command: `whet X` is `commands/X`.

A module has `DESCRIPTION`, `EXAMPLES`, `add_arguments(parser)` and `run(args)`. Heavy imports are inside
`run`, so that help answers at once.
"""

COMMANDS: dict[str, str] = {  # name -> summary
    "init": "write a configuration for rows of your own; show prompts and what is paid",
    "train": "train a model",
    "sft": "fine-tune on solutions: the supervised start before RL",
    "eval": "evaluate a model or a checkpoint",
    "chat": "talk to a trained model in the terminal; before and after training side by side",
    "sample": "sample answers to prompts of a file, for scripts",
    "check": "check a configuration before the run: what can be learned, what the rewards pay",
    "import": "write a configuration of verl, TRL, axolotl and others as ours",
    "config": "list every key, or show the resolved configuration of a file",
    "tasks": "list every task, or show sample problems of one",
    "play": "play an environment in the terminal as a model would, or watch a player",
    "watch": "look at runs in the browser while they run: curves, completions, tokens",
    "report": "write the HTML report of a run",
    "export": "write the model of a run for others: merged, in another precision, as GGUF",
    "push": "upload the model of a run to the hub",
    "explain": "diagnose a run: why the loss is 0, the reward is flat, or the run collapsed",
    "plan": "memory, time and cost of a run before it starts; where it fits, and what to change",
    "doctor": "check this machine, or what a configuration needs of it; a remedy for each lack",
    "profile": "profile a few steps: a trace and a summary",
    "compare": "train a grid of variants and seeds; a table and a plot of the results",
    "serve": "serve a model as OpenAI's API does; or the rollout servers of a configuration (vLLM, SGLang)",
    "launch": "train on a Ray cluster",
    "completion": "print a completion script for bash, zsh or fish",
}
