"""Our inference engine: a server of its own that speaks the OpenAI API and meters its own time.

Read `engine.py` for the step loop, `scheduler.py` for who computes next, `account.py` for what a
step costs whom, `kv.py` for what is kept between requests, `native/step.cpp` for the arithmetic.
Only `attention`, `model`, `runner` and `sampler` know torch.
"""
