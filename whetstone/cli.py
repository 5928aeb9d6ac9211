"""argv -> verb -> one call. No logic: a verb imports what it needs when it is called; help answers at once.

Exit codes: 0 done, 2 something the user can put right (one sentence, no traceback), 130 stopped by Ctrl-C.
Any other exception is a bug: its traceback is printed, with where to report it, and the exit code is 1.
"""

import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from whetstone import __version__
from whetstone.commands.arguments import DEFAULT_RECIPE, split_words, take_number, take_text
from whetstone.errors import UserError
from whetstone.terminal.environment import check_proc, check_working_directory, sentence_of
from whetstone.terminal.streams import open_missing, steady_streams
from whetstone.terminal.text import escape_controls

BUG = (
    'whet: this is a bug. CONTRIBUTING.md, "Reporting a bug", says how to report it; send the lines above, '
    "and config.yaml, training.log and run.json of the run folder."
)


@dataclass(frozen=True, kw_only=True)
class Verb:
    """A word after `whet`: what it does, how it is written, what it calls."""

    summary: str
    usage: str
    help: str
    call: Callable[[list[str]], None]
    prints_only: bool = True  # what it prints is all that it does


def main(argv: Sequence[str] | None = None) -> None:
    """The `whet` command; ends the process with its exit code."""
    try:
        code = run(sys.argv[1:] if argv is None else list(argv))
    except Exception:
        traceback.print_exc()
        print(BUG, file=sys.stderr)
        code = 1
    sys.exit(code)


def run(argv: list[str], verbs: "dict[str, Verb] | None" = None) -> int:
    """Do what `argv` says and return the exit code."""
    open_missing()
    verbs = VERBS if verbs is None else verbs
    lost: list[Exception] = []
    with steady_streams(lost.append):
        code = _run(argv, verbs)
    # `whet config | head`: the reader has seen enough. `whet train | head`: the run is what counts.
    verb = verbs.get(argv[0]) if argv else None
    if code or not lost or isinstance(lost[0], BrokenPipeError) or not (verb is None or verb.prints_only):
        return code
    return _complain(f"The output could not be written ({lost[0]}): send it somewhere else.")


def _run(argv: list[str], verbs: "dict[str, Verb]") -> int:
    try:
        check_working_directory()
        _dispatch(argv, verbs)
    except UserError as error:
        return _complain(str(error))
    except KeyboardInterrupt:
        if _speaks():
            print("whet: stopped.", file=sys.stderr)
        return 130
    except Exception as error:
        sentence = sentence_of(error)
        if sentence is None:
            raise
        return _complain(sentence)
    return 0


def _dispatch(argv: list[str], verbs: "dict[str, Verb]") -> None:
    if not argv or argv[0] in ("-h", "--help", "help"):
        name = argv[1] if len(argv) > 1 and argv[0] == "help" else None
        print(_overview(verbs) if name is None else _help_of(_verb(name, verbs)))
        return
    if argv[0] in ("-V", "--version"):
        print(f"whetstone {__version__}")
        return
    verb = _verb(argv[0], verbs)
    if any(word in ("-h", "--help") for word in argv[1:]):
        print(_help_of(verb))
        return
    _check_platform(sys.platform)
    verb.call(argv[1:])


def _check_platform(platform: str) -> None:
    """What is missing elsewhere (fork, resource limits) would end in a traceback at some import."""
    if platform not in ("linux", "darwin"):
        raise UserError(
            f"This system ({platform}) is not supported: use Linux, or under Windows the Linux of WSL 2."
        )


def _verb(name: str, verbs: "dict[str, Verb]") -> "Verb":
    if name in verbs:
        return verbs[name]
    from whetstone.config import nearest

    raise UserError(
        f"There is no command '{name}'{nearest(name, verbs) or ':'} `whet --help` lists {', '.join(verbs)}."
    )


def first_line(verb: str, source: str = "") -> None:
    """Said before anything heavy is imported, which takes seconds."""
    if _speaks():
        print(escape_controls(f"whetstone {__version__}: {verb} {source}".rstrip()), flush=True)


