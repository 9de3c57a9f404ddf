"""Running the model: backends over token trees, forward passes, kernels, and the scheduler of the shared batch."""
