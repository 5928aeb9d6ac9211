"""Rows with the columns of the data sets that the configurations of tests/data/trl_yamls name: small sums in
place of the hub's problems, every column that their projects' code reads.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Row = dict[str, Any]
SUMS = [(2, 3), (4, 4), (1, 9), (7, 6), (5, 8), (3, 9), (12, 5), (6, 6)]


def numina_tir(a: int, b: int) -> Row:
    """AI-MO/NuminaMath-TIR: no answer of its own, it stands in the solution's box."""
    solution = f"We add.\n```python\nprint({a} + {b})\n```\nThe sum is $\\boxed{{{a + b}}}$."
    turns = [_user(f"What is ${a} + {b}$?"), {"role": "assistant", "content": solution}]
    return {"problem": f"What is ${a} + {b}$?", "solution": solution, "messages": turns}


def open_r1_math(a: int, b: int) -> Row:
    """open-r1/OpenR1-Math-220k and -cn_k12-86k: an answer beside the solution, some of them formulas."""
    answer = f"\\frac{{{a}}}{{{b}}}" if a % 2 else str(a + b)
    return {
        "problem": f"Find ${a} {':' if a % 2 else '+'} {b}$.",
        "solution": f"It is $\\boxed{{{answer}}}$.",
        "answer": answer,
        "problem_type": "Algebra",
        "correctness_math_verify": [True, False],
        "generations": ["<think>\nWell.\n</think>\nSo.", ""],
        "messages": [_user(f"Find {a}, {b}."), {"role": "assistant", "content": "So."}],
    }


def math_lighteval(a: int, b: int) -> Row:
    return {
        "problem": f"Compute ${a} \\cdot {b}$.",
        "level": "Level 1",
        "solution": f"It is $\\boxed{{{a * b}}}$.",
        "type": "Prealgebra",
    }


def dapo(a: int, b: int) -> Row:
    return {
        "prompt": f"What is {a} times {b}?",
        "solution": str(a * b),
        "data_source": "math_dapo",
        "source_prompt": [_user(f"Solve: what is {a} times {b}?")],
        "ability": "MATH",
        "reward_model": {"ground_truth": str(a * b), "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": f"{a}-{b}"},
    }


def coding(a: int, b: int) -> Row:
    """open-r1/verifiable-coding-problems-python-10k: tests, no answer to compare with."""
    tests = [{"input": "1\n", "output": f"{a + b}\n", "type": "stdin_stdout"}]
    return {
        "source": "apps",
        "problem": f"Read x, print {a} * x + {b}.",
        "gold_standard_solution": f"print({a} * int(input()) + {b})",
        "verification_info": {"language": "python", "test_cases": tests},
    }


def codeforces(a: int, b: int) -> Row:
    return {
        "id": f"{a}/{b}",
        "language": "cpp",
        "prompt_c++17": f"Write C++17 that reads x and prints {a} * x + {b}.",
        "official_tests": [{"input": "1", "output": str(a + b)}],
    }


def countdown(a: int, b: int) -> Row:
    """Jiayi-Pan/Countdown-Tasks-3to4: no prompt."""
    return {"target": a + b - 1, "nums": [a, b, 1]}


ROWS: dict[str, Callable[[int, int], Row]] = {
    "AI-MO/NuminaMath-TIR": numina_tir,
    "DigitalLearningGmbH/MATH-lighteval": math_lighteval,
    "Jiayi-Pan/Countdown-Tasks-3to4": countdown,
    "knoveleng/open-rs": open_r1_math,
    "open-r1/DAPO-Math-17k-Processed": dapo,
    "open-r1/OpenR1-Math-220k": open_r1_math,
    "open-r1/OpenR1-Math-cn_k12-86k": open_r1_math,
    "open-r1/codeforces-verifiable": codeforces,
    "open-r1/verifiable-coding-problems-python-10k": coding,
}
# Reward functions of those projects' own, as a user would bring them.
REWARDS = """
import re


def texts(completions):
    return [completion[-1]["content"] for completion in completions]


def code(completions, verification_info, **columns):
    wanted = [info["test_cases"][0]["output"] for info in verification_info]
    return [float("print" in text and len(output) > 0) for text, output in zip(texts(completions), wanted)]


def cf_code(completions, official_tests, **columns):
    pairs = zip(texts(completions), official_tests)
    return [float("cout" in text and len(tests) == 1) for text, tests in pairs]


def code_format(completions, language, **columns):
    return [float(f"```{name}" in text) for text, name in zip(texts(completions), language)]


def cosine(completions, answer, **columns):
    return [float(truth in text) / (1 + len(text)) for text, truth in zip(texts(completions), answer)]


def soft_format(completions, **columns):
    return [0.25 * len(set(re.findall("</?(?:think|answer)>", text))) for text in texts(completions)]
"""


def write_rows(dataset: str, folder: Path) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(ROWS[dataset](a, b)) + "\n" for a, b in SUMS), encoding="utf-8")
    return path


def _user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}
