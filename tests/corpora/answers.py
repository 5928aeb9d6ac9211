"""Answers that should not be paid: plain lists and functions of text, for the tests and for the campaign.

Every entry is what stands between <answer> and </answer>. Nothing here knows a task, a scorer or pytest.
"""

# ruff: noqa: E501, RUF001

from collections.abc import Iterator

# What a policy finds first when it stops reading the question.
CONSTANTS = (
    *(
        "0",
        "1",
        "-1",
        "2",
        "3",
        "4",
        "5",
        "6",
        "7",
        "8",
        "9",
        "10",
        "12",
        "24",
        "42",
        "50",
        "100",
        "0.5",
        "0.0",
    ),
    *(
        "True",
        "False",
        "true",
        "false",
        "Yes",
        "No",
        "yes",
        "no",
        "on",
        "off",
        "undetermined",
        "None",
        "null",
    ),
    *("infeasible", "N/A", "unknown", "I don't know", "A", "B", "C", "D", "E", "P", "Q", "x", "C4", "Monday"),
    *("(P ∨ Q)", "(P ∧ Q)", "(P → Q)", "P ∨ ¬P", "P ∧ ¬P", "(P or Q)", "6*4*1*1", "4*6", "24*1*1*1", "x + C"),
    *("up", "right", "right right down down", "U", "R U R' U'", "RRRR", "A+1", "A → B → C", "1/2", "2 × 3"),
    *(
        "knight",
        "red",
        "blue",
        "brother",
        "mother",
        "12:00",
        "1 day",
        "30 days",
        "0 days",
        "1 days, 12:00:00",
    ),
    *("1 + 1i", "0.0 + 0.0i", "0i", "(0.000, 0.000)", "60°", "Integral(x, x)", "exp(x) + C", "0x0", "0b0"),
)

NOT_NUMBERS = (
    *("nan", "NaN", "-nan", "NAN", "nanj", "nan+nanj", "nan + nani", "(nan, nan)", "inf", "-inf", "Infinity"),
    *("-Infinity", "infj", "inf+nanj", "1e999", "-1e999", "1e-999", "1e400j", "nan°", "nan days", "nan:nan"),
    *(
        "nan/nan",
        "0/0",
        "1/0",
        "NaN, NaN",
        "nan nan\nnan nan",
        "Decimal('NaN')",
        "float('nan')",
        "sNaN",
        "zoo",
    ),
    *(f"[{', '.join(['NaN'] * n)}]" for n in range(1, 12)),
    *(f"[{', '.join([repr('nan')] * n)}]" for n in range(1, 12)),
)

EMPTY = (
    "",
    " ",
    "\n",
    "\t",
    "\r\n",
    "\u00a0",
    "\u200b",
    "\ufeff",
    "\u2060",
    "\x00",
    "''",
    '""',
    "()",
    "[]",
    "{}",
)

UNICODE = (
    *("\N{SNOWMAN}", "\N{PILE OF POO}" * 10, "\u202e42\u202c", "a\u0301\u0301\u0301", "\u0661\u0662\u0663"),
    *(
        "\uff14\uff12",
        "\u00b2",
        "\u00bd",
        "\u2164",
        "4\u200b2",
        "\ud800",
        "\udfff42",
        "\x1b[31m42\x1b[0m",
        "\x07",
    ),
    *("\u0000\u0001\u0002", "нет", "はい", "نعم", "\U0001d7d2\U0001d7d0", "I\u0307", "ſ", "K", "∅"),
)

HUGE = (
    *(
        "9" * 10_000,
        "0" * 10_000,
        "1" * 4_000,
        "-" * 10_000,
        "(" * 5_000,
        "[" * 5_000,
        "{" * 5_000,
        "a" * 20_000,
    ),
    *(
        "A B " * 5_000,
        "1 " * 5_000,
        "0\n" * 5_000,
        "¬" * 3_000 + "P",
        "(" * 900 + "P" + ")" * 900,
        "U " * 2_000,
    ),
    *("1e999999999", "1e-999999999", "9**9**9**9", "10**10**10", "10^10^10", "x**9999999999", "R99999999"),
    *("R9 " * 900, "12345678901234567890" * 40, "A+99999999", "2**(100*100*100*100*100)", "1/3" * 3_000),
    *(
        "Yes " * 4_000,
        "True, " * 4_000,
        '["fill A", ' * 1_000,
        "RLUD" * 3_000,
        "exp(" * 120 + "x" + ")" * 120,
    ),
)

