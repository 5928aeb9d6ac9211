"""Groups of rollouts to an optimizer step: packing, experience, gradients."""
