"""`whet profile`: a trace made by hand, the kinds of real kernel names, and whole small profiles."""

import pytest

from whetstone.__main__ import run
from whetstone.commands import profile
from whetstone.commands.parser import CommandParser, source_and_settings
from whetstone.commands.profile.page import Profile, advice
from whetstone.commands.profile.trace import KINDS, analyse, kind_of, read_events
from whetstone.config.load import build
from whetstone.errors import UserError
from whetstone.run.atomic_folder import free_path


def event(cat, name, begin_ms, end_ms, *, thread=1, **args):
    return {
        "ph": "X", "cat": cat, "name": name, "ts": begin_ms * 1e3, "dur": (end_ms - begin_ms) * 1e3, "pid": 1,
        "tid": thread, "args": args,
    }  # fmt: skip


MARKS = [
    event("user_annotation", "whet:rollout", 0, 100),
    event("user_annotation", "whet:update", 100, 200),
    event("user_annotation", "whet:forward", 110, 130),
    event("user_annotation", "whet:backward", 130, 180),
    event("user_annotation", "ProfilerStep", 0, 200),  # somebody else's
]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "matrix products"),
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT", "matrix products"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16>", "matrix products"),
        ("aten::addmm", "matrix products"),
        ("void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<cutlass::bfloat16_t>>", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80", "attention"),
        ("_attention_kernel", "attention"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "attention"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add>", "elementwise"),
        ("void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda>", "copies"),
        ("triton_poi_fused_mul_silu_0", "elementwise"),
        ("aten::mul", "elementwise"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("aten::_fused_adamw_", "optimizer"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("aten::_index_put_impl_", "copies"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "collective"),
        ("_draw_kernel", "drawing tokens"),
        ("aten::as_strided", "other"),
        ("autograd::engine::evaluate_function: MmBackward0", "other"),
    ],
)
def test_kinds_of_names(name, kind):
    assert kind_of(name) == kind and kind in KINDS


def test_operators_of_a_cpu_count_without_those_inside_them():
    spent = analyse(
        [
            *MARKS,
            event("cpu_op", "aten::linear", 10, 40),
            event("cpu_op", "aten::mm", 15, 35),
            event("cpu_op", "aten::mul", 50, 60),
            event("cpu_op", "aten::mm", 110, 130),
            event("cpu_op", "aten::mm", 130, 170),
            event("cpu_op", "aten::_fused_adamw_", 185, 195),
            event("cpu_op", "aten::mm", 300, 400),  # after the step
        ]
    )
    assert not spent.on_gpu
    assert spent.stages == pytest.approx({"rollout": 0.1, "update": 0.1})
    rollout, update = spent.kinds["rollout"], spent.kinds["update"]
    # mm 20 ms inside linear, whose own 10 ms are a matrix product's as well; 60 ms of 100 had no operator
    assert rollout == pytest.approx({"matrix products": 0.03, "elementwise": 0.01, "idle": 0.06})
    assert update == pytest.approx({"matrix products": 0.06, "optimizer": 0.01, "idle": 0.03})
    assert spent.parts == pytest.approx({"forward": 0.02, "backward": 0.04, "other": 0.01})
    assert spent.longest[0][:3] == ("matrix products", "aten::mm", 3)
    assert spent.longest[0][3] == pytest.approx(0.08)


def test_a_kernel_counts_where_it_was_started_not_where_it_ran():
    spent = analyse(
        [
            *MARKS,
            event("cuda_runtime", "cudaLaunchKernel", 112, 113, correlation=7),
            event("cuda_runtime", "cudaLaunchKernel", 140, 141, thread=2, correlation=8),  # autograd's thread
            event("kernel", "sm90_xmma_gemm_bf16", 131, 151, thread=99, correlation=7),
            event("kernel", "flash_bwd_kernel", 151, 161, thread=99, correlation=8),
            event(
                "gpu_memcpy", "Memcpy DtoH", 156, 176, thread=98, correlation=9
            ),  # beside it; start unknown
            event("cpu_op", "aten::mm", 112, 113),
        ]
    )
    assert spent.on_gpu
    assert spent.parts == pytest.approx({"forward": 0.02, "backward": 0.03})
    # 20 + 10 + 20 ms of work in 45 ms of time
    assert spent.kinds["update"]["idle"] == pytest.approx(0.055)
    assert spent.kinds["rollout"] == pytest.approx({"idle": 0.1})


def test_the_option_is_taken_out_of_the_arguments():
    def parse(*argv):
        args = CommandParser("profile", profile).parse(list(argv))
        return args.steps, *source_and_settings(args)

    assert parse("quickstart", "--steps", "3", "seed=1") == (3, "quickstart", ["seed=1"])
    assert parse("--steps=5") == (5, None, [])
    assert parse("seed=1") == (2, None, ["seed=1"])
    for bad in ("many", "0", "-1"):
        with pytest.raises(UserError, match="--steps"):
            parse("--steps", bad)


SMALL = ["prompts_per_step=2", "num_generations=2", "max_completion_length=16", "reward_workers=1"]


def test_a_profile_of_the_embedded_model(tmp_path, capsys):
    words = ["profile", "quickstart", f"output_dir={tmp_path}", *SMALL, "--steps", "1", "peak_tflops=1"]
    words += ["num_iterations=2", "beta=0.1", "async_rollouts=1"]
    assert run(words) == 0
    folder = tmp_path / "quickstart" / "profile"
    assert {path.name for path in folder.iterdir()} == {"profile.md", "trace.json.gz"}
    assert [path.name for path in (tmp_path / "quickstart").iterdir()] == ["profile"]  # and no run
    page = (folder / "profile.md").read_text()
    for told in (
        "| rollout |",
        "| update |",
        "| backward |",
        "| optimizer |",
        "| prepare |",
        "MFU",
        "aten::mm",
    ):
        assert told in page
    assert "% of 1 TFLOP/s" in page
    spent = analyse(read_events(folder / "trace.json.gz"), num_longest=1000)  # all operators
    assert set(spent.parts) == {"prepare", "forward", "head", "backward", "optimizer", "other"}
    # Which part takes longest depends on what else the machine does; what belongs to which does not.
    assert all(seconds > 0 for seconds in spent.parts.values())
    adamw = {name: (calls, seconds) for _, name, calls, seconds in spent.longest}["aten::_fused_adamw_"]
    assert adamw[0] == 4 and adamw[1] <= spent.parts["optimizer"]  # two iterations x with and without decay
    busy = sum(seconds for kind, seconds in spent.kinds["update"].items() if kind != "idle")
    assert sum(spent.parts.values()) == pytest.approx(busy)
    assert sum(spent.kinds["update"].values()) == pytest.approx(spent.stages["update"], rel=0.02)
    printed = capsys.readouterr().out
    assert "async_rollouts" in printed
    # In the terminal the tables are drawn, not Markdown.
    assert "backward" in printed and "|---" not in printed and "| backward |" not in printed
    assert page.count("**Try first:**") <= 1 and "what takes longest in it" not in page
    assert free_path(folder) == folder.with_name("profile-2")  # another one would stand beside it


def profile_of(seconds: dict[str, float], **settings) -> Profile:
    """Steps of one second that are spent as given; all of the update and the rollout is matrix products."""
    row = {
        f"time/{stage}": seconds.get(stage, 0.0)
        for stage in ("weight_sync", "rollout", "reward_wait", "update")
    }
    spent = analyse([*MARKS, event("cpu_op", "aten::mm", 0, 200)])
    return Profile(
        name="x", date="", model="", device="", memory_gb=None, config=build(settings), peak_flops=None,
        rows=[{**row, "step_time": 1.0}], peaks_gb=[{"rollout": 1.0, "update": 1.0}], profiled={},
        spent=spent,
    )  # fmt: skip


def test_one_line_of_advice_or_none():
    assert advice(profile_of({"rollout": 0.35, "update": 0.6})) is None  # it is spent on the products
    told = advice(profile_of({"rollout": 0.35, "update": 0.6}, gradient_checkpointing=True))
    assert told is not None and "gradient_checkpointing=false" in told
    told = advice(profile_of({"rollout": 0.2, "update": 0.1, "reward_wait": 0.7}))
    assert told is not None and "reward_workers" in told and "70 %" in told
    # Of two the one that is about more of the step.
    both = profile_of({"rollout": 0.6, "update": 0.4}, rollout_engine="hf", gradient_checkpointing=True)
    assert "rollout_engine=native" in (advice(both) or "")


def test_what_can_not_be_profiled(capsys):
    assert run(["profile", "quickstart", "--steps", "0"]) == 2
    assert "--steps" in capsys.readouterr().err