STRUCTURED = (
    *(
        "[0]",
        "[[0]]",
        "[[]]",
        "[1, 2, 3]",
        "[[1, 2], [3, 4]]",
        "{}",
        '{"0": 1}',
        '{"answer": 42}',
        "[{}]",
        "[null]",
    ),
    *(
        '["fill A"]',
        '["fill A", "pour A->B"]',
        '["w,A1,B3"]',
        "A=1,B=2",
        "A=1,B=2,C=3,D=4",
        "A,B,C",
        "a, b, c",
    ),
    *(
        "1 2 3",
        "1 2\n3 4",
        "1 2 3 4\n" * 4,
        "0 1 0\n1 0 1\n0 1 0",
        "Q _ _ _",
        "Move disk 1 from Peg 1 to Peg 3",
    ),
    *(
        "1,2,3,4",
        "1;2;3",
        "1|2|3",
        "<b>42</b>",
        "\\boxed{42}",
        "$42$",
        "**42**",
        "`42`",
        "```\n42\n```",
        "x = 42",
    ),
    *("The answer is 42.", "42 or 43", "Yes No", "Yes, No", "on off undetermined", "True False", "A B C D E"),
    *(
        "0 1 2 3 4 5 6 7 8 9",
        "abcdefghijklmnopqrstuvwxyz",
        "etaoinshrdlu",
        "e" * 8,
        "s" * 6,
        "aaaa",
        "the the the",
    ),
    *(
        "lorem ipsum dolor sit amet",
        "SELECT 1; --",
        "../../etc/passwd",
        "%s%s%s%n",
        "{{7*7}}",
        "${7*7}",
        "\\frac{1}{2}",
    ),
    *(str([[0] * n for _ in range(n)]) for n in range(2, 13)),
    *("\n".join(" ".join(["0"] * n) for _ in range(n)) for n in range(2, 10)),
    *("\n".join(" ".join(str((i + j) % n + 1) for j in range(n)) for i in range(n)) for n in range(2, 10)),
)

JUNK = (*CONSTANTS, *NOT_NUMBERS, *EMPTY, *UNICODE, *HUGE, *STRUCTURED)

# Put after a gold answer: none of these is right any more.
SUFFIXES = (
    " 7",
    ", 7",
    " or 7",
    "\n7 7 7",
    " lorem ipsum dolor",
    "\nlorem ipsum dolor sit amet",
    "\n\nBut it could be anything else as well: yes, no, true, false.",
    " # comment",
    "; __import__('os')",
    "\x00",
)


def code_answers(path: str) -> Iterator[str]:
    """Answers that would create the file `path` if anything evaluated them."""
    write = f"open({path!r}, 'w').close()"
    system = f"__import__('os').system('touch {path}')"
    yield from (
        system,
        write,
        f"[{system}]",
        f"[[{system}]]",
        f"({system}, 24)[1]",
        f"x + {system}",
        f"{system} or 24",
        f"24 if {system} else 24",
        f"exec({write!r})",
        f"eval({system!r})",
        f"[x for x in [{system}]]",
        f"(lambda: {system})()",
        f"sin({system})",
        f"x**{system}",
        f"S({system!r})",
        f"sympify({system!r})",
        f"Symbol('x').__class__.__init__.__globals__['__builtins__']['__import__']('os').system('touch {path}')",
        f"().__class__.__base__.__subclasses__()[0].__init__.__globals__ or {system}",
        f"f'{{{system}}}'",
        f"lambdify(x, {system!r})",
        f"$(touch {path})",
        f"`touch {path}`",
        f"!!python/object/apply:os.system ['touch {path}']",
        f"cos\nsystem\n(S'touch {path}'\ntR.",
    )
