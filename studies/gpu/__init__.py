"""Three Triton kernels of the routed experts' first product, beside the CUDA C++ that ships.

`python -m studies.gpu.bench` times them on a GPU, `python -m studies.gpu.compiled` says what they compile to.
"""