@contextlib.contextmanager
def long_command(verb: str, source: str) -> Iterator[None]:
    """For a verb that takes minutes: its first line at once, then a line that shows where it is."""
    first_line(verb, source)
    check_proc()
    from whetstone.terminal.display import display

    with display(speaks=_speaks()):
        yield


def _train(words: list[str]) -> None:
    source, overrides = split_words(words)
    with long_command("train", source or DEFAULT_RECIPE):
        from whetstone.config import load
        from whetstone.engines.packages import check_packages
        from whetstone.terminal.display import say
        from whetstone.terminal.stages import stage

        loaded = load(source or DEFAULT_RECIPE, overrides)
        check_packages(loaded.config)
        if _speaks() and not loaded.config.evaluation.eval_only:
            say(f"run folder: {os.path.join(loaded.config.run.output_dir, loaded.config.run.run_name or '')}")
        with stage("loading torch"):
            from whetstone.train import train
        train(loaded)


def _eval(words: list[str]) -> None:
    source, overrides = split_words(words)
    checkpoint = next((word for word in overrides if word.startswith("checkpoint_path=")), DEFAULT_RECIPE)
    with long_command("eval", source or checkpoint):
        from whetstone.commands.listing import recipe_of_checkpoint
        from whetstone.config import load
        from whetstone.engines.packages import check_packages
        from whetstone.terminal.stages import stage

        source = source or recipe_of_checkpoint(overrides) or DEFAULT_RECIPE
        loaded = load(source, [*overrides, "eval_only=true"])
        check_packages(loaded.config)
        with stage("loading torch"):
            from whetstone.train import evaluate_only
        evaluate_only(loaded)


def _config(words: list[str]) -> None:
    from whetstone.commands.listing import print_config

    changed_only = "--changed" in words
    source, overrides = split_words([word for word in words if word != "--changed"])
    print_config(source, overrides, changed_only=changed_only)


def _tasks(words: list[str]) -> None:
    from whetstone.commands.listing import print_task, print_tasks

    words, answer = take_text(words, "--answer")
    name, overrides = split_words(words)
    if name is None:
        if overrides or answer is not None:
            raise UserError(
                "Name the task first: `whet tasks chain_sum key=value`; `whet tasks` lists them all."
            )
        print_tasks()
    else:
        print_task(name, overrides, answer)


def _report(words: list[str]) -> None:
    if len(words) != 1:
        raise UserError("Name one run: `whet report outputs/quickstart`.")
    from whetstone.report import write_report

    print(f"The report is in {write_report(words[0])}: open it in a browser.")


def _explain(words: list[str]) -> None:
    if len(words) != 1:
        raise UserError("Name one run: `whet explain outputs/quickstart`.")
    from whetstone.diagnosis.explain import explain

    explain(words[0])


def _doctor(words: list[str]) -> None:
    if words:
        raise UserError("`whet doctor` takes no words: it looks at this machine.")
    first_line("doctor")
    from whetstone.commands.doctor import doctor

    doctor()


def _profile(words: list[str]) -> None:
    words, num_timed = take_number(words, "--steps", 2)
    source, overrides = split_words(words)
    with long_command("profile", source or DEFAULT_RECIPE):
        from whetstone.config import load
        from whetstone.engines.packages import check_packages

        loaded = load(source or DEFAULT_RECIPE, overrides)
        check_packages(loaded.config)
        from whetstone.commands.profile import profile

        profile(loaded, num_timed=num_timed)


def _compare(words: list[str]) -> None:
    first_line("compare", words[0] if words and "=" not in words[0] else "")
    from whetstone.commands.compare.grid import compare

    compare(words)


def _serve(words: list[str]) -> None:
    source, overrides = split_words(words)
    first_line("serve", source or DEFAULT_RECIPE)
    from whetstone.config import load

    loaded = load(source or DEFAULT_RECIPE, overrides)
    from whetstone.commands.serve import serve

    serve(loaded)


def _launch(words: list[str]) -> None:
    from whetstone.commands.launch import launch

    code = launch(words)
    if code:
        sys.exit(code)


def _speaks() -> bool:
    """Of several ranks that end for the same reason one says so."""
    return os.environ.get("RANK", "0") == "0"


