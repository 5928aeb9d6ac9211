"""Train a configuration of whetstone by TRL's own GRPOTrainer, in the root of a clone:

python -m benchmarks.trl [CONFIG] [key=value ...]

Problems, their order, prompt tokens, rewards, evaluation and run folder are those of `whet train`; TRL 1.16
samples and updates. The folder has no __init__.py: with one, `import trl` in the scripts beside it would find
this folder instead of TRL.
"""

import sys
from collections.abc import Sequence

from benchmarks.trl.run import train_with_trl
from whetstone.commands.parser import DEFAULT_RECIPE
from whetstone.config import load
from whetstone.errors import UserError
from whetstone.terminal.display import long_command
from whetstone.terminal.text import escape_controls


def run(argv: Sequence[str]) -> int:
    """Exit codes are those of `whet`: 0 success, 2 wrong input, 130 Ctrl-C."""
    has_source = bool(argv) and "=" not in argv[0] and not argv[0].startswith("-")
    source, settings = (argv[0], argv[1:]) if has_source else (DEFAULT_RECIPE, argv)
    try:
        with long_command():
            train_with_trl(load(source, settings))
    except UserError as error:
        print(f"benchmarks.trl: {escape_controls(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
