"""What files of a model ask for, within limits of memory and time: the process that limited.py starts.

It imports nothing of whetstone. Requests and answers are lines of JSON.
"""

import contextlib
import json
import signal
import sys

from tokenizers import Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template


def main() -> None:
    print(flush=True)  # ready
    for line in sys.stdin:
        request = json.loads(line)
        limit_memory(request["memory"])
        signal.setitimer(signal.ITIMER_PROF, request["seconds"])  # nobody handles it: it ends the process
        answer = run(render if request["kind"] == "template" else decode, request["arguments"])
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


def render(max_text: int, **arguments) -> str:
    [text], _ = render_jinja_template(**arguments)
    if len(text) > max_text:
        raise ValueError(f"it makes more than {max_text:,} characters")
    return text


def decode(path: str, text: str) -> str:
    """`text`, encoded and decoded."""
    tokenizer = Tokenizer.from_file(path)
    return tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids)[:1000]


if __name__ == "__main__":
    main()