def _complain(sentence: str) -> int:
    if _speaks():
        print(f"whet: {escape_controls(sentence)}", file=sys.stderr)
    return 2


def _overview(verbs: "dict[str, Verb]") -> str:
    lines = [f"  {name:<8}{verb.summary}" for name, verb in verbs.items()]
    return "\n".join(
        [
            "whet trains language models by reinforcement learning on problems whose answers can be checked.",
            "",
            *lines,
            "",
            "whet VERB --help says more, with examples. whet --version tells the version.",
        ]
    )


def _help_of(verb: "Verb") -> str:
    return f"usage: {verb.usage}\n\n{verb.help}"


VERBS = {
    "train": Verb(
        summary="train a model",
        usage="whet train [CONFIG] [key=value ...]",
        help="""\
Trains as CONFIG says: a YAML file or the name of a shipped recipe (default: quickstart); --config CONFIG
says the same. key=value words win over the file; `whet config` lists the keys. A dotted key reaches into a
mapping: datasets.math.config.answer_column=solution.

  whet train
  whet train quickstart max_steps=10 learning_rate=3e-4
  whet train config/multi_tasks.yaml use_peft=true report_to=wandb
  whet train config/grpo.yaml auto_resume=true          go on where the run stopped""",
        call=_train,
        prints_only=False,
    ),
    "eval": Verb(
        summary="measure a model or a checkpoint",
        usage="whet eval [CONFIG] [key=value ...]",
        help="""\
Measures checkpoint_path (default: the model itself) on the fixed evaluation problems of CONFIG.
Without CONFIG, the configuration of the run that checkpoint_path lies in, or else quickstart.

  whet eval checkpoint_path=outputs/quickstart/final_model
  whet eval config/multi_tasks.yaml checkpoint_path=outputs/multi_tasks/checkpoint-100
  whet eval quickstart eval_samples_per_problem=8 eval_temperature=0.7""",
        call=_eval,
        prints_only=False,
    ),
    "config": Verb(
        summary="every key and its meaning; or what a file comes to",
        usage="whet config [CONFIG] [key=value ...] [--changed]",
        help="""\
Without CONFIG: every key with its default, its bounds and what it means.
With CONFIG or key=value: the value of every key and where it came from, what was understood under another
name, and the plan of the run. --changed leaves out the keys at their default.

  whet config
  whet config | grep eval_
  whet config config/math.yaml --changed
  whet config quickstart prompts_per_step=32""",
        call=_config,
    ),
    "tasks": Verb(
        summary="every task; or sample problems of one",
        usage="whet tasks [NAME] [key=value ...] [--answer TEXT]",
        help="""\
Without NAME: every task, a line each.
With NAME: sample problems, the prompt as the model sees it, the gold answer and its score.
key=value sets the task's own settings, or any key of `whet config`, such as model_name_or_path.
--answer scores a text of your own on these problems: what is found in it, and what it is paid.

  whet tasks
  whet tasks chain_sum
  whet tasks chain_sum max_terms=3 max_digits=2
  whet tasks syllogism developer_prompt=DeepSeekZero model_name_or_path=smollm2-135m
  whet tasks math path=data/train.json question_column=question answer_column=ground_truth
  whet tasks math path=data/train.json --answer 'The answer is \\boxed{42}'""",
        call=_tasks,
    ),
    "report": Verb(
        summary="write the report of a run",
        usage="whet report RUN",
        help="""\
Writes report.html into the folder of a run, finished or not: curves, tasks, examples before and after.

  whet report outputs/quickstart""",
        call=_report,
    ),
    "explain": Verb(
        summary="why the loss is 0, the reward does not rise, or the run collapsed",
        usage="whet explain RUN",
        help="""\
Says in plain words what the metrics of a run show, finished or not, gravest first: the trouble, the numbers
it rests on, and the setting to change. Reads files only.

  whet explain outputs/quickstart""",
        call=_explain,
    ),
    "doctor": Verb(
        summary="what this machine has, and how to get what it lacks",
        usage="whet doctor",
        help="""\
Looks at the machine: devices, torch, engines, the languages that programs may be written in, how safely they
can be run here, and the optional packages. For what is missing it says how to get it, q among them.

  whet doctor""",
        call=_doctor,
    ),
    "profile": Verb(
        summary="where a step's time goes: a trace and a page",
        usage="whet profile [CONFIG] [key=value ...] [--steps N]",
        help="""\
Runs a few real steps of CONFIG: one to warm up, N timed (default: 2), one under torch's profiler. No
evaluation and no checkpoint; the run folder gets a folder `profile` and is otherwise left alone:

  profile.md      seconds, memory and tokens/s by stage; what they were spent on; what to try
  profile.png     the same as bars
  trace.json.gz   every operator and kernel, for ui.perfetto.dev

  whet profile quickstart
  whet profile config/grpo.yaml micro_batch_tokens=32768 gradient_checkpointing=false
  whet profile config/math.yaml --steps 4""",
        call=_profile,
        prints_only=False,
    ),
    "compare": Verb(
        summary="train a grid of variants and seeds; a table and a plot of them",
        usage="whet compare CONFIG key=a,b ... [key=value ...] [--jobs N] | whet compare --table FOLDER",
        help="""\
Trains CONFIG once for every combination of the keys that are given several values, separated by commas; other
key=value words hold for all. Lists in brackets and quoted text are one value. Results are means over seed.
variant="NAME: key=value key=value; NAME: ..." gives each variant settings of its own.
Goes on where it stopped: what is done is not run again. --jobs runs so many at once.
Writes table.md, results.json and compare.png into output_dir/compare (run_name=NAME: output_dir/NAME);
--table makes them anew from such a folder without running anything.

  whet compare quickstart loss_type=grpo,dapo,dr_grpo seed=1,2,3
  whet compare quickstart learning_rate=1e-4,2e-4 beta=0,0.01 seed=1,2 max_steps=20 --jobs 2
  whet compare quickstart variant="gspo: loss_type=gspo epsilon=3e-4; cispo: loss_type=cispo" seed=1,2,3
  whet compare --table outputs/compare""",
        call=_compare,
        prints_only=False,
    ),
    "serve": Verb(
        summary="start the rollout servers of a configuration (vLLM, SGLang)",
        usage="whet serve [CONFIG] [key=value ...]",
        help="""\
Starts one server for each entry of server_devices (or one), with the flags that training needs, waits until
they answer, starts a dead one again, and stops them at Ctrl-C. docs/servers.md tells more.

  whet serve config/grpo.yaml rollout_engine=vllm server_devices=[6,7]
  whet serve config/grpo.yaml rollout_engine=vllm vllm_server_host=0.0.0.0 vllm_server_port=9000
  whet train config/grpo.yaml rollout_engine=vllm rollout_servers=http://127.0.0.1:8000,http://127.0.0.1:8001""",
        call=_serve,
        prints_only=False,
    ),
    "launch": Verb(
        summary="train on a Ray cluster",
        usage="whet launch --ray --ranks N [--servers M] [flags] train [CONFIG] [key=value ...]",
        help="""\
Places N ranks and M rollout servers in one placement group of the Ray cluster at RAY_ADDRESS (or on this
machine) and trains on them. Everything after `train` is as for whet train. A run that fails goes on from its
last checkpoint; a server that dies is started again, and the run goes on.
Without Ray: torchrun --nproc_per_node=8 -m whetstone train CONFIG (docs/scale.md).

  --ranks N                                    processes that train
  --gpus-per-rank 1    --cpus-per-rank 1       0 GPUs: on CPUs; parts of a CPU are possible
  --servers M                                  of rollout_engine vllm or sglang; default 1, or those that
                                               rollout_servers names; 0: the first rank starts one beside it
  --gpus-per-server K  --cpus-per-server 1     default of K: vllm_tensor_parallel_size; 0 if ranks have none
  --max-restarts 0     --wait 300              starts after a failure; seconds to wait for room

  whet launch --ray --ranks 16 --max-restarts 3 train config/grpo.yaml tp_size=2
  whet launch --ray --ranks 6 --servers 2 train config/grpo.yaml rollout_engine=vllm
  whet launch --ray --ranks 2 --gpus-per-rank 0 train quickstart          on CPUs""",
        call=_launch,
        prints_only=False,
    ),
}
