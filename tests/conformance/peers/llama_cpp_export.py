"""Greedy answers of a GGUF file by llama.cpp, run by the Python of an environment with llama-cpp-python; nothing of
Espalier is imported.

Input: a JSON object with `file`, `conversations` (messages and tools) and `max_tokens`. Output: the version, and prompt
and answer of each conversation as token ids. The prompt is written by the file's own chat template.
"""

import json
import sys
from importlib.metadata import version


def answers(file: str, conversations: list[dict], max_tokens: int) -> list[dict]:
    from llama_cpp import Llama
    from llama_cpp.llama_chat_format import Jinja2ChatFormatter

    model = Llama(model_path=file, n_ctx=1024, verbose=False, seed=0)
    end = model.token_eos()
    formatter = Jinja2ChatFormatter(
        template=model.metadata["tokenizer.chat_template"],
        eos_token=model.detokenize([end], special=True).decode(),
        bos_token=model.detokenize([model.token_bos()], special=True).decode(),
    )
    found = []
    for talk in conversations:
        text = formatter(messages=talk["messages"], tools=talk["tools"] or None).prompt
        prompt = model.tokenize(text.encode(), add_bos=False, special=True)
        model.reset()
        answer = []
        for token in model.generate(prompt, temp=0.0, repeat_penalty=1.0):
            answer.append(token)
            if token == end or len(answer) == max_tokens:
                break
        found.append({"prompt": prompt, "answer": answer})
    return found


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    json.dump({"version": f"llama-cpp-python {version('llama_cpp_python')}", "answers": answers(**asked)}, sys.stdout)
