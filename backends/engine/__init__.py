"""Our inference engine: a server of its own that speaks the OpenAI API and meters its own time.

Read `engine.py` for the step loop, `scheduler.py` for who computes next, `account.py` for what a
step costs whom. Only `attention`, `model`, `runner` and `sampler` know torch.
"""
