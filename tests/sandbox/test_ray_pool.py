"""The pool on Ray: the same programs, the same results, with a real Ray on this machine (where it is
installed).
"""

import pytest

from whetstone.config import TaskSpec, load
from whetstone.errors import UserError
from whetstone.sandbox.program import Input, Limits, Program
from whetstone.tasks.code import CodeTask


def test_without_ray_the_remedy_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from whetstone.sandbox.ray_pool import RayPool

    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(UserError, match=r"pip install ray.*sandbox_pool: local"):
        RayPool()


@pytest.mark.slow
def test_programs_run_on_a_ray_cluster() -> None:
    ray = pytest.importorskip("ray")
    from whetstone.sandbox.ray_pool import RayPool

    with pytest.raises(UserError, match="'auto'"):
        RayPool(address="auto")
    pool = RayPool(address="local")
    try:
        pool.start("python")
        assert pool.statement.startswith("On the Ray cluster: Programs run in a sandbox")
        program = Program(
            language="python", source="print(int(input()) * 2)", inputs=(Input(stdin="4"), Input(stdin="5"))
        )
        assert [result.stdout for result in pool.run(program, Limits()).results] == ["8\n", "10\n"]
        hangs = Program(language="python", source="while True: pass")
        assert pool.run(hangs, Limits(seconds=0.3)).results[0].timed_out
        ray.kill(pool._actor_handle)  # a machine goes away
        assert [result.stdout for result in pool.run(program, Limits()).results] == ["8\n", "10\n"]
        config = load(None, ["sandbox_pool=ray", "ray_address=local"]).config
        task = CodeTask(
            config, "code", TaskSpec(config={"path": "problems", "language": "python"}), "train", False
        )
        problem = task.problem(0)
        assert task.score(problem, task.gold(problem) or "").parts["correct"] == 1.0
    finally:
        pool.close()
        ray.shutdown()
