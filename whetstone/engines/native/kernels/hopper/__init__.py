"""CUDA C++ kernels for Hopper GPUs. The engine runs without this folder, on Triton and the libraries."""
