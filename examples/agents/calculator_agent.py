"""An agent with a loop of its own: OpenAI's client and a calculator as a tool.

whet train examples/agents/calculator.yaml
"""

import json
from fractions import Fraction
from typing import Any

from openai import OpenAI

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
            "required": ["a", "b"],
        },
    },
}


def solve(base_url: str, problem: dict[str, Any]) -> str | None:
    """Ask until the policy answers without a call; what it says last is scored."""
    client = OpenAI(base_url=base_url, api_key="none", max_retries=0)
    messages: list[Any] = list(problem["messages"])
    for _ in range(4):
        answer = client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
        said = answer.choices[0].message
        messages.append(said.model_dump(exclude_none=True))
        if not said.tool_calls:
            return said.content
        for call in said.tool_calls:
            result = add(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return None


def add(arguments: str) -> str:
    """The policy writes the arguments: whatever is wrong with them is its answer."""
    try:
        values = json.loads(arguments)
        return str(Fraction(str(values["a"])) + Fraction(str(values["b"])))
    except (ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        return f"Error: {error!r}"
