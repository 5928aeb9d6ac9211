"""What files of a model ask for, within limits of memory and time: the process that limited.py starts.

It imports nothing of whetstone. Requests and answers are lines of JSON.
"""

import contextlib
import json
import signal
import sys
from datetime import datetime

from jinja2.meta import find_undeclared_variables
from tokenizers import Tokenizer
from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template


def main() -> None:
    print(flush=True)  # ready
    for line in sys.stdin:
        request = json.loads(line)
        limit_memory(request["memory"])
        signal.setitimer(signal.ITIMER_PROF, request["seconds"])  # nobody handles it: it ends the process
        answer = run(KINDS[request["kind"]], request["arguments"])
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(answer), flush=True)


def limit_memory(size: int) -> None:
    """`size`: bytes beside those that are taken now."""
    with contextlib.suppress(ImportError, ValueError, OSError):  # not everywhere: the clock remains
        import resource

        with open("/proc/self/statm") as file:
            held = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + size, resource.getrlimit(resource.RLIMIT_AS)[1]))


def run(function, arguments) -> dict[str, str]:
    """`text`, or `error` with the reason."""
    try:
        return {"text": function(**arguments)}
    except MemoryError:
        return {"error": "it takes more memory than it may"}
    except BaseException as error:  # a template can come to anything; a panic of Rust is no Exception
        lines = str(error).strip().splitlines()
        return {"error": lines[0][:200] if lines else type(error).__name__}


def render(max_text: int, now: str | None, **arguments) -> str:
    moment = datetime.fromisoformat(now) if now else datetime.now()
    _compile_jinja_template(arguments["chat_template"]).globals["strftime_now"] = moment.strftime
    [text], _ = render_jinja_template(**arguments)
    if len(text) > max_text:
        raise ValueError(f"it makes more than {max_text:,} characters")
    return text


def names(text: str) -> str:
    """The variables that a chat template reads, and `strftime_now`."""
    environment = _compile_jinja_template(text).environment
    today = environment.globals.pop("strftime_now")  # of what every template has, the one that is asked for
    names = find_undeclared_variables(environment.parse(text))
    environment.globals["strftime_now"] = today
    return " ".join(names)


def decode(path: str, text: str) -> str:
    """`text`, encoded and decoded."""
    tokenizer = Tokenizer.from_file(path)
    return tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids)[:1000]


KINDS = {"template": render, "names": names, "tokenizer": decode}
if __name__ == "__main__":
    main()
