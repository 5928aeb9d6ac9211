"""Checkpoints and run folders: whole or not there, found again, never overwritten silently."""

import copy
import json
import os
import pickle
import re
import threading

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.conftest import make_policy
from tests.support.checkpoints import config_in, opened, save
from whetstone import train
from whetstone.config import load
from whetstone.errors import UserError
from whetstone.model.sharded import model_writer
from whetstone.run import checkpoint
from whetstone.run.checkpoint_search import find_checkpoint


def newest(run):
    found = find_checkpoint(run, resume_from=None, auto_resume=True).checkpoint
    assert found is not None
    return found


def test_the_newest_whole_checkpoint_is_found_and_old_ones_go(tmp_path):
    for step in (2, 10, 4):
        save(tmp_path, step)
    assert newest(tmp_path).step == 10
    save(tmp_path, 12, keep=2)
    assert sorted(found.step for found in checkpoint.complete_checkpoints(tmp_path)) == [10, 12]
    into = {"optimizer": {"moment": torch.zeros(2)}}
    newest(tmp_path).load_tensors(into)
    assert into["optimizer"]["moment"].tolist() == [12.0, 12.0]
    assert newest(tmp_path).scalars() == {"seconds": 1.5, "steps_done": 12}


def test_weights_come_back_bit_for_bit(tmp_path):
    folder = save(tmp_path, 3)
    again = AutoModelForCausalLM.from_pretrained(folder)
    for name, tensor in make_policy(seed=3).model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name


def test_a_half_written_or_damaged_checkpoint_is_passed_over(tmp_path):
    save(tmp_path, 1)
    damaged = save(tmp_path, 2)
    (damaged / "state" / "__0_0.distcp").write_bytes(b"cut off")
    killed = save(tmp_path, 3)
    (killed / "whetstone.json").unlink()
    assert newest(tmp_path).step == 1
    with pytest.raises(UserError, match=r"state/__0_0\.distcp.*checkpoint-1"):
        find_checkpoint(tmp_path, resume_from="checkpoint-2", auto_resume=False)
    with pytest.raises(UserError, match="checkpoint-77"):
        find_checkpoint(tmp_path, resume_from="checkpoint-77", auto_resume=False)


def test_failed_checkpoint_is_reported_at_the_next_save(tmp_path):
    def fail(folder):
        raise OSError(28, "No space left on device", str(folder))

    saver = checkpoint.Saver(tmp_path, None)
    contents = checkpoint.CheckpointData(
        step=1, write_model=fail, tensors={"a": {"b": torch.zeros(1)}}, scalars={}
    )
    saver.save(contents)
    with pytest.raises(OSError, match="No space left"):
        saver.finish()
    saver.finish()  # said once
    assert checkpoint.complete_checkpoints(tmp_path) == []


def test_resume_true_needs_a_checkpoint_and_auto_resume_does_not(tmp_path):
    assert find_checkpoint(tmp_path, resume_from=None, auto_resume=True).checkpoint is None
    with pytest.raises(UserError, match=re.escape(str(tmp_path))):
        find_checkpoint(tmp_path, resume_from=True, auto_resume=False)


def test_a_folder_of_another_run_is_refused_or_moved_aside(tmp_path):
    opened(config_in(tmp_path))
    (tmp_path / "r" / "metrics.jsonl").write_text("precious")
    with pytest.raises(UserError, match="auto_resume=true"):
        opened(config_in(tmp_path))
    _, found, notes = opened(config_in(tmp_path, overwrite_output_dir=True))
    assert found is None and "moved to" in notes[0]
    (aside,) = [folder for folder in tmp_path.iterdir() if folder.name != "r"]
    assert (aside / "metrics.jsonl").read_text() == "precious"


def test_a_run_that_was_refused_at_its_start_is_in_nobodys_way(tmp_path):
    opened(config_in(tmp_path))
    opened(config_in(tmp_path))  # only settings there: nothing to lose


