"""The games: what they answer, players that always win, and the score of a random player."""

import random
from collections import Counter

import pytest

from whetstone.config import build
from whetstone.environments.games import GAMES, GuessNumber, MazeWalk, Wordle
from whetstone.environments.games.maze_walk import distances
from whetstone.environments.games.wordle import marks, read_guess, shipped_words, words_of
from whetstone.tasks.registry import make_task

SEEDS = 300
# Wins of the random player in 10,000 games, as docs/environments.md has them.
RANDOM_WINS = {"guess_number": 0.067, "wordle": 0.009, "maze_walk": 0.1}


def wins(name: str, player: str, seeds: int = SEEDS) -> int:
    game, num_wins = GAMES[name], 0
    for seed in range(seeds):
        environment = game()
        observation = environment.reset(seed)
        play = game.gold_player() if player == "gold" else game.random_player(seed)
        for _ in range(8):  # max_turns
            observation, reward, terminated, truncated, info = environment.step(play(observation))
            if terminated:
                assert info["correct"] == (reward == 1.0) and not truncated
                num_wins += info["correct"]
                break
        else:
            raise AssertionError("it never ended")
    return num_wins


@pytest.mark.parametrize("name", GAMES)
def test_the_gold_player_always_wins(name):
    seeds = 50 if name == "wordle" else SEEDS  # a slow test below has all words
    assert wins(name, "gold", seeds) == seeds


@pytest.mark.parametrize("name", GAMES)
def test_a_random_player_scores_what_the_docs_say(name):
    share = RANDOM_WINS[name]
    spread = (share * (1 - share) / SEEDS) ** 0.5
    assert abs(wins(name, "random") / SEEDS - share) < 3.5 * spread


@pytest.mark.parametrize("name", GAMES)
def test_an_episode_depends_on_its_seed_only(name):
    first, second = GAMES[name](), GAMES[name]()
    for seed in (5, 17, 5):
        assert first.reset(seed) == second.reset(seed)
        move = GAMES[name].random_player(seed)
        assert [first.step(move(""))] == [second.step(GAMES[name].random_player(seed)(""))]


@pytest.mark.parametrize("name", GAMES)
@pytest.mark.parametrize(
    "text", ["", "\x00", "[]", "9" * 5000, "[abcdé]", "²²²", "up" * 9000, "\ud800", "-" * 100, "None", "٣"]
)
def test_any_text_is_a_turn(name, text):
    game = GAMES[name]()
    game.reset(1)
    observation, reward, terminated, truncated, _ = game.step(text)
    assert observation and reward == 0.0 and not terminated and not truncated


@pytest.mark.parametrize(
    ("guess", "word", "expected"),
    [
        ("crane", "crane", "GGGGG"),
        ("crane", "brand", "XGGGX"),
        ("eerie", "where", "YXYXG"),  # three e in the guess, two in the word, one of them in its place
        ("allow", "llama", "YGYXX"),
        ("speed", "abide", "XXYXY"),
        ("lolly", "hello", "XYGGX"),
    ],
)
def test_marks_count_letters_that_occur_twice(guess, word, expected):
    assert marks(guess, word) == expected


def test_wordle_is_evaluated_on_words_that_it_does_not_train_on():
    config = build({"datasets": {"wordle": {}}})
    secrets = {}
    for split in ("train", "eval"):
        task = make_task(config, "wordle", config.tasks.datasets["wordle"], split)
        answers = [task.problem(index).answer for index in range(200)]
        assert all(answer["settings"]["split"] == split for answer in answers)
        game = Wordle(**answers[0]["settings"])  # as the episode's process constructs it
        for answer in answers:
            game.reset(answer["seed"])
            assert game.word in game.candidates
        secrets[split] = set(game.candidates)
    assert not secrets["train"] & secrets["eval"]
    assert secrets["train"] | secrets["eval"] == set(shipped_words())
    assert len(secrets["eval"]) == 123  # a fifth of 615
    reordered = words_of(tuple(reversed(shipped_words())), "eval")
    assert set(reordered) == secrets["eval"]
    for one in (("crane",), ("crane", "crane")):
        assert words_of(one, "eval") == words_of(one, "train") == one
    assert {len(words_of(("crane", "trace"), split)) for split in ("train", "eval")} == {1}


def test_wordles_answer_has_the_documented_format():
    game = Wordle(max_guesses=2, letter_reward=0.5)
    game.reset(0)
    game.word = "brand"
    assert game.step("I think [Crane].")[0] == "C R A N E\nX G G G X\nGuesses left: 1"
    observation, reward, terminated, _, info = game.step("[zebra]")
    assert observation == "Z E B R A\nX X Y Y Y\nThe word was BRAND."
    assert (reward, terminated, info) == (0.5 * 3 / 5, True, {"correct": False})


def test_the_guess_is_the_last_in_brackets():
    assert read_guess("First [crane], no: [Brand]. Other words here") == "brand"
    assert read_guess("I say crane or house") == "house"
    assert read_guess("no word of that length") is None
    assert read_guess("elephants [toolong] [abc]") is None


@pytest.mark.slow
def test_the_gold_player_finds_every_word_of_the_list():
    guesses: Counter[int] = Counter()
    for word in shipped_words():
        game = Wordle()
        observation = game.reset(0)
        game.word = word
        play = Wordle.gold_player()
        while True:
            observation, reward, terminated, _, _ = game.step(play(observation))
            if terminated:
                break
        assert reward == 1.0, word
        guesses[game.num_guesses] += 1
    assert max(guesses) <= 5


def test_the_word_list_is_clean():
    assert len(shipped_words()) == len(set(shipped_words())) == 615
    assert all(len(word) == 5 and word.isascii() and word.islower() for word in shipped_words())


def test_mazes_are_solvable_within_their_steps():
    dice = random.Random(0)
    for seed in range(200):
        width, height = dice.randint(1, 9), dice.randint(2, 9)
        game = MazeWalk(width, height, min_distance=3, max_distance=7, max_steps=7)
        game.reset(seed)
        steps = distances(game.rows, game.position)
        assert len(steps) == width * height  # every cell can be reached
        assert min(3, max(steps.values())) <= steps[game.exit] <= 7
        assert {row[0] + row[-1] for row in game.rows} == {"##"}


def test_a_wall_costs_a_step_and_stops():
    game = MazeWalk(1, 3, min_distance=2, max_distance=2, max_steps=3)
    game.reset(0)
    position = game.position
    observation, *_ = game.step("left")
    assert observation.startswith("There is a wall. Steps left: 2") and game.position == position
    for _ in range(2):
        observation, reward, terminated, _, _ = game.step(MazeWalk.gold_player()(observation))
    assert (observation, reward, terminated) == ("You are out.", 1.0, True)


@pytest.mark.parametrize(
    ("game", "settings"),
    [
        (GuessNumber, {"low": 3, "high": 3}),
        (Wordle, {"word_list": ["four"]}),
        (Wordle, {"word_list": []}),
        (Wordle, {"letter_reward": 1.0}),
        (Wordle, {"split": "test"}),
        (MazeWalk, {"max_steps": 3}),
        (MazeWalk, {"width": 1000}),
        (MazeWalk, {"width": 1, "height": 1}),
    ],
)
def test_settings_that_nobody_could_play_are_refused(game, settings):
    with pytest.raises(ValueError):
        game(**settings)
