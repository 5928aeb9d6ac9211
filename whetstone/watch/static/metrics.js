// The curves that are shown first: metric -> its title and what it tells.

export const CURVES = {
  reward: ["Reward", "What is maximized."],
  "completions/mean_length": ["Completion length", "Tokens in a completion, on average."],
  "episodes/mean_turns": ["Turns", "How often the policy spoke in an episode."],
  "episodes/tool_calls": ["Tool calls", "Of an episode."],
  "episodes/tool_errors": ["Tool errors", "Calls of an episode that failed."],
  "episodes/idle_s": ["Waiting for environments", "Seconds of a step in which the engine had nothing to sample."],
  entropy: ["Entropy", "How undecided the policy is at a token; at 0 it explores no more."],
  kl: ["KL to the reference", "How far the policy has moved from where it began."],
  frac_reward_zero_std: ["Prompts without signal", "Fraction of prompts whose completions have equal rewards: no advantage."],
  "completions/clipped_ratio": ["Truncated", "Fraction of completions cut off at max_completion_length."],
  "clip_ratio/region_mean": ["Clip ratio", "Fraction of tokens whose ratio was clipped."],
  loss: ["Loss", "Of the policy; its size says little."],
  grad_norm: ["Gradient norm", "Before it is clipped."],
  "sampling/sampling_logp_difference/mean": ["Sampler against trainer",
    "How far the engine's logprobs are from the update's: near 0 is healthy, unless async_rollouts."],
  explained_variance: ["Critic", "Fraction of the returns' variance that it explains; below 0 it harms."],
  tokens_per_s: ["Tokens per second", "Sampled tokens over the time of sampling and updating."],
  mfu: ["Model FLOPs utilization", "Fraction of the device's peak that the update needed."],
  peak_memory_gb: ["Peak memory", "GB in a step, of the first rank's GPU (without one: of its process)."],
};
const SHARES = ["frac_reward_zero_std", "frac_answers_identical", "completions/clipped_ratio", "clip_ratio/region_mean",
  "mfu", "accuracy", "gpu/utilization_ratio"];

export const isShare = (key) => SHARES.includes(key) || key.startsWith("accuracy/");
