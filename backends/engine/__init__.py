"""Our inference engine: a server of its own that speaks the OpenAI API and meters its own time.

Read `engine.py` for the step loop, `scheduler.py` for who computes next, `account.py` for what a
step costs whom. `server`, `wire` and `render` are the API; `chat`, `tools` and `toolcalls` what is
said to the model and how its calls are read; `guided` what it may say; `kv` what is kept between
requests, `spec` and `draft` guesses at what follows, `native/step.cpp` the arithmetic, `gpu/` the
same on a GPU, `bench` and `roofline` how fast it is and could be. Only `attention`, `bench`,
`draft`, `gpu/`, `model`, `roofline`, `runner` and `sampler` know torch.
"""
