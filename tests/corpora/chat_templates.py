"""Small chat templates of our own with the behavior of the families in docs/models.md, and what they write.

A template is put together from what it writes for each role. `opens` to `result` are written by hand.
"""

from dataclasses import dataclass
from typing import Any

ANSWER = "It is 5."
THOUGHT = "<think>\n2+3\n</think>\n\n<answer>5</answer>"
CHATML = "<|im_start|> <|im_end|>"
DESCRIBE = "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"


@dataclass(frozen=True, kw_only=True)
class Behavior:
    family: str
    template: str
    tokens: str = CHATML  # special ones
    eos: str = "<|im_end|>"
    opens: str = ""  # the end of the generation prompt, where it opens a thought
    answer: str = ""  # what follows the prompt where the solution is ANSWER, if not ANSWER and eos
    thought: str = ""  # the same for THOUGHT
    trl: bool = True  # whether TRL trains both on the prompt that the model sees
    call: str = ""  # `add(x=41, s="a b")` as the template writes it behind the prompt
    result: str = ""  # what follows that call where it gives 42
    describes: bool = True
    roles: tuple[str, ...] = ("system",)
    date: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "answer", self.answer or ANSWER + self.eos)
        object.__setattr__(self, "thought", self.thought or THOUGHT + self.eos)


def turns(
    user: str,
    assistant: str,
    begin: str,
    *,
    tool: str = "",
    system: str = "",
    developer: str = "",
    start: str = "",
    describe: bool = True,
) -> str:
    """A template: the text of each role, and what begins the assistant's turn."""
    parts = [
        ("user", user),
        ("assistant", assistant),
        ("tool", tool),
        ("system", system),
        ("developer", developer),
    ]
    text = start + (DESCRIBE if describe else "") + "{% for m in messages %}"
    for role, part in parts:
        if part:
            text += f"{{% if m.role == '{role}' %}}{part}{{% endif %}}"
    return text + "{% endfor %}{% if add_generation_prompt %}" + begin + "{% endif %}"


def chatml(assistant: str, begin: str = "<|im_start|>assistant\n", **parts: Any) -> str:
    parts = {"system": "<|im_start|>system\n{{ m.content }}<|im_end|>\n", **parts}
    user = "<|im_start|>user\n{{ m.content }}<|im_end|>\n"
    assistant = "<|im_start|>assistant\n" + assistant + "<|im_end|>\n"
    return turns(user, assistant, begin, **parts)


# The thought of a message, from its own field or from the content, and the rest.
SPLIT = (
    "{% set r = m.reasoning_content or '' %}{% set c = m.content or '' %}{% if '</think>' in c %}{% set r"
    " = c.split('</think>')[0].split('<think>')[-1] %}{% set c = c.split('</think>')[-1] %}{% endif %}"
)
LAST = "{% if loop.last or loop.nextitem.role == 'tool' %}"
CALLS = "{% for k in m.tool_calls or [] %}{% set f = k.function %}"
QWEN_3 = SPLIT + LAST + "<think>\n{{ r.strip() }}\n</think>\n\n{% endif %}{{ c.lstrip() }}"
JSON = (
    CALLS + "<tool_call>\n{{ {'name': f.name, 'arguments': f.arguments} | tojson }}\n</tool_call>{% endfor %}"
)
XML = (
    CALLS
    + "<tool_call>\n<function={{ f.name }}>\n{% for a, v in f.arguments.items() %}<parameter={{ a }}>\n{{"
    " v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>{%"
    " endfor %}"
)
GLM = (
    CALLS + "<tool_call>{{ f.name }}\n{% for a, v in f.arguments.items() %}<arg_key>{{ a"
    " }}</arg_key>\n<arg_value>{{ v if v is string else v | tojson }}</arg_value>\n{% endfor"
    " %}</tool_call>{% endfor %}"
)
PYTHON = (
    "[" + CALLS + "{{ f.name }}({% for a, v in f.arguments.items() %}{{ a }}={{ v | tojson }}"
    "{{ ', ' if not loop.last }}{% endfor %}){{ ', ' if not loop.last }}{% endfor %}]"
)
RESPONSE = "<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
JSON_CALL = '<tool_call>\n{"name": "add", "arguments": {"x": 41, "s": "a b"}}\n</tool_call>'
XML_CALL = (
    "<tool_call>\n<function=add>\n<parameter=x>\n41\n</parameter>\n<parameter=s>\na b\n</parameter>\n"
    "</function>\n</tool_call>"
)
GLM_CALL = (
    "<tool_call>add\n<arg_key>x</arg_key>\n<arg_value>41</arg_value>\n<arg_key>s</arg_key>\n"
    "<arg_value>a b</arg_value>\n</tool_call>"
)
CHATML_RESULT = "\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
TOOL = "<|im_start|>tool\n{{ m.content }}<|im_end|>\n"
TOOL_TURN = "\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n"
ARGUMENTS = '{"x": 41, "s": "a b"}'
HEADER = "<|start_header_id|>{}<|end_header_id|>\n\n"
DATE = "Today is {{ strftime_now('%d %B %Y') }}.\n"

