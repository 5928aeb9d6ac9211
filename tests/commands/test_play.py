"""`whet play`: a person or a player in the place of the model, from the terminal or a pipe."""

import io
import sys
from pathlib import Path

import pytest

from tests.environments import hostile_env
from whetstone.__main__ import run
from whetstone.commands.play import play_config

HOSTILE = f"{Path(hostile_env.__file__)}:Hostile"
FAST = ["reward_workers=1", "eval_num_samples=0"]


@pytest.fixture
def play(monkeypatch, capsys, tmp_path):
    """Run the command on piped input: exit code, standard output, standard error."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    def run_play(*argv: str, typed: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        code = run(["play", *argv, *FAST])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run_play


def test_a_person_plays_what_the_model_would_see(play):
    code, out, _ = play("guess_number", "low=1", "high=3", "max_guesses=2", typed="2\n1\n3\n")
    assert code == 0
    assert out.startswith("Guess my number from 1 to 3.\n> 2\n")
    assert out.count("-- reward") == 1
    finished = "Right.\n-- reward 1 (correct 1, accuracy 1); finish: stop" in out
    assert finished or "It was " in out


def test_a_turn_of_several_lines_and_the_raw_prompt(play):
    typed = '"""I think\nit is 2\n"""\n'
    code, out, _ = play("guess_number", "low=2", "high=3", "max_guesses=1", "--raw", typed=typed)
    assert code == 0
    assert out.startswith("<|user|>Guess my number from 2 to 3.<|end|><|assistant|>\n")
    assert "I think\nit is 2\n" in out and "-- reward" in out


def test_control_characters_of_observations_are_escaped(play):
    code, out, _ = play(HOSTILE, typed="\x1b[5mhello\n")
    assert code == 0 and "\x1b" not in out and "\x07" not in out
    assert "Say \\x1b[31mred\\x1b[0m.\\r" in out
    assert "\\x1b]0;title\\x07 you said: " in out and "-- reward 0.5" in out


def test_a_pipe_that_ends_early_ends_the_session(play):
    code, out, _ = play("wordle", typed="[crane]\n")
    assert code == 0 and "The input has ended; the episode is not scored." in out


def test_a_player_is_scored_with_an_interval(play):
    code, out, _ = play("maze_walk", "--player", "gold", "--episodes", "20")
    assert code == 0 and "won 100.0% (83.9% to 100.0%)" in out  # Wilson's interval of 20 of 20


@pytest.mark.slow
@pytest.mark.parametrize(("player", "won"), [("gold", "won 100.0%"), ("random", "won ")])
def test_players_are_scored_with_an_interval(play, player, won):
    code, out, _ = play("maze_walk", "--player", player, "--episodes", "20", "--seed", "4")
    [line] = out.strip().splitlines()
    assert code == 0 and line.startswith("20 episodes: reward ") and won in line
    assert line.endswith("95 % intervals.")
    assert play("maze_walk", "--player", player, "--episodes", "20", "--seed", "4")[1] == out  # repeatable


@pytest.mark.slow
def test_a_configuration_and_an_ordinary_task_can_be_played(play):
    code, out, _ = play("guess", "--player", "gold")
    assert code == 0 and "Guess my number from 1 to 3." in out and "> 2" in out
    code, out, _ = play("chain_sum", "--player", "gold")
    assert code == 0 and "correct 1" in out
    code, out, _ = play("chain_sum", "--player", "random")
    assert code == 0 and "correct 0" in out


def test_what_cannot_be_played_is_said(play):
    for argv, part in (
        ([], "Name what to play"),
        (["wordl"], "wordl"),
        ([HOSTILE, "--player", "gold"], "has no gold player"),
        (["wordle", "max_guesses=0"], "max_guesses must be at least 1"),
    ):
        code, _, err = play(*argv)
        assert code == 2 and part in err, err


def test_a_seed_selects_the_problems():
    assert play_config("wordle", [], 7).tasks.dataset_seed == 7
    assert play_config("wordle", [], None).tasks.dataset_seed == 1