def test_going_on_says_what_changed_and_refuses_another_model(tmp_path):
    folder, _, _ = opened(config_in(tmp_path))
    save(folder, 5)
    _, found, notes = opened(config_in(tmp_path, auto_resume=True, learning_rate=1e-4, max_steps=7))
    assert found is not None and found.step == 5
    assert any("learning_rate" in note and "0.0001" in note for note in notes)
    assert any("max_steps" in note and "7" in note for note in notes)  # linear
    fixed = config_in(tmp_path, auto_resume=True, max_steps=9, lr_scheduler_type="constant")
    assert not any("max_steps" in note for note in opened(fixed)[2])
    with pytest.raises(UserError, match=r"model_name_or_path.*other"):
        opened(config_in(tmp_path, auto_resume=True, model_name_or_path="other"))


def test_the_mark_names_every_file(tmp_path):
    mark = json.loads((save(tmp_path, 1) / "whetstone.json").read_text())
    assert {
        "state/__0_0.distcp",
        "state/.metadata",
        "tokenizer.json",
        "config.json",
        "model.safetensors",
    } <= set(mark["files"])


def test_damaged_checkpoint_is_named_and_skipped(tmp_path):
    folder, _, _ = opened(config_in(tmp_path))
    for step in (1, 2, 3):
        save(folder, step)
    path = folder / "checkpoint-3" / "state" / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    _, found, notes = opened(config_in(tmp_path, auto_resume=True))
    assert found is not None and found.step == 2
    assert any("checkpoint-3" in note and "state/__0_0.distcp" in note for note in notes), notes
    assert (folder / "checkpoint-3.damaged" / "state" / "__0_0.distcp").read_bytes() == bytes(data)
    # One that was named is not replaced by another.
    with pytest.raises(UserError, match="checkpoint-9"):
        opened(config_in(tmp_path, resume_from_checkpoint="checkpoint-9"))


def test_newer_checkpoints_of_another_attempt_are_moved_aside(tmp_path):
    folder, _, _ = opened(config_in(tmp_path))
    for step in (1, 2, 3):
        save(folder, step)
    _, found, notes = opened(config_in(tmp_path, resume_from_checkpoint="checkpoint-1"))
    assert found is not None and found.step == 1
    assert sorted(path.name for path in folder.glob("checkpoint-*")) == [
        "checkpoint-1",
        "checkpoint-2.aside",
        "checkpoint-3.aside",
    ]
    assert sum("newer than the checkpoint to resume from" in note for note in notes) == 2


def test_kill_while_a_checkpoint_is_deleted_leaves_nothing(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 2)
    half_deleted = tmp_path / ".checkpoint-1.deleting"
    (tmp_path / "checkpoint-1").rename(half_deleted)
    (half_deleted / "whetstone.json").unlink()
    save(tmp_path, 3)  # killed before checkpoint-2 went
    saver = checkpoint.Saver(tmp_path, 1, saved=3)
    assert saver.has(3) and not saver.has(2)
    saver.remove_old()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-3"]


def test_what_is_not_ours_is_not_replaced(tmp_path):
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1" / "precious.txt").write_text("precious")
    save(tmp_path, 1)
    assert newest(tmp_path).step == 1
    assert (tmp_path / "checkpoint-1.aside" / "precious.txt").read_text() == "precious"
    save(tmp_path, 1)  # ours, as it was written: replaced
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-1", "checkpoint-1.aside"]


