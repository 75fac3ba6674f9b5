"""The engine on a GPU: Triton kernels for paged attention (`kernels`), what stands in for them
where they fail their self-test (`attention`), and the decoder around both (`decoder`).

Without a GPU the kernels run under Triton's interpreter, and the decoder on a CPU: that is how
they are tested."""
