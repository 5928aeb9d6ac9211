"""The work that updates are compared on: completions that are there already, in groups that share a prompt.

`ragged` draws the lengths of completions evenly, `full` has all of them at their longest. Everyone gets the
same tokens and the same advantages. Nothing is run here.
"""

from dataclasses import asdict, dataclass

import torch


@dataclass(frozen=True)
class Work:
    shape: str  # full; all others draw their lengths
    num_prompts: int = 32
    group: int = 8
    prompt_tokens: tuple[int, int] = (128, 256)
    new_tokens: tuple[int, int] = (16, 512)
    vocabulary: int = 151_936
    shared_tokens: int = 0  # with which all prompts begin, such as a system message

    def prompts(self) -> list[list[int]]:
        generator = torch.Generator().manual_seed(7)
        low, high = (length - self.shared_tokens for length in self.prompt_tokens)
        shared = self._tokens(self.shared_tokens, generator)
        return [
            shared + self._tokens(int(torch.randint(low, high + 1, (), generator=generator)), generator)
            for _ in range(self.num_prompts)
        ]

    def completions(self) -> list[list[int]]:
        """Group after group."""
        generator = torch.Generator().manual_seed(8)
        low, high = self.new_tokens
        lengths = torch.randint(low, high + 1, (self.num_prompts * self.group,), generator=generator)
        if self.shape == "full":
            lengths = torch.full_like(lengths, high)
        return [self._tokens(int(length), generator) for length in lengths]

    def rewards(self) -> list[float]:
        generator = torch.Generator().manual_seed(9)
        return torch.rand(self.num_prompts * self.group, generator=generator).tolist()

    def advantages(self) -> torch.Tensor:
        rewards = torch.tensor(self.rewards()).view(-1, self.group)
        centred = rewards - rewards.mean(1, keepdim=True)
        return (centred / (rewards.std(1, keepdim=True) + 1e-4)).flatten()

    def _tokens(self, length: int, generator: torch.Generator) -> list[int]:
        return torch.randint(5, self.vocabulary, (length,), generator=generator).tolist()

    @property
    def tokens(self) -> int:
        """All tokens of all sequences, without padding; a prompt counts for every completion."""
        return self.group * sum(map(len, self.prompts())) + sum(map(len, self.completions()))

    def words(self) -> str:
        low, high = self.prompt_tokens
        return (
            f"{self.num_prompts} prompts of {low}-{high} tokens x {self.group} completions of "
            f"{self.new_tokens[0]}-{self.new_tokens[1]} tokens (ragged) or {self.new_tokens[1]} (full)"
        )


def work_of(values: dict) -> Work:
    """What `asdict` made, through JSON."""
    pairs = {key: tuple(values[key]) for key in ("prompt_tokens", "new_tokens")}
    return Work(**{**values, **pairs})


__all__ = ["Work", "asdict", "work_of"]