def test_a_write_that_fails_in_torch_is_said(tmp_path, monkeypatch):
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    def fail(self, *arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(FileSystemWriter, "write_data", fail)
    saver = checkpoint.Saver(tmp_path, None)
    saver.save(
        checkpoint.CheckpointData(
            step=1, write_model=lambda folder: None, tensors={"a": {"b": torch.zeros(1)}}, scalars={}
        )
    )
    with pytest.raises(RuntimeError, match="No space left"):
        saver.finish()
    assert not saver.has(1) and checkpoint.complete_checkpoints(tmp_path) == []


def test_a_resumed_schedule_has_the_rate_of_now():
    from whetstone.config.update import UpdateConfig
    from whetstone.optimizer import Optimizer

    def optimizer(rate, num_steps):
        room = UpdateConfig(learning_rate=rate, lr_scheduler_type="linear")
        return Optimizer([torch.nn.Parameter(torch.zeros(2))], room, num_steps=num_steps, warmup_steps=0)

    first = optimizer(1.0, 10)
    for _ in range(4):
        first.finish()
    for rate, num_steps, expected in ((1.0, 10, 0.6), (0.5, 10, 0.3), (1.0, 20, 0.8)):
        again = optimizer(rate, num_steps)
        again.load_state_scalars(first.schedule.state_dict())
        assert again.learning_rate == pytest.approx(expected, rel=1e-12)
        again.finish()
        assert again.learning_rate == pytest.approx(expected - rate / num_steps, rel=1e-12)


def mutate(state):
    """Change everything in a state that can be changed in place."""
    if isinstance(state, torch.Tensor):
        with torch.no_grad():
            state.fill_(7)
    elif isinstance(state, dict):
        for value in state.values():
            mutate(value)
        for key in [key for key, value in state.items() if isinstance(value, int | float | str | None)]:
            state[key] = 7
    elif isinstance(state, list | tuple):
        for value in state:
            mutate(value)
        if isinstance(state, list):
            state.append(True)


def test_a_checkpoint_is_a_copy_taken_at_its_step(tmp_path, monkeypatch):
    words = [
        "datasets={chain_sum: {curriculum: {start: 1, top: 3, window: 1000}}}", "max_steps=3",
        "save_steps=50",
        "prompts_per_step=2", "num_generations=2", "max_completion_length=8", "eval_num_samples=0",
        "preflight=off", "reward_workers=1", "advantage=gae", "beta=0.1", "kl_reference=moving",
        "async_rollouts=1", "model_name_or_path=pebble", f"output_dir={tmp_path}", "run_name=r",
    ]  # fmt: skip
    is_changed = threading.Event()

    def writer_that_waits(policy):
        write = model_writer(policy)
        return lambda folder: is_changed.wait() and write(folder)

    with train.open_training(load(None, words)) as (run, step, started_at):
        step = next(train.loop(run, step, started_at)).step
        tensors, scalars = run.updater.state_tensors(), run.updater.state_scalars()
        source, weights = run.source.state(), run.policy.lm.state_dict()
        expected = copy.deepcopy((tensors, {"updater": scalars, "source": source}, weights))
        monkeypatch.setattr(train, "model_writer", writer_that_waits)
        train.save(run, step, 1.5)
        mutate([tensors, weights, scalars, source, run.updater.optimizer.schedule.__dict__])
        is_changed.set()
        run.saver.finish()
    saved = newest(tmp_path / "r")
    into = copy.deepcopy(tensors)
    saved.load_tensors(into)
    for found, wanted in zip(leaves(into), leaves(expected[0]), strict=True):
        assert torch.equal(found, wanted)
    found = saved.scalars()
    assert {key: found[key] for key in ("updater", "source")} == expected[1]
    assert len(found["source"]["curriculum"]["chain_sum"]["answers"]) == 8 and "pending" in found["source"]
    again = AutoModelForCausalLM.from_pretrained(saved.folder).state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in expected[2].items())


def leaves(state):
    return (
        [state]
        if isinstance(state, torch.Tensor)
        else [leaf for value in state.values() for leaf in leaves(value)]
    )


def test_metadata_may_name_only_files_beside_it(tmp_path):
    folder = save(tmp_path, 1)
    os.mkfifo(tmp_path / "fifo")  # to open it would wait for ever
    path = folder / "state" / ".metadata"
    for name in ("../../fifo", str(tmp_path / "fifo"), "missing"):
        metadata = pickle.loads(path.read_bytes())
        for info in metadata.storage_data.values():
            object.__setattr__(info, "relative_path", name)
        path.write_bytes(pickle.dumps(metadata))
        with pytest.raises(UserError, match=r"names .* which is no file beside it"):
            checkpoint.Checkpoint(folder=folder, step=1).load_tensors(
                {"optimizer": {"moment": torch.zeros(2)}}
            )
