"""Render a chat template once, within limits of memory and time: the process that templates.py starts.

Runs alone (`python -I`), so it imports nothing of whetstone. JSON from stdin to stdout.
"""

import contextlib
import json
import sys
from datetime import datetime

MAX_MEMORY = 1 << 30
MAX_CPU_S = 3
MAX_TEXT = 1_000_000  # characters


def main() -> None:
    limit()
    request = json.load(sys.stdin)
    answers = [
        render(request["template"], messages, request["tokens"]) for messages in request["conversations"]
    ]
    json.dump(answers, sys.stdout)


def limit() -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):  # not everywhere: the parent's clock remains
        import resource

        resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_S, MAX_CPU_S))
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))


def render(template: str, messages: list[dict[str, str]], tokens: dict[str, str]) -> dict[str, str]:
    """`text`, or `error` with the reason."""
    try:
        pieces, size = [], 0
        compiled = environment().from_string(template)
        for piece in compiled.generate(messages=messages, add_generation_prompt=True, **tokens):
            pieces.append(piece)
            size += len(piece)
            if size > MAX_TEXT:
                return {"error": f"it makes more than {MAX_TEXT:,} characters of a short question"}
        return {"text": "".join(pieces)}
    except MemoryError:
        return {"error": "it takes more memory than a prompt may"}
    except Exception as error:  # a template can come to anything
        lines = str(error).strip().splitlines()
        return {"error": lines[0][:200] if lines else type(error).__name__}


def environment():  # jinja2 is imported under the limits
    """As transformers has it: immutable, sandboxed, with the same names."""
    import jinja2
    import jinja2.nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks what an assistant said; here it stands for its contents."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_contents"), [], [], body).set_lineno(line)

        def _contents(self, caller):
            return caller()

    def raise_exception(message: str) -> None:
        raise jinja2.exceptions.TemplateError(message)

    def tojson(value, **options):
        return json.dumps(value, **{"ensure_ascii": False, **options})

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


if __name__ == "__main__":
    main()