LLAMA = "<|begin_of_text|> <|eot_id|> <|start_header_id|> <|end_header_id|>"
LLAMA_RESULT = HEADER.format("ipython") + "42<|eot_id|>" + HEADER.format("assistant")


def llama(assistant: str, **parts: Any) -> str:
    user, tool, system = (
        HEADER.format(role) + "{{ m.content }}<|eot_id|>" for role in ("user", "ipython", "system")
    )
    return turns(user, assistant, HEADER.format("assistant"), tool=tool, system=system, **parts)


BEHAVIORS = (
    Behavior(
        family="Qwen 2.5",
        template=chatml("{{ m.content }}" + JSON, tool=RESPONSE),
        call=JSON_CALL + "<|im_end|>",
        result=CHATML_RESULT,
    ),
    Behavior(
        family="Qwen 3",
        template=chatml(
            QWEN_3 + JSON,
            tool=RESPONSE,
        ),
        answer="<think>\n\n</think>\n\nIt is 5.<|im_end|>",
        call="<think>\n\n</think>\n\n" + JSON_CALL + "<|im_end|>",
        result=CHATML_RESULT,
    ),
    Behavior(
        family="Qwen 3.5",
        template=chatml(
            QWEN_3 + XML,
            "<|im_start|>assistant\n{{ '<think>\n\n</think>\n\n' if enable_thinking is false else"
            " '<think>\n' }}",
            tool=RESPONSE,
        ),
        opens="<think>\n",
        answer="\n</think>\n\nIt is 5.<|im_end|>",
        thought="2+3\n</think>\n\n<answer>5</answer><|im_end|>",
        call="\n</think>\n\n" + XML_CALL + "<|im_end|>",
        result=CHATML_RESULT + "<think>\n",
    ),
    Behavior(
        family="Qwen 3.5 without thoughts",
        template=chatml(
            QWEN_3 + XML,
            "<|im_start|>assistant\n<think>\n\n</think>\n\n",
            tool=RESPONSE,
        ),
        trl=False,  # it leaves out that the prompt has no thought
        call=XML_CALL + "<|im_end|>",
        result=CHATML_RESULT + "<think>\n\n</think>\n\n",
    ),
    Behavior(
        family="Nemotron 3",
        template=chatml(
            SPLIT
            + LAST
            + "{{ '<think>\n' + r.strip() + '\n</think>\n' if r else '<think></think>' }}{% endif %}"
            "{{ c.lstrip() }}" + XML,
            "<|im_start|>assistant\n<think>\n",
            tool=RESPONSE,
        ),
        opens="<think>\n",
        trl=False,
        answer="</think>It is 5.<|im_end|>",
        thought="2+3\n</think>\n<answer>5</answer><|im_end|>",
        call="</think>" + XML_CALL + "<|im_end|>",
        result=CHATML_RESULT + "<think>\n",
    ),
    Behavior(
        family="DeepSeek R1 distills",
        template=turns(
            "<U>{{ m.content }}",
            "<A>{{ (m.content or '').split('</think>')[-1] }}<E>",
            "<A><think>\n",
            system="{{ m.content }}",
            start="<B>",
            describe=False,
        ),
        tokens="<B> <U> <A> <E>",
        eos="<E>",
        opens="<think>\n",
        trl=False,
        describes=False,
        answer="\n</think>\n\nIt is 5.<E>",
        thought="2+3\n</think>\n\n<answer>5</answer><E>",
        result="<U><tool_response>\n42\n</tool_response><A><think>\n",
    ),
    Behavior(
        family="GLM 4.5",
        template=turns(
            "<|user|>\n{{ m.content }}",
            "<|assistant|>\n" + SPLIT + "<think>{{ r.strip() }}</think>\n{{ c.strip() }}" + GLM,
            "<|assistant|>",
            tool="<|observation|>\n<tool_response>\n{{ m.content }}\n</tool_response>",
            system="<|system|>\n{{ m.content }}",
        ),
        tokens="<|user|> <|assistant|> <|observation|> <|system|> <|endoftext|>",
        eos="<|endoftext|>",
        answer="\n<think></think>\nIt is 5.<|endoftext|>",
        thought="\n<think>2+3</think>\n<answer>5</answer><|endoftext|>",
        call="\n<think></think>\n" + GLM_CALL,
        result="<|observation|>\n<tool_response>\n42\n</tool_response><|assistant|>",
    ),
    Behavior(
        family="GLM 4.7",
        template=turns(
            "<|user|>{{ m.content }}",
            "<|assistant|>" + SPLIT + "{{ '<think>' + r.strip() if r }}</think>{{ c.strip() }}" + GLM,
            "<|assistant|><think>",
            tool="<|observation|><tool_response>{{ m.content }}</tool_response>",
            system="<|system|>{{ m.content }}",
        ),
        tokens="<|user|> <|assistant|> <|observation|> <|system|> <|endoftext|>",
        eos="<|endoftext|>",
        opens="<think>",
        trl=False,
        answer="</think>It is 5.<|endoftext|>",
        thought="2+3</think><answer>5</answer><|endoftext|>",
        call="</think>" + GLM_CALL,
        result="<|observation|><tool_response>42</tool_response><|assistant|><think>",
    ),
    Behavior(
        family="MiniMax M2",
        template=turns(
            "]~b]user\n{{ m.content }}[e~[\n",
            "]~b]ai\n" + SPLIT + "{% if r %}<think>\n{{ r.strip() }}\n</think>\n\n{% endif %}{{ c.lstrip() }}"
            "{% if m.tool_calls %}<minimax:tool_call>\n" + CALLS + '<invoke name="{{ f.name }}">\n'
            "{% for a, v in f.arguments.items() %}"
            '<parameter name="{{ a }}">{{ v }}</parameter>\n{% endfor %}'
            "</invoke>\n{% endfor %}</minimax:tool_call>{% endif %}[e~[\n",
            "]~b]ai\n<think>\n",
            tool="]~b]tool\n<response>{{ m.content }}</response>[e~[\n",
            system="]~b]system\n{{ m.content }}[e~[\n",
        ),
        tokens="]~b] [e~[",
        eos="[e~[",
        opens="<think>\n",
        trl=False,
        answer="\n</think>\n\nIt is 5.[e~[",
        thought="2+3\n</think>\n\n<answer>5</answer>[e~[",
        call=(
            '<minimax:tool_call>\n<invoke name="add">\n<parameter name="x">41</parameter>\n'
            '<parameter name="s">a b</parameter>\n</invoke>\n</minimax:tool_call>[e~['
        ),
        result="\n]~b]tool\n<response>42</response>[e~[\n]~b]ai\n<think>\n",
    ),
    Behavior(
        family="Llama 3.1 to 3.3",
        template=llama(
            HEADER.format("assistant")
            + "{% if not m.tool_calls %}{{ m.content }}{% endif %}"
            + CALLS
            + '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}{% endfor %}<|eot_id|>',
            start=DATE,
        ),
        tokens=LLAMA,
        eos="<|eot_id|>",
        call='{"name": "add", "parameters": ' + ARGUMENTS + "}<|eot_id|>",
        result=LLAMA_RESULT,
        date=True,
    ),
    Behavior(
        family="Llama 3.2 and 4, Python",
        template=llama(
            HEADER.format("assistant")
            + "{{ m.content }}{% if m.tool_calls %}"
            + PYTHON
            + "{% endif %}<|eot_id|>",
        ),
        tokens=LLAMA,
        eos="<|eot_id|>",
        call='[add(x=41, s="a b")]<|eot_id|>',
        result=LLAMA_RESULT,
    ),
    Behavior(
        family="LFM2.5",
        template=chatml(
            "{{ m.content }}{% if m.tool_calls %}<|tool_call_start|>"
            + PYTHON
            + "<|tool_call_end|>{% endif %}",
            tool=TOOL,
        ),
        tokens=CHATML + " <|tool_call_start|> <|tool_call_end|>",
        call='<|tool_call_start|>[add(x=41, s="a b")]<|tool_call_end|><|im_end|>',
        result=TOOL_TURN,
    ),
    Behavior(
        family="LFM2, Granite 3.3: no calls in the history",
        template=chatml("{{ m.content }}", tool=TOOL, start=DATE),
        result=TOOL_TURN,
        date=True,
    ),
    Behavior(
        family="Mistral Small 3.2",
        template=turns(
            "[INST]{{ m.content }}[/INST]",
            "{{ m.content }}"
            + CALLS
            + "[TOOL_CALLS]{{ f.name }}[CALL_ID]{{ k.id }}[ARGS]{{ f.arguments | tojson }}"
            "{% endfor %}</s>",
            "",
            tool="[TOOL_RESULTS]{{ m.tool_call_id }}[TOOL_CONTENT]{{ m.content }}[/TOOL_RESULTS]",
            system="[SYSTEM_PROMPT]{{ m.content }}[/SYSTEM_PROMPT]",
        ),
        tokens=(
            "<s> </s> [INST] [/INST] [TOOL_CALLS] [CALL_ID] [ARGS] [TOOL_RESULTS] [TOOL_CONTENT]"
            " [/TOOL_RESULTS]"
        ),
        eos="</s>",
        call="[TOOL_CALLS]add[CALL_ID]whetstone[ARGS]" + ARGUMENTS + "</s>",
        result="[TOOL_RESULTS]whetstone[TOOL_CONTENT]42[/TOOL_RESULTS]",
    ),
    Behavior(
        family="gpt-oss",
        template=turns(
            "<|start|>user<|message|>{{ m.content }}<|end|>",
            "{% if m.reasoning_content %}<|start|>assistant<|channel|>analysis<|message|>"
            "{{ m.reasoning_content }}<|end|>{% endif %}"
            + CALLS
            + "<|start|>assistant to=functions.{{ f.name }}<|channel|>commentary json<|message|>{{"
            " f.arguments | tojson }}<|call|>{% endfor %}{% if m.content"
            " %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}{{ '<|return|>' if"
            " loop.last else '<|end|>' }}{% endif %}",
            "<|start|>assistant",
            tool=(
                "<|start|>functions.{{ m.name }} to=assistant<|channel|>commentary<|message|>{{ m.content"
                " }}<|end|>"
            ),
            system="<|start|>system<|message|>{{ m.content }}<|end|>",
            developer="<|start|>developer<|message|>{{ m.content }}<|end|>",
        ),
        tokens="<|start|> <|end|> <|message|> <|channel|> <|call|> <|return|>",
        eos="<|return|>",
        trl=False,  # it leaves a thought within the answer
        answer="<|channel|>final<|message|>It is 5.<|return|>",
        thought=(
            "<|channel|>analysis<|message|>2+3<|end|><|start|>assistant<|channel|>final<|message|>"
            "<answer>5</answer><|return|>"
        ),
        call=" to=functions.add<|channel|>commentary json<|message|>" + ARGUMENTS + "<|call|>",
        result=(
            "<|start|>functions.add to=assistant<|channel|>commentary<|message|>42<|end|><|start|>assistant"
        ),
        roles=("system", "developer"),
    ),
    Behavior(
        family="DeepSeek V3.1",
        template=turns(
            "<U>{{ m.content }}",
            "<A></think>{{ (m.content or '').split('</think>')[-1] }}{% if m.tool_calls"
            " %}<\uff5ctool\u2581calls\u2581begin\uff5c>"
            + CALLS
            + "<\uff5ctool\u2581call\u2581begin\uff5c>{{ f.name }}<\uff5ctool\u2581sep\uff5c>{{"
            " f.arguments | tojson }}<\uff5ctool\u2581call\u2581end\uff5c>{% endfor"
            " %}<\uff5ctool\u2581calls\u2581end\uff5c>{% endif %}<E>",
            "{{ '' if messages[-1].role == 'tool' else '<A></think>' }}",
            tool="<R>{{ m.content }}</R>",
            system="{{ m.content }}",
            start="<B>",
        ),
        tokens=(
            "<B> <U> <A> <E> <R> </R> <\uff5ctool\u2581calls\u2581begin\uff5c>"
            " <\uff5ctool\u2581call\u2581begin\uff5c> <\uff5ctool\u2581sep\uff5c>"
            " <\uff5ctool\u2581call\u2581end\uff5c> <\uff5ctool\u2581calls\u2581end\uff5c>"
        ),
        eos="<E>",
        trl=False,  # it leaves the thought out
        call="<\uff5ctool\u2581calls\u2581begin\uff5c><\uff5ctool\u2581call\u2581begin\uff5c>add<\uff5ctool\u2581sep\uff5c>"
        + ARGUMENTS
        + "<\uff5ctool\u2581call\u2581end\uff5c><\uff5ctool\u2581calls\u2581end\uff5c><E>",
        result="<R>42</R>",
    ),
    Behavior(
        family="Kimi K2",
        template=chatml(
            "{{ m.content }}{% if m.tool_calls %}<|tool_calls_section_begin|>"
            + CALLS
            + "<|tool_call_begin|>functions.{{ f.name }}:{{ loop.index0 }}<|tool_call_argument_begin|>{{"
            " f.arguments | tojson }}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>{%"
            " endif %}",
            tool=TOOL,
        ),
        tokens=CHATML + " <|tool_calls_section_begin|> <|tool_call_begin|> <|tool_call_argument_begin|> "
        "<|tool_call_end|> <|tool_calls_section_end|>",
        call="<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
        + ARGUMENTS
        + "<|tool_call_end|><|tool_calls_section_end|><|im_end|>",
        result=TOOL_TURN,
    ),
    Behavior(
        family="Gemma 4",
        template=turns(
            "<|turn>user\n{{ m.content }}<turn|>\n",
            "<|turn>model\n{% if m.tool_calls and m.reasoning_content %}<|channel>thought\n"
            "{{ m.reasoning_content }}\n<channel|>{% endif %}"
            "{{ m.content.split('<channel|>')[-1] }}{% if m.tool_calls %}"
            + CALLS
            + "<|tool_call>call:{{ f.name }}{{ '{' }}{% for a, v in f.arguments.items() %}{{ a }}:{{"
            " '<|\"|>' + v + '<|\"|>' if v is string else v }}{{ ',' if not loop.last }}{% endfor %}{{"
            " '}' }}<tool_call|>{% endfor %}<|tool_response>{% else %}<turn|>\n{% endif %}",
            "{{ '' if messages[-1].role == 'tool' else '<|turn>model\n' }}",
            tool='response:{{ m.name }}{value:<|"|>{{ m.content }}<|"|>}<tool_response|>',
            system="<|turn>system\n{{ m.content }}<turn|>\n",
        ),
        tokens='<bos> <|turn> <turn|> <|tool_call> <tool_call|> <|tool_response> <tool_response|> <|"|>'
        " <|channel> <channel|>",
        eos="<turn|>",
        trl=False,
        thought="<|channel>thought\n2+3\n<channel|><answer>5</answer><turn|>",
        call='<|tool_call>call:add{x:41,s:<|"|>a b<|"|>}<tool_call|><|tool_response>',
        result='response:add{value:<|"|>42<|"|>}<tool_response|>',
    ),
    Behavior(
        family="Gemma 1 to 3",
        template=turns(
            "<start_of_turn>user\n{{ m.content }}<end_of_turn>\n",
            "<start_of_turn>model\n{{ m.content }}<end_of_turn>\n",
            "<start_of_turn>model\n",
            describe=False,
        ),
        tokens="<bos> <start_of_turn> <end_of_turn>",
        eos="<end_of_turn>",
        describes=False,
        roles=(),
        result="\n<start_of_turn>user\n<tool_response>\n42\n</tool_response><end_of_turn>\n<start_of_turn>model\n",
    ),
    Behavior(
        family="Command A with thoughts",
        template=turns(
            "<|T|><|USER|>{{ m.content }}<|END|>",
            "<|T|><|BOT|>{% if m.reasoning_content %}<|START_THINKING|>{{ m.reasoning_content"
            " }}<|END_THINKING|>{% endif %}{% if m.tool_calls %}<|START_ACTION|>["
            + CALLS
            + '{"tool_call_id": "0", "tool_name": "{{ f.name }}", "parameters": {{ f.arguments | tojson'
            " }}}{% endfor %}]<|END_ACTION|>{% else %}<|START_TEXT|>{{ m.content }}<|END_TEXT|>{% endif"
            " %}<|END|>",
            "<|T|><|BOT|><|START_THINKING|>",
            tool="<|T|><|SYSTEM|>{{ m.content }}<|END|>",
            system="<|T|><|SYSTEM|>{{ m.content }}<|END|>",
        ),
        tokens=(
            "<|T|> <|USER|> <|BOT|> <|SYSTEM|> <|END|> <|START_THINKING|> <|END_THINKING|>"
            " <|START_ACTION|> <|END_ACTION|> <|START_TEXT|> <|END_TEXT|>"
        ),
        eos="<|END|>",
        opens="<|START_THINKING|>",
        trl=False,
        answer="<|END_THINKING|><|START_TEXT|>It is 5.<|END_TEXT|><|END|>",
        thought="2+3<|END_THINKING|><|START_TEXT|><answer>5</answer><|END_TEXT|><|END|>",
        call='<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "add", "parameters": '
        + ARGUMENTS
        + "}]<|END_ACTION|><|END|>",
        result="<|T|><|SYSTEM|>42<|END|><|T|><|BOT|><|START_THINKING|>",
    ),
    Behavior(
        family="Phi 3.5: text behind the end of a turn",
        template=turns(
            "<|user|>\n{{ m.content }}<|end|>\n",
            "<|assistant|>\n{{ m.content }}<|end|>\n",
            "<|assistant|>\n",
            system="<|system|>\n{{ m.content }}<|end|>\n",
            describe=False,
        )
        + "{% if not add_generation_prompt %}<|endoftext|>{% endif %}",
        tokens="<|user|> <|assistant|> <|end|> <|system|> <|endoftext|>",
        eos="<|endoftext|>",
        describes=False,
        answer="It is 5.<|end|>",
        thought=THOUGHT + "<|end|>",
        result="\n<|user|>\n<tool_response>\n42\n</tool_response><|end|>\n<|assistant|>\n",
    ),
    Behavior(
        family="Apertus",
        template=turns(
            "<|user_start|>{{ m.content }}<|user_end|>",
            "<|assistant_start|>{{ m.content }}{% if m.tool_calls %}<|tools_prefix|>["
            + CALLS
            + '{"{{ f.name }}": {{ f.arguments | tojson }}}{% endfor %}]<|tools_suffix|>{% else'
            " %}<|assistant_end|>{% endif %}",
            "{{ '' if messages[-1].role == 'tool' else '<|assistant_start|>' }}",
            tool="[{{ m.content }}]",
            system="<|system_start|>{{ m.content }}<|system_end|>",
        ),
        tokens=(
            "<|user_start|> <|user_end|> <|assistant_start|> <|assistant_end|> <|tools_prefix|>"
            " <|tools_suffix|> <|system_start|> <|system_end|>"
        ),
        eos="<|assistant_end|>",
        call='<|tools_prefix|>[{"add": ' + ARGUMENTS + "}]<|tools_suffix|>",
        result="[42]",
    ),
)
